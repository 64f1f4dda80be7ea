"""The router of a mixture of experts: scores, the choice of a token's experts, and their weights.

With s the scores of all E experts, b a correction and k = top_k:

    S = the k experts of largest s_e + b_e, of the token's groups
    w_e = scale s_e / Σ_S s, or scale s_e without `norm`

A token's groups are the `top_groups` with the largest sum of their two best s_e + b_e
(https://arxiv.org/abs/2412.19437, equations 12-16).
"""

import dataclasses
import functools

import jax
import jax.numpy as jnp
from flax import struct
from jax import lax
from jaxtyping import Array, Bool, Float, Int

from jaxrl import types
from jaxrl.kernels.bits import materialize, row_sum
from jaxrl.models.config import RouterConfig
from jaxrl.models.layers.norms import unit_rms

Live = Bool[Array, "B T"] | Int[Array, "B T"]
CORRECTION = "e_score_correction_bias"  # last part of the tensor's name; float32 in every file


@struct.dataclass
class RouterLoad:
    """Router statistics of the tokens that are not padding; additive over tokens.

    With a leading layer axis, also over layers.
    """

    prob: types.Array  # float32 [E], sum of each expert's probability
    count: types.Array  # float32 [E], tokens routed to each expert
    n_tokens: types.Array  # float32 []
    # With router replay (models/router_replay.py), else None
    replayed: types.Array = None  # float32 [], tokens with given experts
    changed: types.Array = None  # float32 [], those that the router would send to other experts
    experts: types.Array = None  # int32 [B, T, k], the choice itself, where it is recorded


def route(
    logits: Float[Array, "B T E"],
    correction: Float[Array, "E"] | None,
    given: Int[Array, "B T k"] | None,
    *,
    router: RouterConfig,
) -> tuple[
    Float[Array, "B T E"], Float[Array, "B T k"], Int[Array, "B T k"], Bool[Array, "B T 1"] | None
]:
    """Probabilities of all experts, weights and indices of the top k, best first, in float32.

    Probabilities are scores that sum to 1, for the load. The correction gets no gradient. Tokens
    with `given` experts, which are not negative, have these, with the weights of their scores. The
    last value says whether these are not the top k; it is None without them.
    """
    logits = materialize(logits)
    if router.score == "sigmoid":
        scores = materialize(jax.nn.sigmoid(logits))
        probs = scores / row_sum(scores)[..., None]
    else:
        # XLA on CPU computes the exponential of a difference in another way than that of an array.
        powers = jnp.exp(materialize(logits - jnp.max(logits, axis=-1, keepdims=True)))
        probs = scores = powers / row_sum(powers)[..., None]
    changed = None
    if given is not None:
        own = choose_experts(lax.stop_gradient(scores), correction, router=router)
        experts = jnp.where(given >= 0, given.astype(own.dtype), own)
        weights = jnp.take_along_axis(scores, experts, axis=-1)
        found = jnp.any(own[..., None] == experts[..., None, :], axis=-1)
        changed = ~jnp.all(found, axis=-1, keepdims=True)
    elif correction is None and router.n_groups == 1:
        weights, experts = lax.top_k(scores, router.top_k)
    else:
        experts = choose_experts(lax.stop_gradient(scores), correction, router=router)
        weights = jnp.take_along_axis(scores, experts, axis=-1)
    if router.norm:
        # Sequential sum: a reduction's order could differ between engine and trainer.
        total = functools.reduce(jnp.add, [weights[..., i] for i in range(router.top_k)])
        if router.score == "sigmoid":  # all of them may be zero
            total = total + 1e-20
        weights = weights / total[..., None]
    weights = weights if router.scale == 1 else weights * router.scale
    return probs, weights, experts, changed


def scaled_input(
    x: Float[Array, "B T D"], scale: Float[Array, "D"], eps: float
) -> Float[Array, "B T D"]:
    """scale x / rms(x) / √D: what a router with learned scales reads (Gemma 4)."""
    root = jnp.asarray(x.shape[-1] ** -0.5, x.dtype)
    return unit_rms(x, eps).astype(x.dtype) * scale * root


def choose_experts(
    scores: Float[Array, "B T E"], correction: Float[Array, "E"] | None, *, router: RouterConfig
) -> Int[Array, "B T k"]:
    """The top k of the corrected scores, in the best groups only; best first."""
    corrected = scores if correction is None else scores + lax.stop_gradient(correction)
    if router.top_groups < router.n_groups:
        groups = corrected.reshape(*corrected.shape[:-1], router.n_groups, -1)
        best, _ = lax.top_k(groups, 2)
        _, chosen = lax.top_k(best[..., 0] + best[..., 1], router.top_groups)
        kept = jnp.any(chosen[..., None] == jnp.arange(router.n_groups), axis=-2)
        corrected = jnp.where(kept[..., None], groups, -jnp.inf).reshape(corrected.shape)
    return lax.top_k(corrected, router.top_k)[1]


def router_load(
    probs: Float[Array, "B T E"], experts: Int[Array, "B T k"], live: Live
) -> RouterLoad:
    """Router statistics of one layer, summed over the live tokens, each as often as it counts."""
    E, kept = probs.shape[-1], live.astype(jnp.float32)
    chosen = jnp.sum(experts[..., None] == jnp.arange(E), axis=-2)
    return RouterLoad(
        prob=jnp.sum(probs * kept[..., None], axis=(0, 1)),
        count=jnp.sum(chosen * kept[..., None], axis=(0, 1)),
        n_tokens=jnp.sum(kept),
    )


def replay_load(
    load: RouterLoad,
    given: Int[Array, "B T k"],
    changed: Bool[Array, "B T 1"],
    live: Live,
) -> RouterLoad:
    """The load with the live tokens of given experts, and those whose own choice is another one."""
    kept = live.astype(jnp.float32) * (given[..., 0] >= 0)
    return dataclasses.replace(
        load, replayed=jnp.sum(kept), changed=jnp.sum(kept * changed[..., 0])
    )
