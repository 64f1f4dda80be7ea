"""Weights on their way to rollout workers: bits in shards, complete or only what changed.

The trainer puts every version once into an object store. Hosts fetch the shards from it, and the
workers of a host share them. A difference to the version before is exact: it is made of the bits.
"""

import collections
import contextlib
import dataclasses
from collections.abc import Callable, Iterable, Iterator, Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from jaxrl.layout import Layout
from jaxrl.types import Tree
from sharding import Resharding

SHARD_BYTES = 256 << 20
BLOCK = 1 << 16  # elements whose places in their block fit 16 bits
Put = Callable[[Any], Any]  # object -> reference
Get = Callable[[list[Any]], list[Any]]  # references -> objects


@dataclasses.dataclass(frozen=True)
class ArrayChange:
    """The elements of an array that differ from the version before."""

    counts: np.ndarray  # uint32 [n_blocks], how many per block of BLOCK elements
    places: np.ndarray  # uint16 [n], in their blocks, ascending
    values: np.ndarray  # [n], new bits

    @property
    def nbytes(self) -> int:
        return self.counts.nbytes + self.places.nbytes + self.values.nbytes

    def apply(self, bits: np.ndarray) -> np.ndarray:
        """The array after the change."""
        blocks = np.repeat(np.arange(len(self.counts)), self.counts)
        changed = bits.copy()
        changed[blocks * BLOCK + self.places] = self.values
        return changed


WeightPiece = tuple[
    int, np.ndarray | ArrayChange
]  # (number of the array, its bits or their change)


@dataclasses.dataclass(frozen=True)
class WeightUpdate:
    """How a worker gets from the version that it has to version `number`."""

    number: int
    shards: tuple[Any, ...]  # references to lists of pieces


