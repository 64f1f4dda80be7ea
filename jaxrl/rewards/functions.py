"""Reward functions: the built-in ones, their call signature and the options that the pool reads.

A reward function has verl's signature: (data_source, solution_str, ground_truth, extra_info) for
one response. If its first parameter is `data_sources` it gets a batch: the same names with an "s",
lists as values, and it returns a list. Parameters named in OPTIONAL_ARGUMENTS are passed to
functions that declare them; in a batch the names of texts end in "s" as well.
"""

import inspect
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

from jaxrl.workers.plugins import import_path, load_plugin, options

RewardFunction = Callable[..., Any]

KEY = "reward.functions"
BUILT_IN = {
    "by_source": "jaxrl.rewards.verifiers.by_source:by_source",
    "code": "jaxrl.rewards.verifiers.code:code",
    "environment": "jaxrl.rewards.verifiers.environment:environment",
    "exact": "jaxrl.rewards.verifiers.exact:exact",
    "format": "jaxrl.rewards.verifiers.format:format",
    "gsm8k": "jaxrl.rewards.verifiers.gsm8k:gsm8k",
    "last_number": "jaxrl.rewards.verifiers.last_number:last_number",
    "math": "jaxrl.rewards.verifiers.math:math",
    "reasoning_gym": "jaxrl.rewards.verifiers.reasoning_gym:reasoning_gym",
    "remote": "jaxrl.rewards.verifiers.remote:remote",
}
# Called once in the training process, before the workers start, with the options of the reward that
# it declares. Raises ValueError if the reward cannot run on this machine.
START_CHECKS = {"code": "jaxrl.rewards.verifiers.code:check_machine"}
# The rendered prompt, and prompt plus response, both with special tokens.
TEXT_ARGUMENTS = ("prompt_str", "query_str")
OPTIONAL_ARGUMENTS = (*TEXT_ARGUMENTS, "timeout_s")  # timeout_s: seconds that the call may take
# Options of any function that the pool reads, with their defaults.
POOL_OPTIONS = {
    "timeout_s": 0.0,  # seconds per call; 0 = reward.timeout_s
    "batch_size": 64,  # responses per call of a batch function
}


class CallSignature(NamedTuple):
    """The arguments that a reward function declares beyond verl's."""

    batched: bool
    optional: tuple[str, ...]  # from OPTIONAL_ARGUMENTS, without the "s" of a batch


def load_reward(spec: str) -> RewardFunction:
    """The reward function that `spec` names, with its options bound. Raises ValueError."""
    return load_plugin(spec, built_in=BUILT_IN, key=KEY, reserved=POOL_OPTIONS)


def check_start(spec: str) -> None:
    """Raises ValueError if this machine cannot run the built-in reward that `spec` names."""
    path = START_CHECKS.get(spec.partition("?")[0])
    if path is None:
        return
    check = load_plugin(path, built_in={}, key=KEY)
    declared = inspect.signature(check).parameters
    check(**{name: value for name, value in options(spec).items() if name in declared})


def metric_names(specs: Sequence[str]) -> tuple[str, ...]:
    """One name per reward function: the function's name, or the full spec if two share the name.

    Raises ValueError for a name that is neither built in nor an import path.
    """
    paths = [import_path(spec, built_in=BUILT_IN, key=KEY) for spec in specs]
    names = [path.rpartition(":")[2] for path in paths]
    return tuple(
        name if names.count(name) == 1 else spec for name, spec in zip(names, specs, strict=True)
    )


def call_signature(function: RewardFunction) -> CallSignature:
    """Reads how to call a function from the names of its parameters."""
    try:
        parameters = list(inspect.signature(function).parameters)
    except (ValueError, TypeError):  # some functions written in C have no signature
        parameters = []
    batched = parameters[:1] == ["data_sources"]
    declared = {
        name: f"{name}s" if batched and name in TEXT_ARGUMENTS else name
        for name in OPTIONAL_ARGUMENTS
    }
    return CallSignature(batched, tuple(n for n, local in declared.items() if local in parameters))


def pool_option(spec: str, name: str) -> float:
    """The value of an option in POOL_OPTIONS. Raises ValueError unless it is a positive number."""
    value = options(spec).get(name)
    if value is None:
        return float(POOL_OPTIONS[name])
    if not isinstance(value, int | float) or not value > 0:
        raise ValueError(
            f"{KEY} {spec!r}: {name}={value!r} is not a positive number; set for example {name}=8"
        )
    return float(value)
