"""Loss of a packed micro-batch under a model: runs the model, then the objective of its targets."""

import dataclasses
import functools
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
from jaxtyping import Array, Float, Integer

from jaxrl.config.keys import RunConfig
from jaxrl.kernels.logprob import TokenScores, collision_logp, token_scores, top_k_logp
from jaxrl.kernels.logprob.divergence import of_top_k
from jaxrl.learner.parts import router_coef
from jaxrl.learner.policy_objective import (
    Coefs,
    LossSums,
    aggregate_tokens,
    token_loss_sums,
    value_sums,
    zero_sums,
)
from jaxrl.learner.requirements import full_kl_in_loss
from jaxrl.learner.router import Balance, balance_loss, check_balanced, no_load
from jaxrl.models.decoder import Decoder
from jaxrl.models.layers.router import RouterLoad
from jaxrl.models.lora import combine, split
from jaxrl.models.packed import forward_routed, pipelined_gradients
from jaxrl.models.router_replay import expert_dtype, recorded, recording
from jaxrl.types import Batch, Tree
from sharding import Rules, target_platform, unshuffle

Reference = tuple[jax.Array, jax.Array]  # hidden states and unembedding of the reference model
# (params, ref, hidden, batch, coefs, cfg=, rules=) -> (loss, LossSums): what follows the layers
MicroBatchLoss = Callable[..., tuple[jax.Array, LossSums]]

DEFAULT_CHUNK = {"cpu": 256}  # larger chunks exceed the CPU cache: updates take a third longer


@jax.named_scope("score")
def score_tokens(
    params: Decoder, batch: Batch, *, cfg: RunConfig, rules: Rules, remat: str = "none"
) -> tuple[Float[Array, "B T"], Float[Array, "B T"]]:
    """(logp, entropy) of the targets in the loss under the policy at the sampling temperature.

    Both are 0 at other tokens, for example of prompts: they skip the product with the vocabulary.
    The logprob is under the policy restricted to the supports of the batch, if it has them.
    """
    return _target_scores(params, batch, cfg=cfg, rules=rules, remat=remat)[:2]


@jax.named_scope("score")
def score_and_record(
    params: Decoder, batch: Batch, *, cfg: RunConfig, rules: Rules
) -> tuple[Float[Array, "B T"], Float[Array, "B T"], Integer[Array, "B T L k"]]:
    """`score_tokens`, and the experts of every token in each layer that has some."""
    model = recording(params)
    logp, entropy, load = _target_scores(model, batch, cfg=cfg, rules=rules, remat="none")
    return logp, entropy, recorded(load, expert_dtype(params.cfg))


@jax.named_scope("score")
def score_top_k(
    params: Decoder, batch: Batch, *, cfg: RunConfig, rules: Rules
) -> tuple[Integer[Array, "B T k"], Float[Array, "B T k"]]:
    """(ids, logprobs) of the algorithm.kl_top_k most likely tokens in place of each target."""
    hidden, _ = hidden_states(params, batch, cfg=cfg, rules=rules, remat="none")
    return _most_likely(params, hidden, batch, cfg=cfg, rules=rules)


def _most_likely(
    params: Decoder, hidden: Float[Array, "B T D"], batch: Batch, *, cfg: RunConfig, rules: Rules
) -> tuple[Integer[Array, "B T k"], Float[Array, "B T k"]]:
    return top_k_logp(
        hidden,
        params.unembed,
        cfg.algorithm.kl_top_k,
        change=params.head_change(hidden, rules),
        mask=batch.mask,
        **_head(params, cfg, rules),
    )


