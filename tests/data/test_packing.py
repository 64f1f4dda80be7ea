"""Tests of jaxrl/data/packing.py."""

import dataclasses

import jax
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from jaxrl.config.keys import LearnerConfig
from jaxrl.data.packing import gather, pack
from jaxrl.types import TrainingSample


def make_sample(item, prompt_len, response_len):
    """A sample whose tokens are unique in a test: 1000 * item + position in the sequence."""
    tokens = 1000 * item + np.arange(prompt_len + response_len, dtype=np.int32)
    return TrainingSample(
        prompt_tokens=tokens[:prompt_len],
        tokens=tokens[prompt_len:],
        loss_mask=np.ones(response_len, bool),
        rollout_logp=-0.001 * tokens[prompt_len:].astype(np.float32),
        prompt_id=item,
        advantages=item + 0.5 + 0.25 * np.arange(response_len, dtype=np.float32),
    )


def test_two_sequences_in_a_row_by_hand():
    # [0 1 | 2 3] takes 3 tokens, [1000 | 1001 1002] takes 2. The longer one is placed first, the
    # other one at the next multiple of 4.
    [packed] = pack(
        [make_sample(0, 2, 2), make_sample(1, 1, 2)], shapes=((1, 8),), align=4, n_ranks=1
    )
    batch = packed.batch
    np.testing.assert_array_equal(batch.tokens, [[0, 1, 2, 0, 1000, 1001, 0, 0]])
    np.testing.assert_array_equal(batch.targets, [[1, 2, 3, 0, 1001, 1002, 0, 0]])
    np.testing.assert_array_equal(batch.segments, [[1, 1, 1, 0, 2, 2, 0, 0]])
    np.testing.assert_array_equal(batch.positions, [[0, 1, 2, 0, 0, 1, 0, 0]])
    np.testing.assert_array_equal(batch.mask, [[0, 1, 1, 0, 1, 1, 0, 0]])
    np.testing.assert_array_equal(batch.response_len, [[2, 2, 2, 1, 2, 2, 1, 1]])
    np.testing.assert_array_equal(batch.advantages, [[0, 0.5, 0.75, 0, 1.5, 1.75, 0, 0]])
    np.testing.assert_allclose(
        batch.rollout_logp, [[0, -0.002, -0.003, 0, -1.001, -1.002, 0, 0]], rtol=1e-6
    )
    assert not batch.old_logp.any() and not batch.ref_logp.any()
    assert packed.padding_fraction == 3 / 8


def test_parts_are_at_the_targets_that_they_train():
    observed = np.array([0, 1, 1], np.int32)
    samples = [dataclasses.replace(make_sample(0, 2, 3), parts=observed), make_sample(1, 1, 2)]
    [packed] = pack(samples, shapes=((1, 8),), align=4, n_ranks=1)
    # prompt of 2: the first response token is the target of place 1
    assert packed.batch.parts.tolist() == [[0, 0, 1, 1, 0, 0, 0, 0]]


def test_batch_fields_have_the_declared_dtypes():
    [packed] = pack([make_sample(0, 2, 2)], shapes=((1, 8),), align=4, n_ranks=1)
    integers = {"tokens", "targets", "segments", "positions", "until", "copies"}
    fields = vars(packed.batch)
    names = "support", "experts", "images", "axis_positions", "parts", "teacher"
    assert [fields.pop(name) for name in names] == [None] * 6
    for name, array in fields.items():
        assert array.dtype == (np.int32 if name in integers else np.float32), name


lengths = st.lists(st.tuples(st.integers(1, 20), st.integers(0, 40)), min_size=1, max_size=40)


