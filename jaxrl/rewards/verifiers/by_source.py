"""Selects the reward by data_source, so that one run can mix datasets."""

from typing import Any

from jaxrl.rewards.verifiers.code import code
from jaxrl.rewards.verifiers.gsm8k import gsm8k
from jaxrl.rewards.verifiers.last_number import last_number
from jaxrl.rewards.verifiers.math import math
from jaxrl.rewards.verifiers.reasoning_gym import reasoning_gym

_BY_PREFIX = {
    "addition/": last_number,
    "subtraction/": last_number,
    "multiplication/": last_number,
    "chain_sum/": last_number,
    "reasoning_gym/": reasoning_gym,
    "openai/gsm8k": gsm8k,
    "lighteval/MATH": math,
    "DigitalLearningGmbH/MATH-lighteval": math,
    "HuggingFaceH4/MATH-500": math,
    "HuggingFaceH4/aime_2024": math,
    "math": math,
    "aime": math,
    "numina": math,
}
_CODE_PREFIXES = (
    "apps",
    "codecontests",
    "codeforces",
    "taco",
    "livecodebench",
    "openai/openai_humaneval",
    "mbpp",
)


def by_source(
    data_source: str,
    solution_str: str,
    ground_truth: Any,
    extra_info: dict[str, Any] | None = None,
    *,
    timeout_s: float,
    unsafe: bool = False,
) -> float | dict[str, float]:
    """The reward of the first table entry that is a prefix of `data_source`.

    `unsafe` is the option of the reward `code`. Raises ValueError if there is no entry.
    """
    if data_source.startswith(_CODE_PREFIXES):
        return code(
            *(data_source, solution_str, ground_truth, extra_info),
            timeout_s=timeout_s,
            unsafe=unsafe,
        )
    for prefix, reward in _BY_PREFIX.items():
        if data_source.startswith(prefix):
            return reward(data_source, solution_str, ground_truth, extra_info)
    raise ValueError(
        f"by_source has no reward for data_source {data_source!r}; set reward.functions to a "
        f"reward for it. by_source has {', '.join((*_BY_PREFIX, *_CODE_PREFIXES))}"
    )
