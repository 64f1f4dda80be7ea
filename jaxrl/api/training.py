"""Training of several adapters of one base model: gradients, Adam, weights and moments of each.

One program computes the lanes of a dispatch, each with its own adapter and loss: it is that of one
lane under `jax.vmap`, in which the base has no further axis, so that products with its weights are
those of all tokens together. What a lane gives does not depend on the others, and lanes are added
to the gradient of their adapter in the order of its calls.
"""

import dataclasses
import functools
import math
from collections.abc import Callable, Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import optax
from jax.typing import DTypeLike

from jaxrl.api.lanes import (
    AdamParams,
    dispatch_size,
    lane_chunk,
    max_lanes,
    step_size,
    with_places,
)
from jaxrl.api.losses import ChosenLoss, per_token_loss
from jaxrl.api.room import AdapterRoom, Arrays
from jaxrl.config.keys import RunConfig
from jaxrl.data.packing import empty_batch
from jaxrl.learner.image_patches import BatchImages
from jaxrl.learner.loss import score_tokens
from jaxrl.models.config import LoRA
from jaxrl.models.decoder import Decoder
from jaxrl.models.lora import add_adapters
from jaxrl.runtime.flat_program import FlatTree, flatten, unflatten
from jaxrl.types import Batch


@dataclasses.dataclass
class TrainedAdapter:
    """An adapter in training. Its arrays are float32 on the devices, padded to the room."""

    lora: LoRA | None  # None: all weights of the model
    weights: Arrays
    moments: Any  # optax.ScaleByAdamState, whose count is that of the steps
    gradient: Arrays | None = None  # of the summed loss since the last step; None: no call since

    @property
    def n_steps(self) -> int:
        return int(self.moments.count)

    @property
    def scale(self) -> float:
        return 1.0 if self.lora is None else self.lora.scale


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
    encoder: BatchImages | None = None  # makes the inputs of images; None: text only
    programs: dict[tuple[int, bool], Callable[..., Any]] = dataclasses.field(default_factory=dict)

    @functools.cached_property
    def frozen(self) -> FlatTree:
        return flatten(self.room.frozen(self.base))

    @property
    def trains_all(self) -> bool:
        """Whether one model is trained, with all its weights."""
        return self.room.lora is None

    def max_lanes(self, row_len: int) -> int:
        """Lanes of a full dispatch; one if all weights are trained, which are not copied."""
        return 1 if self.trains_all else max_lanes(self.cfg, row_len)

    def single(self, lora: LoRA | None, seed: int = 0) -> Decoder:
        """The base model, which is shared, with a new adapter without padding."""
        if lora is None:
            return self.base
        return add_adapters(self.base, lora, seed=seed, rules=self.room.rules, dtype=jnp.float32)

    def create(self, lora: LoRA | None, seed: int) -> TrainedAdapter:
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
        size = dispatch_size(len(lanes), self.max_lanes(row_len), self.base.cfg)
        blank = dataclasses.replace(lanes[0], batch=empty_batch(self.n_ranks, row_len))
        filled = [*lanes, *[blank] * (size - len(lanes))]
        batches = [lane.batch for lane in filled]
        if lanes[0].batch.images is not None:
            assert self.encoder is not None, "images have been read"
            batches = [self.encoder.on_host(with_places(batch)) for batch in batches]
        arguments = (
            [lane.adapter.weights for lane in filled],
            np.asarray([lane.adapter.scale for lane in filled], np.float32),
            _stacked([lane.loss for lane in filled]),
            _stacked(batches),
            self.frozen,
        )
        gradients, totals, logps = self._program(row_len, forward_only)(*arguments)
        for lane, gradient in zip(lanes, gradients, strict=False):  # not of the padding
            _add_gradient(lane.adapter, gradient)
        totals, logps = jax.device_get((totals, logps))
        return [(logps[i], float(totals[i])) for i in range(len(lanes))]

    def _program(self, row_len: int, forward_only: bool) -> Callable[..., Any]:
        """The compiled function for lanes of this length."""
        key = row_len, forward_only
        if key not in self.programs:
            function = lane_losses if forward_only else lane_gradients
            of = dict(room=self.room, cfg=lane_config(self.cfg, row_len), dtype=self.dtype)
            self.programs[key] = jax.jit(functools.partial(function, **of))
        return self.programs[key]

    def optim_steps(
        self, adapters: Sequence[TrainedAdapter], params: Sequence[AdamParams]
    ) -> list[dict[str, float] | ValueError]:
        """One step of AdamW for each adapter with its gradient so far, which it clears.

        Returns the metrics of each, or its error: if there is no gradient, or one that is not
        finite. That is then cleared, and weights and moments stay as they are.
        """
        found: dict[int, dict[str, float] | ValueError] = {}
        ready = [i for i, adapter in enumerate(adapters) if adapter.gradient is not None]
        norms = self._step([adapters[i] for i in ready], [params[i] for i in ready])
        for i, norm in zip(ready, norms, strict=True):
            found[i] = {"optim/grad_norm": norm, "optim/lr": params[i].learning_rate}
            if not math.isfinite(norm):
                found[i] = ValueError(
                    f"the gradient is not finite (norm {norm}); it is dropped and the weights stay "
                    "as they were. Check logprobs, advantages and weights of the data"
                )
        missing = ValueError("there is no gradient: call forward_backward before each optim_step")
        return [found.get(i, missing) for i in range(len(adapters))]

    def _step(
        self, adapters: Sequence[TrainedAdapter], params: Sequence[AdamParams]
    ) -> list[float]:
        """The norms of the gradients, which are cleared; steps unless a norm is not finite."""
        if not adapters:
            return []
        padding = step_size(len(adapters)) - len(adapters)
        filled = [*adapters, *[adapters[0]] * padding]
        values = [dataclasses.asdict(one) for one in [*params, *[params[0]] * padding]]
        states = [(one.weights, one.moments, one.gradient) for one in filled]
        if self.trains_all:  # all weights of the only model
            options = {name: np.float32(value) for name, value in values[0].items()}
            stepped, norms = _full_step(*states[0], options)
        else:
            stepped, norms = _adam_steps(states, _stacked(values, np.float32))
        for adapter, (weights, moments) in zip(adapters, stepped, strict=False):
            adapter.weights, adapter.moments, adapter.gradient = weights, moments, None
        return np.asarray(norms)[: len(adapters)].tolist()


