"""Selects the reward by data_source, so that one run can mix datasets."""

from typing import Any

from jaxrl.rewards.sources import reward_of
from jaxrl.rewards.verifiers.code import code
from jaxrl.rewards.verifiers.gsm8k import gsm8k
from jaxrl.rewards.verifiers.last_number import last_number
from jaxrl.rewards.verifiers.math import math
from jaxrl.rewards.verifiers.reasoning_gym import reasoning_gym

_REWARDS = {
    "gsm8k": gsm8k,
    "last_number": last_number,
    "math": math,
    "reasoning_gym": reasoning_gym,
}


def by_source(
    data_source: str,
    solution_str: str,
    ground_truth: Any,
    extra_info: dict[str, Any] | None = None,
    *,
    timeout_s: float,
    unsafe: bool = False,
) -> float | dict[str, float]:
    """The reward of `data_source` (rewards/sources.py).

    `unsafe` is the option of the reward `code`. Raises ValueError if there is no entry.
    """
    name = reward_of(data_source)
    if name == "code":
        return code(
            *(data_source, solution_str, ground_truth, extra_info),
            timeout_s=timeout_s,
            unsafe=unsafe,
        )
    return _REWARDS[name](data_source, solution_str, ground_truth, extra_info)
