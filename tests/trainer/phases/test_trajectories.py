"""Tests of jaxrl/trainer/phases/trajectories.py: what samples.jsonl has of chosen samples."""

import dataclasses
import json

import numpy as np
import pytest

from jaxrl.config.resolve import resolve
from jaxrl.trainer.phases import trajectories as module
from jaxrl.trainer.phases.mini_batches import make_mini_batches, with_scores
from jaxrl.trainer.phases.trajectories import TrainerValues, choose, token_values, trajectories
from jaxrl.types import Episode, Prompt, Reward, Rollout, ScoredRollout
from tests.trainer.phases.test_mini_batches import config, samples_of

CALL = {"type": "function", "function": {"name": "add", "arguments": {"a": 1}}}
MESSAGES = (
    {"role": "assistant", "content": "", "tool_calls": [CALL]},
    {"role": "tool", "content": "3"},
    {"role": "assistant", "content": "d"},
    {"role": "user", "content": "after the last turn"},
)


def scored(renderer, *texts, reward=0.0, error="", episode=None):
    """A rollout whose texts are alternately those of the model and of others."""
    pieces = [renderer.tokenizer(text)["input_ids"] for text in texts]
    mask = [i % 2 == 0 for i, piece in enumerate(pieces) for _ in piece]
    n = len(mask)
    rollout = Rollout(
        prompt=Prompt(3, ({"role": "user", "content": "hi"},), np.arange(5, dtype=np.int32), "d"),
        sample=0,
        tokens=np.array([t for piece in pieces for t in piece], np.int32),
        logp=np.where(mask, -np.arange(1, n + 1) / 8, 0).astype(np.float32),
        loss_mask=np.array(mask, bool),
        versions=np.zeros(n, np.int32),
        finish="stop",
        episode=episode,
    )
    return ScoredRollout(rollout, Reward(reward, {"exact": reward}, error, seconds=0.5))


def test_a_trajectory_has_turns_tokens_values_and_times(renderer):
    spans = (("queue", 0.0, 0.25), ("engine", 0.25, 1.0), ("environment", 1.0, 1.5))
    episode = Episode(
        prompt_messages=({"role": "system", "content": "s"}, {"role": "user", "content": "hi"}),
        completion_messages=MESSAGES,
        step_rewards=((2, 0.25), (6, 1.0)),
        counts={"calls": 1.0},
        spans=spans,
    )
    one = scored(renderer, "ab", "xyz", "d", reward=1.25, episode=episode)
    known = TrainerValues(
        advantages=np.array([1, 1, 0, 0, 0, 2], np.float32),
        policy_logp=np.array([-0.25, -0.25, 0, 0, 0, -0.25], np.float32),
    )
    found = trajectories([one], {id(one.rollout.tokens): known}, renderer, 1)[0]
    json.dumps(found, allow_nan=False)
    assert found["spans"] == [list(span) for span in spans] and found["reward_s"] == 0.5
    assert found["parts"] == {"exact": 1.25} and found["counts"] == {"calls": 1.0}
    (sequence,) = found["sequences"]
    assert sequence["prompt"] == [["system", "s"], ["user", "hi"]]
    assert sequence["tokens"] == list("abxyzd") and sequence["mask"] == [1, 1, 0, 0, 0, 1]
    assert sequence["logp"] == [-0.125, -0.25, 0, 0, 0, -0.75]
    # engine - trainer: -0.125 + 0.25, -0.25 + 0.25 and -0.75 + 0.25
    assert sequence["difference"] == [0.125, 0, 0, 0, 0, -0.5]
    assert sequence["advantage"] == [1, 1, 0, 0, 0, 2]
    assert sequence["turns"] == [
        {
            "start": 0,
            "end": 2,
            "role": "assistant",
            "calls": [["add", '{"a": 1}']],
            "reward": 0.25,
        },
        {"start": 2, "end": 5, "role": "tool"},
        {"start": 5, "end": 6, "role": "assistant", "calls": [], "reward": 1.0},
    ]


