"""Throughput of the rollout engine on a workload, compared with the roofline of the machine.

    python scripts/bench_engine.py --model MODEL_FOLDER --workload WORKLOAD.json --cores 1

The workload is a JSON object {"steps": [{"prompts": [{"ids": [...]}], "resp_len": [[...]]}]}: per
step the prompt tokens and the forced length of every response, so that all systems do the same
work. All requests of a step arrive at once; only response tokens count. `--cores 1` pins all
threads to one core: tokens per CPU-second are then comparable on a shared machine.

`roofline` is the minimum time of the step over the measured time. The minimum is, for each part of
each decode step, the longer of two times: the bytes of weights, live KV and states over the
bandwidth of a long read, and the operations over the rate of a large product. It has no padding and
no pauses. Both peaks are measured in the same run. Times are CPU-seconds on CPU, wall seconds
elsewhere. Prints a table, and one JSON line (medians over the steps after --warm).
"""

import argparse
import dataclasses
import json
import os
import resource
import statistics
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import numpy as np

from jaxrl.runtime.start import set_gpu_memory


def main() -> None:
    args = parse_args()
    set_gpu_memory()  # before JAX starts
    if args.cores:
        os.sched_setaffinity(0, sorted(os.sched_getaffinity(0))[-args.cores :])
    result = bench(args)
    line = json.dumps(result)
    for name, value in result["median"].items():
        print(f"{name:20} {value:12.4g}")
    if args.out:
        Path(args.out).write_text(line + "\n")
    print(line)


def parse_args() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=(__doc__ or "").split("\n")[0])
    parser.add_argument("--model", required=True, help="Hugging Face model folder")
    parser.add_argument(
        "--random-weights",
        action="store_true",
        help="use random weights; --model is a config.json or a name in configs/shapes",
    )
    parser.add_argument("--workload", required=True, help="JSON file of prompts and lengths")
    parser.add_argument("--out", default="", help="file for the JSON line")
    parser.add_argument("--steps", type=int, default=3)
    parser.add_argument("--warm", type=int, default=1, help="warm-up steps, not measured")
    parser.add_argument("--cores", type=int, default=0, help="pin to this many cores; 0 = all")
    parser.add_argument(
        "--copies", type=int, default=1, help="multiplier of the samples per prompt"
    )
    parser.add_argument("--dtype", default="float32")
    parser.add_argument("--max-num-seqs", type=int, default=0, help="0 = the requests of a step")
    parser.add_argument("--max-num-batched-tokens", type=int, default=1024)
    parser.add_argument("--steps-per-dispatch", type=int, default=32)
    parser.add_argument("--kv-dtype", default="auto")
    parser.add_argument("--memory-utilization", type=float, default=0.85)
    return parser.parse_args()


@dataclasses.dataclass(frozen=True)
class Work:
    """The requests of one step: prompts, and the response lengths of their samples."""

    prompts: list[np.ndarray]
    lens: list[list[int]]

    @property
    def n_tokens(self) -> int:
        return sum(map(sum, self.lens))

    @property
    def n_requests(self) -> int:
        return sum(map(len, self.lens))


def read_workload(path: str, n_steps: int, copies: int) -> list[Work]:
    steps = json.loads(Path(path).read_text())["steps"][:n_steps]
    return [
        Work(
            [np.array(p["ids"], np.int32) for p in step["prompts"]],
            [row * copies for row in step["resp_len"]],
        )
        for step in steps
    ]


@dataclasses.dataclass(frozen=True)
class Peaks:
    """Measured peak rates of the device."""

    bytes_per_s: float  # long read
    flops_per_s: float  # large matrix product


@dataclasses.dataclass(frozen=True)
class Sizes:
    """Bytes and operations of a model. Every token uses all weights except the input embedding."""

    layer_params: int
    head_params: int  # unembedding
    param_bytes: int  # per parameter
    key_bytes: int  # keys and values of one token, all layers
    key_flops: int  # one query with one key, all layers and heads
    state_bytes: int = 0  # states of one sequence, read and written in every step


def shortest_s(work: Work, n_slots: int, sizes: Sizes, peaks: Peaks) -> float:
    """Lower bound on the time of a step, in the seconds of `peaks`.

    Every prompt is computed once; then all slots are busy while requests wait, in order.
    """

    def at_least(n_bytes: float, flops: float) -> float:
        return max(n_bytes / peaks.bytes_per_s, flops / peaks.flops_per_s)

    def products(params: int, n_rows: int) -> float:
        return at_least(params * sizes.param_bytes, 2 * params * n_rows)

    total = products(sizes.layer_params, sum(len(p) - 1 for p in work.prompts))
    waiting = [(len(p), n) for p, row in zip(work.prompts, work.lens, strict=True) for n in row]
    waiting.reverse()
    running: list[tuple[int, int]] = []  # (tokens of KV, tokens left to sample)
    while waiting or running:
        while waiting and len(running) < n_slots:
            running.append(waiting.pop())
        n_kv = sum(kv for kv, _ in running)
        total += products(sizes.layer_params + sizes.head_params, len(running))
        n_state_bytes = 2 * len(running) * sizes.state_bytes
        total += at_least(n_kv * sizes.key_bytes + n_state_bytes, n_kv * sizes.key_flops)
        running = [(kv + 1, left - 1) for kv, left in running if left > 1]
    return total


