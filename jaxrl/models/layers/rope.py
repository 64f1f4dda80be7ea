"""Rotary position embedding (https://arxiv.org/abs/2104.09864), rotated by halves as in Hugging
Face.
"""

import math
from collections.abc import Sequence

import jax
import jax.numpy as jnp
import numpy as np
from flax import struct
from jaxtyping import Array, Float, Int

from jaxrl import types
from jaxrl.kernels.bits import materialize
from jaxrl.models import rope_config
from jaxrl.models.config import AttentionConfig
from jaxrl.models.layers.memory_order import HEADS_FIRST
from jaxrl.models.mla_config import MLAConfig
from jaxrl.models.rope_config import ROPE_KINDS, Rope
from sharding import target_platform


@struct.dataclass
class Rotation:
    """Rotary embedding of one layer, or of all with a leading axis."""

    inv_freq: types.Array  # float32 [H / 2], radians per position of each feature pair
    amplitude: types.Array | None = None  # float32 [], factor of rotated pairs; None: 1
    # The features of a pair are adjacent, not half of the rotated ones apart.
    interleaved: bool = struct.field(pytree_node=False, default=False)
    # The axis of an image whose position rotates each pair; () if there are no images.
    axes: tuple[int, ...] = struct.field(pytree_node=False, default=())


def rotations(mixers: Sequence[AttentionConfig | MLAConfig]) -> Rotation:
    """The rotary embeddings of layers, stacked."""

    def n_rotated(mixer: AttentionConfig | MLAConfig) -> int:
        """Features of a head that are rotated."""
        latent = isinstance(mixer, MLAConfig)
        return mixer.rotated if latent else int(mixer.H * mixer.rope.rotary)

    amplitudes = np.array([mixer.rope.attention_factor for mixer in mixers], np.float32)
    inv_freq = np.stack([inverse_frequencies(mixer.rope, n_rotated(mixer)) for mixer in mixers])
    amplitude = amplitudes if np.any(amplitudes != 1) else None
    rope = mixers[0].rope
    return Rotation(inv_freq, amplitude, rope.interleaved, rope.pair_axes(inv_freq.shape[-1]))


