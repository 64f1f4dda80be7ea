"""Training of several adapters of one base model: gradients, Adam, weights and moments of each."""

import dataclasses
import functools
import math
from collections.abc import Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import optax
from jax.typing import DTypeLike

from jaxrl.api.losses import LOSSES, Options
from jaxrl.config.keys import RunConfig
from jaxrl.data.packing import Packed, gather, pack_samples
from jaxrl.learner.loss import score_tokens
from jaxrl.learner.step import put_batch, take_tokens
from jaxrl.models.config import LoRA
from jaxrl.models.decoder import Decoder
from jaxrl.models.lora import add_adapters, combine, split
from jaxrl.types import Batch, TrainingSample, Tree
from sharding import Rules


@dataclasses.dataclass(frozen=True)
class AdamParams:
    """The hyper-parameters of one optimizer step; the defaults are those of the package tinker."""

    learning_rate: float = 1e-4
    beta1: float = 0.9
    beta2: float = 0.95
    eps: float = 1e-12
    weight_decay: float = 0.0  # decoupled: AdamW
    grad_clip_norm: float = 0.0  # 0 = no clipping


@dataclasses.dataclass
class TrainedAdapter:
    """An adapter in training. Its arrays are float32 on the devices."""

    weights: Tree  # as `split` gives them, with the arrays of the base:
    frozen: Tree
    moments: Any  # optax.ScaleByAdamState, whose count is that of the steps
    gradient: Tree | None = None  # of the summed loss since the last step; None: no call since then

    @property
    def n_steps(self) -> int:
        return int(self.moments.count)

    def model(self, arrays: Tree) -> Decoder:
        """The model with these arrays in place of the weights, for example moments."""
        return combine(arrays, self.frozen)


@dataclasses.dataclass(frozen=True)
class Trainer:
    """The programs of training, for any adapter of `base`; call on the device's thread.

    The base is shared by all adapters and by the engine. Gradients are those of sums over tokens.
    An adapter is trained in separate calls, so that its numbers do not depend on other adapters.
    """

    cfg: RunConfig
    base: Decoder
    rules: Rules
    dtype: DTypeLike  # of activations; adapters are rounded to it in the forward pass

    def create(self, lora: LoRA, seed: int) -> TrainedAdapter:
        """A new adapter, which does not change the base model."""
        model = add_adapters(self.base, lora, seed=seed, rules=self.rules, dtype=jnp.float32)
        weights, frozen = split(model)
        return TrainedAdapter(weights, frozen, start_moments(weights))

    def forward_backward(
        self,
        adapter: TrainedAdapter,
        samples: Sequence[TrainingSample],
        targets: Sequence[np.ndarray],
        loss: str,
        options: Options,
        *,
        forward_only: bool,
    ) -> tuple[list[np.ndarray], float]:
        """(logprobs of the targets of each sequence, sum of the loss).

        Adds the gradient of the sum to the adapter's, except with `forward_only`. Micro-batches
        have the shapes of config.learner.
        """
        logps, losses, gradient = [], [], None if forward_only else adapter.gradient
        packed = pack_samples(samples, self.cfg, self.rules.n_shards("batch"))
        if gradient is None and not forward_only:
            gradient = jax.tree.map(jnp.zeros_like, adapter.weights)
        options_of = dict(loss=loss, options=options, cfg=self.cfg, rules=self.rules)
        for micro in packed:
            batch = put_batch(with_targets(micro, targets), self.rules)
            arguments = adapter.weights, adapter.frozen, batch
            if gradient is None:
                total, logp = _losses(*arguments, **options_of, dtype=self.dtype)
            else:
                gradient, total, logp = _accumulate(
                    gradient, *arguments, **options_of, dtype=self.dtype
                )
            logps.append(take_tokens(logp, self.rules))
            losses.append(float(total))
        if not forward_only:
            adapter.gradient = gradient
        return gather(logps, packed), math.fsum(losses)

    def optim_step(self, adapter: TrainedAdapter, params: AdamParams) -> dict[str, float]:
        """One step of AdamW with the gradient so far, which it clears. Returns metrics.

        Raises ValueError if there is no gradient, or if it is not finite; it is then cleared, and
        weights and moments stay as they are.
        """
        if adapter.gradient is None:
            raise ValueError("there is no gradient: call forward_backward before each optim_step")
        gradient, adapter.gradient = adapter.gradient, None
        weights, moments, norm = _adam_step(
            adapter.weights, adapter.moments, gradient, dataclasses.asdict(params)
        )
        if not math.isfinite(norm := float(norm)):
            raise ValueError(
                f"the gradient is not finite (norm {norm}); it is dropped and the weights stay as "
                "they were. Check logprobs, advantages and weights of the data"
            )
        adapter.weights, adapter.moments = weights, moments
        return {"optim/grad_norm": norm, "optim/lr": params.learning_rate}


def start_moments(weights: Tree) -> Any:
    return optax.scale_by_adam().init(weights)


def with_targets(micro: Packed, targets: Sequence[np.ndarray]) -> Batch:
    """The batch of a micro-batch with these targets in place of the next tokens."""
    placed = np.array(micro.batch.targets)
    for span in micro.spans:
        placed[span.row, span.start : span.start + span.length] = targets[span.item]
    return dataclasses.replace(micro.batch, targets=placed)


def _loss(
    weights: Tree,
    frozen: Tree,
    batch: Batch,
    *,
    loss: str,
    options: Options,
    cfg: RunConfig,
    rules: Rules,
    dtype: DTypeLike,
) -> tuple[jax.Array, jax.Array]:
    """(sum of the loss over the tokens of a micro-batch, logprobs [B, T] of its targets)."""
    model = combine(jax.tree.map(lambda w: w.astype(dtype), weights), frozen)
    logp = score_tokens(model, batch, cfg=cfg, rules=rules, remat=cfg.learner.remat)[0]
    per_token = LOSSES[loss].function(logp, batch, dict(options))
    return jnp.sum(jnp.where(batch.mask > 0, per_token, 0.0)), logp


STATIC = ("loss", "options", "cfg", "rules", "dtype")


@functools.partial(jax.jit, static_argnames=STATIC)
def _losses(weights, frozen, batch, **static):
    return _loss(weights, frozen, batch, **static)


@functools.partial(jax.jit, static_argnames=STATIC, donate_argnames="gradient")
def _accumulate(gradient, weights, frozen, batch, **static):
    """(gradient with that of a micro-batch added, its loss, its logprobs)."""
    of = functools.partial(_loss, frozen=frozen, batch=batch, **static)
    (total, logp), new = jax.value_and_grad(of, has_aux=True)(weights)
    return jax.tree.map(jnp.add, gradient, new), total, logp


@functools.partial(jax.jit, donate_argnames="gradient")
def _adam_step(weights, moments, gradient, params):
    """(weights, moments, norm of the gradient before clipping) after one step of AdamW.

    https://arxiv.org/abs/1711.05101, with the clipping of https://arxiv.org/abs/1211.5063.
    """
    norm, limit = optax.tree.norm(gradient), params["grad_clip_norm"]
    factor = jnp.where(limit > 0, jnp.minimum(1.0, limit / norm), 1.0)
    gradient = jax.tree.map(lambda g: g * factor, gradient)
    adam = optax.scale_by_adam(b1=params["beta1"], b2=params["beta2"], eps=params["eps"])
    direction, moments = adam.update(gradient, moments)
    rate, decay = params["learning_rate"], params["weight_decay"]
    stepped = jax.tree.map(lambda w, d: w - rate * (d + decay * w), weights, direction)
    return stepped, moments, norm
