"""Savings of prefix caching: the same conversations with and without rollout.prefix_cache.

    python scripts/bench_prefix.py --model MODEL_FOLDER --cores 1

In every turn each conversation continues with all its tokens so far and --new-len random tokens.
Then --samples responses of --response-len tokens are sampled, the first of which becomes part of
the conversation. So the prompt of a turn starts with that of the turn before, and the samples share
a prompt. The engines take turns, so that both run under the same machine load. Times are
CPU-seconds on CPU, wall seconds elsewhere. Prints one JSON line: per engine the computed prompt
tokens and the seconds, over all turns and per turn, medians over the rounds, and the fraction of
conversations in which both engines sampled the same tokens.
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
    parser.add_argument("--model", required=True, help="Hugging Face model folder")
    parser.add_argument("--conversations", type=int, default=8)
    parser.add_argument("--turns", type=int, default=4)
    parser.add_argument("--samples", type=int, default=1, help="responses per turn")
    parser.add_argument(
        "--system-len", type=int, default=64, help="tokens of the shared system prompt"
    )
    parser.add_argument("--new-len", type=int, default=100, help="new tokens per turn")
    parser.add_argument("--response-len", type=int, default=32)
    parser.add_argument(
        "--rounds", type=int, default=3, help="measured rounds, after one warm-up round"
    )
    parser.add_argument("--max-num-seqs", type=int, default=8)
    parser.add_argument("--cores", type=int, default=0, help="pin to this many cores; 0 = all")
    parser.add_argument("--dtype", default="float32")
    return parser.parse_args()


def bench(args: argparse.Namespace) -> dict:
    import jax  # after the CPU affinity is set

    from jaxrl.config.keys import RolloutConfig
    from jaxrl.engine.engine import PagedEngine
    from jaxrl.models.files.hf_load import load_model
    from sharding import make_mesh
    from sharding.rules import DECODE

    max_len = args.system_len + args.turns * (args.new_len + args.response_len)
    clock = time.process_time if jax.default_backend() == "cpu" else time.perf_counter
    with jax.set_mesh(make_mesh(fsdp=-1)):
        cfg, params = load_model(args.model, rules=DECODE, dtype=args.dtype)
        rollout = RolloutConfig(max_num_seqs=args.max_num_seqs, max_num_batched_tokens=1024)
        engines = {
            name: PagedEngine(
                cfg,
                dataclasses.replace(rollout, prefix_cache=name == "reuse"),
                rules=DECODE,
                dtype=params.embed.dtype,
                max_len=max_len,
            )
            for name in ("reuse", "anew")
        }
        for engine in engines.values():
            engine.warmup(params)
        runs = {name: [] for name in engines}
        same: list[bool] = []
        for version in range(args.rounds + 1):  # empties the prefix cache before each round
            tokens = {}
            for name, engine in engines.items():
                engine.set_version(version)
                rng = np.random.default_rng(version)
                turns, tokens[name] = conversations(args, cfg.V, engine, params, rng, clock)
                runs[name].append(turns)
            same += [a == b for a, b in zip(tokens["reuse"], tokens["anew"], strict=True)]
    report = {name: summary(turns[1:]) for name, turns in runs.items()}
    ratio = {k: round(report["anew"][k] / report["reuse"][k], 3) for k in ("prefill_tokens", "s")}
    equal = sum(same) / len(same)
    return {"config": vars(args), **report, "anew_over_reuse": ratio, "equal_conversations": equal}


def conversations(args, n_vocab: int, engine, params, rng, clock) -> tuple[list[tuple], list]:
    """(computed prompt tokens, cached prompt tokens, seconds) per turn, and all tokens."""
    system = rng.integers(2, n_vocab, args.system_len, dtype=np.int32)
    tokens = [system for _ in range(args.conversations)]
    turns = []
    for _ in range(args.turns):
        new = rng.integers(2, n_vocab, (args.conversations, args.new_len), dtype=np.int32)
        prompts = [np.concatenate([*parts]) for parts in zip(tokens, new, strict=True)]
        engine.take_stats()
        start = clock()
        responses = generate(args, engine, params, prompts)
        seconds, stats = clock() - start, engine.take_stats()
        turns.append((stats.n_prefill_tokens, stats.n_cached_tokens, seconds))
        tokens = [np.append(p, r).astype(np.int32) for p, r in zip(prompts, responses, strict=True)]
    return turns, [row.tolist() for row in tokens]


def generate(args, engine, params, prompts: list[np.ndarray]) -> list[list[int]]:
    """The first of --samples responses to each prompt."""
    from jaxrl.engine.api import Request

    tokens: dict[int, list[int]] = {}
    firsts = []
    for i, prompt in enumerate(prompts):
        for sample in range(args.samples):
            request = Request(
                prompt, args.response_len, prompt_id=i, sample=sample, ignore_stop=True
            )
            slot = engine.submit(request)
            tokens[slot] = []
            firsts += [slot] * (sample == 0)
    while engine.n_unfinished:
        for one in engine.generate(params):
            tokens[one.slot] += one.tokens.tolist()
    return [tokens[slot] for slot in firsts]


def summary(rounds: list[list[tuple]]) -> dict:
    """Medians over the rounds."""
    by_turn = [
        [statistics.median(column) for column in zip(*turn, strict=True)]
        for turn in zip(*rounds, strict=True)
    ]
    return {
        "prefill_tokens": sum(turn[0] for turn in by_turn),
        "shared_tokens": sum(turn[1] for turn in by_turn),
        "s": round(statistics.median(sum(turn[2] for turn in turns) for turns in rounds), 3),
        "s_per_turn": [round(turn[2], 3) for turn in by_turn],
    }


if __name__ == "__main__":
    main()
