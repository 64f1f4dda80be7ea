"""Batches by difficulty: prompts in pools by their running mean reward, which weights share."""

import base64
import zlib
from collections.abc import Iterable, Iterator, Mapping, Sequence
from typing import Any, cast

import numpy as np

from jaxrl.data.iterator import PromptOutcome, check_identity
from jaxrl.data.running_mean import running_mean
from jaxrl.types import Prompt

POOLS = ("hard", "right", "easy")
_HARD, _RIGHT, _EASY = range(3)


class DifficultyIterator[T]:
    """Endless batches of `prompts_per_step` prompts, whose pools have shares set by weights.

    The rate of a prompt is the running mean of its mean rewards,
    rate <- memory * rate + (1 - memory) * mean. It is hard below edges[0], easy above edges[1], and
    right in between or without a rate: what was not tried is tried first. Item by item, each pool
    earns its share and the one that has earned most gives its prompt that was drawn longest ago
    (smooth weighted round robin, as in `MixedIterator`). A pool that has no further prompt leaves
    its share to the others.

    What is drawn is a function of the seed and of the recorded rewards, without random numbers. The
    state has the rates and the last batch of every prompt.
    """

    def __init__(
        self,
        items: Sequence[T],
        *,
        prompts_per_step: int,
        shuffle: bool,
        seed: int,
        weights: Sequence[float],
        edges: Sequence[float],
        memory: float,
    ):
        n = len(items)
        if n < prompts_per_step:
            raise ValueError(
                f"{n} prompts do not fill one step of {prompts_per_step}; lower "
                "data.prompts_per_step, or add data to data.train"
            )
        self.items, self.steps_per_epoch = items, n // prompts_per_step
        self._size, self._weights = prompts_per_step, np.array(weights, np.float64)
        self._edges, self._memory = edges, memory
        self._place = {cast(Prompt, item).id: i for i, item in enumerate(items)}
        self._rank = np.random.default_rng(seed).permutation(n) if shuffle else np.arange(n)
        self._rates = np.full(n, np.nan, np.float32)
        self._drawn = np.zeros(n, np.int32)  # batch in which each was drawn last, from 1; 0 = none
        self._earned = np.zeros(len(POOLS))
        self._position = 0  # batches consumed
        self._identity = {
            "n_prompts": n,
            "prompts_per_step": prompts_per_step,
            "shuffle": shuffle,
            "seed": seed,
            "pools": [list(weights), list(edges), memory],
        }

    def record(self, outcomes: Iterable[PromptOutcome]) -> None:
        """Updates the rates of prompts with their mean rewards."""
        for prompt_id, mean in outcomes:
            i = self._place[prompt_id]
            old = None if np.isnan(self._rates[i]) else float(self._rates[i])
            self._rates[i] = running_mean(old, mean, self._memory)

    def metrics(self) -> dict[str, float]:
        """Number of prompts in each pool, and without a rate."""
        rated = self._pools()[~np.isnan(self._rates)]
        n_hard, n_right, n_easy = np.bincount(rated, minlength=len(POOLS)).tolist()
        return {
            "data/hard": float(n_hard),
            "data/right": float(n_right),
            "data/easy": float(n_easy),
            "data/unrated": float(len(self.items) - len(rated)),
        }

    def __iter__(self) -> Iterator[list[T]]:
        return self

    def __next__(self) -> list[T]:
        queues = [self._queue(pool) for pool in range(len(POOLS))]
        chosen = [queues[self._next_pool(queues)].pop() for _ in range(self._size)]
        self._position += 1
        self._drawn[chosen] = self._position
        return [self.items[i] for i in chosen]

    def _pools(self) -> np.ndarray:
        """The pool of each prompt, int [N]."""
        low, high = self._edges
        pools = np.full(len(self.items), _RIGHT)
        pools[self._rates < low] = _HARD  # NaN is neither below nor above
        pools[self._rates > high] = _EASY
        return pools

    def _queue(self, pool: int) -> list[int]:
        """The prompts of a pool, at most a batch of them; the one to draw first at the end."""
        places = np.flatnonzero(self._pools() == pool)
        age = self._drawn[places].astype(np.int64) * len(self.items) + self._rank[places]
        if len(places) > self._size:
            first = np.argpartition(age, self._size)[: self._size]
            places, age = places[first], age[first]
        return places[np.argsort(-age)].tolist()

    def _next_pool(self, queues: Sequence[Sequence[int]]) -> int:
        """The pool of the next prompt, among those that have one."""
        open_pools = np.array([bool(queue) for queue in queues])
        shares = self._weights * open_pools
        if not shares.any():
            shares = open_pools.astype(np.float64)
        self._earned += shares / shares.sum()
        best = int(np.argmax(np.where(open_pools & (shares > 0), self._earned, -np.inf)))
        self._earned[best] -= 1.0
        return best

    def state(self) -> dict[str, Any]:
        """JSON-serializable state for restore()."""
        arrays = {"rates": _encode(self._rates), "drawn": _encode(self._drawn)}
        return {"step": self._position, "earned": self._earned.tolist(), **arrays, **self._identity}

    def restore(self, state: Mapping[str, Any]) -> None:
        """Continues with the batch after `state` was taken. Raises ValueError for other data."""
        check_identity(state, self._identity)
        self._position, self._earned = int(state["step"]), np.array(state["earned"])
        self._rates = _decode(state["rates"], np.dtype(np.float32))
        self._drawn = _decode(state["drawn"], np.dtype(np.int32))


def _encode(array: np.ndarray) -> str:
    return base64.b64encode(zlib.compress(array.astype(array.dtype.newbyteorder("<")))).decode()


def _decode(text: str, dtype: np.dtype) -> np.ndarray:
    data = zlib.decompress(base64.b64decode(text))
    return np.frombuffer(data, dtype.newbyteorder("<")).astype(dtype)
