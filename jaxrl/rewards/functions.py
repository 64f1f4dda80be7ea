"""Reward functions: the built-in ones by name, and the options that the pool reads."""

import inspect
from collections.abc import Container, Mapping, Sequence
from typing import Any

from jaxrl.config.plugins import import_path, load_plugin, options
from jaxrl.rewards.calls import RewardFunction

KEY = "reward.functions"
OWN_PREFIX = "notebook:"  # of the names of functions that the caller of the trainer passes
BUILT_IN = {
    "by_source": "jaxrl.rewards.verifiers.by_source:by_source",
    "code": "jaxrl.rewards.verifiers.code:code",
    "environment": "jaxrl.rewards.verifiers.environment:environment",
    "exact": "jaxrl.rewards.verifiers.exact:exact",
    "format": "jaxrl.rewards.verifiers.format:format",
    "gsm8k": "jaxrl.rewards.verifiers.gsm8k:gsm8k",
    "judge": "jaxrl.rewards.model_judge.judge:judge",
    "judge_pairs": "jaxrl.rewards.model_judge.pairs:judge_pairs",
    "last_number": "jaxrl.rewards.verifiers.last_number:last_number",
    "math": "jaxrl.rewards.verifiers.math:math",
    "reasoning_gym": "jaxrl.rewards.verifiers.reasoning_gym:reasoning_gym",
    "remote": "jaxrl.rewards.verifiers.remote:remote",
}
# Built-in rewards that compare with the answer of the row, or read it.
NEED_ANSWER = ("by_source", "code", "exact", "gsm8k", "last_number", "math")
# Called once in the training process, before the workers start, with the options of the reward that
# it declares. Raises ValueError if the reward cannot run on this machine.
START_CHECKS = {
    "code": "jaxrl.rewards.verifiers.code:check_machine",
    "judge": "jaxrl.rewards.model_judge.judge:check_options",
    "judge_pairs": "jaxrl.rewards.model_judge.judge:check_options",
}
# Options of any function that the pool reads, with their defaults.
POOL_OPTIONS = {
    "timeout_s": 10.0,  # seconds per call; default reward.timeout_s
    "batch_size": 64,  # responses per call of a batch function
    "concurrency": 64,  # awaits in flight in a worker, of an async function for one response
}


def load_reward(spec: str) -> RewardFunction:
    """The reward function that `spec` names, with its options bound. Raises ValueError."""
    return load_plugin(spec, built_in=BUILT_IN, key=KEY, reserved=POOL_OPTIONS)


def need_answer(specs: Sequence[str]) -> list[str]:
    """The functions that fail without an answer; of the user's own ones that is not known."""
    return [spec for spec in specs if spec.partition("?")[0] in NEED_ANSWER]


def is_judge(spec: str) -> bool:
    """Whether a reward is the built-in judge, whose options have the keys reward.judge."""
    return spec.partition("?")[0] == "judge"


def judges_pairs(spec: str) -> bool:
    """Whether a reward is the built-in comparison of pairs, which has the keys reward.judge too."""
    return spec.partition("?")[0] == "judge_pairs"


def check_start(spec: str, more: Mapping[str, Any]) -> None:
    """Raises ValueError if this machine cannot run the built-in reward that `spec` names.

    `more` has its options that are not after the '?'.
    """
    path = START_CHECKS.get(spec.partition("?")[0])
    if path is None:
        return
    check = load_plugin(path, built_in={}, key=KEY)
    declared = inspect.signature(check).parameters
    given = {**more, **options(spec)}
    check(**{name: value for name, value in given.items() if name in declared})


def check_passed(specs: Sequence[str], passed: Container[str]) -> None:
    """Raises ValueError if a function of a notebook is named but was not passed."""
    for spec in specs:
        if spec.startswith(OWN_PREFIX) and spec not in passed:
            name = spec.removeprefix(OWN_PREFIX).partition("?")[0]
            raise ValueError(
                f"reward.functions {spec!r} is the function {name} of the notebook that started "
                f"this run, and no such function was passed; pass it with jaxrl.train(..., "
                f"reward={name}), or write it to a file and set reward.functions to "
                f"'file.py:{name}'"
            )


def metric_names(specs: Sequence[str]) -> tuple[str, ...]:
    """One name per reward function: the function's name, or the full spec if two share the name.

    Raises ValueError for a name that is neither built in nor an import path.
    """
    paths = [import_path(spec, built_in=BUILT_IN, key=KEY) for spec in specs]
    names = [path.rpartition(":")[2] for path in paths]
    return tuple(
        name if names.count(name) == 1 else spec for name, spec in zip(names, specs, strict=True)
    )


def pool_option(spec: str, name: str, default: float) -> float:
    """The value of an option in POOL_OPTIONS. Raises ValueError unless it is a positive number."""
    value = options(spec).get(name, default)
    if not isinstance(value, int | float) or not value > 0:
        raise ValueError(
            f"{KEY} {spec!r}: {name}={value!r} is not a positive number; set for example {name}=8"
        )
    return float(value)
