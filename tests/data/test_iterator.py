import json

import numpy as np
import pytest

from jaxrl.data.iterator import BatchIterator, StepItems
from jaxrl.types import Prompt


def prompts(n):
    return [Prompt(id=i, messages=(), tokens=np.zeros(1, np.int32), answer="") for i in range(n)]


def iterate(n=10, per_step=3, shuffle=True, seed=5, skip_solved=False):
    return BatchIterator(
        prompts(n), prompts_per_step=per_step, shuffle=shuffle, seed=seed, skip_solved=skip_solved
    )


def take(iterator, n):
    return [[p.id for p in next(iterator)] for _ in range(n)]


def test_each_epoch_has_every_prompt_once_in_a_new_order():
    iterator = iterate(n=12, per_step=4)
    epochs = [np.concatenate(take(iterator, 3)) for _ in range(4)]
    for epoch in epochs:
        assert sorted(epoch) == list(range(12))
    assert len({tuple(epoch) for epoch in epochs}) == 4


def test_the_dropped_remainder_differs_between_epochs():
    iterator = iterate(n=10, per_step=3)
    assert iterator.steps_per_epoch == 3
    dropped = [set(range(10)) - set(np.concatenate(take(iterator, 3))) for _ in range(8)]
    assert all(len(ids) == 1 for ids in dropped)
    assert len(set.union(*dropped)) > 1


def test_without_shuffle_the_order_is_that_of_the_data():
    assert take(iterate(shuffle=False), 4) == [[0, 1, 2], [3, 4, 5], [6, 7, 8], [0, 1, 2]]


@pytest.mark.parametrize("steps_before", [0, 2, 3, 7])
def test_restore_continues_identically(steps_before):
    uninterrupted = iterate()
    take(uninterrupted, steps_before)
    state = json.loads(json.dumps(uninterrupted.state()))
    resumed = iterate()
    resumed.restore(state)
    assert take(uninterrupted, 8) == take(resumed, 8)
    assert uninterrupted.state() == resumed.state()


def test_the_seed_changes_the_order():
    assert take(iterate(seed=1), 3) != take(iterate(seed=2), 3)


def test_too_few_prompts_for_a_step_is_an_error():
    with pytest.raises(ValueError, match=r"2 prompts do not fill one step of 3; lower"):
        iterate(n=2, per_step=3)


def test_the_state_of_other_data_is_rejected():
    with pytest.raises(ValueError, match="has n_prompts = 11, this run 10"):
        iterate(n=10).restore(iterate(n=11).state())


def test_solved_prompts_are_skipped_until_too_few_are_unsolved():
    iterator = iterate(n=6, per_step=2, shuffle=False, skip_solved=True)
    assert take(iterator, 1) == [[0, 1]]
    iterator.mark_solved([2, 5])
    # 2 and 5 are skipped, and the order runs into the next epoch
    assert take(iterator, 3) == [[3, 4], [0, 1], [3, 4]]
    iterator.mark_solved([0, 1, 3])
    assert iterator.n_solved == 5
    # only 4 is unsolved, fewer than a step: the marks are cleared
    assert take(iterator, 1) == [[5, 0]]
    assert iterator.n_solved == 0


def test_a_step_that_spans_two_epochs_has_no_prompt_twice():
    iterator = iterate(n=4, per_step=3, skip_solved=True)
    for batch in take(iterator, 40):
        assert len(set(batch)) == 3


def test_solved_prompts_are_part_of_the_state():
    uninterrupted = iterate(n=10, per_step=2, skip_solved=True)
    take(uninterrupted, 2)
    uninterrupted.mark_solved([1, 2, 3, 4])
    take(uninterrupted, 1)
    resumed = iterate(n=10, per_step=2, skip_solved=True)
    resumed.restore(json.loads(json.dumps(uninterrupted.state())))
    assert take(uninterrupted, 6) == take(resumed, 6)


def test_nothing_is_skipped_without_skip_solved():
    iterator = iterate(n=4, per_step=2, shuffle=False)
    iterator.mark_solved([0, 1])
    assert take(iterator, 3) == [[0, 1], [2, 3], [0, 1]]


def test_the_items_of_a_step_are_a_function_of_the_step():
    items = StepItems(list("abcdefg"), per_step=2, shuffle=True, seed=3)
    steps = [items.of_step(step) for step in range(6)]
    assert [items.of_step(step) for step in reversed(range(6))] == steps[::-1]
    for epoch in (steps[:3], steps[3:]):  # each drops one of the seven
        assert len({item for step in epoch for item in step}) == 6
    assert StepItems(list("abc"), per_step=2, shuffle=False, seed=3).of_step(5) == ["a", "b"]
    with pytest.raises(ValueError, match="3 demonstrations do not fill one step of 4"):
        StepItems(list("abc"), per_step=4, shuffle=True, seed=3)
