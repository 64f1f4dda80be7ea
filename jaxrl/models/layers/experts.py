"""The experts of a mixture of experts: MLPs, each applied to the tokens routed to it.

The tokens of a device are sorted by expert for grouped matrix products. With expert parallelism,
each device gathers the tokens of all devices that share the experts, computes its own experts'
contributions, and a reduce-scatter returns the sums to the tokens' devices.
"""

import dataclasses
import functools
import math

import jax
import jax.numpy as jnp
from flax import struct
from jax import lax
from jaxtyping import Array, Float, Int

from jaxrl import types
from jaxrl.kernels.bits import materialize
from jaxrl.kernels.grouped_matmul import grouped_matmul
from jaxrl.kernels.nf4 import NF4
from jaxrl.kernels.quantized import Quantized
from jaxrl.models.config import ClampedGLU
from jaxrl.models.layers.chunks import apply_to_chunks, n_chunks
from jaxrl.models.layers.linear import own_part
from jaxrl.models.layers.mlp import gated
from jaxrl.models.layers.stored import dense
from jaxrl.types import Tree
from sharding import Rules, gather_shards

# Copies of tokens that a device has room for, as a multiple of its share of them.
ROOM = 2


@struct.dataclass
class ExpertMatrix:
    """A projection of all experts with its adapter: the products of w + scale (b a - b0 a0) + bias.

    With `layer`, the arrays are those of stacked layers [L, E, ...], and the products those of one.
    """

    w: types.Array  # [E, out, in], or Quantized, or NF4
    a: types.Array = None  # [E, rank, in]; None without an adapter
    b: types.Array = None  # [E, out, rank]
    a0: types.Array = None  # the start; None without one
    b0: types.Array = None
    bias: types.Array = None  # [E, out], of the products; None without one
    layer: types.Array = None  # int32 []
    scale: float = struct.field(pytree_node=False, default=0.0)
    n_stacked: int = struct.field(pytree_node=False, default=0)  # adapters along the rank

    @property
    def n_experts(self) -> int:
        return jax.tree.leaves(self.w)[0].shape[-3]


def sharded_experts(
    x,
    weights,
    experts,
    live,
    ids,
    matrices: dict[str, ExpertMatrix],
    *,
    specs: dict[str, ExpertMatrix],
    act: str | ClampedGLU,
    rules: Rules,
    fsdp_axes: tuple[str, ...],
    implementation: str,
    chunk: int,
) -> jax.Array:
    """shard_map body: this device's experts applied to all tokens of its expert group.

    Tokens are all-gathered along the expert axis if the batch is sharded over it, and the sums are
    reduce-scattered. If every device has all tokens (decode), the sums are all-reduced. Weights
    sharded over devices with different tokens (FSDP, `fsdp_axes`) are gathered here, so their
    gradient takes one reduce-scatter. `specs` are the PartitionSpecs of the matrices. Every device
    applies its experts to at most `chunk` of its tokens at one time; 0 = all. `ids` are the
    tokens' adapters in a stack, else None.
    """
    shape, n = x.shape, x.shape[0] * x.shape[1]
    x, weights, experts = (a.reshape(n, a.shape[-1]) for a in (x, weights, experts))
    ids = None if ids is None else ids.reshape(n, 1)
    n_experts = matrices["gate"].n_experts
    expert_axes, ffw_axes = rules.mesh_axes("experts"), rules.mesh_axes("ffw")
    token_axes = rules.mesh_axes("batch") + rules.mesh_axes("time")
    shared = tuple(a for a in expert_axes if a in token_axes)  # also shard the tokens
    weight_axes = expert_axes + ffw_axes

    def gather_weight(w: jax.Array, spec: jax.P) -> jax.Array:
        sharding = [axes if isinstance(axes, tuple) else (axes,) for axes in spec]
        have = tuple(axis for axes in sharding for axis in axes if axis)
        w = _mark_varying(w, have=have, want=tuple(dict.fromkeys(token_axes + weight_axes)))
        if not fsdp_axes or fsdp_axes not in sharding:
            return w
        return gather_shards(w, fsdp_axes, sharding.index(fsdp_axes))

    experts = jnp.where(live.reshape(n, 1) > 0, experts, -1)
    mark = functools.partial(_mark_varying, have=token_axes, want=weight_axes)
    rows = jax.tree.map(mark, (x, weights, experts, ids))
    matrices = jax.tree.map(gather_weight, matrices, specs)
    if ffw_axes and (bias := matrices["down"].bias) is not None:  # of a sum over these devices
        bias = jnp.where(lax.axis_index(ffw_axes) == 0, bias, 0)
        matrices["down"] = dataclasses.replace(matrices["down"], bias=bias)

    def apply(matrices: dict[str, ExpertMatrix], tokens: tuple) -> jax.Array:
        if shared:
            gather = functools.partial(lax.all_gather, axis_name=shared, axis=0, tiled=True)
            tokens = jax.tree.map(gather, tokens)
        x, weights, experts, ids = tokens
        if expert_axes:
            experts = experts - lax.axis_index(expert_axes) * n_experts
        y = local_experts(
            x,
            weights,
            experts,
            matrices,
            ids,
            n_sharing=math.prod(map(lax.axis_size, expert_axes)),
            act=act,
            implementation=implementation,
        )
        y = y.astype(x.dtype)
        if rest := tuple(a for a in weight_axes if a not in shared):
            y = lax.psum(y, rest)
        if shared:
            y = lax.psum_scatter(y, shared, scatter_dimension=0, tiled=True)
        return y

    if (n_parts := n_chunks(n, chunk, n)) == 1:
        return apply(matrices, rows).reshape(shape)
    parts = jax.tree.map(lambda a: a.reshape(n_parts, -1, a.shape[-1]), rows)
    return apply_to_chunks(apply, matrices, parts).reshape(shape)


