"""The reward `judge_pairs`: how often a response is better than others to the same prompt.

A judge compares two responses by the criteria of a rubric, in both orders, so that a preference
for a position cancels. The win rate of a response is its mean share of its comparisons: 1 for a
win, 0.5 for a tie.
"""

import asyncio
import dataclasses
import functools
import hashlib
import itertools
import json
import random
from collections.abc import Iterable, Mapping, Sequence
from typing import Any

from jaxrl.json_text import Json, Message
from jaxrl.rewards.calls import RewardFailed
from jaxrl.rewards.model_judge.judge import judged_text, reference_text
from jaxrl.rewards.model_judge.options import PairOptions, takes_options
from jaxrl.rewards.model_judge.request import pair_body
from jaxrl.rewards.model_judge.rubric import Rubric
from jaxrl.rewards.model_judge.verdicts import (
    COUNTS,
    Verdict,
    Verdicts,
    cached_rubric,
    verdicts_of,
)

PairOfTexts = tuple[int, int]  # indices of two texts
_PAIR_COUNTS: dict[str, float] = dict.fromkeys(
    (
        *("pairs", "failed_pairs", "equal_pairs", "inconsistent"),
        *("preferred_first", "preferred_second", "ties"),
    ),
    0.0,
)


@dataclasses.dataclass(frozen=True)
class Comparison:
    """The result of a pair, and what its requests took."""

    shares: dict[str, float]  # of the first response, by criterion; {} if a request failed
    counts: dict[str, float]
    reason: str = ""  # why there is none


@takes_options(PairOptions)
async def judge_pairs(
    group_strs: Sequence[str],
    ground_truth: Any,
    extra_infos: Sequence[dict[str, Any]],
    conversation: Sequence[Message],
    *,
    options: PairOptions,
) -> list[dict[str, Any] | RewardFailed]:
    """The win rate of each response, by criterion and in total, and counts; 0 to 1.

    A pair with a failed request is left out. A response without a pair has a RewardFailed. Raises
    ValueError for a response without an opponent or an empty reference answer.
    """
    criteria = cached_rubric(options.rubric)
    texts = [
        judged_text(text, extra, options.thinking)
        for text, extra in zip(group_strs, extra_infos, strict=True)
    ]
    answer = reference_text(options.reference, ground_truth, extra_infos[0])
    if options.against == "reference":
        if answer is None:
            raise ValueError(
                f"the column {options.reference!r} of the row is empty, but against=reference "
                "compares the responses with it; fill it, or remove the row"
            )
        pairs = [(i, len(texts)) for i in range(len(texts))]
        compared, shown = [*texts, answer], None
    else:
        pairs = draw_pairs(texts, conversation, options.opponents)
        compared, shown = texts, answer
    body = functools.partial(
        pair_body, criteria, conversation=conversation, reference=shown, **options.request
    )
    free = asyncio.Semaphore(options.requests)
    judge = PairJudge(criteria, verdicts_of(options.server), free, swap=options.swap)
    bodies = [
        [body(first=compared[i], second=compared[j]) for i, j in ((a, b), (b, a))] for a, b in pairs
    ]
    results = await asyncio.gather(*map(judge.compare, bodies))
    return win_rates(criteria, len(texts), pairs, results)


