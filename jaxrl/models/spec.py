"""Parameter table of a model: shape, logical axes, init and Hugging Face name per parameter."""

import dataclasses
import functools
import itertools
import math
import re
import zlib
from types import EllipsisType

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import AbstractMesh, Mesh, NamedSharding
from jax.typing import DTypeLike

from jaxrl.kernels.bits import materialize
from jaxrl.types import Tree
from sharding import Rules

PLACEHOLDER = re.compile(r"\{(layer|expert)\}")
CONSTANTS = {"zeros": 0.0, "ones": 1.0, "infinity": math.inf, "minus_infinity": -math.inf}


@dataclasses.dataclass(frozen=True)
class ParamSpec:
    """One parameter.

    For stacked layers or experts, `shape` and `axes` have leading axes for them, layers first, and
    `hf` contains the placeholders `{layer}` and `{expert}`.
    """

    shape: tuple[int, ...]
    axes: tuple[str | None, ...]
    init: str  # a key of CONSTANTS | "normal" | "unit_normal" | "lora_a" | "log_decay"
    hf: str  # e.g. "model.layers.0.mlp.up_proj.weight"
    hf_shape: tuple[int, ...]  # of one tensor in the file
    dtype: str | None = None  # of parts of quantized weights; None: the model's
    layers: range = range(0)  # numbers of the stacked layers in the file
    # The tensor in the file is a sequence of blocks, each with so many rows for every index of the
    # first axis; here all rows of an index are adjacent. (): in the same order.
    blocks: tuple[int, ...] = ()

    @property
    def stacked_shape(self) -> tuple[int, ...]:
        """Sizes of the leading axes that are separate tensors in a file."""
        return self.shape[: len(PLACEHOLDER.findall(self.hf))]

    @property
    def is_matrix(self) -> bool:
        """Whether one tensor in the file is a matrix, whatever the shape is here."""
        return len(self.hf_shape) == 2

    @property
    def multiplies(self) -> bool:
        """Whether it is a matrix in the file or in the model, where patches of images are vectors.

        The filters of convolutions over time are none.
        """
        n_axes = len(self.shape) - len(self.stacked_shape)
        return self.is_matrix or (n_axes == 2 and len(self.hf_shape) > 2)

    @property
    def matrix_axes(self) -> tuple[tuple[int, ...], tuple[int, ...]]:
        """Axes of `shape` that are the rows, and those that are the columns, of a matrix."""
        first = len(self.stacked_shape)
        end = first + 1
        while math.prod(self.shape[first:end]) < self.hf_shape[0]:
            end += 1
        return tuple(range(first, end)), tuple(range(end, len(self.shape)))

    @property
    def file_rows(self) -> np.ndarray | EllipsisType:
        """The row in the file of each of the rows here: an index of the file's tensor."""
        if not self.blocks:
            return ...
        n = self.hf_shape[0] // sum(self.blocks)
        ends = n * np.cumsum(self.blocks)
        blocks = np.split(np.arange(self.hf_shape[0]), ends[:-1])
        return np.concatenate([block.reshape(n, -1) for block in blocks], axis=1).reshape(-1)

    def from_file(self, values: np.ndarray) -> np.ndarray:
        """One tensor of the file in the shape here, without the axes of layers and experts."""
        return values[self.file_rows].reshape(self.shape[len(self.stacked_shape) :])

    def to_file(self, values: np.ndarray) -> np.ndarray:
        """The inverse of `from_file`."""
        rows = values.reshape(self.hf_shape)
        if not self.blocks:
            return rows
        out = np.empty_like(rows)
        out[self.file_rows] = rows
        return out


def is_spec(leaf: object) -> bool:
    return isinstance(leaf, ParamSpec)


