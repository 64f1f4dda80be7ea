"""Tests of the comparison of runs: jaxrl/compare.py, and comparison.py and compare_page.py of
jaxrl/report."""

import json
import math

import pytest

from jaxrl.compare import main, side_names
from jaxrl.config.keys import RunConfig
from jaxrl.report.compare_page import render_comparison
from jaxrl.report.comparison import (
    Estimate,
    config_rows,
    curve,
    difference,
    final_value,
    last_common_step,
    read_side,
    version_rows,
)
from tests.report.test_report import HOSTILE, Page, data_of, write_run


def write(folder, values, *, seed=0, jax="1.0", commit="abc", stderr=None, **config):
    """A run with val/reward at the steps of `values`."""
    metrics = [
        {"step": step, "val/reward": value} | ({"val/reward_stderr": stderr} if stderr else {})
        for step, value in values.items()
    ]
    write_run(folder, metrics, config=RunConfig(name=folder.name, seed=seed, **config))
    start = {"step": 0, "commit": commit, "devices": "2 x cpu", "versions": {"jax": jax}}
    (folder / "starts.jsonl").write_text(json.dumps(start) + "\n")
    return folder


@pytest.fixture
def sides(tmp_path):
    """Two sides of two seeds each."""
    a = [write(tmp_path / f"grpo-{i}", {0: 0.0, 10: v}, seed=i) for i, v in enumerate((0.4, 0.6))]
    b = [
        write(tmp_path / f"dapo-{i}", {0: 0.0, 10: v}, seed=i, jax="2.0", total_steps=9)
        for i, v in enumerate((0.8, 0.9))
    ]
    return [read_side("grpo", a), read_side("dapo", b)]


def test_a_curve_is_the_mean_at_common_steps_and_its_band_the_spread():
    runs = [[(0, 0.0), (10, 0.4), (20, 0.5)], [(0, 0.2), (10, 0.6)]]
    assert curve(runs) == ([(0, 0.1), (10, 0.5)], [(0, 0.0, 0.2), (10, 0.4, 0.6)])
    assert curve(runs[:1]) == (runs[0], [])


def test_the_interval_of_seeds_is_that_of_students_t(sides):
    found = final_value(sides[0], "val/reward", 10)
    # mean 0.5, standard deviation 0.1414, of the mean 0.1; t(0.975, 1 degree) = 12.706
    assert (found.value, found.basis) == (pytest.approx(0.5), "seeds")
    assert found.half == pytest.approx(12.706 * 0.1, rel=1e-4)


def test_the_interval_of_a_difference_is_welchs():
    first, second = (
        Estimate(v, 1.0, variance, 4, "seeds") for v, variance in ((1.0, 4.0), (3.0, 4.0))
    )
    found = difference(first, second)
    # variance 8, degrees of freedom 8^2 / (4^2 / 4 + 4^2 / 4) = 8; t(0.975, 8) = 2.306
    assert (found.value, found.df) == (2.0, 8.0)
    assert found.half == pytest.approx(2.306 * math.sqrt(8), rel=1e-4)


def test_one_run_has_the_interval_of_its_prompts_or_none(tmp_path):
    with_error = read_side("a", [write(tmp_path / "a", {5: 0.5}, stderr=0.1)])
    assert final_value(with_error, "val/reward", 5).half == pytest.approx(0.196, rel=1e-3)
    without = read_side("b", [write(tmp_path / "b", {5: 0.5})])
    assert final_value(without, "val/reward", 5).half is None


def test_runs_of_different_lengths_are_compared_at_their_last_common_step(tmp_path):
    long = write(tmp_path / "long", {0: 0.0, 10: 0.5, 20: 0.9})
    short = write(tmp_path / "short", {0: 0.0, 10: 0.6})
    both = [read_side("long", [long]), read_side("short", [short])]
    assert last_common_step(both, "val/reward") == 10
    words = Page(render_comparison(both)).words
    assert "different lengths" in words
    assert "+0.100" in words


def test_differences_of_configuration_and_versions_are_listed(sides):
    assert dict(config_rows(sides)) == {"seed": ["0, 1", "0, 1"], "total_steps": ["0", "9"]}
    differing = {name: values for name, values, differs in version_rows(sides) if differs}
    assert differing == {"jax": ["1.0", "2.0"]}


def test_the_page_embeds_its_curves_with_their_bands(sides):
    page = Page(render_comparison(sides))
    (chart,) = data_of(page)["charts"]
    assert [line["label"] for line in chart["lines"]] == ["grpo (2 runs)", "dapo (2 runs)"]
    assert chart["lines"][1]["points"] == [[0, 0.0], [10, 0.85]]
    assert chart["lines"][1]["band"] == [[0, 0.0, 0.0], [10, 0.8, 0.9]]
    for tag, attrs in page.elements:
        assert tag not in ("link", "iframe", "img", "base")
        assert not {"src", "href", "srcset", "action"} & set(attrs), (tag, attrs)


def test_names_with_markup_are_text(tmp_path):
    run = write(tmp_path / "run", {0: 0.0})
    page = Page(render_comparison([read_side(HOSTILE, [run]), read_side("b", [run])]))
    assert len(page.scripts) == 2
    assert "alert(1)" in page.words


def test_runs_without_metrics_say_so(tmp_path):
    (tmp_path / "a").mkdir()
    side = read_side("a", [tmp_path / "a"])
    words = Page(render_comparison([side, side])).words
    for sentence in ("no metrics yet in a, a", "No metrics to compare", "no starts.jsonl"):
        assert sentence in words


def test_sides_are_named_by_their_folders_without_seeds(tmp_path):
    folders = [[tmp_path / "grpo-seed1", tmp_path / "grpo-seed2"], [tmp_path / "dapo-3"]]
    assert side_names(folders) == ["grpo", "dapo-3"]
    assert side_names([[tmp_path / "x"], [tmp_path / "y" / "x"]]) == ["A", "B"]


def test_the_command_writes_one_page(sides, tmp_path, capsys):
    runs = [str(tmp_path / name) for name in ("grpo-0", "grpo-1", "dapo-0", "dapo-1")]
    out = str(tmp_path / "page.html")
    assert main(["--a", *runs[:2], "--b", *runs[2:], "--output", out]) == 0
    assert capsys.readouterr().out.strip() == out
    assert "grpo against dapo" in (tmp_path / "page.html").read_text()
    assert main([runs[0], str(tmp_path / "nowhere"), "--output", out]) == 1
    assert "is not a folder; pass a run folder" in capsys.readouterr().err
    with pytest.raises(SystemExit, match="2"):
        main([runs[0]])
    assert "two sides are needed" in capsys.readouterr().err
