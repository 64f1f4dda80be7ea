"""The pictures of configs/vision_quickstart.py: scripts/draw_pictures.py."""

import itertools
import random
import runpy
from pathlib import Path

import pytest

pytest.importorskip("PIL")
SCRIPT = runpy.run_path(str(Path(__file__).parents[1] / "scripts" / "draw_pictures.py"))


def test_no_picture_is_drawn_twice():
    rows = itertools.islice(SCRIPT["rows"](random.Random(0)), 300)
    assert len({row["images"][0]["bytes"] for row in rows}) == 300


def test_only_labels_above_four_have_mistakes():
    rng, wrong, many = random.Random(0), 0, 0
    for row in itertools.islice(SCRIPT["rows"](rng), 600):
        labelled = SCRIPT["label"](row, rng, 0.7)
        truth, response = row["reward_model"]["ground_truth"], labelled["response"]
        many += int(truth) > 4
        wrong += response != truth
        assert response == truth or (int(truth) > 4 and response == "4")
    assert wrong / many == pytest.approx(0.7, abs=0.1)
