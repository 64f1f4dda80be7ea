"""Tests of jaxrl/config/saved.py."""

import pytest

from jaxrl.config import resolve
from jaxrl.config.saved import blocking_differences, differences, from_json, to_json
from tests.config.runnable import runnable


def test_json_round_trip_is_exact():
    changes = dict(learner__buckets=(512, 1024), learner__lr=3e-7, rollout__n=4)
    run = resolve(runnable(**changes, data__template_kwargs__thinking=False))
    assert from_json(to_json(run)) == run


def changed(old: dict, new: dict) -> list[str]:
    """The keys whose change forbids to resume."""
    lines = blocking_differences(resolve(runnable(**old)), resolve(runnable(**new)))
    return [line.partition(":")[0] for line in lines]


def test_only_keys_that_change_numbers_forbid_to_resume():
    assert not changed({}, dict(name="other", run_dir="x", resume=True, log__samples=0))
    moved = dict(mesh__fsdp=2, mesh__tensor=4, distributed__coordinator="a:1")
    assert not changed({}, moved), "a run may resume on other hosts and another mesh"
    ppo = dict(algorithm__advantage="gae")
    assert not changed(ppo, dict(critic__mesh__tensor=2, **ppo))
    assert changed(ppo, dict(critic__lr=1e-6, **ppo)) == ["critic.lr"]
    assert changed({}, dict(learner__lr=2e-6, seed=1, name="x")) == ["seed", "learner.lr"]


def test_a_run_may_resume_with_other_rollout_workers():
    workers = dict(schedule__mode="async", schedule__rollout_workers=4, rollout__tensor=4)
    others = workers | dict(
        schedule__rollout_workers=1,
        schedule__max_rollout_workers=3,
        schedule__hosts_per_worker=2,
        schedule__worker_accelerator="gpu:2",
        schedule__worker_timeout_s=9.0,
        schedule__weight_transfer="delta",
    )
    assert not changed(workers, others)
    staler = others | dict(schedule__max_staleness=2)
    assert changed(workers, staler) == ["schedule.max_staleness"]


def test_a_run_may_resume_with_another_length_unless_the_learning_rate_decays():
    short, long = dict(total_steps=10), dict(total_steps=20)
    assert not changed(short, long)
    decaying = dict(learner__lr_schedule="cosine")
    assert changed(short | decaying, long | decaying) == ["total_steps"]


def test_names_in_a_mapping_that_only_one_config_has_are_differences():
    old, new = resolve(runnable(data__template_kwargs__a=1)), resolve(runnable())
    assert (
        differences(old, new)
        == blocking_differences(old, new)
        == ["data.template_kwargs.a: 1 -> 'not set'"]
    )
    assert differences(new, old) == ["data.template_kwargs.a: 'not set' -> 1"]


def test_a_config_of_another_version_is_rejected_as_such():
    text = to_json(resolve(runnable())).replace('"max_num_seqs"', '"max_sequences"')
    with pytest.raises(ValueError, match="another version of jaxrl") as error:
        from_json(text)
    assert "max_sequences" in str(error.value) and "rollout.max_num_seqs" in str(error.value)
