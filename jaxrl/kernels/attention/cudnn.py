"""Packed attention on NVIDIA GPUs by cuDNN's fused kernels, forward and backward.

cuDNN reads segments where they lie: a call is given the first token and the length of each ("slots"). Of every slot it
keeps the logs of the sums of a whole row's softmax and, backward, float32 gradients into q of a whole row. So a call
has as many slots as fit into SLOT_BYTES, and where a device has more segments than that, further calls follow. Between
the calls the logs lie once a token.

The calls are XLA's `__cudnn$fmhaSoftmax` as JAX makes them for jax.nn.dot_product_attention(implementation="cudnn"),
which knows no packed rows: its private function does, and the tests compare ours with the calls of that one.
"""

import dataclasses
import functools
import json

import jax
import jax.numpy as jnp
from flax import struct
from jaxtyping import Array, Float, Int

from jaxrl.kernels.attention_spec import AttentionSpec
from jaxrl.kernels.choice import check_platform
from jaxrl.kernels.shard_attention import shard_attention

SLOT_BYTES = 2**29  # of what cuDNN keeps for the slots of a call while it works
WIDEST = 256  # head

# The products that a call stands for: contracted axes and batch axes, of the left and the right side.
FORWARD = {
    "bmm1": ((3, 3), ((0, 2), (0, 2))),
    "bmm2": ((3, 1), ((0, 1), (0, 2))),
}
BACKWARD = {
    "bmm1_grad_gemm1": ((2, 1), ((0, 1), (0, 2))),
    "bmm1_grad_gemm2": ((3, 1), ((0, 1), (0, 2))),
    "bmm2_grad_gemm1": ((2, 1), ((0, 1), (0, 2))),
    "bmm2_grad_gemm2": ((3, 3), ((0, 2), (0, 2))),
}


@dataclasses.dataclass(frozen=True)
class CudnnConfig:
    """Static parameters of the calls."""

    scale: float
    window: int  # 0 = none


@struct.dataclass
class Slots:
    """The segments of one call. Tokens are counted through all rows of the device."""

    starts: jax.Array  # int32 [S], the number of all tokens where a slot is empty
    lengths: jax.Array  # int32 [S], 0 where it is empty
    of_token: jax.Array  # int32 [B, T], outside of 0 .. S - 1 for tokens that no slot has


def why_not_cudnn(q: jax.Array, window: int | jax.Array, softcap: float | None) -> str | None:
    """What keeps cuDNN from these queries, and what to set."""
    H = q.shape[-1]
    if q.dtype != jnp.bfloat16:
        return f"queries of {q.dtype} (set config.model.dtype to 'bfloat16')"
    if H > WIDEST or H % 8:
        return f"heads of width {H}, no multiple of 8 up to {WIDEST}"
    if softcap is not None:
        return f"soft caps ({softcap:g})"
    if not isinstance(window, int):
        return "windows that differ between stacked layers (set config.model.layers to 'list')"
    return None


def attention_cudnn(
    q: Float[Array, "B T N H"],
    k: Float[Array, "B T K H"],
    v: Float[Array, "B T K H"],
    *,
    spec: AttentionSpec,
    segments: Int[Array, "B T"],
    window: int | Int[Array, ""],
) -> Float[Array, "B T N H"]:
    """softmax(q kᵀ * scale) v; each device takes its rows and heads.

    Raises NotImplementedError without a GPU, for other types than bfloat16, soft caps, traced windows, and widths of
    heads and sizes of rows that cuDNN has no kernels for.
    """
    check_platform("config.model.attention", "cudnn", "gpu")
    if why := why_not_cudnn(q, window, spec.softcap):
        raise NotImplementedError(
            f"config.model.attention='cudnn' does not take {why}; or set it to 'auto' or 'blockwise'"
        )
    config = CudnnConfig(spec.scale, int(window))

    def attend(q, k, v, segments, _):
        return _local_attention(config, q, k, v, segments)

    return shard_attention(attend, q, k, v, segments=segments, window=0, rules=spec.rules)


def _local_attention(config: CudnnConfig, q, k, v, segments):
    if q.size >= 2**31:
        raise NotImplementedError(
            f"config.model.attention='cudnn' does not take {q.size} numbers of queries on a device "
            f"({' x '.join(map(str, q.shape))}): it counts them in int32; lower config.learner.token_budget, or set "
            "it to 'auto' or 'blockwise'"
        )
    return _attend(config, q, k, v, segments)


@functools.partial(jax.custom_vjp, nondiff_argnums=(0,))
def _attend(config: CudnnConfig, q, k, v, segments):
    """q [B, T, N, H], k and v [B, T, K, H], segments [B, T] -> [B, T, N, H]"""
    return _in_turn(lambda slots: forward_call(config, q, k, v, slots)[:1], q, k, segments, [q])[0]


