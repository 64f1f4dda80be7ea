"""Mesh and sharding rules of each role of a run: training, scoring, reference, critic, rollout.

All roles use the same devices, and each may have a different mesh over them. With
`schedule.rollout_devices` the rollout has separate devices in each process.
"""

import collections
import contextlib
import dataclasses
import math
from collections.abc import Callable, Iterator, Sequence
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jax.sharding import Mesh

from jaxrl.config.keys import RunConfig
from jaxrl.kernels.quantized import Quantized
from jaxrl.models.config import DecoderConfig
from jaxrl.models.decoder import decoder_specs
from jaxrl.models.layers.linear import Linear
from jaxrl.models.layers.moe import MoE
from jaxrl.models.lora import merge, replace_weights
from jaxrl.models.mesh_check import check_mesh
from jaxrl.models.quantize import int8_specs, map_matrices, quantize_int8
from jaxrl.models.spec import abstract_params, partition_specs
from jaxrl.types import Tree
from sharding import (
    DECODE,
    REPLICAS,
    Resharding,
    Rules,
    Transfer,
    bytes_per_device,
    copy_tree,
    first_devices,
    make_mesh,
    make_transfer,
    on_mesh,
    process_mesh_sizes,
    reshape_mesh,
)
from sharding.mesh import ONE_TOKEN_AXES
from sharding.rules import PRESETS, TENSOR, TRAIN


def training_rules(cfg: RunConfig) -> Rules:
    """Sharding rules of training, for the axes that config.mesh uses."""
    return _rules(cfg, cfg.mesh.stage, cfg.mesh.sequence, cfg.mesh.tensor)


def _rules(cfg: RunConfig, stage: int, sequence: int, tensor: int) -> Rules:
    rules = TRAIN
    if sequence != 1:
        rules = PRESETS[cfg.learner.sequence_parallel]
        if rules.ring:  # a role with a smaller sequence axis has smaller places in its ring
            ulysses = math.gcd(cfg.learner.ulysses_size, max(sequence, 0))
            rules = dataclasses.replace(rules, ulysses=ulysses)
    if tensor != 1 and cfg.learner.shard_residual:
        rules = dataclasses.replace(rules, residual=TENSOR.residual)
    return rules if stage == 1 else rules.with_stages()


