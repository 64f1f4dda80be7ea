"""Trains a tiny model with several curricula and seeds, and draws their curves in one picture.

    python -m scripts.curriculum_curves --runs runs/curricula [NAME ...]

The task is that of scripts/objective_curves.py: how many times has a text an "a", one to six? The
policy learned it from labels with mistakes: texts with more than three are labelled 3, in 60 % of
those with four, 85 % of those with five and 97 % of those with six. Of the 240 prompts of training,
192 have one to three, which it solves from the start, and 16 each have four, five and six. So with
uniform sampling most groups have no gradient. Rewards make no mistakes. Validation has other texts,
as many of each number.

Every run has 60 steps of 16 prompts and 8 responses. Supervised training takes about two minutes, a
run about one. Interrupted runs resume and finished runs are kept, so the picture can be drawn
again. Prints the mean accuracy over the seeds of each curriculum after so many sampled responses,
and the mean share of responses without a gradient:

    uniform      0: 0.51  512: 0.51  1024: 0.67
"""

import random
from collections.abc import Mapping
from pathlib import Path

from jaxrl.report.record import read_record
from scripts.learning_curves import config_arguments, curve, draw, run_dir, run_program
from scripts.make_tiny_vlm import write_tiny_vlm
from scripts.objective_curves import (
    RL,
    ROOT,
    SFT,
    different_texts,
    mean,
    read_arguments,
    row,
    write_rows,
)

CONFIG = ROOT / "scripts" / "objective_curves.py"
STEPS, PROMPTS, SAMPLES = 60, 16, 8
COUNTED = 3
MISTAKES = {4: 0.6, 5: 0.85, 6: 0.97}  # number of "a" -> share of labels that are COUNTED
LEVELS = ((1, 2, 3), (4,), (5,), (6,))  # numbers of "a" of each source, the easiest first
ROWS = (192, 16, 16, 16)  # prompts of each source
CURRICULA = {  # name -> keys
    "uniform": {},
    "pools": {"data.pool_weights": "(0.1, 0.8, 0.1)"},
    "pools, half easy": {"data.pool_weights": "(0.1, 0.4, 0.5)"},
    "progress": {
        "data.weights": str(ROWS),
        "data.progress": "0.8",
        "data.progress_memory": "(0.8, 0.95)",
    },
}


def main() -> None:
    args = read_arguments(__doc__ or "", CURRICULA, "curricula")
    runs = args.runs.resolve()
    if not (runs / "policy" / "hf" / "config.json").is_file():
        write_data(runs / "data")
        write_tiny_vlm(runs / "model", width=64, n_layers=2)
        data = {split: str(runs / "data" / f"{split}.jsonl") for split in ("sft", "val")}
        sft = {
            "data.train": data["sft"],
            "data.val": data["val"],
            "model.path": str(runs / "model"),
        }
        train("jaxrl.sft", runs / "policy", SFT | sft)
    found = {}
    for name in args.names or CURRICULA:
        folders = [run_dir(runs, f"{name} {seed}") for seed in range(args.seeds)]
        for seed, folder in enumerate(folders):
            train("jaxrl.train", folder, rl_keys(runs, seed) | CURRICULA[name])
        found[name] = mean([curve(folder, PROMPTS * SAMPLES) for folder in folders])
        idle = [read_record(folder).series["perf/idle_fraction"] for folder in folders]
        shares = [share for points in idle for _, share in points]
        print(f"{name}: {sum(shares) / len(shares):.2f} of the responses have no gradient")
    draw(found, args.out)


def rl_keys(runs: Path, seed: int) -> dict[str, str]:
    """Keys of all RL runs with this seed."""
    sources = [str(runs / "data" / f"level_{i}.jsonl") for i in range(len(LEVELS))]
    return RL | {
        "total_steps": str(STEPS),
        "data.train": ",".join(sources),
        "data.val": str(runs / "data" / "val.jsonl"),
        "data.prompts_per_step": str(PROMPTS),
        "learner.mini_batch_prompts": str(PROMPTS // 2),
        "rollout.n": str(SAMPLES),
        "eval.every": "4",
        "model.path": str(runs / "policy" / "hf"),
        "seed": str(seed),
    }


def train(program: str, folder: Path, keys: Mapping[str, str]) -> None:
    run_program(program, config_arguments(CONFIG, {"run_dir": str(folder), **keys}))


def write_data(folder: Path) -> None:
    """Labelled texts for supervised training, validation, and a file of prompts for each level."""
    rng = random.Random(0)
    folder.mkdir(parents=True, exist_ok=True)
    texts = list(different_texts(rng, 5000))
    val, rl, sft = texts[:512], texts[512:1024], texts[1024:]
    write_rows(folder / "val.jsonl", [row(text, text.count("a")) for text in val])
    write_rows(folder / "sft.jsonl", [row(text, label(text.count("a"), rng)) for text in sft])
    for i, counts in enumerate(LEVELS):
        found = [text for text in rl if text.count("a") in counts][: ROWS[i]]
        write_rows(folder / f"level_{i}.jsonl", [row(text, text.count("a")) for text in found])


def label(n: int, rng: random.Random) -> int:
    return COUNTED if rng.random() < MISTAKES.get(n, 0.0) else n


if __name__ == "__main__":
    main()
