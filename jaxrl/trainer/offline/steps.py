"""Process reward models: trains scores of the steps of answers on their labels."""

import dataclasses
from collections.abc import Sequence

import numpy as np

from jaxrl.algorithms.losses.step_labels import step_cross_entropy
from jaxrl.config.keys import RunConfig
from jaxrl.data.chat.encoding import ChatRenderer
from jaxrl.data.images.reader import ImageReader
from jaxrl.data.items import ItemMaker
from jaxrl.data.steps import LabelledSteps, step_maker
from jaxrl.learner.reward_model import scored_sequence, sequence_scores
from jaxrl.trainer.offline.objective import OfflineRun
from jaxrl.types import TrainingSample


def make_samples(
    run: OfflineRun, items: Sequence[LabelledSteps]
) -> tuple[list[TrainingSample], dict[str, float]]:
    """The answers as samples, with target scores at the ends of steps as `returns`.

    They are R = s - dL/ds, so that the value loss (s - R)² / 2 has the gradient of the loss L. The
    learner divides by the number of steps.
    """
    scores = measure(run, items)
    samples = []
    for item, score in zip(items, scores, strict=True):
        _, slope = step_cross_entropy(score, item.labels)
        sample = to_sequence(item)
        targets = np.zeros(len(sample.tokens), np.float32)
        targets[sample.loss_mask] = score - slope
        samples.append(dataclasses.replace(sample, returns=targets))
    return samples, {f"steps/{name}": x for name, x in step_metrics(items, scores).items()}


def evaluate(run: OfflineRun, items: Sequence[LabelledSteps]) -> dict[str, float]:
    """val/loss, val/accuracy and val/first_error."""
    found = step_metrics(items, measure(run, items))
    return {f"val/{name}": value for name, value in found.items()}


def measure(run: OfflineRun, items: Sequence[LabelledSteps]) -> list[np.ndarray]:
    """Scores of the steps of each answer at the current weights, float32 [n_steps]."""
    core = run.core
    assert core.learner.value_scorer is not None
    with core.clock.timed("values"):
        return sequence_scores(
            core.learner.value_scorer,
            core.state.params,
            [to_sequence(item) for item in items],
            core.check_stop,
        )


def step_metrics(items: Sequence[LabelledSteps], scores: Sequence[np.ndarray]) -> dict[str, float]:
    """Means over steps of the loss and of the right predictions, and over answers of `first_error`.

    `first_error` is the share of answers whose first wrong step, or that there is none, is found
    (ProcessBench, https://arxiv.org/abs/2412.06559, section 3).
    """
    labels = np.concatenate([item.labels for item in items])
    flat = np.concatenate(list(scores))
    pairs = zip(items, scores, strict=True)
    found = [_first(item.labels < 0.5) == _first(score <= 0) for item, score in pairs]
    return {
        "loss": float(np.mean(step_cross_entropy(flat, labels)[0])),
        "accuracy": float(np.mean((flat > 0) == (labels >= 0.5))),
        "first_error": float(np.mean(found)),
    }


def to_sequence(item: LabelledSteps) -> TrainingSample:
    """Prompt and answer as one sequence, with a score at the end of each step."""
    d = item.completion
    ends = len(d.prompt_tokens) + np.flatnonzero(d.loss_mask)
    return scored_sequence(np.concatenate([d.prompt_tokens, d.tokens]), item.id, ends)


def maker(
    renderer: ChatRenderer, cfg: RunConfig, *, stop: Sequence[int], images: ImageReader | None
) -> ItemMaker[LabelledSteps]:
    """Makes the items of rows. Raises ValueError with data.images."""
    refuse_images(images)
    separator = cfg.reward_model.step_separator
    return step_maker(renderer, cfg.data, stop=stop, separator=separator)


def refuse_images(images: ImageReader | None) -> None:
    """Raises ValueError with data.images."""
    if images is not None:
        raise ValueError(
            "config.data.images: reward models of images are not supported, because they are "
            "exported as text classifiers. Set data.images=False, or learn preferences with "
            "jaxrl.dpo"
        )


def _first(wrong: np.ndarray) -> int:
    """Index of the first true element; -1 without one."""
    return int(wrong.argmax()) if wrong.any() else -1
