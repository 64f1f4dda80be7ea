"""The order in which the tokens of a row lie on the mesh: their own, or zig-zag for ring attention.

Under a causal mask a token at the end of a row has many keys and one at its start few. So a row is cut
into 2n chunks for n devices, and device i takes chunks i and 2n - 1 - i: each has the same work
(as in https://arxiv.org/abs/2407.21783, section 3.3.2). Only where a batch goes onto the mesh and where numbers come back
is the order changed; in between every token carries its position and segment with it.
"""

import jax
import jax.numpy as jnp
import numpy as np
from jaxtyping import Array, Int, Shaped

from sharding.rules import Rules


def zigzag(n_tokens: int, n_shards: int) -> Int[np.ndarray, " T"]:
    """The token of the row that lies at each place of the mesh. Raises ValueError where 2 n_shards do
    not divide the row."""
    if n_tokens % (2 * n_shards):
        raise ValueError(
            f"a row of {n_tokens} tokens cannot be cut into two equal chunks for each of {n_shards} "
            f"devices; make its length a multiple of {2 * n_shards}"
        )
    chunks = np.arange(n_tokens).reshape(2, n_shards, -1)
    return np.stack([chunks[0], chunks[1, ::-1]], axis=1).reshape(-1)


def mesh_order(rows: Shaped[np.ndarray, "B T"], rules: Rules) -> Shaped[np.ndarray, "B T"]:
    """Rows as they lie on the mesh that is set."""
    if not rules.ring:
        return rows
    return rows[:, zigzag(rows.shape[1], rules.n_shards("time"))]


def row_order(rows: Shaped[np.ndarray, "B T"], rules: Rules) -> Shaped[np.ndarray, "B T"]:
    """The inverse of `mesh_order`."""
    if not rules.ring:
        return rows
    return rows[:, np.argsort(zigzag(rows.shape[1], rules.n_shards("time")))]


def unshuffle(rows: Shaped[Array, "B T"], rules: Rules) -> Shaped[Array, "B T"]:
    """`row_order` on the mesh: every device gets whole rows. For what looks at neighbours in a row."""
    if not rules.ring:
        return rows
    n = rules.n_shards("time")
    chunks = jax.reshard(rows, rules.spec("batch", None)).reshape(len(rows), n, 2, -1)
    ordered = jnp.concatenate([chunks[:, :, 0], jnp.flip(chunks[:, :, 1], axis=1)], axis=1)
    return ordered.reshape(rows.shape)
