"""Tests of jaxrl/config/saved.py."""

import pytest

from jaxrl.config import resolve
from jaxrl.config.saved import config_hash, differences, from_json, to_json
from tests.config.runnable import runnable


def test_json_round_trip_is_exact():
    changes = dict(learner__buckets=(512, 1024), learner__lr=3e-7, rollout__n=4)
    run = resolve(runnable(**changes, data__template_kwargs__thinking=False))
    assert from_json(to_json(run)) == run


def test_the_hash_changes_only_with_keys_that_change_numbers():
    base = config_hash(resolve(runnable()))
    assert base == config_hash(resolve(runnable(name="other", resume=True, log__samples=0)))
    moved = runnable(mesh__fsdp=2, mesh__tensor=4, distributed__coordinator="a:1")
    assert base == config_hash(resolve(moved)), "a run may resume on other hosts and another mesh"
    ppo = dict(algorithm__advantage="gae")
    critic = config_hash(resolve(runnable(**ppo)))
    assert critic == config_hash(resolve(runnable(critic__mesh__tensor=2, **ppo)))
    assert critic != config_hash(resolve(runnable(critic__lr=1e-6, **ppo))) and critic != base
    assert base != config_hash(resolve(runnable(learner__lr=2e-6)))
    assert base != config_hash(resolve(runnable(seed=1)))


def test_a_run_may_resume_with_other_rollout_workers():
    workers = dict(schedule__mode="async", schedule__rollout_workers=4, rollout__tensor=4)
    base = config_hash(resolve(runnable(**workers)))
    others = workers | dict(
        schedule__rollout_workers=1,
        schedule__max_rollout_workers=3,
        schedule__hosts_per_worker=2,
        schedule__worker_accelerator="gpu:2",
        schedule__worker_timeout_s=9.0,
        schedule__weight_transfer="delta",
    )
    assert base == config_hash(resolve(runnable(**others)))
    assert base != config_hash(resolve(runnable(**others, schedule__max_staleness=2)))


def test_the_length_of_a_run_is_part_of_the_hash_if_the_learning_rate_decays():
    def hash_of(**changes) -> str:
        return config_hash(resolve(runnable(**changes)))

    assert hash_of(total_steps=10) == hash_of(total_steps=20)
    decaying = dict(learner__lr_schedule="cosine")
    assert hash_of(total_steps=10, **decaying) != hash_of(total_steps=20, **decaying)


def test_names_in_a_mapping_that_only_one_config_has_are_differences():
    old, new = resolve(runnable(data__template_kwargs__a=1)), resolve(runnable())
    assert config_hash(old) != config_hash(new)
    assert differences(old, new) == ["data.template_kwargs.a: 1 -> 'not set'"]
    assert differences(new, old) == ["data.template_kwargs.a: 'not set' -> 1"]


def test_a_config_of_another_version_is_rejected_as_such():
    text = to_json(resolve(runnable())).replace('"max_num_seqs"', '"max_sequences"')
    with pytest.raises(ValueError, match="another version of jaxrl") as error:
        from_json(text)
    assert "max_sequences" in str(error.value) and "rollout.max_num_seqs" in str(error.value)
