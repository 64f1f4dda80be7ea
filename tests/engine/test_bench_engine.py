"""Tests of scripts/bench_engine.py and scripts/make_workload.py."""

import dataclasses
import importlib.util
import json
import pathlib

import numpy as np
import pytest

SCRIPTS = pathlib.Path(__file__).parents[2] / "scripts"


def script(name: str):
    spec = importlib.util.spec_from_file_location(name, SCRIPTS / f"{name}.py")
    assert spec is not None and spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


@pytest.fixture(scope="module")
def bench():
    return script("bench_engine")


@pytest.fixture(scope="module")
def workload():
    return script("make_workload")


def test_the_roofline_sums_the_bytes_or_flops_of_every_step(bench):
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
    # states of 10 bytes are read and written for 2, 2 and 1 running sequences
    states = dataclasses.replace(sizes, state_bytes=10)
    assert bench.shortest_s(work, 2, states, peaks) == pytest.approx(3.6 + 12 + 1.84 + 1.0)


def test_copies_of_a_workload_multiply_its_samples(bench, tmp_path):
    step = {"prompts": [{"ids": [1, 2]}], "resp_len": [[3, 4]]}
    (tmp_path / "w.json").write_text(json.dumps({"steps": [step, step]}))
    (work,) = bench.read_workload(str(tmp_path / "w.json"), n_steps=1, copies=2)
    assert (work.n_requests, work.n_tokens, work.lens) == (4, 14, [[3, 4, 3, 4]])


def test_lengths_are_truncated_at_the_longest_and_have_the_mean(workload):
    found = workload.lengths(
        np.random.default_rng(0), (1000, 4), mean=14_000, longest=28_672, sigma=0.8
    )
    assert found.shape == (1000, 4) and found.min() > 0 and found.max() == 28_672
    assert abs(found.mean() - 14_000) < 1
    # ln(factor) + 0.8 z reaches ln(28,672) if the mean of the truncated lengths is 14,000: z = 1.08
    assert 0.13 < np.mean(found == 28_672) < 0.15
    with pytest.raises(ValueError, match=r"mean of 30.* longest of 20"):
        workload.lengths(np.random.default_rng(0), (4,), mean=30, longest=20, sigma=0.8)


@pytest.mark.thorough
def test_a_workload_runs_on_random_weights_of_a_shape(bench, workload, tmp_path, monkeypatch):
    shape = dict(
        model_type="qwen2", hidden_act="silu", hidden_size=32, intermediate_size=64,
        num_hidden_layers=1, num_attention_heads=4, num_key_value_heads=2, vocab_size=128,
        max_position_embeddings=512, rms_norm_eps=1e-6, rope_theta=1e4, tie_word_embeddings=True,
    )  # fmt: skip
    (tmp_path / "config.json").write_text(json.dumps(shape))
    file = str(tmp_path / "w.json")
    words = (
        f"--out {file} --prompts 2 --samples 2 --prompt-len 9 --mean-len 6 --max-len 10 --vocab 128"
    )
    monkeypatch.setattr("sys.argv", ["make_workload", *words.split()])
    workload.main()
    words = (
        f"--model {tmp_path} --random-weights --workload {file} --dtype bfloat16 --max-num-seqs 2"
    )
    monkeypatch.setattr("sys.argv", ["bench_engine", *words.split()])
    found = bench.bench(bench.parse_args())
    [work] = bench.read_workload(file, n_steps=1, copies=1)
    [measured] = found["all"]
    assert measured["tokens_per_s"] * measured["wall_s"] == pytest.approx(work.n_tokens)
    assert found["sizes"]["param_bytes"] == 2 and found["pool_pages"] == 2  # one of 64 tokens each
