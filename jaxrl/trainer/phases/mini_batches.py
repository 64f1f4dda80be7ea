"""Mini-batches of a step: advantages, filters, token selection, packing, and their logprobs."""

import dataclasses
import functools
import itertools
from collections.abc import Callable, Sequence

import jax
import jax.numpy as jnp
import numpy as np

from jaxrl.algorithms.advantages import ADVANTAGES
from jaxrl.algorithms.kl import KL_ESTIMATORS
from jaxrl.algorithms.losses.aggregation import SumAndWeight, apply_mask, sequences_weight
from jaxrl.algorithms.losses.covariance import covariances, select_top_entropy
from jaxrl.algorithms.losses.importance import CORRECTIONS, mean_weight
from jaxrl.algorithms.losses.policy_loss import POLICY_LOSSES
from jaxrl.algorithms.table import apply, lookup
from jaxrl.config.keys import AlgorithmConfig, RunConfig
from jaxrl.data.packing import (
    Packed,
    gather,
    pack_samples,
    padding_fraction,
    response_field,
    shared_fraction,
)
from jaxrl.learner.requirements import needs_every_response
from jaxrl.trainer.phases.advantage import RewardParts, add_advantages
from jaxrl.trainer.phases.parts import part_factors
from jaxrl.trainer.phases.self_distillation import read_by_teacher
from jaxrl.trainer.phases.turns import anchor_states
from jaxrl.types import Batch, Rollout, TrainingSample

Score = Callable[[list[Batch]], list[np.ndarray]]  # packed batches -> logp [B, T] of their targets


@dataclasses.dataclass(frozen=True)
class MiniBatch:
    """The input of one optimizer step."""

    packed: list[Packed]
    idle: Sequence[TrainingSample] = ()  # no gradient, so not packed; count in the denominator
    samples: Sequence[TrainingSample] = ()  # packed and idle samples, for a separate critic
    extra_weight: float = 0.0  # of what is not packed, in the denominator of the policy's terms
    mean_weight: float = 1.0  # of the importance weights, which the loss divides by it
    part_factors: tuple[float, ...] = ()  # of the sums of algorithm.parts


def to_sample(rollout: Rollout, *, group: int = 0) -> TrainingSample:
    """The training sample of a rollout, without advantages and values."""
    prompt = rollout.prompt
    return TrainingSample(
        prompt_tokens=prompt.tokens,
        tokens=rollout.tokens,
        loss_mask=rollout.loss_mask,
        rollout_logp=rollout.logp,
        behavior_logp=rollout.behavior_logp,
        support=rollout.support,
        experts=rollout.experts,
        images=rollout.images,
        axis_positions=rollout.axis_positions,
        truncated=rollout.finish == "length",
        role=rollout.role,
        group=group,
        prompt_id=prompt.id,
        sample=rollout.sample,
        source=prompt.source,
    )


def to_samples(
    rollout: Rollout,
    cfg: AlgorithmConfig,
    *,
    group: int = 0,
    turn_rewards: np.ndarray | None = None,
) -> list[TrainingSample]:
    """One training sample per sequence of a rollout; `turn_rewards` belong to the first.

    With algorithm.branch_credit="last" the first is the only one.
    """
    sequences = rollout.sequences if cfg.branch_credit == "all" else (rollout,)
    n_loss_tokens = sum(r.n_loss_tokens for r in sequences)
    samples = [to_sample(sequence, group=group) for sequence in sequences]
    samples[0] = dataclasses.replace(samples[0], turn_rewards=turn_rewards)
    if rollout.episode is not None:
        counts = rollout.episode.counts
        samples = [dataclasses.replace(s, role_reward=counts.get(s.role)) for s in samples]
    if "turn_anchors" in lookup(ADVANTAGES, cfg.advantage, "algorithm.advantage").inputs:
        anchors = [tuple(anchor_states(sequence)) for sequence in sequences]
        samples = [dataclasses.replace(s, anchors=a) for s, a in zip(samples, anchors, strict=True)]
    if len(samples) == 1:
        return samples
    return [
        dataclasses.replace(s, branch=i, episode_loss_tokens=n_loss_tokens)
        for i, s in enumerate(samples)
    ]