def _stacked(trees: Sequence[Any], dtype: DTypeLike | None = None) -> Any:
    """The trees as one of host arrays with a further axis of the lanes."""
    return jax.tree.map(lambda *values: np.stack(values).astype(dtype or values[0].dtype), *trees)


def start_moments(weights: Arrays) -> Any:
    return optax.scale_by_adam().init(weights)


def lane_config(cfg: RunConfig, row_len: int) -> RunConfig:
    """The config of a lane. It depends on the length of the lane alone, as its results' bits do."""
    learner = dataclasses.replace(cfg.learner, logprob_chunk=lane_chunk(cfg, row_len))
    return dataclasses.replace(cfg, learner=learner)


def _lane_loss(
    leaves: Sequence[jax.Array],
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
    model = room.model(room.scaled(leaves, scale, dtype), unflatten(frozen))
    logp = score_tokens(model, batch, cfg=cfg, rules=room.rules, remat=cfg.learner.remat)[0]
    per_token = per_token_loss(logp, batch, loss)
    return jnp.sum(jnp.where(batch.mask > 0, per_token, 0.0)), logp


LANES = (0, 0, 0, 0, None)  # the arguments of `_lane_loss` that have an axis of lanes


def lane_losses(weights, scales, losses, batches, frozen, **static):
    """(no gradients, the loss of each lane, their logprobs)."""
    of_lane = functools.partial(_lane_loss, **static)
    lanes = _placed(weights, scales, losses, batches, static["room"])
    return [], *jax.vmap(of_lane, LANES)(*lanes, frozen)


def lane_gradients(weights, scales, losses, batches, frozen, **static):
    """(gradient of each lane, their losses, their logprobs)."""
    room = static["room"]
    of_lane = jax.value_and_grad(functools.partial(_lane_loss, **static), has_aux=True)
    lanes = _placed(weights, scales, losses, batches, room)
    (totals, logps), gradients = jax.vmap(of_lane, LANES)(*lanes, frozen)
    return _lane_parts(room.grouped(gradients, axis=1), len(weights)), totals, logps


def _placed(
    weights: Sequence[Arrays], scales: Any, losses: Any, batches: Batch, room: AdapterRoom
) -> tuple[Any, ...]:
    """The inputs with an axis of lanes: arrays of the adapters, and batches on their devices."""
    spec = jax.P(None, *room.rules.spec("batch", "time"))
    batches = jax.tree.map(lambda array: jax.reshard(array, spec), batches)
    return room.leaves(_lanes(weights), axis=1), scales, losses, batches


def _lanes(trees: Sequence[Any]) -> Any:
    """The trees as one of arrays with a further axis of the lanes; part of a program."""
    return jax.tree.map(lambda *arrays: jnp.stack(arrays), *trees)


def _lane_parts(tree: Any, n: int) -> list[Any]:
    """The inverse of `_lanes`."""
    arrays, structure = jax.tree.flatten(tree)
    parts = [[part.squeeze(0) for part in jnp.split(array, n)] for array in arrays]
    return [jax.tree.unflatten(structure, lane) for lane in zip(*parts, strict=True)]


def _add_gradient(adapter: TrainedAdapter, gradient: Arrays) -> None:
    so_far = adapter.gradient
    adapter.gradient = gradient if so_far is None else _add(so_far, gradient)


@functools.partial(jax.jit, donate_argnames="so_far")
def _add(so_far: Arrays, new: Arrays) -> Arrays:
    return jax.tree.map(jnp.add, so_far, new)


@jax.jit
def _adam_steps(states, params):
    """((weights, moments) of each, norms of the gradients); see `_adam_step`."""
    weights, moments, gradients = _lanes(states)
    *stepped, norms = jax.vmap(_adam_step)(weights, moments, gradients, params)
    return _lane_parts(tuple(stepped), len(states)), norms


@functools.partial(jax.jit, donate_argnames=("moments", "gradient"))
def _full_step(weights, moments, gradient, params):
    """`_adam_steps` of one model without copies: new weights take the memory of the gradient."""
    *stepped, norm = _adam_step(weights, moments, gradient, params)
    return [tuple(stepped)], norm[None]


def _adam_step(weights, moments, gradient, params):
    """(weights, moments, norm of the gradient before clipping) after one step of AdamW.

    The first two are those from before if the norm is not finite.
    https://arxiv.org/abs/1711.05101, with the clipping of https://arxiv.org/abs/1211.5063.
    """
    norm, limit = optax.tree.norm(gradient), params["grad_clip_norm"]
    factor = jnp.where(limit > 0, jnp.minimum(1.0, limit / norm), 1.0)
    gradient = jax.tree.map(lambda g: g * factor, gradient)
    adam = optax.scale_by_adam(b1=params["beta1"], b2=params["beta2"], eps=params["eps"])
    direction, new_moments = adam.update(gradient, moments)
    rate, decay = params["learning_rate"], params["weight_decay"]
    stepped = jax.tree.map(lambda w, d: w - rate * (d + decay * w), weights, direction)
    before, after = (weights, moments), (stepped, new_moments)
    kept = jax.tree.map(lambda old, new: jnp.where(jnp.isfinite(norm), new, old), before, after)
    return *kept, norm
