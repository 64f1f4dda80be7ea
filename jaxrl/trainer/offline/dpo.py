"""Preference optimization (DPO and its variants, SimPO, KTO) as an objective of the RL learner.

The equations are in algorithms/losses/preference.py and reference_free.py. A loss L of the logprobs
of sequences has the gradient of a policy gradient whose advantage, at every token, is -dL/dlogp.
So the two completions of a pair may be in different rows and micro-batches.
"""

import dataclasses
from collections.abc import Sequence

import jax
import jax.numpy as jnp
import numpy as np

from jaxrl.algorithms.losses.preference_table import (
    PairLogps,
    length_weights,
    log_ratios,
    pair_weights,
    weighted_losses,
)
from jaxrl.config.choices import LABELLED_LOSSES
from jaxrl.config.keys import PreferenceConfig, RunConfig
from jaxrl.data.chat.encoding import ChatRenderer
from jaxrl.data.demonstrations import to_sample
from jaxrl.data.images.reader import ImageReader
from jaxrl.data.items import ItemMaker
from jaxrl.data.preferences import Labelled, Pair, pair_maker
from jaxrl.planner.programs import OfflineWorkload
from jaxrl.trainer.offline.objective import (
    UNUSED_SECTIONS,
    OfflineObjective,
    OfflineRun,
    logps,
    token_fields,
)
from jaxrl.trainer.offline.unpaired import (
    as_labelled,
    labelled_metrics,
    labelled_samples,
    measure_labelled,
    running_shift,
    with_prompts,
)
from jaxrl.trainer.phases.experience import (
    policy_collisions,
    policy_logps,
    reference_logps,
)
from jaxrl.types import Demonstration, TrainingSample


@dataclasses.dataclass(frozen=True)
class MeasuredPairs:
    """Pairs at the current weights: chosen completions, then rejected ones."""

    completions: list[Demonstration]
    token_weights: list[np.ndarray]  # float32 [n_loss_tokens] of each completion
    logps: PairLogps


def make_samples(
    run: OfflineRun, items: Sequence[Pair | Labelled]
) -> tuple[list[TrainingSample], dict[str, float]]:
    """Both completions of each pair as samples, or that of each row with a label.

    Their advantages give the gradient of the configured loss at the current weights.
    """
    if (pairs := all_pairs(items)) is None:
        return labelled_samples(run, as_labelled(items))
    cfg, measured = run.core.cfg.preference, measure(run, pairs, trains=True)
    losses, slopes = losses_and_slopes(measured.logps, cfg)
    parts = zip(measured.completions, slopes, measured.token_weights, strict=True)
    # The learner divides by the number of completions; a pair has two.
    samples = [to_sample(d, -2.0 * slope * weights) for d, slope, weights in parts]
    return samples, pair_metrics(losses, measured.logps, cfg)


def evaluate(run: OfflineRun, items: Sequence[Pair | Labelled]) -> dict[str, float]:
    """val/loss, val/accuracy, val/margin; of pairs val/reward_chosen and val/reward_rejected."""
    if (pairs := all_pairs(items)) is None:
        metrics = labelled_metrics(measure_labelled(run, as_labelled(items)))
    else:
        cfg, logps = run.core.cfg.preference, measure(run, pairs).logps
        metrics = pair_metrics(np.asarray(weighted_losses(logps, cfg)), logps, cfg)
    return {f"val/{name.split('/')[1]}": value for name, value in metrics.items()}


def all_pairs(items: Sequence[Pair | Labelled]) -> list[Pair] | None:
    """The items, if all are pairs."""
    pairs = [item for item in items if isinstance(item, Pair)]
    return pairs if len(pairs) == len(items) else None


