"""Experts of tokens that updates and scoring replay, on the way from the engine to the device.

Responses have one small array for all their tokens. A micro-batch keeps the experts of those tokens
that have any, and becomes an array [B, T, L, k] for the device only when it is used.
"""

import dataclasses
from collections.abc import Sequence

import numpy as np
from jaxtyping import Int, Integer

NONE = -1  # in place of an expert: the router chooses


@dataclasses.dataclass(frozen=True)
class PackedExperts:
    """The experts of the tokens of a micro-batch [B, T] that have any."""

    index: np.ndarray  # int64 [n], b * T + t of each token
    experts: np.ndarray  # uint8 or uint16 [n, L, k]


def join_experts(parts: Sequence[np.ndarray], n: int) -> np.ndarray:
    """The experts [n, L, k] of the first `n` tokens of parts in order.

    Raises ValueError if the parts have fewer: some tokens were sampled without a record.
    """
    experts = np.concatenate(parts)
    if len(experts) < n:
        raise ValueError(
            f"only {len(experts)} of {n} tokens of a response have recorded experts; their rollout "
            "began without router replay. Set config.learner.router_replay='off'"
        )
    return experts[:n]


def given_tokens(parts: Sequence[np.ndarray], n: int) -> list[np.ndarray]:
    """Experts of `n` tokens that the model did not sample, after the parts; [] if none record."""
    return [np.zeros((n, *parts[-1].shape[1:]), parts[-1].dtype)] if parts else []


def pack_experts(
    located: Sequence[tuple[np.ndarray | None, np.ndarray, int]],
) -> PackedExperts:
    """The experts of responses (experts, sampled tokens, place of the first in the micro-batch).

    Tokens that the model did not sample have none. At least one response has some.
    """
    found = [(e, np.flatnonzero(mask), start) for e, mask, start in located if e is not None]
    index = [start + sampled for _, sampled, start in found]
    return PackedExperts(
        np.concatenate(index), np.concatenate([experts[sampled] for experts, sampled, _ in found])
    )


def all_experts(
    experts: Integer[np.ndarray, "B T L k"], segments: Int[np.ndarray, "B T"]
) -> PackedExperts:
    """The experts of all tokens of a micro-batch except padding."""
    index = np.flatnonzero(segments)
    return PackedExperts(index, experts.reshape(-1, *experts.shape[2:])[index])


def join_packed_experts(parts: Sequence[PackedExperts | None], size: int) -> PackedExperts | None:
    """The experts of micro-batches of `size` tokens each, concatenated by rows."""
    found = [(i, part) for i, part in enumerate(parts) if part is not None]
    if not found:
        return None
    index = np.concatenate([part.index + i * size for i, part in found])
    return PackedExperts(index, np.concatenate([part.experts for _, part in found]))


def to_array(
    packed: PackedExperts | None, shape: tuple[int, int], routing: tuple[int, int]
) -> Int[np.ndarray, "B T L k"]:
    """int16, NONE at tokens without experts; `routing` is (L, k)."""
    array = np.full((shape[0] * shape[1], *routing), NONE, np.int16)
    if packed is not None:
        array[packed.index] = packed.experts
    return array.reshape(*shape, *routing)
