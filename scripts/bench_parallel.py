"""Step time of each parallelism on simulated devices, and how much of it goes into collectives.

    python scripts/bench_parallel.py --devices 8 --out result.json

Measures one update (gradient of one micro-batch and the optimizer step) of a small random model,
with the same rows on every mesh. Simulated devices share the cores of one machine: the ratios show
how much work a layout adds to that of one device (copies, collectives, padding, repeated
computation), not how fast real links are. The share of collectives is their part of the time that
the devices' threads spend in operations, including the time they wait for each other.

Prints one line per mesh, and writes one JSON line with --out. Format of a line:

    fsdp      SECONDS s   RATIO x one device   collectives PERCENT %   all-gather SECONDS, ...
"""

import argparse
import collections
import json
import re
import statistics
import tempfile
import time
from pathlib import Path
from typing import Any

import numpy as np

COLLECTIVE = re.compile(
    r"^(all-reduce|all-gather|all-to-all|reduce-scatter|collective-permute|ragged-all-to-all)"
)


def meshes(n: int) -> dict[str, tuple[str, dict[str, int]]]:
    """name -> (preset of sharding/rules.py, mesh sizes), for n devices, a multiple of 8."""
    return {
        "one device": ("train", {}),
        "fsdp": ("train", {"fsdp": n}),
        "hsdp": ("train", {"replica": 2, "fsdp": n // 2}),
        "tensor 2": ("train", {"fsdp": n // 2, "tensor": 2}),
        "tensor 4": ("train", {"fsdp": n // 4, "tensor": 4}),
        "ulysses 2": ("ulysses", {"fsdp": n // 2, "sequence": 2}),
        "ulysses 4": ("ulysses", {"fsdp": n // 4, "sequence": 4}),
        "ring 2": ("ring", {"fsdp": n // 2, "sequence": 2}),
        "ring 4": ("ring", {"fsdp": n // 4, "sequence": 4}),
        "stage 2": ("pipeline", {"fsdp": n // 2, "stage": 2}),
        "ulysses 2, tensor 2": ("ulysses", {"fsdp": n // 4, "sequence": 2, "tensor": 2}),
    }


def main() -> None:
    args = parse_args()
    import jax  # after the number of devices is known

    jax.config.update("jax_platforms", "cpu")
    jax.config.update("jax_num_cpu_devices", args.devices)
    results = {}
    for name, (preset, sizes) in meshes(args.devices).items():
        if args.only and name not in args.only.split(","):
            continue
        results[name] = measure(args, preset, sizes)
        one = results.get("one device", results[name])["wall_s"]
        results[name]["ratio"] = round(results[name]["wall_s"] / one, 2)
        print(row(name, results[name]), flush=True)
    if args.out:
        Path(args.out).write_text(json.dumps({"config": vars(args), "meshes": results}) + "\n")


def parse_args() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=(__doc__ or "").split("\n")[0])
    parser.add_argument("--devices", type=int, default=8, help="simulated devices, a multiple of 8")
    parser.add_argument(
        "--only", default="", help="comma-separated names of meshes to measure (default: all)"
    )
    parser.add_argument("--layers", type=int, default=4, help="decoder layers")
    parser.add_argument("--width", type=int, default=256, help="model dimension; 8 heads")
    parser.add_argument("--row-len", type=int, default=1024, help="tokens per row")
    parser.add_argument("--repeats", type=int, default=5, help="timed updates; the median counts")
    parser.add_argument("--out", default="", help="file for the JSON line")
    args = parser.parse_args()
    if args.devices % 8:
        parser.error(f"--devices {args.devices} is not a multiple of 8")
    return args


def measure(args: argparse.Namespace, preset: str, sizes: dict[str, int]) -> dict[str, Any]:
    """Median seconds of an update on one mesh, and the time in its collectives."""
    import jax

    from jaxrl.learner.optimizer import make_optimizer
    from jaxrl.learner.state import init_state
    from jaxrl.learner.step import make_update
    from jaxrl.models.decoder import decoder_specs, init_model
    from sharding import PRESETS, make_mesh

    cfg, model = run_config(args), decoder_config(args)
    rules = PRESETS[preset]
    n_devices = int(np.prod(list(sizes.values()) or [1]))
    with jax.set_mesh(make_mesh(jax.devices()[:n_devices], **sizes)):
        optimizer = make_optimizer(cfg.learner, 10, decoder_specs(model))
        update = make_update(cfg, optimizer, rules)
        state = init_state(init_model(model, seed=0, rules=rules), optimizer)
        batches = rows(args)
        state, first = update.update(state, batches)
        times = []
        for _ in range(args.repeats):
            start = time.perf_counter()
            state, _ = update.update(state, batches)
            jax.block_until_ready(state.params)
            times.append(time.perf_counter() - start)
        with tempfile.TemporaryDirectory() as folder:
            with jax.profiler.trace(folder):
                state, _ = update.update(state, batches)
                jax.block_until_ready(state.params)
            seconds = operation_seconds(folder)
    collectives = {k: v for k, v in seconds.items() if COLLECTIVE.match(k)}
    return {
        "wall_s": round(statistics.median(times), 4),
        "collective_share": round(sum(collectives.values()) / sum(seconds.values()), 3),
        "collective_s": {k: round(v, 4) for k, v in sorted(collectives.items())},
        "loss": first["loss/total"],
    }


def operation_seconds(folder: str) -> dict[str, float]:
    """Seconds by kind of operation in a profile, summed over the devices' threads."""
    from jax.profiler import ProfileData

    path = next(Path(folder).rglob("*.xplane.pb"))
    seconds = collections.Counter()
    for plane in ProfileData.from_file(str(path)).planes:
        for line in plane.lines:
            for event in line.events:
                # HLO operations are lower case with a number; runtime and Python events are not.
                if re.fullmatch(r"[a-z][a-z0-9_-]*(\.\d+)*", event.name) and not re.match(
                    r"(while|call|conditional)\b", event.name
                ):
                    seconds[re.sub(r"(\.\d+)+$", "", event.name)] += event.duration_ns / 1e9
    return dict(seconds)


def run_config(args: argparse.Namespace):
    from jaxrl.config.keys import LearnerConfig, RunConfig

    learner = LearnerConfig(token_budget=args.row_len, remat="full", logprob_chunk=256)
    return RunConfig(learner=learner)


def decoder_config(args: argparse.Namespace):
    from jaxrl.models.config import uniform_decoder

    width = args.width
    return uniform_decoder(
        "llama", L=args.layers, D=width, N=8, K=4, H=width // 8, F=4 * width, V=4096,
        tied=True, stacked=True,
    )  # fmt: skip


def rows(args: argparse.Namespace) -> list:
    """One micro-batch: a row per device, packed with sequences of different lengths."""
    from jaxrl.data.packing import pack
    from jaxrl.types import TrainingSample

    rng, samples, used = np.random.default_rng(0), [], 0
    while used < args.devices * args.row_len * 0.9:
        n = int(rng.integers(64, args.row_len // 2))
        tokens = rng.integers(0, 4096, n).astype(np.int32)
        sample = TrainingSample(
            prompt_tokens=tokens[:32],
            tokens=tokens[32:],
            loss_mask=np.ones(n - 32, bool),
            rollout_logp=np.full(n - 32, -8.3, np.float32),
            advantages=np.full(n - 32, rng.standard_normal(), np.float32),
        )
        samples.append(sample)
        used += n + 63 - (n + 63) % 64
    packed = pack(samples, shapes=((args.devices, args.row_len),), align=64, n_ranks=1)
    return [packed[0].batch]


def row(name: str, result: dict[str, Any]) -> str:
    kinds = ", ".join(f"{k} {v:.3f}" for k, v in result["collective_s"].items())
    return (
        f"{name:22} {result['wall_s']:8.3f} s {result['ratio']:6.2f}x one device   "
        f"collectives {100 * result['collective_share']:4.1f} %   {kinds}"
    )


if __name__ == "__main__":
    main()
