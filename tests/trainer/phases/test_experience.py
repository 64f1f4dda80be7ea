"""Tests of jaxrl/trainer/phases/experience.py and sampling.py: failed rewards and environments."""

import contextlib
import dataclasses
import types

import numpy as np
import pytest

from jaxrl.config.resolve import resolve
from jaxrl.data.packing import sequence_lens
from jaxrl.learner.coefficients import initial_coefficients
from jaxrl.trainer.core import Core, Run
from jaxrl.trainer.phases import sampling
from jaxrl.trainer.phases.experience import make_experience
from jaxrl.trainer.phases.rewards import RewardErrors, RewardScale, split_groups, valid_groups
from jaxrl.trainer.phases.sampling import Collected, chosen_groups
from jaxrl.types import Episode, Reward
from tests.trainer.phases.test_mini_batches import EXPECTED, advantages_of, config
from tests.trainer.phases.test_shaping import rollouts_with

FAILED = None  # a reward that was not computed


def scored(rewards):
    """Rollouts of three tokens, one row of rewards per prompt; FAILED ones have reward 100."""
    rollouts = rollouts_with([[100 if r is FAILED else r for r in row] for row in rewards])
    flat = [reward for row in rewards for reward in row]
    pairs = zip(rollouts, flat, strict=True)
    return [
        dataclasses.replace(r, reward=Reward(100.0, error="f: hung")) if reward is FAILED else r
        for r, reward in pairs
    ]


def with_failed_environment(r):
    episode = Episode(error="the environment's process died")
    return dataclasses.replace(r, rollout=dataclasses.replace(r.rollout, episode=episode))


def config_of(rewards, *, on_error="exclude", **algorithm):
    c = config(**algorithm)
    c.data.prompts_per_step, c.rollout.n = len(rewards), len(rewards[0])
    c.reward.on_error = on_error
    return c


def collected_of(cfg, *batches):
    collected = Collected(cfg)
    for rollouts in batches:
        groups = valid_groups(split_groups(rollouts, cfg.rollout.n), cfg)
        collected.add(rollouts, groups, {"rollout/running": 1.0})
    return collected


def experience(cfg, *batches):
    """The experience of a step whose batches of rollouts are given."""
    run = object.__new__(Run)  # without models and engines
    core = object.__new__(Core)
    vars(core).update(
        cfg=cfg,
        clock=types.SimpleNamespace(step=6, timed=lambda phase: contextlib.nullcontext()),
        learner=types.SimpleNamespace(n_ranks=1, value_scorer=None),
        reward_scale=RewardScale(),
        role_baselines={},
        coefs=initial_coefficients(cfg),
        logger=types.SimpleNamespace(samples=lambda step, records: None),
        no_compile=lambda phase: contextlib.nullcontext(),
        sampling_seed=lambda validation: 0,
    )
    object.__setattr__(run, "core", core)
    object.__setattr__(run, "reward_errors", RewardErrors(1.0))
    collected = collected_of(cfg, *batches)
    groups, baselines = chosen_groups(run, collected)
    return make_experience(core, collected, groups, baselines)


def trained(made):
    return [s for mini in made.mini_batches for s in mini.samples]


# three samples per prompt; without the failed ones 3, 1 and 2, 2
REWARDS = [[3, FAILED, 1], [2, 2, FAILED]]


@pytest.mark.parametrize("name", EXPECTED)
def test_a_failed_sample_enters_neither_baseline_nor_gradient(name):
    made = experience(resolve(config_of(REWARDS, advantage=name)), scored(REWARDS))
    samples = trained(made)
    assert [(s.group, s.sample) for s in samples] == [(0, 0), (0, 2), (1, 0), (1, 1)]
    np.testing.assert_allclose(advantages_of(samples), EXPECTED[name], atol=1e-5)
    assert made.n_samples == 4
    assert made.metrics["reward/errors"] == 2 and made.metrics["reward/dropped_groups"] == 0
    # (3 + 1 + 2 + 2) / 4, squared deviations 1, 1, 0, 0
    assert made.metrics["reward/mean"] == 2 and made.metrics["reward/std"] == 0.5**0.5
    assert made.reward_scale == RewardScale(4, 2.0, 2.0)


def test_a_failed_sample_does_not_enter_the_critic_or_its_whitening():
    made = experience(resolve(config_of(REWARDS, advantage="gae")), scored(REWARDS))
    # values 0, gamma and lambda 1: every return is the reward
    np.testing.assert_array_equal(
        [s.returns for s in trained(made)], [[3] * 3, [1] * 3] + [[2] * 3] * 2
    )
    assert made.metrics["critic/return_mean"] == 2
    advantages = np.concatenate([s.advantages for s in trained(made)])
    np.testing.assert_allclose([advantages.mean(), advantages.var(ddof=1)], [0, 1], atol=1e-6)


@pytest.mark.parametrize("advantage", ["distill", "dr_grpo"])
def test_a_failed_sample_is_not_scored_by_the_reference(monkeypatch, advantage):
    scored_lens = []

    def reference_logps(core, batches):
        scored_lens.extend(n for batch in batches for n in sequence_lens(batch))
        return [np.full(batch.tokens.shape, -1.0, np.float32) for batch in batches]

    monkeypatch.setattr("jaxrl.trainer.phases.experience.reference_logps", reference_logps)
    keys = {"teacher": "big"} if advantage == "distill" else {}
    c = config_of(REWARDS, advantage=advantage, kl_in="reward", kl_coef=1.0, **keys)
    made = experience(resolve(c), scored(REWARDS))
    assert len(scored_lens) == 4
    # the engine's logprobs are 0, the reference's -1: KL 1 per token
    assert made.metrics["reward/kl"] == 1
    first = {"distill": [-3, -2, -1], "dr_grpo": [1, 1, 1]}[advantage]
    np.testing.assert_allclose(trained(made)[0].advantages, first)


