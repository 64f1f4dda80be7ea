"""Logical axis -> mesh axes, and the order of tokens on the mesh.

A strategy (FSDP, tensor parallel, ...) is a `Rules` value.
"""

import dataclasses
import math
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import NamedSharding
from jaxtyping import Array, Int, Shaped

from sharding.tree import PyTree

Axis = str | tuple[str, ...] | None


@dataclasses.dataclass(frozen=True)
class Rules:
    """Mesh axes of every logical axis; None means replicated."""

    batch: Axis = ("replica", "fsdp", "expert")  # rows of a packed batch
    time: Axis = None  # positions within a row, residual stream
    heads: Axis = "tensor"  # query heads, weights and activations
    kv_heads: Axis = "tensor"
    ffw: Axis = "tensor"
    vocab: Axis = "tensor"
    experts: Axis = "expert"  # the experts of a layer; tokens are exchanged with their devices
    embed: Axis = None  # the model dimension of activations
    w_embed: Axis = "fsdp"  # the model dimension of weights: all-gathered just before use
    replicas: Axis = "replica"  # hold the same weights, and with ZeRO shards of optimizer state
    layers: Axis = None  # the leading axis of stacked layers: stages of a pipeline
    residual: Axis = None  # shards the tokens of the residual stream further
    attn_heads: Axis = "tensor"  # heads while attention sees whole rows
    ring: bool = False  # ring attention: rows stay sharded over `time`, in zig-zag order
    ulysses: int = 1  # ring: neighbours that form one place of it and exchange tokens for heads

    def spec(self, *logical: str | None) -> jax.P:
        """PartitionSpec of an array whose dimensions carry these logical axes (None: replicated).

        Raises ValueError if two dimensions would use the same mesh axis.
        """
        axes = [None if name is None else getattr(self, name) for name in logical]
        flat = [axis for name in logical if name for axis in self.mesh_axes(name)]
        if len(flat) != len(set(flat)):
            raise ValueError(f"{logical} maps one mesh axis twice: {axes}; change one of the rules")
        return jax.P(*axes)

    def n_shards(self, logical: str) -> int:
        """Number of shards of this logical axis on the current mesh."""
        sizes = jax.sharding.get_abstract_mesh().shape
        return math.prod(sizes[axis] for axis in self.mesh_axes(logical))

    @property
    def ring_size(self) -> int:
        """Places of the ring that shares a row on the current mesh."""
        return self.in_stage().n_shards("time") // self.ulysses

    def mesh_axes(self, logical: str) -> tuple[str, ...]:
        axis = getattr(self, logical)
        return () if axis is None else (axis,) if isinstance(axis, str) else tuple(axis)

    def residual_spec(self, shape: tuple[int, ...]) -> jax.P:
        """PartitionSpec of the residual stream [B, T, D] between the products of a layer.

        The axes of `residual` shard rows, or the positions of rows that they do not divide. GPUs
        relay rows out for free.
        """
        batch, time, more = map(self.mesh_axes, ("batch", "time", "residual"))
        if more and shape[0] % (self.n_shards("batch") * self.n_shards("residual")) == 0:
            return jax.P(batch + more, self.time, self.embed)
        if more and shape[1] % (self.n_shards("time") * self.n_shards("residual")) == 0:
            return jax.P(self.batch, time + more, self.embed)
        return self.spec("batch", "time", "embed")

    def gathered_residual(self) -> jax.P:
        """The residual stream as the input of sharded weights.

        Each device has the tokens of all devices of `residual`. In backward, where it has the
        gradient of the local weights only, the sum is a reduce-scatter.
        """
        spec = self.spec("batch", "time", "embed")
        return spec.update(reduced=frozenset(self.mesh_axes("residual")))

    def partial_residual(self) -> jax.P:
        """The output of sharded weights, before its sum over the devices of `residual`."""
        spec = self.spec("batch", "time", "embed")
        return spec.update(unreduced=frozenset(self.mesh_axes("residual")))

    def whole_rows(self) -> "Rules":
        """Rules inside attention over whole rows: heads are sharded instead of the row."""
        heads = self.attn_heads
        return dataclasses.replace(self, time=None, heads=heads, kv_heads=heads)

    def in_stage(self) -> "Rules":
        """Rules inside one pipeline stage, which has its own layers and shares no row."""
        stages = self.mesh_axes("layers")
        time = tuple(axis for axis in self.mesh_axes("time") if axis not in stages)
        return dataclasses.replace(self, layers=None, time=time or None)

    def with_stages(self) -> "Rules":
        """The same layout inside the stages of a pipeline (PIPELINE)."""
        time = (*self.mesh_axes("time"), "stage")
        return dataclasses.replace(self, layers="stage", time=time)

    def over_replicas(self) -> "Rules":
        """Rules of the state that replicas share with ZeRO: they divide the shards of weights."""
        shared = (*self.mesh_axes("w_embed"), *self.mesh_axes("replicas"))
        return dataclasses.replace(self, w_embed=shared)

    def in_replica(self) -> "Rules":
        """Rules inside one rollout replica, which has its own rows."""
        return dataclasses.replace(self, batch=None)

    def gathered(self, *logical: str | None) -> jax.P:
        """`spec` of a weight at its point of use: the FSDP shards of `w_embed` are all-gathered."""
        return self.spec(*(None if name == "w_embed" else name for name in logical))


