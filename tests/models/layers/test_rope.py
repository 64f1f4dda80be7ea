"""Rotary frequencies against those of transformers (scripts/make_golden.py) and by hand."""

import functools
import json
from pathlib import Path

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from jaxrl.models.config import AttentionConfig
from jaxrl.models.families.rotary import read_rope, scaling_json
from jaxrl.models.layers.rope import Rotation, inverse_frequencies, rotate, rotations
from jaxrl.models.rope_config import Rope

CASES = json.loads((Path(__file__).parent / "golden_rope.json").read_text())
YARN = dict(rope_type="yarn", rope_theta=1e6, factor=4.0, original_max_position_embeddings=32768)


def read(parameters: dict, max_len: int = 131072) -> Rope:
    return read_rope(dict(rope_parameters=parameters, max_position_embeddings=max_len))


@pytest.mark.parametrize("case", CASES, ids=lambda case: case["name"])
def test_frequencies_and_amplitudes_are_those_of_transformers(case):
    rope = read(case["rope_parameters"])
    found = inverse_frequencies(rope, case["head_dim"])
    np.testing.assert_allclose(found, case["inv_freq"], rtol=2e-6)
    assert rope.attention_factor == pytest.approx(case["attention_factor"], rel=1e-6)


@pytest.mark.parametrize("case", CASES, ids=lambda case: case["name"])
def test_exported_parameters_give_the_same_rope(case):
    rope = read(case["rope_parameters"])
    exported = dict(rope_theta=rope.theta, rope_scaling=scaling_json(rope))
    assert read_rope(exported | dict(max_position_embeddings=131072)) == rope


def test_qwen_writes_and_reads_the_entry_of_its_model_card():
    card = dict(factor=4.0, original_max_position_embeddings=32768, type="yarn")
    rope = read_rope(dict(rope_theta=1e6, rope_scaling=card, max_position_embeddings=32768))
    assert rope == read(YARN)
    assert rope.attention_factor == pytest.approx(1.1386294)  # 0.1 ln 4 + 1
    assert scaling_json(rope) == {k: v for k, v in card.items() if k != "type"} | dict(
        rope_type="yarn"
    )


def test_the_original_length_is_that_of_the_model_unless_given():
    parameters = {k: v for k, v in YARN.items() if not k.startswith("original")}
    assert read(parameters, max_len=4096).original_len == 4096
    ratio = {k: v for k, v in YARN.items() if k != "factor"}
    assert read(ratio).factor == 4.0  # 131072 / 32768


def mixer(**rope) -> AttentionConfig:
    return AttentionConfig(N=1, K=1, H=8, rope=Rope(**rope))


def test_the_amplitude_scales_scores_by_its_square():
    q = jnp.asarray(np.random.default_rng(0).standard_normal((1, 3, 2, 8)), jnp.float32)
    positions = jnp.array([[0, 5, 40]])
    plain, scaled = (
        rotate(q, positions, rotations([mixer(attention_factor=factor)])) for factor in (1.0, 1.5)
    )
    products = [jnp.einsum("BTNH,BSNH->BNTS", x, x) for x in (plain, scaled)]
    np.testing.assert_allclose(products[1], 2.25 * products[0], rtol=1e-5)


def test_only_models_with_an_amplitude_multiply_by_it():
    assert rotations([mixer(), mixer(kind="linear", factor=2.0)]).amplitude is None
    both = rotations([mixer(), mixer(attention_factor=1.5)])
    np.testing.assert_array_equal(both.amplitude, np.float32([1.0, 1.5]))


def test_rotation_on_tpu_gives_the_bits_of_halves(monkeypatch):
    """Values and gradients in bfloat16, in both orders in memory."""
    numbers = np.random.default_rng(0).standard_normal((2, 1, 5, 2, 8))
    x, d_out = jnp.asarray(numbers, jnp.bfloat16)
    positions = jnp.array([[0, 1, 2, 700, 701]])
    rotation = Rotation(jnp.array([1.0, 0.3, 0.1, 0.01]), jnp.float32(1.5))
    results = []
    for platform, heads_first in (("cpu", False), ("tpu", False), ("tpu", True)):
        monkeypatch.setattr("jaxrl.models.layers.rope.target_platform", lambda p=platform: p)
        rotated = functools.partial(rotate, rotation=rotation, heads_first=heads_first)
        out, pull = jax.vjp(functools.partial(rotated, positions=positions), x)
        results.append((out, *pull(d_out)))
    for halves, *products in zip(*results, strict=True):
        for product in products:
            np.testing.assert_array_equal(halves, product)
