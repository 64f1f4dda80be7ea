"""Sequences with common prefixes have these tokens once in a row.

Tests of jaxrl/data/rows.py and of its use in jaxrl/data/packing.py.
"""

import dataclasses

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from jaxrl.data.packing import gather, pack, sequence_lens, shared_lens
from jaxrl.types import TrainingSample


def make_sample(prompt, response, **fields):
    response = np.array(response, np.int32)
    return TrainingSample(
        prompt_tokens=np.array(prompt, np.int32),
        tokens=response,
        loss_mask=np.ones(len(response), bool),
        rollout_logp=-response.astype(np.float32),
        **fields,
    )


def test_two_samples_of_a_prompt_by_hand():
    # Prompt 1 2 3 with responses 7 8 and 9. The last prompt token predicts the first response
    # token of each, so it is in the row twice; 1 2 are there once.
    samples = [make_sample([1, 2, 3], [7, 8]), make_sample([1, 2, 3], [9])]
    [packed] = pack(samples, shapes=((1, 6),), align=1, n_ranks=1, share_prefixes=True)
    batch = packed.batch
    np.testing.assert_array_equal(batch.tokens, [[1, 2, 3, 7, 3, 0]])
    np.testing.assert_array_equal(batch.targets, [[2, 3, 7, 8, 9, 0]])
    np.testing.assert_array_equal(batch.segments, [[1, 1, 1, 1, 2, 0]])
    np.testing.assert_array_equal(batch.positions, [[0, 1, 2, 3, 2, 0]])
    np.testing.assert_array_equal(batch.mask, [[0, 0, 1, 1, 1, 0]])
    np.testing.assert_array_equal(batch.until, [[4, 4, 3, 3, 4, -1]])
    np.testing.assert_array_equal(batch.copies, [[2, 2, 1, 1, 1, 0]])
    np.testing.assert_array_equal(batch.response_len, [[2, 2, 2, 2, 1, 1]])
    np.testing.assert_array_equal(sequence_lens(batch), [4, 3])
    np.testing.assert_array_equal(shared_lens(batch), [0, 2])


def test_turns_of_conversations_form_a_tree():
    # An episode whose second conversation repeats the first turn (4 5) of the first one, and a
    # second episode of the same prompt: 1 2 3 | 4 5 6, then 1 2 3 4 5 | 8, then 1 2 3 | 9 9.
    samples = [
        make_sample([1, 2, 3], [4, 5, 6]),
        make_sample([1, 2, 3, 4, 5], [8], branch=1),
        make_sample([1, 2, 3], [9, 9]),
    ]
    [packed] = pack(samples, shapes=((1, 8),), align=1, n_ranks=1, share_prefixes=True)
    batch = packed.batch
    np.testing.assert_array_equal(batch.tokens, [[1, 2, 3, 4, 5, 5, 3, 9]])
    np.testing.assert_array_equal(batch.targets, [[2, 3, 4, 5, 6, 8, 9, 9]])
    np.testing.assert_array_equal(batch.positions, [[0, 1, 2, 3, 4, 4, 2, 3]])
    np.testing.assert_array_equal(batch.mask, [[0, 0, 1, 1, 1, 1, 1, 1]])
    np.testing.assert_array_equal(batch.until, [[7, 7, 5, 5, 4, 5, 7, 7]])
    np.testing.assert_array_equal(batch.copies, [[3, 3, 2, 2, 1, 1, 1, 1]])


def test_equal_responses_are_both_in_the_row():
    """Each has its advantage, and a target in the loss belongs to one sequence."""
    samples = [make_sample([1, 2], [3, 4]) for _ in range(2)]
    [packed] = pack(samples, shapes=((1, 8),), align=1, n_ranks=1, share_prefixes=True)
    np.testing.assert_array_equal(packed.batch.tokens, [[1, 2, 3, 2, 3, 0, 0, 0]])
    np.testing.assert_array_equal(packed.batch.mask, [[0, 1, 1, 1, 1, 0, 0, 0]])


def test_a_group_that_no_row_holds_is_split():
    # 8 samples of 12 + 4 - 1 = 15 tokens, of which 11 are shared: 15 + 7 * 4 = 43 tokens. A row of
    # 32 holds 15 + 4 * 4 = 31, the next one the other three. Without sharing it holds two.
    samples = [make_sample(range(12), [20 + i] * 4) for i in range(8)]
    how = dict(shapes=((1, 32),), align=1, n_ranks=1)
    packed = pack(samples, **how, share_prefixes=True)
    assert sorted(len(p.spans) for p in packed) == [3, 5] and len(pack(samples, **how)) == 4


