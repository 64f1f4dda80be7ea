"""Mixture of experts: a router sends every token to k of E small MLPs. No token is dropped.

The tokens of a device are sorted by expert for grouped matrix products. With expert parallelism,
each device gathers the tokens of all devices that share the experts, computes its own experts'
contributions, and a reduce-scatter returns the sums to the tokens' devices.
"""

import dataclasses
import functools
import math
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
from flax import nnx, struct
from jax import lax
from jaxtyping import Array, Bool, Float, Int

from jaxrl import types
from jaxrl.kernels.bits import materialize, row_sum
from jaxrl.kernels.grouped_matmul import grouped_matmul
from jaxrl.kernels.nf4 import NF4
from jaxrl.kernels.quantized import Quantized
from jaxrl.models.config import DecoderConfig
from jaxrl.models.layers.chunks import apply_to_chunks, n_chunks
from jaxrl.models.layers.linear import Adapter, own_part
from jaxrl.models.layers.mlp import ACTIVATIONS
from jaxrl.models.layers.stored import (
    QUANTIZED,
    Axes,
    MakeParam,
    dense,
    make_stored,
    stored_specs,
)
from sharding import Rules

# Copies of tokens that a device has room for, as a multiple of its share of them.
ROOM = 2

Live = Bool[Array, "B T"] | Int[Array, "B T"]

# Tensor names in a layer of a Hugging Face file: the router, then an expert's gate, up and down.
HF_NAMES = {
    "qwen3_moe": ("mlp.gate", "mlp.experts.{expert}.%s", ("gate_proj", "up_proj", "down_proj")),
    "mixtral": (
        "block_sparse_moe.gate",
        "block_sparse_moe.experts.{expert}.%s",
        ("w1", "w3", "w2"),
    ),
}


AXES: dict[str, Axes] = {
    "gate": ("experts", "ffw", "w_embed"),
    "up": ("experts", "ffw", "w_embed"),
    "down": ("experts", "w_embed", "ffw"),
}


@struct.dataclass
class RouterLoad:
    """Router statistics of the tokens that are not padding; additive over tokens.

    With a leading layer axis, also over layers.
    """

    prob: types.Array  # float32 [E], sum of each expert's probability
    count: types.Array  # float32 [E], tokens routed to each expert
    n_tokens: types.Array  # float32 []


@struct.dataclass
class ExpertMatrix:
    """A projection of all experts with its adapter: the products of w + scale (b a - b0 a0)."""

    w: types.Array  # [E, out, in], or Quantized, or NF4
    a: types.Array = None  # [E, rank, in]; None without an adapter
    b: types.Array = None  # [E, out, rank]
    a0: types.Array = None  # the start; None without one
    b0: types.Array = None
    scale: float = struct.field(pytree_node=False, default=0.0)
    n_stacked: int = struct.field(pytree_node=False, default=0)  # adapters along the rank


