"""Which logprobs and models each algorithm needs before an update."""

import dataclasses

import pytest

from jaxrl.config.keys import AlgorithmConfig, DataConfig, LearnerConfig, RunConfig
from jaxrl.learner import requirements as needs


def cfg(*, mini_batch_prompts=0, epochs=1, **algorithm):
    return RunConfig(
        data=DataConfig(prompts_per_step=8),
        learner=LearnerConfig(mini_batch_prompts=mini_batch_prompts, epochs=epochs),
        algorithm=AlgorithmConfig(**algorithm),
    )


@pytest.mark.parametrize(
    ("keys", "source"),
    [
        (dict(), "policy"),
        (dict(mini_batch_prompts=8), "policy"),
        (dict(mini_batch_prompts=4), "recompute"),
        (dict(epochs=2), "recompute"),
        (dict(old_logp="recompute"), "recompute"),
        (dict(top_entropy=0.2), "recompute"),
        (dict(old_logp="rollout", epochs=2), "rollout"),
    ],
)
def test_old_logp_is_scored_only_if_a_step_makes_several_updates(keys, source):
    assert needs.ratio_source(cfg(**keys)) == source
    assert needs.needs_old_logp(cfg(**keys)) == (source == "recompute")


@pytest.mark.parametrize(
    ("keys", "model", "logp", "full"),
    [
        (dict(kl_coef=0.0), False, False, False),
        (dict(kl_coef=0.0, kl="full"), False, False, False),
        (dict(kl_coef=0.1), True, True, False),
        (dict(kl_coef=0.1, kl_in="reward", kl="k1"), True, True, False),
        (dict(kl_coef=0.1, kl="full"), True, False, True),
    ],
)
def test_the_reference_is_kept_and_scored_only_if_a_kl_needs_it(keys, model, logp, full):
    assert needs.needs_ref(cfg(**keys)) == model
    assert needs.needs_ref_logp(cfg(**keys)) == logp
    assert needs.full_kl_in_loss(cfg(**keys)) == full


def test_a_full_kl_in_the_reward_is_an_error():
    with pytest.raises(ValueError, match="'full' is a loss"):
        needs.needs_ref_logp(cfg(kl_coef=0.1, kl="full", kl_in="reward"))


def test_an_unknown_source_is_an_error():
    unknown = dataclasses.replace(AlgorithmConfig(), old_logp="engine")
    with pytest.raises(ValueError, match="'engine' is not known"):
        needs.ratio_source(dataclasses.replace(cfg(), algorithm=unknown))


@pytest.mark.parametrize(
    ("teachers", "on_devices"),
    [
        (dict(), True),
        (dict(teacher="m"), True),
        (dict(teacher="http://h/v1"), False),
        (dict(teacher="http://h/v1", more_teachers=("m?source=a",)), True),
    ],
)
def test_likely_ids_of_servers_need_no_reference_on_the_devices(teachers, on_devices):
    keys = dict(advantage="distill", kl="jsd", kl_coef=1.0, kl_top_k=4)
    assert needs.needs_ref_scores(cfg(**keys, **teachers)) == on_devices