@dataclasses.dataclass(frozen=True)
class Layout:
    """Mesh, sharding rules and dtype with which a role reads the policy's weights."""

    rules: Rules
    # From training's mesh; Transfer: to other devices; None: the role reads training's arrays.
    resharding: Resharding | Transfer | None
    specs: Tree  # PartitionSpecs of the weights
    dtype: jnp.dtype  # of activations, and of weights that are not int8
    per_process: bool = False  # every process has a separate mesh over its local devices
    int8: bool = False  # matrices are quantized to int8 from training's weights for every use
    merge: bool = False  # adapters are merged into the weights for every use
    # Entered while the role reads a copy, which may be the only one on the devices.
    while_copied: Callable[[], contextlib.AbstractContextManager[None]] = contextlib.nullcontext

    @contextlib.contextmanager
    def weights(
        self, params: Tree, timed: contextlib.AbstractContextManager | None = None
    ) -> Iterator[Tree]:
        """The policy's weights as the role reads them, with the role's mesh set.

        Copied arrays are deleted at the end of the block. Copying them is timed by `timed`.
        """
        if not self.copies:
            yield params
            return
        with timed or contextlib.nullcontext():
            copied, shared = self._load(params)
        del params  # `while_copied` may replace training's arrays
        with self.while_copied(), self.on_mesh():
            try:
                yield copied
            finally:  # deleted at once, even if other references exist
                for leaf, is_shared in zip(jax.tree.leaves(copied), shared, strict=True):
                    if not is_shared:
                        leaf.delete()

    @property
    def copies(self) -> bool:
        """Whether the role reads other arrays than training's."""
        return self.resharding is not None or self.merge

    @property
    def separate(self) -> bool:
        """Whether the role has other devices than training."""
        return isinstance(self.resharding, Transfer)

    def send(self, params: Tree) -> Tree:
        """The policy's weights on the separate devices of the role, which keeps them."""
        assert self.separate, "a role on training's devices may share arrays, which updates donate"
        return self._load(params)[0]

    def _load(self, params: Tree) -> tuple[Tree, list[bool]]:
        """The weights as the role reads them, and which arrays are also in `params`."""
        prepared = self.prepare(params)
        shared = [leaf.is_shared for leaf in self._leaves(params, prepared)]
        if self.resharding is not None:
            prepared = self.resharding.reshard(prepared, self.specs, self.dtype)
        return jax.block_until_ready(prepared), shared

    def copy(self, params: Tree) -> Tree:
        """A copy of the current weights for the role, in buffers that no update donates."""
        own = copy_tree(params)
        if self.resharding is None:
            return own
        return self.resharding.reshard(own, self.specs, self.dtype)

    def on_mesh(self) -> contextlib.AbstractContextManager:
        """Context manager that sets the role's mesh."""
        if self.resharding is None:
            return contextlib.nullcontext()
        return jax.set_mesh(self.resharding.mesh)

    def prepare(self, params: Tree) -> Tree:
        """The weights in the role's format, not yet resharded; unchanged arrays are shared.

        Layer by layer, so that only one merged layer waits for its quantization. `params` may also
        be one layer.
        """
        if not (self.merge or self.int8):
            return params

        def prepare_layer(layer: Tree) -> Tree:
            layer = merge(layer) if self.merge else layer
            return quantize_int8(layer, self.dtype) if self.int8 else layer

        prepared = jax.tree.map(
            prepare_layer, params, is_leaf=lambda node: isinstance(node, Linear | MoE)
        )
        return merge(prepared) if self.merge else prepared  # the config of the model

    def mesh(self, training: Mesh) -> Mesh:
        """The role's mesh, given training's."""
        return training if self.resharding is None else self.resharding.mesh

    def weight_bytes(self, params: Tree) -> tuple[int, int]:
        """(shared, copied) bytes per device of the policy's (abstract) weights on the current mesh.

        The role reads training's arrays without a copy if they are shared.
        """
        if not self.copies:
            return bytes_per_device(params), 0
        leaves = self._leaves(params, self._abstract(params, jax.sharding.get_mesh()))
        shared = bytes_per_device([leaf.array for leaf in leaves if leaf.is_shared])
        copied = [leaf.array for leaf in leaves if leaf.of_training and not leaf.is_shared]
        return shared, bytes_per_device(copied)

    def sent_bytes(self, params: Tree) -> int:
        """Bytes per device of the (abstract) arrays of training that it reshards before `send`."""
        assert isinstance(self.resharding, Transfer)
        shares = self.resharding.source.shares_buffers
        leaves = self._leaves(params, self._abstract(params, jax.sharding.get_mesh()))
        pairs = zip(leaves, jax.tree.leaves(self.specs), strict=True)
        return bytes_per_device(
            [
                leaf.array
                for leaf, spec in pairs
                if leaf.of_training and not shares(leaf.array, spec, self.dtype)
            ]
        )

    def lower(self, params: Tree) -> jax.stages.Lowered:
        """The program that reshards the (abstract) weights, for ahead-of-time compilation."""
        assert self.resharding is not None
        prepared = self._abstract(params, jax.sharding.get_mesh())
        return self.resharding.lower(prepared, self.specs, self.dtype)

    def lowered_weights(self, params: Tree) -> Tree:
        """Training's weights as `weights` gives them, but in shape only if it copies them.

        Programs can be lowered with them.
        """
        if not self.copies:
            return params
        return self.abstract_weights(params.cfg, jax.sharding.get_mesh())

    def abstract_weights(self, decoder: DecoderConfig, training: Mesh) -> Tree:
        """Shapes, dtypes and shardings of the role's weights, given the mesh of training."""
        mesh = self.mesh(training)
        params = abstract_params(decoder_specs(decoder), self.rules, self.dtype, mesh)
        with jax.set_mesh(mesh):
            return self._abstract(params, mesh)

    def _leaves(self, params: Tree, prepared: Tree) -> list["_Leaf"]:
        """The arrays of `prepared`, made of `params`."""
        of_training = jax.tree.map(lambda leaf: True, params)
        if self.merge:
            of_training = replace_weights(lambda w, change: False, of_training)
        if self.int8:
            of_training = map_matrices(lambda w, n_in: Quantized(False, False), of_training)
        leaves = zip(*map(jax.tree.leaves, (prepared, of_training, self.specs)), strict=True)

        def is_shared(array: Any, spec: jax.P) -> bool:
            moves = self.resharding
            return moves is None or moves.shares_buffers(array, spec, self.dtype)

        return [_Leaf(array, same, same and is_shared(array, spec)) for array, same, spec in leaves]

    def _abstract(self, params: Tree, mesh: Mesh) -> Tree:
        return on_mesh(jax.eval_shape(self.prepare, params), mesh)


