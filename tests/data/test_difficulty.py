import collections
import json

import numpy as np
import pytest

from jaxrl.data.difficulty import DifficultyIterator
from jaxrl.types import Prompt


def iterate(n=12, per_step=4, weights=(0.25, 0.5, 0.25), memory=0.0, shuffle=False, seed=5):
    prompts = [Prompt(10 * i, (), np.zeros(1, np.int32), "") for i in range(n)]
    return DifficultyIterator(
        prompts,
        prompts_per_step=per_step,
        shuffle=shuffle,
        seed=seed,
        weights=weights,
        edges=(0.2, 0.8),
        memory=memory,
    )


def take(iterator, n):
    return [[prompt.id // 10 for prompt in next(iterator)] for _ in range(n)]


def rate(iterator, rates):
    """Records a mean reward for each of the first prompts."""
    iterator.record([(10 * i, mean) for i, mean in enumerate(rates)])


HARD, RIGHT, EASY = 0.0, 0.5, 1.0


def test_prompts_without_a_rate_come_first_and_each_once():
    iterator = iterate()
    assert take(iterator, 4) == [[0, 1, 2, 3], [4, 5, 6, 7], [8, 9, 10, 11], [0, 1, 2, 3]]
    assert iterator.steps_per_epoch == 3
    assert iterator.metrics()["data/unrated"] == 12


def test_pools_have_the_shares_of_their_weights_and_take_turns_inside():
    iterator = iterate()
    rate(iterator, [HARD] * 4 + [RIGHT] * 4 + [EASY] * 4)
    found = {"data/hard": 4.0, "data/right": 4.0, "data/easy": 4.0, "data/unrated": 0.0}
    assert iterator.metrics() == found
    # of 4 prompts one is hard, two are right, one is easy; the one drawn longest ago comes first
    batches = take(iterator, 4)
    assert [sorted(batch) for batch in batches] == [
        [0, 4, 5, 8],
        [1, 6, 7, 9],
        [2, 4, 5, 10],
        [3, 6, 7, 11],
    ]


def test_fractional_shares_are_met_over_batches():
    iterator = iterate(n=30, per_step=4, weights=(0.1, 0.8, 0.1))
    rate(iterator, [HARD] * 10 + [RIGHT] * 10 + [EASY] * 10)
    counts = collections.Counter(i // 10 for batch in take(iterator, 25) for i in batch)
    assert counts == {0: 10, 1: 80, 2: 10}


def test_a_pool_that_is_empty_or_used_up_leaves_its_share_to_the_others():
    iterator = iterate(weights=(0.0, 1.0, 1.0))
    rate(iterator, [HARD] * 8 + [RIGHT, EASY, EASY, EASY])
    assert sorted(take(iterator, 1)[0]) == [8, 9, 10, 11]
    rate(iterator, [HARD] * 12)
    assert sorted(take(iterator, 1)[0]) == [0, 1, 2, 3]  # only prompts with the weight 0 are left


def test_no_prompt_is_twice_in_a_batch():
    iterator = iterate(n=5, weights=(0.0, 1.0, 0.0), shuffle=True)
    random = np.random.default_rng(0)
    for batch in take(iterator, 20):
        assert len(set(batch)) == 4
        iterator.record([(10 * i, float(random.random())) for i in batch])


def test_the_rate_is_a_running_mean():
    iterator = iterate(memory=0.75)
    rate(iterator, [1.0])
    assert iterator.metrics()["data/easy"] == 1
    rate(iterator, [0.0])  # 0.75 * 1 + 0.25 * 0
    assert iterator.metrics()["data/right"] == 1
    for _ in range(4):  # 0.75 ** 5 = 0.237, 0.75 ** 6 = 0.178
        rate(iterator, [0.0])
    assert iterator.metrics()["data/right"] == 1
    rate(iterator, [0.0])
    assert iterator.metrics()["data/hard"] == 1


@pytest.mark.parametrize("steps_before", [0, 1, 7])
def test_a_resumed_iterator_draws_the_same_prompts(steps_before):
    def run(iterator, n, first):
        found = []
        for step in range(first, first + n):
            batch = take(iterator, 1)[0]
            random = np.random.default_rng(step)
            iterator.record([(10 * i, float(random.choice([0.0, 0.5, 1.0]))) for i in batch])
            found.append(batch)
        return found

    whole, resumed = (iterate(n=23, memory=0.5, shuffle=True) for _ in range(2))
    run(whole, steps_before, 0)
    resumed.restore(json.loads(json.dumps(whole.state())))
    assert run(whole, 20, steps_before) == run(resumed, 20, steps_before)
    assert whole.state() == resumed.state()


def test_other_seeds_have_other_orders_and_other_pools_are_rejected():
    assert take(iterate(shuffle=True), 3) != take(iterate(shuffle=True, seed=6), 3)
    with pytest.raises(ValueError, match=r"has pools = .*data\.pool_"):
        iterate().restore(iterate(memory=0.5).state())
    with pytest.raises(ValueError, match="3 prompts do not fill one step of 4"):
        iterate(n=3)
