"""Model FLOPs against the number of weights and visible keys."""

import dataclasses

import numpy as np
import pytest

from jaxrl.models.config import uniform_decoder
from jaxrl.models.decoder import decoder_specs
from jaxrl.models.flops import forward_flops
from jaxrl.models.spec import count_params
from tests.models.resized import resized

DENSE = uniform_decoder("llama", L=2, D=32, N=4, K=2, H=8, F=64, V=256)
EXPERTS = uniform_decoder(
    "mixtral", L=2, D=32, N=4, K=2, H=8, F=0, V=256, E=8, top_k=2, F_expert=16
)


@pytest.mark.parametrize("heads", [("vocab",), ("score",), ("vocab", "score")])
def test_two_flops_per_weight_except_lookups_and_norms(heads):
    cfg = dataclasses.replace(DENSE, heads=heads)
    idle = cfg.V * cfg.D + (2 * cfg.L + 1) * cfg.D  # embedding lookup and norms
    weights = count_params(decoder_specs(cfg)) - idle
    assert forward_flops(cfg, np.array([1])) == 2 * weights + 4 * cfg.L * 4 * 8


def test_a_token_counts_a_shared_expert_and_its_gate():
    wider = resized(EXPERTS, shared_F=24)
    more = forward_flops(wider, np.array([5])) - forward_flops(EXPERTS, np.array([5]))
    assert more == 2 * 5 * (
        count_params(decoder_specs(wider)) - count_params(decoder_specs(EXPERTS))
    )


def test_a_token_counts_only_its_own_experts():
    per_expert = 3 * EXPERTS.D * 16 * EXPERTS.L
    wider = resized(EXPERTS, top_k=3)
    more = forward_flops(wider, np.array([5])) - forward_flops(EXPERTS, np.array([5]))
    assert more == 2 * per_expert * 5


@pytest.mark.parametrize("window", [0, 3])
def test_pairs_of_tokens_and_keys_are_those_of_the_mask(window):
    cfg = resized(DENSE, windows=(window, window))
    n = 7
    i, j = np.mgrid[:n, :n]
    seen = (j <= i) & ((i - j < window) if window else True)
    one = forward_flops(cfg, np.array([1])) - 4 * cfg.L * 4 * 8
    got = forward_flops(cfg, np.array([n])) - n * one
    assert got == 4 * cfg.L * 4 * 8 * seen.sum()
    both = forward_flops(cfg, np.array([n, 2]))
    assert both == forward_flops(cfg, np.array([n])) + forward_flops(cfg, np.array([2]))
