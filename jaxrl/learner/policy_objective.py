"""Objective of one packed micro-batch from the logprobs and values of its targets."""

import dataclasses
import functools
import operator

import jax
import jax.numpy as jnp
from flax import struct
from jaxtyping import Array, Float

from jaxrl.algorithms.kl import KL_ESTIMATORS, k3
from jaxrl.algorithms.losses.aggregation import (
    SumAndWeight,
    aggregate,
    apply_mask,
    masked_max,
    masked_mean,
)
from jaxrl.algorithms.losses.importance import (
    CORRECTIONS,
    logp_diff,
    rollout_kl,
    seq_tis,
    token_tis,
)
from jaxrl.algorithms.losses.policy_loss import POLICY_LOSSES
from jaxrl.algorithms.losses.rejection import REJECTIONS, off_policy_sequences
from jaxrl.algorithms.losses.value_loss import clipped, value_loss
from jaxrl.algorithms.segment import segment_sum
from jaxrl.algorithms.table import apply, lookup
from jaxrl.config.choices import GIVEN_PARTS, KL_PARTS
from jaxrl.config.keys import AlgorithmConfig, RunConfig
from jaxrl.config.parts import names_kl
from jaxrl.config.rejections import rejections
from jaxrl.learner.parts import part_sums, token_parts
from jaxrl.learner.requirements import kl_in_loss, needs_every_response, ratio_source
from jaxrl.learner.router import no_load
from jaxrl.models.config import DecoderConfig
from jaxrl.models.layers.router import RouterLoad
from jaxrl.types import Batch, Tree


@struct.dataclass
class LossSums:
    """Losses and metrics of any number of micro-batches. Means are (sum, weight) until the end."""

    losses: Tree  # name -> sum by `algorithm.aggregation`, to be divided by `weight`
    weight: Tree
    means: Tree  # name -> (sum, count) over tokens, independent of the aggregation
    maxima: Tree  # name -> maximum over tokens
    router: RouterLoad | None  # load of the experts, layers first; None for a dense model

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
    "loss/clamped_fraction",
    "loss/approx_kl",
    "mismatch/logp_diff_mean",
    "mismatch/kl",
)
CORRECTION_MEANS = (
    "mismatch/weight_mean",
    "mismatch/truncated_fraction",
    "mismatch/rejected_fraction",
)
KL_MEANS = ("loss/kl", "loss/kl_clamped_fraction")
MAXIMA = ("loss/ratio_max", "mismatch/logp_diff_max")
# Compare the engine with the policy at the start of the step (`start_logp`).
START_METRICS = ("mismatch/logp_diff_mean", "mismatch/kl", "mismatch/logp_diff_max")
VALUE_LOSSES = ("loss/total", "critic/loss")
VALUE_MEANS = ("critic/value_mean", "critic/clip_fraction")


@struct.dataclass
class Coefs:
    """Coefficients in the loss, if they change from update to update."""

    kl: Tree  # float32 []
    entropy: Tree  # float32 []
    mean_weight: Tree = 1.0  # float32 [], of the importance weights, which are divided by it
    parts: Tree = ()  # float32 [] for each of algorithm.parts: factor of its sum in the loss


def zero_sums(cfg: AlgorithmConfig, model: DecoderConfig, *, replays: bool = False) -> LossSums:
    """Sums over no micro-batches, with the metric names of the model's heads.

    A "vocab" head has the policy's metrics, a "score" head the critic's. `replays` as in `no_load`.
    """
    zero = jnp.zeros((), jnp.float32)
    losses, means, maxima = (), (), ()
    if "vocab" in model.heads:
        losses, maxima = LOSSES, MAXIMA
        means = MEANS + (CORRECTION_MEANS if cfg.has_correction else ())
        means += KL_MEANS if kl_in_loss(cfg) else ()
        if cfg.parts:
            means += tuple(f"loss/{part.name}" for _, part in token_parts(cfg))
    if "score" in model.heads:
        losses, means = (*losses, *VALUE_LOSSES), (*means, *VALUE_MEANS)
    return LossSums(
        losses=dict.fromkeys(losses, zero),
        weight=zero,
        means=dict.fromkeys(means, (zero, zero)),
        maxima=dict.fromkeys(maxima, zero - jnp.inf),
        router=no_load(model, replays=replays) if "vocab" in model.heads else None,
    )


