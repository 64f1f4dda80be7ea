"""From per-token losses to one number, as (sum, weight).

Sums and weights are added over micro-batches and data-parallel ranks and divided once, so the loss does
not depend on how sequences were packed. `response_len` holds, at every token, the number of response
tokens of the token's own sequence; so Σ mask / response_len counts the sequences.
"""

from collections.abc import Sequence

import jax.numpy as jnp
from jaxtyping import Array, Float

from jaxrl.algorithms.choose import choose
from jaxrl.algorithms.masked import masked_mean, masked_sum

Parts = tuple[Float[Array, ""], Float[Array, ""]]


def token_mean(loss, mask, response_len, max_response_len: int) -> Parts:
    """Mean over all tokens: DAPO, eq. 8 (https://arxiv.org/abs/2503.14476)."""
    return masked_mean(loss, mask)


def seq_mean_token_mean(loss, mask, response_len, max_response_len: int) -> Parts:
    """Mean over sequences of the token mean: GRPO, eq. 3 (https://arxiv.org/abs/2402.03300)."""
    return masked_mean(loss, mask / response_len)


def seq_mean_token_sum(loss, mask, response_len, max_response_len: int) -> Parts:
    """Mean over sequences of the token sum: the policy gradient of whole responses."""
    return masked_sum(loss, mask), jnp.sum(mask / response_len)


def seq_mean_token_sum_norm(loss, mask, response_len, max_response_len: int) -> Parts:
    """Mean over sequences of token sum / max_response_len: Dr.GRPO (https://arxiv.org/abs/2503.20783)."""
    return masked_sum(loss, mask) / max_response_len, jnp.sum(mask / response_len)


AGGREGATIONS = {
    "token_mean": token_mean,
    "seq_mean_token_mean": seq_mean_token_mean,
    "seq_mean_token_sum": seq_mean_token_sum,
    "seq_mean_token_sum_norm": seq_mean_token_sum_norm,
}


def aggregate(
    loss: Float[Array, "B T"],
    mask: Float[Array, "B T"],
    response_len: Float[Array, "B T"],
    *,
    mode: str,
    max_response_len: int,
) -> Parts:
    """(sum, weight) of per-token losses; loss = Σ sums / Σ weights over all micro-batches."""
    reduce = choose(AGGREGATIONS, mode, "algorithm.aggregation")
    return reduce(loss, mask, response_len, max_response_len)


def idle_weight(response_lens: Sequence[int], *, mode: str) -> float:
    """Weight of sequences that are left out of a batch because they have no gradient: one each, or
    their tokens under token_mean. They still count in the mean."""
    choose(AGGREGATIONS, mode, "algorithm.aggregation")
    return float(sum(response_lens) if mode == "token_mean" else len(response_lens))
