"""How the roles of a run lie on its devices: each on a mesh and by rules of its own, over the same devices."""

import contextlib
import dataclasses
import math
from collections.abc import Iterator
from typing import Any

import jax
import jax.numpy as jnp
from jax.sharding import Mesh

from jaxrl.config.keys import RunConfig
from jaxrl.kernels.quantized import Quantized
from jaxrl.models.config import DecoderConfig
from jaxrl.models.decoder import decoder_specs
from jaxrl.models.mesh_check import check_mesh
from jaxrl.models.quantize import int8_specs, map_matrices, quantize_int8
from jaxrl.models.spec import abstract_params, partition_specs
from jaxrl.types import Tree
from sharding import (
    DECODE,
    REPLICAS,
    Resharding,
    Rules,
    bytes_per_device,
    copy_tree,
    on_mesh,
    process_mesh_sizes,
    reshape_mesh,
)
from sharding.mesh import ONE_TOKEN_AXES
from sharding.rules import PIPELINE, PRESETS, TRAIN


def training_rules(cfg: RunConfig) -> Rules:
    """The rules of the axes that the mesh uses."""
    return _rules(cfg, cfg.mesh.stage, cfg.mesh.sequence)


def _rules(cfg: RunConfig, stage: int, sequence: int) -> Rules:
    if stage != 1:
        return PIPELINE
    return TRAIN if sequence == 1 else PRESETS[cfg.learner.sequence_parallel]


@dataclasses.dataclass(frozen=True)
class Layout:
    """Where a role works on the policy's weights."""

    rules: Rules
    way: Resharding | None  # of the weights from training's mesh; None: used where they lie
    specs: Tree  # PartitionSpecs of the weights
    dtype: jnp.dtype  # of weights that are not in int8, and of activations
    of_process: bool = False  # each process for itself, on its own devices
    int8: bool = False  # matrices are, made anew from training's for every use

    @contextlib.contextmanager
    def weights(
        self, params: Tree, timed: contextlib.AbstractContextManager | None = None
    ) -> Iterator[Tree]:
        """The policy's weights where the role works, and its mesh set. What had to be copied lives as
        long as the block; making it is done within `timed`."""
        if self.way is None:
            yield params
            return
        with timed or contextlib.nullcontext():
            ours = self.compact(params)
            shared = [own and stays for _, own, stays in self._leaves(ours)]
            there = jax.block_until_ready(self.way.reshard(ours, self.specs, self.dtype))
            del ours
        with self.on_mesh():
            try:
                yield there
            finally:  # at once, whoever still refers to them
                for leaf, is_shared in zip(jax.tree.leaves(there), shared, strict=True):
                    if not is_shared:
                        leaf.delete()

    def copy(self, params: Tree) -> Tree:
        """The policy's weights of now, where the role works, in buffers that no update donates."""
        own = copy_tree(params)
        return own if self.way is None else self.way.reshard(own, self.specs, self.dtype)

    def on_mesh(self) -> contextlib.AbstractContextManager:
        """The role's mesh set."""
        return contextlib.nullcontext() if self.way is None else jax.set_mesh(self.way.mesh)

    def compact(self, params: Tree) -> Tree:
        """The weights as the role reads them, where they lie: what is not in int8 is shared."""
        return quantize_int8(params, self.dtype) if self.int8 else params

    def _leaves(self, ours: Tree) -> list[tuple[Any, bool, bool]]:
        """Of `compact`, each with whether it is training's and whether it can stay where it lies."""
        assert self.way is not None
        own = jax.tree.map(lambda leaf: True, ours)
        if self.int8:
            own = map_matrices(lambda w, n_in: Quantized(False, False), own)
        leaves = zip(*map(jax.tree.leaves, (ours, own, self.specs)), strict=True)
        return [
            (a, is_own, self.way.shares_buffers(a, spec, self.dtype)) for a, is_own, spec in leaves
        ]

    def _abstract(self, params: Tree, mesh: Mesh) -> Tree:
        return on_mesh(jax.eval_shape(self.compact, params), mesh)

    def mesh(self, training: Mesh) -> Mesh:
        return training if self.way is None else self.way.mesh

    def shares(self, params: Tree) -> tuple[int, int]:
        """Bytes per device of the (abstract) policy's weights on the mesh that is set: those that the role uses
        as they lie, and those that are copied."""
        if self.way is None:
            return bytes_per_device(params), 0
        leaves = self._leaves(self._abstract(params, jax.sharding.get_mesh()))
        aliased = bytes_per_device([a for a, own, stays in leaves if own and stays])
        return aliased, bytes_per_device([a for a, own, stays in leaves if own and not stays])

    def lower(self, params: Tree) -> jax.stages.Lowered:
        """The program that copies what does not lie so."""
        assert self.way is not None
        ours = self._abstract(params, jax.sharding.get_mesh())
        return self.way.lower(ours, self.specs, self.dtype)

    def abstract_weights(self, decoder: DecoderConfig, training: Mesh) -> Tree:
        mesh = self.mesh(training)
        whole = abstract_params(decoder_specs(decoder), self.rules, self.dtype, mesh)
        with jax.set_mesh(mesh):
            return self._abstract(whole, mesh)