@jax.named_scope("score")
def score_given_ids(
    params: Decoder, batch: Batch, *, cfg: RunConfig, rules: Rules
) -> tuple[Integer[Array, "B T k"], Float[Array, "B T k"]]:
    """(ids, logprobs) of the batch's ids and, for a union, first of the most likely ones.

    Ids that are not compared become -1: those among the most likely ones, which would count twice,
    and those beyond the vocabulary of the model.
    """
    hidden, _ = hidden_states(params, batch, cfg=cfg, rules=rules, remat="none")
    known = jnp.minimum(batch.teacher.ids, params.cfg.V - 1)
    scorer = _scorer(params, hidden, batch, cfg=cfg, rules=rules)
    logp, ids = scorer(ids=known, with_entropy=False).of_ids, batch.teacher.ids
    assert logp is not None
    ids = jnp.where(ids == known, ids, -1)
    if cfg.algorithm.kl_top_k_from != "union":
        return ids, logp
    likely, of_likely = _most_likely(params, hidden, batch, cfg=cfg, rules=rules)
    repeated = jnp.any(ids[..., None] == likely[..., None, :], axis=-1)
    ids = jnp.concatenate([likely, jnp.where(repeated, -1, ids)], axis=-1)
    return ids, jnp.concatenate([of_likely, logp], axis=-1)


@jax.named_scope("score")
def score_collision(
    params: Decoder, batch: Batch, *, cfg: RunConfig, rules: Rules
) -> tuple[Float[Array, "B T"], Float[Array, "B T"]]:
    """(logp of the targets, log Σ π² over the vocabulary), as `score_tokens`."""
    hidden, _ = hidden_states(params, batch, cfg=cfg, rules=rules, remat="none")
    return collision_logp(
        hidden,
        params.unembed,
        batch.targets,
        change=params.head_change(hidden, rules),
        mask=batch.mask,
        **_head(params, cfg, rules),
    )


def _target_scores(
    params: Decoder, batch: Batch, *, cfg: RunConfig, rules: Rules, remat: str
) -> tuple[Float[Array, "B T"], Float[Array, "B T"], RouterLoad | None]:
    hidden, load = hidden_states(params, batch, cfg=cfg, rules=rules, remat=remat)
    scores = _scorer(params, hidden, batch, cfg=cfg, rules=rules)()
    restricted = batch.support is not None
    logp = scores.logp - scores.log_mass if restricted else scores.logp
    return logp, scores.entropy, load


def count_tokens(
    params: Decoder, so_far: Balance, batch: Batch, *, cfg: RunConfig, rules: Rules
) -> Balance:
    """Adds the expert load of a micro-batch to its mini-batch's, without logits or gradient.

    Raises ValueError for a model without experts.
    """
    load = hidden_states(params, batch, cfg=cfg, rules=rules, remat="none")[1]
    check_balanced(cfg, params.cfg)
    weight = aggregate_tokens(batch.mask, batch, cfg)[1]
    return jax.tree.map(jnp.add, so_far, Balance(load, weight))


@jax.named_scope("values")
def score_values(
    params: Decoder, batch: Batch, *, cfg: RunConfig, rules: Rules
) -> Float[Array, "B T ..."]:
    """A critic's value of the state before each target."""
    hidden, _ = hidden_states(params, batch, cfg=cfg, rules=rules, remat="none")
    return params.scores(hidden, rules)


def value_objective(
    params: Decoder,
    ref: Reference | None,
    hidden: Float[Array, "B T D"],
    batch: Batch,
    coefs: Coefs | None = None,
    *,
    cfg: RunConfig,
    rules: Rules,
) -> tuple[Float[Array, ""], LossSums]:
    """`value_sums` of a separate critic from its final hidden states."""
    values, batch = params.scores(hidden, rules), _without_images(batch)
    values, batch = jax.tree.map(lambda rows: unshuffle(rows, rules), (values, batch))
    return value_sums(values, batch, cfg=cfg)


