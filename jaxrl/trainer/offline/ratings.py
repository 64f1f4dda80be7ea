"""Reward models of several attributes: trains one score for each on the ratings of answers."""

import dataclasses
from collections.abc import Sequence

import numpy as np

from jaxrl.algorithms.losses.ratings import rating_errors
from jaxrl.config.keys import RunConfig
from jaxrl.data.chat.encoding import ChatRenderer
from jaxrl.data.images.reader import ImageReader
from jaxrl.data.items import ItemMaker
from jaxrl.data.ratings import RatedAnswer, rating_maker
from jaxrl.learner.reward_model import last_scores, to_sequence
from jaxrl.trainer.offline.objective import OfflineRun
from jaxrl.trainer.offline.steps import refuse_images
from jaxrl.types import TrainingSample


def make_samples(
    run: OfflineRun, items: Sequence[RatedAnswer]
) -> tuple[list[TrainingSample], dict[str, float]]:
    """The answers as samples, with target scores after the last token as `returns`.

    They are R = s - dL/ds, so that the value loss (s - R)² / 2 has the gradient of the loss L, the
    mean of the squared errors of all ratings. The learner divides by the number of answers.
    """
    scores, ratings = measure(run, items)
    errors, slope = rating_errors(scores, ratings)
    n_ratings = int(np.sum(~np.isnan(ratings)))
    targets = (scores - slope * len(items) / n_ratings).astype(np.float32)
    samples = []
    for item, score, target in zip(items, scores, targets, strict=True):
        shown = slice(None) if len(target) > 1 else 0  # one label has no axis
        sample = to_sequence(item.completion)
        samples.append(
            dataclasses.replace(sample, values=score[None, shown], returns=target[None, shown])
        )
    return samples, {"ratings/loss": float(errors.sum() / n_ratings)}


def evaluate(run: OfflineRun, items: Sequence[RatedAnswer]) -> dict[str, float]:
    """val/loss over all ratings, and val/loss_ATTRIBUTE over those of each attribute."""
    scores, ratings = measure(run, items)
    errors, _ = rating_errors(scores, ratings)
    n_ratings = np.sum(~np.isnan(ratings), axis=0)
    found = {"val/loss": float(errors.sum() / n_ratings.sum())}
    named = zip(run.core.cfg.reward_model.attributes, errors.sum(axis=0), n_ratings, strict=True)
    return found | {f"val/loss_{name}": float(total / n) for name, total, n in named if n}


def measure(run: OfflineRun, items: Sequence[RatedAnswer]) -> tuple[np.ndarray, np.ndarray]:
    """(scores at the current weights, ratings), float32 [n_answers, n_attributes]."""
    core = run.core
    assert core.learner.value_scorer is not None
    with core.clock.timed("values"):
        scores = last_scores(
            core.learner.value_scorer,
            core.state.params,
            [to_sequence(item.completion) for item in items],
            core.check_stop,
        )
    return scores.reshape(len(items), -1), np.stack([item.ratings for item in items])


def maker(
    renderer: ChatRenderer, cfg: RunConfig, *, stop: Sequence[int], images: ImageReader | None
) -> ItemMaker[RatedAnswer]:
    """Makes the items of rows. Raises ValueError with data.images."""
    refuse_images(images)
    return rating_maker(renderer, cfg.data, stop=stop, attributes=cfg.reward_model.attributes)
