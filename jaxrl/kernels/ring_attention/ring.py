"""Shared parts of the ring kernels: the devices of a row, their chunks, and the keys that travel.

A ring has r places. The tokens of a row are in zig-zag order (sharding/rules.py): place p has chunk
p of the first half of the row and chunk 2r - 1 - p, of c tokens each, and so do the travelling
keys. With `rules.ulysses` = u > 1, u neighbours form a place: they exchange tokens for heads before
attention and back after it, so that each has all 2c tokens of the place and 1/u of the heads
(DeepSpeed Ulysses inside ring attention, https://arxiv.org/abs/2405.07719).
"""

import dataclasses
import functools
from collections.abc import Callable

import jax
import jax.numpy as jnp
from jax import lax
from jaxtyping import Array, Float, Int

from jaxrl.kernels.attention_spec import AttentionSpec
from jaxrl.kernels.shard_attention import shard_sinks
from jaxrl.kernels.visibility import Visibility
from sharding import zigzag


@dataclasses.dataclass(frozen=True)
class Ring:
    """Static parameters: scores, the mesh axes that share a row, and the chunk length."""

    spec: AttentionSpec
    axes: tuple[str, ...]
    size: int  # places
    chunk: int  # tokens

    @property
    def n_devices(self) -> int:
        return self.size * self.spec.rules.ulysses

    @property
    def place(self) -> jax.Array:
        return lax.axis_index(self.axes) // self.spec.rules.ulysses

    def bases(self, step) -> tuple[jax.Array, jax.Array]:
        """First row positions of the two key chunks that are on this device after `step` steps."""
        source = (self.place - step) % self.size
        return source * self.chunk, (2 * self.size - 1 - source) * self.chunk

    def pass_on(self, tree):
        """Sends `tree` to the next place."""
        n, u = self.n_devices, self.spec.rules.ulysses
        to_next = [(i, (i + u) % n) for i in range(n)]
        return jax.tree.map(lambda x: lax.ppermute(x, self.axes, to_next), tree)

    def whole_rows(self, tokens):
        """The numbers [B, T] of all tokens of each row, in their original order."""

        def gather(a):
            a = lax.all_gather(a, self.axes, axis=1, tiled=True)
            return a[:, zigzag(a.shape[1], self.size).argsort()]

        return jax.tree.map(gather, tokens)

    def tokens_here(self, whole_rows):
        """The numbers [B, 2c] of the tokens of this place, of those of whole rows."""

        def take(a):
            chunks = (
                lax.dynamic_slice_in_dim(a, base, self.chunk, axis=1) for base in self.bases(0)
            )
            return jnp.concatenate(list(chunks), axis=1)

        return jax.tree.map(take, whole_rows)

    def exchange(self, x: jax.Array, *, split: int, concat: int) -> jax.Array:
        """All-to-all among the devices of a place; the identity if it has one device."""
        u = self.spec.rules.ulysses
        if u == 1:
            return x
        places = [list(range(p * u, (p + 1) * u)) for p in range(self.size)]
        (axis,) = self.axes
        return lax.all_to_all(x, axis, split, concat, axis_index_groups=places, tiled=True)

    def heads_here(self, of_heads: jax.Array) -> jax.Array:
        """The numbers [N / u] of the heads that this device has after `exchange`, of all [N]."""
        size = of_heads.shape[0] // (u := self.spec.rules.ulysses)
        if u == 1:
            return of_heads
        here = lax.axis_index(self.axes) % u
        return lax.dynamic_slice_in_dim(of_heads, here * size, size)


# (ring, q [B, 2c, N, H], k and v [B, 2c, K, H], sinks [N] or None, *masks) -> like q
RingAttend = Callable[..., jax.Array]
# (ring, segments, window, visibility) -> what `attend` needs to know about visible keys
Masks = Callable[..., tuple]


def shard_ring(
    attend: RingAttend,
    q: Float[Array, "B T N H"],
    k: Float[Array, "B T K H"],
    v: Float[Array, "B T K H"],
    *,
    spec: AttentionSpec,
    segments: Int[Array, "B T"],
    window: int | Int[Array, ""],
    visibility: Visibility | None,
    sinks: Float[Array, "N"] | None,
    masks: Masks,
) -> Float[Array, "B T N H"]:
    """`attend` on every device's part of a row, given `masks` of the device's numbers per token."""
    rules = spec.rules
    heads, kv_heads = (rules.spec("batch", "time", h, None) for h in ("heads", "kv_heads"))
    rows = rules.spec("batch", "time")
    size = rules.ring_size
    zigzag(q.shape[1], size)  # raises ValueError for a length that does not divide
    ring = Ring(spec, rules.mesh_axes("time"), size, q.shape[1] // (2 * size))
    local = jax.shard_map(
        functools.partial(_local_ring, attend, masks, ring),
        in_specs=(heads, kv_heads, kv_heads, rules.spec("heads"), rows, jax.P(), rows),
        out_specs=heads,
        check_vma=False,
    )
    q, k, v = jax.reshard(q, heads), jax.reshard(k, kv_heads), jax.reshard(v, kv_heads)
    window = jax.reshard(jnp.asarray(window, jnp.int32), jax.P())
    segments, visibility = jax.tree.map(lambda a: jax.reshard(a, rows), (segments, visibility))
    return local(q, k, v, shard_sinks(sinks, rules), segments, window, visibility)


def _local_ring(
    attend: RingAttend, masks: Masks, ring: Ring, q, k, v, sinks, segments, window, visibility
):
    q, k, v = (ring.exchange(x, split=2, concat=1) for x in (q, k, v))
    if sinks is not None:
        sinks = ring.heads_here(sinks)
    out = attend(ring, q, k, v, sinks, *masks(ring, segments, window, visibility))
    return ring.exchange(out, split=1, concat=2)