class MoE(nnx.Module):
    """Σ over the k chosen experts e of p_e down_e(act(gate_e(x)) * up_e(x)).

    p = softmax(x Wrᵀ) over all experts, of which the k largest are kept. With `norm_topk` they are
    divided by their sum, which equals the softmax over the k largest logits.
    """

    def __init__(self, make: MakeParam, cfg: DecoderConfig):
        router, expert, names = HF_NAMES[cfg.family]
        E, F, D, lora = cfg.E, cfg.F_expert, cfg.D, cfg.lora
        hf, out_in = dict(zip(AXES, names, strict=True)), dict(gate=(F, D), up=(F, D), down=(D, F))
        self.top_k, self.norm_topk, self.act = cfg.top_k, cfg.norm_topk, cfg.act
        self.implementation = cfg.grouped_matmul
        self.chunk = 0  # tokens of a device at one time, 0 = all; packed.with_mlp_chunk sets it
        self.router = nnx.data(make(f"{router}.weight", (E, D), (None, "w_embed"), hf_shape=(E, D)))

        def weight(name: str) -> Any:
            part, sizes, dtype = expert % hf[name], out_in[name], cfg.base_dtype
            shape = (E, *sizes)
            return make_stored(make, part, shape, AXES[name], n_in=1, hf_shape=sizes, dtype=dtype)

        def make_experts(name: str, shape: tuple[int, ...], axes: Axes, **rest) -> Any:
            return make(name, (E, *shape), ("experts", *axes), **rest)

        def adapter(name: str) -> Adapter | None:
            if lora is None or hf[name] not in lora.targets:
                return None
            if lora.dora and not lora.n_stacked:
                raise ValueError(
                    f"adapters of experts ({hf[name]}) have no magnitudes (DoRA); leave experts "
                    "out of config.lora.target_modules, or set config.lora.dora=False"
                )
            part, sizes, axes = expert % hf[name], out_in[name], AXES[name][1:]
            plain = dataclasses.replace(lora, dora=False)  # of a stack, the DoRA ones are elsewhere
            return Adapter(make_experts, part, plain, sizes, axes, n_out=1, hf_shape=sizes)

        self.gate, self.up, self.down = (nnx.data(weight(name)) for name in AXES)
        self.lora: dict[str, Adapter | None] = nnx.data({name: adapter(name) for name in AXES})

    def __call__(
        self, x: Float[Array, "B T D"], live: Live, rules: Rules
    ) -> tuple[Float[Array, "B T D"], RouterLoad]:
        """(y, load). Tokens that are not `live` (padding) reach no expert and give zeros.

        A number instead of true is how often the token counts in the load.
        """
        rows = rules.spec("batch", "time", None)
        x = jax.reshard(x, rows)
        w = jax.reshard(self.router, rules.gathered(None, "w_embed"))
        logits = jnp.einsum(
            "BTD,ED->BTE", x, w, out_sharding=rows, preferred_element_type=jnp.float32
        )
        choose = functools.partial(route, top_k=self.top_k, norm_topk=self.norm_topk)
        probs, weights, experts = jax.shard_map(choose, in_specs=rows, out_specs=rows)(logits)
        y = self._apply(x, weights, experts, live, rules)
        y = jax.reshard(y, rules.residual_spec(y.shape))
        return y, router_load(probs, experts, live)

    def _apply(self, x, weights, experts, live, rules: Rules) -> Float[Array, "B T D"]:
        rows, tokens = rules.spec("batch", "time", None), rules.spec("batch", "time")
        # Quantized weights have no gradient to scatter: they are gathered before the shard_map.
        fsdp_axes = () if isinstance(self.gate, QUANTIZED) else _fsdp_token_axes(rules)
        layout = rules.spec if fsdp_axes else rules.gathered
        specs = {name: self._matrix_specs(name, layout) for name in self.lora}
        matrices = {
            name: jax.tree.map(jax.reshard, self._matrix(name), spec)
            for name, spec in specs.items()
        }
        ids = next((lora.ids for lora in self.lora.values() if lora is not None), None)
        body = functools.partial(
            sharded_experts,
            specs=specs,
            act=self.act,
            rules=rules,
            fsdp_axes=fsdp_axes,
            implementation=self.implementation,
            chunk=self.chunk,
        )
        in_specs = (rows, rows, rows, tokens, tokens, specs)
        mapped = jax.shard_map(body, in_specs=in_specs, out_specs=rows)
        live, ids = jax.tree.map(lambda a: jax.reshard(a, tokens), (live, ids))
        return mapped(x, weights, experts, live, ids, matrices)

    def _matrix(self, name: str) -> ExpertMatrix:
        w, lora = getattr(self, name), self.lora[name]
        if lora is None:
            return ExpertMatrix(w)
        parts = lora.a, lora.b, lora.a0, lora.b0
        return ExpertMatrix(w, *parts, scale=lora.scale, n_stacked=lora.n_stacked)

    def _matrix_specs(self, name: str, layout: Callable[..., jax.P]) -> ExpertMatrix:
        """PartitionSpecs of `_matrix`."""
        matrix, lora = self._matrix(name), self.lora[name]
        w = stored_specs(matrix.w, layout, AXES[name], 1)
        specs = dataclasses.replace(matrix, w=w)
        if lora is None:
            return specs
        a, b = layout("experts", *lora.a_axes), layout("experts", *lora.b_axes)
        start = {} if lora.a0 is None else dict(a0=a, b0=b)
        return dataclasses.replace(specs, a=a, b=b, **start)


def route(
    logits: Float[Array, "B T E"], *, top_k: int, norm_topk: bool
) -> tuple[Float[Array, "B T E"], Float[Array, "B T k"], Int[Array, "B T k"]]:
    """(probabilities of all experts, weights and indices of the top k, most probable first)."""
    logits = materialize(logits)
    # XLA on CPU computes the exponential of a difference in another way than that of an array.
    powers = jnp.exp(materialize(logits - jnp.max(logits, axis=-1, keepdims=True)))
    probs = powers / row_sum(powers)[..., None]
    weights, experts = lax.top_k(probs, top_k)
    if norm_topk:
        # Sequential sum: a reduction's order could differ between engine and trainer.
        total = functools.reduce(jnp.add, [weights[..., i] for i in range(top_k)])
        weights = weights / total[..., None]
    return probs, weights, experts


