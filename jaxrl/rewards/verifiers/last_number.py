"""Is the last number of the response the right one?"""

from typing import Any

from jaxrl.rewards.verifiers.numbers import last_number_of, same_number


def last_number(
    data_source: str,
    solution_str: str,
    ground_truth: str,
    extra_info: dict[str, Any] | None = None,
    *,
    require_stop: bool = True,
) -> float:
    """1 if the response's last number equals the ground truth's, else 0.

    With require_stop a response that ran into the length limit scores 0, whatever it says: extra_info
    tells how it ended ("finish": "stop" or "length"; no entry counts as "stop").
    """
    expected = last_number_of(ground_truth)
    if expected is None:
        raise ValueError(f"the ground truth {ground_truth!r} holds no number; use another reward")
    if require_stop and (extra_info or {}).get("finish", "stop") != "stop":
        return 0.0
    found = last_number_of(solution_str)
    return float(found is not None and same_number(found, expected))
