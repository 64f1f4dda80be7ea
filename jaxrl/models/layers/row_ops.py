"""Inputs of the part of a layer that mixes the tokens of a row."""

from typing import Any, Protocol, runtime_checkable

import jax
from flax import struct

from jaxrl import types
from jaxrl.kernels.attention_spec import AttentionSpec
from jaxrl.models.layers.rope import Rotation
from jaxrl.models.shared_kv import SharedKV


@runtime_checkable
class RowOps(Protocol):
    """The operations between the tokens of rows: packed in training, with a cache in rollout.

    All return the output and the state after the layer. `index` is that of a stacked layer among
    the layers of its kind.
    """

    @property
    def heads_first(self) -> bool:
        """Whether `attend` reads arrays in the memory order [N, B, T, H] (memory_order.py)."""
        ...

    def attend(
        self, q, k, v, spec: AttentionSpec, window, index, state, sinks=None
    ) -> tuple[jax.Array, Any]:
        """Attention of q [B, T, N, H] to k and v [B, T, K, H]; the output is [B, T, N, H].

        k and v are None if they are already in the cache. `sinks` [N] are one more logit of each
        head (kernels/sinks.py).
        """
        ...

    def attend_latent(self, q, latent, heads, window, index, state) -> tuple[jax.Array, Any]:
        """Attention of q [B, T, N, H] to the keys of latents; the output is [B, T, N, V].

        `latent` [B, T, 1, C] are latents and rotated keys, `heads` the LatentHeads (layers/mla.py)
        that map them to keys and values.
        """
        ...

    def share(self, k, v, shared: SharedKV, state) -> tuple[Any, Any, Any]:
        """(k, v, state) for `attend`, of a layer that computes shared keys and values or uses them.

        k and v [B, T, K, H] are None for a layer that uses those of an earlier one.
        """
        ...

    def delta(self, qk, v, g, beta, conv, index, state) -> tuple[jax.Array, Any]:
        """Convolutions and the gated delta rule; the output is [B, T, N, V].

        `qk` [B, T, K, 2 D] are queries and keys before their convolution, `v` [B, T, N, V] the
        values; `g` and `beta` [B, T, N]; `conv` the weights of both convolutions, [heads, features,
        taps].
        """
        ...

    def convolve(self, x, w, index, state) -> tuple[jax.Array, Any]:
        """Causal depthwise convolution of x [B, T, N, H] with the taps w [N, H, W]."""
        ...


@struct.dataclass
class LayerPlace:
    """Values that differ between layers with equal parameters; stacked layers: [L, ...] each."""

    rotation: Rotation | None  # None: layers without one
    window: types.Array | None  # int32; None: the window is static
    index: types.Array | None  # int32, of the layer; None: of a list
    # int32, of the layer's cache among those of its kind; None: of a list, whose layers get theirs
    cache: types.Array | None
    # int16 [B, T, k], experts to replay, negative where the router chooses; None: it always does
    experts: types.Array | None = None
    inputs: types.Array | None = None  # [B, T, P], of this layer by token; None: models without
    deep: types.Array | None = None  # [B, T, D], features of images to add after it; None: none
