"""Segments of a row as the gated delta rule reads them: runs of tokens, and trees of chunks."""

from typing import Any

import jax
import jax.numpy as jnp
from flax import struct
from jaxtyping import Array, Int

from jaxrl.kernels.visibility import Visibility


def run_numbers(segments: Int[Array, "B T"]) -> Int[Array, "B T"]:
    """Number of the segment of each token in its row, from 1; padding has the one before it, or 1.

    A segment is one run of equal numbers in its row.
    """
    starts = jnp.pad(segments[:, 1:] != segments[:, :-1], ((0, 0), (1, 0)), constant_values=True)
    begun = jnp.cumsum(starts & (segments > 0), axis=1, dtype=jnp.int32)
    return jnp.maximum(begun, 1)


def parent_chunks(visibility: Visibility, chunk: int) -> Int[Array, "B n"]:
    """The chunk that ends with the token before the first one of each chunk; -1 if there is none.

    "Before" is on the path of a token, the tokens that it attends to (kernels/visibility.py).
    Segments of rows with shared prefixes begin at multiples of `chunk` and share multiples of it.
    """
    until, positions = visibility.until, visibility.positions
    T = until.shape[1]
    ends, begins = slice(chunk - 1, T, chunk), slice(0, T, chunk)
    places = jnp.arange(0, T, chunk, dtype=jnp.int32)
    before = places < places[:, None]
    follows = before & (positions[:, None, ends] + 1 == positions[:, begins, None])
    follows &= until[:, None, ends] >= places[:, None]
    return jnp.max(jnp.where(follows, places // chunk, -1), axis=2)


@struct.dataclass
class ChunkRuns:
    """Which tokens of a chunk share a state, and which of them that at its start or its end."""

    live: Any  # bool [n, B, C], no padding
    numbers: Any  # int32 [n, B, C], of the runs
    carried: Any  # int32 [n, B], the run whose state is there at the start

    @classmethod
    def of(cls, segments: jax.Array, chunk: int, *, aligned: bool):
        """The chunks of rows [B, n * chunk].

        If the runs are `aligned` to chunks, a chunk starts with the state of its path. Otherwise
        it starts with that of the chunk before.
        """
        split = (len(segments), -1, chunk)
        live = jnp.moveaxis((segments > 0).reshape(split), 1, 0)
        numbers = jnp.moveaxis(run_numbers(segments).reshape(split), 1, 0)
        before = jnp.pad(numbers[:-1, :, -1], ((1, 0), (0, 0)), constant_values=1)
        return cls(live, numbers, numbers[:, :, 0] if aligned else before)

    @property
    def kept(self) -> jax.Array:
        """bool [n, B]: whether the state at the start is still there at the end."""
        return self.carried == self.numbers[:, :, -1]

    def masks(self) -> tuple[jax.Array, ...]:
        """(live tokens, pairs i >= j of one run [n, B, C, C], tokens that see the state at the
        start, tokens that are in the state at the end)."""
        numbers, C = self.numbers, self.numbers.shape[2]
        same = numbers[..., :, None] == numbers[..., None, :]
        within = same & self.live[..., :, None] & self.live[..., None, :] & jnp.tri(C, dtype=bool)
        carried = self.live & (numbers == self.carried[..., None])
        return self.live, within, carried, self.live & (numbers == numbers[..., -1:])
