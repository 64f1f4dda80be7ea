"""Tiles of a grouped matrix product on GPU: how large, which rows, and in which order.

Sizes, warps and stages are those with which vLLM's Triton kernel was fastest for 128 experts
(vllm-project/vllm, model_executor/layers/fused_moe/configs), rounded to a few cases.
"""

import dataclasses
import math

import jax
import jax.numpy as jnp
from jax import lax
from jaxtyping import Array, Int

from jaxrl.kernels.choice import is_since_hopper
from jaxrl.kernels.grouped_matmul.blocks import GroupBlocks

MIN_HEIGHT, MAX_HEIGHT = 16, 128  # rows of a tile; the minimum is that of a tensor core
SHARED_TILES = 8  # row tiles that are computed at the same time with the columns of a matrix


@dataclasses.dataclass(frozen=True)
class Tile:
    """Size of a tile of results, and how it is computed.

    `depth_bytes` of each row of the operands are loaded at one time, for `stages` steps ahead.
    """

    height: int
    width: int
    depth_bytes: int = 128
    warps: int = 8
    stages: int = 3

    @property
    def shared_bytes(self) -> int:
        """Shared memory of a block."""
        return self.stages * (self.height + self.width) * self.depth_bytes

    @property
    def name(self) -> str:
        return f"{self.height}x{self.width}"


def tile_of(height: int, device_kind: str) -> Tile:
    """The tile of this height on a GPU; small batches read long parts of the matrices.

    A block has 227 KB of shared memory since Hopper, and at least 99 KB before it.
    """
    if height <= 32:
        return Tile(height, 128, depth_bytes=256, warps=4, stages=2)
    if height < MAX_HEIGHT:
        return Tile(height, 128, warps=4)
    if is_since_hopper(device_kind):
        return Tile(height, 256, stages=4)
    return Tile(height, 128)


def tile_height(n_rows: int, n_groups: int) -> int:
    """A power of two of at least twice the average group.

    So most groups are one tile in decode: a further tile reads the group's matrix again.
    """
    twice = 2 * max(n_rows / n_groups, 1)
    return min(max(2 ** math.ceil(math.log2(twice)), MIN_HEIGHT), MAX_HEIGHT)


def row_tiles(
    sizes: Int[Array, "E"], n_rows: int, height: int
) -> tuple[Int[Array, "T"], Int[Array, "T"], Int[Array, "T"]]:
    """(group, first row, number of rows) of the tiles that cover all rows.

    The rows of no group form group E. T is the number of tiles at worst; the last tiles may have no
    rows, or a negative number.
    """
    blocks = GroupBlocks(jnp.append(sizes, n_rows - jnp.sum(sizes)), height)
    n_tiles = min(n_rows // height + len(sizes) + 1, n_rows)
    return blocks.place(jnp.arange(n_tiles, dtype=jnp.int32))


def tile_in_order(i: jax.Array, n_tiles: int, n_columns: int) -> tuple[jax.Array, jax.Array]:
    """(row tile, column) of the i-th program, of n_tiles x n_columns.

    SHARED_TILES row tiles and all columns come before the next row tiles, column by column: what
    runs at the same time reads few different rows and columns, which the L2 cache then holds.
    """
    first = lax.div(i, SHARED_TILES * n_columns) * SHARED_TILES
    n_shared = jnp.minimum(n_tiles - first, SHARED_TILES)
    place = lax.rem(i, SHARED_TILES * n_columns)
    return first + lax.rem(place, n_shared), lax.div(place, n_shared)
