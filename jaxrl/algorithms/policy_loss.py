"""Policy losses. Each returns one loss value per token; masking and averaging happen in aggregate.py.

r = exp(logp - old_logp) is the ratio of a token, A its advantage, |y| the length of its response. "sg" stops
the gradient. Losses of whole responses stand at each token of theirs, so that seq_mean_token_mean gives the
papers' mean over responses.
"""

import jax
import jax.numpy as jnp
from jax.lax import stop_gradient
from jaxtyping import Array, Bool, Float, Int

from jaxrl.algorithms.kl import magnitude
from jaxrl.algorithms.segment import segment_mean


def ppo_clip(
    logp: Float[Array, "B T"],
    old_logp: Float[Array, "B T"],
    advantages: Float[Array, "B T"],
    *,
    clip_low: float,
    clip_high: float,
) -> Float[Array, "B T"]:
    """Clipped surrogate, max(-r A, -clip(r, 1 - low, 1 + high) A).

    PPO, eq. 7 (https://arxiv.org/abs/1707.06347); with high > low it is clip-higher, DAPO, eq. 8
    (https://arxiv.org/abs/2503.14476).
    """
    return _clipped(jnp.exp(logp - old_logp), advantages, clip_low, clip_high)


def dual_clip(
    logp: Float[Array, "B T"],
    old_logp: Float[Array, "B T"],
    advantages: Float[Array, "B T"],
    *,
    clip_low: float,
    clip_high: float,
    clip_dual: float,
) -> Float[Array, "B T"]:
    """`ppo_clip`, but at most -c A where A < 0, so that a token which has become much likelier does not
    rule the step: c = clip_dual > 1.

    Dual-clip PPO, eq. 5 (https://arxiv.org/abs/1912.09729).
    """
    loss = _clipped(jnp.exp(logp - old_logp), advantages, clip_low, clip_high)
    return jnp.where(advantages < 0, jnp.minimum(loss, -clip_dual * advantages), loss)


def policy_gradient(
    logp: Float[Array, "B T"], advantages: Float[Array, "B T"]
) -> Float[Array, "B T"]:
    """-A logp, the plain policy gradient: REINFORCE (https://doi.org/10.1007/BF00992696), the loss of GPG
    (https://arxiv.org/abs/2504.02546)."""
    return -advantages * logp


def gspo(
    logp: Float[Array, "B T"],
    old_logp: Float[Array, "B T"],
    advantages: Float[Array, "B T"],
    mask: Float[Array, "B T"],
    segments: Int[Array, "B T"],
    *,
    clip_low: float,
    clip_high: float,
) -> Float[Array, "B T"]:
    """max(-s A, -clip(s, 1 - low, 1 + high) A) with the ratio of the response,
    s = exp(1/|y| Σ_t (logp_t - old_logp_t)): GSPO, eq. 5 to 7 (https://arxiv.org/abs/2507.18071)."""
    ratio = jnp.exp(segment_mean(logp - old_logp, mask, segments))
    return _clipped(ratio, advantages, clip_low, clip_high)


def gspo_token(
    logp: Float[Array, "B T"],
    old_logp: Float[Array, "B T"],
    advantages: Float[Array, "B T"],
    mask: Float[Array, "B T"],
    segments: Int[Array, "B T"],
    *,
    clip_low: float,
    clip_high: float,
) -> Float[Array, "B T"]:
    """`gspo` with s_t = sg(s) exp(logp_t - sg(logp_t)): its value, but every token's gradient follows its own
    advantage. GSPO-token (https://arxiv.org/abs/2507.18071, section 4.3)."""
    log_ratio = stop_gradient(segment_mean(logp - old_logp, mask, segments))
    ratio = jnp.exp(log_ratio + logp - stop_gradient(logp))
    return _clipped(ratio, advantages, clip_low, clip_high)


