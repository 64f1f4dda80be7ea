"""From rewarded rollouts to what the update reads: advantages, mini-batches, old and reference logprobs."""

import dataclasses
from collections.abc import Callable, Sequence

import jax.numpy as jnp
import numpy as np

from jaxrl.algorithms.covariance import covariances, pick_between, pick_largest
from jaxrl.algorithms.kl import ESTIMATORS as KL_ESTIMATORS
from jaxrl.config.choices import COV_LOSSES
from jaxrl.config.keys import AlgorithmConfig, RunConfig
from jaxrl.data.packing import Packed, gather, pack, response_field
from jaxrl.learner.requirements import kl_in_loss
from jaxrl.trainer.advantage import add_advantages
from jaxrl.types import Batch, Rollout

Score = Callable[[list[Batch]], list[np.ndarray]]  # packed batches -> logp [B, T] of their targets


@dataclasses.dataclass(frozen=True)
class MiniBatch:
    """What one optimizer step sees."""

    packed: list[Packed]
    idle: list[Rollout]  # left out since they carry no gradient; they count in the denominator
    rollouts: Sequence[Rollout] = ()  # all of them: what a critic of its own learns from


def make_mini_batches(
    rollouts: Sequence[Rollout],
    cfg: RunConfig,
    *,
    n_ranks: int,
    score_old: Score | None,
    score_ref: Score | None,
    kl_coef: float | None = None,
    seed: int = 0,
) -> tuple[list[MiniBatch], dict[str, float]]:
    """Mini-batches of `learner.mini_batch_prompts` prompts, in the order of the rollouts.

    `score_old` and `score_ref` are given where the algorithm needs them (learner/requirements.py); they see
    all packed batches at once, before the first update. `kl_coef` is this step's, where it is adapted; `seed`
    draws what an algorithm draws beside the samples.
    """
    metrics, penalties = {}, None
    if score_ref is not None and cfg.algorithm.kl_in == "reward":
        kl = reference_kl(rollouts, cfg, n_ranks, score_ref)
        metrics["reward/kl"] = float(
            np.concatenate(kl).sum() / max(sum(r.n_own for r in rollouts), 1)
        )
        kl_coef = cfg.algorithm.kl_coef if kl_coef is None else kl_coef
        penalties = [kl_coef * k for k in kl]
        score_ref = None
    rollouts = add_advantages(rollouts, cfg.algorithm, cfg.rollout.n, penalties)
    if cfg.has_critic:
        metrics |= value_metrics(rollouts)
    size = (cfg.learner.mini_batch_prompts or cfg.data.prompts_per_step) * cfg.rollout.n
    result = []
    for start in range(0, len(rollouts), size):
        mini = without_overlong(rollouts[start : start + size], cfg)
        mini = select_tokens(mini, cfg.algorithm, np.random.default_rng([seed, start]))
        active, idle = split_idle(mini, cfg)
        result.append(MiniBatch(pack_rollouts(active, cfg, n_ranks), idle, mini))
    result = with_scores(result, score_old, score_ref)
    n_idle = sum(len(m.idle) for m in result)
    metrics["perf/idle_fraction"] = n_idle / len(rollouts)
    metrics["perf/padding_fraction"] = padding_fraction([p for m in result for p in m.packed])
    return result, metrics


def value_metrics(rollouts: Sequence[Rollout]) -> dict[str, float]:
    """critic/return_mean, and how much of the spread of the returns the values explained before the step:
    1 - Var(R - V) / Var(R)."""

    def of_tokens(fields: Sequence[np.ndarray | None]) -> np.ndarray:
        pairs = zip(rollouts, fields, strict=True)
        return np.concatenate([response_field(r, x)[r.own_mask] for r, x in pairs]).astype(float)

    returns, values = (
        of_tokens([r.returns for r in rollouts]),
        of_tokens([r.values for r in rollouts]),
    )
    explained = 1.0 - (returns - values).var() / max(returns.var(), 1e-8)
    return {
        "critic/return_mean": float(returns.mean()),
        "critic/explained_variance": float(explained),
    }


def reference_kl(
    rollouts: Sequence[Rollout], cfg: RunConfig, n_ranks: int, score_ref: Score
) -> list[np.ndarray]:
    """KL_t(policy | reference) of every response token, with the engine's logprobs as the policy's: what the
    reward is charged for (InstructGPT, eq. 2, https://arxiv.org/abs/2203.02155). 0 at tokens of others."""
    packed = pack_rollouts(rollouts, cfg, n_ranks)
    batches = [p.batch for p in packed]
    pairs = zip(batches, score_ref(batches), strict=True)
    found = gather([token_kl(batch, logp, cfg.algorithm) for batch, logp in pairs], packed)
    return [np.where(r.own_mask, kl, 0.0) for r, kl in zip(rollouts, found, strict=True)]


