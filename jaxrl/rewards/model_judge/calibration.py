"""Compares the verdicts of the reward `judge` with labels: the rows, and the agreement.

A row has "prompt" (text or messages), "response", "labels" (criterion -> score on its scale), and
what the judge reads in training: "answer", or the column of reward.judge.reference.
"""

import dataclasses
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np

from jaxrl.algorithms.agreement import spearman, weighted_kappa
from jaxrl.config.keys import RewardConfig
from jaxrl.config.plugins import options
from jaxrl.data.sources.files import read_rows
from jaxrl.json_text import shown
from jaxrl.rewards.functions import is_judge
from jaxrl.rewards.model_judge.rubric import Rubric, read_rubric
from jaxrl.rewards.pool import RewardPool, count_sums
from jaxrl.types import Prompt, Reward, Rollout

_FIELDS = ("prompt", "response", "labels")
_OTHERS = ("answer", "data_source")


@dataclasses.dataclass(frozen=True)
class LabelledResponse:
    """A response with the scores that a person gave it."""

    place: str  # "file:row"
    rollout: Rollout
    labels: dict[str, int]  # of criteria; not necessarily of all


def calibrate(cfg: RewardConfig, source: str, run_folder: Path) -> dict[str, Any]:
    """Judges the labelled responses of a file by the first judge of cfg.functions.

    Returns "results" (statistics of each criterion and of the score), "counts" (requests, tokens,
    failures) and "verdicts" (one record per row). Responses without a verdict are in no statistic.
    """
    judge = next(spec for spec in cfg.functions if is_judge(spec))
    rubric = read_rubric(str(({"rubric": cfg.judge.rubric} | options(judge))["rubric"]))
    labelled = read_labels(source, rubric)
    cfg = dataclasses.replace(cfg, functions=(judge,), weights=())
    with RewardPool(cfg, run_folder=run_folder) as pool:
        rewards, (name,) = pool.score([one.rollout for one in labelled]), pool.names
    verdicts = [_verdict(reward, name, rubric) for reward in rewards]
    return {
        "results": statistics(rubric, [one.labels for one in labelled], verdicts),
        "counts": count_sums(rewards),
        "verdicts": [
            {"row": one.place, "labels": one.labels, "verdict": verdict, "error": reward.error}
            for one, verdict, reward in zip(labelled, verdicts, rewards, strict=True)
        ],
    }


def read_labels(source: str, rubric: Rubric) -> list[LabelledResponse]:
    """The rows of a labelled file. Raises ValueError with the place of a row that is wrong."""
    found = []
    for number, (place, row) in enumerate(read_rows(source)):
        try:
            found.append(LabelledResponse(place, _rollout(number, row), _labels(row, rubric)))
        except ValueError as error:
            raise ValueError(
                f"{place}: {error}; docs/how_to/evaluation.md has the form of labelled responses"
            ) from error
    if not found:
        raise ValueError(f"{source} has no labelled responses; add at least one row")
    return found


def statistics(
    rubric: Rubric, labels: Sequence[dict[str, int]], verdicts: Sequence[dict[str, int]]
) -> dict[str, dict[str, float]]:
    """Agreement by criterion, and of the score where a row has labels of all criteria.

    "n" pairs, "agreement" (share of equal scores), "kappa" (quadratic weights), "spearman", and
    "bias" (mean of judge minus label). The score is a mean, for which two equal ones say little: it
    has only "n", "spearman" and "bias". {} for a criterion without pairs.
    """
    found: dict[str, dict[str, float]] = {}
    rows = [pair for pair in zip(labels, verdicts, strict=True) if pair[1]]
    for name in (c.name for c in rubric.criteria):
        pairs = np.array([[label[name], v[name]] for label, v in rows if name in label])
        if len(pairs):
            label, judged = pairs.T
            kappa = {"agreement": float((label == judged).mean())}
            kappa["kappa"] = weighted_kappa(label, judged)
            found[name] = {"n": float(len(pairs))} | kappa | _ordered(label, judged)
    complete = [pair for pair in rows if len(pair[0]) == len(rubric.criteria)]
    if complete:
        label, judged = np.array([[rubric.score(x) for x in pair] for pair in complete]).T
        found["score"] = {"n": float(len(complete))} | _ordered(label, judged)
    return found


def _ordered(label: np.ndarray, judged: np.ndarray) -> dict[str, float]:
    order = spearman(label.astype(np.float64), judged.astype(np.float64))
    return {"spearman": order, "bias": float((judged - label).mean())}


def _verdict(reward: Reward, name: str, rubric: Rubric) -> dict[str, int]:
    """The scores of the criteria; {} if the judge failed."""
    if reward.error:
        return {}
    return {c.name: int(reward.parts[f"{name}/{c.name}"]) for c in rubric.criteria}


def _rollout(number: int, row: dict[str, Any]) -> Rollout:
    if lacking := [name for name in _FIELDS if name not in row]:
        raise ValueError(f"the row has no {' and no '.join(lacking)}")
    prompt, response = row["prompt"], row["response"]
    if not isinstance(response, str):
        raise ValueError(f"the response is {shown(response)}, no text")
    messages = [{"role": "user", "content": prompt}] if isinstance(prompt, str) else prompt
    if not isinstance(messages, list) or not all(
        isinstance(m, dict) and isinstance(m.get("role"), str) for m in messages
    ):
        raise ValueError(f"the prompt is {shown(prompt)}, neither text nor messages")
    no_ids, no_logp = np.zeros(0, np.int32), np.zeros(0, np.float32)
    extra = {name: row[name] for name in row if name not in (*_FIELDS, *_OTHERS)}
    source = str(row.get("data_source", "default"))
    asked = Prompt(number, tuple(messages), no_ids, row.get("answer", ""), source, extra)
    return Rollout(asked, 0, no_ids, no_logp, no_ids.astype(bool), no_ids, "stop", response)


def _labels(row: dict[str, Any], rubric: Rubric) -> dict[str, int]:
    labels, levels = row["labels"], {c.name: c.levels for c in rubric.criteria}
    if not isinstance(labels, dict):
        raise ValueError(f"labels is {shown(labels)}, no mapping of criteria to scores")
    found = {name: value for name, value in labels.items() if value is not None}
    for name, value in found.items():
        if name not in levels:
            raise ValueError(f"the label {name} is no criterion; known are {', '.join(levels)}")
        if type(value) is not int or value not in levels[name]:
            low, high = levels[name][0], levels[name][-1]
            raise ValueError(f"{name} is {shown(value)}, no integer from {low} to {high}")
    if not found:
        raise ValueError("the row has no label")
    return found
