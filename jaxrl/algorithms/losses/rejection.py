"""Masks that reject tokens or whole responses which the trained policy would not sample.

d = trainer's logprob - behavior_logp, as in importance.py. k1, k2, k3 estimate KL(engine, trainer)
on tokens that the engine sampled: k1 = -d, k2 = d² / 2, k3 = exp(d) - 1 - d. A mask is 1 or 0, has
no gradient, and multiplies the policy loss. The names are from verl's `rollout_rs`. The bounds
of k1 are bounds of a ratio: rejection_low <= exp(d) <= rejection_high for a token, and the same for
the product (sum of d) or the geometric mean (mean of d) of a response. k2 and k3 are at most
rejection_max. https://richardli.xyz/rl-collapse compares them.
"""

import jax.numpy as jnp
from jaxtyping import Array, Float, Int

from jaxrl.algorithms import kl
from jaxrl.algorithms.losses.importance import (
    RESPONSE_INPUTS,
    ImportanceWeight,
    response_ratio,
    unweighted,
)
from jaxrl.algorithms.segment import segment_max, segment_mean, segment_sum

Values = Float[Array, "B T"]
Segments = Int[Array, "B T"]


def token_k1(log_ratio: Values, *, rejection_low: float, rejection_high: float) -> Values:
    """1 if low <= exp(d) <= high."""
    return _between(jnp.exp(log_ratio), rejection_low, rejection_high)


def token_k2(log_ratio: Values, *, rejection_max: float) -> Values:
    """1 if k2 <= max."""
    return _at_most(k2(log_ratio), rejection_max)


def token_k3(log_ratio: Values, *, rejection_max: float) -> Values:
    """1 if k3 <= max."""
    return _at_most(k3(log_ratio), rejection_max)


def seq_sum_k1(
    log_ratio: Values,
    mask: Values,
    segments: Segments,
    *,
    rejection_low: float,
    rejection_high: float,
) -> Values:
    """1 if low <= exp(Σ_t d_t) <= high over the response, else 0 at all of its tokens."""
    return _between(response_ratio(log_ratio, mask, segments), rejection_low, rejection_high)


def seq_sum_k2(
    log_ratio: Values, mask: Values, segments: Segments, *, rejection_max: float
) -> Values:
    """1 if Σ_t k2_t <= max over the response, else 0 at all of its tokens."""
    total = segment_sum(jnp.where(mask > 0, k2(log_ratio), 0.0), segments)
    return _at_most(total, rejection_max)


def seq_sum_k3(
    log_ratio: Values, mask: Values, segments: Segments, *, rejection_max: float
) -> Values:
    """1 if Σ_t k3_t <= max over the response, else 0 at all of its tokens."""
    total = segment_sum(jnp.where(mask > 0, k3(log_ratio), 0.0), segments)
    return _at_most(total, rejection_max)


def seq_mean_k1(
    log_ratio: Values,
    mask: Values,
    segments: Segments,
    *,
    rejection_low: float,
    rejection_high: float,
) -> Values:
    """1 if low <= exp(mean_t d_t) <= high over the response, else 0 at all of its tokens.

    Unlike the product, this geometric mean does not shrink with the length of the response.
    """
    ratio = jnp.exp(segment_mean(log_ratio, mask, segments))
    return _between(ratio, rejection_low, rejection_high)


def seq_mean_k2(
    log_ratio: Values, mask: Values, segments: Segments, *, rejection_max: float
) -> Values:
    """1 if mean_t k2_t <= max over the response, else 0 at all of its tokens."""
    return _at_most(segment_mean(k2(log_ratio), mask, segments), rejection_max)


def seq_mean_k3(
    log_ratio: Values, mask: Values, segments: Segments, *, rejection_max: float
) -> Values:
    """1 if mean_t k3_t <= max over the response, else 0 at all of its tokens."""
    return _at_most(segment_mean(k3(log_ratio), mask, segments), rejection_max)


def seq_max_k2(
    log_ratio: Values, mask: Values, segments: Segments, *, rejection_max: float
) -> Values:
    """1 if max_t k2_t <= max over the response, else 0 at all of its tokens."""
    return _at_most(segment_max(k2(log_ratio), mask, segments), rejection_max)


