"""Training of several adapters of one base model: gradients, Adam, weights and moments of each.

One program computes the lanes of a dispatch, each with its own adapter and loss: it is that of one
lane under `jax.vmap`, in which the base has no further axis, so that products with its weights are
those of all tokens together. What a lane gives does not depend on the others, and lanes are added
to the gradient of their adapter in the order of its calls.
"""

import dataclasses
import functools
import math
from collections.abc import Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import optax
from jax.sharding import NamedSharding
from jax.typing import DTypeLike

from jaxrl.api.lanes import dispatch_size
from jaxrl.api.losses import ChosenLoss, per_token_loss
from jaxrl.api.room import AdapterRoom, Arrays
from jaxrl.config.keys import RunConfig
from jaxrl.data.packing import empty_batch
from jaxrl.learner.loss import logprob_chunk, score_tokens
from jaxrl.models.config import LoRA
from jaxrl.models.decoder import Decoder
from jaxrl.models.lora import add_adapters
from jaxrl.runtime.flat_program import FlatTree, flatten, unflatten
from jaxrl.types import Batch

MIN_CHUNK = 16  # tokens of a lane whose logits are computed together


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
    """An adapter in training. Its arrays are float32 on the devices, padded to the room."""

    lora: LoRA
    weights: Arrays
    moments: Any  # optax.ScaleByAdamState, whose count is that of the steps
    gradient: Arrays | None = None  # of the summed loss since the last step; None: no call since

    @property
    def n_steps(self) -> int:
        return int(self.moments.count)


@dataclasses.dataclass(frozen=True)
class LaneInput:
    """A lane to run: a micro-batch [n_ranks, T], its loss and its adapter."""

    adapter: TrainedAdapter
    loss: ChosenLoss
    batch: Batch


@dataclasses.dataclass(frozen=True)
class Trainer:
    """The programs of training, for any adapters of a base; call on the device's thread.

    The base is shared by all adapters and by the engine. Gradients are those of sums over tokens.
    """

    cfg: RunConfig
    base: Decoder
    room: AdapterRoom
    n_ranks: int  # data-parallel
    dtype: DTypeLike  # of activations; adapters are rounded to it in the forward pass

    @functools.cached_property
    def frozen(self) -> FlatTree:
        return flatten(self.room.frozen(self.base))

    def single(self, lora: LoRA, seed: int = 0) -> Decoder:
        """The base model, which is shared, with a new adapter without padding."""
        return add_adapters(self.base, lora, seed=seed, rules=self.room.rules, dtype=jnp.float32)

    def create(self, lora: LoRA, seed: int) -> TrainedAdapter:
        """A new adapter. Its values do not depend on the room."""
        weights = self.room.pad(self.single(lora, seed))
        return TrainedAdapter(lora, weights, start_moments(weights))

    def run_lanes(
        self, lanes: Sequence[LaneInput], *, forward_only: bool
    ) -> list[tuple[np.ndarray, float]]:
        """(logprobs [n_ranks, T] of the targets, sum of the loss) of each lane of one T.

        Adds the gradients of the sums to the adapters', except with `forward_only`.
        """
        row_len = lanes[0].batch.tokens.shape[1]
        size = dispatch_size(len(lanes), self.cfg, row_len, self.base.cfg)
        blank = dataclasses.replace(lanes[0], batch=empty_batch(self.n_ranks, row_len))
        filled = [*lanes, *[blank] * (size - len(lanes))]
        arguments = (
            [lane.adapter.weights for lane in filled],
            np.asarray([lane.adapter.lora.scale for lane in filled], np.float32),
            jax.tree.map(lambda *values: np.stack(values), *(lane.loss for lane in filled)),
            self._put([lane.batch for lane in filled]),
            self.frozen,
        )
        of = dict(room=self.room, cfg=lane_config(self.cfg, row_len), dtype=self.dtype)
        if forward_only:
            totals, logps = _losses(*arguments, **of)
        else:
            gradients, totals, logps = lane_gradients(*arguments, **of)
            for i, lane in enumerate(lanes):
                _add_gradient(lane.adapter, gradients, i)
        totals, logps = np.asarray(totals), np.asarray(logps)
        return [(logps[i], float(totals[i])) for i in range(len(lanes))]

    def _put(self, batches: Sequence[Batch]) -> Batch:
        """The batches [lanes, n_ranks, T] on the devices."""
        spec = self.room.rules.spec("batch", "time")
        sharding = NamedSharding(jax.sharding.get_mesh(), jax.P(None, *spec))
        return jax.tree.map(lambda *rows: jax.device_put(np.stack(rows), sharding), *batches)

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


