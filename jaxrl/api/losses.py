"""The losses of Tinker's API: sums over tokens of the per-token losses of training.

Definitions: https://tinker-docs.thinkingmachines.ai/losses. With r = exp(logp - logprobs), the
ratio to the policy that sampled, and A the advantages:

    cross_entropy        -weights logp
    importance_sampling  -r A
    ppo                  -min(r A, clip(r, low, high) A)
    cispo                -sg(clip(r, low, high)) A logp
    dro                  -A logp + beta / 2 (logp - logprobs)²
    gspo                 as ppo, with the ratio of the sequence: the geometric mean of r over the
                         tokens of sequence_ratio_mask, and the gradient of each token's logp

Which loss it is, and its options, are data of the compiled program (`ChosenLoss`).
"""

import dataclasses
import math
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import jax.numpy as jnp
import numpy as np
from flax import struct
from jaxtyping import Array, Float

from jaxrl.algorithms.losses.policy_loss import cispo, dro, gspo_token, policy_gradient, ppo_clip
from jaxrl.api.images import place_chunks
from jaxrl.api.messages import Datum
from jaxrl.config.schema import nearest
from jaxrl.data.images.placed import PlacedTokens
from jaxrl.data.images.reader import ImageReader
from jaxrl.http.errors import RequestError
from jaxrl.types import Batch, TrainingSample

Options = Mapping[str, Float[Array, ""]]
CLIP = ("clip_low_threshold", "clip_high_threshold")
SAMPLED = ("logprobs", "advantages")


@dataclasses.dataclass(frozen=True)
class Loss:
    """A loss by name: what a datum must have, and the options with their defaults."""

    tensors: tuple[str, ...]  # next to target_tokens; float32, one value per token
    # (logp, batch, options) -> loss of each token
    function: Callable[[Array, Batch, Options], Array]
    defaults: Mapping[str, float | None] = dataclasses.field(default_factory=dict)  # None: needed
    optional: tuple[str, ...] = ()  # tensors that are 1 where they are left out


def _log_ratio(logp: Float[Array, "B T"], batch: Batch) -> Float[Array, "B T"]:
    return logp - batch.rollout_logp


def _clip(options: Options) -> dict[str, Array]:
    """The thresholds of r as distances from 1."""
    low, high = (options[name] for name in CLIP)
    return dict(clip_low=1.0 - low, clip_high=high - 1.0)


def _cross_entropy(logp, batch, options):
    return policy_gradient(logp, batch.advantages)


def _importance_sampling(logp, batch, options):
    log_ratio = _log_ratio(logp, batch)
    return ppo_clip(log_ratio, batch.advantages, clip_low=math.inf, clip_high=math.inf)


def _ppo(logp, batch, options):
    return ppo_clip(_log_ratio(logp, batch), batch.advantages, **_clip(options))


def _cispo(logp, batch, options):
    return cispo(_log_ratio(logp, batch), logp, batch.advantages, **_clip(options))


def _dro(logp, batch, options):
    log_ratio = _log_ratio(logp, batch)
    return dro(log_ratio, logp, batch.advantages, log_ratio_penalty=options["beta"])


def _gspo(logp, batch, options):
    return gspo_token(
        _log_ratio(logp, batch),
        logp,
        batch.advantages,
        batch.selected,
        batch.segments,
        **_clip(options),
    )


THRESHOLDS = {"clip_low_threshold": 0.8, "clip_high_threshold": 1.2}
LOSSES = {
    "cross_entropy": Loss(("weights",), _cross_entropy, optional=("weights",)),
    "importance_sampling": Loss(SAMPLED, _importance_sampling),
    "ppo": Loss(SAMPLED, _ppo, THRESHOLDS),
    "cispo": Loss(SAMPLED, _cispo, THRESHOLDS),
    "dro": Loss(SAMPLED, _dro, {"beta": None}),
    "gspo": Loss((*SAMPLED, "sequence_ratio_mask"), _gspo, dict.fromkeys(CLIP)),
}


@struct.dataclass
class ChosenLoss:
    """One of `LOSSES` with its options, as arrays of a program: all have the same program."""

    kind: Any  # int32 [], its place in LOSSES
    options: dict[str, Any]  # float32 [] each, by name; 0 for those that the loss does not have


OPTIONS = (*CLIP, "beta")


def per_token_loss(
    logp: Float[Array, "B T"], batch: Batch, chosen: ChosenLoss
) -> Float[Array, "B T"]:
    """The chosen loss of each token.

    All losses are computed, those that are not chosen with zeros in place of logp, logprobs and
    advantages: they and their gradients are finite, and zero in the sum.
    """
    total = jnp.zeros_like(logp)
    for kind, loss in enumerate(LOSSES.values()):
        is_chosen = chosen.kind == kind
        read = dataclasses.replace(
            batch,
            rollout_logp=jnp.where(is_chosen, batch.rollout_logp, 0.0),
            advantages=jnp.where(is_chosen, batch.advantages, 0.0),
        )
        own = loss.function(jnp.where(is_chosen, logp, 0.0), read, chosen.options)
        total = total + jnp.where(is_chosen, own, 0.0)
    return total


