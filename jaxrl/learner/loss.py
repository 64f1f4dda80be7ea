"""Loss of a packed micro-batch under a model: runs the model, then the objective of its targets."""

import dataclasses
import functools

import jax
import jax.numpy as jnp
from jaxtyping import Array, Float

from jaxrl.config.keys import RunConfig
from jaxrl.kernels.logprob import TokenScores, token_scores
from jaxrl.learner.policy_objective import (
    Coefs,
    LossSums,
    aggregate_tokens,
    token_loss_sums,
    value_sums,
)
from jaxrl.learner.prefixes import shares_prefixes
from jaxrl.learner.requirements import full_kl_in_loss
from jaxrl.learner.router import Balance, balance_loss
from jaxrl.models.decoder import Decoder
from jaxrl.models.layers.moe import RouterLoad
from jaxrl.models.packed import forward_routed
from jaxrl.types import Batch
from sharding import Rules, target_platform, unshuffle

DEFAULT_CHUNK = {"cpu": 256}  # larger chunks exceed the CPU cache: updates take a third longer


@jax.named_scope("score")
def score_tokens(
    params: Decoder, batch: Batch, *, cfg: RunConfig, rules: Rules, remat: str = "none"
) -> tuple[Float[Array, "B T"], Float[Array, "B T"]]:
    """(logp, entropy) of the targets in the loss under the policy at the sampling temperature.

    Both are 0 at other tokens, for example of prompts: they skip the product with the vocabulary.
    The logprob is that of the policy restricted to the supports of the batch, if it has them.
    """
    hidden, _ = hidden_states(params, batch, cfg=cfg, rules=rules, remat=remat)
    head = _head(params, cfg, rules)
    scores = token_scores(
        hidden, params.unembed, batch.targets, support=batch.support, mask=batch.mask, **head
    )
    restricted = batch.support is not None
    return scores.logp - scores.log_mass if restricted else scores.logp, scores.entropy


def count_tokens(
    params: Decoder, so_far: Balance, batch: Batch, *, cfg: RunConfig, rules: Rules
) -> Balance:
    """Adds the expert load of a micro-batch to that of its mini-batch, without logits or gradient.

    Raises ValueError for a model without experts.
    """
    load = hidden_states(params, batch, cfg=cfg, rules=rules, remat="none")[1]
    if load is None:
        raise ValueError(
            f"config.learner.router_aux_coef = {cfg.learner.router_aux_coef} balances experts, but "
            f"this {params.cfg.family} model has none; set it to 0"
        )
    weight = aggregate_tokens(batch.mask, batch, cfg)[1]
    return jax.tree.map(jnp.add, so_far, Balance(load, weight))


@jax.named_scope("values")
def score_values(
    params: Decoder, batch: Batch, *, cfg: RunConfig, rules: Rules
) -> Float[Array, "B T"]:
    """A critic's value of the state before each target."""
    hidden, _ = hidden_states(params, batch, cfg=cfg, rules=rules, remat="none")
    return params.scores(hidden, rules)


def value_loss_sums(
    params: Decoder, batch: Batch, *, cfg: RunConfig, rules: Rules
) -> tuple[Float[Array, ""], LossSums]:
    """`value_sums` of a separate critic."""
    hidden, _ = hidden_states(params, batch, cfg=cfg, rules=rules, remat=cfg.learner.remat)
    values = params.scores(hidden, rules)
    values, batch = jax.tree.map(lambda rows: unshuffle(rows, rules), (values, batch))
    return value_sums(values, batch, cfg=cfg)


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
    """`token_loss_sums` of the policy, plus value and load-balancing losses if used.

    Only a KL over the vocabulary needs `ref_params`, which gets no gradient. `balance`, counted
    over the whole mini-batch, adds router_aux_coef times the load-balancing loss. A shared critic
    adds loss_coef times the value loss.
    """
    hidden, load = hidden_states(params, batch, cfg=cfg, rules=rules, remat=cfg.learner.remat)
    scores = _score_targets(params, ref_params, hidden, batch, cfg=cfg, rules=rules)
    values = params.scores(hidden, rules) if cfg.critic.shared else None
    restricted = batch.support is not None
    per_token = scores, values, dataclasses.replace(batch, support=None)
    scores, values, batch = jax.tree.map(lambda rows: unshuffle(rows, rules), per_token)
    loss, sums = token_loss_sums(
        scores.logp,
        scores.entropy,
        scores.kl if full_kl_in_loss(cfg) else None,
        batch,
        coefs,
        cfg=cfg,
        log_mass=scores.log_mass if restricted else None,
    )
    if values is not None:
        value, extra = value_sums(values, batch, cfg=cfg)
        loss = loss + cfg.critic.loss_coef * value
        sums = dataclasses.replace(
            sums, losses=extra.losses | sums.losses, means=sums.means | extra.means
        )
    if load is not None and balance is not None and balance.load is not None:
        aux = balance_loss(load, balance.load)
        loss = loss + cfg.learner.router_aux_coef * balance.weight * aux
    losses = sums.losses | {"loss/total": jax.lax.stop_gradient(loss)}
    load = jax.lax.stop_gradient(load)
    return loss, dataclasses.replace(sums, losses=losses, router=load)


def hidden_states(
    params: Decoder, batch: Batch, *, cfg: RunConfig, rules: Rules, remat: str
) -> tuple[Float[Array, "B T D"], RouterLoad | None]:
    """(final hidden states, expert load or None) of the packed rows."""
    implementation = None if cfg.model.attention == "auto" else cfg.model.attention
    return forward_routed(
        params,
        batch.tokens,
        batch.segments,
        batch.positions,
        until=batch.until if shares_prefixes(cfg) else None,
        copies=batch.copies,
        rules=rules,
        remat=remat,
        implementation=implementation,
        matmul_dtype=cfg.learner.matmul_dtype,
    )


def _score_targets(
    params: Decoder, ref_params: Decoder | None, hidden, batch: Batch, *, cfg, rules
) -> TokenScores:
    """The scores of the targets, with the exact KL if the loss has it."""
    score = functools.partial(
        token_scores,
        hidden,
        params.unembed,
        batch.targets,
        support=batch.support,
        mask=batch.mask,
        **_head(params, cfg, rules),
    )
    if not full_kl_in_loss(cfg):
        return score()
    if ref_params is None:
        raise ValueError(
            f"config.algorithm.kl = {cfg.algorithm.kl!r} needs the reference model; pass ref_params"
        )
    ref_hidden, _ = hidden_states(ref_params, batch, cfg=cfg, rules=rules, remat="none")
    return score(ref=(ref_hidden, ref_params.unembed))


def logprob_chunk(cfg: RunConfig) -> int:
    """Number of tokens whose logits are in memory at one time."""
    return cfg.learner.logprob_chunk or DEFAULT_CHUNK.get(target_platform(), 1024)


def _head(params: Decoder, cfg: RunConfig, rules: Rules) -> dict:
    return dict(
        temperature=cfg.rollout.sampling.temperature,
        logit_softcap=params.cfg.logit_softcap,
        chunk=logprob_chunk(cfg),
        rules=rules,
    )
