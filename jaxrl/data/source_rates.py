"""Curricula over sources: their running mean rewards, learning progress, and admission."""

import collections
import dataclasses
from collections.abc import Iterable, Mapping, Sequence
from typing import Any

from jaxrl.data.iterator import PromptOutcome
from jaxrl.data.running_mean import running_mean


@dataclasses.dataclass(frozen=True)
class SourceCurriculum:
    """How the shares of sources follow their mean rewards."""

    progress: float  # share of the prompts that is distributed by learning progress; 0 = none
    memories: Sequence[float]  # (fast, slow): weight of the earlier mean in a running mean
    gate: float  # mean reward of all sources before one at which it is admitted; 0 = from the start
    gate_prompts: int  # prompts of a source without which it admits none


class SourceRates:
    """The running mean rewards of sources, and the shares that follow from them.

    Each batch changes the means of its sources by rate <- memory * rate + (1 - memory) * mean, with
    a fast and a slow memory. The learning progress of a source is |fast - slow|, the absolute
    change of its pass rate: sources that are mastered or hopeless have none, and one that is being
    forgotten has (Teacher-Student Curriculum Learning, https://arxiv.org/abs/1707.00183, section
    3.2; with two running means: https://arxiv.org/abs/2106.14876, section 2.2).
    """

    def __init__(self, curriculum: SourceCurriculum, sources: Sequence[Iterable[int]]):
        """`sources` are the ids of the prompts of each source, in the order of admission."""
        self._curriculum = curriculum
        self._source_of = {i: k for k, ids in enumerate(sources) for i in ids}
        n = len(sources)
        self._fast, self._slow = [0.0] * n, [0.0] * n
        self._n_prompts = [0] * n  # with a mean reward so far
        self._n_admitted = 1 if curriculum.gate else n

    def record(self, outcomes: Iterable[PromptOutcome]) -> None:
        """Updates the rates of the sources of one batch, and admits what has passed the gate."""
        means = collections.defaultdict(list)
        for prompt_id, mean in outcomes:
            means[self._source_of[prompt_id]].append(mean)
        for k, found in means.items():
            mean = sum(found) / len(found)
            for rates, memory in zip(
                (self._fast, self._slow), self._curriculum.memories, strict=True
            ):
                rates[k] = running_mean(rates[k] if self._n_prompts[k] else None, mean, memory)
            self._n_prompts[k] += len(found)
        while self._n_admitted < len(self._fast) and self._passes():
            self._n_admitted += 1

    def shares(self, weights: Sequence[float]) -> list[float]:
        """The share of each source, with the sum 1, from the weights that the config sets.

        With w the weights of the admitted sources and p their progress, both with the sum 1, it is
        (1 - progress) w + progress p, or w as long as there is no progress at all.
        """
        admitted = [w * (k < self._n_admitted) for k, w in enumerate(weights)]
        base = [w / sum(admitted) for w in admitted]
        progress = [p * (w > 0) for p, w in zip(self._progress(), base, strict=True)]
        part = self._curriculum.progress if sum(progress) > 0 else 0.0
        total = sum(progress) or 1.0
        return [(1 - part) * w + part * p / total for w, p in zip(base, progress, strict=True)]

    def metrics(self, shares: Sequence[float]) -> dict[str, float]:
        """The share of each source in the next batch, its rate and its progress; from source 0."""
        found = {"data/admitted": float(self._n_admitted)}
        for k, values in enumerate(zip(shares, self._fast, self._progress(), strict=True)):
            names = (f"data/source_{k}/{name}" for name in ("share", "rate", "progress"))
            found |= dict(zip(names, values, strict=True))
        return found

    def state(self) -> dict[str, Any]:
        """JSON-serializable state for restore()."""
        return {
            "fast": self._fast,
            "slow": self._slow,
            "n_prompts": self._n_prompts,
            "n_admitted": self._n_admitted,
        }

    def restore(self, state: Mapping[str, Any]) -> None:
        self._fast, self._slow = list(state["fast"]), list(state["slow"])
        self._n_prompts, self._n_admitted = list(state["n_prompts"]), int(state["n_admitted"])

    def _progress(self) -> list[float]:
        return [abs(fast - slow) for fast, slow in zip(self._fast, self._slow, strict=True)]

    def _passes(self) -> bool:
        """Whether every admitted source has enough prompts and a mean reward above the gate."""
        curriculum = self._curriculum
        return all(
            n >= curriculum.gate_prompts and rate >= curriculum.gate
            for n, rate in zip(
                self._n_prompts[: self._n_admitted], self._slow[: self._n_admitted], strict=True
            )
        )
