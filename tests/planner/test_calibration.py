"""Calibrated times (jaxrl/planner/calibration.py), and published steps next to them."""

import ast
import dataclasses
import importlib
import importlib.util
import pathlib
import types

import pytest

from jaxrl.config.config_file import load_config
from jaxrl.config.resolve import resolve
from jaxrl.planner import calibration
from jaxrl.planner.calibration import GPU, calibrated_seconds, factors_of, round_seconds
from jaxrl.planner.chips import CHIPS, split_name
from jaxrl.planner.compiled.timeline import Kernel, Loop, kernel_times
from jaxrl.planner.model_shape import model_shape

ROOT = pathlib.Path(__file__).parents[2]
BENCH = ROOT / "configs" / "bench"
PAGE = ROOT / "docs" / "concepts" / "planner_accuracy.md"


def accuracy_script() -> types.ModuleType:
    """scripts/plan_accuracy.py."""
    file = ROOT / "scripts" / "plan_accuracy.py"
    spec = importlib.util.spec_from_file_location("plan_accuracy", file)
    script = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(script)
    return script


SCRIPT = accuracy_script()


def test_kernels_are_summed_by_what_bounds_them():
    # 1 flop and 1 byte take 1 s; a cycle 1 s.
    chip = dataclasses.replace(
        CHIPS["v6e"], flops_per_s={"f32": 1.0}, memory_bytes_per_s=1.0, clock_hz=1.0
    )
    product, copy = Kernel({"f32": 3.0}, 1.0), Kernel({}, 2.0)
    attention, estimated = Kernel({"f32": 5.0}, 1.0, attention=True), Kernel({}, 1.0, 7.0)
    found = kernel_times([product, Loop(10.0, [copy, attention]), estimated], chip)
    assert found == {"products": 3, "memory": 20, "attention": 50, "estimated": 7, "count": 22}
    # Without a clock the estimate is not used.
    assert kernel_times([estimated], dataclasses.replace(chip, clock_hz=0.0))["memory"] == 1


def test_a_call_takes_the_shares_of_its_chip_and_the_collectives_that_nothing_covers():
    moved = {"count": 10, "bytes": 1, "seconds": 2.0, "exposed_s": 0.5}
    program = {
        "kernels": {"products": 0.66, "attention": 0.4, "memory": 0.85, "count": 1000.0},
        "collectives": {"all-gather": moved},
        "seconds": {"host": 3.0},
    }
    # 1 s of each kind of kernel, 1.2 ms between them; a quarter of ten collectives of 17 us each
    expected = 3 + 1.2e-3 + 0.5 / 0.75 + 2.5 * 17e-6 + 3.0
    assert calibrated_seconds("accumulate", program, GPU) == pytest.approx(expected)
    in_loop = calibrated_seconds("decode", program, GPU)
    assert in_loop == pytest.approx(expected + 30e-6)
    assert round_seconds(100, GPU) == pytest.approx(0.12e-3 + 100 * 7.5e-6)


def test_chips_without_evidence_have_no_factors():
    assert factors_of(CHIPS["cpu"]) is None and factors_of(CHIPS["v7x"]) is None
    assert factors_of(CHIPS["h200"]) is GPU and factors_of(CHIPS["v5p"]) is calibration.TPU
    assert factors_of(CHIPS["v6e"])["attention"].value == 0.45


@pytest.mark.parametrize("table", ["GPU", "TPU", "WIDE_TPU"])
def test_every_factor_is_in_the_page(table):
    page = PAGE.read_text()
    for name, factor in getattr(calibration, table).items():
        assert factor.status in ("fit", "measured", "assumed")
        assert SCRIPT.factor_row(name, factor) in page


@pytest.mark.parametrize("name", SCRIPT.CASES)
def test_published_training_steps_are_within_a_quarter(name):
    """Except one of two nodes; the page says why. Decode has only its row."""
    ratio = SCRIPT.seconds_of(name) / SCRIPT.PUBLISHED[name]
    if SCRIPT.CASES[name][1] == SCRIPT.TRAINING and name != "llama2_7b_2a3":
        assert 0.8 <= ratio <= 1.25
    page = PAGE.read_text()
    assert SCRIPT.page_row(name) in page and f"\n- `{name}`: " in page


@pytest.mark.parametrize("file", sorted(BENCH.glob("*.py")), ids=lambda file: file.stem)
def test_a_benchmark_resolves_for_its_devices_and_has_its_command(file):
    doc = ast.get_docstring(ast.parse(file.read_text())) or ""
    name = file.stem
    assert f"--config=configs/bench/{name}.py" in doc
    topology = SCRIPT.CASES.get(name, ("h100:64" if "64" in name else "h100:8",))[0]
    cfg = resolve(load_config(str(file)), n_devices=split_name(topology)[1])
    assert cfg.name == name and model_shape(cfg.model.path)
    assert importlib.import_module(f"configs.bench.{name}").get_config() is not None
