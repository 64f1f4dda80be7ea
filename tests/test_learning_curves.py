"""The comparisons of algorithms, schedules and curricula: learning_curves.py and its like."""

import json
import re
import runpy
import xml.etree.ElementTree as ElementTree
from pathlib import Path

import pytest

from jaxrl.config.command_line import parse
from scripts import curriculum_curves
from scripts.learning_curves import config_arguments

DOCS = Path(__file__).parents[1] / "docs"
SCRIPT = runpy.run_path(str(Path(__file__).parents[1] / "scripts" / "learning_curves.py"))
# Greedy accuracy on held-out two-digit sums that a run must reach: an algorithm with all its steps,
# a schedule with half of them (docs/curves.json has 0.48 to 0.71 then). PPO's critic trains alone
# for the first steps.
MIN_ACCURACY = {
    "GRPO": 0.7,
    "RLOO": 0.7,
    "DAPO": 0.7,
    "REINFORCE++": 0.65,
    "GSPO": 0.6,
    "PPO": 0.55,
    "Muon": 0.6,
} | {name: 0.35 if "staleness 4" in name else 0.5 for name in SCRIPT["SCHEDULES"]}
PICTURES = ("algorithms", "curricula", "images", "objectives", "schedules")
HALF = "--config.total_steps=36"


@pytest.mark.parametrize("name", MIN_ACCURACY)
def test_all_runs_sample_the_same_number_of_responses(name, tmp_path):
    run = parse(SCRIPT["arguments"](name, tmp_path))
    batches = run.algorithm.dynamic_sampling_batches if run.algorithm.dynamic_sampling else 1
    sampled = run.total_steps * batches * run.data.prompts_per_step * run.rollout.n
    assert sampled == 64 * (72 if name in SCRIPT["SCHEDULES"] else SCRIPT["STEPS"])


def test_curricula_draw_from_the_same_prompts_in_as_many_responses(tmp_path):
    curriculum_curves.write_data(tmp_path / "data")
    keys = curriculum_curves.rl_keys(tmp_path, seed=1)
    for changes in curriculum_curves.CURRICULA.values():
        run = parse(config_arguments(curriculum_curves.CONFIG, keys | changes))
        assert run.data.prompts_per_step * run.rollout.n == 128 and run.total_steps == 60
        n_prompts = [len(Path(path).read_text().splitlines()) for path in run.data.train]
        assert n_prompts == [192, 16, 16, 16]
    val = (tmp_path / "data" / "val.jsonl").read_text().splitlines()
    assert len(val) == 512 and not {*val} & {*Path(run.data.train[3]).read_text().splitlines()}


def test_the_picture_has_a_line_for_every_existing_run(tmp_path):
    for name in ("GRPO", "DAPO"):
        run_dir = SCRIPT["run_dir"](tmp_path, name)
        run_dir.mkdir()
        lines = [{"step": 0, "val/reward": 0.0}]
        lines += [{"step": i, "reward/mean": 0.5, "rollout/batches": 2.0} for i in (1, 2)]
        lines[-1]["val/reward"] = 0.75
        (run_dir / "metrics.jsonl").write_text("".join(json.dumps(line) + "\n" for line in lines))
    assert SCRIPT["curve"](SCRIPT["run_dir"](tmp_path, "DAPO")) == [(0, 0.0), (256, 0.75)]
    SCRIPT["draw"](SCRIPT["curves"](SCRIPT["ALGORITHMS"], tmp_path), tmp_path / "curves.svg")
    words = {e.text for e in ElementTree.parse(tmp_path / "curves.svg").iter() if e.text}
    assert {"GRPO", "DAPO"} < words and "PPO" not in words


@pytest.mark.parametrize("picture", SCRIPT["DRAWN_FROM_LOG"])
def test_pictures_of_logged_curves_are_up_to_date(picture, tmp_path):
    SCRIPT["draw"](SCRIPT["logged_curves"](picture), tmp_path / "curves.svg")
    drawn = (DOCS / f"curves_{picture}.svg").read_text()
    assert drawn == (tmp_path / "curves.svg").read_text()


@pytest.mark.parametrize(
    "name",
    ["quickstart", *(f"curves_{n}" for n in PICTURES)],
)
def test_the_words_of_pictures_are_inside_them(name):
    root = ElementTree.parse(DOCS / f"{name}.svg").getroot()
    left, top, width, height = (float(n) for n in root.attrib["viewBox"].split())
    for text in (e for e in root.iter() if e.tag.endswith("text")):
        length = 8 * len(text.text or "")  # pixels, of wide letters
        share = {"end": 1.0, "middle": 0.5}.get(text.get("text-anchor", ""), 0.0)
        start = float(text.attrib["x"]) - share * length
        assert left <= start and start + length <= left + width, text.text
        assert top + 10 <= float(text.attrib["y"]) <= top + height - 4, text.text


def test_logged_curves_are_those_of_the_log():
    log = (DOCS / "LOG.md").read_text()
    for runs in json.loads((DOCS / "curves.json").read_text()).values():
        for name, run in runs.items():
            [entry] = [e for e in log.split("\n## ") if e.startswith(run["log"])]
            missing = [a for a in run["accuracy"] if a and not re.search(rf"\b{a:.3f}\b", entry)]
            assert not missing and len(run["steps"]) == len(run["accuracy"]), name


@pytest.mark.slow
@pytest.mark.parametrize("name", MIN_ACCURACY)
def test_the_runs_learn_to_add(name, tmp_path):
    SCRIPT["train"](name, tmp_path, *([HALF] if name in SCRIPT["SCHEDULES"] else []))
    accuracy = [value for _, value in SCRIPT["curve"](SCRIPT["run_dir"](tmp_path, name))]
    assert accuracy[0] < 0.1 and max(accuracy) >= MIN_ACCURACY[name]
