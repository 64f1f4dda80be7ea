import dataclasses

import numpy as np
import pytest

from jaxrl.api.lanes import (
    MIN_CHUNK,
    MIN_LOGITS,
    dispatch_size,
    lane_chunk,
    max_lanes,
    pack_lanes,
)
from jaxrl.config.keys import LearnerConfig, RunConfig
from jaxrl.models.config import uniform_decoder
from jaxrl.types import TrainingSample

LEARNER = LearnerConfig(token_budget=256, halvings=2)  # rows of 256, 128 and 64 tokens
CFG = dataclasses.replace(RunConfig(), learner=LEARNER)


def sample(n: int) -> TrainingSample:
    """A sequence of n + 1 tokens, which takes n tokens of a row."""
    return TrainingSample(
        prompt_tokens=np.zeros(1, np.int32),
        tokens=np.ones(n, np.int32),
        loss_mask=np.ones(n, bool),
    )


@pytest.mark.parametrize(
    ("lens", "shapes"),
    [
        ([5], [(1, 64)]),
        ([100], [(1, 128)]),
        # 3 * 64 tokens: 2 rows of 128 or 1 of 256 have more than 3 of 64.
        ([40, 50, 60], [(1, 64)] * 3),
        # 128 + 2 * 64 tokens: one row of 256 has as few as two of 128.
        ([100, 50, 60], [(1, 256)]),
    ],
)
def test_the_lanes_of_a_call_have_the_fewest_tokens(lens, shapes):
    targets = [np.arange(n) for n in lens]
    packed = pack_lanes([sample(n) for n in lens], targets, CFG, n_ranks=1)
    assert [micro.batch.tokens.shape for micro in packed] == shapes
    for micro in packed:
        for span in micro.spans:
            placed = micro.batch.targets[span.row, span.start : span.start + span.length]
            np.testing.assert_array_equal(placed, targets[span.item])


def test_a_dispatch_has_the_tokens_of_a_micro_batch_or_a_part_of_them():
    assert [max_lanes(CFG, n) for n in (256, 128, 64)] == [1, 2, 4]
    dense = uniform_decoder("qwen3", L=1, D=8, N=1, K=1, H=8, F=8, V=8)
    experts = uniform_decoder(
        "qwen3_moe", L=1, D=8, N=1, K=1, H=8, F=8, V=8, E=2, top_k=1, F_expert=8
    )
    assert [dispatch_size(n, 4, dense) for n in (1, 2, 3, 4)] == [1, 2, 4, 4]
    assert dispatch_size(1, 4, experts) == 4


@pytest.mark.parametrize("chunk", [100, 256, 1024, 4096])
@pytest.mark.parametrize("budget", [256, 4096, 16384])
def test_the_logits_of_a_dispatch_are_those_of_a_chunk(chunk, budget):
    """The weights of the head are read once for a short lane, and logits stay within memory."""
    learner = LearnerConfig(token_budget=budget, halvings=5, logprob_chunk=chunk)
    cfg = dataclasses.replace(RunConfig(), learner=learner)
    for rows, row_len in learner.shapes:
        if rows == 1:
            lanes, size = max_lanes(cfg, row_len), lane_chunk(cfg, row_len)
            assert 1 <= lanes <= budget // row_len
            assert lanes * size <= max(chunk, MIN_LOGITS)
            assert size >= min(chunk, MIN_CHUNK)
    assert lane_chunk(cfg, budget) == chunk