def role_layout(cfg: RunConfig, role: str, decoder: DecoderConfig, dtype: jnp.dtype) -> Layout:
    """Of "score", "ref", "critic" or "reward_model", by the section of the config of that name, on the mesh that
    is set.

    Raises ValueError where its sizes do not divide the devices or the model.
    """
    mesh = jax.sharding.get_mesh()
    key, sizes = {
        "score": ("score", cfg.score),
        "ref": ("ref", cfg.ref),
        "critic": ("critic.mesh", cfg.critic.mesh),
        "reward_model": ("reward_model.mesh", cfg.reward_model.mesh),
    }[role]
    own = {
        "stage": sizes.stage or mesh.shape["stage"],
        "sequence": sizes.sequence or mesh.shape["sequence"],
        "tensor": sizes.tensor or mesh.shape["tensor"],
    }
    kept = own | {"expert": mesh.shape["expert"]}
    replica = math.gcd(mesh.shape["replica"], mesh.size // math.prod(kept.values()))
    way = reshape_mesh(mesh, per_process=False, **kept, replica=replica, fsdp=-1)
    rules = _rules(cfg, own["stage"], own["sequence"])
    check_mesh(decoder, way.mesh.shape, rules, keys=f"config.{key} and config.mesh sizes")
    specs = partition_specs(decoder_specs(decoder), rules)
    return Layout(rules, None if way.mesh == mesh else way, specs, dtype)


def rollout_layout(cfg: RunConfig, decoder: DecoderConfig, dtype: jnp.dtype) -> Layout:
    """Of the engine, as `rollout.layout` and `rollout.engines` say, on the mesh that is set; `dtype` is that
    of training's weights.

    Raises ValueError where the devices cannot be laid out so, or do not divide the model.
    """
    mesh = jax.sharding.get_mesh()
    if mesh.is_multi_process and cfg.rollout.engines != "mesh":
        try:
            return _engine_layout(cfg, decoder, dtype, mesh, of_process=True)
        except ValueError as problem:
            if cfg.rollout.engines == "process":
                raise ValueError(
                    f"config.rollout.engines='process' is not possible: {problem}; set smaller sizes in "
                    "config.mesh, or config.rollout.engines='mesh'"
                ) from problem
    return _engine_layout(cfg, decoder, dtype, mesh, of_process=False)


def _engine_layout(
    cfg: RunConfig, decoder: DecoderConfig, dtype: jnp.dtype, mesh: Mesh, *, of_process: bool
) -> Layout:
    rollout = cfg.rollout
    sizes = process_mesh_sizes(mesh) if of_process else dict(mesh.shape)
    if rollout.layout == "training":
        torn = {
            axis: mesh.shape[axis] for axis in ONE_TOKEN_AXES if sizes[axis] != mesh.shape[axis]
        }
        if torn:
            raise ValueError(f"the devices of a process do not hold the whole of {torn}")
    else:
        n = math.prod(sizes.values())
        tensor, expert = (
            rollout.tensor or mesh.shape["tensor"],
            rollout.expert or mesh.shape["expert"],
        )
        if n % (tensor * expert):
            raise ValueError(
                f"{n} devices are not shared out by replicas of {tensor} x {expert} devices; set "
                f"config.rollout.tensor and config.rollout.expert to sizes whose product divides {n}"
            )
        sizes = {"replica": -1, "expert": expert, "tensor": tensor}
    way = reshape_mesh(mesh, per_process=of_process, **sizes)
    replicas = rollout.layout == "replicas" and way.mesh.shape["replica"] > 1
    rules = REPLICAS if replicas else DECODE
    check_mesh(decoder, way.mesh.shape, rules, keys="config.rollout.tensor and .expert to sizes")
    int8 = rollout.dtype == "int8"
    own = dtype if int8 or rollout.dtype == "auto" else jnp.dtype(rollout.dtype)
    in_place = way.mesh == mesh and own == dtype and not int8
    specs = partition_specs(decoder_specs(decoder), rules)
    if int8:
        specs = int8_specs(specs)
    return Layout(rules, None if in_place else way, specs, own, of_process, int8)
