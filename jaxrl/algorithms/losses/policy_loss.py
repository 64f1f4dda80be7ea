"""Policy losses. Each returns one loss per token; masking and averaging happen in aggregation.py.

r = exp(log_ratio) with log_ratio = logp - old_logp is the importance ratio of a token, A its
advantage, |y| the length of its response; "sg" stops the gradient. A response-level loss has the
same value at each token of the response, so that `seq_mean_token_mean` gives the papers' mean over
responses. What a loss requires of other choices is in jaxrl/config/preconditions.py.
"""

import dataclasses
from collections.abc import Callable

import jax
import jax.numpy as jnp
from jax.lax import stop_gradient
from jaxtyping import Array, Bool, Float, Int

from jaxrl.algorithms.kl import magnitude
from jaxrl.algorithms.losses.covariance import SELECT_BETWEEN, SELECT_LARGEST, TokenSelection
from jaxrl.algorithms.segment import segment_mean


def ppo_clip(
    log_ratio: Float[Array, "B T"],
    advantages: Float[Array, "B T"],
    *,
    clip_low: float,
    clip_high: float,
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
    clip_low: float,
    clip_high: float,
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
    clip_low: float,
    clip_high: float,
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


def _clipped(ratio, advantages, clip_low: float, clip_high: float):
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
}
