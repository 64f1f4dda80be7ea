"""Useful tokens per CPU-second of the schedules sync and partial, on long-tailed responses.

    python scripts/bench_schedule.py --cores 1 --json

Every step needs the responses to `--prompts` prompts, `--samples` each. Their lengths are
log-normal, and the longest has `--longest` times the mean. sync starts the prompts of a step at its
beginning and waits for all responses. partial has the prompts of 1 + `--max-staleness` steps in
flight. When a step ends, unfinished responses change to the next policy version, for which their KV
is computed again, or kept with `--keep-kv`. There is no update: the same weights serve as all
versions.

A token is useful if it is in a response of one of the steps. Prompts and recomputed tokens are not
counted. Both schedules sample the same tokens, in the same steps. The workload has a seed, and no
prompts after the last step. The model has the shape `--model` with random weights.

Prints a table, or with --json one line:

    {"schedules": {"sync": {"tokens_per_cpu_s": ..., ...}, "partial": {...}}, "ratio": ..., ...}
"""

import argparse
import json
import os
import time
from collections.abc import Callable
from typing import Any

import numpy as np
from make_workload import lengths


def main() -> None:
    args = parse_args()
    if args.cores:
        os.sched_setaffinity(0, sorted(os.sched_getaffinity(0))[-args.cores :])
    result = bench(args)
    if args.json:
        print(json.dumps(result))
        return
    for name, values in result["schedules"].items():
        print(name.ljust(8), *(f"{key} {value:<10.5g}" for key, value in values.items()))
    print(f"partial / sync: {result['ratio']:.2f}")


def parse_args() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=(__doc__ or "").split("\n")[0])
    parser.add_argument("--json", action="store_true", help="print one JSON line")
    parser.add_argument(
        "--model", default="SmolLM2-135M-Instruct", help="config.json, or a name in configs/shapes"
    )
    parser.add_argument("--steps", type=int, default=6)
    parser.add_argument("--prompts", type=int, default=8, help="prompts of a step")
    parser.add_argument("--samples", type=int, default=2, help="responses per prompt")
    parser.add_argument("--prompt-len", type=int, default=48)
    parser.add_argument("--mean-len", type=float, default=96, help="mean response length, tokens")
    parser.add_argument("--longest", type=float, default=9.0, help="longest length / mean length")
    parser.add_argument("--sigma", type=float, default=1.6, help="of the logarithm of the length")
    parser.add_argument("--max-staleness", type=int, default=1, help="of partial")
    parser.add_argument("--keep-kv", action="store_true", help="partial keeps the KV")
    parser.add_argument("--steps-per-dispatch", type=int, default=16)
    parser.add_argument("--dtype", default="float32")
    parser.add_argument("--seed", type=int, default=2)
    parser.add_argument("--cores", type=int, default=0, help="pin to this many cores; 0 = all")
    return parser.parse_args()


def bench(args: argparse.Namespace) -> dict[str, Any]:
    import jax  # after the CPU affinity is set

    from jaxrl.config.keys import RolloutConfig
    from jaxrl.engine.engine import PagedEngine
    from jaxrl.models.decoder import init_model
    from jaxrl.planner.model_shape import model_shape
    from jaxrl.runtime.host_memory import keep_freed_memory
    from sharding import make_mesh
    from sharding.rules import DECODE, TRAIN

    if jax.default_backend() == "cpu":
        keep_freed_memory()
    lens = lengths(
        np.random.default_rng(args.seed),
        (args.steps, args.prompts, args.samples),
        mean=args.mean_len,
        longest=round(args.longest * args.mean_len),
        sigma=args.sigma,
    )
    n_started = (1 + args.max_staleness) * args.prompts * args.samples
    with jax.set_mesh(make_mesh(fsdp=-1)):
        cfg = model_shape(args.model, option="--model")
        params = init_model(cfg, seed=0, rules=TRAIN, dtype=args.dtype)
        engine = PagedEngine(
            cfg,
            RolloutConfig(
                max_num_seqs=n_started,
                max_num_batched_tokens=512,
                steps_per_dispatch=args.steps_per_dispatch,
            ),
            rules=DECODE,
            dtype=args.dtype,
            max_len=args.prompt_len + int(lens.max()),
        )
        engine.warmup(params)
        schedules = {
            "sync": run(engine, params, lens, args, max_staleness=0),
            "partial": run(engine, params, lens, args, max_staleness=args.max_staleness),
        }
    rates = {name: values["tokens_per_cpu_s"] for name, values in schedules.items()}
    return {
        "schedules": schedules,
        "ratio": rates["partial"] / rates["sync"],
        "longest_per_mean": float(lens.max() / lens.mean()),
        "tokens": int(lens.sum()),
        "config": vars(args),
        "jax": jax.__version__,
        "device": jax.devices()[0].device_kind,
    }