def hf_names(spec: ParamSpec) -> list[str]:
    """The parameter's Hugging Face tensor names, one per index of `spec.stacked_shape`."""
    names = PLACEHOLDER.findall(spec.hf)
    numbers = [
        spec.layers if name == "layer" else range(spec.shape[i]) for i, name in enumerate(names)
    ]
    return [
        spec.hf.format(**dict(zip(names, place, strict=True)))
        for place in itertools.product(*numbers)
    ]


def map_specs(fn, specs: Tree, *rest: Tree) -> Tree:
    return jax.tree.map(fn, specs, *rest, is_leaf=is_spec)


def partition_specs(specs: Tree, rules: Rules) -> Tree:
    return map_specs(lambda s: rules.spec(*s.axes), specs)


def abstract_params(
    specs: Tree, rules: Rules, dtype: DTypeLike, mesh: Mesh | AbstractMesh | None = None
) -> Tree:
    """Shapes, dtypes and shardings of the parameters on `mesh` (default: the current mesh)."""
    mesh = jax.sharding.get_abstract_mesh() if mesh is None else mesh

    def abstract(spec: ParamSpec) -> jax.ShapeDtypeStruct:
        sharding = NamedSharding(mesh, rules.spec(*spec.axes))
        return jax.ShapeDtypeStruct(spec.shape, spec.dtype or dtype, sharding=sharding)

    return map_specs(abstract, specs)


def count_params(specs: Tree) -> int:
    return sum(math.prod(s.shape) for s in jax.tree.leaves(specs, is_leaf=is_spec))


def init_params(key: jax.Array, specs: Tree, rules: Rules, dtype: DTypeLike) -> Tree:
    """Random parameters, each leaf created in its own sharding.

    Normal leaves have std 0.02, unit normal ones 1. The A of an adapter is uniform between
    -1 / sqrt(in) and 1 / sqrt(in), as in PEFT. A log decay is the logarithm of a number that is
    uniform between 0.01 and 16.

    A layer's values derive from the key and its Hugging Face name, so they are the same on every
    mesh, bit for bit, and for both layer layouts.
    """

    def create(spec: ParamSpec) -> jax.Array:
        seeds = np.array([zlib.crc32(name.encode()) for name in hf_names(spec)], np.uint32)
        out = rules.spec(*spec.axes)
        n_lead = len(spec.stacked_shape)
        leaf_dtype = jnp.dtype(spec.dtype or dtype)
        return _init_param(key, seeds, spec.shape, spec.init, n_lead, leaf_dtype, out)

    return map_specs(create, specs)


@functools.partial(jax.jit, static_argnums=(2, 3, 4, 5, 6))
def _init_param(
    key: jax.Array,
    seeds: jax.Array,
    shape: tuple[int, ...],
    init: str,
    n_lead: int,
    dtype: jnp.dtype,
    out: jax.P,
) -> jax.Array:
    """One parameter; `seeds` holds one number for every index of its first `n_lead` axes."""
    if init in CONSTANTS:
        return jax.reshard(jnp.full(shape, CONSTANTS[init], dtype), out)
    keys = jax.vmap(lambda seed: jax.random.fold_in(key, seed))(seeds)
    if init in ("normal", "unit_normal"):
        draw = functools.partial(jax.random.normal, shape=shape[n_lead:])
        scale = 0.02 if init == "normal" else 1.0
    elif init == "log_decay":
        draw = functools.partial(jax.random.uniform, shape=shape[n_lead:], minval=0.01, maxval=16.0)
        scale = 1.0
    else:
        draw = functools.partial(jax.random.uniform, shape=shape[n_lead:], minval=-1.0)
        scale = math.prod(shape[n_lead + 1 :]) ** -0.5
    values = jax.vmap(draw)(keys).reshape(shape) if n_lead else draw(keys[0])
    values = scale * (jnp.log(values) if init == "log_decay" else values)
    # In one fusion with the reshard, XLA contracts products and sums by the shape of a shard.
    return jax.reshard(materialize(values.astype(dtype)), out)