def start_moments(weights: Arrays) -> Any:
    return optax.scale_by_adam().init(weights)


def lane_config(cfg: RunConfig, row_len: int) -> RunConfig:
    """The config of a lane: the logits of all lanes of a full dispatch are those of a micro-batch.

    It depends on the length of the lane alone, and so do the bits of its results.
    """
    most, longest = max(cfg.learner.shapes, key=lambda shape: shape[0] * shape[1])
    chunk = logprob_chunk(cfg)
    chunk = min(chunk, max(chunk * row_len // (most * longest), MIN_CHUNK))
    return dataclasses.replace(cfg, learner=dataclasses.replace(cfg.learner, logprob_chunk=chunk))


def _lane_loss(
    weights: Arrays,
    scale: jax.Array,
    loss: ChosenLoss,
    batch: Batch,
    frozen: FlatTree,
    *,
    room: AdapterRoom,
    cfg: RunConfig,
    dtype: DTypeLike,
) -> tuple[jax.Array, jax.Array]:
    """(sum of the loss over the tokens of a lane, logprobs [n_ranks, T] of its targets)."""
    model = room.model(room.scaled(weights, scale, dtype), unflatten(frozen))
    logp = score_tokens(model, batch, cfg=cfg, rules=room.rules, remat=cfg.learner.remat)[0]
    per_token = per_token_loss(logp, batch, loss)
    return jnp.sum(jnp.where(batch.mask > 0, per_token, 0.0)), logp


STATIC = ("room", "cfg", "dtype")
LANES = (0, 0, 0, 0, None)  # the arguments of `_lane_loss` that have an axis of lanes


@functools.partial(jax.jit, static_argnames=STATIC)
def _losses(weights, scales, losses, batches, frozen, **static):
    of_lane = functools.partial(_lane_loss, **static)
    return jax.vmap(of_lane, LANES)(_stacked(weights), scales, losses, batches, frozen)


@functools.partial(jax.jit, static_argnames=STATIC)
def lane_gradients(weights, scales, losses, batches, frozen, **static):
    """(gradient of each lane, its loss, its logprobs)."""
    of_lane = jax.value_and_grad(functools.partial(_lane_loss, **static), has_aux=True)
    of_lanes = jax.vmap(of_lane, LANES)
    (totals, logps), gradients = of_lanes(_stacked(weights), scales, losses, batches, frozen)
    return gradients, totals, logps


def _stacked(weights: Sequence[Arrays]) -> Arrays:
    """The weights of the adapters of all lanes, in one array for each of A and B."""
    return [jnp.stack(arrays) for arrays in zip(*weights, strict=True)]


def _add_gradient(adapter: TrainedAdapter, gradients: Arrays, lane: int) -> None:
    if adapter.gradient is None:
        adapter.gradient = _take(gradients, lane)
    else:
        adapter.gradient = _add(adapter.gradient, gradients, lane)


@jax.jit
def _take(gradients: Arrays, lane: jax.Array) -> Arrays:
    return [gradient[lane] for gradient in gradients]


@functools.partial(jax.jit, donate_argnames="so_far")
def _add(so_far: Arrays, gradients: Arrays, lane: jax.Array) -> Arrays:
    return [old + new for old, new in zip(so_far, _take(gradients, lane), strict=True)]


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
