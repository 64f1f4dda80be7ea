"""Ground truths: any JSON value of the dataset, of which most verifiers need the text."""

import json
from typing import Any


def as_text(ground_truth: Any) -> str:
    """The text of a string, a number or a truth value. Raises ValueError for other values."""
    if isinstance(ground_truth, str):
        return ground_truth
    if isinstance(ground_truth, bool | int | float):
        return json.dumps(ground_truth)
    raise ValueError(
        f"the ground truth {ground_truth!r:.80} is of type {type(ground_truth).__name__}, this "
        "reward compares text or a number; use a reward for this form, or convert the column"
    )
