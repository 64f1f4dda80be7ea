"""Preference optimization (DPO, IPO, KTO) as an objective of the RL learner.

The equations are in algorithms/losses/preference.py.
"""

from collections.abc import Sequence

import jax.numpy as jnp
import numpy as np

from jaxrl.algorithms.losses.preference import PairLoss, advantages, dpo, ipo, kto
from jaxrl.algorithms.table import lookup
from jaxrl.config.keys import PreferenceConfig, RunConfig
from jaxrl.data.chat.encoding import ChatRenderer
from jaxrl.data.demonstrations import to_sample
from jaxrl.data.images.reader import ImageReader
from jaxrl.data.items import ItemMaker
from jaxrl.data.preferences import Labelled, Pair, pair_maker
from jaxrl.planner.programs import OfflineWorkload
from jaxrl.trainer.offline.objective import UNUSED_SECTIONS, OfflineObjective, OfflineRun
from jaxrl.trainer.offline.unpaired import (
    as_labelled,
    labelled_metrics,
    labelled_samples,
    log_ratios,
    measure_labelled,
    with_prompts,
)
from jaxrl.types import Demonstration, TrainingSample


def make_samples(
    run: OfflineRun, items: Sequence[Pair | Labelled]
) -> tuple[list[TrainingSample], dict[str, float]]:
    """Both completions of each pair as samples, or that of each row with a label.

    Their advantages give the gradient of the configured loss at the current weights.
    """
    if (pairs := all_pairs(items)) is None:
        return labelled_samples(run, as_labelled(items))
    cfg, completions = run.core.cfg.preference, completions_of(pairs)
    loss, chosen, rejected = measure(run, pairs)
    _, up, down = advantages(loss, jnp.asarray(chosen), jnp.asarray(rejected))
    # The learner divides by the number of completions; a pair has two.
    each = 2 * np.concatenate([up, down]) / divisors(completions, cfg)
    samples = [to_sample(d, a) for d, a in zip(completions, each.tolist(), strict=True)]
    return samples, preference_metrics(cfg.beta, loss, chosen, rejected)


def evaluate(run: OfflineRun, items: Sequence[Pair | Labelled]) -> dict[str, float]:
    """val/loss, val/accuracy, val/margin; of pairs val/reward_chosen and val/reward_rejected."""
    if (pairs := all_pairs(items)) is None:
        metrics = labelled_metrics(measure_labelled(run, as_labelled(items)))
    else:
        metrics = preference_metrics(run.core.cfg.preference.beta, *measure(run, pairs))
    return {f"val/{name.split('/')[1]}": value for name, value in metrics.items()}


def all_pairs(items: Sequence[Pair | Labelled]) -> list[Pair] | None:
    """The items, if all are pairs."""
    pairs = [item for item in items if isinstance(item, Pair)]
    return pairs if len(pairs) == len(items) else None


def measure(run: OfflineRun, pairs: Sequence[Pair]) -> tuple[PairLoss, np.ndarray, np.ndarray]:
    """(loss, log ratios of the chosen completions, log ratios of the rejected completions).

    A log ratio is log π / π_ref, summed over the tokens of a completion, or their mean if ipo has
    that reduction.
    """
    cfg, completions = run.core.cfg.preference, completions_of(pairs)
    if cfg.loss == "kto":
        completions += mismatched(pairs, run.core.cfg.data.max_len)
    ratio = log_ratios(run, completions) / divisors(completions, cfg)
    chosen, rejected, mismatch = np.split(ratio, [len(pairs), 2 * len(pairs)])
    kl = max(float(mismatch.mean()), 0.0) if len(mismatch) else 0.0
    return pair_loss(cfg, kl), chosen, rejected


def divisors(completions: Sequence[Demonstration], cfg: PreferenceConfig) -> np.ndarray:
    """The divisor of each completion's log ratio: 1, or its number of loss tokens."""
    if cfg.ipo_reduction == "mean":
        return np.array([d.n_loss_tokens for d in completions], np.float32)
    return np.ones(len(completions), np.float32)


def completions_of(pairs: Sequence[Pair]) -> list[Demonstration]:
    """The chosen completions, then the rejected ones."""
    return [pair.chosen for pair in pairs] + [pair.rejected for pair in pairs]


def pair_loss(cfg: PreferenceConfig, kl: float) -> PairLoss:
    """The configured loss; only KTO uses `kl`."""
    weights = dict(chosen_weight=cfg.chosen_weight, rejected_weight=cfg.rejected_weight)
    known: dict[str, PairLoss] = {
        "dpo": lambda c, r: dpo(c, r, beta=cfg.beta, label_smoothing=cfg.label_smoothing),
        "ipo": lambda c, r: ipo(c, r, beta=cfg.beta),
        "kto": lambda c, r: kto(c, r, beta=cfg.beta, kl=kl, **weights),
    }
    return lookup(known, cfg.loss, "preference.loss")


def mismatched(pairs: Sequence[Pair], max_len: int) -> list[Demonstration]:
    """Every completion combined with the prompt of the next pair, up to `max_len` tokens.

    KTO estimates the KL between policy and reference from these, chosen and rejected completions
    alike (section 4.1, https://arxiv.org/abs/2402.01306). A single pair gives none.
    """
    if len(pairs) < 2:
        return []

    others = completions_of([*pairs[1:], *pairs[:1]])
    return with_prompts(completions_of(pairs), others, max_len)


def preference_metrics(
    beta: float, loss: PairLoss, chosen: np.ndarray, rejected: np.ndarray
) -> dict[str, float]:
    """Means over pairs.

    The reward of a completion is β log π / π_ref (DPO, eq. 5). For a reward model it is the score,
    with β = 1.
    """
    return {
        "preference/loss": float(jnp.mean(loss(jnp.asarray(chosen), jnp.asarray(rejected)))),
        "preference/accuracy": float(np.mean(chosen > rejected)),
        "preference/margin": beta * float(np.mean(chosen - rejected)),
        "preference/reward_chosen": beta * float(np.mean(chosen)),
        "preference/reward_rejected": beta * float(np.mean(rejected)),
    }


def _maker(
    renderer: ChatRenderer, cfg: RunConfig, *, stop: Sequence[int], images: ImageReader | None
) -> ItemMaker[Pair | Labelled]:
    labels = cfg.preference.loss == "kto"
    return pair_maker(renderer, cfg.data, stop=stop, takes_labels=labels, images=images)


DPO = OfflineObjective(
    maker=_maker,
    make_samples=make_samples,
    evaluate=evaluate,
    aggregation="seq_mean_token_sum",
    workload=OfflineWorkload(responses_per_example=2, scores_policy=True, has_reference=True),
    unused_keys=(*UNUSED_SECTIONS, "preference.margin_weight"),
    metric_names={"loss/entropy": "loss/entropy"},
)
