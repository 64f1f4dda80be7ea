"""Trains a tiny model with several objectives and seeds, and draws their curves in one picture.

    python -m scripts.objective_curves --runs runs/objectives [NAME ...]

Task: how many times has a text of eight letters an "a"? One to six, and the answer is one token.
The policy is a transformer of width 64 that learned the task from labels with mistakes: of texts
with more than four, 70 % are labelled 4. So it is wrong about a third of the texts if it answers
greedily, and right about some of them if it samples. Rewards and the teacher make no mistakes. The
teacher is a transformer of width 128 that learned from right labels. For self-distillation, the
policy also learned to repeat an answer that it reads in its prompt.

Every run has 8 steps of 256 responses, with four updates each. Supervised training takes about two
minutes for each model, a run less than one. Interrupted runs resume and finished runs are kept, so
the picture can be drawn again. Prints the mean accuracy over the seeds of each objective after so
many sampled responses:

    GRPO         0: 0.68  256: 0.70  512: 0.84  768: 0.95  1024: 0.99
"""

import argparse
import json
import random
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Any

from ml_collections import ConfigDict

from jaxrl.config import default_config
from scripts.learning_curves import Curve, config_arguments, curve, draw, run_program
from scripts.make_tiny_vlm import write_tiny_vlm

ROOT = Path(__file__).parents[1]
LENGTH, MOST, COUNTED = 8, 6, 4  # letters; most "a"; those that the labeller counts
RESPONSES = 256  # of a step of RL
MISTAKES = 0.7  # share of wrong labels above COUNTED
HINT = "{prompt} It is {context}."
SFT = {
    "total_steps": "400",
    "data.prompts_per_step": "128",
    "learner.lr": "4e-3",
    "learner.lr_schedule": "cosine",
    "learner.warmup_steps": "20",
    "eval.every": "200",
}
RL = {
    "total_steps": "8",
    "data.prompts_per_step": "32",
    "learner.mini_batch_prompts": "8",  # four updates of a step
    "rollout.n": "8",
    "rollout.max_num_seqs": "256",
    "rollout.max_num_batched_tokens": "4096",
    "rollout.steps_per_dispatch": "4",
    "reward.functions": "last_number",
    "learner.lr": "1e-4",
    "learner.warmup_steps": "5",
    "eval.every": "1",
}
SAME = {  # keys of all runs
    "data.max_prompt_len": 96,
    "data.max_response_len": 4,
    "learner.b2": 0.95,
    "learner.weight_decay": 0.0,
    "learner.token_budget": 4096,
    "learner.halvings": 0,
    "learner.segment_align": 1,
    "learner.remat": "none",
    "checkpoint.keep": 1,
}
DISTILL = {
    "algorithm.advantage": "distill",
    "algorithm.kl": "jsd",
    "algorithm.kl_in": "loss",
    "algorithm.kl_coef": "1.0",
    "algorithm.kl_beta": "0.0",  # KL(teacher | policy): it learns what it never samples
    "algorithm.kl_top_k": "16",
}
OBJECTIVES = {  # name -> keys
    "GRPO": {},
    "DPPO": {"algorithm.policy_loss": "dppo_tv"},
    "MaxRL": {"algorithm.advantage": "max_rl"},
    "VESPO": {"algorithm.policy_loss": "vespo"},
    "Distillation": DISTILL | {"algorithm.teacher": "{runs}/teacher/hf"},
    "Self-distillation": DISTILL
    | {
        "self_distillation.context": "demonstration",
        "self_distillation.max_prompt_len": "128",
        "self_distillation.template": HINT,
        "self_distillation.demonstration_template": "{demonstration}",
    },
}


def get_config() -> ConfigDict:
    """Keys of all runs: this file is their config."""
    config = default_config()
    config.update_from_flattened_dict(SAME)
    return config


def main() -> None:
    args = read_arguments(__doc__ or "", OBJECTIVES, "objectives")
    runs = args.runs.resolve()
    for name, width, mistakes in (("teacher", 128, 0.0), ("policy", 64, MISTAKES)):
        if not (runs / name / "hf" / "config.json").is_file():
            write_data(runs, name, mistakes)
            write_tiny_vlm(runs / "models" / name, width, n_layers=2)
            train("jaxrl.sft", runs, name, SFT | {"model.path": str(runs / "models" / name)})
    found = {}
    for name in args.names or OBJECTIVES:
        keys = {k: v.replace("{runs}", str(runs)) for k, v in OBJECTIVES[name].items()}
        folders = [run_name(name, seed) for seed in range(args.seeds)]
        for seed, folder in enumerate(folders):
            more = {"model.path": str(runs / "policy" / "hf"), "seed": str(seed)}
            train("jaxrl.train", runs, folder, RL | more | keys)
        found[name] = mean([curve(runs / folder, RESPONSES) for folder in folders])
    draw(found, args.out)


