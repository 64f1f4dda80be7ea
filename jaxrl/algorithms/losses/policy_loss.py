"""Policy losses. Each returns one loss per token; masking and averaging happen in aggregation.py.

r = exp(log_ratio) with log_ratio = logp - old_logp is the importance ratio of a token, A its
advantage, |y| the length of its response; "sg" stops the gradient. A response-level loss has the
same value at each token of the response, so that `seq_mean_token_mean` gives the papers' mean over
responses. What a loss requires of other choices is in jaxrl/config/preconditions.py.
"""

import dataclasses
import math
from collections.abc import Callable

import jax
import jax.numpy as jnp
from jax.lax import stop_gradient
from jaxtyping import Array, Bool, Float, Int

from jaxrl.algorithms.kl import k2, magnitude
from jaxrl.algorithms.losses.covariance import SELECT_BETWEEN, SELECT_LARGEST, TokenSelection
from jaxrl.algorithms.segment import segment_mean, segment_sum

Scalar = float | Float[Array, ""]  # a hyper-parameter that may be data of a program


def ppo_clip(
    log_ratio: Float[Array, "B T"],
    advantages: Float[Array, "B T"],
    *,
    clip_low: Scalar,
    clip_high: Scalar,
) -> Float[Array, "B T"]:
    """Clipped surrogate, max(-r A, -clip(r, 1 - low, 1 + high) A).

    PPO, eq. 7 (https://arxiv.org/abs/1707.06347). With high > low it is clip-higher, DAPO, eq. 8
    (https://arxiv.org/abs/2503.14476).
    """
    return _clipped(jnp.exp(log_ratio), advantages, clip_low, clip_high)


def dual_clip(
    log_ratio: Float[Array, "B T"],
    advantages: Float[Array, "B T"],
    *,
    clip_low: float,
    clip_high: float,
    clip_dual: float,
) -> Float[Array, "B T"]:
    """`ppo_clip`, bounded by -c A for A < 0 with c = clip_dual > 1.

    The bound keeps a token whose probability has grown a lot from dominating the step. Dual-clip
    PPO, eq. 5 (https://arxiv.org/abs/1912.09729).
    """
    loss = _clipped(jnp.exp(log_ratio), advantages, clip_low, clip_high)
    return jnp.where(advantages < 0, jnp.minimum(loss, -clip_dual * advantages), loss)


def policy_gradient(
    logp: Float[Array, "B T"], advantages: Float[Array, "B T"]
) -> Float[Array, "B T"]:
    """-A logp, the plain policy gradient: REINFORCE (https://doi.org/10.1007/BF00992696).

    Also the loss of GPG (https://arxiv.org/abs/2504.02546).
    """
    return -advantages * logp


def gspo(
    log_ratio: Float[Array, "B T"],
    advantages: Float[Array, "B T"],
    mask: Float[Array, "B T"],
    segments: Int[Array, "B T"],
    *,
    clip_low: float,
    clip_high: float,
) -> Float[Array, "B T"]:
    """max(-s A, -clip(s, 1 - low, 1 + high) A) with the importance ratio s of the response.

    s = exp(1/|y| Σ_t (logp_t - old_logp_t)): GSPO, eq. 5 to 7 (https://arxiv.org/abs/2507.18071).
    """
    ratio = jnp.exp(segment_mean(log_ratio, mask, segments))
    return _clipped(ratio, advantages, clip_low, clip_high)


def gspo_token(
    log_ratio: Float[Array, "B T"],
    logp: Float[Array, "B T"],
    advantages: Float[Array, "B T"],
    mask: Float[Array, "B T"],
    segments: Int[Array, "B T"],
    *,
    clip_low: Scalar,
    clip_high: Scalar,
) -> Float[Array, "B T"]:
    """`gspo` with s_t = sg(s) exp(logp_t - sg(logp_t)).

    The value is `gspo`'s, but the gradient of a token is scaled by the token's own advantage.
    GSPO-token (https://arxiv.org/abs/2507.18071, section 4.3).
    """
    of_response = stop_gradient(segment_mean(log_ratio, mask, segments))
    ratio = jnp.exp(of_response + logp - stop_gradient(logp))
    return _clipped(ratio, advantages, clip_low, clip_high)


def cispo(
    log_ratio: Float[Array, "B T"],
    logp: Float[Array, "B T"],
    advantages: Float[Array, "B T"],
    *,
    clip_low: Scalar,
    clip_high: Scalar,
) -> Float[Array, "B T"]:
    """-sg(clip(r, 1 - low, 1 + high)) A logp: clips the weight, so that every token has a gradient.

    CISPO, eq. 4 and 5 of MiniMax-M1 (https://arxiv.org/abs/2506.13585).
    """
    weight = jnp.clip(jnp.exp(log_ratio), 1.0 - clip_low, 1.0 + clip_high)
    return -stop_gradient(weight) * advantages * logp


