"""Checks ground truths before the first step: a truth that no response matches trains on zeros."""

import dataclasses
import functools
import logging
import random
from collections.abc import Callable, Sequence

import numpy as np

from jaxrl.config.keys import RunConfig
from jaxrl.data.items import ItemMaker
from jaxrl.data.sources.rows import Dropped, SourceRow
from jaxrl.rewards.pool import RewardPool
from jaxrl.rewards.truths import answers, check_truth, takes
from jaxrl.tracking.progress import Progress
from jaxrl.types import Prompt, Rollout

_SHOWN = 3  # rows in a message
_SAMPLE = 32  # rows whose truth is scored as the answer

logger = logging.getLogger(__name__)


def with_checked_truths(maker: ItemMaker[Prompt], functions: Sequence[str]) -> ItemMaker[Prompt]:
    """The maker, which also raises ValueError for rows whose truth the rewards cannot match.

    Rows of a streamed dataset are checked when they are read, others before the first step.
    """
    known = [spec for spec in functions if takes(spec)]
    if not known:
        return maker
    make = functools.partial(_make_checked, make=maker.make, functions=known)
    return dataclasses.replace(maker, make=make)


def _make_checked(
    rows: Sequence[SourceRow],
    dropped: Dropped,
    *,
    make: Callable[[Sequence[SourceRow], Dropped], list[Prompt]],
    functions: Sequence[str],
) -> list[Prompt]:
    """The prompts of the rows. Raises ValueError with the rows whose truth cannot be matched."""
    prompts = make(rows, dropped)
    places = {row.number: row.place for row in rows}
    for spec in functions:
        wrong: list[str] = []
        for prompt in prompts:
            try:
                check_truth(spec, prompt)
            except ValueError as error:
                wrong.append(f"{places[prompt.id]}: {error}")
        if wrong:
            more = f" (and {len(wrong) - _SHOWN} more rows)" if len(wrong) > _SHOWN else ""
            raise ValueError(
                f"no response can match these ground truths with the reward {spec}, which takes "
                f"{takes(spec)}: {'; '.join(wrong[:_SHOWN])}{more}. Correct or remove the rows, or "
                "set another reward in reward.functions"
            )
    return prompts


def report_truths(
    cfg: RunConfig, rewards: RewardPool, prompts: Sequence[Prompt], progress: Progress
) -> None:
    """Shows what truths the rewards take, and scores a sample of truths as the answer.

    Warns with the rows if a built-in reward gives less than 1.
    """
    sample = random.Random(cfg.seed).sample(prompts, min(_SAMPLE, len(prompts)))
    for name, spec in zip(rewards.names, cfg.reward.functions, strict=True):
        if not takes(spec):
            continue
        scored = score_truths(rewards, name, spec, sample)
        low = [(prompt, score) for prompt, score in scored if score < 1]
        tried = f"; {len(scored) - len(low)} of {len(scored)} score 1 as the answer"
        progress.status(f"ground truths of {name}: {takes(spec)}{tried if scored else ''}")
        if low:
            rows = [
                f"{p.answer_text[:60]!r} (row {p.id + 1}): {score:g}" for p, score in low[:_SHOWN]
            ]
            logger.warning(
                "reward %s gives less than 1 to %d of %d ground truths as the answer: %s; check "
                "that its options fit the data",
                *(name, len(low), len(scored), "; ".join(rows)),
            )


def score_truths(
    rewards: RewardPool, name: str, spec: str, prompts: Sequence[Prompt]
) -> list[tuple[Prompt, float]]:
    """(prompt, its best score with the ground truth as the answer), without prompts of no form."""
    tried = [(p, _rollout(p, text)) for p in prompts for text in answers(spec, p)]
    results = rewards.score_with(name, [rollout for _, rollout in tried])
    best: dict[int, tuple[Prompt, float]] = {}
    for (prompt, _), result in zip(tried, results, strict=True):
        _, before = best.get(id(prompt), (prompt, 0.0))
        best[id(prompt)] = prompt, max(before, result.score or 0.0)
    return list(best.values())


def _rollout(prompt: Prompt, text: str) -> Rollout:
    """A finished response without tokens."""
    ids, logp = np.zeros(0, np.int32), np.zeros(0, np.float32)
    mask = np.zeros(0, bool)
    return Rollout(prompt, 0, ids, logp, mask, versions=ids, finish="stop", text=text)
