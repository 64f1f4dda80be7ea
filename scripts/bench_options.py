"""Speed of rollout options: the same requests through engines with and without them.

    python scripts/bench_options.py --model MODEL_FOLDER --cores 1 --text repeat \\
        spec_tokens=4 dtype=int8,kv_dtype=int8

Every positional argument is an engine with these keys of config.rollout; one more engine has none.
Prompts are random tokens: unchanged with `--text random`, and with `--text repeat` a passage of
--period tokens that repeats, which a model of sufficient size continues. Responses have
--response-len tokens. The engines take turns, so that all run under the same machine load. Times
are CPU-seconds on CPU, wall seconds elsewhere. Prints one JSON line: per engine the tokens per
second (medians over the rounds), their ratio to the engine without keys, the acceptance rate of
draft tokens, and the fraction of responses that equal those of the engine without keys.
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
        "variants", nargs="+", help="keys of one engine, such as spec_tokens=4,kv_dtype=int8"
    )
    parser.add_argument("--model", required=True, help="Hugging Face model folder, or package:NAME")
    parser.add_argument("--text", choices=("repeat", "random"), default="repeat")
    parser.add_argument(
        "--requests", type=int, default=8, help="number of requests, decoded in one batch"
    )
    parser.add_argument("--prompt-len", type=int, default=96)
    parser.add_argument("--period", type=int, default=24, help="length of the repeated passage")
    parser.add_argument("--response-len", type=int, default=96)
    parser.add_argument("--temperature", type=float, default=1.0)
    parser.add_argument(
        "--rounds", type=int, default=3, help="measured rounds, after one warm-up round"
    )
    parser.add_argument("--cores", type=int, default=0, help="pin to this many cores; 0 = all")
    parser.add_argument("--dtype", default="float32")
    return parser.parse_args()


def bench(args: argparse.Namespace) -> dict:
    import jax  # after the CPU affinity is set

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
        for version in range(args.rounds + 1):  # empties the prefix cache before each round
            responses = {}
            for text, (engine, weights) in engines.items():
                engine.set_version(version)
                engine.take_stats()
                start = clock()
                responses[text] = generate(args, cfg.V, engine, weights, version)
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


def generate(args, n_vocab: int, engine, params, seed: int) -> list[list[int]]:
    from jaxrl.config.keys import SamplingConfig
    from jaxrl.engine.api import Request

    rng = np.random.default_rng(seed)
    period = args.period if args.text == "repeat" else args.prompt_len
    sampling = SamplingConfig(temperature=args.temperature)
    tokens: dict[int, list[int]] = {}
    for i in range(args.requests):
        prompt = np.resize(rng.integers(2, n_vocab, period, dtype=np.int32), args.prompt_len)
        request = Request(
            prompt, args.response_len, sampling, prompt_id=i, seed=seed, ignore_stop=True
        )
        tokens[engine.submit(request)] = []
    while engine.n_unfinished:
        for one in engine.generate(params):
            tokens[one.slot] += one.tokens.tolist()
    return list(tokens.values())


if __name__ == "__main__":
    main()