def bench(args: argparse.Namespace) -> dict[str, Any]:
    import jax  # after the CPU affinity is set

    from jaxrl.config.keys import RolloutConfig
    from jaxrl.engine.engine import PagedEngine
    from jaxrl.models.decoder import init_model
    from jaxrl.models.files.hf_load import load_model
    from jaxrl.models.flops import score_features
    from jaxrl.models.kv_cache import page_bytes, slot_bytes
    from jaxrl.planner.model_shape import model_shape
    from jaxrl.runtime.host_memory import keep_freed_memory
    from sharding import make_mesh
    from sharding.rules import DECODE, TRAIN

    on_cpu = jax.default_backend() == "cpu"
    if on_cpu:
        keep_freed_memory()
    steps = read_workload(args.workload, args.steps, args.copies)
    n_slots = args.max_num_seqs or max(work.n_requests for work in steps)
    pairs = [pair for work in steps for pair in zip(work.prompts, work.lens, strict=True)]
    with jax.set_mesh(make_mesh(fsdp=-1)):
        if args.random_weights:
            cfg = model_shape(args.model, option="--model")
            params = init_model(cfg, seed=0, rules=TRAIN, dtype=args.dtype)
        else:
            cfg, params = load_model(args.model, rules=TRAIN, dtype=args.dtype)
        engine = PagedEngine(
            cfg,
            RolloutConfig(
                max_num_seqs=n_slots,
                max_num_batched_tokens=args.max_num_batched_tokens,
                steps_per_dispatch=args.steps_per_dispatch,
                kv_dtype=args.kv_dtype,
                memory_utilization=args.memory_utilization,
            ),
            rules=DECODE,
            dtype=args.dtype,
            max_len=max(len(prompt) + max(row) for prompt, row in pairs),
        )
        engine.warmup(params)
        sizes = Sizes(
            layer_params=sum(leaf.size for leaf in jax.tree.leaves(params.layers)),
            head_params=params.unembed.size,
            param_bytes=params.embed.dtype.itemsize,
            key_bytes=sum(page_bytes(cfg, 1, engine.pool.dtype).values()),
            key_flops=4 * score_features(cfg),
            state_bytes=slot_bytes(cfg, engine.pool.dtype),
        )
        clock = time.process_time if on_cpu else time.perf_counter
        measured = []
        for seed, work in enumerate(steps):
            peaks = measure_peaks(args.dtype, clock, *((28, 2048) if on_cpu else (32, 8192)))
            found = run_step(engine, params, work, seed)
            took = found["cpu_s"] if on_cpu else found["wall_s"]
            found["roofline"] = shortest_s(work, n_slots, sizes, peaks) / took
            found["read_gb_per_s"] = peaks.bytes_per_s / 1e9
            found["product_gflop_per_s"] = peaks.flops_per_s / 1e9
            measured.append(found)
    counted = measured[args.warm :] or measured
    return {
        "system": "jaxrl",
        "workload": Path(args.workload).stem,
        "config": vars(args),
        "jax": jax.__version__,
        "device": jax.devices()[0].device_kind,
        "sizes": dataclasses.asdict(sizes),
        "pool_pages": engine.scheduler.pool.n_pages,
        "median": {
            name: round(statistics.median(one[name] for one in counted), 5) for name in counted[0]
        },
        "all": measured,
        "peak_rss_mib": round(resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 1024),
    }


def run_step(engine, params, work: Work, seed: int) -> dict[str, float]:
    """Generates all responses of a step; wall times start at submission."""
    from jaxrl.engine.api import Request
    from jaxrl.rollout.loop import engine_metrics

    engine.take_stats()
    start, cpu = time.perf_counter(), time.process_time()
    left = {}
    for i, (prompt, row) in enumerate(zip(work.prompts, work.lens, strict=True)):
        for sample, n in enumerate(row):
            request = Request(prompt, n, prompt_id=i, sample=sample, seed=seed, ignore_stop=True)
            left[engine.submit(request)] = n
    first_token_s: dict[int, float] = {}
    while engine.n_unfinished:
        generated = engine.generate(params)
        now = time.perf_counter() - start
        for one in generated:
            first_token_s.setdefault(one.slot, now)
            left[one.slot] -= len(one.tokens)
    wall, cpu = time.perf_counter() - start, time.process_time() - cpu
    assert not any(left.values()), "a response does not have the requested length"
    stats = engine_metrics(engine.take_stats(), work.n_tokens, wall)
    return {
        "tokens_per_s": work.n_tokens / wall,
        "tokens_per_cpu_s": work.n_tokens / cpu,
        "wall_s": wall,
        "cpu_s": cpu,
        "first_token_s": statistics.median(first_token_s.values()),
        "first_token_max_s": max(first_token_s.values()),
        "cache_utilization": stats["rollout/cache_utilization"],
        "padding_fraction": stats["rollout/padding_fraction"],
        "host_share": stats["rollout/host_fraction"],
        "prefill_tokens": stats["rollout/prefill_tokens"],
    }


def measure_peaks(dtype: str, clock: Callable[[], float], n_bits: int, n: int) -> Peaks:
    """The fastest of five reads of 2^n_bits bytes and of five products of n x n matrices.

    Both are large enough that the cost of a dispatch is negligible.
    """
    import jax
    import jax.numpy as jnp

    def best_s(f: Callable, *args: jax.Array) -> float:
        f(*args).block_until_ready()
        times: Sequence[float] = [timed(f, *args) for _ in range(5)]
        return min(times)

    def timed(f: Callable, *args: jax.Array) -> float:
        start = clock()
        f(*args).block_until_ready()
        return clock() - start

    long = jnp.ones(2**n_bits // jnp.dtype(dtype).itemsize, dtype)
    square = jnp.ones((n, n), dtype)
    return Peaks(
        bytes_per_s=long.nbytes / best_s(jax.jit(jnp.max), long),
        flops_per_s=2 * n**3 / best_s(jax.jit(lambda a, b: a @ b.T), square, square),
    )


if __name__ == "__main__":
    main()
