"""What every ring kernel shares: the devices of a row, their chunks, and the keys that travel.

A ring has r places. The tokens of a row are in zig-zag order (sharding/order.py): place p has chunk
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
from jaxrl.kernels.visibility import Visibility, visible_range
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

    def positions(self) -> jax.Array:
        """Row positions of the 2c tokens of this place."""
        within = jnp.arange(2 * self.chunk)
        first, second = self.bases(0)
        return within + jnp.where(within < self.chunk, first, second - self.chunk)

    def pass_on(self, tree):
        """Sends `tree` to the next place."""
        n, u = self.n_devices, self.spec.rules.ulysses
        to_next = [(i, (i + u) % n) for i in range(n)]
        return jax.tree.map(lambda x: lax.ppermute(x, self.axes, to_next), tree)

    def exchange(self, x: jax.Array, *, split: int, concat: int) -> jax.Array:
        """All-to-all among the devices of a place; the identity if it has one device."""
        u = self.spec.rules.ulysses
        if u == 1:
            return x
        places = [list(range(p * u, (p + 1) * u)) for p in range(self.size)]
        (axis,) = self.axes
        return lax.all_to_all(x, axis, split, concat, axis_index_groups=places, tiled=True)


# (ring, q [B, 2c, N, H], k and v [B, 2c, K, H], first and last visible key [B, 2c]) -> like q
Attend = Callable[..., jax.Array]


def shard_ring(
    attend: Attend,
    q: Float[Array, "B T N H"],
    k: Float[Array, "B T K H"],
    v: Float[Array, "B T K H"],
    *,
    spec: AttentionSpec,
    segments: Int[Array, "B T"],
    window: int | Int[Array, ""],
    visibility: Visibility | None = None,
    bounds: Callable | None = None,
) -> Float[Array, "B T N H"]:
    """`attend` on every device's part of a row; the bounds are positions in the row.

    `bounds(ring, segments, window, visibility)` gives other arguments than the first and last key.
    """
    rules = spec.rules
    heads, kv_heads = (rules.spec("batch", "time", h, None) for h in ("heads", "kv_heads"))
    rows = rules.spec("batch", "time")
    size = rules.ring_size
    zigzag(q.shape[1], size)  # raises ValueError for a length that does not divide
    ring = Ring(spec, rules.mesh_axes("time"), size, q.shape[1] // (2 * size))
    local = jax.shard_map(
        functools.partial(_local_ring, attend, bounds or _local_visible_range, ring),
        in_specs=(heads, kv_heads, kv_heads, rows, jax.P(), rows),
        out_specs=heads,
        check_vma=False,
    )
    q, k, v = jax.reshard(q, heads), jax.reshard(k, kv_heads), jax.reshard(v, kv_heads)
    window = jax.reshard(jnp.asarray(window, jnp.int32), jax.P())
    segments, visibility = jax.tree.map(lambda a: jax.reshard(a, rows), (segments, visibility))
    return local(q, k, v, segments, window, visibility)


def _local_ring(
    attend: Attend, bounds: Callable, ring: Ring, q, k, v, segments, window, visibility
):
    q, k, v = (ring.exchange(x, split=2, concat=1) for x in (q, k, v))
    out = attend(ring, q, k, v, *bounds(ring, segments, window, visibility))
    return ring.exchange(out, split=1, concat=2)


def _local_visible_range(ring: Ring, segments, window, _):
    """First and last visible key of the queries of this place, as positions in the row."""
    segments = lax.all_gather(segments, ring.axes, axis=1, tiled=True)
    order = zigzag(segments.shape[1], ring.size)
    bounds = visible_range(segments[:, order.argsort()], window)
    n, begin = 2 * ring.chunk, ring.place * 2 * ring.chunk
    return [lax.dynamic_slice_in_dim(a[:, order], begin, n, axis=1) for a in bounds]