def run(engine, params, lens: np.ndarray, args: argparse.Namespace, *, max_staleness: int):
    """All steps of one schedule: rates, and what the engine computed."""
    from jaxrl.rollout.loop import RolloutLoop, SingleTurnRunner
    from jaxrl.rollout.schedule.buffer import GroupBuffer

    buffer = GroupBuffer(
        args.prompts,
        max_started=(1 + max_staleness) * args.prompts,
        max_staleness=max_staleness,
        arrival=False,
    )
    buffer.waiting.extend(groups(lens, args, engine.cfg.V))
    runner = SingleTurnRunner(engine, request_of(lens), lambda tokens: "")
    loop = RolloutLoop(runner, n=args.samples, keep_kv=args.keep_kv)
    engine.take_stats()
    wall, cpu, n_tokens, ages = time.perf_counter(), time.process_time(), 0, []
    for step in range(args.steps):
        buffer.start(step)
        loop.resume(step, buffer.started)
        while (batch := buffer.next_batch(step)) is None:
            for group in loop.dispatch(params):
                buffer.arrive(group)
        buffer.take(batch)
        n_tokens += sum(len(r.tokens) for group in batch for r in group.responses)
        ages += [step - r.versions[0] for group in batch for r in group.responses]
    wall, cpu = time.perf_counter() - wall, time.process_time() - cpu
    assert n_tokens == lens.sum(), "a response does not have its length"
    stats = engine.take_stats()
    return {
        "tokens_per_cpu_s": n_tokens / cpu,
        "tokens_per_s": n_tokens / wall,
        "cpu_s": cpu,
        "decode_steps": stats.n_steps,
        "prefill_tokens": stats.n_prefill_tokens,
        "staleness_mean": float(np.mean(ages)),
        "staleness_max": int(max(ages)),
    }


def groups(lens: np.ndarray, args: argparse.Namespace, n_vocab: int) -> list:
    """One group per prompt, of random tokens, in the order of the steps."""
    from jaxrl.rollout.schedule.buffer import PromptGroup
    from jaxrl.types import Prompt

    tokens = np.random.default_rng(args.seed).integers(
        n_vocab, size=(args.steps * args.prompts, args.prompt_len), dtype=np.int32
    )
    prompts = [Prompt(i, (), row, answer="") for i, row in enumerate(tokens)]
    return [
        PromptGroup(
            prompt,
            seed=args.seed,
            draw=prompt.id // args.prompts,
            index=prompt.id % args.prompts,
        )
        for prompt in prompts
    ]


def request_of(lens: np.ndarray) -> Callable:
    """A function that makes the request of a response with its forced length."""
    from jaxrl.engine.api import Request

    def request(group, sample):
        return Request(
            tokens=group.prompt.tokens,
            max_tokens=int(lens[group.draw, group.index, sample]),
            prompt_id=group.prompt.id,
            sample=sample,
            seed=group.seed,
            ignore_stop=True,
        )

    return request


if __name__ == "__main__":
    main()
