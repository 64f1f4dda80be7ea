import json

import numpy as np
import pytest

from jaxrl.data.iterator import EndlessItems
from jaxrl.data.mixing import MixedIterator
from jaxrl.data.source_rates import SourceCurriculum, SourceRates
from jaxrl.types import Prompt


def curriculum(progress=0.0, gate=0.0, gate_prompts=1, memories=(0.5, 0.9)):
    return SourceCurriculum(progress, memories, gate, gate_prompts)


def shuffled(items):
    return EndlessItems(items, shuffle=True, seed=len(items), min_left=8)


def iterate(setting, n_sources=3, *, stream=shuffled):
    """Batches of 8 prompts from sources of 40; the id of a prompt is 100 source + index."""
    prompts = [
        [Prompt(100 * k + i, (), np.zeros(1, np.int32), "") for i in range(40)]
        for k in range(n_sources)
    ]
    return MixedIterator(
        [stream(items) for items in prompts],
        prompts_per_step=8,
        weights=(1.0,) * n_sources,
        curriculum=setting,
        identity={},
    )


def levels(batch):
    """The source of each prompt."""
    return [prompt.id // 100 for prompt in batch]


def test_progress_is_the_difference_of_two_running_means_and_shares_follow_it():
    rates = SourceRates(curriculum(progress=0.5), [[0], [1], [2]])
    assert rates.shares([0.5, 0.25, 0.25]) == [0.5, 0.25, 0.25]  # no progress is known
    rates.record([(0, 0.0), (1, 1.0)])  # the first means: fast and slow are equal
    assert rates.shares([0.5, 0.25, 0.25]) == [0.5, 0.25, 0.25]
    rates.record([(0, 0.6), (1, 0.8)])
    # source 0: fast 0.3, slow 0.06; source 1: fast 0.9, slow 0.98: progress 0.24 and 0.08
    found = rates.metrics([0.0] * 3)
    assert found["data/source_0/progress"] == pytest.approx(0.24)
    assert found["data/source_1/progress"] == pytest.approx(0.08)  # forgetting counts, too
    # half of the prompts by weight, half by progress: 3/4, 1/4, 0
    assert rates.shares([0.5, 0.25, 0.25]) == pytest.approx([0.625, 0.25, 0.125])


def test_a_source_is_admitted_when_all_before_pass_the_gate_and_never_leaves():
    iterator = iterate(curriculum(gate=0.5, gate_prompts=10))
    batch = next(iterator)
    assert levels(batch) == [0] * 8
    iterator.record([(prompt.id, 1.0) for prompt in batch])  # 8 prompts are not enough
    batch = next(iterator)
    assert levels(batch) == [0] * 8
    iterator.record([(prompt.id, 0.9) for prompt in batch])
    assert iterator.metrics()["data/admitted"] == 2
    batch = next(iterator)
    assert sorted(levels(batch)) == [0] * 4 + [1] * 4
    iterator.record([(prompt.id, 0.0) for prompt in batch])
    assert iterator.metrics()["data/admitted"] == 2
    for _ in range(3):
        iterator.record([(prompt.id, 1.0) for prompt in next(iterator)])
    assert iterator.metrics()["data/admitted"] == 2  # source 1: 1 - 0.9 ** 3 = 0.27
    for _ in range(4):
        iterator.record([(prompt.id, 1.0) for prompt in next(iterator)])
    assert iterator.metrics()["data/admitted"] == 3  # source 1: 1 - 0.9 ** 7 = 0.52


@pytest.mark.parametrize("setting", [curriculum(0.8), curriculum(gate=0.4), curriculum(0.5, 0.3)])
def test_a_resumed_curriculum_draws_the_same_prompts(setting):
    def run(iterator, first, n):
        found = []
        for step in range(first, first + n):
            batch, random = next(iterator), np.random.default_rng(step)
            found.append([prompt.id for prompt in batch])
            iterator.record([(prompt.id, float(random.random())) for prompt in batch])
        return found

    whole, resumed = iterate(setting), iterate(setting)
    run(whole, 0, 5)
    resumed.restore(json.loads(json.dumps(whole.state())))
    assert run(whole, 5, 20) == run(resumed, 5, 20)
    assert whole.state() == resumed.state() and whole.metrics() == resumed.metrics()
    with pytest.raises(ValueError, match=r"has curriculum = .*data\.gate"):
        iterate(curriculum(0.1)).restore(whole.state())


class Cycle:
    """The prompts of a source in turn, without a shuffle that takes most of the test's time."""

    n_solved = 0

    def __init__(self, items):
        self.items, self.position = items, 0

    def __len__(self):
        return len(self.items)

    def take(self, n):
        self.position += n
        return [self.items[i % len(self.items)] for i in range(self.position - n, self.position)]

    def mark_solved(self, ids): ...

    def state(self): ...

    def restore(self, state): ...


def learn(setting, seed, steps=240, n_levels=4):
    """The mean pass rate over all levels, every 40 steps, of a simulated policy.

    The logit of a level rises by the variance of its groups' rewards, the size of their gradient,
    and by half of what the level before it gains. Level k begins at the logit -2 k.
    """
    random, skill = np.random.default_rng(seed), -2.0 * np.arange(n_levels)
    iterator, curve = iterate(setting, n_levels, stream=Cycle), []
    for step in range(steps + 1):
        rate = 1 / (1 + np.exp(-skill))
        if step % 40 == 0:
            curve.append(float(rate.mean()))
        batch = next(iterator)
        means = [float(random.binomial(8, rate[k]) / 8) for k in levels(batch)]
        iterator.record([(prompt.id, m) for prompt, m in zip(batch, means, strict=True)])
        gain = np.zeros(n_levels)
        for k, mean in zip(levels(batch), means, strict=True):
            gain[k] += 0.1 * mean * (1 - mean)
        for k in range(1, n_levels):
            gain[k] += 0.5 * gain[k - 1]
        skill = skill + gain
    return curve


def test_curricula_learn_levels_in_fewer_steps_than_uniform_sampling():
    """Prints the curves: mean pass rate of four levels every 40 steps, mean of 3 seeds."""
    settings = {
        "uniform": None,
        "progress": curriculum(0.8, memories=(0.8, 0.95)),
        "gate": curriculum(gate=0.7, gate_prompts=32),
        "both": curriculum(0.8, gate=0.7, gate_prompts=32, memories=(0.8, 0.95)),
    }
    curves = {
        name: np.mean([learn(setting, seed) for seed in range(3)], axis=0)
        for name, setting in settings.items()
    }
    for name, curve in curves.items():
        print(name, np.round(curve, 3))
    for name in ("progress", "gate", "both"):
        assert curves[name][1:].mean() > curves["uniform"][1:].mean() + 0.02
