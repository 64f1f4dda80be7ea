"""Advantages of a step's samples, from rewards, KL penalties, lengths, baselines and values."""

import dataclasses
from collections.abc import Sequence

import numpy as np

from jaxrl.algorithms.advantages import ADVANTAGES, whiten
from jaxrl.algorithms.table import apply, lookup
from jaxrl.config.keys import AlgorithmConfig
from jaxrl.data.packing import response_field
from jaxrl.types import TrainingSample


def add_advantages(
    samples: Sequence[TrainingSample],
    rewards: np.ndarray,
    cfg: AlgorithmConfig,
    *,
    penalties: Sequence[np.ndarray] | None = None,
    baselines: np.ndarray | None = None,
    parts: "RewardParts | None" = None,
) -> list[TrainingSample]:
    """Fills `advantages`; with a critic, also `returns`.

    Args:
      samples: at least one. With a critic, they have `values`. Groups may differ in size. The
        samples of one episode (`branch`) are one member of their group: its length and its KL
        penalty are their sums, and all get its advantage. Token-level estimators take each sample
        as a trajectory that ends with the reward of the episode.
      rewards: float64 [len(samples)], of the sample's episode.
      penalties: KL penalty per response token (kl_in = "reward"). Response-level estimators
        subtract its sum from the reward of the response; token-level ones subtract it per token.
      baselines: float [len(samples)], reward of the greedy response to the prompt (ReMax).
      parts: the rewards that `rewards` is the weighted sum of (GDPO).

    Tokens outside the loss mask get advantage 0. The estimators see the remaining tokens as if
    they were contiguous.
    """
    row = lookup(ADVANTAGES, cfg.advantage, "algorithm.advantage")
    places = places_in_groups(samples)
    inputs = EstimatorInputs(samples, rewards, places, penalties, baselines, parts)
    result = apply(row, {name: getattr(inputs, name) for name in row.inputs}, cfg)

    def fields(result: np.ndarray) -> list[np.ndarray]:
        rows = result if row.level == "token" else result[places][:, None]
        return [_scatter(x, s.loss_mask) for x, s in zip(rows, samples, strict=True)]

    if not row.needs_critic:
        return [
            dataclasses.replace(s, advantages=a)
            for s, a in zip(samples, fields(result), strict=True)
        ]
    advantages, returns = result
    advantages = whiten(advantages, inputs.mask)
    return [
        dataclasses.replace(s, advantages=a, returns=g)
        for s, a, g in zip(samples, fields(advantages), fields(returns), strict=True)
    ]


def places_in_groups(samples: Sequence[TrainingSample]) -> tuple[np.ndarray, np.ndarray]:
    """(group, index of its episode in the group) of each sample, int [N]: places in [P, n]."""
    groups = np.array([s.group for s in samples])
    _, first, group = np.unique(groups, return_index=True, return_inverse=True)
    episode = np.cumsum([s.branch == 0 for s in samples])
    return group, episode - episode[first][group]


@dataclasses.dataclass(frozen=True)
class RewardParts:
    """K rewards of each sample and their weights in the sum."""

    values: np.ndarray  # float64 [N, K]; NaN where a function gave no score
    weights: np.ndarray  # float64 [K]