def router_load(
    probs: Float[Array, "B T E"], experts: Int[Array, "B T k"], live: Live
) -> RouterLoad:
    """Router statistics of one layer, summed over the live tokens, each as often as it counts."""
    E, kept = probs.shape[-1], live.astype(jnp.float32)
    chosen = jnp.sum(experts[..., None] == jnp.arange(E), axis=-2)
    return RouterLoad(
        prob=jnp.sum(probs * kept[..., None], axis=(0, 1)),
        count=jnp.sum(chosen * kept[..., None], axis=(0, 1)),
        n_tokens=jnp.sum(kept),
    )


def sharded_experts(
    x,
    weights,
    experts,
    live,
    ids,
    matrices: dict[str, ExpertMatrix],
    *,
    specs: dict[str, ExpertMatrix],
    act: str,
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
    n_experts = jax.tree.leaves(matrices)[0].shape[0]
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
        return lax.all_gather(w, fsdp_axes, axis=sharding.index(fsdp_axes), tiled=True)

    experts = jnp.where(live.reshape(n, 1) > 0, experts, -1)
    mark = functools.partial(_mark_varying, have=token_axes, want=weight_axes)
    rows = jax.tree.map(mark, (x, weights, experts, ids))
    matrices = jax.tree.map(gather_weight, matrices, specs)

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


def _fsdp_token_axes(rules: Rules) -> tuple[str, ...]:
    """Axes that shard the weights' model dimension, if their devices have different tokens."""
    axes = rules.mesh_axes("w_embed")
    return axes if set(axes) <= set(rules.mesh_axes("batch") + rules.mesh_axes("time")) else ()


def local_experts(
    x,
    weights,
    experts,
    matrices: dict[str, ExpertMatrix],
    ids: Int[Array, "n 1"] | None = None,
    *,
    n_sharing: int = 1,
    act: str,
    implementation: str,
) -> jax.Array:
    """float32 [n, D]: for each token, the weighted sum over its experts in 0..E-1.

    With a stack of adapters, `ids` are those of the tokens. One of `n_sharing` devices that share
    the experts has 1 / n_sharing of all copies of the tokens if the router is balanced, at worst
    all. Its arrays have room for ROOM times the former, and for all copies only in a step that
    needs it. The results are equal.
    """
    (n, top_k), E = experts.shape, jax.tree.leaves(matrices)[0].shape[0]
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
    act: str,
    implementation: str,
) -> jax.Array:
    """`local_experts` if only the first copies, in the order of experts, have an expert here."""
    x, weights, matrices, ids = tokens
    slots, order, slot_of, sizes = routing
    order, E = order[:n_copies], len(sizes)

    def product(rows, w):
        if isinstance(w, NF4):
            w = dense(w, rows.dtype)
        return grouped_matmul(rows, w, sizes, implementation=implementation)

    # Backward must not keep quantized weights in the dtype of x.
    frozen_product = jax.checkpoint(product)

    def base(rows, w):
        if not isinstance(w, Quantized):
            return (frozen_product if isinstance(w, NF4) else product)(rows, w)
        y = frozen_product(rows, w.values)
        scale = w.scale[jnp.minimum(slots[order], E - 1)]
        return (y.astype(jnp.float32) * scale).astype(y.dtype)

    row_ids = None if ids is None else ids[order // slot_of.shape[1], 0]

    def low_rank(rows, a, b, n_stacked):
        return product(own_part(product(rows, a), row_ids, n_stacked), b)

    def multiply(rows, name):
        matrix = matrices[name]
        y = base(rows, matrix.w)
        if matrix.a is None:
            return y
        change = low_rank(rows, matrix.a, matrix.b, matrix.n_stacked)
        if matrix.a0 is not None:
            change = change - low_rank(rows, matrix.a0, matrix.b0, matrix.n_stacked)
        return y + change * jnp.asarray(matrix.scale, y.dtype)

    rows = dispatch(x, order, slot_of)
    hidden = ACTIVATIONS[act](multiply(rows, "gate")) * multiply(rows, "up")
    # Apply the weights before the product, so that `combine` is a plain sum.
    scale = weights.reshape(-1)[order].astype(jnp.float32)
    hidden = (hidden.astype(jnp.float32) * scale[:, None]).astype(x.dtype)
    return combine(multiply(hidden, "down"), order, slot_of)


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