def token_loss_sums(
    logp: Float[Array, "B T"],
    entropy: Float[Array, "B T"],
    exact_kl: Float[Array, "B T"] | None,
    batch: Batch,
    coefs: Coefs | None = None,
    *,
    cfg: RunConfig,
    log_mass: Float[Array, "B T"] | None = None,
) -> tuple[Float[Array, ""], LossSums]:
    """L = policy loss + kl_coef KL(policy | reference) - entropy_coef entropy, and its metrics.

    L is summed over tokens by `algorithm.aggregation`; the caller divides it by the weight of the
    whole mini-batch. Terms that algorithm.parts names are not in this sum: `part_sums` adds them,
    and the cross-entropy on given tokens. Without `coefs` the two coefficients are the config's.
    Tokens of a row must be in sequence order. With `log_mass` = log Σ π over the support of the
    sampling distribution, ratios and corrections are of the policy restricted to it: log π -
    log_mass. The KL and the entropy are of π itself.
    """
    algo, mask, measured = cfg.algorithm, batch.mask, measured_tokens(batch, cfg)
    coefs = Coefs(algo.kl_coef, algo.entropy_coef) if coefs is None else coefs
    nll = -logp  # at tokens of further parts, too
    # Masked once here, so that no value at a masked token can overflow below.
    logp, entropy = apply_mask(logp, mask), apply_mask(entropy, mask)
    behavior_logp = apply_mask(batch.behavior_logp, mask)
    ratio_logp = logp if log_mass is None else logp - apply_mask(log_mass, mask)
    inputs = policy_loss_inputs(ratio_logp, behavior_logp, batch, cfg)
    sampled_logp = batch.rollout_logp if log_mass is None else behavior_logp
    means, maxima = mismatch_metrics(start_logp(ratio_logp, batch, cfg), sampled_logp, measured)
    weights = jnp.ones_like(logp)
    if algo.has_correction:
        correction, accepted = importance_weights(inputs, algo), accepted_tokens(inputs, algo)
        weights = correction / coefs.mean_weight * accepted * on_policy_tokens(inputs, algo)
        means |= weight_means(correction, weights, measured, algo)
        if algo.removes_rejected:
            batch, measured = without_rejected(batch, accepted), measured * accepted
            inputs["mask"] = batch.mask
    if algo.top_entropy < 1.0:
        weights = weights * batch.selected
    policy, named = policy_loss(inputs, algo) * weights, algo.part_kinds
    loss = jnp.zeros_like(policy) if "policy" in named else policy
    terms = {"policy": policy, "entropy": entropy} | dict.fromkeys(GIVEN_PARTS, nll)
    if kl_in_loss(algo):
        kl = reference_kl(logp, inputs, exact_kl, batch, algo)
        clamped = clamp(kl, algo.kl_clamp)
        term = clamped * kl_weights(inputs, algo) if algo.kl_ratio_max else clamped
        terms |= dict.fromkeys(KL_PARTS, term)
        loss = loss if names_kl(algo) else loss + coefs.kl * term
        means["loss/kl"] = masked_mean(clamped, measured)
        means["loss/kl_clamped_fraction"] = masked_mean(outside(kl, algo.kl_clamp), measured)
    if algo.has_entropy and "entropy" not in named:
        loss = loss - coefs.entropy * entropy

    loss_sum, weight = aggregate_tokens(loss, batch, cfg)
    losses = {"loss/policy": aggregate_tokens(policy, batch, cfg)[0]}
    means["loss/entropy"] = masked_mean(entropy, measured)
    ratio_means, ratio_maxima = ratio_metrics(inputs, measured, algo)
    means |= ratio_means
    if batch.parts is not None:
        of_parts, part_means = part_sums(terms, batch, coefs.parts, cfg=cfg)
        loss_sum, means = loss_sum + of_parts, means | part_means
    losses["loss/total"] = loss_sum
    sums = LossSums(losses, weight, means, maxima | ratio_maxima, None)
    return loss_sum, jax.lax.stop_gradient(sums)


