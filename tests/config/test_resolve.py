"""Tests of jaxrl/config/resolve.py, jaxrl/config/schema.py and jaxrl/config/keys."""

import dataclasses
import pathlib

import pytest

from jaxrl.config import RunConfig, default_config, resolve
from jaxrl.config.schema import keys
from tests.config.runnable import complaint, runnable

KEYS = keys(RunConfig)


def test_the_defaults_with_a_model_and_data_resolve():
    run = resolve(runnable(), n_devices=8)
    assert isinstance(run, RunConfig)
    assert run.rollout.n == 8 and run.learner.row_lens == (8192,)
    assert run.run_path == pathlib.Path("runs/run")


def test_a_resolved_run_cannot_be_changed():
    run = resolve(runnable())
    with pytest.raises(dataclasses.FrozenInstanceError):
        run.seed = 3  # type: ignore[misc]


def test_a_key_that_does_not_exist_cannot_be_set():
    with pytest.raises(AttributeError):
        default_config().rollout.max_num_seq = 3


def test_a_value_of_another_type_cannot_be_set():
    with pytest.raises(TypeError):
        default_config().rollout.n = "many"


def test_all_errors_are_reported_at_once():
    config = runnable(model__path="", rollout__n=1, rollout__page_len=100, algorithm__kl="k4")
    lines = complaint(config).splitlines()
    assert len(lines) == 1 + 4


@pytest.mark.parametrize("name", [name for name, spec in KEYS.items() if spec.range], ids=str)
def test_values_outside_a_range_are_rejected(name):
    spec = KEYS[name]
    outside = "nonsense" if spec.choices else (spec.le + 1 if spec.le is not None else -1000)
    config = runnable()
    *sections, last = name.split(".")
    section = config
    for part in sections:
        section = section[part]
    kind = type(spec.default[0]) if isinstance(spec.default, tuple) and spec.default else None
    section[last] = (outside,) if isinstance(spec.default, tuple) else type(spec.default)(outside)
    assert kind in (None, str, int, float)
    assert f"{name}=" in complaint(config)


def test_a_wrong_type_in_a_plain_mapping_names_the_type_to_use():
    values = runnable().to_dict()
    values["rollout"]["n"] = 2.5
    values["data"]["train"] = "a.parquet"
    values["resume"] = 1
    message = complaint(values)
    assert "rollout.n=2.5 is of type float; set an int" in message
    assert "data.train='a.parquet' is of type str; set a tuple of str" in message
    assert "resume=1 is of type int; set a bool" in message


def test_unknown_and_missing_keys_in_a_plain_mapping_are_named():
    values = runnable().to_dict()
    values["rollout"]["max_num_seq"] = values["rollout"].pop("max_num_seqs")
    message = complaint(values)
    assert "no key rollout.max_num_seq; did you mean rollout.max_num_seqs?" in message
    assert "rollout.max_num_seqs is missing" in message


def test_sizes_of_a_step_follow_from_the_keys():
    run = resolve(
        runnable(learner__mini_batch_prompts=16, learner__epochs=2, total_epochs=3, rollout__n=4)
    )
    assert run.sequences_per_step == 64 * 4
    assert run.updates_per_step == 64 // 16 * 2
    assert run.n_steps(1000) == 1000 // 64 * 3  # 15 full batches per epoch
    assert run.data.max_len == 64 + 512
    assert resolve(runnable(total_steps=7)).n_steps(1000) == 7
