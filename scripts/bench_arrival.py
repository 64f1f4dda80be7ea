"""Latency of running sequences during the prefill of a long prompt, with and without chunking.

    python scripts/bench_arrival.py --model MODEL_FOLDER --cores 1 --prompt-len 4096 \\
        --max-num-batched-tokens 512

--running sequences decode; then a prompt of --prompt-len random tokens arrives. Two engines take
turns. One prefills the prompt in chunks, each in a mixed dispatch with a decode step of the others;
one without `rollout.prefix_cache` prefills it at once. Times are CPU-seconds on CPU, wall seconds
elsewhere. Prints one JSON line: per engine, medians over the rounds of the longest inter-token
latency of a running sequence, of the time to first token of the prompt, and of the number of tokens
that the others sample until then.
"""

import argparse
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
    parser.add_argument("--model", required=True, help="Hugging Face model folder, or package:NAME")
    parser.add_argument("--prompt-len", type=int, default=4096)
    parser.add_argument("--running", type=int, default=8, help="sequences that decode")
    parser.add_argument("--max-num-batched-tokens", type=int, default=2048)
    parser.add_argument("--steps-per-dispatch", type=int, default=8)
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
    from sharding import make_mesh
    from sharding.rules import DECODE

    clock = time.process_time if jax.default_backend() == "cpu" else time.perf_counter
    with jax.set_mesh(make_mesh(fsdp=-1)):
        cfg, params = load_model(resolve_model(args.model), rules=DECODE, dtype=args.dtype)
        engines = {}
        for name, chunked in {"in_parts": True, "at_once": False}.items():
            rollout = RolloutConfig(
                max_num_seqs=args.running + 1,
                max_num_batched_tokens=args.max_num_batched_tokens,
                steps_per_dispatch=args.steps_per_dispatch,
                prefix_cache=chunked,
            )
            engines[name] = PagedEngine(
                cfg,
                rollout,
                rules=DECODE,
                dtype=params.embed.dtype,
                max_len=args.prompt_len + args.steps_per_dispatch + 1,
            )
            engines[name].warmup(params)
        results = {name: [] for name in engines}
        for seed in range(args.rounds + 1):
            for name, engine in engines.items():
                results[name].append(arrival(args, cfg.V, engine, params, clock, seed))
    names = "longest_gap_s", "first_token_s", "tokens_meanwhile"
    return {"config": vars(args)} | {
        name: {
            what: round(statistics.median(row[i] for row in rows[1:]), 4)
            for i, what in enumerate(names)
        }
        for name, rows in results.items()
    }


def arrival(args, n_vocab: int, engine, params, clock, seed: int) -> tuple[float, float, int]:
    """(longest inter-token latency of the others, time to first token, tokens of the others)."""
    from jaxrl.engine.api import Request

    rng = np.random.default_rng(seed)

    def submit(n: int, max_tokens: int, prompt_id: int) -> int:
        tokens = rng.integers(2, n_vocab, n, dtype=np.int32)
        return engine.submit(
            Request(tokens, max_tokens, prompt_id=prompt_id, seed=seed, ignore_stop=True)
        )

    engine.set_version(seed)
    slots = [submit(16, args.prompt_len - 16, i) for i in range(args.running)]
    engine.generate(params)
    # Longer than one dispatch, so that the request is unfinished after its first tokens.
    slots.append(submit(args.prompt_len, args.steps_per_dispatch + 1, args.running))
    start = last = clock()
    longest, n_others, n_new = 0.0, 0, {}
    while slots[-1] not in n_new:
        n_new = {one.slot: len(one.tokens) for one in engine.generate(params)}
        now = clock()
        longest, last = max(longest, now - last), now
        n_others += sum(n_new.values()) - n_new.get(slots[-1], 0)
    for slot in slots:
        engine.free(slot)
    return longest, last - start, n_others


if __name__ == "__main__":
    main()
