"""The loss of one packed micro-batch from what the model says about its targets: the one caller of losses."""

import jax
import jax.numpy as jnp
from flax import struct
from jaxtyping import Array, Float

from jaxrl.algorithms import kl as kl_estimators
from jaxrl.algorithms.aggregation import aggregate
from jaxrl.algorithms.choose import choose
from jaxrl.algorithms.importance import geo_mean_rejection, icepop, seq_tis, token_tis
from jaxrl.algorithms.masked import masked_max, masked_mean, only
from jaxrl.algorithms.mismatch import logp_diff, rollout_kl
from jaxrl.algorithms.policy_loss import (
    cispo,
    clip_cov,
    dual_clip,
    gmpo,
    gspo,
    gspo_token,
    kl_cov,
    policy_gradient,
    ppo_clip,
    sapo,
)
from jaxrl.algorithms.value_loss import clipped, value_loss
from jaxrl.config.keys import AlgorithmConfig, RunConfig
from jaxrl.learner.requirements import kl_in_loss, ratio_source
from jaxrl.learner.router import no_load
from jaxrl.models.config import DecoderConfig
from jaxrl.models.layers.moe import RouterLoad
from jaxrl.types import Batch, Tree


@struct.dataclass
class LossSums:
    """Adds up over micro-batches. Every mean is kept as (sum, weight) until the end."""

    losses: Tree  # name -> sum by `algorithm.aggregation`, all to be divided by `weight`
    weight: Tree
    means: Tree  # name -> mean over tokens, whatever the aggregation
    maxima: Tree  # name -> largest value over tokens
    router: RouterLoad | None  # of a mixture of experts, layers first

    def __add__(self, other: "LossSums") -> "LossSums":
        return LossSums(
            jax.tree.map(jnp.add, self.losses, other.losses),
            self.weight + other.weight,
            jax.tree.map(jnp.add, self.means, other.means),
            jax.tree.map(jnp.maximum, self.maxima, other.maxima),
            jax.tree.map(jnp.add, self.router, other.router),
        )


LOSSES = ("loss/total", "loss/policy")
MEANS = (
    "loss/entropy",
    "loss/clip_fraction",
    "loss/approx_kl",
    "mismatch/logp_diff_mean",
    "mismatch/kl",
)
CORRECTION_MEANS = (
    "mismatch/weight_mean",
    "mismatch/truncated_fraction",
    "mismatch/rejected_fraction",
)
MAXIMA = ("loss/ratio_max", "mismatch/logp_diff_max")
VALUE_LOSSES = ("loss/total", "critic/loss")
VALUE_MEANS = ("critic/value_mean", "critic/clip_fraction")


@struct.dataclass
class Coefs:
    """The weights of KL and entropy in the loss, where they change from step to step."""

    kl: Tree  # float32 []
    entropy: Tree  # float32 []


def zero_sums(cfg: AlgorithmConfig, model: DecoderConfig) -> LossSums:
    """The sums of no micro-batch: of a policy, with or without values, or of a critic alone."""
    zero = jnp.zeros((), jnp.float32)
    losses, means, maxima = (), (), ()
    if "vocab" in model.heads:
        losses, maxima = LOSSES, MAXIMA
        means = MEANS + (CORRECTION_MEANS if cfg.has_correction else ())
        means += ("loss/kl",) if kl_in_loss(cfg) else ()
    if "score" in model.heads:
        losses, means = (*losses, *VALUE_LOSSES), (*means, *VALUE_MEANS)
    return LossSums(
        losses=dict.fromkeys(losses, zero),
        weight=zero,
        means=dict.fromkeys(means, (zero, zero)),
        maxima=dict.fromkeys(maxima, zero - jnp.inf),
        router=no_load(model) if "vocab" in model.heads else None,
    )