def measured_tokens(batch: Batch, cfg: RunConfig) -> Float[Array, "B T"]:
    """1 at the tokens that metrics are averaged over: those of responses with a gradient.

    So the metrics do not depend on `algorithm.drop_flat_groups`, which leaves the others out.
    """
    if needs_every_response(cfg) or cfg.algorithm.drop_flat_groups:
        return batch.mask
    has_advantage = apply_mask((batch.advantages != 0).astype(jnp.float32), batch.mask)
    return batch.mask * (segment_sum(has_advantage, batch.segments) > 0)


def policy_loss_inputs(
    logp: Float[Array, "B T"], behavior_logp: Float[Array, "B T"], batch: Batch, cfg: RunConfig
) -> dict[str, Array]:
    """Every array that a policy loss, correction or rejection can name, and old_logp.

    The logprobs are masked already. `mismatch` is the log ratio of the corrections (importance.py):
    from the engine to the old policy, or to the current one if the engine's logprobs are the old
    ones. `drift` is always that to the current policy.
    """
    current = jax.lax.stop_gradient(logp)
    source = ratio_source(cfg)
    old_logp = {
        "policy": current,
        "rollout": behavior_logp,
        "recompute": apply_mask(batch.old_logp, batch.mask),
    }[source]
    return {
        "logp": logp,
        "old_logp": old_logp,
        "behavior_logp": behavior_logp,
        "mismatch": (current if source == "rollout" else old_logp) - behavior_logp,
        "drift": current - behavior_logp,
        "advantages": apply_mask(batch.advantages, batch.mask),
        "mask": batch.mask,
        "segments": batch.segments,
        "selected": batch.selected > 0,
    }


def log_ratio(inputs: dict[str, Array], cfg: AlgorithmConfig) -> Float[Array, "B T"]:
    """The log importance ratio logp - old_logp of every token, clamped."""
    return clamp(inputs["logp"] - inputs["old_logp"], cfg.log_ratio_clamp)


def policy_loss(inputs: dict[str, Array], cfg: AlgorithmConfig) -> Float[Array, "B T"]:
    """The configured policy loss of every token."""
    row = lookup(POLICY_LOSSES, cfg.policy_loss, "algorithm.policy_loss")
    return apply(row, inputs | {"log_ratio": log_ratio(inputs, cfg)}, cfg)


def clipped_tokens(inputs: dict[str, Array], cfg: AlgorithmConfig) -> Float[Array, "B T"]:
    """1 at tokens that have an advantage but no gradient from the policy loss, 0 elsewhere."""

    def total(logp):
        return jnp.sum(apply_mask(policy_loss(inputs | {"logp": logp}, cfg), inputs["mask"]))

    gradient = jax.grad(total)(jax.lax.stop_gradient(inputs["logp"]))
    return ((gradient == 0) & (inputs["advantages"] != 0)).astype(jnp.float32)


def start_logp(logp: Float[Array, "B T"], batch: Batch, cfg: RunConfig) -> Float[Array, "B T"]:
    """Logprobs of the policy at the start of the step, which sampled, for `mismatch_metrics`.

    If they are not scored, those of the current policy, which are the same numbers in the first
    update of a step only; the trainer ignores the metrics of the others.
    """
    return batch.old_logp if ratio_source(cfg) == "recompute" else logp


