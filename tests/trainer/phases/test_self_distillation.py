"""Tests of jaxrl/trainer/phases/self_distillation.py: what the teacher of a response reads."""

import dataclasses

import numpy as np
import pytest

from jaxrl.config.keys import SelfDistillationConfig
from jaxrl.config.resolve import resolve
from jaxrl.data.chat.encoding import ChatRenderer
from jaxrl.trainer.phases.mini_batches import make_mini_batches, to_sample
from jaxrl.trainer.phases.rewards import split_groups
from jaxrl.trainer.phases.self_distillation import (
    context_of,
    teacher_messages,
    with_teacher_prompts,
)
from tests.trainer.phases.test_mini_batches import config
from tests.trainer.phases.test_shaping import rollouts_with


def group_of(rewards, texts):
    """One prompt's samples with these rewards and texts."""
    return [
        dataclasses.replace(s, rollout=dataclasses.replace(s.rollout, text=text))
        for s, text in zip(rollouts_with([rewards]), texts, strict=True)
    ]


def solutions(group, **keys):
    settings = SelfDistillationConfig(context=("solution",), **keys)
    found = [context_of(group, i, settings) for i in range(len(group))]
    return [texts.get("solution", "") for texts in found]


def test_the_solution_is_the_first_success_of_the_other_samples():
    group = group_of([0.0, 1.0, 1.0], ["bad", "<think>hm</think> four", "<think>so</think>4"])
    assert solutions(group) == ["four", "4", "four"]
    assert solutions(group, remove_thinking=False)[0] == "<think>hm</think> four"
    alone = group_of([0.5, 1.0, 0.0], ["half", "four", "bad"])
    assert solutions(alone) == ["four", "", "four"]
    assert solutions(alone, own_solution=True) == ["four", "four", "four"]
    assert solutions(alone, success_reward=0.5) == ["four", "half", "half"]


def test_feedback_is_for_failed_responses_without_a_solution():
    def texts(rewards, **keys):
        settings = SelfDistillationConfig(context=("solution", "feedback"), **keys)
        group = [
            dataclasses.replace(s, reward=dataclasses.replace(s.reward, feedback=f" say {i}"))
            for i, s in enumerate(group_of(rewards, ["a", "b"]))
        ]
        return [context_of(group, i, settings) for i in range(2)]

    assert texts([0.0, 0.5]) == [{"feedback": "say 0"}, {"feedback": "say 1"}]
    assert texts([0.0, 1.0]) == [{"solution": "b"}, {}]
    both = texts([0.0, 1.0], feedback_with_solution=True)
    assert both == [{"solution": "b", "feedback": "say 0"}, {}]


def test_texts_fill_the_last_message_and_keep_their_braces():
    settings = SelfDistillationConfig(
        context=("solution", "demonstration"),
        template="{prompt}|{context}",
        solution_template="S:{solution}",
        demonstration_template="D:{demonstration}",
    )
    group = group_of([1.0, 0.0], ["{prompt} {x}", "bad"])
    texts = context_of(group, 1, settings)  # the answer of the row is 4
    assert texts == {"solution": "{prompt} {x}", "demonstration": "4"}
    [message] = teacher_messages(group[1].rollout.prompt, texts, settings)
    assert message == {"role": "user", "content": "2 + 2|S:{prompt} {x}\n\nD:4"}


class Renderer(ChatRenderer):
    """Renders every conversation as `n` tokens."""

    def __init__(self, n):
        self.n = n

    def render_all(self, conversations, tools=None):
        return [np.arange(self.n, dtype=np.int32) for _ in conversations]


def cfg_of(**keys):
    c = config(advantage="distill", kl_coef=1.0, kl_in="reward", kl="k1", gamma=0.0)
    c.learner.token_budget = 128
    c.self_distillation.context = ("solution",)
    c.self_distillation.update(keys)
    return resolve(c)


def test_only_responses_with_a_teacher_are_trained_on_its_log_ratio():
    cfg = cfg_of()
    groups = split_groups(rollouts_with([[1, 0], [0, 0]]), 2)
    groups[0] = group_of([1.0, 0.0], ["four", "bad"])
    samples = [to_sample(s.rollout, group=i) for i, group in enumerate(groups) for s in group]
    samples, metrics = with_teacher_prompts(samples, groups, cfg, Renderer(9))
    assert [s.teacher_prompt is not None for s in samples] == [False, True, False, False]
    assert metrics == {
        "self_distillation/context_fraction": 0.25,
        "self_distillation/too_long_fraction": 0.0,
    }
    read = []

    def teacher(batches):
        read.extend(batches)
        return [np.where(b.mask > 0, -0.25, 9.0).astype(np.float32) for b in batches]

    mini, metrics = make_mini_batches(samples, np.zeros(4), cfg, n_ranks=1, kl_reference=teacher)
    # 9 tokens of the teacher's prompt and 3 of the response, of which the last is a target only
    assert [int((b.segments > 0).sum()) for b in read] == [11]
    (trained,) = mini[0].samples  # the others leave the denominator
    # the engine's logprobs are 0: log p_teacher - log pi = -0.25
    np.testing.assert_allclose(trained.advantages, [-0.25] * 3, atol=1e-6)
    assert metrics["reward/kl"] == pytest.approx(0.25)
    assert len(trained.prompt_tokens) == 3, "the policy reads its own prompt"


def test_a_prompt_that_is_too_long_has_no_teacher():
    groups = [group_of([1.0, 0.0], ["four", "bad"])]
    samples = [to_sample(s.rollout) for s in groups[0]]
    cfg = cfg_of(max_prompt_len=40)
    for n, teachers in ((40, 1), (41, 0)):
        filled, metrics = with_teacher_prompts(samples, groups, cfg, Renderer(n))
        assert sum(s.teacher_prompt is not None for s in filled) == teachers
        assert metrics["self_distillation/too_long_fraction"] == (1 - teachers) / 2
