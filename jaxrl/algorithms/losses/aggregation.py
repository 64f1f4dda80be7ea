"""From per-token losses to one number, as (sum, weight), and reductions over unmasked tokens.

Sums and weights are added over micro-batches and data-parallel ranks and divided once, so that the
loss does not depend on packing. `response_len` holds, at every token, the number of response tokens
of the token's sequence, or of all sequences of its episode if an agent had several conversations;
so Σ mask / response_len counts the episodes.
"""

import dataclasses
from collections.abc import Callable, Sequence
from typing import Literal

import jax.numpy as jnp
from jaxtyping import Array, Float

from jaxrl.algorithms.table import lookup

SumAndWeight = tuple[Float[Array, ""], Float[Array, ""]]


def apply_mask(x: Float[Array, "B T"], mask: Float[Array, "B T"]) -> Float[Array, "B T"]:
    """x at unmasked tokens, 0 at masked ones.

    A select, not a product, because 0 * inf is NaN: masked values reach neither the result nor the
    gradient.
    """
    return jnp.where(mask > 0, x, 0.0)


def masked_sum(x: Float[Array, "B T"], mask: Float[Array, "B T"]) -> Float[Array, ""]:
    """Σ mask x over all tokens."""
    return jnp.sum(apply_mask(x, mask) * mask)


def masked_mean(x: Float[Array, "B T"], mask: Float[Array, "B T"]) -> SumAndWeight:
    """Mean over unmasked tokens as (Σ mask x, Σ mask)."""
    return masked_sum(x, mask), jnp.sum(mask)


def masked_max(x: Float[Array, "B T"], mask: Float[Array, "B T"]) -> Float[Array, ""]:
    """Maximum over unmasked tokens; -inf if all tokens are masked."""
    return jnp.max(jnp.where(mask > 0, x, -jnp.inf))


def token_mean(loss, mask, response_len, max_response_len: int) -> SumAndWeight:
    """Mean over all tokens: DAPO, eq. 8 (https://arxiv.org/abs/2503.14476)."""
    return masked_mean(loss, mask)


def token_sum(loss, mask, response_len, max_response_len: int) -> SumAndWeight:
    """Sum over all tokens of the mini-batch. The weight is 1, which the caller adds once."""
    return masked_sum(loss, mask), jnp.zeros(())


def seq_mean_token_mean(loss, mask, response_len, max_response_len: int) -> SumAndWeight:
    """Mean over sequences of the token mean: GRPO, eq. 3 (https://arxiv.org/abs/2402.03300)."""
    return masked_mean(loss, mask / response_len)


def seq_mean_token_sum(loss, mask, response_len, max_response_len: int) -> SumAndWeight:
    """Mean over sequences of the token sum: the policy gradient of whole responses."""
    return masked_sum(loss, mask), jnp.sum(mask / response_len)


def seq_mean_token_sum_norm(loss, mask, response_len, max_response_len: int) -> SumAndWeight:
    """Mean over sequences of token sum / max_response_len: Dr.GRPO.

    https://arxiv.org/abs/2503.20783
    """
    return masked_sum(loss, mask) / max_response_len, jnp.sum(mask / response_len)


@dataclasses.dataclass(frozen=True)
class Aggregation:
    """One row of `AGGREGATIONS`: the reduction, and what its weight counts."""

    function: Callable[..., SumAndWeight]
    weight: Literal["tokens", "sequences", "none"]


AGGREGATIONS = {
    "token_mean": Aggregation(token_mean, weight="tokens"),
    "token_sum": Aggregation(token_sum, weight="none"),
    "seq_mean_token_mean": Aggregation(seq_mean_token_mean, weight="sequences"),
    "seq_mean_token_sum": Aggregation(seq_mean_token_sum, weight="sequences"),
    "seq_mean_token_sum_norm": Aggregation(seq_mean_token_sum_norm, weight="sequences"),
}


def aggregate(
    loss: Float[Array, "B T"],
    mask: Float[Array, "B T"],
    response_len: Float[Array, "B T"],
    *,
    mode: str,
    max_response_len: int,
) -> SumAndWeight:
    """(sum, weight) of per-token losses; the loss is Σ sums / Σ weights over all micro-batches."""
    row = lookup(AGGREGATIONS, mode, "algorithm.aggregation")
    return row.function(loss, mask, response_len, max_response_len)


def sequences_weight(
    response_lens: Sequence[int], shares: Sequence[float] | None = None, *, mode: str
) -> float:
    """The weight in which the aggregation `mode` counts sequences.

    It is their number, with their `shares` of an episode, one each by default, or the number of
    their tokens if the weight counts tokens. A sum over tokens is divided by 1.
    """
    row = lookup(AGGREGATIONS, mode, "algorithm.aggregation")
    if row.weight == "none":
        return 1.0
    n_sequences = len(response_lens) if shares is None else sum(shares)
    return float(sum(response_lens) if row.weight == "tokens" else n_sequences)
