"""Batches on the mesh, with the tokens of a row in sequence or zig-zag for ring attention.

Under a causal mask the last tokens of a row have many keys and the first have few. So a row is
split into 2n chunks for n devices, and device i takes chunks i and 2n - 1 - i: each device has the
same work (as in https://arxiv.org/abs/2407.21783, section 3.3.2). If neighbours form one place of
the ring (`Rules.ulysses`), they divide the tokens of its two chunks. The order changes only when a
batch is put onto the mesh and when per-token results return; in between, every token carries its
position and segment.
"""

from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import NamedSharding
from jaxtyping import Array, Int, Shaped

from sharding.rules import Rules
from sharding.tree import PyTree


def zigzag(n_tokens: int, n_shards: int) -> Int[np.ndarray, " T"]:
    """Index of the row's token at each place of the mesh.

    Raises ValueError if the row length is not a multiple of 2 n_shards.
    """
    if n_tokens % (2 * n_shards):
        raise ValueError(
            f"a row of {n_tokens} tokens cannot be split into two equal chunks for each of "
            f"{n_shards} devices; make its length a multiple of {2 * n_shards}"
        )
    chunks = np.arange(n_tokens).reshape(2, n_shards, -1)
    return np.stack([chunks[0], chunks[1, ::-1]], axis=1).reshape(-1)


def put_batch(batch: PyTree, rules: Rules) -> PyTree:
    """Puts a tree of host arrays [B, T, ...] onto the current mesh, in its token order.

    Every process passes the whole batch, and each device takes its slice of it.
    """
    sharding = NamedSharding(jax.sharding.get_mesh(), rules.spec("batch", "time"))

    def put(rows: Any) -> jax.Array:
        host = mesh_order(np.asarray(rows), rules)
        return jax.make_array_from_callback(host.shape, sharding, lambda index: host[index])

    return jax.tree.map(put, batch)


def mesh_order(rows: Shaped[np.ndarray, "B T ..."], rules: Rules) -> Shaped[np.ndarray, "B T ..."]:
    """Rows in the token order of the current mesh."""
    if not rules.ring:
        return rows
    return rows[:, zigzag(rows.shape[1], rules.ring_size)]


def row_order(rows: Shaped[np.ndarray, "B T ..."], rules: Rules) -> Shaped[np.ndarray, "B T ..."]:
    """The inverse of `mesh_order`."""
    if not rules.ring:
        return rows
    return rows[:, np.argsort(zigzag(rows.shape[1], rules.ring_size))]


def unshuffle(rows: Shaped[Array, "B T"], rules: Rules) -> Shaped[Array, "B T"]:
    """`row_order` on the mesh, for computations over neighbours; each device gets whole rows."""
    if not rules.ring:
        return rows
    n = rules.ring_size
    chunks = jax.reshard(rows, rules.spec("batch", None)).reshape(len(rows), n, 2, -1)
    ordered = jnp.concatenate([chunks[:, :, 0], jnp.flip(chunks[:, :, 1], axis=1)], axis=1)
    return ordered.reshape(rows.shape)
