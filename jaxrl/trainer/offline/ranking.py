"""Training a reward model: a score for each answer, such that the chosen one of a pair has the higher one."""

import dataclasses
from collections.abc import Sequence

import jax.numpy as jnp
import numpy as np

from jaxrl.algorithms.preference import PairLoss, advantages, bradley_terry
from jaxrl.data.preferences import Pair, load_pairs
from jaxrl.planner.programs import OfflineWorkload
from jaxrl.trainer.offline.offline import IDLE, Lesson, Offline
from jaxrl.trainer.offline.preference import answers_of, preference_metrics
from jaxrl.trainer.scoring import last_scores, scored_sequence
from jaxrl.types import Demonstration, TrainingSample

Numbers = np.ndarray


def rank(run: Offline, pairs: Sequence[Pair]) -> tuple[list[TrainingSample], dict[str, float]]:
    """Both answers of each pair as sequences with the score that the learner is to move theirs to.

    The gradient of a loss of scores is that of the value loss (V - R)² / 2 with R = V - dL/dV; the loss of the next
    update is that one, so a pair need not lie in one micro-batch and the learner knows nothing of pairs.
    """
    loss, chosen, rejected = measure(run, pairs)
    _, up, down = advantages(loss, jnp.asarray(chosen), jnp.asarray(rejected))
    # The learner divides by answers, of which a pair has two.
    aims = np.concatenate([chosen, rejected]) + 2 * np.concatenate([up, down])
    answers = [_whole(r) for r in answers_of(pairs)]
    answers = [
        dataclasses.replace(r, returns=np.array([aim], np.float32))
        for r, aim in zip(answers, aims.tolist(), strict=True)
    ]
    return answers, preference_metrics(1.0, loss, chosen, rejected)


def judge(run: Offline, pairs: Sequence[Pair]) -> dict[str, float]:
    """val/loss, val/accuracy, val/margin and the mean scores of both sides."""
    metrics = preference_metrics(1.0, *measure(run, pairs))
    return {f"val/{name.split('/')[1]}": value for name, value in metrics.items()}


def measure(run: Offline, pairs: Sequence[Pair]) -> tuple[PairLoss, Numbers, Numbers]:
    """(the loss with its margins, scores of the chosen answers, of the rejected ones)."""
    assert run.values is not None
    with run.timed("values"):
        answers = [_whole(r) for r in answers_of(pairs)]
        scores = last_scores(run.values, run.state.params, answers, run.check_stop)
    margins = run.cfg.preference.margin_weight * np.array(
        [pair.margin for pair in pairs], np.float32
    )

    def loss(chosen, rejected):
        return bradley_terry(chosen, rejected, margin=jnp.asarray(margins))

    return loss, scores[: len(pairs)], scores[len(pairs) :]


def _whole(answer: Demonstration) -> TrainingSample:
    return scored_sequence(np.concatenate([answer.prompt_tokens, answer.tokens]), answer.id)


RANKING = Lesson(
    load=load_pairs,
    teach=rank,
    judge=judge,
    aggregation="seq_mean_token_sum",
    given=OfflineWorkload(
        responses_per_example=2, scores_policy=False, has_reference=False, heads=("score",)
    ),
    idle=(
        *IDLE,
        "learner.router_aux_coef",
        "preference.loss",
        "preference.beta",
        "preference.label_smoothing",
        "preference.chosen_weight",
        "preference.rejected_weight",
    ),
    logged={},
)
