"""The bound that scripts/bench_engine.py measures the engine against."""

import importlib.util
import json
import pathlib

import numpy as np
import pytest

SCRIPT = pathlib.Path(__file__).parents[2] / "scripts" / "bench_engine.py"


@pytest.fixture(scope="module")
def bench():
    spec = importlib.util.spec_from_file_location("bench_engine", SCRIPT)
    assert spec is not None and spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def test_the_bound_adds_up_what_every_step_must_read_or_compute(bench):
    work = bench.Work([np.arange(5), np.arange(3)], [[2], [3]])
    sizes = bench.Sizes(layer_params=90, head_params=10, param_bytes=4, key_bytes=8, key_flops=2)
    peaks = bench.Peaks(bytes_per_s=100.0, flops_per_s=500.0)
    # prompts: 4 + 2 tokens, max(360 bytes / 100, 2 * 90 * 6 flops / 500) = 3.6 s
    # both slots: keys 5 + 3, 6 + 4, 5: weights 3 * max(400 / 100, 2 * 100 * 2 / 500) = 12 s,
    # keys (8 + 10 + 5) * 8 / 100 = 1.84 s
    assert bench.shortest_s(work, 2, sizes, peaks) == pytest.approx(3.6 + 12 + 1.84)
    # one slot: five steps, keys 5, 6, then 3, 4, 5
    assert bench.shortest_s(work, 1, sizes, peaks) == pytest.approx(3.6 + 20 + 1.84)
    # few flops per second: every product is bound by them, 2 * 100 * rows / 10
    slow = bench.Peaks(bytes_per_s=100.0, flops_per_s=10.0)
    keys = 23 * 2 / 10
    assert bench.shortest_s(work, 2, sizes, slow) == pytest.approx(108 + 20 * 5 + keys)


def test_copies_of_a_workload_multiply_its_samples(bench, tmp_path):
    step = {"prompts": [{"ids": [1, 2]}], "resp_len": [[3, 4]]}
    (tmp_path / "w.json").write_text(json.dumps({"steps": [step, step]}))
    (work,) = bench.read_workload(str(tmp_path / "w.json"), n_steps=1, copies=2)
    assert (work.n_requests, work.n_tokens, work.lens) == (4, 14, [[3, 4, 3, 4]])
