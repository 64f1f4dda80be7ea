"""What keys of the rollout are worth: the same requests with and without them, side by side.

    python scripts/bench_options.py --model MODEL_FOLDER --cores 1 --text repeat spec_tokens=4 dtype=int8,kv_dtype=int8

Every argument behind the options is an engine of its own with those keys of config.rollout, beside one without
any. Prompts are random tokens: `--text random` as they are, `--text repeat` a passage of --period of them over and
over, which a model of some size goes on with. Responses have --response-len tokens. Engines take turns, so that all
see the same machine; times are CPU-seconds on CPU, wall seconds elsewhere. Prints one JSON line: per engine
the tokens per second (medians over the rounds), their ratio to the engine without keys, the part of the drafts that
was sampled, and the part of the responses that are those of the engine without keys.
"""

import argparse
import dataclasses
import json
import os
import statistics
import time

import numpy as np


def main() -> None:
    args = parse_args()
    if args.cores:
        os.sched_setaffinity(0, sorted(os.sched_getaffinity(0))[-args.cores :])
    print(json.dumps(bench(args)))


def parse_args() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=(__doc__ or "").split("\n")[0])
    parser.add_argument(
        "variants", nargs="+", help="keys of an engine: spec_tokens=4,kv_dtype=int8"
    )
    parser.add_argument("--model", required=True, help="Hugging Face model folder, or package:NAME")
    parser.add_argument("--text", choices=("repeat", "random"), default="repeat")
    parser.add_argument("--requests", type=int, default=8, help="all decoded together")
    parser.add_argument("--prompt-len", type=int, default=96)
    parser.add_argument("--period", type=int, default=24, help="tokens that are repeated")
    parser.add_argument("--response-len", type=int, default=96)
    parser.add_argument("--temperature", type=float, default=1.0)
    parser.add_argument("--rounds", type=int, default=3, help="that count, after one that does not")
    parser.add_argument("--cores", type=int, default=0, help="pin to so many cores; 0 = all")
    parser.add_argument("--dtype", default="float32")
    return parser.parse_args()


def bench(args: argparse.Namespace) -> dict:
    import jax  # after the cores are chosen

    from jaxrl.config.keys import RolloutConfig
    from jaxrl.engine.engine import PagedEngine
    from jaxrl.models.files.hf_load import load_model
    from jaxrl.models.files.source import resolve_model
    from jaxrl.models.quantize import quantize_int8
    from sharding import make_mesh
    from sharding.rules import DECODE

    clock = time.process_time if jax.default_backend() == "cpu" else time.perf_counter
    base = RolloutConfig(max_num_seqs=args.requests, max_num_batched_tokens=1024)
    with jax.set_mesh(make_mesh(fsdp=-1)):
        cfg, params = load_model(resolve_model(args.model), rules=DECODE, dtype=args.dtype)
        engines = {}
        for text in ("", *args.variants):
            rollout = dataclasses.replace(base, **keys(text))
            weights = quantize_int8(params, args.dtype) if rollout.dtype == "int8" else params
            engine = PagedEngine(
                cfg,
                rollout,
                rules=DECODE,
                dtype=params.embed.dtype,
                max_len=args.prompt_len + args.response_len,
            )
            engine.warmup(weights)
            engines[text] = engine, weights
        rates, drafts = {text: [] for text in engines}, {text: [0, 0] for text in engines}
        same = {text: [] for text in engines}
        for version in range(args.rounds + 1):  # of the weights: a round finds nothing of the last
            responses = {}
            for text, (engine, weights) in engines.items():
                engine.set_version(version)
                engine.take_stats()
                start = clock()
                responses[text] = answer(args, cfg.V, engine, weights, version)
                seconds, stats = clock() - start, engine.take_stats()
                if version:
                    rates[text].append(args.requests * args.response_len / seconds)
                    drafts[text][0] += stats.n_accepted_tokens
                    drafts[text][1] += stats.n_draft_tokens
                pairs = zip(responses[text], responses[""], strict=True)
                same[text] += [a == b for a, b in pairs]
    rate = {text: statistics.median(found) for text, found in rates.items()}
    return {
        "config": vars(args),
        "engines": {
            text or "without": {
                "tokens_per_s": round(rate[text], 2),
                "ratio": round(rate[text] / rate[""], 3),
                "draft_acceptance": round(drafts[text][0] / max(drafts[text][1], 1), 3),
                "equal_responses": sum(same[text]) / len(same[text]),
            }
            for text in engines
        },
    }


def keys(text: str) -> dict:
    pairs = [pair.split("=") for pair in text.split(",") if pair]
    return {name: int(value) if value.isdigit() else value for name, value in pairs}


def answer(args, n_vocab: int, engine, params, seed: int) -> list[list[int]]:
    from jaxrl.config.keys import SamplingConfig
    from jaxrl.engine.api import Request

    rng = np.random.default_rng(seed)
    period = args.period if args.text == "repeat" else args.prompt_len
    sampling = SamplingConfig(temperature=args.temperature)
    made: dict[int, list[int]] = {}
    for i in range(args.requests):
        prompt = np.resize(rng.integers(2, n_vocab, period, dtype=np.int32), args.prompt_len)
        request = Request(
            prompt, args.response_len, sampling, prompt_id=i, seed=seed, ignore_stop=True
        )
        made[engine.submit(request)] = []
    while engine.n_unfinished:
        for one in engine.generate(params):
            made[one.slot] += one.tokens.tolist()
    return list(made.values())


if __name__ == "__main__":
    main()