def seq_max_k3(
    log_ratio: Values, mask: Values, segments: Segments, *, rejection_max: float
) -> Values:
    """1 if max_t k3_t <= max over the response, else 0 at all of its tokens."""
    return _at_most(segment_max(k3(log_ratio), mask, segments), rejection_max)


def seq_mean_binary_kl(
    log_ratio: Values,
    behavior_logp: Values,
    mask: Values,
    segments: Segments,
    *,
    rejection_max: float,
) -> Values:
    """1 if mean_t KL_t <= max over the response, else 0 at all of its tokens.

    KL_t = q log(q / p) + (1 - q) log((1 - q) / (1 - p)) between "this token or another one" of the
    engine (q) and the trainer (p), with probabilities in [1e-6, 1 - 1e-6]: the sequence gate of
    FlashREINFORCE (https://github.com/NVIDIA-NeMo/labs-molt).
    """
    q, p = (
        jnp.clip(jnp.exp(logp), 1e-6, 1.0 - 1e-6)
        for logp in (behavior_logp, behavior_logp + log_ratio)
    )
    divergence = q * jnp.log(q / p) + (1.0 - q) * jnp.log((1.0 - q) / (1.0 - p))
    return _at_most(segment_mean(divergence, mask, segments), rejection_max)


def off_policy_sequences(
    drift: Values,
    advantages: Values,
    mask: Values,
    segments: Segments,
    *,
    off_policy_threshold: float,
) -> Values:
    """0 at tokens with A < 0 of responses with mean_t(-drift_t) > threshold, else 1.

    drift = current logp - behavior_logp. DeepSeek-V3.2's off-policy sequence masking, eq. 8 and 9
    (https://arxiv.org/abs/2512.02556): responses that the policy has become unlikely to sample
    teach little, but their negative advantages can destabilize training.
    """
    distance = -segment_mean(drift, mask, segments)
    return 1.0 - ((advantages < 0) & (distance > off_policy_threshold))


def k2(log_ratio: Values) -> Values:
    """d² / 2."""
    return kl.k2(log_ratio, jnp.zeros_like(log_ratio))


def k3(log_ratio: Values) -> Values:
    """exp(d) - 1 - d."""
    return kl.k3(jnp.zeros_like(log_ratio), log_ratio)


def _between(ratio: Values, low: float, high: float) -> Values:
    return ((ratio >= low) & (ratio <= high)).astype(jnp.float32)


def _at_most(divergence: Values, bound: float) -> Values:
    return (divergence <= bound).astype(jnp.float32)


RATIO_BOUNDS = ("rejection_low", "rejection_high")
DIVERGENCE_BOUND = ("rejection_max",)

REJECTIONS = {
    "none": ImportanceWeight(unweighted),
    "token_k1": ImportanceWeight(token_k1, hyper_parameters=RATIO_BOUNDS),
    "token_k2": ImportanceWeight(token_k2, hyper_parameters=DIVERGENCE_BOUND),
    "token_k3": ImportanceWeight(token_k3, hyper_parameters=DIVERGENCE_BOUND),
} | {
    function.__name__: ImportanceWeight(function, RESPONSE_INPUTS, bounds, level="response")
    for function, bounds in (
        (seq_sum_k1, RATIO_BOUNDS),
        (seq_sum_k2, DIVERGENCE_BOUND),
        (seq_sum_k3, DIVERGENCE_BOUND),
        (seq_mean_k1, RATIO_BOUNDS),
        (seq_mean_k2, DIVERGENCE_BOUND),
        (seq_mean_k3, DIVERGENCE_BOUND),
        (seq_max_k2, DIVERGENCE_BOUND),
        (seq_max_k3, DIVERGENCE_BOUND),
    )
}
REJECTIONS["seq_mean_binary_kl"] = ImportanceWeight(
    seq_mean_binary_kl,
    ("log_ratio", "behavior_logp", "mask", "segments"),
    DIVERGENCE_BOUND,
    level="response",
)