def make_mini_batches(
    samples: Sequence[TrainingSample],
    rewards: np.ndarray,
    cfg: RunConfig,
    *,
    n_ranks: int,
    kl_reference: Score | None = None,
    baselines: np.ndarray | None = None,
    parts: RewardParts | None = None,
    kl_coef: float | None = None,
    seed: int = 0,
    step: int = 0,
    demonstrations: Sequence[TrainingSample] = (),
) -> tuple[list[MiniBatch], dict[str, float]]:
    """Mini-batches of `learner.mini_batch_prompts` prompts each, in the order of the samples.

    Args:
      samples: at least one, by group; with a critic, they have `values`.
      rewards: float64 [len(samples)], after scaling.
      kl_reference: the reference's logprobs, for the KL in the reward; None without it.
      baselines, parts: see `add_advantages`.
      kl_coef: coefficient of the KL in the reward; None = algorithm.kl_coef.
      seed: seed of the random token selection of clip_cov.
      step: steps before this one, for the weights of algorithm.parts.
      demonstrations: of the whole step, with their `parts`.

    Returns:
      (mini-batches without old_logp and ref_logp, metrics).
    """
    metrics: dict[str, float] = {}
    penalties = None
    if kl_reference is not None:
        read = read_by_teacher(samples) if cfg.self_distillation.context else samples
        kl, metrics = clamped_kl(
            reference_kl(read, cfg, n_ranks, kl_reference), read, cfg.algorithm.kl_clamp
        )
        coef = cfg.algorithm.kl_coef if kl_coef is None else kl_coef
        penalties = [coef * k for k in kl]
        if cfg.self_distillation.context:
            penalties = spread(penalties, samples)
    samples = add_advantages(
        samples, rewards, cfg.algorithm, penalties=penalties, baselines=baselines, parts=parts
    )
    if cfg.has_critic:
        metrics |= value_metrics(samples)
    mini_batches = split_mini_batches(
        samples, demonstrations, cfg, n_ranks=n_ranks, seed=seed, step=step
    )
    return mini_batches, metrics | packing_metrics(mini_batches, len(samples))