def token_loss_sums(
    logp: Float[Array, "B T"],
    entropy: Float[Array, "B T"],
    exact_kl: Float[Array, "B T"] | None,
    batch: Batch,
    coefs: Coefs | None = None,
    *,
    cfg: RunConfig,
) -> tuple[Float[Array, ""], LossSums]:
    """L = policy loss + kl_coef KL(policy | reference) - entropy_coef entropy, summed over tokens as
    `algorithm.aggregation` says; the caller divides by the weight of the whole mini-batch.

    Without `coefs` the two weights are those of the config. Rows are in their own order.
    """
    algo, mask = cfg.algorithm, batch.mask
    coefs = Coefs(algo.kl_coef, algo.entropy_coef) if coefs is None else coefs
    # Masked tokens drop out here once, so that nothing that stands there can overflow below.
    logp, entropy = only(logp, mask), only(entropy, mask)
    rollout_logp, advantages = only(batch.rollout_logp, mask), only(batch.advantages, mask)
    old_logp = {
        "policy": jax.lax.stop_gradient(logp),
        "rollout": rollout_logp,
        "recompute": only(batch.old_logp, mask),
    }[ratio_source(cfg)]
    policy = policy_loss(logp, old_logp, advantages, batch, algo)
    more = {}
    if algo.has_correction:
        weights = jax.lax.stop_gradient(token_weights(old_logp - rollout_logp, batch, algo))
        policy = policy * weights
        more = {
            "mismatch/weight_mean": masked_mean(weights, mask),
            "mismatch/truncated_fraction": masked_mean(
                1.0 * (weights == algo.correction_high), mask
            ),
            "mismatch/rejected_fraction": masked_mean(1.0 * (weights == 0.0), mask),
        }
    loss = policy
    if kl_in_loss(algo):
        kl = reference_kl(algo.kl, logp, exact_kl, batch)
        loss = loss + coefs.kl * kl
        more["loss/kl"] = masked_mean(kl, mask)
    if algo.has_entropy:
        loss = loss - coefs.entropy * entropy

    loss_sum, weight = aggregate_tokens(loss, batch, cfg)
    losses = {"loss/total": loss_sum, "loss/policy": aggregate_tokens(policy, batch, cfg)[0]}
    gap = logp_diff(logp, rollout_logp)
    means = {
        "loss/entropy": masked_mean(entropy, mask),
        "loss/clip_fraction": masked_mean(cut_off(logp, old_logp, advantages, batch, algo), mask),
        "loss/approx_kl": masked_mean(kl_estimators.k3(old_logp, logp), mask),
        "mismatch/logp_diff_mean": masked_mean(gap, mask),
        "mismatch/kl": masked_mean(rollout_kl(logp, rollout_logp), mask),
        **more,
    }
    maxima = {
        "loss/ratio_max": masked_max(jnp.exp(logp - old_logp), mask),
        "mismatch/logp_diff_max": masked_max(gap, mask),
    }
    return loss_sum, jax.lax.stop_gradient(LossSums(losses, weight, means, maxima, None))


def value_sums(
    values: Float[Array, "B T"], batch: Batch, *, cfg: RunConfig
) -> tuple[Float[Array, ""], LossSums]:
    """The value loss, summed as `algorithm.aggregation` says. Rows are in their own order."""
    mask = batch.mask
    values, old, returns = (only(x, mask) for x in (values, batch.values, batch.returns))
    clip = cfg.critic.value_clip
    loss, weight = aggregate_tokens(value_loss(values, old, returns, clip=clip), batch, cfg)
    means = {
        "critic/value_mean": masked_mean(values, mask),
        "critic/clip_fraction": masked_mean(clipped(values, old, returns, clip=clip), mask),
    }
    sums = LossSums(dict.fromkeys(VALUE_LOSSES, loss), weight, means, maxima={}, router=None)
    return loss, jax.lax.stop_gradient(sums)