def policy_objective(
    params: Decoder,
    ref: Reference | None,
    hidden: Float[Array, "B T D"],
    batch: Batch,
    coefs: Coefs | None = None,
    *,
    cfg: RunConfig,
    rules: Rules,
) -> tuple[Float[Array, ""], LossSums]:
    """`token_loss_sums` of the policy from its final hidden states.

    A shared critic adds loss_coef times the value loss. Only a KL over the vocabulary needs `ref`.
    """
    beta = cfg.algorithm.divergence_beta
    scorer = _scorer(params, hidden, batch, cfg=cfg, rules=rules)
    if (teacher := batch.teacher) is None:
        scores = scorer(ref=ref, beta=beta)
    else:
        scores = scorer(ids=teacher.ids)
        assert scores.of_ids is not None
        counted = None if cfg.algorithm.kl_top_k_from == "teacher" else teacher.ids >= 0
        compared = teacher.known * of_top_k(scores.of_ids, teacher.logp, beta, counted)
        scores = scores._replace(kl=compared, of_ids=None)
    values = params.scores(hidden, rules) if cfg.critic.shared else None
    restricted = batch.support is not None
    plain = dataclasses.replace(_without_images(batch), support=None, teacher=None)
    per_token = scores, values, plain
    scores, values, batch = jax.tree.map(lambda rows: unshuffle(rows, rules), per_token)
    loss, sums = token_loss_sums(
        scores.logp,
        scores.entropy,
        scores.kl if full_kl_in_loss(cfg) or teacher is not None else None,
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
    total = {"loss/total": jax.lax.stop_gradient(loss)}
    return loss, dataclasses.replace(sums, losses=sums.losses | total)


def _without_images(batch: Batch) -> Batch:
    """The batch without the inputs of the decoder that are not of the shape [B, T]."""
    return dataclasses.replace(batch, images=None, axis_positions=None)


def loss_sums(
    objective: MicroBatchLoss,
    params: Decoder,
    ref_params: Decoder | None,
    batch: Batch,
    balance: Balance | None = None,
    coefs: Coefs | None = None,
    *,
    cfg: RunConfig,
    rules: Rules,
) -> tuple[Float[Array, ""], LossSums]:
    """The objective of a micro-batch, plus the load-balancing loss if used.

    Only a KL over the vocabulary needs `ref_params`, which gets no gradient. `balance`, counted
    over the whole mini-batch, adds the weighted load-balancing loss.
    """
    hidden, load = hidden_states(params, batch, cfg=cfg, rules=rules, remat=cfg.learner.remat)
    batch = dataclasses.replace(batch, experts=None)  # the reference has other ones
    ref = _reference(ref_params, batch, cfg=cfg, rules=rules)
    loss, sums = objective(params, ref, hidden, batch, coefs, cfg=cfg, rules=rules)
    load = _router_load(params, load)
    aux = _aux_loss(load, balance, coefs, cfg)
    return loss + aux, _with_router(sums, load, aux)


def loss_gradients(
    objective: MicroBatchLoss,
    params: Decoder,
    ref_params: Decoder | None,
    batch: Batch,
    balance: Balance | None = None,
    coefs: Coefs | None = None,
    *,
    cfg: RunConfig,
    rules: Rules,
) -> tuple[Tree, LossSums]:
    """(gradient of the trained parameters, sums) of `loss_sums`."""
    if rules.layers is not None and cfg.learner.pipeline_schedule != "gpipe":
        return _gradients_1f1b(
            objective, params, ref_params, batch, balance, coefs, cfg=cfg, rules=rules
        )
    trained, frozen = split(params)

    def loss(trained: Tree) -> tuple[jax.Array, LossSums]:
        whole = combine(trained, frozen)
        return loss_sums(objective, whole, ref_params, batch, balance, coefs, cfg=cfg, rules=rules)

    (_, sums), grads = jax.value_and_grad(loss, has_aux=True)(trained)
    return grads, sums


def _gradients_1f1b(
    objective: MicroBatchLoss,
    params,
    ref_params,
    batch: Batch,
    balance,
    coefs,
    *,
    cfg,
    rules: Rules,
) -> tuple[Tree, LossSums]:
    """`loss_gradients` row by row. The hidden states of a reference are those of all rows."""
    inputs = _packed_inputs(batch, cfg)
    ref = _reference(ref_params, batch, cfg=cfg, rules=rules)
    batch = dataclasses.replace(batch, experts=None, images=None, axis_positions=None)
    hidden_ref, unembed_ref = ref or (None, None)

    def of_row(params: Decoder, hidden: jax.Array, row: tuple) -> tuple[jax.Array, LossSums]:
        batch, hidden_ref = row
        ref = None if hidden_ref is None else (hidden_ref, unembed_ref)
        return objective(params, ref, hidden, batch, coefs, cfg=cfg, rules=rules)

    no_tokens = no_load(params.cfg, replays=inputs["experts"] is not None)
    zero_load = _router_load(params, no_tokens)
    load_gradient = jax.tree.map(jnp.zeros_like, no_tokens)
    if zero_load is not None:
        load_gradient = jax.grad(lambda load: _aux_loss(load, balance, coefs, cfg))(zero_load)
    grads, sums, load = pipelined_gradients(
        params,
        of_row,
        rows=(batch, hidden_ref),
        zero_sums=dataclasses.replace(zero_sums(cfg.algorithm, params.cfg), router=None),
        load_gradient=load_gradient,
        **inputs,
        rules=rules,
        remat=cfg.learner.remat,
    )
    load = _router_load(params, load)
    return grads, _with_router(sums, load, _aux_loss(load, balance, coefs, cfg))


def _router_load(params: Decoder, load: RouterLoad | None) -> RouterLoad | None:
    """The load that losses and metrics know: a separate critic has none."""
    return load if "vocab" in params.cfg.heads else None


def _aux_loss(
    load: RouterLoad | None, balance: Balance | None, coefs: Coefs | None, cfg: RunConfig
) -> Float[Array, ""]:
    """The load-balancing loss of a micro-batch, linear in its load."""
    if load is None or balance is None or balance.load is None:
        return jnp.zeros((), jnp.float32)
    coef = router_coef(cfg, () if coefs is None else coefs.parts)
    return coef * balance.weight * balance_loss(load, balance.load)


def _with_router(sums: LossSums, load: RouterLoad | None, aux: Float[Array, ""]) -> LossSums:
    """The sums with the router load, and the total loss with the load-balancing loss."""
    aux, load = jax.lax.stop_gradient((aux, load))
    losses = sums.losses | {"loss/total": sums.losses["loss/total"] + aux}
    return dataclasses.replace(sums, losses=losses, router=load)


def _reference(
    ref_params: Decoder | None, batch: Batch, *, cfg: RunConfig, rules: Rules
) -> Reference | None:
    """The reference of a KL over the vocabulary, if the loss has one."""
    if not full_kl_in_loss(cfg):
        return None
    if ref_params is None:
        raise ValueError(
            f"config.algorithm.kl = {cfg.algorithm.kl!r} needs the reference model; pass ref_params"
        )
    hidden, _ = hidden_states(ref_params, batch, cfg=cfg, rules=rules, remat="none")
    return jax.lax.stop_gradient((hidden, ref_params.unembed))


def hidden_states(
    params: Decoder, batch: Batch, *, cfg: RunConfig, rules: Rules, remat: str
) -> tuple[Float[Array, "B T D"], RouterLoad | None]:
    """(final hidden states, expert load or None) of the packed rows."""
    return forward_routed(params, **_packed_inputs(batch, cfg), rules=rules, remat=remat)


def _packed_inputs(batch: Batch, cfg: RunConfig) -> dict[str, Any]:
    """Arguments of `forward_routed`."""
    return dict(
        tokens=batch.tokens,
        segments=batch.segments,
        positions=batch.positions,
        until=batch.until if cfg.shares_prefixes else None,
        copies=batch.copies,
        experts=batch.experts,
        features=batch.images,
        axis_positions=batch.axis_positions,
        implementation=None if cfg.model.attention == "auto" else cfg.model.attention,
        matmul_dtype=cfg.learner.matmul_dtype,
        mlp_chunk=cfg.learner.mlp_chunk,
        segment_align=cfg.learner.segment_align,
    )


def _scorer(params: Decoder, hidden, batch: Batch, *, cfg, rules) -> Callable[..., TokenScores]:
    """`token_scores` of the targets in the loss, those of its parts included."""
    mask = batch.mask
    if batch.parts is not None:
        mask = jnp.maximum(mask, (batch.parts > 0).astype(mask.dtype))
    return functools.partial(
        token_scores,
        hidden,
        params.unembed,
        batch.targets,
        change=params.head_change(hidden, rules),
        support=batch.support,
        mask=mask,
        **_head(params, cfg, rules),
    )


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
