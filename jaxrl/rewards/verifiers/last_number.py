"""Compares the last number of the response with the ground truth."""

from typing import Any

from jaxrl.rewards.verifiers.ground_truth import read_number
from jaxrl.rewards.verifiers.numbers import last_number_of, same_number


def last_number(
    data_source: str,
    solution_str: str,
    ground_truth: Any,
    extra_info: dict[str, Any] | None = None,
    *,
    require_stop: bool = True,
) -> float:
    """1 if the response's last number equals the ground truth, else 0.

    `require_stop` scores 0 for a response cut off at the length limit: extra_info["finish"] is
    "stop" or "length", and a missing entry counts as "stop". Raises ValueError for a ground truth
    that is not one number.
    """
    expected = read_number(ground_truth)
    if require_stop and (extra_info or {}).get("finish", "stop") != "stop":
        return 0.0
    found = last_number_of(solution_str)
    return float(found is not None and same_number(found, expected))
