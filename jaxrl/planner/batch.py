"""The shape of a micro-batch, with which the programs of a plan are lowered."""

import dataclasses
import math

import jax
import numpy as np

from jaxrl.config.keys import RunConfig
from jaxrl.data.packing import empty_batch
from jaxrl.data.support import to_bits
from jaxrl.types import Batch
from sharding import Rules


def abstract_batch(
    cfg: RunConfig,
    rules: Rules,
    mesh: jax.sharding.Mesh,
    n_ranks: int | None = None,
    *,
    n_vocab: int = 0,
) -> Batch:
    """The run's largest micro-batch, for `n_ranks` data-parallel ranks (default: the mesh's).

    With bitsets of the supports if `n_vocab` is not 0.
    """
    rows, row_len = cfg.learner.shapes[-1]
    n_ranks = n_ranks or math.prod(mesh.shape[axis] for axis in rules.mesh_axes("batch"))
    sharding = jax.sharding.NamedSharding(mesh, rules.spec("batch", "time"))

    def abstract(a: np.ndarray) -> jax.ShapeDtypeStruct:
        shape = (rows * n_ranks, row_len, *a.shape[2:])
        return jax.ShapeDtypeStruct(shape, a.dtype, sharding=sharding)

    batch = empty_batch(1, row_len)
    if n_vocab:
        batch = dataclasses.replace(batch, support=to_bits(None, (1, row_len), n_vocab))
    return jax.tree.map(abstract, batch)
