"""A loss or gradient that is not finite: keep the evidence, say where, stop."""

import dataclasses
from pathlib import Path

import numpy as np

from jaxrl.trainer.experience import MiniBatch
from sharding import hosts


class NonFiniteError(FloatingPointError):
    """The loss or its gradient was not finite. The weights are still those of before the update."""


def check_finite(metrics: dict[str, float], mini: MiniBatch, folder: Path, step: int) -> None:
    """Writes the mini-batch to `folder` and raises NonFiniteError if an update was not finite."""
    if not metrics["optim/nonfinite"]:
        return
    path = folder / f"nonfinite_step_{step}.npz"
    arrays = {
        f"{i}/{field.name}": np.asarray(getattr(packed.batch, field.name))
        for i, packed in enumerate(mini.packed)
        for field in dataclasses.fields(packed.batch)
    }
    if hosts.is_main_process():
        np.savez_compressed(path, allow_pickle=False, **arrays)
    wrong = [name for name, value in metrics.items() if not np.isfinite(value)]
    raise NonFiniteError(
        f"step {step}: {', '.join(sorted(wrong))} not finite; the update was not applied and its batch is in "
        f"{path}. Look at the batch, lower config.learner.lr or config.learner.clip_norm in a new run, or go "
        "on in this one with --config.check_finite=False, which passes over such updates"
    )
