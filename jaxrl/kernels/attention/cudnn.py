"""Packed attention on NVIDIA GPUs by cuDNN's fused kernels, forward and backward.

cuDNN reads segments in place: a call takes the first token and the length of each ("slots"). For
every slot cuDNN stores the softmax log-sums of a whole row and, in the backward pass, float32
gradients of q for a whole row. So a call has as many slots as fit into SLOT_BYTES, and a loop makes
further calls for further segments. Between calls the log-sums are stored once per token.

The calls are XLA's `__cudnn$fmhaSoftmax`, as JAX makes them for
jax.nn.dot_product_attention(implementation="cudnn"). That function does not support packed rows;
its private counterpart does, and the tests compare our calls with its calls.
"""

import dataclasses
import functools
import json

import jax
import jax.numpy as jnp
from flax import struct
from jax.ad_checkpoint import checkpoint_name
from jaxtyping import Array, Float, Int

from jaxrl.kernels.attention.limits import unsupported_by_cudnn
from jaxrl.kernels.attention_spec import SAVED_NAME, AttentionSpec
from jaxrl.kernels.choice import check_platform
from jaxrl.kernels.shard_attention import shard_attention
from jaxrl.kernels.visibility import Visibility, check_separate

SLOT_BYTES = 2**29  # cuDNN's working memory for the slots of one call

# Matrix products inside a call: contracted axes and batch axes of the left and the right operand.
FORWARD = {"bmm1": ((3, 3), ((0, 2), (0, 2))), "bmm2": ((3, 1), ((0, 1), (0, 2)))}
BACKWARD = {
    "bmm1_grad_gemm1": ((2, 1), ((0, 1), (0, 2))),
    "bmm1_grad_gemm2": ((3, 1), ((0, 1), (0, 2))),
    "bmm2_grad_gemm1": ((2, 1), ((0, 1), (0, 2))),
    "bmm2_grad_gemm2": ((3, 3), ((0, 2), (0, 2))),
}


@dataclasses.dataclass(frozen=True)
class CudnnConfig:
    """Static parameters of the cuDNN calls."""

    scale: float
    window: int  # 0 = none


@struct.dataclass
class Slots:
    """The segments of one call. Token numbers count through all rows of the device."""

    starts: jax.Array  # int32 [S], first token; the number of all tokens for an empty slot
    lengths: jax.Array  # int32 [S], tokens; 0 for an empty slot
    of_token: jax.Array  # int32 [B, T], slot of each token; outside 0 .. S - 1 for none


def attention_cudnn(
    q: Float[Array, "B T N H"],
    k: Float[Array, "B T K H"],
    v: Float[Array, "B T K H"],
    *,
    spec: AttentionSpec,
    segments: Int[Array, "B T"],
    window: int | Int[Array, ""],
    visibility: Visibility | None = None,
    sinks: Float[Array, "N"] | None = None,
) -> Float[Array, "B T N H"]:
    """softmax(q kᵀ * scale) v on each device's rows and heads.

    Raises NotImplementedError without a GPU, for dtypes other than bfloat16, soft caps, sinks,
    traced windows, shared prefixes, and head widths and row sizes without a cuDNN kernel.
    """
    check_platform("config.model.attention", "cudnn", "gpu")
    if why := unsupported_by_cudnn(q, window, spec.softcap, sinks=sinks is not None):
        raise NotImplementedError(
            f"config.model.attention='cudnn' does not support {why}; or set it to 'auto' or "
            "'blockwise'"
        )
    check_separate("cudnn", visibility)
    config = CudnnConfig(spec.scale, int(window))

    def attend(q, k, v, segments, *_):
        return _local_attention(config, q, k, v, segments)

    return shard_attention(
        attend, q, k, v, segments=segments, window=0, visibility=None, sinks=None, rules=spec.rules
    )


def _local_attention(config: CudnnConfig, q, k, v, segments):
    if q.size >= 2**31:
        raise NotImplementedError(
            f"config.model.attention='cudnn' does not support {q.size} query elements per device "
            f"({' x '.join(map(str, q.shape))}), because it counts them in int32; lower "
            "config.learner.token_budget, or set it to 'auto' or 'blockwise'"
        )
    return _attend(config, q, k, v, segments)