def test_prefixes_end_on_multiples_of_the_alignment():
    # 23 prompt tokens: 16 of the 22 that may be shared; a branch has 23 + 5 - 1 - 16 = 11 tokens
    samples = [make_sample(range(23), [30 + i] * 5) for i in range(3)]
    [packed] = pack(samples, shapes=((1, 64),), align=8, n_ranks=1, share_prefixes=True)
    np.testing.assert_array_equal(shared_lens(packed.batch), [0, 16, 16])
    starts = [int(np.flatnonzero(packed.batch.segments[0] == i)[0]) for i in (1, 2, 3)]
    assert starts == [0, 32, 48]


def visible_tokens(batch, b, t):
    """The tokens that the token at [b, t] attends to, by the rule of `until`."""
    before = np.arange(t + 1)
    return batch.tokens[b, before[batch.until[b, : t + 1] >= t]]


groups = st.lists(
    st.tuples(
        st.integers(1, 30),  # prompt
        st.lists(st.integers(0, 12), min_size=1, max_size=6),  # responses
        st.booleans(),  # a later conversation continues the first response
    ),
    min_size=1,
    max_size=6,
)


@settings(max_examples=30, deadline=None)
@given(groups, st.sampled_from([1, 4, 8]), st.sampled_from([1, 2]), st.integers(0, 20))
def test_every_token_sees_its_sequence_and_nothing_else(lens, align, n_ranks, n_common):
    rng, samples = np.random.default_rng(0), []
    common = rng.integers(0, 50, n_common).tolist()  # a system prompt
    for group, (prompt_len, response_lens, continued) in enumerate(lens):
        prompt = common + rng.integers(0, 50, prompt_len).tolist()
        for n in response_lens:
            response = rng.integers(0, 50, n).tolist()
            samples.append(make_sample(prompt, response, group=group))
            if continued and n > 2:
                samples.append(make_sample(prompt + response[:-1], [1, 2], group=group, branch=1))
    shapes = ((1, 128), (2, 64), (1, 64))
    how = dict(shapes=shapes, align=align, n_ranks=n_ranks)
    packed = pack(samples, **how, share_prefixes=True)
    n_found = np.zeros(len(samples), int)
    for micro in packed:
        batch = micro.batch
        assert (batch.until >= 0).tolist() == (batch.segments > 0).tolist()
        counted = np.zeros_like(batch.copies)
        for span in micro.spans:
            sample = samples[span.item]
            sequence = np.concatenate([sample.prompt_tokens, sample.tokens])
            n_found[span.item] += 1
            places = span.start + np.arange(span.length)
            np.testing.assert_array_equal(batch.targets[span.row, places], sample.tokens)
            assert batch.mask[span.row, places].all()
            assert len(set(batch.segments[span.row, places])) <= 1
            for k, t in enumerate(places):
                n = len(sample.prompt_tokens) + k
                np.testing.assert_array_equal(visible_tokens(batch, span.row, t), sequence[:n])
                assert batch.positions[span.row, t] == n - 1
            if span.length:
                t = places[-1]
                counted[span.row, : t + 1] += batch.until[span.row, : t + 1] >= t
        if all(len(samples[s.item].tokens) for s in micro.spans):
            np.testing.assert_array_equal(counted, batch.copies)
    assert (n_found == 1).all()

    separate = pack(samples, **how)
    tokens = [sum(p.batch.tokens.size for p in some) for some in (packed, separate)]
    assert tokens[0] <= tokens[1] + 128 * len(separate)  # an overhead per micro-batch counts too
    got, want = (gather([p.batch.rollout_logp for p in some], some) for some in (packed, separate))
    for a, b in zip(got, want, strict=True):
        np.testing.assert_array_equal(a, b)


def test_samples_without_a_common_prefix_are_packed_as_without_sharing():
    samples = [make_sample([i, 1, 2, 3], [5] * (3 + i)) for i in range(8)]
    how = dict(shapes=((2, 32),), align=4, n_ranks=2)
    got, want = pack(samples, **how, share_prefixes=True), pack(samples, **how)
    assert [p.spans for p in got] == [p.spans for p in want]


@pytest.mark.parametrize("order", [(0, 1, 2, 3), (3, 1, 0, 2)])
def test_samples_of_a_prompt_share_it_in_any_order(order):
    samples = [make_sample([9 * (i % 2), 1, 2, 3, 4], [5 + i]) for i in range(4)]
    [packed] = pack(
        [dataclasses.replace(samples[i]) for i in order],
        shapes=((1, 16),),
        align=1,
        n_ranks=1,
        share_prefixes=True,
    )
    assert sorted(shared_lens(packed.batch)) == [0, 0, 4, 4]