def change(old: np.ndarray, new: np.ndarray) -> ArrayChange:
    """The change from the bits `old` to `new`, both flat unsigned integers."""
    places = np.flatnonzero(old != new)
    n_blocks = -(-len(new) // BLOCK)
    counts = np.bincount(places // BLOCK, minlength=n_blocks).astype(np.uint32)
    return ArrayChange(counts, (places % BLOCK).astype(np.uint16), new[places])


def to_bits(array: np.ndarray) -> np.ndarray:
    """The elements as flat unsigned integers."""
    return np.ascontiguousarray(array).reshape(-1).view(f"u{array.dtype.itemsize}")


def put_shards(pieces: Iterable[WeightPiece], put: Put) -> tuple[Any, ...]:
    """Puts pieces into the store, in shards of about SHARD_BYTES."""
    references, shard, n_bytes = [], [], 0
    for piece in pieces:
        shard.append(piece)
        n_bytes += piece[1].nbytes
        if n_bytes >= SHARD_BYTES:
            references.append(put(shard))
            shard, n_bytes = [], 0
    return tuple([*references, put(shard)] if shard else references)


class Version:
    """One version of the weights."""

    def __init__(
        self, number: int, bits: Sequence[np.ndarray], delta: tuple[Any, ...] | None, put: Put
    ):
        """`delta` are the shards of what changed since version `number` - 1, if they exist."""
        self.number, self._bits, self._delta, self._put = number, bits, delta, put
        self._full: tuple[Any, ...] | None = None

    def update(self, loaded: int | None) -> WeightUpdate:
        """For a worker that has version `loaded`, or none."""
        if self._delta is not None and loaded == self.number - 1:
            return WeightUpdate(self.number, self._delta)
        if self._full is None:
            self._full = put_shards(enumerate(self._bits), self._put)
        return WeightUpdate(self.number, self._full)


class RemoteWeights:
    """Publishes training's weights for rollout workers, in the format of their engines."""

    def __init__(
        self,
        layout: Layout,
        put: Put,
        *,
        delta: bool,
        gather: Resharding | None = None,
        publishes: bool = True,
    ):
        """`delta` sends only what changed to workers that have the version before.

        In a run of several processes, `gather` gives the devices of each one all weights, and only
        processes that have workers are those that `publishes`. All of them call the methods.
        """
        self.layout, self._put, self._delta = layout, put, delta
        self._gather, self._publishes = gather, publishes
        self._version: Version | None = None
        self._leaf: Any = None  # the first array of the weights of `_version`
        self._bits: list[np.ndarray] = []  # of `_version`, for the next difference
        self._metrics: dict[str, float] = {}

    def send(self, params: Tree) -> Version:
        """Publishes the weights. The same arrays are the same version."""
        leaf = jax.tree.leaves(params)[0]
        if self._version is None or leaf is not self._leaf:
            self._leaf, self._version = leaf, self._publish(params)
        return self._version

    @property
    def per_process(self) -> bool:
        """Whether each process generates with its own workers."""
        return self._gather is not None

    @contextlib.contextmanager
    def weights(
        self, params: Tree, timed: contextlib.AbstractContextManager | None = None
    ) -> Iterator[Version]:
        """The published weights. Publishing them is timed by `timed`."""
        with timed or contextlib.nullcontext():
            version = self.send(params)
        yield version

    def on_mesh(self) -> contextlib.AbstractContextManager:
        """The workers have the meshes."""
        return contextlib.nullcontext()

    def take_metrics(self) -> dict[str, float]:
        """The weights published since the last call."""
        metrics, self._metrics = self._metrics, {}
        return metrics

    def _publish(self, params: Tree) -> Version:
        number = 0 if self._version is None else self._version.number + 1
        arrays = self._arrays(params)
        if not self._publishes:
            collections.deque(arrays, maxlen=0)  # the other processes gather them
            return Version(number, [], None, self._put)
        old, bits = self._bits, [to_bits(np.asarray(array)) for array in arrays]
        pieces: list[np.ndarray | ArrayChange] = list(bits)
        if old:
            changes = [change(*pair) for pair in zip(old, bits, strict=True)]
            pieces = [
                found if found.nbytes < new.nbytes else new
                for found, new in zip(changes, bits, strict=True)
            ]
            n_changed = sum(len(found.values) for found in changes)
            self._metrics["weights/changed_fraction"] = n_changed / sum(map(len, bits))
        self._metrics["weights/published_bytes"] = float(sum(piece.nbytes for piece in pieces))
        self._bits = bits if self._delta else []
        delta = put_shards(enumerate(pieces), self._put) if old else None
        return Version(number, bits, delta, self._put)

    def _arrays(self, params: Tree) -> Iterator[jax.Array]:
        """The arrays in the engines' dtype, one after the other, on devices of this process."""
        for leaf in jax.tree.leaves(self.layout.prepare(params)):
            if self._gather is not None:
                yield self._gather.reshard(leaf, leaf.sharding.spec, self.layout.dtype)
            else:
                floating = jnp.issubdtype(leaf.dtype, jnp.floating)
                yield leaf.astype(self.layout.dtype) if floating else leaf


def put_array(host: np.ndarray, sharding: jax.sharding.Sharding) -> jax.Array:
    """The array with this sharding, of which a process copies only the shards of its devices."""
    shards = [
        jax.device_put(host[index], device, may_alias=False)
        for device, index in sharding.addressable_devices_indices_map(host.shape).items()
    ]
    return jax.make_array_from_single_device_arrays(host.shape, sharding, shards)


class LoadedWeights:
    """The weights of a worker, on its devices; on this process's devices if it spans hosts."""

    def __init__(self, abstract: Tree, *, keep_bits: bool):
        """`abstract` has shapes, dtypes and shardings; `keep_bits` allows updates by changes."""
        self._abstract, self._form = jax.tree.flatten(abstract)
        self._arrays: list[jax.Array | None] = [None] * len(self._abstract)
        self._bits: dict[int, np.ndarray] | None = {} if keep_bits else None

    def load(self, update: WeightUpdate, get: Get) -> Tree:
        """The weights after the update. Earlier arrays are deleted one by one."""
        for reference in update.shards:
            for number, piece in get([reference])[0]:
                self._load(number, piece)
        return self._form.unflatten(self._arrays)

    def _load(self, number: int, piece: np.ndarray | ArrayChange) -> None:
        if isinstance(piece, ArrayChange):
            assert self._bits is not None
            if not len(piece.values):
                return
            piece = piece.apply(self._bits[number])
        if self._bits is not None:
            self._bits[number] = piece
        abstract, old = self._abstract[number], self._arrays[number]
        host = piece.view(abstract.dtype).reshape(abstract.shape)
        self._arrays[number] = put_array(host, abstract.sharding)
        if old is not None:
            old.delete()
