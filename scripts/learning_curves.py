"""Trains algorithms or schedules on the quickstart's task and draws their curves in one picture.

    python scripts/learning_curves.py --runs runs/curves [algorithms|schedules] [NAME ...]
    python scripts/learning_curves.py --logged [adapters|images|schedules]

Each run is configs/quickstart.py with other keys. The algorithms have 48 steps of 64 responses; an
algorithm that samples more responses per step takes fewer steps. The schedules have the 72 steps of
the quickstart. A run takes about 8 or 12 minutes on two cores. Interrupted runs resume and finished
runs are kept, so the picture can be drawn again. With --logged nothing is trained: the picture
shows the accuracies in docs/curves.json, which are those of the named entries of docs/LOG.md.

Prints the validation accuracy of each run after so many sampled responses:

    REINFORCE++  0: 0.00  768: 0.48  1536: 0.65  2304: 0.71  3072: 0.71
"""

import argparse
import json
import os
import pathlib
import re
import subprocess
import sys
from collections.abc import Iterable, Mapping
from typing import Any

from jaxrl.report.curve import BOTTOM, HEIGHT, LEFT, RIGHT, STYLE, TOP, WIDTH, grid
from jaxrl.report.record import read_record

ROOT = pathlib.Path(__file__).parents[1]
LOGGED = ROOT / "docs" / "curves.json"
STEPS = 48
RESPONSES = 64  # of a step
LEGEND_LINE = 18  # pixels
Curve = list[tuple[int, float]]  # (responses sampled so far, greedy accuracy)
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
DRAWN_FROM_LOG = ("adapters", "images", "schedules")


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").split("\n")[0])
    pictures = sorted({*PICTURES, *DRAWN_FROM_LOG})
    parser.add_argument("picture", choices=pictures, help="what to compare")
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
    parser.add_argument(
        "--logged", action="store_true", help="train nothing; draw the curves in docs/curves.json"
    )
    args = parser.parse_args()
    out = args.out or ROOT / "docs" / f"curves_{args.picture}.svg"
    if args.picture not in (DRAWN_FROM_LOG if args.logged else PICTURES):
        parser.error(f"{args.picture} is drawn {'without' if args.logged else 'with'} --logged")
    if args.logged:
        draw(logged_curves(args.picture), out)
        return
    runs = PICTURES[args.picture]
    if unknown := set(args.names) - set(runs):
        parser.error(f"unknown: {', '.join(sorted(unknown))}; set any of {', '.join(runs)}")
    for name in args.names or runs:
        train(name, args.runs)
    draw(curves(runs, args.runs), out)


def train(name: str, folder: pathlib.Path, *more: str) -> None:
    """Trains one run. `more` are further arguments of the command line."""
    n_devices = 1 + int(keys(name).get("schedule.rollout_devices", 0))
    run_program("jaxrl.train", [*arguments(name, folder), *more], n_devices)


def run_program(program: str, arguments: Iterable[str], n_devices: int = 1) -> None:
    """Runs a program of jaxrl in a separate process, on CPU devices that share the cores."""
    subprocess.run(
        [sys.executable, "-m", program, *arguments],
        check=True,
        env=os.environ | {"JAX_NUM_CPU_DEVICES": str(n_devices)},
    )


def keys(name: str) -> dict[str, str]:
    """Changes of a run to configs/quickstart.py."""
    return {"total_steps": str(STEPS)} | SAME | (ALGORITHMS | SCHEDULES)[name]


def arguments(name: str, folder: pathlib.Path) -> list[str]:
    """The command line of a run, after `python -m jaxrl.train`."""
    found = keys(name) | {"run_dir": str(run_dir(folder, name))}
    return config_arguments(ROOT / "configs" / "quickstart.py", found)


def config_arguments(config: pathlib.Path, changes: Mapping[str, str]) -> list[str]:
    """Arguments of a config file and of changes to its keys."""
    return [f"--config={config}", *(f"--config.{key}={value}" for key, value in changes.items())]


def curves(names: Iterable[str], folder: pathlib.Path) -> dict[str, Curve]:
    """The curves of the runs that exist."""
    folders = {name: run_dir(folder, name) for name in names}
    return {n: curve(f) for n, f in folders.items() if (f / "metrics.jsonl").is_file()}


def logged_curves(picture: str) -> dict[str, Curve]:
    """The curves of docs/curves.json, whose points are steps and accuracies.

    Runs with other than RESPONSES responses of a step name their number.
    """
    found = json.loads(LOGGED.read_text())[picture]

    def points(run: dict[str, Any]) -> Curve:
        pairs = zip(run["steps"], run["accuracy"], strict=True)
        return [(run.get("responses", RESPONSES) * step, accuracy) for step, accuracy in pairs]

    return {name: points(run) for name, run in found.items()}


def draw(curves: Mapping[str, Curve], out: pathlib.Path) -> None:
    """Draws greedy validation accuracy over sampled responses, one line per run."""
    most = max(n for points in curves.values() for n, _ in points)

    def at(n: float, accuracy: float) -> tuple[float, float]:
        x = LEFT + n / most * (WIDTH - LEFT - RIGHT)
        return x, HEIGHT - BOTTOM - accuracy * (HEIGHT - TOP - BOTTOM)

    body = grid(0.0, 1.0, 0, most, at, unit="responses sampled")
    places = legend(curves)
    above = min(y for _, y in places)
    for (x, y), (name, points), color in zip(places, curves.items(), COLORS, strict=False):
        print(f"{name:12} " + "  ".join(f"{n}: {accuracy:.2f}" for n, accuracy in points))
        line = "L".join("{:.1f} {:.1f}".format(*at(*point)) for point in points)
        body.append(f'<path d="M{line}" stroke="{color}" stroke-width="2.2"/>')
        body.append(f'<rect x="{x}" y="{15 + y}" width="10" height="10" rx="3" fill="{color}"/>')
        body.append(f'<text x="{x + 16}" y="{24 + y}" class="ink">{name}</text>')
    box = f"0 {above} {WIDTH} {HEIGHT - above}"
    out.write_text(
        f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="{box}" role="img" '
        f'aria-label="Validation accuracy of {", ".join(curves)}"><style>{STYLE}</style>'
        f"{''.join(body)}</svg>\n"
    )


def legend(names: Iterable[str]) -> list[tuple[float, int]]:
    """Places of the names in lines from the top; the last line is at 0."""
    places, x, line = [], float(LEFT), 0
    for name in names:
        width = 8.5 * len(name) + 34
        if x + width > WIDTH + 34 and x > LEFT:
            x, line = float(LEFT), line + 1
        places.append((x, line))
        x += width
    return [(x, LEGEND_LINE * (y - line)) for x, y in places]


def curve(folder: pathlib.Path, responses: int = RESPONSES) -> Curve:
    """The curve of a run with `responses` of a batch; it has a point at every validation."""
    record = read_record(folder)
    batches = dict(record.series.get("rollout/batches", ()))
    sampled = {0: 0}
    for step, _ in record.series["reward/mean"]:
        sampled[step] = sampled[step - 1] + round(responses * batches.get(step, 1.0))
    return [(sampled[step], accuracy) for step, accuracy in record.series["val/reward"]]


def run_dir(folder: pathlib.Path, name: str) -> pathlib.Path:
    return folder / re.sub(r"\W+", "_", name.lower().replace("+", "p"))


if __name__ == "__main__":
    main()