def find_loss(name: str) -> Loss:
    """Raises RequestError (400) for a loss that the server does not have."""
    if name not in LOSSES:
        guess = nearest(name, LOSSES)
        hint = f"did you mean {guess}? " if guess else ""
        raise RequestError(
            400,
            f"the loss_fn {name!r} is not supported; {hint}set one of {', '.join(LOSSES)}, or call "
            "forward_backward_custom",
            param="loss_fn",
        )
    return LOSSES[name]


def read_loss(name: str, given: Mapping[str, float]) -> ChosenLoss:
    """A loss with its options. Raises RequestError (400) for unknown, missing and invalid ones."""
    defaults = find_loss(name).defaults
    for option, value in given.items():
        if option not in defaults:
            known = ", ".join(defaults) or "no options"
            message = f"loss_fn_config[{option!r}] is unknown: {name} has {known}"
            raise RequestError(400, message, param="loss_fn_config")
        if not math.isfinite(value) or value < 0:
            message = f"loss_fn_config[{option!r}]={value} must be at least 0 and finite"
            raise RequestError(400, message, param="loss_fn_config")
    chosen = {option: given.get(option, default) for option, default in defaults.items()}
    if missing := [option for option, value in chosen.items() if value is None]:
        message = f"{name} needs loss_fn_config with {' and '.join(missing)}"
        raise RequestError(400, message, param="loss_fn_config")
    values = {option: np.float32(chosen.get(option) or 0.0) for option in OPTIONS}
    return ChosenLoss(np.int32(list(LOSSES).index(name)), values)


def read_samples(
    name: str,
    data: Sequence[Datum],
    *,
    n_vocab: int,
    max_len: int,
    reader: ImageReader | None = None,
) -> list[TrainingSample]:
    """The data of a call as sequences to pack.

    The target of each token is one of the fields of the loss, not necessarily the next token:
    `with_targets` puts them into the packed batch. `reader` reads images. Raises RequestError (400)
    for wrong tensors, and for images that cannot be used.
    """
    if not data:
        raise RequestError(400, "data is empty; send at least one datum", param="data")
    loss = find_loss(name)
    inputs = [
        place_chunks(datum.chunks, reader, f"datum {i}", "data") for i, datum in enumerate(data)
    ]
    return [
        _sample(i, *pair, name, loss, n_vocab, max_len)
        for i, pair in enumerate(zip(data, inputs, strict=True))
    ]


def _sample(
    i: int, datum: Datum, given: PlacedTokens, name: str, loss: Loss, n_vocab: int, max_len: int
) -> TrainingSample:
    n = len(given)
    if not 0 < n <= max_len:
        raise _wrong(i, f"{n} tokens; send 1 to {max_len}")
    wanted = ("target_tokens", *loss.tensors)
    for tensor in datum.tensors:
        if tensor not in wanted:
            raise _wrong(i, f"the tensor {tensor!r}, which {name} does not read; leave it out")
    values = {
        tensor: _values(i, tensor, datum, n, needed=tensor not in loss.optional)
        for tensor in wanted
    }
    targets = values["target_tokens"]
    for what, tokens in (("model_input", given.tokens), ("target_tokens", targets)):
        if tokens.min() < 0 or tokens.max() >= n_vocab:
            raise _wrong(i, f"a token outside of 0 to {n_vocab - 1} in {what}")
    weights = values["weights"] if name == "cross_entropy" else values["advantages"]
    ratio_mask = values.get("sequence_ratio_mask")
    return TrainingSample(
        prompt_tokens=given.tokens[:1],
        tokens=np.append(given.tokens[1:], targets[-1]).astype(np.int32),
        loss_mask=np.ones(n, bool),
        rollout_logp=values.get("logprobs"),
        advantages=weights,
        selected=None if ratio_mask is None else ratio_mask != 0,
        images=given.images,
        axis_positions=given.axis_positions,
    )


def _values(i: int, tensor: str, datum: Datum, n: int, *, needed: bool) -> np.ndarray:
    kind = np.int64 if tensor == "target_tokens" else np.float32
    if tensor not in datum.tensors:
        if needed:
            raise _wrong(i, f"no {tensor}, which the loss reads")
        return np.ones(n, kind)
    array = datum.tensors[tensor]
    if array.shape != (n,):
        raise _wrong(i, f"{tensor} of the shape {list(array.shape)}; send [{n}], one per token")
    if (array.dtype.kind == "f") != (kind is np.float32):
        raise _wrong(i, f"{tensor} of the dtype {array.dtype}; send {np.dtype(kind)}")
    if not np.isfinite(array).all():
        raise _wrong(i, f"{tensor} with values that are not finite")
    return array.astype(kind)


def _wrong(i: int, what: str) -> RequestError:
    return RequestError(400, f"datum {i} has {what}", param="data")
