"""Copies of trees on other devices of each process, which move device to device."""

import collections
import dataclasses
import math
from collections.abc import Sequence
from typing import Any

import jax
from jax.sharding import Mesh, NamedSharding
from jax.typing import DTypeLike

from sharding.mesh import make_mesh
from sharding.resharding import Leaf, Resharding, process_mesh_sizes, reshape_mesh
from sharding.tree import PyTree


@dataclasses.dataclass(frozen=True)
class Transfer:
    """Moves arrays from one mesh to `mesh`, whose devices are others of this process.

    The source devices of each process reshard to shards that both sides can hold, these shards are
    copied, and the devices of `mesh` reshard what arrived:

        source mesh --reshard--> `source.mesh` --copy--> `copied` --reshard--> `mesh`
    """

    source: Resharding
    copied: Mesh
    target: Resharding

    @property
    def mesh(self) -> Mesh:
        """The destination."""
        return self.target.mesh

    def shares_buffers(self, leaf: Leaf, spec: jax.P, dtype: DTypeLike | None = None) -> bool:
        """False: nothing on `mesh` is in a buffer of the source."""
        return False

    def reshard(self, tree: PyTree, specs: PyTree, dtype: DTypeLike | None = None) -> PyTree:
        """A copy of the tree on `mesh`, sharded as `Resharding.reshard` does."""
        leaves, form = jax.tree.flatten(self.source.reshard(tree, specs, dtype))
        targets = [NamedSharding(self.copied, spec) for spec in form.flatten_up_to(specs)]
        return self.target.reshard(form.unflatten(copy_shards(leaves, targets)), specs)

    def lower(
        self, tree: PyTree, specs: PyTree, dtype: DTypeLike | None = None
    ) -> jax.stages.Lowered:
        """The program of the source devices, for an abstract tree of which it shares no array."""
        return self.source.lower(tree, specs, dtype)


def make_transfer(mesh: Mesh, devices: Sequence[Any], *, expert: int, tensor: int) -> Transfer:
    """Transfer from `mesh` to replicas of `expert` x `tensor` devices each over `devices`.

    `devices` are this process's; in each process the devices of `mesh` there hold the whole
    tree before the copy. Raises ValueError if they are not a block of the mesh.
    """
    n_source = math.prod(process_mesh_sizes(mesh).values())
    shards = {"expert": math.gcd(expert, n_source)}
    shards["tensor"] = math.gcd(tensor, n_source // shards["expert"])
    copied = make_mesh(devices, replica=-1, **shards)
    return Transfer(
        source=reshape_mesh(mesh, per_process=True, replica=-1, **shards),
        copied=copied,
        target=reshape_mesh(copied, replica=-1, expert=expert, tensor=tensor),
    )


def copy_shards(arrays: Sequence[jax.Array], shardings: Sequence[NamedSharding]) -> list[jax.Array]:
    """The arrays under shardings whose every shard is one of the array's, on any devices.

    Each shard is copied from device to device. The devices that hold it send it in turn.
    """
    buffers, devices, counts = [], [], []
    for array, sharding in zip(arrays, shardings, strict=True):
        held = collections.defaultdict(list)
        for shard in array.addressable_shards:
            held[_bounds(shard.index, array.shape)].append(shard.data)
        wanted = sharding.addressable_devices_indices_map(array.shape)
        counts.append(len(wanted))
        for number, (device, index) in enumerate(wanted.items()):
            copies = held[_bounds(index or (), array.shape)]
            buffers.append(copies[number % len(copies)])
            devices.append(device)
    moved = iter(jax.device_put(buffers, devices))
    return [
        jax.make_array_from_single_device_arrays(
            array.shape, sharding, [next(moved) for _ in range(n)]
        )
        for array, sharding, n in zip(arrays, shardings, counts, strict=True)
    ]


def _bounds(index: tuple[slice, ...], shape: tuple[int, ...]) -> tuple[tuple[int, int, int], ...]:
    """A shard's place in its array, in one form for all shardings."""
    return tuple(part.indices(n) for part, n in zip(index, shape, strict=True))
