"""Optimizer of a run: schedule, clipping, weight decay, and an optax transformation."""

import dataclasses
import functools

import jax
import jax.numpy as jnp
import numpy as np
import optax
from jaxtyping import Array, Float

from jaxrl.algorithms.table import lookup
from jaxrl.config.checks.optimizer import optimizer_options
from jaxrl.config.keys import LearnerConfig
from jaxrl.config.keys.optimizer import (
    OPTIMIZER_OPTIONS,
    AdafactorOptions,
    LionOptions,
    MuonOptions,
)
from jaxrl.config.schema import is_import_path
from jaxrl.learner.optimizers.adafactor import scale_by_adafactor
from jaxrl.learner.optimizers.blocks import check_blocks
from jaxrl.learner.optimizers.layerwise import Recipe
from jaxrl.learner.optimizers.moments import store_moments
from jaxrl.learner.optimizers.muon import scale_by_muon, split_specs
from jaxrl.learner.optimizers.patterns import lr_factors, weight_decays
from jaxrl.learner.optimizers.plugin import load_optimizer
from jaxrl.learner.zero import NO_ZERO, Zero, check_zero
from jaxrl.models.spec import is_spec
from jaxrl.types import Tree
from sharding import TRAIN, Rules


@dataclasses.dataclass(frozen=True)
class Optimizer:
    """Optax transformation with its schedule, gradient clipping and averaging.

    A gradient is scaled by `clip_factor`, then goes through the transformation.
    """

    transform: optax.GradientTransformation
    lr: optax.Schedule  # optimizer steps taken so far -> learning rate of the next one
    clip_norm: float  # 0 = off
    ema: float = 0.0  # decay of the moving average of the weights per step; 0 = no average
    master: bool = True  # keep float32 weights of narrower parameters; else round stochastically
    zero: Zero = NO_ZERO  # what replicas share of state and gradients
    # To build the transformation of a single layer; None if layers depend on each other.
    recipe: Recipe | None = dataclasses.field(default=None, compare=False)


def make_optimizer(
    cfg: LearnerConfig, total_updates: int, specs: Tree, rules: Rules = TRAIN
) -> Optimizer:
    """The optimizer of the learner's config; `specs` is the model's parameter table.

    `rules` shard the parameters.

    weights -= lr * factor * (direction + decay * weights), with `direction` by `cfg.optimizer`:
    adamw: m = b1 m + (1 - b1) g, v = b2 v + (1 - b2) g^2, of step t:
      m / (1 - b1^t) / (sqrt(v / (1 - b2^t)) + eps) (https://arxiv.org/abs/1711.05101)
    adafactor: optimizers/adafactor.py
    lion: sign(b1 m + (1 - b1) g), then m = b2 m + (1 - b2) g (https://arxiv.org/abs/2302.06675)
    muon: optimizers/muon.py
    sgd: g
    A transformation by import path computes lr * direction itself. Weight decay applies to matrices
    only, not to biases and norms, unless `cfg.weight_decays` says otherwise. Raises ValueError for
    an optimizer, option or pattern that does not exist.
    """
    lr, decays = lr_schedule(cfg, total_updates), weight_decays(cfg, specs)
    factors = lr_factors(cfg, specs)
    build = functools.partial(_transformation, cfg, lr)
    recipe = None
    if _has_independent_layers(cfg, specs):
        recipe = Recipe(
            build,
            specs,
            decays,
            factors,
            elementwise=_is_elementwise(cfg),
            needs_blocks=_needs_blocks(cfg),
        )
    return Optimizer(
        build(specs, decays, factors),
        lr,
        cfg.clip_norm,
        cfg.ema,
        cfg.master_weights,
        Zero(cfg.zero, rules),
        recipe,
    )


def _transformation(
    cfg: LearnerConfig, lr: optax.Schedule, specs: Tree, decays: Tree, factors: Tree | None
) -> optax.GradientTransformation:
    """The transformation of parameters like `specs`, with their weight decays and factors."""
    if is_import_path(cfg.optimizer):
        steps = [load_optimizer(cfg.optimizer, lr, specs), _decay_by_schedule(decays, lr)]
    else:
        steps = [_direction(cfg, specs), _decay(decays), optax.scale_by_learning_rate(lr)]
    if factors is not None:
        steps.append(optax.stateless(lambda updates, _: jax.tree.map(_times, updates, factors)))
    return optax.chain(*steps)