def ratio_metrics(
    inputs: dict[str, Array], mask: Float[Array, "B T"], cfg: AlgorithmConfig
) -> tuple[dict[str, SumAndWeight], dict[str, Float[Array, ""]]]:
    """(means, maxima) of the importance ratio over the tokens of `mask`."""
    logp, old_logp = inputs["logp"], inputs["old_logp"]
    means = {
        "loss/clip_fraction": masked_mean(clipped_tokens(inputs, cfg), mask),
        "loss/clamped_fraction": masked_mean(outside(logp - old_logp, cfg.log_ratio_clamp), mask),
        "loss/approx_kl": masked_mean(k3(old_logp, logp), mask),
    }
    return means, {"loss/ratio_max": masked_max(jnp.exp(logp - old_logp), mask)}


def mismatch_metrics(
    logp: Float[Array, "B T"], rollout_logp: Float[Array, "B T"], mask: Float[Array, "B T"]
) -> tuple[dict[str, SumAndWeight], dict[str, Float[Array, ""]]]:
    """(means, maxima) of the mismatch between the trainer's `logp` and the engine's.

    Both are without sampling filters, or both are restricted to the same support, so that the
    mismatch has only numerical causes.
    """
    logp, rollout_logp = apply_mask(logp, mask), apply_mask(rollout_logp, mask)
    difference = logp_diff(logp, rollout_logp)
    means = {
        "mismatch/logp_diff_mean": masked_mean(difference, mask),
        "mismatch/kl": masked_mean(rollout_kl(logp, rollout_logp), mask),
    }
    return means, {"mismatch/logp_diff_max": masked_max(difference, mask)}


def importance_weights(inputs: dict[str, Array], cfg: AlgorithmConfig) -> Float[Array, "B T"]:
    """The configured importance weight of every token, without gradient and not normalized."""
    row = lookup(CORRECTIONS, cfg.correction, "algorithm.correction")
    return jax.lax.stop_gradient(apply(row, inputs | {"log_ratio": inputs["mismatch"]}, cfg))


def accepted_tokens(inputs: dict[str, Array], cfg: AlgorithmConfig) -> Float[Array, "B T"]:
    """0 at the tokens that one of the configured rejections masks, 1 elsewhere."""
    inputs = inputs | {"log_ratio": inputs["mismatch"]}
    masks = [
        apply(lookup(REJECTIONS, name, "algorithm.rejection"), inputs, bounds)
        for name, bounds in rejections(cfg)
    ]
    return jax.lax.stop_gradient(functools.reduce(operator.mul, masks))


def on_policy_tokens(inputs: dict[str, Array], cfg: AlgorithmConfig) -> Float[Array, "B T"]:
    """0 at the tokens that the off-policy sequence mask removes, 1 elsewhere."""
    if not cfg.off_policy_threshold:
        return jnp.ones_like(inputs["mask"])
    kept = off_policy_sequences(
        inputs["drift"],
        inputs["advantages"],
        inputs["mask"],
        inputs["segments"],
        off_policy_threshold=cfg.off_policy_threshold,
    )
    return jax.lax.stop_gradient(kept)


def without_rejected(batch: Batch, accepted: Float[Array, "B T"]) -> Batch:
    """The batch with the mask, and the lengths of responses, of its accepted tokens."""
    mask = batch.mask * accepted
    before, after = (jnp.maximum(segment_sum(m, batch.segments), 1.0) for m in (batch.mask, mask))
    response_len = after * (batch.response_len / before)  # the ratio is 1 without branches
    return dataclasses.replace(batch, mask=mask, response_len=response_len)


def weight_means(
    correction: Float[Array, "B T"],
    weights: Float[Array, "B T"],
    mask: Float[Array, "B T"],
    cfg: AlgorithmConfig,
) -> dict[str, SumAndWeight]:
    """Mean importance weight, and the fractions of truncated and rejected tokens.

    `weights` are the values of `correction` after normalization and rejection.
    """
    truncated = correction == cfg.correction_high
    if cfg.correction_floor:
        truncated |= correction == cfg.correction_floor
    return {
        "mismatch/weight_mean": masked_mean(weights, mask),
        "mismatch/truncated_fraction": masked_mean(1.0 * truncated, mask),
        "mismatch/rejected_fraction": masked_mean(1.0 * (weights == 0.0), mask),
    }