class _Leaf(NamedTuple):
    """One array of the role's weights."""

    array: Any
    of_training: bool  # training's array, not one made by merging or quantization
    is_shared: bool  # read by the role without a copy


def role_layout(cfg: RunConfig, role: str, decoder: DecoderConfig, dtype: jnp.dtype) -> Layout:
    """Layout of "score", "ref", "critic" or "reward_model" from that section of the config.

    Training's mesh is the current one. Raises ValueError if the role's sizes do not divide the
    devices or the model.
    """
    mesh = jax.sharding.get_mesh()
    key, sizes = {
        "score": ("score", cfg.score),
        "ref": ("ref", cfg.ref),
        "critic": ("critic.mesh", cfg.critic.mesh),
        "reward_model": ("reward_model.mesh", cfg.reward_model.mesh),
    }[role]
    role_sizes = {
        "stage": sizes.stage or mesh.shape["stage"],
        "sequence": sizes.sequence or mesh.shape["sequence"],
        "tensor": sizes.tensor or mesh.shape["tensor"],
    }
    fixed = role_sizes | {"expert": mesh.shape["expert"]}
    replica = math.gcd(mesh.shape["replica"], mesh.size // math.prod(fixed.values()))
    resharding = reshape_mesh(mesh, per_process=False, **fixed, replica=replica, fsdp=-1)
    rules = _rules(cfg, role_sizes["stage"], role_sizes["sequence"], role_sizes["tensor"])
    check_mesh(decoder, resharding.mesh.shape, rules, keys=f"config.{key} and config.mesh sizes")
    specs = partition_specs(decoder_specs(decoder), rules)
    return Layout(rules, None if resharding.mesh == mesh else resharding, specs, dtype)


REPLICA_AXES = ("tensor", "expert")  # of an engine; rollout keys that default to the mesh's


def split_devices(cfg: RunConfig, devices: Sequence[Any]) -> tuple[Sequence[Any], Sequence[Any]]:
    """(devices of training, separate devices of the rollout in this process, or none).

    The rollout has the last `schedule.rollout_devices` of each process.
    """
    by_process = collections.defaultdict(list)
    for device in devices:
        by_process[device.process_index].append(device)
    n = cfg.schedule.rollout_devices
    rollout = {i: local[len(local) - n :] for i, local in by_process.items()}
    training = [device for device in devices if device not in rollout[device.process_index]]
    return training, rollout[jax.process_index()]


def training_mesh(cfg: RunConfig) -> Mesh:
    """The mesh of `config.mesh` over the attached devices of training."""
    sizes = dataclasses.asdict(cfg.mesh)
    devices, _ = split_devices(cfg, jax.devices())
    return make_mesh(first_devices(devices, **sizes), **sizes)


def rollout_layout(
    cfg: RunConfig,
    decoder: DecoderConfig,
    dtype: jnp.dtype,
    devices: Sequence[Any] = (),
) -> Layout:
    """Layout of the engine from `rollout.layout` and `rollout.engines`.

    Training's mesh is the current one; `dtype` is that of training's weights. `devices` are those
    of the rollout in this process if they are not training's. Raises ValueError if the sizes do not
    divide the devices or the model.
    """
    mesh = jax.sharding.get_mesh()
    if devices:
        per_process = mesh.is_multi_process
        return _engine_layout(cfg, decoder, dtype, mesh, per_process=per_process, devices=devices)
    if mesh.is_multi_process and cfg.rollout.engines != "mesh":
        try:
            return _engine_layout(cfg, decoder, dtype, mesh, per_process=True)
        except ValueError as error:
            if cfg.rollout.engines == "process":
                raise ValueError(
                    f"config.rollout.engines='process' is not possible: {error}; set smaller sizes "
                    "in config.mesh, or config.rollout.engines='mesh'"
                ) from error
    return _engine_layout(cfg, decoder, dtype, mesh)


def check_idle_policy(cfg: RunConfig, layout: Layout) -> None:
    """Raises ValueError if learner.offload has the policy, and the rollout reads no copy of it."""
    if "policy" in cfg.learner.offload and not layout.copies:
        raise ValueError(
            f"config.learner.offload={cfg.learner.offload}: the rollout reads training's weights, "
            "so they are never idle; leave out 'policy', or have the rollout read a copy with "
            "config.lora.merge, config.rollout.dtype='int8' or, on several devices, "
            "config.rollout.layout='replicas'"
        )


def _engine_layout(
    cfg: RunConfig,
    decoder: DecoderConfig,
    dtype: jnp.dtype,
    mesh: Mesh,
    *,
    per_process: bool = False,
    devices: Sequence[Any] = (),
) -> Layout:
    if devices:
        sizes = _replica_sizes(cfg, mesh, len(devices))
        try:
            resharding = make_transfer(mesh, devices, **sizes)
        except ValueError as error:
            raise ValueError(
                f"config.schedule.rollout_devices={len(devices)} is not possible: {error}, so it "
                "cannot copy the weights to its rollout devices; set config.mesh sizes of which "
                "one, such as fsdp or replica, is a multiple of the number of processes"
            ) from error
    else:
        sizes = _engine_mesh_sizes(cfg, mesh, per_process)
        resharding = reshape_mesh(mesh, per_process=per_process, **sizes)
    layout = worker_layout(cfg, decoder, dtype, resharding.mesh)
    copies = layout.dtype != dtype or layout.int8
    moves = None if resharding.mesh == mesh and not copies else resharding
    return dataclasses.replace(layout, resharding=moves, per_process=per_process)


def worker_mesh(cfg: RunConfig, devices: Sequence[Any]) -> Mesh:
    """The mesh of a rollout worker with these devices: engine replicas over all of them."""
    sizes = {key: getattr(cfg.rollout, key) or getattr(cfg.mesh, key) for key in REPLICA_AXES}
    return make_mesh(devices, replica=-1, **sizes)


def worker_layout(cfg: RunConfig, decoder: DecoderConfig, dtype: jnp.dtype, mesh: Mesh) -> Layout:
    """Layout of an engine on `mesh`, without a way for the weights from training.

    `dtype` is training's, for its weights. Raises ValueError if the mesh does not fit the model.
    """
    rollout = cfg.rollout
    replicas = rollout.layout == "replicas" and mesh.shape["replica"] > 1
    rules = REPLICAS if replicas else DECODE
    check_mesh(decoder, mesh.shape, rules, keys="config.rollout.tensor and .expert to sizes")
    int8 = rollout.dtype == "int8" and not decoder.base_dtype  # else it is already
    keeps_dtype = rollout.dtype in ("auto", "int8")
    engine_dtype = dtype if keeps_dtype else jnp.dtype(rollout.dtype)
    merge = cfg.lora.merge and decoder.lora is not None
    read = dataclasses.replace(decoder, lora=None) if merge else decoder
    specs = partition_specs(decoder_specs(read), rules)
    if int8:
        specs = int8_specs(specs)
    return Layout(rules, None, specs, engine_dtype, int8=int8, merge=merge)


def _engine_mesh_sizes(cfg: RunConfig, mesh: Mesh, per_process: bool) -> dict[str, int]:
    """Axis sizes of the engine's mesh.

    Raises ValueError if an axis that must stay in one process is split over processes, or if the
    devices cannot be divided into replicas.
    """
    sizes = process_mesh_sizes(mesh) if per_process else dict(mesh.shape)
    if cfg.rollout.layout == "training":
        split_axes = {
            axis: mesh.shape[axis] for axis in ONE_TOKEN_AXES if sizes[axis] != mesh.shape[axis]
        }
        if split_axes:
            raise ValueError(f"the devices of a process do not hold all of the axes {split_axes}")
        return sizes
    return {"replica": -1} | _replica_sizes(cfg, mesh, math.prod(sizes.values()))


def _replica_sizes(cfg: RunConfig, mesh: Mesh, n: int) -> dict[str, int]:
    """Axis sizes of one replica of the engine on `n` devices.

    Raises ValueError if the devices cannot be divided into replicas.
    """
    tensor = cfg.rollout.tensor or mesh.shape["tensor"]
    expert = cfg.rollout.expert or mesh.shape["expert"]
    if n % (tensor * expert):
        raise ValueError(
            f"{n} devices cannot be divided into replicas of {tensor} x {expert} devices; set "
            "config.rollout.tensor and config.rollout.expert to sizes whose product divides "
            f"{n}"
        )
    return {"expert": expert, "tensor": tensor}
