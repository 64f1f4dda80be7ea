"""Keys and values that several layers use: those that one of them computes."""

import dataclasses

import jax
import jax.numpy as jnp
from flax import struct
from jax.typing import DTypeLike

from sharding import Rules


@dataclasses.dataclass(frozen=True)
class SharedKV:
    """The part of one layer: it computes keys and values for later ones, or uses them."""

    layer: int  # that computes them
    reads: bool  # has no projections of keys and values


@struct.dataclass
class KeptKV:
    """The shared keys and values of packed rows, by the layer that computes them.

    It passes from layer to layer as a KV cache does in rollout; every layer gets all of it.
    """

    kv: dict[int, tuple[jax.Array, jax.Array]]  # [B, T, K, H]

    def layer(self, i: int) -> "KeptKV":
        return self

    def with_layer(self, i: int, one: "KeptKV") -> "KeptKV":
        return one

    def pool(self, number: int) -> "KeptKV":
        return self

    def with_pool(self, number: int, one: "KeptKV") -> "KeptKV":
        return one

    def share(
        self, k: jax.Array | None, v: jax.Array | None, shared: SharedKV
    ) -> tuple[jax.Array, jax.Array, "KeptKV"]:
        """(keys, values, state after the layer), of a layer that has k and v or reads others."""
        if k is None or v is None:
            return *self.kv[shared.layer], self
        return k, v, KeptKV({**self.kv, shared.layer: (k, v)})


def empty_kv(
    layers: dict[int, tuple[int, int]], shape: tuple[int, ...], dtype: DTypeLike, rules: Rules
) -> KeptKV:
    """The state before the first layer, for [B, T] tokens.

    `layers` are (K, H) of the layers whose keys and values others use.
    """
    spec = rules.spec("batch", "time", "kv_heads", None)

    def empty(heads: tuple[int, int]) -> jax.Array:
        return jnp.zeros((*shape, *heads), dtype, out_sharding=spec)

    return KeptKV({i: (empty(heads), empty(heads)) for i, heads in layers.items()})
