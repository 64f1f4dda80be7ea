"""Tests of scripts/bench_attention.py."""

import argparse

import jax.numpy as jnp
import numpy as np
import pytest

from jaxrl.kernels.visibility import sees
from scripts import bench_attention
from scripts.bench_attention import Shape, conclusion, count_pairs, make_row


@pytest.mark.parametrize("right", [True, pytest.param(False, marks=pytest.mark.thorough)])
def test_a_tiny_shape_on_cpu(one_device, monkeypatch, capsys, right):
    monkeypatch.setattr("scripts.bench_attention.set_gpu_memory", lambda: None)
    if not right:
        monkeypatch.setattr("scripts.bench_attention.TOLERANCE", -1.0)
    failed = bench_attention.main(["--calls=1", "--shapes", "1x64:2/1/16:full"])
    lines = capsys.readouterr().out.splitlines()
    assert failed == int(not right)
    assert lines[2] == "1 x 64 tokens, 2/1 heads of 16, full"
    assert [line.split()[0] for line in lines[3:-1]] == ["blockwise"]
    if right:
        assert lines[-1] == "fastest: blockwise, which 'auto' takes"
    else:
        assert lines[3].endswith("WRONG") and lines[-1] == "no kernel is right for this shape"


@pytest.mark.parametrize("kind", ["full", "packed", "shared"])
@pytest.mark.parametrize("window", [0, 100])
def test_pairs_are_those_of_the_mask(kind, window):
    shape = Shape.of(f"1x512:2/1/8:{kind}:{window}")
    _, until, positions = make_row(shape, 0)
    oldest = np.maximum(positions - window + 1, 0) if window else np.zeros(512, int)
    place = np.arange(512)
    mask = sees(*map(jnp.asarray, (place[:, None], oldest[:, None], place, until, positions)))
    assert count_pairs(shape, positions) == np.sum(mask)


def test_shared_prompts_are_seen_by_all_responses():
    segments, until, positions = make_row(Shape.of("1x512:2/1/8:shared"), 0)
    assert set(until[:128]) == {511} and list(positions[126:130]) == [126, 127, 128, 129]
    assert len(set(segments)) > 2 and (positions[segments > 2].min()) == 128


def test_the_conclusion_names_the_value_of_the_config():
    times = {"triton": 3.0, "cudnn": 2.0}
    assert conclusion(times, "cudnn") == "fastest: cudnn, which 'auto' takes"
    assert conclusion(times, "triton") == (
        "fastest: config.model.attention='cudnn'; 'auto' takes 'triton', 1.50 times as long"
    )
    assert conclusion(times, "splash").endswith("'auto' takes 'splash'")  # it did not run


@pytest.mark.parametrize("text", ["1x64:3/2/16:full", "1x64:2/1:full", "1x64:2/1/16:other"])
def test_a_wrong_shape_is_named_with_its_form(text):
    with pytest.raises(argparse.ArgumentTypeError, match=r"is not ROWSxTOKENS:HEADS/KV_HEADS"):
        Shape.of(text)