def gmpo(
    log_ratio: Float[Array, "B T"],
    advantages: Float[Array, "B T"],
    mask: Float[Array, "B T"],
    segments: Int[Array, "B T"],
    *,
    clip_low: float,
    clip_high: float,
) -> Float[Array, "B T"]:
    """-A exp(1/|y| Σ_t c_t), with c = log r clipped at +high for A > 0 and at -low for A < 0.

    GMPO (https://arxiv.org/abs/2507.20673): the geometric mean of token ratios that are clipped in
    log space (the paper's bounds are 0.4). A must be the same at all tokens of a response.
    """
    clipped = jnp.where(
        advantages > 0, jnp.minimum(log_ratio, clip_high), jnp.maximum(log_ratio, -clip_low)
    )
    return -advantages * jnp.exp(segment_mean(clipped, mask, segments))


def sapo(
    log_ratio: Float[Array, "B T"],
    advantages: Float[Array, "B T"],
    *,
    sapo_tau_positive: float,
    sapo_tau_negative: float,
) -> Float[Array, "B T"]:
    """-(4 / τ) sigmoid(τ (r - 1)) A with τ by the sign of A.

    A soft gate of slope 1 at r = 1 instead of a clip: SAPO (https://arxiv.org/abs/2511.20347).
    """
    tau = jnp.where(advantages > 0, sapo_tau_positive, sapo_tau_negative)
    gate = jax.nn.sigmoid(tau * (jnp.exp(log_ratio) - 1.0))
    return -gate * 4.0 / tau * advantages


def clip_cov(
    log_ratio: Float[Array, "B T"],
    advantages: Float[Array, "B T"],
    selected: Bool[Array, "B T"],
    *,
    clip_low: float,
    clip_high: float,
) -> Float[Array, "B T"]:
    """`ppo_clip` without the `selected` tokens: Clip-Cov (https://arxiv.org/abs/2505.22617).

    These are a few of the tokens whose logprob and advantage covary most (covariance.py).
    """
    loss = _clipped(jnp.exp(log_ratio), advantages, clip_low, clip_high)
    return jnp.where(selected, 0.0, loss)


def kl_cov(
    log_ratio: Float[Array, "B T"],
    advantages: Float[Array, "B T"],
    selected: Bool[Array, "B T"],
    *,
    kl_cov_coef: float,
) -> Float[Array, "B T"]:
    """-r A + coef |log_ratio| [selected]: KL-Cov (https://arxiv.org/abs/2505.22617).

    The penalty keeps the tokens whose logprob and advantage covary most (covariance.py) close to
    the old policy.
    """
    penalty = jnp.where(selected, kl_cov_coef * magnitude(log_ratio), 0.0)
    return -jnp.exp(log_ratio) * advantages + penalty


def dppo_tv(
    log_ratio: Float[Array, "B T"],
    logp: Float[Array, "B T"],
    advantages: Float[Array, "B T"],
    *,
    clip_low: float,
    clip_high: float,
    ratio_max: float,
    log_ratio_penalty: float,
) -> Float[Array, "B T"]:
    """-sg(min(r, max)) A logp + β/2 (log r)², without A's term where |p - old p| is too large.

    p is the probability of the sampled token, so |p - old p| is the total variation of "this token
    or another one". A token is masked only if A moves it further away: for A > 0 if p > old p +
    high, else if p < old p - low. DPPO-Binary-TV (https://arxiv.org/abs/2602.04879), with the
    truncation of its section 5.4. prime-rl adds the square, which masked tokens keep.
    """
    change = jnp.abs(jnp.exp(logp) - jnp.exp(logp - log_ratio))
    kept = _in_trust_region(change, log_ratio, advantages, clip_low, clip_high)
    weighted = kept * _truncated(log_ratio, ratio_max) * advantages
    return dro(log_ratio, logp, weighted, log_ratio_penalty=log_ratio_penalty)


def dppo_kl(
    log_ratio: Float[Array, "B T"],
    logp: Float[Array, "B T"],
    advantages: Float[Array, "B T"],
    *,
    clip_low: float,
    clip_high: float,
    ratio_max: float,
    log_ratio_penalty: float,
) -> Float[Array, "B T"]:
    """`dppo_tv` with the KL of "this token or another one" in place of the total variation.

    KL = q log(q / p) + (1 - q) log((1 - q) / (1 - p)) with q = old p: DPPO-Binary-KL
    (https://arxiv.org/abs/2602.04879). Probabilities of the other tokens are at least 1e-8.
    """
    old_logp = logp - log_ratio
    others, old_others = (jnp.maximum(-jnp.expm1(x), 1e-8) for x in (logp, old_logp))
    divergence = -jnp.exp(old_logp) * log_ratio + old_others * jnp.log(old_others / others)
    kept = _in_trust_region(divergence, log_ratio, advantages, clip_low, clip_high)
    weighted = kept * _truncated(log_ratio, ratio_max) * advantages
    return dro(log_ratio, logp, weighted, log_ratio_penalty=log_ratio_penalty)