def policy_loss(
    logp: Float[Array, "B T"],
    old_logp: Float[Array, "B T"],
    advantages: Float[Array, "B T"],
    batch: Batch,
    cfg: AlgorithmConfig,
) -> Float[Array, "B T"]:
    """The configured policy loss of every token."""
    ratio = logp, old_logp, advantages
    response = batch.mask, batch.segments
    selected = batch.selected > 0
    clip = dict(clip_low=cfg.clip_low, clip_high=cfg.clip_high)
    tau = dict(tau_positive=cfg.sapo_tau_positive, tau_negative=cfg.sapo_tau_negative)
    known = {
        "ppo_clip": lambda: ppo_clip(*ratio, **clip),
        "dual_clip": lambda: dual_clip(*ratio, **clip, clip_dual=cfg.clip_dual),
        "policy_gradient": lambda: policy_gradient(logp, advantages),
        "gspo": lambda: gspo(*ratio, *response, **clip),
        "gspo_token": lambda: gspo_token(*ratio, *response, **clip),
        "cispo": lambda: cispo(*ratio, **clip),
        "gmpo": lambda: gmpo(*ratio, *response, **clip),
        "sapo": lambda: sapo(*ratio, **tau),
        "clip_cov": lambda: clip_cov(*ratio, selected, **clip),
        "kl_cov": lambda: kl_cov(*ratio, selected, kl_cov_coef=cfg.kl_cov_coef),
    }
    return choose(known, cfg.policy_loss, "algorithm.policy_loss")()


def cut_off(logp, old_logp, advantages, batch: Batch, cfg: AlgorithmConfig) -> Float[Array, "B T"]:
    """1 at tokens with an advantage that the policy loss gives no gradient: those it clips."""

    def total(logp):
        return jnp.sum(only(policy_loss(logp, old_logp, advantages, batch, cfg), batch.mask))

    gradient = jax.grad(total)(jax.lax.stop_gradient(logp))
    return ((gradient == 0) & (advantages != 0)).astype(jnp.float32)


def token_weights(
    log_ratio: Float[Array, "B T"], batch: Batch, cfg: AlgorithmConfig
) -> Float[Array, "B T"]:
    """The configured importance weight of every token; log_ratio = old_logp - rollout_logp."""
    response, high = (batch.mask, batch.segments), cfg.correction_high
    bounds = dict(low=cfg.rejection_low, high=cfg.rejection_high)
    one = jnp.ones_like(log_ratio)
    corrections = {
        "none": lambda: one,
        "token_tis": lambda: token_tis(log_ratio, high=high),
        "seq_tis": lambda: seq_tis(log_ratio, *response, high=high),
        "icepop": lambda: icepop(log_ratio, low=cfg.correction_low, high=high),
    }
    rejections = {
        "none": lambda: one,
        "geo_mean": lambda: geo_mean_rejection(log_ratio, *response, **bounds),
    }
    weights = choose(corrections, cfg.correction, "algorithm.correction")()
    return weights * choose(rejections, cfg.rejection, "algorithm.rejection")()


def reference_kl(
    name: str,
    logp: Float[Array, "B T"],
    exact_kl: Float[Array, "B T"] | None,
    batch: Batch,
) -> Float[Array, "B T"]:
    """The configured KL(policy | reference) of every token."""
    ref_logp = only(batch.ref_logp, batch.mask)
    if exact_kl is None:
        return choose(kl_estimators.ESTIMATORS, name, "algorithm.kl")(logp, ref_logp)
    exact_kl = only(exact_kl, batch.mask)
    if name == "full":
        return exact_kl
    return kl_estimators.straight_through(exact_kl, kl_estimators.k2(logp, ref_logp))


def aggregate_tokens(per_token: Float[Array, "B T"], batch: Batch, cfg: RunConfig):
    """(sum, weight) of a token loss as `algorithm.aggregation` says."""
    return aggregate(
        per_token,
        batch.mask,
        batch.response_len,
        mode=cfg.algorithm.aggregation,
        max_response_len=cfg.data.max_response_len,
    )