@functools.partial(jax.custom_vjp, nondiff_argnums=(0,))
def _attend(config: CudnnConfig, q, k, v, segments):
    """q [B, T, N, H], k and v [B, T, K, H], segments [B, T] -> [B, T, N, H]"""
    return _call_in_turn(
        lambda slots: forward_call(config, q, k, v, slots)[:1], q, k, segments, [q]
    )[0]


def _forward(config: CudnnConfig, q, k, v, segments):
    def call(slots):
        out, norm = forward_call(config, q, k, v, slots, with_norm=True)
        return out, _by_token(norm, slots)

    norm = jax.ShapeDtypeStruct(q.shape[:3], jnp.float32)
    out, norm = _call_in_turn(call, q, k, segments, [q, norm])
    out, norm = checkpoint_name((out, norm), SAVED_NAME)
    return out, (q, k, v, segments, out, norm)


def _backward(config: CudnnConfig, saved, do):
    q, k, v, segments, out, norm = saved
    do = jnp.where(segments[:, :, None, None] > 0, do, 0)  # cuDNN's blocks read past segments

    def call(slots):
        return backward_call(config, q, k, v, _by_slot(norm, slots), do, out, slots)

    return *_call_in_turn(call, q, k, segments, [q, k, v]), None


_attend.defvjp(_forward, _backward)


