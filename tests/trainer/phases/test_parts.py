"""Tests of jaxrl/trainer/phases/parts.py: the tokens, denominators and metrics of parts."""

import dataclasses

import numpy as np
import pytest

from jaxrl.config.resolve import resolve
from jaxrl.trainer.phases.mini_batches import make_mini_batches
from jaxrl.trainer.phases.parts import (
    given_samples,
    in_parts,
    part_metrics,
    sampled_parts,
    with_trained_parts,
)
from jaxrl.trainer.phases.turns import observation_roles
from jaxrl.types import Demonstration, Episode, Prompt, Rollout
from tests.trainer.phases.test_mini_batches import config, samples_of

ECHO = "observations?weight=0.1"


def echo_config(*parts, **algorithm):
    c = config(parts=parts, **algorithm)
    c.env.name, c.reward.functions = "calculator", ("environment",)
    return resolve(c)


def episodes(n_prompts, source="math", cfg=None):
    """Two samples per prompt of 4 tokens, of which the environment wrote the second and third."""
    own = np.array([True, False, False, True])
    made = [dataclasses.replace(s, loss_mask=own) for s in samples_of(n_prompts, n_tokens=4)]
    return sampled_parts(made, source, cfg.algorithm)


def test_observations_are_the_tokens_that_the_model_did_not_sample():
    cfg = echo_config(ECHO, "observations?weight=0.2&source=code")
    (sample, *_) = episodes(1, cfg=cfg)
    assert sample.parts.tolist() == [0, 1, 1, 0]
    (sample, *_) = episodes(1, source="code", cfg=cfg)
    assert sample.parts.tolist() == [0, 2, 2, 0]
    only = echo_config("observations?source=code")
    assert episodes(1, cfg=only)[0].parts is None


def test_observations_of_a_role_are_those_whose_messages_all_have_it():
    turns = [
        *("assistant", "tool", "tool"),  # the tokens 2, 3
        *("assistant", "user"),  # 5
        *("assistant", "tool", "user"),  # 7: of two roles
        "assistant",
    ]
    messages = tuple({"role": role, "content": str(i)} for i, role in enumerate(turns))
    own = np.array([1, 1, 0, 0, 1, 0, 1, 0, 1], bool)
    cfg = echo_config("observations?role=tool", ECHO, "observations?source=code")
    [sample] = samples_of(1, n_tokens=9)[:1]
    episode = Episode(completion_messages=messages, n_turns=4)
    prompt = Prompt(0, (), np.zeros(1, np.int32), "", source="math")
    fields = sample.tokens, np.zeros(9, np.float32), own, np.zeros(9, np.int32), "stop"
    rollout = Rollout(prompt, 0, *fields, episode=episode)
    sample = dataclasses.replace(sample, loss_mask=own)
    roles = ["", "", "tool", "tool", "", "user", "", "", ""]
    assert observation_roles(rollout).tolist() == roles
    [found] = in_parts([sample], rollout, cfg.algorithm)
    assert found.parts.tolist() == [0, 0, 1, 1, 0, 2, 0, 2, 0]
    code = dataclasses.replace(rollout, prompt=dataclasses.replace(prompt, source="code"))
    [found] = in_parts([sample], code, cfg.algorithm)  # the source goes before the role
    assert found.parts.tolist() == [0, 0, 4, 4, 0, 4, 0, 4, 0]
    [found] = in_parts([sample], rollout, echo_config("observations?role=system").algorithm)
    assert found.parts is None


@pytest.mark.parametrize("aggregation", ["token_mean", "seq_mean_token_mean"])
def test_a_group_of_equal_rewards_still_trains_on_its_observations(aggregation):
    cfg = echo_config(ECHO, aggregation=aggregation)
    samples, rewards = episodes(2, cfg=cfg), np.array([1.0, 1.0, 1.0, 0.0])
    [mini], _ = make_mini_batches(samples, rewards, cfg, n_ranks=1)
    assert not mini.idle and mini.extra_weight == 0
    trained = np.concatenate([p.batch.parts.ravel() for p in mini.packed])
    assert (trained > 0).sum() == 8  # two of each sample
    assert not any((p.batch.mask * (p.batch.parts > 0)).any() for p in mini.packed)
    # w W / N: the policy's weight is 8 tokens or 4 sequences, that of the part 8 tokens
    weight = 8 if aggregation == "token_mean" else 4
    np.testing.assert_allclose(mini.part_factors, (0.1 * weight / 8,), rtol=1e-12)


