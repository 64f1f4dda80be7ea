"""Tests of jaxrl/models/config.py: what a run and its platform decide."""

import dataclasses

import jax.numpy as jnp
import pytest

from jaxrl.config.keys import RunConfig
from jaxrl.models.config import for_platform, uniform_decoder
from jaxrl.models.rope_config import Rope
from tests.models.resized import resized

TINY = uniform_decoder("llama", L=1, D=16, N=2, K=1, H=8, F=32, V=64, tied=True)


def run(**model):
    cfg = RunConfig()
    return dataclasses.replace(cfg, model=dataclasses.replace(cfg.model, **model))


@pytest.mark.parametrize(
    ("platform", "dtype", "stacked"),
    [("cpu", "float32", False), ("gpu", "bfloat16", False), ("tpu", "bfloat16", True)],
)
def test_auto_follows_the_platform(platform, dtype, stacked):
    found, decoder = for_platform(run(), TINY, platform)
    assert found == jnp.dtype(dtype) and decoder.stacked == stacked


@pytest.mark.parametrize(
    ("key", "name", "platform", "needs"),
    [
        ("attention", "splash", "cpu", "tpu"),
        ("attention", "triton", "tpu", "gpu"),
        ("attention", "cudnn", "cpu", "gpu"),
        ("paged_attention", "ragged", "gpu", "tpu"),
        ("gated_delta", "mosaic", "gpu", "tpu"),
    ],
)
def test_a_kernel_of_another_platform_is_refused(key, name, platform, needs):
    with pytest.raises(ValueError, match=f"model.{key}='{name}' runs on {needs} and .* {platform}"):
        for_platform(run(**{key: name}), TINY, platform)
    assert for_platform(run(**{key: name}), TINY, needs)


def test_yarn_extends_the_longest_sequence():
    rope = Rope(kind="yarn", factor=4.0, original_len=2048)
    assert resized(TINY, max_len=2048, rope=rope).context_len == 8192
    assert resized(TINY, max_len=16384, rope=rope).context_len == 16384
    assert resized(TINY, max_len=2048, rope=Rope(kind="linear")).context_len == 2048
