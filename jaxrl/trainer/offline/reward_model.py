"""Reward modelling: trains scores that rank completions, of steps with labels, or of ratings."""

import dataclasses
from collections.abc import Sequence

import jax.numpy as jnp
import numpy as np

from jaxrl.algorithms.losses.preference import PairLoss, advantages, bradley_terry, centering
from jaxrl.config.keys import PreferenceConfig, RunConfig
from jaxrl.data.chat.encoding import ChatRenderer
from jaxrl.data.images.reader import ImageReader
from jaxrl.data.items import ItemMaker
from jaxrl.data.preferences import Labelled, Pair, pair_maker
from jaxrl.learner.reward_model import last_scores, to_sequence
from jaxrl.planner.programs import OfflineWorkload
from jaxrl.trainer.offline import ratings, steps
from jaxrl.trainer.offline.dpo import completions_of, preference_metrics
from jaxrl.trainer.offline.objective import UNUSED_SECTIONS, OfflineObjective, OfflineRun
from jaxrl.types import TrainingSample


def make_samples(
    run: OfflineRun, pairs: Sequence[Pair]
) -> tuple[list[TrainingSample], dict[str, float]]:
    """Both completions of each pair as samples, with target scores as `returns`.

    A loss L of scores has the gradient of the value loss (V - R)² / 2 with R = V - dL/dV. The
    update minimizes the value loss, so a pair may be split over micro-batches.
    """
    loss, chosen, rejected = measure(run, pairs)
    losses, up, down = advantages(loss, jnp.asarray(chosen), jnp.asarray(rejected))
    # The learner divides by the number of completions; a pair has two.
    targets = np.concatenate([chosen, rejected]) + 2 * np.concatenate([up, down])
    samples = [to_sequence(r) for r in completions_of(pairs)]
    samples = [
        dataclasses.replace(r, returns=np.array([target], np.float32))
        for r, target in zip(samples, targets.tolist(), strict=True)
    ]
    return samples, preference_metrics(np.asarray(losses), chosen, rejected)


def evaluate(run: OfflineRun, pairs: Sequence[Pair]) -> dict[str, float]:
    """val/loss, val/accuracy, val/margin, val/reward_chosen and val/reward_rejected."""
    loss, chosen, rejected = measure(run, pairs)
    metrics = preference_metrics(
        np.asarray(loss(jnp.asarray(chosen), jnp.asarray(rejected))), chosen, rejected
    )
    return {f"val/{name.split('/')[1]}": value for name, value in metrics.items()}


def measure(run: OfflineRun, pairs: Sequence[Pair]) -> tuple[PairLoss, np.ndarray, np.ndarray]:
    """(loss with margins, scores of the chosen completions, scores of the rejected ones)."""
    assert run.core.learner.value_scorer is not None
    with run.core.clock.timed("values"):
        samples = [to_sequence(r) for r in completions_of(pairs)]
        scores = last_scores(
            run.core.learner.value_scorer, run.core.state.params, samples, run.core.check_stop
        )
    cfg = run.core.cfg.preference
    margins = cfg.margin_weight * np.array([pair.margin for pair in pairs], np.float32)

    def loss(chosen, rejected):
        ranking = bradley_terry(chosen, rejected, margin=jnp.asarray(margins))
        return ranking + cfg.center_coef * centering(chosen, rejected)

    return loss, scores[: len(pairs)], scores[len(pairs) :]


def _maker(
    renderer: ChatRenderer, cfg: RunConfig, *, stop: Sequence[int], images: ImageReader | None
) -> ItemMaker[Pair | Labelled]:
    steps.refuse_images(images)
    return pair_maker(renderer, cfg.data, stop=stop)


UNUSED_PREFERENCES = tuple(
    f"preference.{field.name}"
    for field in dataclasses.fields(PreferenceConfig)
    if field.name not in ("margin_weight", "center_coef")
)
PAIRS = OfflineObjective(
    maker=_maker,
    make_samples=make_samples,
    evaluate=evaluate,
    aggregation="seq_mean_token_sum",
    workload=lambda cfg: OfflineWorkload(
        responses_per_example=2, scores_policy=False, has_reference=False, heads=("score",)
    ),
    unused_keys=(
        *UNUSED_SECTIONS,
        "learner.router_aux_coef",
        "learner.router_bias_rate",
        *UNUSED_PREFERENCES,
    ),
    metric_names={},
)
STEPS = dataclasses.replace(
    PAIRS,
    maker=steps.maker,
    make_samples=steps.make_samples,
    evaluate=steps.evaluate,
    aggregation="token_mean",
    workload=lambda cfg: dataclasses.replace(PAIRS.workload(cfg), responses_per_example=1),
    unused_keys=(*PAIRS.unused_keys, "preference"),
    used_keys=lambda cfg: ("reward_model.objective", "reward_model.step_separator"),
)
RATINGS = dataclasses.replace(
    PAIRS,
    maker=ratings.maker,
    make_samples=ratings.make_samples,
    evaluate=ratings.evaluate,
    workload=lambda cfg: dataclasses.replace(
        PAIRS.workload(cfg), responses_per_example=1, labels=cfg.reward_model.labels
    ),
    unused_keys=(*PAIRS.unused_keys, "preference"),
    used_keys=lambda cfg: ("reward_model.objective", "reward_model.attributes"),
)


def score_objective(cfg: RunConfig) -> OfflineObjective:
    """The objective of reward_model.objective."""
    return {"pairs": PAIRS, "steps": STEPS, "attributes": RATINGS}[cfg.reward_model.objective]
