"""The configuration of a run: `default_config()` to edit, `resolve()` to check and freeze.

A config file returns the ConfigDict of `default_config()` with its own values set. `resolve` checks
every rule between keys and turns it into the frozen dataclasses of jaxrl/config/keys, before any
device work.
"""

import dataclasses
import itertools
import warnings
from collections.abc import Mapping
from typing import Any

from ml_collections import ConfigDict

from jaxrl.config.checks.algorithm import algorithm_errors, algorithm_warnings
from jaxrl.config.checks.batch import batch_errors, batch_warnings, reward_model_length_errors
from jaxrl.config.checks.data import data_errors, length_errors
from jaxrl.config.checks.judge import evaluation_judge_errors
from jaxrl.config.checks.memory import memory_errors
from jaxrl.config.checks.mesh import mesh_errors, mesh_warnings, sharding_errors
from jaxrl.config.checks.optimizer import optimizer_errors
from jaxrl.config.checks.parts import part_errors
from jaxrl.config.checks.preference import (
    only_offline_errors,
    preference_errors,
    preference_warnings,
)
from jaxrl.config.checks.rewards import (
    calibration_errors,
    only_evaluation_errors,
    reward_errors,
    reward_warnings,
)
from jaxrl.config.checks.rollout import rollout_errors, rollout_warnings, training_sampling_errors
from jaxrl.config.checks.run import folder_errors, model_errors, run_errors
from jaxrl.config.checks.schedule import schedule_errors, schedule_warnings
from jaxrl.config.checks.self_distillation import self_distillation_errors
from jaxrl.config.keys import (
    AlgorithmConfig,
    CriticConfig,
    LoRAConfig,
    RunConfig,
    ScheduleConfig,
)
from jaxrl.config.schema import build, keys, to_dict


def default_config() -> ConfigDict:
    """Every key with its default, typed and locked: a key that does not exist cannot be set.

    Mappings, such as data.template_kwargs, accept any name.
    """
    config = ConfigDict(to_dict(RunConfig())).lock()
    for name, spec in keys(RunConfig).items():
        if spec.is_mapping:
            section: Any = config
            for part in name.split("."):
                section = section[part]
            section.unlock()
    return config


def resolve(
    config: ConfigDict | Mapping[str, Any], *, n_devices: int | None = None, n_processes: int = 1
) -> RunConfig:
    """The frozen run that `config` describes, checked without touching a device.

    Raises one ValueError with a line for every error: unknown or missing keys, wrong types, values
    out of range, keys that contradict each other, and, if `n_devices` in all processes is given, a
    mesh of another size. Warns of choices that are valid but usually a mistake.
    """
    values = config.to_dict() if isinstance(config, ConfigDict) else config
    run, errors = build(RunConfig, values)
    raise_errors(errors + validate(run) + _device_errors(run, n_devices, n_processes))
    checks = (
        mesh_warnings,
        rollout_warnings,
        schedule_warnings,
        algorithm_warnings,
        batch_warnings,
        reward_warnings,
        preference_warnings,
    )
    for line in itertools.chain.from_iterable(check(run) for check in checks):
        warnings.warn(line, stacklevel=2)
    return run


def resolve_evaluation(config: ConfigDict | Mapping[str, Any]) -> RunConfig:
    """As `resolve`, for evaluation on data.val only.

    With eval.judge_labels only the keys of rewards are checked: no model is loaded.
    Keys that matter only to training are not checked, and the sections that load further models
    or adapters (algorithm, critic, lora) have their defaults.
    """
    values = config.to_dict() if isinstance(config, ConfigDict) else config
    run, errors = build(RunConfig, values)
    if run.eval.judge_labels:
        errors += [*folder_errors(run), *reward_errors(run), *calibration_errors(run)]
        raise_errors([*errors, *evaluation_judge_errors(run)])
        return run
    if not run.data.val:
        errors.append("data.val is empty; set files, folders or a task such as 'task:addition'")
    if run.reward_model.path:
        errors += reward_model_length_errors(run)
    errors += [*folder_errors(run), *model_errors(run), *data_errors(run.data)]
    errors += [*reward_errors(run), *evaluation_judge_errors(run), *rollout_errors(run)]
    raise_errors([*errors, *mesh_errors(run.mesh, None)])
    return dataclasses.replace(
        run,
        model=dataclasses.replace(run.model, freeze_vision="all"),
        algorithm=AlgorithmConfig(),
        critic=CriticConfig(),
        lora=LoRAConfig(),
        schedule=ScheduleConfig(),
    )


def check_only_offline(run: RunConfig) -> None:
    """Raises ValueError for keys that an RL run does not read, but offline training does."""
    raise_errors(only_offline_errors(run))


def check_devices(run: RunConfig, n_devices: int, n_processes: int = 1) -> None:
    """Raises ValueError if the mesh of a resolved run does not fit `n_devices` in all processes."""
    raise_errors(_device_errors(run, n_devices, n_processes))


def _device_errors(run: RunConfig, n_devices: int | None, n_processes: int) -> list[str]:
    """Errors of the meshes, on the devices that the rollout leaves for training."""
    n = run.schedule.rollout_devices * n_processes
    if n_devices is not None and n >= n_devices:
        each = f" in {n_processes} processes" if n_processes > 1 else ""
        return [
            f"schedule.rollout_devices={run.schedule.rollout_devices} leaves no device for "
            f"training: there are {n_devices}{each}; set fewer, or schedule.mode='partial', which "
            "needs no separate devices"
        ]
    n_training = None if n_devices is None else n_devices - n
    errors = mesh_errors(run.mesh, n_training) + sharding_errors(run, n_training)
    rest = f" ({n} more are for the rollout: schedule.rollout_devices)" if n else ""
    return [error + rest for error in errors]


def validate(run: RunConfig) -> list[str]:
    """One line per broken rule between keys, with the values and what to set instead."""
    return [
        *batch_errors(run),
        *data_errors(run.data),
        *length_errors(run),
        *optimizer_errors(run),
        *memory_errors(run),
        *rollout_errors(run),
        *schedule_errors(run),
        *algorithm_errors(run),
        *part_errors(run),
        *self_distillation_errors(run),
        *training_sampling_errors(run),
        *model_errors(run),
        *reward_errors(run),
        *preference_errors(run),
        *run_errors(run),
        *only_evaluation_errors(run),
    ]


def raise_errors(errors: list[str]) -> None:
    """Raises one ValueError that lists the errors, if there are any."""
    if errors:
        raise ValueError(
            "this configuration cannot run:\n" + "\n".join(f"  - {line}" for line in errors)
        )