def token_kl(batch: Batch, ref_logp: np.ndarray, cfg: AlgorithmConfig) -> np.ndarray:
    """The configured estimate of KL(policy | reference) of every target, [B, T]."""
    return np.asarray(KL_ESTIMATORS[cfg.kl](jnp.asarray(batch.rollout_logp), jnp.asarray(ref_logp)))


def without_overlong(rollouts: Sequence[Rollout], cfg: RunConfig) -> list[Rollout]:
    """Overlong filtering (DAPO, section 3.4, https://arxiv.org/abs/2503.14476): responses that were cut off
    leave the loss, its denominator included."""
    if not cfg.algorithm.overlong_filtering:
        return list(rollouts)
    return [r for r in rollouts if r.finish != "length"]


def select_tokens(
    rollouts: Sequence[Rollout], cfg: AlgorithmConfig, rng: np.random.Generator
) -> list[Rollout]:
    """Fills `selected` where the policy loss singles tokens out by their covariance (clip_cov, kl_cov)."""
    if cfg.policy_loss not in COV_LOSSES or not rollouts:
        return list(rollouts)
    own = np.concatenate([r.own_mask for r in rollouts])
    logp = np.concatenate([r.logp for r in rollouts])[own]
    advantages = np.concatenate([response_field(r, r.advantages) for r in rollouts])[own]
    cov = covariances(logp, advantages)
    chosen = np.zeros(len(own), bool)
    if cfg.policy_loss == "clip_cov":
        low, high = cfg.clip_cov_low, cfg.clip_cov_high
        chosen[own] = pick_between(cov, fraction=cfg.cov_fraction, low=low, high=high, rng=rng)
    else:
        chosen[own] = pick_largest(cov, fraction=cfg.cov_fraction)
    ends = np.cumsum([len(r.tokens) for r in rollouts])[:-1]
    return [
        dataclasses.replace(r, selected=one)
        for r, one in zip(rollouts, np.split(chosen, ends), strict=True)
    ]


def split_idle(rollouts: Sequence[Rollout], cfg: RunConfig) -> tuple[list[Rollout], list[Rollout]]:
    """(rollouts with a gradient, rollouts without). Where neither KL nor entropy nor the load of the
    experts nor values are in the loss, a zero advantage gives a zero gradient, so a group of equal rewards need not
    be run."""
    algo = cfg.algorithm
    learns_anyway = algo.has_entropy or kl_in_loss(algo) or cfg.learner.router_aux_coef != 0.0
    learns_anyway |= cfg.critic.shared or not algo.drop_flat_groups

    def learns(r: Rollout) -> bool:
        has_gradient = learns_anyway or r.advantages is None or bool(r.advantages.any())
        return r.n_own > 0 and has_gradient

    return [r for r in rollouts if learns(r)], [r for r in rollouts if not learns(r)]


def pack_rollouts(rollouts: Sequence[Rollout], cfg: RunConfig, n_ranks: int) -> list[Packed]:
    learner = cfg.learner
    return pack(
        rollouts,
        shapes=learner.shapes,
        align=learner.segment_align,
        n_ranks=n_ranks,
    )


def with_scores(
    minis: list[MiniBatch], score_old: Score | None, score_ref: Score | None
) -> list[MiniBatch]:
    """The mini-batches with the logprobs that are asked for, all batches scored together."""
    batches = [packed.batch for mini in minis for packed in mini.packed]
    for name, score in (("old_logp", score_old), ("ref_logp", score_ref)):
        if score is not None:
            logps = score(batches)
            pairs = zip(batches, logps, strict=True)
            batches = [dataclasses.replace(batch, **{name: logp}) for batch, logp in pairs]
    scored = iter(batches)

    def filled(mini: MiniBatch) -> MiniBatch:
        packed = [dataclasses.replace(p, batch=next(scored)) for p in mini.packed]
        return dataclasses.replace(mini, packed=packed)

    return [filled(mini) for mini in minis]


def padding_fraction(packed: Sequence[Packed]) -> float:
    """Share of all the update's tokens that belongs to no sequence."""
    if not packed:
        return 0.0
    sizes = [p.batch.tokens.size for p in packed]
    return float(np.average([p.padding_fraction for p in packed], weights=sizes))
