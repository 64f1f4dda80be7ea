"""Parts of the objective in an update: algorithm.parts, as sums with their own denominators."""

from collections.abc import Mapping

import jax
import jax.numpy as jnp
import numpy as np
from jaxtyping import Array, Float

from jaxrl.algorithms.losses.aggregation import SumAndWeight, aggregate, apply_mask
from jaxrl.algorithms.segment import segment_sum
from jaxrl.config.keys import AlgorithmConfig, RunConfig
from jaxrl.config.parts import Part, parse_parts
from jaxrl.types import Batch, Tree


def in_part[A: (int, np.ndarray, jax.Array)](parts: A, index: int) -> A:
    """1 at the tokens of algorithm.parts[index], 0 elsewhere, from `TrainingSample.parts`."""
    return (parts >> index) & 1


def token_parts(cfg: AlgorithmConfig) -> list[tuple[int, Part]]:
    """(index, part) of the parts that are sums over tokens: all but that of the routers."""
    found = enumerate(parse_parts(cfg.parts))
    return [(i, part) for i, part in found if part.kind != "router"]


def part_sums(
    terms: Mapping[str, Float[Array, "B T"]],
    batch: Batch,
    factors: Tree,
    *,
    cfg: RunConfig,
) -> tuple[Float[Array, ""], dict[str, SumAndWeight]]:
    """(loss, means) of algorithm.parts: Σ_k c_k Σ_t l_k(t), over the tokens t of part k.

    `terms` has the l of every kind, `factors` the c. The sum over tokens is that of the part's
    aggregation. c_k = w_k W / N_k (`part_factors`) with the denominators W of the update and N_k of
    the part, both of the whole mini-batch: the loss is divided by W, so that w_k L_k / N_k remains.
    Tokens of a row must be in sequence order.
    """
    loss, means = jnp.zeros(()), {}
    for i, part in token_parts(cfg.algorithm):
        mask = in_part(batch.parts, i).astype(jnp.float32)
        lens = batch.response_len
        if not part.of_responses:
            lens = jnp.maximum(segment_sum(mask, batch.segments), 1.0)
        total, weight = aggregate(
            apply_mask(terms[part.kind], mask),
            mask,
            lens,
            mode=part.aggregation(cfg.algorithm),
            max_response_len=cfg.data.max_response_len,
        )
        loss = loss + factors[i] * total
        means[f"loss/{part.name}"] = jax.lax.stop_gradient((total, weight))
    return loss, means


def router_coef(cfg: RunConfig, factors: Tree) -> Float[Array, ""] | float:
    """The weight of the load-balancing loss: that of its part, or learner.router_aux_coef."""
    kinds = [part.kind for part in parse_parts(cfg.algorithm.parts)]
    return factors[kinds.index("router")] if "router" in kinds else cfg.learner.router_aux_coef