# FSDP and tensor parallelism are one rule set: the mesh sizes decide how much of each there is.
TRAIN = Rules()
# Between the products of a layer, a tensor axis shards the tokens of the residual stream: norms and
# additions run on a device's share, and reduce-scatter and all-gather replace all-reduce
# (Megatron's sequence parallelism, https://arxiv.org/abs/2205.05198, section 4.2.2).
TENSOR = Rules(residual="tensor")
# Sequence parallelism shards rows over the sequence axis, which also shards weights as the fsdp
# axis does. In attention, Ulysses (https://arxiv.org/abs/2309.14509) shards heads instead; ring
# attention (https://arxiv.org/abs/2310.01889) passes keys and values around.
ULYSSES = Rules(time="sequence", attn_heads=("tensor", "sequence"), w_embed=("fsdp", "sequence"))
RING = Rules(time="sequence", ring=True, w_embed=("fsdp", "sequence"))
# Pipeline parallelism: stages of layers pass rows on (GPipe, https://arxiv.org/abs/1811.06965).
# Before the first layer and after the last, the stages shard each row over `time`.
PIPELINE = TRAIN.with_stages()
DECODE = Rules(batch=None)  # every device steps all slots; weights stay sharded as in training
REPLICAS = Rules(batch="replica")  # on the rollout's mesh: each replica steps its own slots
PRESETS: dict[str, Rules] = {
    "train": TRAIN,
    "tensor": TENSOR,
    "ulysses": ULYSSES,
    "ring": RING,
    "pipeline": PIPELINE,
    "decode": DECODE,
    "replicas": REPLICAS,
}


def zigzag(n_tokens: int, n_shards: int) -> Int[np.ndarray, " T"]:
    """Index of the row's token at each place of a ring of `n_shards` devices.

    Under a causal mask the last tokens of a row have many keys and the first have few. So a row is
    split into 2n chunks for n devices, and device i takes chunks i and 2n - 1 - i: each device has
    the same work (as in https://arxiv.org/abs/2407.21783, section 3.3.2). If neighbours form one
    place of the ring (`Rules.ulysses`), they divide the tokens of its two chunks. The order changes
    only when a batch is put onto the mesh and when per-token results return; in between, every
    token carries its position and segment.

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


def unshuffle(rows: Shaped[Array, "B T ..."], rules: Rules) -> Shaped[Array, "B T ..."]:
    """`row_order` on the mesh, for computations over neighbours; each device gets whole rows."""
    if not rules.ring:
        return rows
    n = rules.ring_size
    chunks = jax.reshard(rows, rules.spec("batch", None)).reshape(len(rows), n, 2, -1)
    ordered = jnp.concatenate([chunks[:, :, 0], jnp.flip(chunks[:, :, 1], axis=1)], axis=1)
    return ordered.reshape(rows.shape)
