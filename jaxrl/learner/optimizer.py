"""The optimizer of a run: schedule, clipping, and AdamW or SGD as an optax transformation."""

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
    """How a gradient becomes a step: scaled by `clip_factor`, then through the transformation."""

    transform: optax.GradientTransformation
    lr: optax.Schedule  # optimizer steps taken so far -> learning rate of the next one
    clip_norm: float  # 0 = off
    ema: float = 0.0  # how much of the average of the weights a step keeps; 0 = none is kept


def make_optimizer(cfg: LearnerConfig, total_updates: int, specs: Tree) -> Optimizer:
    """AdamW (https://arxiv.org/abs/1711.05101) or plain SGD; with learner.ema an average of its weights.

    `specs` is the model's parameter table: only its matrices decay, not biases and norms.
    """
    lr = lr_schedule(cfg, total_updates)
    adamw = optax.adamw(
        lr, b1=cfg.b1, b2=cfg.b2, eps=cfg.eps, weight_decay=cfg.weight_decay, mask=matrices(specs)
    )
    known = {"adamw": adamw, "sgd": optax.sgd(lr)}
    transform = lookup(known, cfg.optimizer, "learner.optimizer")
    return Optimizer(transform, lr, cfg.clip_norm, cfg.ema)


def clip_factor(norm: Float[Array, ""], clip_norm: float) -> Float[Array, ""]:
    """min(1, clip_norm / norm) (https://arxiv.org/abs/1211.5063, algorithm 1); 1 where clip_norm is 0.

    One number, so that it joins the division by the loss's weight: a gradient tree is never written
    again just to be scaled, as it is by optax's own clipping.
    """
    one = jnp.ones_like(norm)
    return one if clip_norm == 0 else jnp.minimum(one, clip_norm / norm)


def matrices(specs: Tree) -> Tree:
    """True at the parameters that are matrices in their Hugging Face file, however they lie here."""
    return map_specs(lambda spec: len(spec.hf_shape) >= 2, specs)


def lr_schedule(cfg: LearnerConfig, total_updates: int) -> optax.Schedule:
    """Linear warm-up, lr (k + 1) / warmup_steps, so that update 0 already learns; then from lr down to
    lr * min_lr_ratio at `total_updates`, by a line or half a cosine, or constant.

    Raises ValueError where a falling schedule has no update left after warm-up.
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
            f"the {cfg.lr_schedule} schedule has {total_updates} updates and all of them are warm-up "
            f"(config.learner.warmup_steps = {warmup}); set fewer, or lr_schedule='constant'"
        )

    def lr(k):
        done = jnp.clip((k - warmup) / max(total_updates - warmup, 1), 0.0, 1.0)
        return cfg.lr * jnp.where(k < warmup, (k + 1) / max(warmup, 1), shape(done))

    return lr