def reference_kl(
    logp: Float[Array, "B T"],
    inputs: dict[str, Array],
    exact_kl: Float[Array, "B T"] | None,
    batch: Batch,
    cfg: AlgorithmConfig,
) -> Float[Array, "B T"]:
    """The configured KL(policy | reference) of every token, not clamped."""
    ref_logp = apply_mask(batch.ref_logp, batch.mask)
    inputs = inputs | {
        "logp": logp,
        "ref_logp": ref_logp,
        "log_ratio": log_ratio(inputs, cfg),
    }
    if exact_kl is not None:
        inputs["exact_kl"] = apply_mask(exact_kl, batch.mask)
    return apply(lookup(KL_ESTIMATORS, cfg.kl_estimator, "algorithm.kl"), inputs, cfg)


def kl_weights(inputs: dict[str, Array], cfg: AlgorithmConfig) -> Float[Array, "B T"]:
    """The weight of the KL of every token: its truncated importance ratio, without gradient.

    min(ratio, kl_ratio_max), of the token or of the response, as SDPO's is_clip
    (https://arxiv.org/abs/2601.20802).
    """
    bounds = dict(correction_floor=0.0, correction_high=cfg.kl_ratio_max)
    ratio = jax.lax.stop_gradient(log_ratio(inputs, cfg))
    if cfg.kl_ratio_level == "response":
        return seq_tis(ratio, inputs["mask"], inputs["segments"], **bounds)
    return token_tis(ratio, **bounds)


def value_sums(
    values: Float[Array, "B T ..."], batch: Batch, *, cfg: RunConfig
) -> tuple[Float[Array, ""], LossSums]:
    """The value loss, summed over labels and by `algorithm.aggregation`, and its metrics.

    Tokens of a row must be in sequence order.
    """
    mask, clip = batch.mask, cfg.critic.value_clip

    def of_label(*label):
        values, old, returns = (apply_mask(x, mask) for x in label)
        loss = value_loss(values, old, returns, clip=clip)
        return loss, values, clipped(values, old, returns, clip=clip)

    label = values, batch.values, batch.returns
    if values.ndim == 2:
        losses, values, is_clipped = of_label(*label)
    else:
        of_labels = jax.vmap(of_label, in_axes=-1, out_axes=-1)(*label)
        losses, values, is_clipped = (jnp.sum(x, axis=-1) for x in of_labels)
    loss, weight = aggregate_tokens(losses, batch, cfg)
    means = {
        "critic/value_mean": masked_mean(values, mask),
        "critic/clip_fraction": masked_mean(is_clipped, mask),
    }
    sums = LossSums(dict.fromkeys(VALUE_LOSSES, loss), weight, means, maxima={}, router=None)
    return loss, jax.lax.stop_gradient(sums)


def aggregate_tokens(per_token: Float[Array, "B T"], batch: Batch, cfg: RunConfig) -> SumAndWeight:
    """(sum, weight) of a per-token loss by `algorithm.aggregation`."""
    return aggregate(
        per_token,
        batch.mask,
        batch.response_len,
        mode=cfg.algorithm.aggregation,
        max_response_len=cfg.data.max_response_len,
    )


def clamp(x: Float[Array, "B T"], bound: float) -> Float[Array, "B T"]:
    """x within ± `bound`, with gradient 0 outside; x itself if `bound` is 0."""
    return jnp.clip(x, -bound, bound) if bound else x


def outside(x: Float[Array, "B T"], bound: float) -> Float[Array, "B T"]:
    """1 at tokens that `clamp` changes, 0 elsewhere."""
    return (jnp.abs(x) > bound).astype(jnp.float32) if bound else jnp.zeros_like(x)