def _has_independent_layers(cfg: LearnerConfig, specs: Tree) -> bool:
    """Whether a layer's step is the same alone as together with all others.

    A plug-in may combine them, and stochastic rounding draws its bits per stacked array.
    """
    stacked = any("{layer}" in spec.hf for spec in jax.tree.leaves(specs, is_leaf=is_spec))
    rounds = cfg.moment_dtype == "bfloat16" or not cfg.master_weights
    return not is_import_path(cfg.optimizer) and not (stacked and rounds)


def _is_elementwise(cfg: LearnerConfig) -> bool:
    """Whether some rows of a table take the same step alone.

    Adafactor divides by sums over rows, and stochastic rounding draws its bits per array. Muon
    leaves tables to AdamW.
    """
    rounds = cfg.moment_dtype == "bfloat16" or not cfg.master_weights
    return cfg.optimizer.partition("?")[0] != "adafactor" and not rounds


def _needs_blocks(cfg: LearnerConfig) -> bool:
    """Whether a step at once needs more memory than the state and the gradients.

    The scale of an int8 block follows from all of its new moments in float32, and Newton-Schulz
    reads whole matrices.
    """
    return cfg.moment_dtype == "int8" or cfg.optimizer.partition("?")[0] == "muon"


def check_opt_state(cfg: LearnerConfig, specs: Tree, rules: Rules) -> None:
    """Raises ValueError if the state cannot be stored as configured, on the current mesh."""
    if cfg.zero:
        check_zero(specs, rules)
        rules = rules.over_replicas()
    if cfg.moment_dtype == "int8":
        check_blocks(specs, rules)


def _direction(cfg: LearnerConfig, specs: Tree) -> optax.GradientTransformation:
    """The built-in optimizer without learning rate and weight decay."""
    name = cfg.optimizer.partition("?")[0]
    lookup(OPTIMIZER_OPTIONS, name, "learner.optimizer")
    chosen, errors = optimizer_options(cfg.optimizer)
    if errors:
        raise ValueError("; ".join(errors))
    adam = optax.scale_by_adam(b1=cfg.b1, b2=cfg.b2, eps=cfg.eps)
    match chosen:
        case AdafactorOptions():
            return scale_by_adafactor(specs, chosen)
        case LionOptions():
            lion = optax.scale_by_lion(b1=chosen.b1, b2=chosen.b2)
            return store_moments(lion, cfg.moment_dtype, specs)
        case MuonOptions():
            matrices, others, names = split_specs(specs)
            muon = store_moments(scale_by_muon(matrices, chosen), cfg.moment_dtype, matrices)
            adam = store_moments(adam, cfg.moment_dtype, others)
            # The tree of names is a Decoder, which optax would call.
            return optax.partition({"muon": muon, "adamw": adam}, lambda _: names)
    return optax.identity() if name == "sgd" else store_moments(adam, cfg.moment_dtype, specs)


def _decay(decays: Tree) -> optax.GradientTransformation:
    """Adds decay * weights to the direction."""

    def add(updates: Tree, weights: Tree | None) -> Tree:
        return jax.tree.map(_plus_decayed, updates, weights, decays)

    return optax.stateless(add)


def _decay_by_schedule(decays: Tree, lr: optax.Schedule) -> optax.GradientTransformation:
    """Adds -lr * decay * weights to an update that has the learning rate already."""

    def update(updates: Tree, count: Array, weights: Tree | None = None):
        rate = -lr(count)  # pyright: ignore[reportOperatorIssue]
        add = functools.partial(_plus_decayed, rate=rate)
        return jax.tree.map(add, updates, weights, decays), count + 1

    return optax.GradientTransformation(lambda _: jnp.zeros((), jnp.int32), update)  # pyright: ignore[reportArgumentType]


def _plus_decayed(
    update: jax.Array,
    weight: jax.Array,
    decay: float | np.ndarray,
    rate: float | jax.Array = 1.0,
) -> jax.Array:
    none = isinstance(decay, float) and decay == 0.0
    return update if none else update + rate * (decay * weight)


def _times(update: jax.Array, factor: float | np.ndarray) -> jax.Array:
    return update * factor


def clip_factor(norm: Float[Array, ""], clip_norm: float) -> Float[Array, ""]:
    """min(1, clip_norm / norm) (https://arxiv.org/abs/1211.5063, algorithm 1); 1 if clip_norm is 0.

    A scalar, which is fused into the division by the loss's weight. optax's clipping would write
    the whole gradient tree once more.
    """
    one = jnp.ones_like(norm)
    return one if clip_norm == 0 else jnp.minimum(one, clip_norm / norm)


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