def measure(run: OfflineRun, pairs: Sequence[Pair], *, trains: bool = False) -> MeasuredPairs:
    """Scores the pairs with the policy, and with the reference if a loss has one.

    `trains`: the running mean of BCO includes them.
    """
    cfg, completions = run.core.cfg.preference, completions_of(pairs)
    others = mismatched(pairs, run.core.cfg.data.max_len) if cfg.loss == "kto" else []
    n_tokens = np.array([d.n_loss_tokens for d in completions])
    weights = length_weights(n_tokens, cfg.ld_alpha)
    of_pairs = np.ones(len(pairs), np.float32)
    if cfg.weighted:
        policy, collisions = token_fields(run.core, completions, policy_collisions)
        of_pairs = pair_weights(policy, collisions)
    else:
        policy = logps(run.core, [*completions, *others], policy_logps)
    reference = [np.zeros_like(logp) for logp in policy]
    if cfg.has_reference:
        reference = logps(run.core, [*completions, *others], reference_logps)
    ratio = [p - q for p, q in zip(policy, reference, strict=True)]
    mismatch = [r.sum() for r in ratio[len(completions) :]]
    of_completions = _weighted_sums(ratio, weights)
    shift = max(float(np.mean(mismatch)), 0.0) if mismatch else 0.0
    if cfg.loss == "bco":
        shift = running_shift(run, np.asarray(of_completions), trains=trains)
    sums = PairLogps(
        ratio=of_completions,
        reference=_weighted_sums(reference, weights),
        n_tokens=jnp.asarray(n_tokens, jnp.float32),
        shift=jnp.float32(shift),
        weights=jnp.asarray(of_pairs),
    )
    return MeasuredPairs(completions, weights, sums)


def _weighted_sums(found: Sequence[np.ndarray], weights: Sequence[np.ndarray]) -> jax.Array:
    """Σ_t w_t x_t of each completion; those of other sequences follow and are left out."""
    pairs = zip(found, weights, strict=False)
    return jnp.asarray([(values * w).sum() for values, w in pairs], jnp.float32)


def losses_and_slopes(measured: PairLogps, cfg: PreferenceConfig) -> tuple[np.ndarray, np.ndarray]:
    """(loss of each pair [N], derivative of their sum by the policy's logprobs [2N])."""
    losses, slopes = jax.vjp(
        lambda ratio: weighted_losses(dataclasses.replace(measured, ratio=ratio), cfg),
        measured.ratio,
    )
    (to_policy,) = slopes(jnp.ones_like(losses))
    return np.asarray(losses), np.asarray(to_policy)


def completions_of(pairs: Sequence[Pair]) -> list[Demonstration]:
    """The chosen completions, then the rejected ones."""
    return [pair.chosen for pair in pairs] + [pair.rejected for pair in pairs]


def mismatched(pairs: Sequence[Pair], max_len: int) -> list[Demonstration]:
    """Every completion combined with the prompt of the next pair, up to `max_len` tokens.

    KTO estimates the KL between policy and reference from these, chosen and rejected completions
    alike (section 4.1, https://arxiv.org/abs/2402.01306). A single pair gives none.
    """
    if len(pairs) < 2:
        return []

    others = completions_of([*pairs[1:], *pairs[:1]])
    return with_prompts(completions_of(pairs), others, max_len)


def pair_metrics(
    losses: np.ndarray, measured: PairLogps, cfg: PreferenceConfig
) -> dict[str, float]:
    """Means over pairs. The rewards are β times what `preference.loss` compares.

    For losses with a reference that is β log π / π_ref (DPO, eq. 5).
    """
    rewards = cfg.beta * np.asarray(log_ratios(cfg.loss, measured, cfg))
    return preference_metrics(losses, *np.split(rewards, 2))


def preference_metrics(
    losses: np.ndarray, chosen: np.ndarray, rejected: np.ndarray
) -> dict[str, float]:
    """Means over pairs, of the losses and of the rewards of the completions."""
    return {
        "preference/loss": float(np.mean(losses)),
        "preference/accuracy": float(np.mean(chosen > rejected)),
        "preference/margin": float(np.mean(chosen - rejected)),
        "preference/reward_chosen": float(np.mean(chosen)),
        "preference/reward_rejected": float(np.mean(rejected)),
    }


def _maker(
    renderer: ChatRenderer, cfg: RunConfig, *, stop: Sequence[int], images: ImageReader | None
) -> ItemMaker[Pair | Labelled]:
    labels = cfg.preference.loss in LABELLED_LOSSES
    return pair_maker(renderer, cfg.data, stop=stop, takes_labels=labels, images=images)


DPO = OfflineObjective(
    maker=_maker,
    make_samples=make_samples,
    evaluate=evaluate,
    aggregation="seq_mean_token_sum",
    workload=lambda cfg: OfflineWorkload(
        responses_per_example=2, scores_policy=True, has_reference=cfg.preference.has_reference
    ),
    unused_keys=(*UNUSED_SECTIONS, "preference.margin_weight", "preference.center_coef"),
    metric_names={"loss/entropy": "loss/entropy"},
)