@settings(max_examples=150, deadline=None)
@given(
    lengths,
    st.sampled_from([1, 4, 8]),
    st.sampled_from([1, 2, 4]),
    st.sampled_from([(64,), (16, 64), (8, 16, 32, 64)]),
    st.sampled_from([64, 100, 200]),
    st.sampled_from([0, 1, 3]),
)
def test_any_packing_holds_every_sequence_once_aligned_and_unchanged(
    lens, align, n_ranks, row_lens, budget, halvings
):
    samples = [make_sample(i, p, r) for i, (p, r) in enumerate(lens)]
    learner = LearnerConfig(
        token_budget=budget, buckets=row_lens, halvings=halvings, segment_align=align
    )
    sizes = {"shapes": learner.shapes, "align": align, "n_ranks": n_ranks}
    packed = pack(samples, **sizes)

    seen = []
    for micro in packed:
        batch = micro.batch
        B, T = batch.tokens.shape
        assert B % n_ranks == 0 and (B // n_ranks, T) in learner.shapes
        for b in range(B):
            for segment in range(1, batch.segments[b].max() + 1):
                at = np.flatnonzero(batch.segments[b] == segment)
                if not len(at):
                    continue
                item = int(batch.tokens[b, at[0]]) // 1000
                p, r = lens[item]
                sequence = np.concatenate([samples[item].prompt_tokens, samples[item].tokens])
                # complete, in order, contiguous, aligned, targets shifted by one
                assert at[0] % align == 0 and np.array_equal(at, at[0] + np.arange(p + r - 1))
                np.testing.assert_array_equal(batch.tokens[b, at], sequence[:-1])
                np.testing.assert_array_equal(batch.targets[b, at], sequence[1:])
                np.testing.assert_array_equal(batch.positions[b, at], np.arange(p + r - 1))
                np.testing.assert_array_equal(batch.mask[b, at], np.arange(p + r - 1) >= p - 1)
                seen.append(item)
        padding = batch.segments == 0
        assert not batch.mask[padding].any() and (batch.response_len[padding] == 1).all()
    # a sequence of one token has no target, so no row holds it
    assert sorted(seen) == [i for i, (p, r) in enumerate(lens) if p + r > 1]

    targets = gather([micro.batch.targets for micro in packed], packed)
    logp = gather([micro.batch.rollout_logp for micro in packed], packed)
    for original, t, lp in zip(samples, targets, logp, strict=True):
        np.testing.assert_array_equal(t, original.tokens)
        np.testing.assert_array_equal(lp, original.rollout_logp)

    again = pack(samples, **sizes)
    assert [m.spans for m in again] == [m.spans for m in packed]
    jax.tree.map(np.testing.assert_array_equal, [m.batch for m in again], [m.batch for m in packed])


def test_as_few_micro_batches_as_possible():
    # 16 sequences of 20 tokens, rounded up to 24: a row of 64 holds two, so they need 8 rows, which
    # is 2 micro-batches of 4 rows on two ranks
    samples = [make_sample(i, 5, 16) for i in range(16)]
    packed = pack(samples, shapes=((2, 64),), align=8, n_ranks=2)
    assert [m.batch.tokens.shape for m in packed] == [(4, 64), (4, 64)]


def test_smallest_bucket_that_needs_no_extra_micro_batch_is_chosen():
    short = [make_sample(i, 4, 5) for i in range(8)]  # 8 tokens each
    [packed] = pack(short, shapes=((8, 8), (4, 16), (1, 64)), align=8, n_ranks=1)
    assert packed.batch.tokens.shape == (8, 8)
    # 24 tokens: two rows of 32 hold two sequences, and so does one row of 64
    medium = [make_sample(i, 4, 21) for i in range(2)]
    [packed] = pack(medium, shapes=((2, 32), (1, 64)), align=8, n_ranks=1)
    assert packed.batch.tokens.shape == (2, 32)
    # 20 tokens and align 4: a row of 32 holds one sequence, a row of 64 holds three
    three = [make_sample(i, 4, 17) for i in range(3)]
    [packed] = pack(three, shapes=((2, 32), (1, 64)), align=4, n_ranks=1)
    assert packed.batch.tokens.shape == (1, 64)


def test_remainder_takes_the_smallest_declared_shape():
    # 8 sequences of 23 tokens, rounded up to 24: five fill a row of 120, three need 72
    samples = [make_sample(i, 4, 20) for i in range(8)]
    shapes = ((1, 120), (1, 72), (1, 48))
    packed = pack(samples, shapes=shapes, align=8, n_ranks=1)
    assert [m.batch.tokens.shape for m in packed] == [(1, 120), (1, 72)]
    # on two ranks, 16 sequences are five per rank, then three per rank
    packed = pack([make_sample(i, 4, 20) for i in range(16)], shapes=shapes, align=8, n_ranks=2)
    assert [m.batch.tokens.shape for m in packed] == [(2, 120), (2, 72)]


def test_shapes_halve_in_rows_and_then_in_length():
    cfg = LearnerConfig(token_budget=16384, buckets=(4096,), halvings=2)
    assert cfg.shapes == ((1, 4096), (2, 4096), (4, 4096))
    cfg = LearnerConfig(token_budget=1024, halvings=2)
    assert cfg.shapes == ((1, 256), (1, 512), (1, 1024))
    assert LearnerConfig(token_budget=192, halvings=2).shapes == ((1, 192),)  # 96 is not aligned
    # declared row lengths are kept: only the number of rows is halved
    cfg = LearnerConfig(token_budget=1024, buckets=(256, 1024), halvings=1)
    assert cfg.shapes == ((2, 256), (4, 256), (1, 1024))


def test_ranks_are_balanced_by_cost():
    rng = np.random.default_rng(0)
    samples = [make_sample(i, 30, int(n)) for i, n in enumerate(rng.integers(1, 900, 64))]
    packed = pack(samples, shapes=((2, 1024),), align=8, n_ranks=4, linear_cost=100)
    for micro in packed:
        lens = np.zeros((4, len(samples)))
        for span in micro.spans:
            rank = span.row // (micro.batch.tokens.shape[0] // 4)
            lens[rank, span.item] = 30 + span.length - 1
        cost = (100 * lens + lens**2).sum(axis=1)
        if len(micro.spans) > 12:  # the last micro-batch may hold few
            assert cost.max() < 1.3 * cost.mean()


def test_empty_list_gives_no_micro_batch():
    assert pack([], shapes=((1, 8),), align=8, n_ranks=1) == []


@pytest.mark.parametrize(
    "lens, sizes, message",
    [
        ((4, 14), {}, r"prompt 0 sample 0 takes 17 tokens \(prompt 4 \+ response 14 - 1\)"),
        ((0, 4), {}, "prompt 0 has no tokens"),
        (
            (4, 4),
            {"shapes": ((2, 12),)},
            "2 rows of 12 tokens is not a multiple of the segment alignment 8",
        ),
        ((4, 4), {"shapes": ()}, "no shapes"),
    ],
)
def test_errors_name_the_key_to_set(lens, sizes, message):
    sizes = {"shapes": ((4, 8), (2, 16)), "align": 8, "n_ranks": 1} | sizes
    with pytest.raises(ValueError, match=message):
        pack([make_sample(0, *lens)], **sizes)