class PairJudge:
    """Compares pairs at a judge's server."""

    def __init__(self, rubric: Rubric, verdicts: Verdicts, free: asyncio.Semaphore, *, swap: bool):
        self._rubric, self._verdicts, self._free, self._swap = rubric, verdicts, free, swap

    async def compare(self, bodies: Sequence[Json]) -> Comparison:
        """The result of a pair, from its requests in both orders, or from the first of them.

        Equal responses are a tie without a request.
        """
        names = [c.name for c in self._rubric.criteria]
        if bodies[0] == bodies[1]:
            return Comparison(dict.fromkeys(names, 0.5), {"pairs": 1.0, "equal_pairs": 1.0})
        answers = await asyncio.gather(*map(self._ask, bodies if self._swap else bodies[:1]))
        counts = _sums([{"pairs": 1.0}, *(answer.counts for answer in answers)])
        del counts["failures"]  # counts responses
        if failed := [answer for answer in answers if isinstance(answer, RewardFailed)]:
            return Comparison({}, counts | {"failed_pairs": 1.0}, str(failed[0]))
        found = [answer.value for answer in answers if isinstance(answer, Verdict)]
        preferred = [self._rubric.weighted(value) for value in found]
        counts |= {
            "preferred_first": float(sum(share > 0.5 for share in preferred)),
            "preferred_second": float(sum(share < 0.5 for share in preferred)),
            "ties": float(preferred.count(0.5)),
        }
        if not self._swap:
            return Comparison(found[0], counts)
        first, second = found
        counts["inconsistent"] = float(any(first[name] != 1 - second[name] for name in names))
        return Comparison({n: (first[n] + 1 - second[n]) / 2 for n in names}, counts)

    async def _ask(self, body: Json) -> Verdict[dict[str, float]] | RewardFailed:
        async with self._free:
            try:
                return await self._verdicts.verdict(body, self._rubric.read_comparison)
            except RewardFailed as error:
                return error


def draw_pairs(
    texts: Sequence[str], conversation: Sequence[Message], opponents: int
) -> list[PairOfTexts]:
    """The pairs of a group: all, or those in which each response has `opponents` others.

    The responses are shuffled into a ring by a seed that is a hash of the texts; each is compared
    with the `opponents` / 2 next ones, so all have as many comparisons in either position. Raises
    ValueError for a single response.
    """
    n = len(texts)
    if n < 2:
        raise ValueError(
            "judge_pairs got one response to a prompt, which has no opponent; set rollout.n and "
            "eval.n to at least 2, or reward.judge.against='reference'"
        )
    content = json.dumps([list(conversation), list(texts)], sort_keys=True, default=str)
    ring = list(range(n))
    random.Random(hashlib.sha256(content.encode()).digest()).shuffle(ring)
    if not 0 < opponents < n - 1:
        return list(itertools.combinations(ring, 2))
    steps = range(1, opponents // 2 + 1)
    return [(ring[i], ring[(i + step) % n]) for step in steps for i in range(n)]


def win_rates(
    rubric: Rubric, n: int, pairs: Iterable[PairOfTexts], results: Iterable[Comparison]
) -> list[dict[str, Any] | RewardFailed]:
    """The result of each of `n` responses; the counts of a pair are those of its first response."""
    shares: list[list[dict[str, float]]] = [[] for _ in range(n)]
    counts: list[list[Mapping[str, float]]] = [[COUNTS, _PAIR_COUNTS] for _ in range(n)]
    reasons = [""] * n
    for (first, second), result in zip(pairs, results, strict=True):
        counts[first].append(result.counts)
        mirrored = {name: 1 - share for name, share in result.shares.items()}
        for i, share in ((first, result.shares), (second, mirrored)):
            if i == n:  # the reference answer
                continue
            if share:
                shares[i].append(share)
            else:
                reasons[i] = result.reason
    return [
        _win_rate(rubric, *one) for one in zip(shares, map(_sums, counts), reasons, strict=True)
    ]


def _sums(parts: Iterable[Mapping[str, float]]) -> dict[str, float]:
    """The sum of each count."""
    sums: dict[str, float] = {}
    for part in parts:
        for name, value in part.items():
            sums[name] = sums.get(name, 0.0) + value
    return sums


def _win_rate(
    rubric: Rubric, shares: Sequence[dict[str, float]], counts: dict[str, float], reason: str
) -> dict[str, Any] | RewardFailed:
    if not shares:
        return RewardFailed(
            f"no comparison with a verdict; {reason}", counts | {"failures": counts["failures"] + 1}
        )
    names = [c.name for c in rubric.criteria]
    rates = {name: sum(share[name] for share in shares) / len(shares) for name in names}
    return rates | {"score": rubric.weighted(rates), "counts": counts}
