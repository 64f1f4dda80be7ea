"""Newton-Schulz iteration on sharded matrices: every device works on whole matrices."""

import collections
import dataclasses
import functools
import math
from collections.abc import Sequence

import jax
import jax.numpy as jnp
from jax.typing import DTypeLike

from jaxrl.models.spec import ParamSpec

# x -> a x + b x^3 + c x^5 has the slope a at 0, and moves singular values of (0, 1] to about 1.
COEFFICIENTS = (3.4445, -4.7750, 2.0315)
EPSILON = 1e-7


def newton_schulz(x: jax.Array, steps: int) -> jax.Array:
    """An approximation of U Vᵀ, the orthogonal factor of a matrix x = U S Vᵀ [rows, columns].

    X_0 = x / ||x||; X_{k+1} = a X_k + (b A + c A^2) X_k with A = X_k X_kᵀ. Singular values end
    between about 0.7 and 1.2 (https://kellerjordan.github.io/posts/muon). Of X and Xᵀ, the
    iteration takes the one with fewer rows.
    """
    if x.shape[0] > x.shape[1]:
        return newton_schulz(x.T, steps).T
    a, b, c = COEFFICIENTS
    x = x / (jnp.linalg.norm(x.astype(jnp.float32)) + EPSILON).astype(x.dtype)
    for _ in range(steps):
        gram = x @ x.T
        x = a * x + (b * gram + c * (gram @ gram)) @ x
    return x


@dataclasses.dataclass(frozen=True)
class _Layout:
    """A matrix and the mesh axes that shard its rows and columns."""

    shape: tuple[int, int]
    row_axes: tuple[str, ...]
    col_axes: tuple[str, ...]
    lead_axes: tuple[str, ...]  # of stacked layers and experts


def orthogonalize(
    arrays: Sequence[jax.Array], specs: Sequence[ParamSpec], *, steps: int, dtype: DTypeLike
) -> list[jax.Array]:
    """`newton_schulz` of every matrix in the arrays, in `dtype`; shapes and shardings stay.

    Matrices of one layout (of all layers, and q with o for example) form a group. For every mesh
    axis that shards them, one all-to-all gives each device whole matrices, an equal share of the
    group (the last devices have fewer), and one brings the results back. Devices that hold copies
    take a share each, and all-gather the results. The iterations need no collective.
    """
    arrays = [array.astype(dtype) for array in arrays]
    shardings = [jax.typeof(array).sharding for array in arrays]
    layouts = [_layout(*pair) for pair in zip(specs, shardings, strict=True)]
    run = functools.partial(_orthogonalize_local, specs=specs, layouts=layouts, steps=steps)
    if jax.sharding.get_abstract_mesh().empty:
        return run(arrays)
    parts = [sharding.spec for sharding in shardings]
    return jax.shard_map(run, in_specs=(parts,), out_specs=parts)(arrays)


def _layout(spec: ParamSpec, sharding: jax.sharding.NamedSharding) -> _Layout:
    parts = (*sharding.spec, *[None] * (len(spec.shape) - len(sharding.spec)))

    def axes(dims: Sequence[int]) -> tuple[str, ...]:
        named = [parts[d] if isinstance(parts[d], tuple) else (parts[d],) for d in dims]
        return tuple(axis for axes in named for axis in axes if axis)  # pyright: ignore[reportOptionalIterable]

    rows, cols = spec.matrix_axes
    shape = math.prod(spec.shape[d] for d in rows), math.prod(spec.shape[d] for d in cols)
    return _Layout(shape, axes(rows), axes(cols), axes(range(len(spec.stacked_shape))))


def _orthogonalize_local(
    arrays: Sequence[jax.Array],
    *,
    specs: Sequence[ParamSpec],
    layouts: Sequence[_Layout],
    steps: int,
) -> list[jax.Array]:
    """`orthogonalize` of one device's shards."""
    groups: dict[_Layout, list[int]] = collections.defaultdict(list)
    for i, layout in enumerate(layouts):
        groups[layout].append(i)
    results: dict[int, jax.Array] = {}
    for layout, members in groups.items():
        stacks = [_as_matrices(arrays[i], specs[i]) for i in members]
        sizes = [len(stack) for stack in stacks]
        whole = _orthogonalize_stack(jnp.concatenate(stacks), layout, steps)
        starts = [sum(sizes[:k]) for k in range(len(sizes))]
        for i, start, size in zip(members, starts, sizes, strict=True):
            results[i] = whole[start : start + size].reshape(arrays[i].shape)
    return [results[i] for i in range(len(arrays))]


def _as_matrices(x: jax.Array, spec: ParamSpec) -> jax.Array:
    """A shard as [matrices, rows, columns]."""
    rows, cols = (math.prod(x.shape[d] for d in dims) for dims in spec.matrix_axes)
    return x.reshape(-1, rows, cols)


def _orthogonalize_stack(x: jax.Array, layout: _Layout, steps: int) -> jax.Array:
    """Results [matrices, rows, columns] of matrices of one layout, as this device's shards."""
    mesh = jax.sharding.get_abstract_mesh()
    dims = [*((a, 1) for a in layout.row_axes[::-1]), *((a, 2) for a in layout.col_axes[::-1])]
    sharding = [(axis, dim) for axis, dim in dims if mesh.shape[axis] > 1]
    used = {*layout.row_axes, *layout.col_axes, *layout.lead_axes}
    copies = tuple(axis for axis, size in mesh.shape.items() if size > 1 and axis not in used)
    n_copies = math.prod(mesh.shape[axis] for axis in copies)
    n_shares = n_copies * math.prod(mesh.shape[axis] for axis, _ in sharding)
    n = len(x)
    x = jnp.pad(x, ((0, -n % n_shares), (0, 0), (0, 0)))
    for axis, dim in sharding:  # of several axes of a dimension, the last one varies fastest
        x = jax.lax.all_to_all(x, axis, 0, dim, tiled=True)
    if copies:
        share = len(x) // n_copies
        x = jax.lax.dynamic_slice_in_dim(x, jax.lax.axis_index(copies) * share, share)
    # One matrix at a time: a step needs the memory of one matrix's products.
    x = jax.lax.map(functools.partial(newton_schulz, steps=steps), x)
    if copies:
        x = jax.lax.all_gather(x, copies, tiled=True, to="invarying")
    for axis, dim in reversed(sharding):
        x = jax.lax.all_to_all(x, axis, dim, 0, tiled=True)
    return x[:n]
