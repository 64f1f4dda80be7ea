"""Load-balancing loss and load metrics of the routers of a mixture of experts.

L = E Σ_e f_e P_e (https://arxiv.org/abs/2101.03961, equations 4-6, as transformers computes it):
f_e is the number of tokens routed to expert e over the number of tokens, P_e the mean router
probability of e, both over the tokens of all layers of the mini-batch. Perfect balance gives k, the
experts per token.

f_e has no gradient. With f_e known, L is a sum over tokens, so it does not depend on the split of
the mini-batch into micro-batches; a forward pass over all of them counts f_e before the first
gradient.

A router with a correction can be balanced without a loss as well: an optimizer step moves the bias
of every expert by a fixed rate, against the error of its load
(https://arxiv.org/abs/2408.15664, algorithm 1).
"""

import dataclasses
import functools
import re

import jax
import jax.numpy as jnp
import numpy as np
from flax import struct
from jaxtyping import Array, Float

from jaxrl import types
from jaxrl.config.keys import RunConfig
from jaxrl.learner.requirements import balances_experts
from jaxrl.models.config import DecoderConfig, MoEConfig
from jaxrl.models.decoder import decoder_specs
from jaxrl.models.layers.router import CORRECTION, RouterLoad
from jaxrl.models.spec import hf_names, is_spec


@struct.dataclass
class Balance:
    """Expert load of a whole mini-batch, counted before its first gradient."""

    load: RouterLoad | None  # per layer with experts
    weight: types.Array  # float32 [], the divisor of the summed loss


def no_load(model: DecoderConfig, *, replays: bool = False) -> RouterLoad | None:
    """Zero load, also of replayed tokens with `replays`; None for a dense model."""
    experts = model.expert_layers
    if not experts:
        return None
    zeros = jnp.zeros((len(experts), experts[0].E), jnp.float32)
    load = RouterLoad(prob=zeros, count=zeros, n_tokens=zeros[:, 0])
    return dataclasses.replace(load, replayed=zeros[:, 0], changed=zeros[:, 0]) if replays else load


def balance_loss(load: RouterLoad, total: RouterLoad) -> Float[Array, ""]:
    """Contribution of the tokens of `load` to L over the tokens of `total`, which include them.

    Only `load` has a gradient, through the probabilities.
    """
    n = jnp.maximum(jnp.sum(total.n_tokens), 1.0)
    chosen = jnp.sum(total.count, axis=0) / n
    return total.count.shape[-1] * jnp.sum(chosen * jnp.sum(load.prob, axis=0)) / n


def router_metrics(load: RouterLoad | None) -> dict[str, Float[Array, ""]]:
    """L, and the maximum and minimum load of an expert in any layer, relative to the mean load.

    With router replay, also the fraction of replayed tokens that the router would send to other
    experts, over all layers.
    """
    if load is None:
        return {}
    changed = {}
    if load.replayed is not None:
        n = jnp.maximum(jnp.sum(load.replayed), 1.0)
        changed["router/changed_fraction"] = jnp.sum(load.changed) / n
    mean = jnp.maximum(jnp.mean(load.count, axis=-1, keepdims=True), 1e-9)
    return {
        "router/balance_loss": balance_loss(load, load),
        "router/load_max": jnp.max(load.count / mean),
        "router/load_min": jnp.min(load.count / mean),
        **changed,
    }


def check_balanced(cfg: RunConfig, model: DecoderConfig) -> None:
    """Raises ValueError for a load-balancing loss of a model without experts."""
    if model.expert_layers or not balances_experts(cfg):
        return
    coef = cfg.learner.router_aux_coef
    named = (
        f"config.learner.router_aux_coef = {coef}"
        if coef
        else f"config.algorithm.parts = {cfg.algorithm.parts}"
    )
    raise ValueError(
        f"{named} balances experts, but this {model.family} model has none; leave it out"
    )


def check_correction(rate: float, model: DecoderConfig) -> None:
    """Raises ValueError if the corrections of a model cannot be updated with this rate."""
    if not rate:
        return
    if not any(ffn.router.correction for ffn in model.expert_layers):
        raise ValueError(
            f"config.learner.router_bias_rate = {rate} changes the correction biases of routers, "
            f"but this {model.family} model has none; set it to 0"
        )
    if model.lora is not None:
        raise ValueError(
            f"config.learner.router_bias_rate = {rate} changes the base model, which adapters "
            "leave as it is; set it to 0, or config.lora.rank to 0"
        )


@functools.cache
def correction_places(model: DecoderConfig) -> dict[int, np.ndarray]:
    """The corrections' places among the leaves of a model -> their rows of its router load."""
    of_experts = [i for i, layer in enumerate(model.layers) if isinstance(layer.ffn, MoEConfig)]
    found = {}
    for place, spec in enumerate(jax.tree.leaves(decoder_specs(model), is_leaf=is_spec)):
        if spec.hf.endswith(CORRECTION):
            layers = [int(re.findall(r"\d+", name)[0]) for name in hf_names(spec)]
            rows = np.array([of_experts.index(layer) for layer in layers])
            found[place] = rows.reshape(spec.stacked_shape)
    return found


def moved_corrections(
    corrections: list[Float[Array, "*L E"]],
    load: RouterLoad,
    rows: list[np.ndarray],
    *,
    rate: float,
) -> list[Float[Array, "*L E"]]:
    """The corrections after an optimizer step: b + rate sign(mean count - count).

    `rows` are those of `correction_places`. Counts are compared as integers, so the signs do not
    depend on the order of a sum.
    """
    count = jax.reshard(load.count, jax.P()).astype(jnp.int32)
    mean, rest = jnp.divmod(jnp.sum(count, axis=-1, keepdims=True), count.shape[-1])
    below = (count < mean) | ((count == mean) & (rest > 0))
    sign = below.astype(jnp.float32) - (count > mean).astype(jnp.float32)
    return [
        b + rate * jax.reshard(sign[row], jax.typeof(b).sharding.spec)
        for b, row in zip(corrections, rows, strict=True)
    ]
