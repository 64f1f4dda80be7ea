"""From rewarded rollouts to what the update reads: advantages, mini-batches, old and reference logprobs."""

import dataclasses
from collections.abc import Callable, Sequence

import jax.numpy as jnp
import numpy as np

from jaxrl.algorithms.advantages import ESTIMATORS
from jaxrl.algorithms.kl import ESTIMATORS as KL_ESTIMATORS
from jaxrl.config import AlgorithmConfig, RunConfig
from jaxrl.data.packing import Packed, gather, pack
from jaxrl.types import Batch, Rollout

Score = Callable[[Batch], np.ndarray]  # packed batch -> logp [B, T] of its targets


@dataclasses.dataclass(frozen=True)
class MiniBatch:
    """What one optimizer step sees."""

    packed: list[Packed]
    idle: list[Rollout]  # left out since they carry no gradient; they count in the denominator


def make_mini_batches(
    rollouts: Sequence[Rollout],
    cfg: RunConfig,
    *,
    n_ranks: int,
    score_old: Score | None,
    score_ref: Score | None,
) -> tuple[list[MiniBatch], dict[str, float]]:
    """Mini-batches of `learner.mini_batch_prompts` prompts, in the order of the rollouts.

    `score_old` and `score_ref` are given where the algorithm needs them (learner/needs.py); they see
    every packed batch once, before the first update.
    """
    metrics = {}
    if score_ref is not None and cfg.algorithm.kl_in == "reward":
        rollouts, metrics["reward/kl"] = charge_kl(rollouts, cfg, n_ranks, score_ref)
        score_ref = None
    rollouts = add_advantages(rollouts, cfg.algorithm, cfg.rollout.n)
    size = (cfg.learner.mini_batch_prompts or cfg.data.prompts_per_step) * cfg.rollout.n
    result = []
    for start in range(0, len(rollouts), size):
        active, idle = split_idle(rollouts[start : start + size], cfg)
        packed = pack_rollouts(active, cfg, n_ranks)
        result.append(MiniBatch([with_scores(p, score_old, score_ref) for p in packed], idle))
    n_idle = sum(len(m.idle) for m in result)
    metrics["perf/idle_fraction"] = n_idle / len(rollouts)
    metrics["perf/padding_fraction"] = padding_fraction([p for m in result for p in m.packed])
    return result, metrics


def add_advantages(rollouts: Sequence[Rollout], cfg: AlgorithmConfig, n: int) -> list[Rollout]:
    """Fills `advantage` from the rewards of each prompt's `n` samples, which lie side by side."""
    rewards = np.array([r.reward for r in rollouts], np.float32).reshape(-1, n)
    advantages = ESTIMATORS[cfg.advantage](rewards, norm_by_std=cfg.norm_adv_by_std)
    return [
        dataclasses.replace(r, advantage=float(a))
        for r, a in zip(rollouts, advantages.reshape(-1), strict=True)
    ]


def charge_kl(
    rollouts: Sequence[Rollout], cfg: RunConfig, n_ranks: int, score_ref: Score
) -> tuple[list[Rollout], float]:
    """Subtracts kl_coef * sum_t KL_t(policy | reference) from every reward (InstructGPT, eq. 2,
    https://arxiv.org/abs/2203.02155), with the engine's logprobs as the policy's.

    Returns the mean KL per token, too.
    """
    packed = pack_rollouts(rollouts, cfg, n_ranks)
    kl = gather([token_kl(p.batch, score_ref(p.batch), cfg.algorithm) for p in packed], packed)
    charged = [
        dataclasses.replace(r, reward=r.reward - cfg.algorithm.kl_coef * float(k.sum()))
        for r, k in zip(rollouts, kl, strict=True)
    ]
    return charged, float(np.concatenate(kl).mean())


def token_kl(batch: Batch, ref_logp: np.ndarray, cfg: AlgorithmConfig) -> np.ndarray:
    """The configured estimate of KL(policy | reference) of every target, [B, T]."""
    return np.asarray(KL_ESTIMATORS[cfg.kl](jnp.asarray(batch.rollout_logp), jnp.asarray(ref_logp)))


def split_idle(rollouts: Sequence[Rollout], cfg: RunConfig) -> tuple[list[Rollout], list[Rollout]]:
    """(rollouts with a gradient, rollouts without). Where neither KL nor entropy nor the load of the
    experts is in the loss, a zero advantage gives a zero gradient, so a group of equal rewards need not
    be run."""
    algo = cfg.algorithm
    kl_in_loss = algo.kl_coef != 0.0 and algo.kl_in == "loss"
    learns_anyway = algo.entropy_coef != 0.0 or kl_in_loss or cfg.learner.router_aux_coef != 0.0
    if learns_anyway or not algo.drop_flat_groups:
        return list(rollouts), []
    active = [r for r in rollouts if r.advantage != 0.0]
    return active, [r for r in rollouts if r.advantage == 0.0]


def pack_rollouts(rollouts: Sequence[Rollout], cfg: RunConfig, n_ranks: int) -> list[Packed]:
    learner = cfg.learner
    return pack(
        rollouts,
        shapes=learner.shapes,
        align=learner.segment_align,
        n_ranks=n_ranks,
    )


def with_scores(packed: Packed, score_old: Score | None, score_ref: Score | None) -> Packed:
    batch = packed.batch
    if score_old is not None:
        batch = dataclasses.replace(batch, old_logp=score_old(packed.batch))
    if score_ref is not None:
        batch = dataclasses.replace(batch, ref_logp=score_ref(packed.batch))
    return dataclasses.replace(packed, batch=batch)


def padding_fraction(packed: Sequence[Packed]) -> float:
    """Share of all the update's tokens that belongs to no sequence."""
    if not packed:
        return 0.0
    sizes = [p.batch.tokens.size for p in packed]
    return float(np.average([p.padding_fraction for p in packed], weights=sizes))