def inverse_frequencies(rope: Rope, head_dim: int) -> np.ndarray:
    """float32 [head_dim / 2]: radians per position of each feature pair.

    "linear" divides positions by `factor` (https://arxiv.org/abs/2306.15595); "llama3" divides only
    the long wavelengths, with a smooth transition (Llama 3.1, https://arxiv.org/abs/2407.21783);
    "yarn" has another transition (https://arxiv.org/abs/2309.00071, section 3.2). "dynamic" changes
    the base only for sequences longer than `DecoderConfig.max_len`, which are not supported.
    "longrope" has a divisor per pair (https://arxiv.org/abs/2402.13753), and others for sequences
    longer than `original_len`, which are not supported. "proportional" rotates a share of the pairs
    by the frequencies that they have if all are rotated. Layers without rotation have zeros.
    """
    inv = 1.0 / rope.theta ** (np.arange(0, head_dim, 2, dtype=np.float32) / head_dim)
    match rope.kind:
        case "default" | "dynamic":
            scaled = inv
        case rope_config.NO_ROPE:
            scaled = np.zeros_like(inv)
        case rope_config.LONG_ROPE:
            scaled = inv / np.asarray(rope.short_factor, np.float32)
        case rope_config.PROPORTIONAL:
            rotated = np.arange(len(inv)) < int(rope.share * head_dim // 2)
            scaled = np.where(rotated, inv / rope.factor, 0)
        case "linear":
            scaled = inv / rope.factor
        case "llama3":
            wavelength = 2 * math.pi / inv
            low, high = rope.low_freq_factor, rope.high_freq_factor
            smooth = np.clip((rope.original_len / wavelength - low) / (high - low), 0.0, 1.0)
            scaled = (1 - smooth) * inv / rope.factor + smooth * inv
        case "yarn":
            divided = _divided_share(rope, head_dim)
            scaled = (1 - divided) * inv + divided * inv / rope.factor
        case other:
            raise ValueError(f"rope scaling {other!r} is not known; known: {', '.join(ROPE_KINDS)}")
    return scaled.astype(np.float32)


def _divided_share(rope: Rope, head_dim: int) -> np.ndarray:
    """[head_dim / 2] from 0 to 1: how far YaRN divides the frequency of each pair.

    Pairs with more than `beta_fast` turns within the original length keep their frequency, those
    with fewer than `beta_slow` are divided (1 - γ in equation 18 of the paper, as a function of the
    pair's index as in Hugging Face).
    """

    def pair(turns: float) -> float:
        """Index of the pair with this number of turns within the original length."""
        wavelength = rope.original_len / turns
        return head_dim * math.log(wavelength / (2 * math.pi)) / (2 * math.log(rope.theta))

    low, high = pair(rope.beta_fast), pair(rope.beta_slow)
    if rope.truncate:
        low, high = math.floor(low), math.ceil(high)
    low, high = max(low, 0), min(high, head_dim - 1)
    width = high - low or 0.001  # a step if both are the same pair
    return np.clip((np.arange(head_dim // 2, dtype=np.float32) - low) / width, 0.0, 1.0)


def rotate(
    x: Float[Array, "B T N H"],
    positions: Int[Array, "B T *axes"],
    rotation: Rotation,
    *,
    heads_first: bool = False,
) -> Float[Array, "B T N H"]:
    """Rotates the feature pairs (x[i], x[i + R/2]) by position * inv_freq[i], in float32.

    With images, positions are [B, T, 3]: each pair has that of its axis (M-RoPE,
    https://arxiv.org/abs/2409.12191).

    Interleaved pairs are (x[2 i], x[2 i + 1]). R is twice the number of frequencies; features from
    R on stay as they are. Rotated pairs are scaled by the amplitude, so scores are scaled by its
    square. `heads_first` is the order in memory of whole heads on TPU (memory_order.py).
    """
    R = 2 * rotation.inv_freq.shape[-1]
    if x.shape[-1] > R:
        return jnp.concatenate([rotate(x[..., :R], positions, rotation), x[..., R:]], axis=-1)
    of_pairs = positions[:, :, None, None]
    if positions.ndim == 3:
        of_pairs = _positions_of_pairs(positions[:, :, None], rotation.axes)
    angles = of_pairs.astype(jnp.float32) * rotation.inv_freq
    cos, sin = jnp.cos(angles), jnp.sin(angles)
    if rotation.amplitude is not None:
        cos, sin = cos * rotation.amplitude, sin * rotation.amplitude
    if target_platform() == "tpu" and x.dtype == jnp.bfloat16 and not rotation.interleaved:
        if heads_first:
            x, cos, sin = (a.transpose(HEADS_FIRST) for a in (x, cos, sin))
        y = _rotate_by_product(x, cos, sin)
        return y.transpose(np.argsort(HEADS_FIRST)) if heads_first else y
    x32 = x.astype(jnp.float32)
    if rotation.interleaved:
        x1, x2 = x32[..., 0::2], x32[..., 1::2]
    else:
        x1, x2 = jnp.split(x32, 2, axis=-1)
    # XLA on CPU would contract one of two products with their sum, which one depends on the shape
    rotated = [
        materialize(x1 * cos) - materialize(x2 * sin),
        materialize(x2 * cos) + materialize(x1 * sin),
    ]
    if rotation.interleaved:
        return jnp.stack(rotated, axis=-1).reshape(x.shape).astype(x.dtype)
    return jnp.concatenate(rotated, axis=-1).astype(x.dtype)


def _positions_of_pairs(
    positions: Int[Array, "B T 1 3"], axes: tuple[int, ...]
) -> Int[Array, "B T 1 P"]:
    """The position of each pair, on its axis."""
    time, height, width = (positions[..., i : i + 1] for i in range(3))
    axis = np.array(axes)
    return jnp.where(axis == 0, time, jnp.where(axis == 1, height, width))


@jax.custom_vjp
def _rotate_by_product(
    x: Float[Array, "a b c H"], cos: Float[Array, "#a #b #c R"], sin: Float[Array, "#a #b #c R"]
) -> Float[Array, "a b c H"]:
    """The same numbers as halves give, without arrays of halves.

    XLA on TPU writes the float32 halves to memory, in tiles that are half empty. A product with a
    signed permutation matrix gives (-x2, x1) exactly, in one kernel with the rest. The gradient is
    the rotation back.
    """
    H = x.shape[-1]
    signs = np.where(np.arange(H) < H // 2, -1, 1)
    swap = jnp.asarray(np.roll(np.eye(H), H // 2, axis=1) * signs, x.dtype)
    cos, sin = jnp.tile(cos, 2), jnp.tile(sin, 2)
    swapped = jnp.einsum("...H,HJ->...J", x, swap, preferred_element_type=jnp.float32)
    return (x.astype(jnp.float32) * cos + swapped * sin).astype(x.dtype)


def _rotate_forward(x, cos, sin):
    return _rotate_by_product(x, cos, sin), (cos, sin)


def _rotate_back(saved, grad):
    cos, sin = saved
    return _rotate_by_product(grad, cos, -sin), None, None


_rotate_by_product.defvjp(_rotate_forward, _rotate_back)


def growing_queries(
    q: Float[Array, "B T N H"], positions: Int[Array, "B T"], rope: Rope
) -> Float[Array, "B T N H"]:
    """Queries scaled by 1 + query_growth ln(1 + floor(position / original_len)) (Llama 4)."""
    periods = (jnp.maximum(positions, 0) // rope.original_len).astype(jnp.float32)  # -1: padding
    scale = 1 + rope.query_growth * jnp.log1p(periods)
    return q * scale[:, :, None, None].astype(q.dtype)