def local_experts(
    x,
    weights,
    experts,
    matrices: dict[str, ExpertMatrix],
    ids: Int[Array, "n 1"] | None = None,
    *,
    n_sharing: int = 1,
    act: str | ClampedGLU,
    implementation: str,
) -> jax.Array:
    """float32 [n, D]: for each token, the weighted sum over its experts in 0..E-1.

    With a stack of adapters, `ids` are those of the tokens. One of `n_sharing` devices that share
    the experts has 1 / n_sharing of all copies of the tokens if the router is balanced, at worst
    all. Its arrays have room for ROOM times the former, and for all copies only in a step that
    needs it. The results are equal.
    """
    (n, top_k), E = experts.shape, matrices["gate"].n_experts
    slots = jnp.where((experts >= 0) & (experts < E), experts, E).reshape(-1)
    order = jnp.argsort(
        slots, stable=True
    )  # slots of other devices' experts and of padding come last
    slot_of = jnp.argsort(order).reshape(n, top_k)
    sizes = jnp.sum(slots[:, None] == jnp.arange(E), axis=0, dtype=jnp.int32)
    tokens, routing = (x, weights, matrices, ids), (slots, order, slot_of, sizes)
    n_copies, room = n * top_k, -(-ROOM * n * top_k // n_sharing)
    compute = functools.partial(_first_copies, act=act, implementation=implementation)
    if room >= n_copies:
        return compute(n_copies, tokens, routing)
    # Backward keeps the inputs of both branches, not the intermediate arrays.
    few, every = (jax.checkpoint(functools.partial(compute, m)) for m in (room, n_copies))
    return lax.cond(jnp.sum(sizes) <= room, few, every, tokens, routing)


def _first_copies(
    n_copies: int,
    tokens: tuple[jax.Array, jax.Array, dict[str, ExpertMatrix], jax.Array | None],
    routing: tuple[jax.Array, ...],
    *,
    act: str | ClampedGLU,
    implementation: str,
) -> jax.Array:
    """`local_experts` if only the first copies, in the order of experts, have an expert here."""
    x, weights, matrices, ids = tokens
    slots, order, slot_of, sizes = routing
    order, E = order[:n_copies], len(sizes)

    def product(rows, w, layer):
        if isinstance(w, NF4):
            w, layer = dense(_of_layer(w, layer), rows.dtype), None
        return grouped_matmul(rows, w, sizes, layer=layer, implementation=implementation)

    # Backward must not keep quantized weights in the dtype of x.
    frozen_product = jax.checkpoint(product)

    def base(rows, w, layer):
        if not isinstance(w, Quantized):
            return (frozen_product if isinstance(w, NF4) else product)(rows, w, layer)
        y = frozen_product(rows, w.values, layer)
        scale = _of_layer(w.scale, layer)[jnp.minimum(slots[order], E - 1)]
        return (y.astype(jnp.float32) * scale).astype(y.dtype)

    row_ids = None if ids is None else ids[order // slot_of.shape[1], 0]

    def low_rank(rows, a, b, matrix):
        low = own_part(product(rows, a, matrix.layer), row_ids, matrix.n_stacked)
        return product(low, b, matrix.layer)

    def multiply(rows, name):
        matrix = matrices[name]
        y = base(rows, matrix.w, matrix.layer)
        if matrix.a is None:
            return y
        change = low_rank(rows, matrix.a, matrix.b, matrix)
        if matrix.a0 is not None:
            change = change - low_rank(rows, matrix.a0, matrix.b0, matrix)
        return y + change * jnp.asarray(matrix.scale, y.dtype)

    def add_bias(y, name, scale=None):
        matrix = matrices[name]
        if matrix.bias is None:
            return y
        bias = expert_rows(_of_layer(matrix.bias, matrix.layer), slots[order])
        if scale is not None:
            bias = bias.astype(jnp.float32) * scale[:, None]
        return y + materialize(bias.astype(y.dtype))

    rows = dispatch(x, order, slot_of)
    gate, up = (add_bias(multiply(rows, name), name) for name in ("gate", "up"))
    hidden = gated(act, gate, up)
    # Apply the weights before the product, so that `combine` is a plain sum.
    scale = weights.reshape(-1)[order].astype(jnp.float32)
    hidden = (hidden.astype(jnp.float32) * scale[:, None]).astype(x.dtype)
    return combine(add_bias(multiply(hidden, "down"), "down", scale), order, slot_of)


def _of_layer(stack: Tree, layer: jax.Array | None) -> Tree:
    """The arrays of one layer of a stack; without a layer, the arrays themselves."""
    if layer is None:
        return stack
    return jax.tree.map(lambda a: lax.dynamic_index_in_dim(a, layer, keepdims=False), stack)


@jax.custom_vjp
def expert_rows(of_experts: Float[Array, "E F"], slots: Int[Array, "m"]) -> Float[Array, "m F"]:
    """The row of each slot's expert; zeros for slots of E, which have no expert here.

    The gradient sums in float32.
    """
    rows = of_experts[jnp.minimum(slots, len(of_experts) - 1)]
    return jnp.where((slots < len(of_experts))[:, None], rows, 0)


def _expert_rows_backward(saved, grad):
    of_experts, slots = saved
    chosen = (slots[:, None] == jnp.arange(len(of_experts))).astype(grad.dtype)
    total = jnp.einsum("mE,mF->EF", chosen, grad, preferred_element_type=jnp.float32)
    return total.astype(of_experts.dtype), None


expert_rows.defvjp(
    lambda of_experts, slots: (expert_rows(of_experts, slots), (of_experts, slots)),
    _expert_rows_backward,
)


@jax.custom_vjp
def dispatch(
    x: Float[Array, "n D"], order: Int[Array, "m"], slot_of: Int[Array, "n k"]
) -> Float[Array, "m D"]:
    """Row i is row order[i] // k of `x`; slot_of[j, s] is the output row of token j's copy s.

    A copy with a slot of m or more has no row.
    """
    return x[order // slot_of.shape[1]]


@jax.custom_vjp
def combine(
    rows: Float[Array, "m D"], order: Int[Array, "m"], slot_of: Int[Array, "n k"]
) -> Float[Array, "n D"]:
    """float32 [n, D]: each token's sum of k rows, in the order of its experts' weights.

    `order` and `slot_of` are those of `dispatch`. It gathers instead of scattering, so a token's
    bits do not depend on the other tokens. No float32 copy of the rows exists.
    """
    rows = materialize(rows)
    mode = "fill" if len(rows) < slot_of.size else None

    def copy(i: int) -> jax.Array:
        return rows.at[slot_of[:, i]].get(mode=mode, fill_value=0).astype(jnp.float32)

    return functools.reduce(jnp.add, map(copy, range(slot_of.shape[1])))


# dispatch and combine are each other's transpose.
dispatch.defvjp(
    lambda x, order, slot_of: (dispatch(x, order, slot_of), (order, slot_of)),
    lambda saved, grad: (combine(grad, *saved).astype(grad.dtype), None, None),
)
combine.defvjp(
    lambda rows, *slots: (combine(rows, *slots), (rows[:0], *slots)),
    lambda saved, grad: (dispatch(grad.astype(saved[0].dtype), *saved[1:]), None, None),
)


def _mark_varying(a: jax.Array, *, have: tuple[str, ...], want: tuple[str, ...]) -> jax.Array:
    """`a`, typed as varying over the axes `want` too; the gradient is summed over added axes."""
    more = tuple(axis for axis in want if axis not in have)
    return lax.pcast(a, more, to="varying") if more else a