def cispo(
    logp: Float[Array, "B T"],
    old_logp: Float[Array, "B T"],
    advantages: Float[Array, "B T"],
    *,
    clip_low: float,
    clip_high: float,
) -> Float[Array, "B T"]:
    """-sg(clip(r, 1 - low, 1 + high)) A logp: the weight is clipped, no token loses its gradient.

    CISPO, eq. 4 and 5 of MiniMax-M1 (https://arxiv.org/abs/2506.13585).
    """
    weight = jnp.clip(jnp.exp(logp - old_logp), 1.0 - clip_low, 1.0 + clip_high)
    return -stop_gradient(weight) * advantages * logp


def gmpo(
    logp: Float[Array, "B T"],
    old_logp: Float[Array, "B T"],
    advantages: Float[Array, "B T"],
    mask: Float[Array, "B T"],
    segments: Int[Array, "B T"],
    *,
    clip_low: float,
    clip_high: float,
) -> Float[Array, "B T"]:
    """-A exp(1/|y| Σ_t c_t), where c is log r cut at +high for A > 0 and at -low for A < 0.

    GMPO (https://arxiv.org/abs/2507.20673): the geometric mean of ratios that are clipped token by token,
    in log space (the paper's bounds are 0.4). A must be the same at all tokens of a response.
    """
    log_ratio = logp - old_logp
    cut = jnp.where(
        advantages > 0, jnp.minimum(log_ratio, clip_high), jnp.maximum(log_ratio, -clip_low)
    )
    return -advantages * jnp.exp(segment_mean(cut, mask, segments))


def sapo(
    logp: Float[Array, "B T"],
    old_logp: Float[Array, "B T"],
    advantages: Float[Array, "B T"],
    *,
    tau_positive: float,
    tau_negative: float,
) -> Float[Array, "B T"]:
    """-(4 / τ) sigmoid(τ (r - 1)) A with τ by the sign of A: a gate instead of a clip, of slope 1 at r = 1.

    SAPO (https://arxiv.org/abs/2511.20347).
    """
    tau = jnp.where(advantages > 0, tau_positive, tau_negative)
    gate = jax.nn.sigmoid(tau * (jnp.exp(logp - old_logp) - 1.0))
    return -gate * 4.0 / tau * advantages


def clip_cov(
    logp: Float[Array, "B T"],
    old_logp: Float[Array, "B T"],
    advantages: Float[Array, "B T"],
    selected: Bool[Array, "B T"],
    *,
    clip_low: float,
    clip_high: float,
) -> Float[Array, "B T"]:
    """`ppo_clip`, without gradient at the `selected` tokens, a few of those whose logprob and advantage go
    together most (covariance.py): Clip-Cov (https://arxiv.org/abs/2505.22617)."""
    loss = _clipped(jnp.exp(logp - old_logp), advantages, clip_low, clip_high)
    return jnp.where(selected, 0.0, loss)


def kl_cov(
    logp: Float[Array, "B T"],
    old_logp: Float[Array, "B T"],
    advantages: Float[Array, "B T"],
    selected: Bool[Array, "B T"],
    *,
    kl_cov_coef: float,
) -> Float[Array, "B T"]:
    """-r A + coef |logp - old_logp| [selected]: the tokens whose logprob and advantage go together most
    (covariance.py) are held where they were. KL-Cov (https://arxiv.org/abs/2505.22617)."""
    diff = logp - old_logp
    return -jnp.exp(diff) * advantages + jnp.where(selected, kl_cov_coef * magnitude(diff), 0.0)


def _clipped(ratio, advantages, clip_low: float, clip_high: float):
    clipped = jnp.clip(ratio, 1.0 - clip_low, 1.0 + clip_high)
    return jnp.maximum(-ratio * advantages, -clipped * advantages)


POLICY_LOSSES = {
    "ppo_clip": ppo_clip,
    "dual_clip": dual_clip,
    "policy_gradient": policy_gradient,
    "gspo": gspo,
    "gspo_token": gspo_token,
    "cispo": cispo,
    "gmpo": gmpo,
    "sapo": sapo,
    "clip_cov": clip_cov,
    "kl_cov": kl_cov,
}
