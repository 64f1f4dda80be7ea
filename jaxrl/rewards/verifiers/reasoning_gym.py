"""Scores a response with the verifier of its reasoning-gym dataset."""

import importlib
import re
from typing import Any

from jaxrl.rewards.verifiers.extraction import last_boxed, last_tagged
from jaxrl.rewards.verifiers.ground_truth import as_text
from jaxrl.rewards.verifiers.numbers import last_number_of


def reasoning_gym(
    data_source: str,
    solution_str: str,
    ground_truth: Any,
    extra_info: dict[str, Any] | None = None,
    *,
    partial_credit: bool = False,
) -> float:
    r"""The score of the dataset's verifier; values below 1 become 0 unless `partial_credit`.

    The verifiers give partial credit to any text that contains the answer, so they only get the
    extracted answer: <answer>...</answer>, else \boxed{...}, else the last number if the ground
    truth is a number, else the last line. A verifier that raises on the answer gives 0.
    """
    origin = (extra_info or {}).get("reasoning_gym")
    if origin is None:
        raise ValueError(
            f"a prompt of {data_source!r} is not from reasoning-gym; use this reward only with "
            "'reasoning_gym:...' sources"
        )
    gym = importlib.import_module("reasoning_gym")
    score = gym.get_score_answer_fn(origin["name"])
    try:
        value = float(
            score(answer=extract(solution_str, as_text(ground_truth)), entry=origin["entry"])
        )
    except Exception:  # foreign code: prime_factorization parses the words of a sentence as numbers
        return 0.0
    return value if partial_credit or value >= 1 else 0.0


def extract(response: str, ground_truth: str) -> str:
    """The answer in a response."""
    response = response.rpartition("</think>")[2]
    if (tagged := last_tagged(response)) is not None:
        return tagged.strip()
    if (boxed := last_boxed(response)) is not None:
        return boxed.strip()
    if re.fullmatch(r"-?[0-9.,]+", ground_truth.strip()):
        number = last_number_of(response)
        return "" if number is None else format(number, "f")
    lines = response.strip().splitlines()
    return lines[-1].strip() if lines else ""
