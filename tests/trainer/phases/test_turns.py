"""Tests of jaxrl/trainer/phases/turns.py, and of advantages that compare turns."""

import dataclasses

import numpy as np
import pytest

from jaxrl.config.keys import AlgorithmConfig
from jaxrl.config.resolve import resolve
from jaxrl.trainer.phases.advantage import add_advantages
from jaxrl.trainer.phases.mini_batches import to_samples
from jaxrl.trainer.phases.turns import anchor_states, token_runs
from jaxrl.types import Episode, ImageInput, PlacedImage, Prompt, Rollout
from tests.trainer.phases.test_mini_batches import config

GIGPO = AlgorithmConfig(advantage="gigpo", norm_adv_by_std=False, gamma=0.5)


def wrote(text):
    return {"role": "assistant", "content": text}


def seen(text, role="user", **fields):
    return {"role": role, "content": text} | fields


def episode(mask, *messages, images=(), sample=0):
    """A rollout with turns where `mask` is 1, after a prompt of five tokens."""
    n, question = len(mask), seen("hi")
    return Rollout(
        prompt=Prompt(3, (question,), np.arange(5, dtype=np.int32), "d"),
        sample=sample,
        tokens=np.arange(n, dtype=np.int32),
        logp=np.zeros(n, np.float32),
        loss_mask=np.array(mask, bool),
        versions=np.zeros(n, np.int32),
        finish="stop",
        episode=Episode(prompt_messages=(question,), completion_messages=messages),
        images=tuple(
            PlacedImage(start, ImageInput((1, 2, 2), 1, digest, load=lambda: np.zeros(1)))
            for start, digest in images
        ),
    )


def test_runs_have_the_messages_of_their_turns_and_observations():
    rollout = episode(
        [1, 1, 0, 0, 1, 0],
        wrote("a"),
        seen("1", "tool"),
        seen("2", "tool"),
        wrote("b"),
    )
    runs = [(r.start, r.end, r.sampled, r.messages) for r in token_runs(rollout)]
    assert runs == [
        (0, 2, True, (wrote("a"),)),
        (2, 4, False, (seen("1", "tool"), seen("2", "tool"))),
        (4, 5, True, (wrote("b"),)),
        (5, 6, False, ()),  # the template's end of turn
    ]


def test_equal_observations_are_the_same_state_whatever_was_done_before():
    one = episode([1, 0, 1, 0, 1], wrote("a"), seen("x"), wrote("b"), seen("y"), wrote("c"))
    other = episode([1, 1, 0, 0, 1], wrote("z"), seen("y"), wrote("c"))
    first, x, y = anchor_states(one)
    assert len({first, x, y}) == 3
    assert anchor_states(other) == [first, y]
    tools = [
        anchor_states(episode([1, 0, 1], wrote("a"), seen("x", "tool", tool_call_id=i), wrote("b")))
        for i in ("call1", "call2")
    ]
    assert tools[0] == tools[1] and tools[0][1] != x  # the role counts


def test_states_with_other_images_differ():
    turns = wrote("a"), seen("<image>"), wrote("b")
    one, same, other = (
        anchor_states(episode([1, 0, 1], *turns, images=[(2, "p"), (6, digest)]))
        for digest in "qqr"
    )
    assert one == same and one[0] == other[0] and one[1] != other[1]


def gigpo_advantages(rollouts, rewards, turn_rewards):
    samples = [
        sample
        for rollout, turns in zip(rollouts, turn_rewards, strict=True)
        for sample in to_samples(rollout, GIGPO, turn_rewards=np.array(turns, np.float32))
    ]
    return [s.advantages.tolist() for s in add_advantages(samples, np.array(rewards), GIGPO)]


def test_a_turn_is_compared_with_the_turns_that_answered_its_state():
    one = episode([1, 1, 0, 1], wrote("a"), seen("x"), wrote("b"))
    other = episode([1, 0, 0, 1, 1], wrote("c"), seen("x"), wrote("d"), sample=1)
    got = gigpo_advantages([one, other], [1.5, 0.0], [[0, 0.5, 0, 1], [0, 0, 0, 0, 0]])
    # Episodes: 1.5 and 0, so 0.75 and -0.75. Returns with gamma 0.5: 0.5 + 0.5 = 1 and 1; 0 and 0.
    # Both turns have the same states: deviations 0.5 and -0.5.
    assert got == [[1.25, 1.25, 0, 1.25], [-1.25, 0, 0, -1.25, -1.25]]


def test_what_no_turn_was_rewarded_with_is_a_reward_of_the_last_turn():
    one = episode([1, 0, 1], wrote("a"), seen("x"), wrote("b"))
    other = episode([1, 0, 1], wrote("c"), seen("y"), wrote("d"), sample=1)
    got = gigpo_advantages([one, other], [4.0, 0.0], [[0, 0, 0]] * 2)
    # returns (2, 4) and (0, 0): the first turns share the prompt, 1 and -1; episodes 2 and -2
    assert got == [[3, 0, 2], [-3, 0, -2]]


@pytest.mark.parametrize("credit, n_samples", [("all", 2), ("last", 1)])
def test_branches_are_trained_or_only_the_last_conversation(credit, n_samples):
    rollout = episode([1, 1], wrote("a"))
    rollout = dataclasses.replace(rollout, branches=(episode([1, 1, 1], wrote("b")),))
    cfg = AlgorithmConfig(branch_credit=credit)
    samples = to_samples(rollout, cfg, turn_rewards=np.ones(2, np.float32))
    assert len(samples) == n_samples and samples[0].tokens is rollout.tokens
    assert samples[0].turn_rewards is not None
    assert [s.episode_loss_tokens for s in samples] == ([5, 5] if credit == "all" else [None])
    assert sum(s.share for s in samples) == 1.0


@pytest.mark.parametrize(
    "changes, words",
    [
        (dict(advantage="gigpo"), "set one of env.name, env.agent"),
        (dict(turn_weight=0.5), "has no effect with algorithm.advantage='grpo'"),
        (dict(branch_credit="last"), "has no effect without an agent"),
    ],
)
def test_keys_without_an_effect_are_refused(changes, words):
    with pytest.raises(ValueError, match=words):
        resolve(config(**changes))
