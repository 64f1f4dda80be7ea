"""Formulas of traffic next to products with weights, by hand."""

import dataclasses

import pytest

from jaxrl.models.config import (
    DecoderConfig,
    LayerConfig,
    MLPConfig,
    MoEConfig,
    RouterConfig,
)
from jaxrl.models.state_mixers import GatedDeltaNetConfig
from jaxrl.planner.traffic import (
    RULE_ARRAYS,
    RULE_MOVES,
    copied_features,
    kept_rule_features,
    rule_seconds,
    rule_work_bytes,
)

DELTA = LayerConfig(GatedDeltaNetConfig(K=1, N=2, D=128, V=128), MLPConfig(64))
MODEL = DecoderConfig("qwen3_5", D=64, V=256, layers=(DELTA, DELTA))
# Of 2 layers with 2 value heads: values, keys, 64 pairs, and 1/64 of a state.
FEATURES = 4 * (128 + 128 + 64 + 256)


def test_the_rule_takes_the_time_of_its_traffic_or_of_its_products():
    assert rule_seconds(MODEL, 1e30, 1.0) == 4 * RULE_MOVES * FEATURES
    value_head = 64 * (2 * 128 + 128) + 3 * 128 * 128
    products = 2 * 2 * (2 * value_head + 2 * 64 * 128)
    assert rule_seconds(MODEL, 1.0, 1e30) == products


def test_backward_keeps_outputs_and_the_arrays_of_heads_that_are_computed_together():
    assert kept_rule_features(MODEL) == 2 * 2 * 128
    of_head = 4 * RULE_ARRAYS * FEATURES / 4
    assert rule_work_bytes(MODEL, 100, tensor=2) == pytest.approx(100 * of_head)
    assert rule_work_bytes(MODEL, 1e9, tensor=1) == pytest.approx(8192 * 32 * of_head)
    assert rule_work_bytes(dataclasses.replace(MODEL, layers=()), 100, tensor=1) == 0


def test_copies_of_tokens_have_the_room_of_expert_parallelism():
    mixture = LayerConfig(DELTA.mixer, MoEConfig(E=8, router=RouterConfig(top_k=2), F=4))
    model = dataclasses.replace(MODEL, D=8, layers=(mixture, DELTA))
    assert copied_features(model, expert=1, tensor=1) == 2 * (2 * 8 + 3 * 4)
    assert copied_features(model, expert=4, tensor=2) == 2 * 2 * (2 * 8 + 3 * 2)