def test_a_failed_environment_leaves_its_group_whatever_the_reward_functions_say():
    rollouts = scored([[3, 100, 1], [2, 2, 2]])
    rollouts[1] = with_failed_environment(rollouts[1])
    made = experience(resolve(config_of(REWARDS, advantage="dr_grpo")), rollouts)
    assert advantages_of(trained(made)) == [1, -1, 0, 0, 0]
    assert made.metrics["reward/errors"] == 1


def test_a_failed_sample_has_its_value_on_request():
    cfg = resolve(config_of(REWARDS, advantage="dr_grpo", on_error="value"))
    rewards = [[3, FAILED, 2], [2, 2, 2]]  # FAILED: 100, mean 35
    made = experience(cfg, scored(rewards))
    assert advantages_of(trained(made)) == [-32, 65, -33, 0, 0, 0]
    assert made.metrics["reward/mean"] == pytest.approx(111 / 6)


def test_only_valid_samples_count_in_the_denominator():
    """Two of three are flat: without a gradient they are idle, and count as two sequences."""
    made = experience(resolve(config_of(REWARDS)), scored(REWARDS))
    [mini] = made.mini_batches
    assert [s.group for s in mini.idle] == [1, 1]
    assert sum(p.batch.mask.sum() for p in mini.packed) == 2 * 3
    assert made.metrics["perf/idle_fraction"] == 0.5


def test_a_prompt_with_one_valid_sample_is_dropped_and_mini_batches_keep_their_prompts():
    rewards = [[1, 0, 0], [1, FAILED, FAILED], [1, 1, 0], [FAILED] * 3]
    c = config_of(rewards, old_logp="rollout")
    c.learner.mini_batch_prompts = 2
    made = experience(resolve(c), scored(rewards))
    assert [[s.group for s in mini.samples] for mini in made.mini_batches] == [[0] * 3, [2] * 3]
    assert made.metrics["reward/dropped_groups"] == 2 and made.metrics["reward/errors"] == 5


def test_one_valid_sample_is_enough_without_a_comparison_in_the_group():
    rewards = [[1, FAILED], [FAILED, FAILED]]
    made = experience(resolve(config_of(rewards, advantage="reinforce_plus_plus")), scored(rewards))
    assert [(s.group, s.sample) for s in trained(made)] == [(0, 0)]
    assert made.metrics["reward/dropped_groups"] == 1


def test_a_step_in_which_everything_failed_has_no_update(capsys):
    rewards = [[FAILED] * 2] * 2
    for advantage in ("grpo", "gae", "remax"):
        made = experience(resolve(config_of(rewards, advantage=advantage)), scored(rewards))
        assert made.mini_batches == [] and made.n_samples == 0
        assert made.metrics["reward/errors"] == 4 and "reward/mean" not in made.metrics
        assert all(np.isfinite(value) for value in made.metrics.values())
        assert made.reward_scale == RewardScale()
        assert "warning: step 7: no update" in capsys.readouterr().out


@pytest.mark.parametrize("on_error", ["exclude", "value"])
def test_remax_drops_a_prompt_whose_greedy_response_failed(monkeypatch, on_error):
    rewards = [[1, 0], [3, FAILED], [5, 5]]
    greedy = scored([[0.5], [1], [FAILED]])  # 100 if it counts
    prompts = []

    def sample(run, asked, *, greedy):
        prompts.extend(p.id for p in asked)
        return [], {}

    monkeypatch.setattr(sampling, "sample", sample)
    monkeypatch.setattr(sampling, "reward", lambda run, rollouts: greedy)
    cfg = resolve(config_of(rewards, advantage="remax", on_error=on_error))
    made = experience(cfg, scored(rewards))
    assert prompts == [0, 1, 2], "one greedy response per prompt"
    want = {"exclude": [0.5, -0.5, 2], "value": [0.5, -0.5, 2, 99, -95, -95]}[on_error]
    assert advantages_of(trained(made)) == want
    assert made.metrics["reward/dropped_groups"] == (on_error == "exclude")


def test_dynamic_sampling_ignores_failed_samples_and_refills_their_prompts():
    first = scored([[1, 1, FAILED], [1, FAILED, FAILED], [1, 0, FAILED]])  # flat, too few, kept
    second = scored([[0, 1, 1], [0, 0, FAILED], [FAILED] * 3])  # kept, flat, failed
    c = config_of([[0] * 3] * 3, advantage="dr_grpo", dynamic_sampling=True)
    collected = collected_of(resolve(c), first)
    assert not collected.full and collected.n_failed == 1
    made = experience(resolve(c), first, second)
    # the first flat group fills the step
    want = [0.5, -0.5, -2 / 3, 1 / 3, 1 / 3, 0, 0]
    np.testing.assert_allclose(advantages_of(trained(made)), want, atol=1e-6)
    assert made.metrics["reward/dropped_groups"] == 2