def split_mini_batches(
    samples: Sequence[TrainingSample],
    demonstrations: Sequence[TrainingSample],
    cfg: RunConfig,
    *,
    n_ranks: int,
    seed: int,
    step: int,
) -> list[MiniBatch]:
    """Filters samples, selects tokens and packs, separately for each mini-batch.

    Every mini-batch has the groups of as many prompts, and as many demonstrations. Groups may be
    smaller than `rollout.n` or missing; a mini-batch without samples is left out.
    """
    mini_batches, size = [], cfg.mini_batch_prompts
    n_given = len(demonstrations) // cfg.mini_batches_per_step
    for index, members in itertools.groupby(samples, key=lambda s: s.group // size):
        mini = drop_untaught(drop_overlong(list(members), cfg), cfg)
        mini = select_tokens(mini, cfg.algorithm, np.random.default_rng([seed, index]))
        active, idle = split_idle(mini, cfg)
        given = demonstrations[index * n_given : (index + 1) * n_given]
        extra, weight = (policy_weight(x, cfg.algorithm) for x in (idle, [*active, *idle]))
        if given and not weight:  # without a token of the policy the parts are the whole loss
            extra = weight = 1.0
        trained = [*active, *given]
        counted = [*trained, *(s for s in idle if s.n_loss_tokens)]
        factors = part_factors(counted, weight, step, cfg.algorithm) if cfg.algorithm.parts else ()
        mini_batches.append(
            MiniBatch(
                pack_samples(trained, cfg, n_ranks),
                idle,
                mini,
                extra_weight=extra,
                part_factors=factors,
            )
        )
    return mini_batches


def policy_weight(samples: Sequence[TrainingSample], cfg: AlgorithmConfig) -> float:
    """The weight of samples in the denominator of the policy's terms."""
    lens, shares = [s.n_loss_tokens for s in samples], [s.share for s in samples]
    return sequences_weight(lens, shares, mode=cfg.aggregation)


def packing_metrics(mini_batches: Sequence[MiniBatch], n_samples: int) -> dict[str, float]:
    """perf/idle_fraction, perf/padding_fraction and perf/shared_fraction of a step."""
    packed = [p for m in mini_batches for p in m.packed]
    return {
        "perf/idle_fraction": sum(len(m.idle) for m in mini_batches) / n_samples,
        "perf/padding_fraction": padding_fraction(packed),
        "perf/shared_fraction": shared_fraction(packed),
    }


def value_metrics(samples: Sequence[TrainingSample]) -> dict[str, float]:
    """critic/return_mean and critic/explained_variance, with the values before the step.

    The explained variance is 1 - Var(R - V) / Var(R) over the tokens of the loss mask. No metrics
    if no sample has such a token.
    """

    def loss_tokens(fields: Sequence[np.ndarray | None]) -> np.ndarray:
        pairs = zip(samples, fields, strict=True)
        return np.concatenate([response_field(s, x)[s.loss_mask] for s, x in pairs]).astype(float)

    returns = loss_tokens([s.returns for s in samples])
    if not len(returns):
        return {}
    values = loss_tokens([s.values for s in samples])
    explained = 1.0 - (returns - values).var() / max(returns.var(), 1e-8)
    return {
        "critic/return_mean": float(returns.mean()),
        "critic/explained_variance": float(explained),
    }


def reference_kl(
    samples: Sequence[TrainingSample], cfg: RunConfig, n_ranks: int, score_ref: Score
) -> list[np.ndarray]:
    """KL_t(policy | reference) of every response token; 0 outside the loss mask.

    It is the KL penalty of the reward (InstructGPT, eq. 2, https://arxiv.org/abs/2203.02155). The
    policy's logprobs are the engine's.
    """
    packed = pack_samples(samples, cfg, n_ranks)
    batches = [p.batch for p in packed]
    pairs = zip(batches, score_ref(batches), strict=True)
    found = gather([token_kl(batch, logp, cfg.algorithm) for batch, logp in pairs], packed)
    return [np.where(s.loss_mask, kl, 0.0) for s, kl in zip(samples, found, strict=True)]


def spread(of_read: Sequence[np.ndarray], samples: Sequence[TrainingSample]) -> list[np.ndarray]:
    """Values of the samples that a teacher has read, as those of all; 0 where it has read none."""
    found = iter(of_read)
    return [np.zeros(len(s.tokens)) if s.teacher_prompt is None else next(found) for s in samples]


def clamped_kl(
    kl: Sequence[np.ndarray], samples: Sequence[TrainingSample], bound: float
) -> tuple[list[np.ndarray], dict[str, float]]:
    """(KL of every response token within ± `bound`, metrics over the loss tokens); 0 = no bound."""
    n_tokens = sum(s.n_loss_tokens for s in samples)
    if not n_tokens:
        return list(kl), {}
    clamped = [np.clip(k, -bound, bound) for k in kl] if bound else list(kl)
    changed = sum(int((a != b).sum()) for a, b in zip(kl, clamped, strict=True))
    return clamped, {
        "reward/kl": float(np.concatenate(clamped).sum() / n_tokens),
        "reward/kl_clamped_fraction": changed / n_tokens,
    }


def token_kl(batch: Batch, ref_logp: np.ndarray, cfg: AlgorithmConfig) -> np.ndarray:
    """The configured estimate of KL(policy | reference) for every target, [B, T]."""
    row = lookup(KL_ESTIMATORS, cfg.kl_estimator, "algorithm.kl")
    inputs = {"logp": jnp.asarray(batch.rollout_logp), "ref_logp": jnp.asarray(ref_logp)}
    return np.asarray(apply(row, inputs, cfg))


def drop_overlong(samples: Sequence[TrainingSample], cfg: RunConfig) -> list[TrainingSample]:
    """Removes truncated responses from the loss and its denominator, if configured.

    This is the overlong filtering of DAPO (section 3.4, https://arxiv.org/abs/2503.14476).
    """
    if not cfg.algorithm.overlong_filtering:
        return list(samples)
    return [s for s in samples if not s.truncated]


def drop_untaught(samples: Sequence[TrainingSample], cfg: RunConfig) -> list[TrainingSample]:
    """Removes responses without a teacher from a loss that has nothing else, as SDPO does.

    Those that a teacher could not read leave any loss: without its scores they have no KL.
    """
    samples = [s for s in samples if not s.unread]
    if not cfg.self_distillation.context or cfg.algorithm.advantage != "distill":
        return samples
    return [s for s in samples if s.teacher_prompt is not None]


def select_tokens(
    samples: Sequence[TrainingSample], cfg: AlgorithmConfig, rng: np.random.Generator
) -> list[TrainingSample]:
    """Fills `selected` if the policy loss selects tokens by their covariance (clip_cov, kl_cov)."""
    selection = lookup(POLICY_LOSSES, cfg.policy_loss, "algorithm.policy_loss").selection
    if selection is None or not samples:
        return list(samples)
    mask = np.concatenate([s.loss_mask for s in samples])
    logp = np.concatenate([response_field(s, s.rollout_logp) for s in samples])[mask]
    advantages = np.concatenate([response_field(s, s.advantages) for s in samples])[mask]
    chosen = np.zeros(len(mask), bool)
    inputs = {"cov": covariances(logp, advantages), "rng": rng}
    chosen[mask] = apply(selection, inputs, cfg)
    ends = np.cumsum([len(s.tokens) for s in samples])[:-1]
    return [
        dataclasses.replace(s, selected=one)
        for s, one in zip(samples, np.split(chosen, ends), strict=True)
    ]


def split_idle(
    samples: Sequence[TrainingSample], cfg: RunConfig
) -> tuple[list[TrainingSample], list[TrainingSample]]:
    """(samples with a gradient, samples without a gradient).

    A sample with zero advantages has no gradient unless the loss has another term for it. This
    concerns groups with equal rewards.
    """
    always = needs_every_response(cfg) or not cfg.algorithm.drop_flat_groups

    def has_gradient(s: TrainingSample) -> bool:
        return s.n_loss_tokens > 0 and (always or s.advantages is None or bool(s.advantages.any()))

    return [s for s in samples if has_gradient(s)], [s for s in samples if not has_gradient(s)]


def with_scores(
    mini_batches: list[MiniBatch],
    cfg: AlgorithmConfig,
    *,
    score_old: Callable[[list[Batch]], list[Batch]] | None = None,
    score_ref: Score | None = None,
) -> list[MiniBatch]:
    """Fills old_logp, ref_logp and the mean weight. All mini-batches are scored together.

    `score_old` fills old_logp of packed batches. A score is None if the algorithm does not need it
    (learner/requirements.py).
    """
    batches = [packed.batch for mini in mini_batches for packed in mini.packed]
    if score_old is not None:
        batches = score_old(batches)
    if score_ref is not None:
        pairs = zip(batches, score_ref(batches), strict=True)
        batches = [dataclasses.replace(batch, ref_logp=logp) for batch, logp in pairs]
    scored = iter(batches)

    def filled(mini: MiniBatch) -> MiniBatch:
        packed = [dataclasses.replace(p, batch=next(scored)) for p in mini.packed]
        return dataclasses.replace(mini, packed=packed)

    mini_batches = [filled(mini) for mini in mini_batches]
    if cfg.top_entropy < 1.0:
        mini_batches = [with_top_entropy(mini, cfg) for mini in mini_batches]
    if cfg.correction_normalize:
        return [with_mean_weight(mini, cfg) for mini in mini_batches]
    return mini_batches


def with_top_entropy(mini: MiniBatch, cfg: AlgorithmConfig) -> MiniBatch:
    """Replaces the entropies in `selected` by 1 at the tokens with the largest ones, else 0.

    The quantile is over the loss tokens of all micro-batches, so that the update does not depend on
    the packing.
    """
    masks = [packed.batch.mask > 0 for packed in mini.packed]
    entropies = [p.batch.selected[mask] for p, mask in zip(mini.packed, masks, strict=True)]
    chosen = select_top_entropy(np.concatenate(entropies), top_entropy=cfg.top_entropy)
    packed, parts = [], np.split(chosen, np.cumsum([len(x) for x in entropies])[:-1])
    for one, mask, part in zip(mini.packed, masks, parts, strict=True):
        selected = np.zeros(mask.shape, np.float32)
        selected[mask] = part
        packed.append(
            dataclasses.replace(one, batch=dataclasses.replace(one.batch, selected=selected))
        )
    return dataclasses.replace(mini, packed=packed)


def with_mean_weight(mini: MiniBatch, cfg: AlgorithmConfig) -> MiniBatch:
    """Fills the mean importance weight of a mini-batch, whose old logprobs are scored already.

    It is over all micro-batches, so that the update does not depend on the packing; rejected tokens
    count, idle samples do not.
    """
    sums = [[float(x) for x in _weight_sums(packed.batch, cfg)] for packed in mini.packed]
    total, count = sum(s for s, _ in sums), sum(n for _, n in sums)
    mean = total / max(count, 1.0)
    return dataclasses.replace(mini, mean_weight=mean if mean > 1e-8 else 1.0)


# One program per shape: without jit, every call would compile the scan over a response.
@functools.partial(jax.jit, static_argnames="cfg")
def _weight_sums(batch: Batch, cfg: AlgorithmConfig) -> SumAndWeight:
    row = lookup(CORRECTIONS, cfg.correction, "algorithm.correction")
    log_ratio = apply_mask(batch.old_logp - batch.behavior_logp, batch.mask)
    inputs = {"log_ratio": log_ratio, "mask": batch.mask, "segments": batch.segments}
    return mean_weight(apply(row, inputs, cfg), batch.mask, batch.response_len, level=row.level)
