"""From a model and a packed micro-batch to the loss: the one bridge from models to algorithms."""

import dataclasses

import jax
import jax.numpy as jnp
from jaxtyping import Array, Float

from jaxrl.config import RunConfig
from jaxrl.kernels.logprob import logprob_entropy, logprob_entropy_kl
from jaxrl.learner.needs import full_kl_in_loss
from jaxrl.learner.router import Balance, balance_loss
from jaxrl.learner.token_loss import Coefs, LossSums, aggregate_tokens, token_loss_sums
from jaxrl.models.decoder import Decoder, forward_routed
from jaxrl.models.moe import RouterLoad
from jaxrl.types import Batch
from sharding import Rules, target_platform, unshuffle

DEFAULT_CHUNK = {"cpu": 256}  # larger ones leave the cache: a third more time for an update


def score_tokens(
    params: Decoder, batch: Batch, *, cfg: RunConfig, rules: Rules, remat: str = "none"
) -> tuple[Float[Array, "B T"], Float[Array, "B T"]]:
    """(logp, entropy) of the targets under the policy at the temperature that sampled them."""
    return _score(params, batch, cfg=cfg, rules=rules, remat=remat)[:2]


def count_tokens(
    params: Decoder, so_far: Balance, batch: Batch, *, cfg: RunConfig, rules: Rules
) -> Balance:
    """Adds a micro-batch to the balance of its mini-batch. No logits, no gradient.

    Raises ValueError for a model without experts.
    """
    load = hidden_states(params, batch, cfg=cfg, rules=rules, remat="none")[1]
    if load is None:
        raise ValueError(
            f"config.learner.router_aux_coef = {cfg.learner.router_aux_coef} balances experts, but this "
            f"{params.cfg.family} model has none; set it to 0"
        )
    weight = aggregate_tokens(batch.mask, batch, cfg)[1]
    return jax.tree.map(jnp.add, so_far, Balance(load, weight))


def _score(params: Decoder, batch: Batch, *, cfg: RunConfig, rules: Rules, remat: str):
    """(logp, entropy, router load or None)."""
    hidden, load = hidden_states(params, batch, cfg=cfg, rules=rules, remat=remat)
    logp, entropy = logprob_entropy(
        hidden, params.unembed, batch.targets, **_head(params, cfg, rules)
    )
    return logp, entropy, load


def policy_loss_sums(
    params: Decoder,
    ref_params: Decoder | None,
    batch: Batch,
    balance: Balance | None = None,
    coefs: Coefs | None = None,
    *,
    cfg: RunConfig,
    rules: Rules,
) -> tuple[Float[Array, ""], LossSums]:
    """`token_loss_sums` of what the model says about the targets.

    `ref_params` is needed for a KL over the vocabulary alone and gets no gradient. `balance`, of the whole
    mini-batch, adds router_aux_coef times the load-balancing loss.
    """
    *scores, load = _forward(params, ref_params, batch, cfg=cfg, rules=rules)
    (logp, entropy, exact_kl), batch = jax.tree.map(
        lambda rows: unshuffle(rows, rules), (scores, batch)
    )
    loss, sums = token_loss_sums(logp, entropy, exact_kl, batch, coefs, cfg=cfg)
    if load is not None and balance is not None and balance.load is not None:
        aux = balance_loss(load, balance.load)
        loss = loss + cfg.learner.router_aux_coef * balance.weight * aux
    losses = sums.losses | {"loss/total": jax.lax.stop_gradient(loss)}
    load = jax.lax.stop_gradient(load)
    return loss, dataclasses.replace(sums, losses=losses, router=load)


def hidden_states(
    params: Decoder, batch: Batch, *, cfg: RunConfig, rules: Rules, remat: str
) -> tuple[Float[Array, "B T D"], RouterLoad | None]:
    implementation = None if cfg.model.attention == "auto" else cfg.model.attention
    return forward_routed(
        params,
        batch.tokens,
        batch.segments,
        batch.positions,
        rules=rules,
        remat=remat,
        implementation=implementation,
    )


def _forward(params: Decoder, ref_params: Decoder | None, batch: Batch, *, cfg, rules):
    """(logp, entropy, exact KL or None), each [B, T], and the router load or None."""
    remat = cfg.learner.remat
    if not full_kl_in_loss(cfg):
        logp, entropy, load = _score(params, batch, cfg=cfg, rules=rules, remat=remat)
        return logp, entropy, None, load
    if ref_params is None:
        raise ValueError(
            f"config.algorithm.kl = {cfg.algorithm.kl!r} needs the reference model; pass ref_params"
        )
    hidden, load = hidden_states(params, batch, cfg=cfg, rules=rules, remat=remat)
    ref_hidden, _ = hidden_states(ref_params, batch, cfg=cfg, rules=rules, remat="none")
    logp, entropy, exact_kl = logprob_entropy_kl(
        hidden,
        params.unembed,
        jax.lax.stop_gradient(ref_hidden),
        ref_params.unembed,
        batch.targets,
        **_head(params, cfg, rules),
    )
    return logp, entropy, exact_kl, load


def logprob_chunk(cfg: RunConfig) -> int:
    """Tokens whose logits exist at one time."""
    return cfg.learner.logprob_chunk or DEFAULT_CHUNK.get(target_platform(), 1024)


def _head(params: Decoder, cfg: RunConfig, rules: Rules) -> dict:
    return dict(
        temperature=cfg.rollout.sampling.temperature,
        logit_softcap=params.cfg.logit_softcap,
        chunk=logprob_chunk(cfg),
        rules=rules,
    )