@dataclasses.dataclass(frozen=True)
class EstimatorInputs:
    """The inputs that a row of `ADVANTAGES` can name, computed when they are read.

    With P prompts, at most n samples per prompt, N samples in total, and T tokens of the loss mask.
    """

    samples: Sequence[TrainingSample]
    sample_rewards: np.ndarray  # float64 [N]
    places: tuple[np.ndarray, np.ndarray]  # of the samples in [P, n]
    penalties: Sequence[np.ndarray] | None  # KL penalties of each sample's tokens
    greedy_rewards: np.ndarray | None  # [N]
    parts: RewardParts | None

    @property
    def rewards(self) -> np.ndarray:
        """[P, n]: rewards minus the KL penalties; NaN in a group of fewer than n samples."""
        return (self.task_groups - self.kl_penalties).astype(np.float32)

    @property
    def task_groups(self) -> np.ndarray:
        """[P, n]: rewards without KL penalties; NaN in a group of fewer than n samples."""
        result = np.full(self._sizes, np.nan, np.float32)
        result[self.places] = self.sample_rewards
        return result

    @property
    def kl_penalties(self) -> np.ndarray:
        """float64 [P, n]: sums of the KL penalties; 0 without them."""
        if self.penalties is None:
            return np.zeros(self._sizes)
        return self._of_episodes(np.array([float(p.sum()) for p in self._masked(self.penalties)]))

    @property
    def reward_parts(self) -> np.ndarray:
        """[K, P, n]: the rewards apart; NaN where one is missing."""
        assert self.parts is not None
        result = np.full((len(self.parts.weights), *self._sizes), np.nan)
        for of_part, values in zip(result, self.parts.values.T, strict=True):
            of_part[self.places] = values
        return result

    @property
    def reward_weights(self) -> np.ndarray:
        """[K]: their weights in the sum."""
        assert self.parts is not None
        return self.parts.weights

    @property
    def lengths(self) -> np.ndarray:
        """[P, n]: number of tokens of the loss mask; 0 in a group of fewer than n samples."""
        return self._of_episodes(self._lens)

    @property
    def task_rewards(self) -> np.ndarray:
        """[N]: rewards without KL penalties."""
        return self.sample_rewards.astype(np.float32)

    @property
    def roles(self) -> tuple[str, ...]:
        """[N]: names of the conversations."""
        return tuple(s.role for s in self.samples)

    @property
    def role_rewards(self) -> np.ndarray:
        """[N]: rewards of the conversations."""
        return np.array([s.role_reward for s in self.samples], np.float32)

    @property
    def role_baselines(self) -> np.ndarray:
        """[N]: running means of the rewards of their roles, before the step."""
        return np.array([s.role_baseline for s in self.samples], np.float32)

    @property
    def baselines(self) -> np.ndarray:
        """[N]: greedy rewards."""
        assert self.greedy_rewards is not None
        return self.greedy_rewards.astype(np.float32)

    @property
    def mask(self) -> np.ndarray:
        """[N, T]"""
        width = max(self._lens.max(initial=1), 1)
        return (np.arange(width) < self._lens[:, None]).astype(np.float32)

    @property
    def values(self) -> np.ndarray:
        """[N, T]"""
        return self._of_tokens([response_field(s, s.values) for s in self.samples], np.float32)

    @property
    def score_norms(self) -> np.ndarray:
        """[N, T]: squared norms of the policy's score function."""
        fields = [response_field(s, s.score_norms) for s in self.samples]
        return self._of_tokens(fields, np.float32)

    @property
    def token_kl_rewards(self) -> np.ndarray:
        """[N, T]: minus the KL penalties."""
        return self._kl_rewards().astype(np.float32)

    @property
    def token_rewards(self) -> np.ndarray:
        """[N, T]: the same, plus the rewards.

        `turn_rewards` of the sample are at its tokens, and the rest of the response's reward is at
        its last token.
        """
        turns = self._masked([response_field(s, s.turn_rewards) for s in self.samples])
        return token_rewards(self._kl_rewards(), self.sample_rewards, turns, self.mask)

    @property
    def turn_rewards(self) -> np.ndarray:
        """[N, U]: `token_rewards` summed over each turn; 0 after the last."""
        result = np.zeros((len(self.samples), self._n_turns), np.float64)
        rows = np.arange(len(result))[:, None]
        np.add.at(result, (rows, self.token_turns), self.token_rewards * self.mask)
        return result

    @property
    def turn_anchors(self) -> np.ndarray:
        """int [N, U]: number of the state that a turn answers, of each group apart; else -1."""
        numbers: dict[tuple[int, bytes], int] = {}
        result = np.full((len(self.samples), self._n_turns), -1)
        for row, s in zip(result, self.samples, strict=True):
            states = [numbers.setdefault((s.group, anchor), len(numbers)) for anchor in s.anchors]
            row[: len(states)] = states
        return result

    @property
    def token_turns(self) -> np.ndarray:
        """int [N, T]: index of the turn of a token; 0 at padding."""
        starts = [s.loss_mask & ~np.roll(s.loss_mask, 1) for s in self.samples]
        for start, s in zip(starts, self.samples, strict=True):
            start[:1] = s.loss_mask[:1]
        return self._of_tokens([np.cumsum(start) - 1 for start in starts], np.int64)

    @property
    def _n_turns(self) -> int:
        return max((len(s.anchors) for s in self.samples), default=1) or 1

    @property
    def _sizes(self) -> list[int]:
        return [int(index.max()) + 1 for index in self.places]

    @property
    def _lens(self) -> np.ndarray:
        return np.array([s.n_loss_tokens for s in self.samples])

    def _kl_rewards(self) -> np.ndarray:
        if self.penalties is None:
            return np.zeros(self.mask.shape, np.float64)
        return self._of_tokens([-p for p in self.penalties], np.float64)

    def _masked(self, fields: Sequence[np.ndarray]) -> list[np.ndarray]:
        """The values at the tokens of the loss mask."""
        return [x[s.loss_mask] for x, s in zip(fields, self.samples, strict=True)]

    def _of_tokens(self, fields: Sequence[np.ndarray], dtype: type) -> np.ndarray:
        """Values per response token, as [N, T]."""
        mask = self.mask
        result = np.zeros(mask.shape, dtype)
        result[mask > 0] = np.concatenate(self._masked(fields))
        return result

    def _of_episodes(self, x: np.ndarray) -> np.ndarray:
        """The sum over the samples of each episode, [P, n]."""
        found = np.zeros(self._sizes, x.dtype)
        np.add.at(found, self.places, x)
        return found


def token_rewards(
    kl_rewards: np.ndarray, rewards: np.ndarray, turns: Sequence[np.ndarray], mask: np.ndarray
) -> np.ndarray:
    """float32 [N, T]: `kl_rewards`, the rewards of turns, and the rest of `rewards` at the last."""
    result = kl_rewards.copy()
    result[mask > 0] += np.concatenate(turns)
    for row, reward, turn in zip(result, rewards, turns, strict=True):
        if len(turn):
            row[len(turn) - 1] += reward - turn.sum(dtype=np.float64)
    return result.astype(np.float32)


def _scatter(values: np.ndarray, mask: np.ndarray) -> np.ndarray:
    """Writes one value, or the first values in order, to the true elements of `mask`; 0 elsewhere.

    Returns float32 [len(mask)].
    """
    out = np.zeros(len(mask), np.float32)
    out[mask] = values if len(values) == 1 else values[: mask.sum()]
    return out