def test_without_parts_nothing_is_packed_for_them():
    cfg = resolve(config())
    [mini], _ = make_mini_batches(samples_of(2), np.array([1.0, 0.0, 1.0, 1.0]), cfg, n_ranks=1)
    assert mini.part_factors == () and all(p.batch.parts is None for p in mini.packed)
    assert len(mini.idle) == 2 and mini.extra_weight == 6


def test_tokens_and_weights_of_parts_are_logged_and_absent_losses_are_not():
    cfg = echo_config("observations?weight=0.4&final_weight=0.2&ramp=2")
    samples = episodes(2, cfg=cfg)
    assert part_metrics(samples, 1, cfg.algorithm) == pytest.approx(
        {"loss/observations_tokens": 8.0, "loss/observations_weight": 0.3}
    )
    [mini], _ = make_mini_batches(samples, np.array([1.0, 0, 1, 0]), cfg, n_ranks=1, step=2)
    np.testing.assert_allclose(mini.part_factors, (0.2,), rtol=1e-6)  # 0.2 * 8 / 8
    batches = [p.batch for p in mini.packed]
    update = {"loss/observations": 0.0, "loss/policy": 1.0}
    assert with_trained_parts(update, batches, cfg.algorithm) == update
    empty = [dataclasses.replace(b, parts=None) for b in batches]
    assert with_trained_parts(update, empty, cfg.algorithm) == {"loss/policy": 1.0}


def mix_config(**keys):
    c = config(parts=("demonstrations?weight=0.5",))
    c.data.demonstrations, c.data.demonstrations_per_step = ("sft.jsonl",), 4
    c.learner.update(keys)
    return resolve(c)


def demonstrations(n):
    """Demonstrations of 3 response tokens, of which the last two are learned."""
    own = np.array([False, True, True])
    tokens = np.arange(3, dtype=np.int32)
    return [Demonstration(i, np.full(4, i, np.int32), tokens, own) for i in range(n)]


def n_trained(mini):
    """Tokens of parts in a mini-batch."""
    found = [p.batch.parts for p in mini.packed if p.batch.parts is not None]
    return sum(int((parts > 0).sum()) for parts in found)


def test_demonstrations_are_divided_over_the_mini_batches_of_a_step():
    cfg = mix_config(mini_batch_prompts=1)
    given = given_samples(demonstrations(4), cfg.algorithm)
    rewards = np.array([1.0, 0.0, 1.0, 1.0])
    minis, _ = make_mini_batches(samples_of(2), rewards, cfg, n_ranks=1, demonstrations=given)
    first, second = minis
    # the first has 6 tokens of the policy; those of the second prompt are idle, as before
    assert [len(m.idle) for m in minis] == [0, 2]
    assert (first.extra_weight, second.extra_weight) == (0, 6)
    for mini in minis:  # w W / N = 0.5 * 6 / 4 tokens of two demonstrations
        np.testing.assert_allclose(mini.part_factors, (0.75,), rtol=1e-12)
        assert n_trained(mini) == 4
    assert sum(int(p.batch.mask.sum()) for p in second.packed) == 0
    prompts = [np.concatenate([p.batch.tokens.ravel() for p in m.packed]) for m in minis]
    assert (prompts[1] == 3).sum() == 4  # the prompt of the last demonstration


def test_without_a_token_of_the_policy_the_demonstrations_are_the_loss():
    cfg = mix_config()
    masked = [dataclasses.replace(s, loss_mask=np.zeros(3, bool)) for s in samples_of(2)]
    given = given_samples(demonstrations(4), cfg.algorithm)
    [mini], _ = make_mini_batches(masked, np.ones(4), cfg, n_ranks=1, demonstrations=given)
    assert len(mini.idle) == 4
    assert mini.extra_weight == 1.0
    np.testing.assert_allclose(mini.part_factors, (0.5 / 8,), rtol=1e-12)
