"""Causal attention over packed rows: one signature, one implementation per backend."""

from jaxtyping import Array, Float, Int

from jaxrl.kernels.attention.blockwise import attention_blockwise
from jaxrl.kernels.attention.reference import attention_reference
from jaxrl.kernels.choice import choose
from sharding import Rules

BUILT = {"blockwise": attention_blockwise, "reference": attention_reference}
PLANNED = {
    "splash": "the Pallas kernel for TPU",
    "mosaic_gpu": "the Pallas Mosaic kernel for Hopper GPUs",
    "triton": "the Pallas Triton kernel for GPUs",
    "cudnn": "fused attention of cuDNN for GPUs",
}
DEFAULTS = {
    "cpu": ("blockwise", "bitwise equal to decode over pages"),
    "gpu": ("blockwise", "plain XLA, because no GPU kernel is built yet"),
    "tpu": ("blockwise", "plain XLA, because 'splash' is not built yet"),
}


def attention(
    q: Float[Array, "B T N H"],
    k: Float[Array, "B T K H"],
    v: Float[Array, "B T K H"],
    *,
    segments: Int[Array, "B T"],
    window: int | Int[Array, ""],
    softcap: float | None,
    scale: float,
    rules: Rules,
    implementation: str | None = None,
) -> Float[Array, "B T N H"]:
    """Each query attends to the keys of its own segment at or before it; `window` > 0 keeps the last
    `window` of them, itself included. Scores are scaled, then soft-capped, in float32.

    A segment is one run of equal numbers in its row; padding, segment 0, gives zeros.
    `implementation` is config.model.attention: None or "auto" picks for the backend.
    """
    attend = choose(
        "config.model.attention", implementation, built=BUILT, planned=PLANNED, defaults=DEFAULTS
    )
    return attend(
        q, k, v, segments=segments, window=window, softcap=softcap, scale=scale, rules=rules
    )