def dro(
    log_ratio: Float[Array, "B T"],
    logp: Float[Array, "B T"],
    advantages: Float[Array, "B T"],
    *,
    log_ratio_penalty: Scalar,
) -> Float[Array, "B T"]:
    """-A logp + β/2 (log r)²: no ratio and no clip, but a quadratic pull to the old policy.

    DRO (https://arxiv.org/abs/2405.19107) with A in place of r - V, as in verl and Tinker.
    """
    penalty = log_ratio_penalty * k2(log_ratio, jnp.zeros_like(log_ratio))
    return policy_gradient(logp, advantages) + penalty


def vespo(
    log_ratio: Float[Array, "B T"],
    logp: Float[Array, "B T"],
    advantages: Float[Array, "B T"],
    mask: Float[Array, "B T"],
    segments: Int[Array, "B T"],
    *,
    vespo_k_positive: float,
    vespo_lambda_positive: float,
    vespo_k_negative: float,
    vespo_lambda_negative: float,
) -> Float[Array, "B T"]:
    """-sg(φ(w)) A logp with φ(w) = w^k exp(λ (1 - w)), w the product of r over the response.

    A smooth weight of whole responses, with k and λ by the sign of A: 1 on policy, and it vanishes
    for large and small w without a clip. VESPO (https://arxiv.org/abs/2602.10693). As in its code,
    log w is bounded to log(1e-8) and 20.
    """
    total = segment_sum(jnp.where(mask > 0, log_ratio, 0.0), segments)
    log_w = jnp.clip(stop_gradient(total), math.log(1e-8), 20.0)
    k = jnp.where(advantages < 0, vespo_k_negative, vespo_k_positive)
    decay = jnp.where(advantages < 0, vespo_lambda_negative, vespo_lambda_positive)
    weight = jnp.exp(k * log_w + decay * (1.0 - jnp.exp(log_w)))
    return policy_gradient(logp, weight * advantages)


def _in_trust_region(divergence, log_ratio, advantages, low: float, high: float):
    """1 at tokens that are near the old policy, or that A moves towards it; no gradient."""
    left = jnp.where(
        advantages > 0, (log_ratio > 0) & (divergence > high), (log_ratio < 0) & (divergence > low)
    )
    return 1.0 - stop_gradient(left.astype(jnp.float32))


def _truncated(log_ratio, ratio_max: float):
    """The ratio, at most `ratio_max`, as a weight without gradient."""
    return stop_gradient(jnp.minimum(jnp.exp(log_ratio), ratio_max))


def _clipped(ratio, advantages, clip_low: Scalar, clip_high: Scalar):
    clipped = jnp.clip(ratio, 1.0 - clip_low, 1.0 + clip_high)
    return jnp.maximum(-ratio * advantages, -clipped * advantages)


@dataclasses.dataclass(frozen=True)
class PolicyLoss:
    """One row of `POLICY_LOSSES`: the loss and what it reads."""

    function: Callable[..., Float[Array, "B T"]]
    inputs: tuple[str, ...]  # names of the function's array arguments, in order
    hyper_parameters: tuple[str, ...] = ()  # keys of config.algorithm
    selection: TokenSelection | None = None  # selects tokens by covariance before the update


RATIO = ("log_ratio", "advantages")
RATIO_AND_LOGP = ("log_ratio", "logp", "advantages")
RESPONSE = ("mask", "segments")
SELECTED = (*RATIO, "selected")
CLIP = ("clip_low", "clip_high")
PENALTY = ("log_ratio_penalty",)
VESPO = (
    "vespo_k_positive",
    "vespo_lambda_positive",
    "vespo_k_negative",
    "vespo_lambda_negative",
)
TRUST_REGION = (*CLIP, "ratio_max", *PENALTY)

POLICY_LOSSES = {
    "ppo_clip": PolicyLoss(ppo_clip, RATIO, CLIP),
    "dual_clip": PolicyLoss(dual_clip, RATIO, (*CLIP, "clip_dual")),
    "policy_gradient": PolicyLoss(policy_gradient, ("logp", "advantages")),
    "gspo": PolicyLoss(gspo, (*RATIO, *RESPONSE), CLIP),
    "gspo_token": PolicyLoss(gspo_token, (*RATIO_AND_LOGP, *RESPONSE), CLIP),
    "cispo": PolicyLoss(cispo, RATIO_AND_LOGP, CLIP),
    "gmpo": PolicyLoss(gmpo, (*RATIO, *RESPONSE), CLIP),
    "sapo": PolicyLoss(sapo, RATIO, ("sapo_tau_positive", "sapo_tau_negative")),
    "clip_cov": PolicyLoss(clip_cov, SELECTED, CLIP, selection=SELECT_BETWEEN),
    "kl_cov": PolicyLoss(kl_cov, SELECTED, ("kl_cov_coef",), selection=SELECT_LARGEST),
    "dppo_tv": PolicyLoss(dppo_tv, RATIO_AND_LOGP, TRUST_REGION),
    "dppo_kl": PolicyLoss(dppo_kl, RATIO_AND_LOGP, TRUST_REGION),
    "dro": PolicyLoss(dro, RATIO_AND_LOGP, PENALTY),
    "vespo": PolicyLoss(vespo, (*RATIO_AND_LOGP, *RESPONSE), VESPO),
}