def _forward(config: CudnnConfig, q, k, v, segments):
    def call(slots):
        out, norm = forward_call(config, q, k, v, slots, with_norm=True)
        return out, _by_token(norm, slots)

    norm = jax.ShapeDtypeStruct(q.shape[:3], jnp.float32)
    out, norm = _in_turn(call, q, k, segments, [q, norm])
    return out, (q, k, v, segments, out, norm)


def _backward(config: CudnnConfig, saved, do):
    q, k, v, segments, out, norm = saved
    do = jnp.where(segments[:, :, None, None] > 0, do, 0)  # blocks of cuDNN's reach beyond segments

    def call(slots):
        return backward_call(config, q, k, v, _by_slot(norm, slots), do, out, slots)

    return *_in_turn(call, q, k, segments, [q, k, v]), None


_attend.defvjp(_forward, _backward)


def _in_turn(call, q, k, segments, like) -> list[jax.Array]:
    """The results of `call(slots)`, arrays [B, T, ...] as those in `like`, of the tokens that its slots have; zeros
    at padding. cuDNN leaves undefined what is of no slot of a call."""
    n_slots = q.shape[0] * slots_per_row(q.shape, k.shape)
    number, n_segments = _numbers(segments)

    def turn(i, results):
        slots = _slots(number - i * n_slots, n_slots)
        own = (slots.of_token >= 0) & (slots.of_token < n_slots)
        return [
            jnp.where(own.reshape(*own.shape, *[1] * (x.ndim - 2)), new, x)
            for x, new in zip(results, call(slots), strict=True)
        ]

    with jax.named_scope("cudnn_attention"):
        # The first turn is no part of the loop: XLA would make the zeros of all layers' loops ahead of their time.
        first = turn(0, [jnp.zeros(x.shape, x.dtype) for x in like])
        return jax.lax.fori_loop(1, -(-n_segments // n_slots), turn, first)


def slots_per_row(q: tuple[int, ...], k: tuple[int, ...]) -> int:
    """Segments of a call for each row of the device, of queries [B, T, N, H] and keys [B, T, K, H]."""
    fit = SLOT_BYTES // (q[0] * slot_bytes(q, k))
    return max(min(fit, q[1]), 2)  # XLA takes 1 for rows that are not packed


def slot_bytes(q: tuple[int, ...], k: tuple[int, ...]) -> int:
    """What cuDNN keeps for a slot, backward: gradients into q in float32, a sum of each query and, where heads share
    their keys, gradients into k and v of each head. As the source of its front end 1.23 has it."""
    _, T, N, H = q
    return T * N * (4 * H + 4 + (2 * 2 * H if k[2] < N else 0))


def _numbers(segments: Int[Array, "B T"]) -> tuple[Int[Array, "B T"], Int[Array, ""]]:
    """(of each token the number of its segment among those of all rows, -1 at padding; config many there are)."""
    before = jnp.pad(segments[:, :-1], ((0, 0), (1, 0)))
    begins = (segments > 0) & (segments != before)
    number = jnp.cumsum(begins.reshape(-1), dtype=jnp.int32).reshape(segments.shape)
    return jnp.where(segments > 0, number - 1, -1), number[-1, -1]


def _slots(of_token: Int[Array, "B T"], n_slots: int) -> Slots:
    mine = of_token.reshape(1, -1) == jnp.arange(n_slots)[:, None]
    lengths = jnp.sum(mine, axis=1, dtype=jnp.int32)
    first = jnp.argmax(mine, axis=1).astype(jnp.int32)
    return Slots(jnp.where(lengths > 0, first, of_token.size), lengths, of_token)


def _by_token(norm: Float[Array, "S N T"], slots: Slots) -> Float[Array, "B T N"]:
    slot = jnp.clip(slots.of_token, 0, len(norm) - 1)
    at = jnp.arange(slot.size, dtype=jnp.int32).reshape(slot.shape) - slots.starts[slot]
    return norm.at[slot, :, at].get(mode="clip")


def _by_slot(norm: Float[Array, "B T N"], slots: Slots) -> Float[Array, "S N T"]:
    """Behind a slot's tokens stand numbers of others: finite, and of no meaning."""
    B, T, N = norm.shape
    at = slots.starts[:, None] + jnp.arange(T, dtype=jnp.int32)
    return jnp.swapaxes(norm.reshape(B * T, N).at[at].get(mode="clip"), 1, 2)


def forward_call(
    config: CudnnConfig, q, k, v, slots: Slots, *, with_norm: bool = False
) -> list[jax.Array]:
    """[output [B, T, N, H], with_norm the logs of the sums [S, N, T]]; undefined where no slot has a token."""
    _, T, N, _ = q.shape
    norm = [jax.ShapeDtypeStruct((len(slots.starts), N, T), jnp.float32)] if with_norm else []
    with jax.named_scope("cudnn_attention_fwd"):
        return _call("Softmax", config, FORWARD, [q, k, v], slots, made=[q], more=norm)


def backward_call(config: CudnnConfig, q, k, v, norm, do, out, slots: Slots) -> list[jax.Array]:
    """Gradients into q, k and v; undefined where no slot has a token."""
    kept = len(slots.starts) * slot_bytes(q.shape, k.shape)
    given = [q, k, v, norm, do, out]
    with jax.named_scope("cudnn_attention_bwd"):
        return _call(
            "SoftmaxBackward", config, BACKWARD, given, slots, made=[q, k, v], workspace=kept
        )


def _call(
    name: str,
    config: CudnnConfig,
    products,
    given,
    slots: Slots,
    *,
    made,
    more=(),
    workspace: int = 0,
) -> list[jax.Array]:
    """Arrays [B, T, heads, H] as those in `made`, then `more`, of the operands `given`, of which q is the first.

    XLA replaces the size of the workspace by the one that cuDNN asks for. Where there is no cuDNN to ask, as in a plan, it
    counts as it is given here.
    """
    q, k = given[:2]
    heads_first = [(x.shape[0], x.shape[2], x.shape[1], x.shape[3]) for x in made]
    results = jax.ffi.ffi_call(
        f"__cudnn$fmha{name}",
        [
            *(jax.ShapeDtypeStruct(shape, q.dtype) for shape in heads_first),
            *more,
            jax.ShapeDtypeStruct((workspace,), jnp.uint8),
        ],
        output_layouts=[*[(0, 2, 1, 3)] * len(made), *[None] * len(more), None],
        custom_call_api_version=2,
        legacy_backend_config=_backend_config(config, q, products, len(slots.starts) // len(q)),
    )(*given, *_places(q, k, slots))
    return [*(jnp.swapaxes(x, 1, 2) for x in results[: len(made)]), *results[len(made) : -1]]


def _places(q, k, slots: Slots) -> list[jax.Array]:
    """Lengths of the slots in queries and in keys, and their first numbers among those of q and of k."""
    B, T = q.shape[:2]
    lengths = slots.lengths.reshape(B, -1)
    starts = jnp.pad(slots.starts, (0, B), constant_values=B * T).reshape(B, -1)
    return [lengths, lengths, *(starts * (x.shape[2] * x.shape[3]) for x in (q, k))]


def _backend_config(config: CudnnConfig, q, products, slots_per_row: int) -> str:
    """What XLA's CudnnfMHABackendConfig says of a call."""
    B, T, N, _ = q.shape
    layout = {
        "dim_level_types": [], "dim_unique": [], "dim_ordered": [], "minor_to_major": ["3", "2", "1", "0"], "tiles": [],
        "element_size_in_bits": "0", "memory_space": "0", "index_primitive_type": "PRIMITIVE_TYPE_INVALID",
        "pointer_primitive_type": "PRIMITIVE_TYPE_INVALID", "dynamic_shape_metadata_prefix_bytes": "0",
    }  # fmt: skip
    backend_config = {
        "algorithm": {
            "algo_id": "0", "math_type": "TENSOR_OP_MATH", "tuning_knobs": {"17": "1", "24": "0"},
            "is_cudnn_frontend": True, "workspace_size": "0",
        },
        "fmha_scale": config.scale,
        "intermediate_tensor_shape": {
            "element_type": "BF16", "dimensions": [str(n) for n in (B, N, T, T)], "tuple_shapes": [], "layout": layout,
            "is_dynamic_dimension": [False] * 4,
        },
        "is_flash_attention": True,
        "mask_type": "PADDING_CAUSAL",
        "dropout_rate": 0.0,
        "seed": 42,
        "sliding_window_length": config.window,
        "max_seg_per_batch": slots_per_row,
        "is_paged_attention": False,
    }  # fmt: skip
    for name, (contracted, batch) in products.items():
        sides = {}
        for side, axis, axes in zip(("lhs", "rhs"), contracted, batch, strict=True):
            sides[f"{side}_contracting_dimensions"] = [str(axis)]
            sides[f"{side}_batch_dimensions"] = [str(n) for n in axes]
        backend_config[f"{name}_dot_dimension_numbers"] = sides
    return json.dumps({"operation_queue_id": "0", "cudnn_fmha_backend_config": backend_config})
