"""Optimizer of a run: schedule, clipping, and AdamW or SGD as an optax transformation."""

import dataclasses

import jax.numpy as jnp
import optax
from jaxtyping import Array, Float

from jaxrl.algorithms.table import lookup
from jaxrl.config.keys import LearnerConfig
from jaxrl.models.spec import map_specs
from jaxrl.types import Tree


@dataclasses.dataclass(frozen=True)
class Optimizer:
    """Optax transformation with its schedule, gradient clipping and averaging.

    A gradient is scaled by `clip_factor`, then goes through the transformation.
    """

    transform: optax.GradientTransformation
    lr: optax.Schedule  # optimizer steps taken so far -> learning rate of the next one
    clip_norm: float  # 0 = off
    ema: float = 0.0  # decay of the moving average of the weights per step; 0 = no average


def make_optimizer(cfg: LearnerConfig, total_updates: int, specs: Tree) -> Optimizer:
    """AdamW (https://arxiv.org/abs/1711.05101) or plain SGD from the learner's config.

    `specs` is the model's parameter table: weight decay applies to matrices only, not to biases and
    norms.
    """
    lr = lr_schedule(cfg, total_updates)
    adamw = optax.adamw(
        lr, b1=cfg.b1, b2=cfg.b2, eps=cfg.eps, weight_decay=cfg.weight_decay, mask=matrices(specs)
    )
    known = {"adamw": adamw, "sgd": optax.sgd(lr)}
    transform = lookup(known, cfg.optimizer, "learner.optimizer")
    return Optimizer(transform, lr, cfg.clip_norm, cfg.ema)


def clip_factor(norm: Float[Array, ""], clip_norm: float) -> Float[Array, ""]:
    """min(1, clip_norm / norm) (https://arxiv.org/abs/1211.5063, algorithm 1); 1 if clip_norm is 0.

    A scalar, which is fused into the division by the loss's weight. optax's clipping would write
    the whole gradient tree once more.
    """
    one = jnp.ones_like(norm)
    return one if clip_norm == 0 else jnp.minimum(one, clip_norm / norm)


def matrices(specs: Tree) -> Tree:
    """True for parameters that are matrices in the Hugging Face file, whatever their shape here."""
    return map_specs(lambda spec: len(spec.hf_shape) >= 2, specs)


def lr_schedule(cfg: LearnerConfig, total_updates: int) -> optax.Schedule:
    """Linear warm-up, then constant, or linear or cosine decay to lr * min_lr_ratio.

    The warm-up is lr (k + 1) / warmup_steps, so that update 0 has a positive rate. The decay ends
    at `total_updates`. Raises ValueError if warm-up leaves no update to a decaying schedule.
    """
    low, warmup = cfg.min_lr_ratio, cfg.warmup_steps
    shapes = {
        "constant": lambda done: jnp.ones_like(done),
        "linear": lambda done: 1.0 - (1.0 - low) * done,
        "cosine": lambda done: low + (1.0 - low) * 0.5 * (1.0 + jnp.cos(jnp.pi * done)),
    }
    shape = lookup(shapes, cfg.lr_schedule, "learner.lr_schedule")
    if cfg.lr_schedule != "constant" and total_updates <= warmup:
        raise ValueError(
            f"the {cfg.lr_schedule} schedule has {total_updates} updates and all of them are "
            f"warm-up (config.learner.warmup_steps = {warmup}); set fewer, or "
            "lr_schedule='constant'"
        )

    def lr(k):
        done = jnp.clip((k - warmup) / max(total_updates - warmup, 1), 0.0, 1.0)
        return cfg.lr * jnp.where(k < warmup, (k + 1) / max(warmup, 1), shape(done))

    return lr