def read_arguments(doc: str, runs: Iterable[str], picture: str) -> argparse.Namespace:
    """The command line of a script that trains several seeds of each of `runs`, or of some."""
    parser = argparse.ArgumentParser(description=doc.split("\n")[0])
    parser.add_argument("names", nargs="*", metavar="NAME", help=f"{picture} (default: all)")
    folder, out = Path("runs") / picture, ROOT / "docs" / f"curves_{picture}.svg"
    parser.add_argument("--runs", type=Path, default=folder, help="folder of runs")
    parser.add_argument("--seeds", type=int, default=3, help="runs of each of them")
    parser.add_argument("--out", type=Path, default=out, help=f"picture (default: {out.name})")
    args = parser.parse_args()
    if unknown := set(args.names) - set(runs):
        parser.error(f"unknown: {', '.join(sorted(unknown))}; set any of {', '.join(runs)}")
    return args


def run_name(name: str, seed: int) -> str:
    return f"{name.lower().replace('-', '_')}_{seed}"


def train(program: str, runs: Path, name: str, keys: Mapping[str, str]) -> None:
    data = runs / "data" / ("teacher" if name == "teacher" else "policy")
    split = "sft" if program == "jaxrl.sft" else "train"
    found = {"data.train": str(data / f"{split}.jsonl"), "data.val": str(data / "val.jsonl")}
    found |= {"name": name, "run_dir": str(runs / name), **keys}
    run_program(program, config_arguments(Path(__file__), found))


def mean(curves: Iterable[Curve]) -> Curve:
    """The mean accuracy at every point; prints the least and the most of the last one."""
    columns = list(zip(*curves, strict=True))
    ends = [accuracy for _, accuracy in columns[-1]]
    print(f"last point: {min(ends):.2f} to {max(ends):.2f} over {len(ends)} seeds")
    return [(column[0][0], sum(a for _, a in column) / len(column)) for column in columns]


def write_data(runs: Path, name: str, mistakes: float) -> None:
    """Texts with labels; for supervised training also with the answer in the prompt."""
    rng = random.Random(0)
    folder = runs / "data" / name
    folder.mkdir(parents=True, exist_ok=True)
    texts = list(different_texts(rng, 5000))
    val, train = texts[:512], texts[512:]
    write_rows(folder / "val.jsonl", [row(text, text.count("a")) for text in val])
    labelled = [row(text, label(text.count("a"), rng, mistakes)) for text in train]
    hinted = [row(text, text.count("a"), hinted=True) for text in train]
    write_rows(folder / "train.jsonl", labelled)  # RL reads the prompts and the truths
    write_rows(folder / "sft.jsonl", [*labelled, *hinted])


def different_texts(rng: random.Random, n: int) -> list[str]:
    """Each number of "a" is as frequent as the others."""
    found: dict[str, None] = {}
    while len(found) < n:
        many = rng.randint(1, MOST)
        letters = ["a"] * many + rng.choices("bcdefgh", k=LENGTH - many)
        rng.shuffle(letters)
        found["".join(letters)] = None
    return list(found)


def label(n: int, rng: random.Random, mistakes: float) -> int:
    return COUNTED if n > COUNTED and rng.random() < mistakes else n


def row(text: str, answer: int, *, hinted: bool = False) -> dict[str, Any]:
    prompt = f"How many a in {text}?"
    if hinted:
        prompt = HINT.format(prompt=prompt, context=answer)
    return {
        "data_source": "letters",
        "prompt": [{"role": "user", "content": prompt}],
        "response": str(answer),
        "reward_model": {"style": "rule", "ground_truth": str(text.count("a"))},
    }


def write_rows(path: Path, rows: Iterable[dict[str, Any]]) -> None:
    path.write_text("".join(json.dumps(r) + "\n" for r in rows))


if __name__ == "__main__":
    main()
