"""Tests of jaxrl/data/mixing.py: shares of the sources of a batch."""

import collections
import json

import numpy as np
import pytest

from jaxrl.data.iterator import EndlessItems
from jaxrl.data.mixing import MixedIterator, most_per_step
from jaxrl.types import Prompt

SIZES = (40, 7, 100)


def prompt(number):
    return Prompt(id=number, messages=(), tokens=np.zeros(1, np.int32), answer="")


def mixed(weights, final=(), ramp=0, per_step=8, skip_solved=0.0):
    starts = np.cumsum([0, *SIZES])
    sources = [
        EndlessItems(
            [prompt(int(starts[i]) + n) for n in range(size)], shuffle=True, seed=i, min_left=1
        )
        for i, size in enumerate(SIZES)
    ]
    return MixedIterator(
        sources,
        prompts_per_step=per_step,
        weights=weights,
        final_weights=final,
        ramp=ramp,
        skip_solved=skip_solved,
        identity={"n_prompts": list(SIZES)},
    )


def source_of(number):
    return int(np.searchsorted(np.cumsum(SIZES), number, side="right"))


def take(iterator, n):
    return [[p.id for p in next(iterator)] for _ in range(n)]


def counts(batches):
    found = collections.Counter(source_of(i) for batch in batches for i in batch)
    return [found[i] for i in range(len(SIZES))]


def test_every_step_has_the_shares_of_the_weights():
    batches = take(mixed((5.0, 1.0, 2.0)), 20)
    assert counts(batches) == [100, 20, 40]
    assert all(counts([batch]) == [5, 1, 2] for batch in batches)


def test_shares_that_are_no_whole_items_are_met_over_several_steps():
    batches = take(mixed((0.55, 0.05, 0.4)), 25)
    assert counts(batches) == [110, 10, 80]  # of 200
    assert all(3 <= counts([batch])[0] <= 6 for batch in batches)


def test_a_source_is_repeated_only_after_all_of_its_items():
    numbers = [i for batch in take(mixed((0.0, 1.0, 0.0), per_step=7), 3) for i in batch]
    assert [sorted(numbers[i : i + 7]) for i in (0, 7, 14)] == [list(range(40, 47))] * 3
    assert numbers[:7] != numbers[7:14]


def test_the_weights_move_to_the_final_weights():
    batches = take(mixed((1.0, 0.0, 0.0), final=(0.0, 0.0, 1.0), ramp=4), 8)
    # shares of the third source: 0, 1/4, 1/2, 3/4, 1, ...
    assert [counts([batch])[2] for batch in batches] == [0, 2, 4, 6, 8, 8, 8, 8]


@pytest.mark.parametrize("steps_before", [0, 3, 30])
def test_restore_continues_identically(steps_before):
    args = dict(weights=(0.7, 0.1, 0.2), final=(0.1, 0.1, 0.8), ramp=20)
    uninterrupted = mixed(**args)
    take(uninterrupted, steps_before)
    resumed = mixed(**args)
    resumed.restore(json.loads(json.dumps(uninterrupted.state())))
    assert take(uninterrupted, 25) == take(resumed, 25)
    assert uninterrupted.state() == resumed.state()


def test_solved_prompts_are_skipped_in_their_source_only():
    iterator = mixed((1.0, 1.0, 0.0), per_step=4, skip_solved=1.0)
    iterator.record([(i, 1.0) for i in (*range(36), 41)])
    batches = take(iterator, 30)
    assert iterator.metrics() == {"data/solved": 37.0}
    assert {i for batch in batches for i in batch} == {36, 37, 38, 39, 40, *range(42, 47)}


def test_a_checkpoint_with_other_weights_is_rejected():
    with pytest.raises(ValueError, match=r"has weights = .*data\.weights"):
        mixed((1.0, 1.0, 1.0)).restore(mixed((1.0, 1.0, 2.0)).state())


def test_a_source_that_is_too_small_for_its_share_is_an_error():
    few = most_per_step(64, 0.5, 2)
    assert few == 34  # 32, and one per source
    with pytest.raises(ValueError, match=r"5 prompts do not fill one step of 34; lower .*weight"):
        EndlessItems(range(5), shuffle=False, seed=0, min_left=few)