def _call_in_turn(call, q, k, segments, like) -> list[jax.Array]:
    """Combined results of `call(slots)` over all slots: arrays [B, T, ...] as in `like`.

    Padding gives zeros. cuDNN leaves tokens outside a call's slots undefined, so each call fills
    only its own tokens.
    """
    n_slots = q.shape[0] * slots_per_row(q.shape, k.shape)
    number, n_segments = _number_segments(segments)

    def turn(i, results):
        slots = _slots(number - i * n_slots, n_slots)
        covered = (slots.of_token >= 0) & (slots.of_token < n_slots)
        return [
            jnp.where(covered.reshape(*covered.shape, *[1] * (x.ndim - 2)), new, x)
            for x, new in zip(results, call(slots), strict=True)
        ]

    with jax.named_scope("cudnn_attention"):
        # The first call stays outside the loop: otherwise XLA would allocate the zeros of all
        # layers' loops in advance.
        first = turn(0, [jnp.zeros(x.shape, x.dtype) for x in like])
        return jax.lax.fori_loop(1, -(-n_segments // n_slots), turn, first)


def slots_per_row(q: tuple[int, ...], k: tuple[int, ...]) -> int:
    """Segments per call and row of the device, for queries [B, T, N, H] and keys [B, T, K, H]."""
    fit = SLOT_BYTES // (q[0] * slot_bytes(q, k))
    return max(min(fit, q[1]), 2)  # XLA treats 1 as an unpacked row


def slot_bytes(q: tuple[int, ...], k: tuple[int, ...]) -> int:
    """Bytes that cuDNN stores per slot in the backward pass.

    Float32 gradients of q, one sum per query and, if heads share keys, gradients of k and v per
    head, as in the source of cuDNN's front end 1.23.
    """
    _, T, N, H = q
    return T * N * (4 * H + 4 + (2 * 2 * H if k[2] < N else 0))


def _number_segments(segments: Int[Array, "B T"]) -> tuple[Int[Array, "B T"], Int[Array, ""]]:
    """(index of each token's segment over all rows, -1 at padding; number of segments)."""
    before = jnp.pad(segments[:, :-1], ((0, 0), (1, 0)))
    begins = (segments > 0) & (segments != before)
    number = jnp.cumsum(begins.reshape(-1), dtype=jnp.int32).reshape(segments.shape)
    return jnp.where(segments > 0, number - 1, -1), number[-1, -1]


def _slots(of_token: Int[Array, "B T"], n_slots: int) -> Slots:
    is_member = of_token.reshape(1, -1) == jnp.arange(n_slots)[:, None]
    lengths = jnp.sum(is_member, axis=1, dtype=jnp.int32)
    first = jnp.argmax(is_member, axis=1).astype(jnp.int32)
    return Slots(jnp.where(lengths > 0, first, of_token.size), lengths, of_token)


def _by_token(norm: Float[Array, "S N T"], slots: Slots) -> Float[Array, "B T N"]:
    slot = jnp.clip(slots.of_token, 0, len(norm) - 1)
    at = jnp.arange(slot.size, dtype=jnp.int32).reshape(slot.shape) - slots.starts[slot]
    return norm.at[slot, :, at].get(mode="clip")


def _by_slot(norm: Float[Array, "B T N"], slots: Slots) -> Float[Array, "S N T"]:
    """[B, T, N] -> [S, N, T]. Values after a slot's tokens are finite but meaningless."""
    B, T, N = norm.shape
    at = slots.starts[:, None] + jnp.arange(T, dtype=jnp.int32)
    return jnp.swapaxes(norm.reshape(B * T, N).at[at].get(mode="clip"), 1, 2)


def forward_call(
    config: CudnnConfig, q, k, v, slots: Slots, *, with_norm: bool = False
) -> list[jax.Array]:
    """[output [B, T, N, H], log-sums [S, N, T] if `with_norm`]; undefined outside the slots."""
    _, T, N, _ = q.shape
    norm = [jax.ShapeDtypeStruct((len(slots.starts), N, T), jnp.float32)] if with_norm else []
    with jax.named_scope("cudnn_attention_fwd"):
        return _call("Softmax", config, FORWARD, [q, k, v], slots, outputs=[q], extra=norm)


def backward_call(config: CudnnConfig, q, k, v, norm, do, out, slots: Slots) -> list[jax.Array]:
    """Gradients of q, k and v; undefined outside the slots."""
    kept = len(slots.starts) * slot_bytes(q.shape, k.shape)
    operands = [q, k, v, norm, do, out]
    with jax.named_scope("cudnn_attention_bwd"):
        return _call(
            "SoftmaxBackward", config, BACKWARD, operands, slots, outputs=[q, k, v], workspace=kept
        )


def _call(
    name: str,
    config: CudnnConfig,
    products,
    operands,
    slots: Slots,
    *,
    outputs,
    extra=(),
    workspace: int = 0,
) -> list[jax.Array]:
    """Arrays [B, T, heads, H] shaped as those in `outputs`, then `extra`; the first operand is q.

    XLA replaces the workspace size by the one that cuDNN requests. Without cuDNN, as in a plan, the
    given size counts.
    """
    q, k = operands[:2]
    heads_first = [(x.shape[0], x.shape[2], x.shape[1], x.shape[3]) for x in outputs]
    results = jax.ffi.ffi_call(
        f"__cudnn$fmha{name}",
        [
            *(jax.ShapeDtypeStruct(shape, q.dtype) for shape in heads_first),
            *extra,
            jax.ShapeDtypeStruct((workspace,), jnp.uint8),
        ],
        output_layouts=[*[(0, 2, 1, 3)] * len(outputs), *[None] * len(extra), None],
        custom_call_api_version=2,
        legacy_backend_config=_backend_config(config, q, products, len(slots.starts) // len(q)),
    )(*operands, *_offsets(q, k, slots))
    return [*(jnp.swapaxes(x, 1, 2) for x in results[: len(outputs)]), *results[len(outputs) : -1]]


def _offsets(q, k, slots: Slots) -> list[jax.Array]:
    """Slot lengths in queries and keys, and the slots' first elements in q and in k."""
    B, T = q.shape[:2]
    lengths = slots.lengths.reshape(B, -1)
    starts = jnp.pad(slots.starts, (0, B), constant_values=B * T).reshape(B, -1)
    return [lengths, lengths, *(starts * (x.shape[2] * x.shape[3]) for x in (q, k))]


def _backend_config(config: CudnnConfig, q, products, slots_per_row: int) -> str:
    """The call's CudnnfMHABackendConfig, XLA's backend configuration, as JSON."""
    B, T, N, _ = q.shape
    layout = {
        "dim_level_types": [], "dim_unique": [], "dim_ordered": [],
        "minor_to_major": ["3", "2", "1", "0"], "tiles": [],
        "element_size_in_bits": "0", "memory_space": "0",
        "index_primitive_type": "PRIMITIVE_TYPE_INVALID",
        "pointer_primitive_type": "PRIMITIVE_TYPE_INVALID",
        "dynamic_shape_metadata_prefix_bytes": "0",
    }  # fmt: skip
    backend_config = {
        "algorithm": {
            "algo_id": "0", "math_type": "TENSOR_OP_MATH", "tuning_knobs": {"17": "1", "24": "0"},
            "is_cudnn_frontend": True, "workspace_size": "0",
        },
        "fmha_scale": config.scale,
        "intermediate_tensor_shape": {
            "element_type": "BF16", "dimensions": [str(n) for n in (B, N, T, T)],
            "tuple_shapes": [], "layout": layout, "is_dynamic_dimension": [False] * 4,
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