def test_a_response_without_an_environment_is_one_turn(renderer):
    found = trajectories([scored(renderer, "42")], {}, renderer, 1)[0]
    (sequence,) = found["sequences"]
    assert sequence["turns"] == [
        {"start": 0, "end": 2, "role": "assistant", "calls": [], "reward": None}
    ]
    assert sequence["difference"] is sequence["advantage"] is None and found["spans"] == []


def test_an_empty_response_and_branches_are_recorded(renderer, monkeypatch):
    branches = tuple(scored(renderer, text).rollout for text in "abcdefghij")
    one = scored(renderer, "")
    one = dataclasses.replace(one, rollout=dataclasses.replace(one.rollout, branches=branches))
    found = trajectories([one], {}, renderer, 1)[0]
    assert found["n_sequences"] == 11 and len(found["sequences"]) == module.MAX_SEQUENCES
    assert found["sequences"][0]["turns"] == found["sequences"][0]["tokens"] == []


def test_the_middle_of_a_long_sequence_is_left_out(renderer, monkeypatch):
    monkeypatch.setattr(module, "MAX_TOKENS", 4)
    (sequence,) = trajectories([scored(renderer, "abcdefgh")], {}, renderer, 1)[0]["sequences"]
    assert sequence["tokens"] == list("abgh") and sequence["kept"] == [[0, 2], [6, 8]]
    assert sequence["n_tokens"] == 8 and sequence["turns"][0]["end"] == 8
    assert sequence["logp"] == [-0.125, -0.25, -0.875, -1]


def test_the_tokens_of_one_character_have_its_text_once(renderer):
    (sequence,) = trajectories([scored(renderer, "a漢b")], {}, renderer, 1)[0]["sequences"]
    assert sequence["tokens"] == ["a", "漢", "", "", "b"]  # three bytes


def test_the_worst_samples_of_each_kind_are_chosen_in_turn(renderer):
    some = [
        scored(renderer, text, reward=r) for text, r in (("ab", 3.0), ("a" * 9, 2.0), ("cd", 1.0))
    ]
    some += [scored(renderer, "e", reward=4.0, error="broken"), scored(renderer, "fg", reward=9.0)]
    off = some[4].rollout
    values = {id(off.tokens): TrainerValues(policy_logp=np.full(2, -9, np.float32))}
    assert choose(some, values, 1) == [3]  # a failed reward
    assert choose(some, values, 2) == [3, 4]  # the largest difference
    assert choose(some, values, 3) == [1, 3, 4]  # the longest
    assert choose(some, values, 4) == [1, 2, 3, 4]  # the lowest reward that is left
    assert choose(some, values, 99) == [0, 1, 2, 3, 4] and choose([], {}, 3) == []


@pytest.mark.parametrize("scored_before", [True, False])
def test_values_are_those_of_the_packed_batches(scored_before):
    """The second group has equal rewards and is not packed: it has advantages alone."""
    cfg = resolve(config(norm_adv_by_std=False))
    samples = samples_of(2)
    mini_batches, _ = make_mini_batches(samples, np.array([1.0, 0, 3, 3]), cfg, n_ranks=1)
    mini_batches = with_scores(
        mini_batches,
        cfg.algorithm,
        score_old=lambda batches: [
            dataclasses.replace(b, old_logp=b.advantages * 2 * b.mask) for b in batches
        ],
    )
    values = token_values(mini_batches, scored=scored_before)
    found = [values[id(s.tokens)] for s in samples]
    assert [v.advantages.tolist() for v in found] == [[0.5] * 3, [-0.5] * 3, [0] * 3, [0] * 3]
    logps = [None if v.policy_logp is None else v.policy_logp.tolist() for v in found]
    assert logps == ([[1] * 3, [-1] * 3, None, None] if scored_before else [None] * 4)
