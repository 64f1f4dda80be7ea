"""Trains algorithms or schedules on the quickstart's task and draws their curves in one picture.

    python scripts/learning_curves.py --runs runs/curves [algorithms|schedules] [NAME ...]

Each run is configs/quickstart.py with other keys. The algorithms have 48 steps of 64 responses; an
algorithm that samples more responses per step takes fewer steps. The schedules have the 72 steps of
the quickstart. A run takes about 8 or 12 minutes on two cores. Interrupted runs resume and finished
runs are kept, so the picture can be drawn again.

Prints the validation accuracy of each run after so many sampled responses:

    REINFORCE++  0: 0.00  768: 0.48  1536: 0.65  2304: 0.71  3072: 0.71
"""

import argparse
import os
import pathlib
import re
import subprocess
import sys
from collections.abc import Iterable

from jaxrl.report.curve import BOTTOM, HEIGHT, LEFT, RIGHT, STYLE, TOP, WIDTH, grid
from jaxrl.report.record import read_record

ROOT = pathlib.Path(__file__).parents[1]
STEPS = 48
COLORS = ("#2f6fdb", "#1f9d6a", "#d9822b", "#a24bd0", "#d64562", "#6b7a8c", "#8a6d3b", "#2aa3b3")
SAME = {
    "eval.every": "12",
    "checkpoint.every": "12",
    "checkpoint.keep": "1",
    "checkpoint.export_hf": "False",
}
ALGORITHMS = {  # name -> keys
    "GRPO": {},
    "RLOO": {"algorithm.advantage": "rloo"},
    "REINFORCE++": {"algorithm.advantage": "reinforce_plus_plus"},
    "DAPO": {
        "algorithm.clip_high": "0.28",
        "algorithm.dynamic_sampling": "True",
        "algorithm.dynamic_sampling_batches": "2",
        "reward.overlong_buffer": "4",
        "total_steps": str(STEPS // 2),
        "eval.every": "6",
    },
    "PPO": {
        "algorithm.advantage": "gae",
        "critic.lr": "1e-5",
        "critic.weight_decay": "0.0",
        "critic.warmup_steps": "4",
    },
    "GSPO": {
        "algorithm.policy_loss": "gspo",
        "algorithm.clip_low": "0.0003",
        "algorithm.clip_high": "0.0004",
        "algorithm.aggregation": "seq_mean_token_mean",
    },
    "Muon": {"learner.optimizer": "muon", "learner.lr": "3e-5"},  # GRPO
    "Adafactor": {"learner.optimizer": "adafactor", "learner.lr": "1e-4"},
}

CORRECTED = {"algorithm.correction": "token_tis", "total_steps": "72"}
ASYNC = CORRECTED | {"schedule.mode": "async", "schedule.rollout_devices": "1"}
SCHEDULES = {
    "sync": {"total_steps": "72"},
    "partial, staleness 1": CORRECTED | {"schedule.mode": "partial", "schedule.max_staleness": "1"},
    "async, staleness 1": ASYNC | {"schedule.max_staleness": "1"},
    "async, staleness 4": ASYNC | {"schedule.max_staleness": "4"},
    "async, staleness 4, seq_tis": ASYNC
    | {"schedule.max_staleness": "4", "algorithm.correction": "seq_tis"},
    "async, staleness 4, old_logp=rollout": ASYNC
    | {
        "schedule.max_staleness": "4",
        "algorithm.correction": "none",
        "algorithm.old_logp": "rollout",
        "algorithm.clip_high": "0.28",
    },
}
PICTURES = {"algorithms": ALGORITHMS, "schedules": SCHEDULES}


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").split("\n")[0])
    parser.add_argument("picture", choices=PICTURES, help="what to compare")
    parser.add_argument(
        "names", nargs="*", metavar="NAME", help="runs to train (default: all of the picture)"
    )
    parser.add_argument(
        "--runs",
        type=pathlib.Path,
        default=pathlib.Path("runs/curves"),
        help="folder of the runs (default: %(default)s)",
    )
    parser.add_argument(
        "--out", type=pathlib.Path, help="picture to write (default: docs/curves_PICTURE.svg)"
    )
    args = parser.parse_args()
    runs = PICTURES[args.picture]
    if unknown := set(args.names) - set(runs):
        parser.error(f"unknown: {', '.join(sorted(unknown))}; set any of {', '.join(runs)}")
    for name in args.names or runs:
        train(name, args.runs)
    draw(runs, args.runs, args.out or ROOT / "docs" / f"curves_{args.picture}.svg")


def train(name: str, folder: pathlib.Path) -> None:
    """Trains one run in a separate process, on as many CPU devices as it needs.

    The devices share the cores.
    """
    n_devices = 1 + int(keys(name).get("schedule.rollout_devices", 0))
    subprocess.run(
        [sys.executable, "-m", "jaxrl.train", *arguments(name, folder)],
        check=True,
        env=os.environ | {"JAX_NUM_CPU_DEVICES": str(n_devices)},
    )


def keys(name: str) -> dict[str, str]:
    """What a run changes in configs/quickstart.py."""
    return {"total_steps": str(STEPS)} | SAME | (ALGORITHMS | SCHEDULES)[name]


def arguments(name: str, folder: pathlib.Path) -> list[str]:
    """The command line of a run, after `python -m jaxrl.train`."""
    found = keys(name) | {"run_dir": str(run_dir(folder, name))}
    words = [f"--config.{key}={value}" for key, value in found.items()]
    return [f"--config={ROOT / 'configs' / 'quickstart.py'}", *words]


def draw(names: Iterable[str], folder: pathlib.Path, out: pathlib.Path) -> None:
    """Draws greedy validation accuracy over sampled responses, one line per run."""
    folders = {name: run_dir(folder, name) for name in names}
    curves = {n: curve(f) for n, f in folders.items() if (f / "metrics.jsonl").is_file()}
    most = max(n for points in curves.values() for n, _ in points)

    def at(n: float, accuracy: float) -> tuple[float, float]:
        x = LEFT + n / most * (WIDTH - LEFT - RIGHT)
        return x, HEIGHT - BOTTOM - accuracy * (HEIGHT - TOP - BOTTOM)

    body, x = grid(0.0, 1.0, 0, most, at, unit="responses sampled"), float(LEFT)
    for (name, points), color in zip(curves.items(), COLORS, strict=False):
        print(f"{name:12} " + "  ".join(f"{n}: {accuracy:.2f}" for n, accuracy in points))
        line = "L".join("{:.1f} {:.1f}".format(*at(*point)) for point in points)
        body.append(f'<path d="M{line}" stroke="{color}" stroke-width="2.2"/>')
        body.append(f'<rect x="{x}" y="15" width="10" height="10" rx="3" fill="{color}"/>')
        body.append(f'<text x="{x + 16}" y="24" class="ink">{name}</text>')
        x += 8.5 * len(name) + 34
    out.write_text(
        f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {WIDTH} {HEIGHT}" role="img" '
        f'aria-label="Validation accuracy of {", ".join(curves)}"><style>{STYLE}</style>'
        f"{''.join(body)}</svg>\n"
    )


def curve(folder: pathlib.Path) -> list[tuple[int, float]]:
    """(responses sampled so far, greedy accuracy) at every validation of the run in `folder`."""
    record = read_record(folder)
    batches = dict(record.series.get("rollout/batches", ()))
    sampled = {0: 0}
    for step, _ in record.series["reward/mean"]:
        sampled[step] = sampled[step - 1] + round(64 * batches.get(step, 1.0))
    return [(sampled[step], accuracy) for step, accuracy in record.series["val/reward"]]


def run_dir(folder: pathlib.Path, name: str) -> pathlib.Path:
    return folder / re.sub(r"\W+", "_", name.lower().replace("+", "p"))


if __name__ == "__main__":
    main()
