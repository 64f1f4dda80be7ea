"""The config that is saved with a run, and whether a resumed run may differ from it."""

import json
from pathlib import Path

from jaxrl.config.keys import RunConfig
from jaxrl.config.schema import build, flatten, to_dict

# Keys and sections that a resumed run may change: they do not change its numbers.
FREE_ON_RESUME = (
    "name",
    "run_dir",
    "resume",
    "assert_no_recompile",
    "check_finite",
    "plan_check",
    "compilation_cache",
    "log",
    "checkpoint",
    "distributed",
    "profile",
    "mesh",  # sums are taken in another order
    "score",
    "ref",
    "critic.mesh",
    "reward.max_error_fraction",
    "reward.workers",
    "reward_model.mesh",
    "schedule.rollout_workers",  # from max_staleness = 2 on, which version samples a token differs
    "schedule.max_rollout_workers",
    "schedule.hosts_per_worker",
    "schedule.worker_accelerator",
    "schedule.worker_timeout_s",
    "schedule.weight_transfer",
)
# Also free if the learning rate does not decay towards the end.
LENGTH = ("total_steps", "total_epochs")


def to_json(run: RunConfig) -> str:
    return json.dumps(to_dict(run), indent=2) + "\n"


def from_json(text: str) -> RunConfig:
    """The run that `to_json` wrote. Raises ValueError if it is damaged or keys have changed."""
    try:
        values = json.loads(text)  # a config may hold infinite numbers
    except (ValueError, RecursionError) as error:
        raise ValueError(
            f"config.json of the run folder is not JSON ({error}); restore it, or remove it to "
            "resume without comparing the configs"
        ) from error
    if not isinstance(values, dict):
        raise ValueError("config.json of the run folder is not an object; restore or remove it")
    run, errors = build(RunConfig, values)
    if errors:
        raise ValueError(
            "config.json was written by another version of jaxrl; set config.run_dir to a new "
            "folder:\n" + "\n".join(f"  - {line}" for line in errors)
        )
    return run


def read_run_config(folder: Path) -> RunConfig | None:
    """The configuration of the run in `folder`; None if it is not a run folder.

    Raises ValueError if its config.json has keys that no longer exist.
    """
    path = folder / "config.json"
    is_run_folder = (folder / "hf").is_dir() or (folder / "checkpoints").is_dir()
    if not is_run_folder or not path.is_file():
        return None
    try:
        return from_json(path.read_text())
    except ValueError as error:
        raise ValueError(
            f"{error}\nTo use the exported model without this config, set {folder / 'hf'}"
        ) from error


def blocking_differences(old: RunConfig, new: RunConfig) -> list[str]:
    """The differences that forbid a resumed run: keys that can change its numbers.

    The name, folders, logging, checkpoints and meshes are not among them.
    """
    free = FREE_ON_RESUME + (LENGTH if new.learner.lr_schedule == "constant" else ())
    starts = tuple(f"{name}{end}" for name in free for end in ".:")
    return [line for line in differences(old, new) if not line.startswith(starts)]


def differences(old: RunConfig, new: RunConfig) -> list[str]:
    """One line per key whose value differs, with both values."""
    was, now = flatten(to_dict(old)), flatten(to_dict(new))
    names = dict.fromkeys([*now, *was])  # names in a mapping may be in only one of them
    absent = "not set"
    return [
        f"{name}: {was.get(name, absent)!r} -> {now.get(name, absent)!r}"
        for name in names
        if was.get(name, absent) != now.get(name, absent)
    ]
