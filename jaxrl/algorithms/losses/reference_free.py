"""Preference losses over pairs of completions without a reference model.

Each loss takes log π(y|x) of the chosen and of the rejected completions, [N], as a sum or a mean
over their tokens, and returns one loss per pair, [N].
"""

import jax
import jax.numpy as jnp
from jaxtyping import Array, Float

from jaxrl.algorithms.losses.preference import dpo, hinge, ipo

MAX_EXPONENT = 80.0  # of AlphaPO's powers of 1 / p, which exceed float32 beyond


def sft(chosen_logp: Float[Array, " N"], chosen_len: Float[Array, " N"]) -> Float[Array, " N"]:
    """-log π(chosen) divided by the mean number of tokens, so that its mean is one over tokens.

    The term of the chosen completions in CPO, ORPO and MPO; both arguments are sums over tokens.
    """
    return -chosen_logp / jnp.mean(chosen_len)


def simpo(
    chosen: Float[Array, " N"],
    rejected: Float[Array, " N"],
    *,
    beta: float,
    simpo_gamma: float,
    alphapo_alpha: float = 0.0,
    label_smoothing: float,
) -> Float[Array, " N"]:
    """-log σ(β (l_chosen - l_rejected) - γ), l = log π(y|x) / |y|: SimPO, eq. 6.

    https://arxiv.org/abs/2405.14734. Label smoothing as in `dpo`. With `alphapo_alpha`, l is
    `alpha_reward` of it.
    """
    chosen, rejected = (alpha_reward(x, alphapo_alpha) for x in (chosen, rejected))
    shifted = chosen - simpo_gamma / beta
    return dpo(shifted, rejected, beta=beta, label_smoothing=label_smoothing)


def cpo(
    chosen_logp: Float[Array, " N"],
    rejected_logp: Float[Array, " N"],
    chosen_len: Float[Array, " N"],
    *,
    beta: float,
    cpo_alpha: float,
    alphapo_alpha: float = 0.0,
    label_smoothing: float,
) -> Float[Array, " N"]:
    """-log σ(β (log π(chosen) - log π(rejected))) + α sft: CPO.

    https://arxiv.org/abs/2401.08417, with α = 1; the `sft` term is a mean over tokens as in TRL.
    Label smoothing as in `dpo`. With `alphapo_alpha`, the first term compares `alpha_reward`s.
    """
    rewards = (alpha_reward(x, alphapo_alpha) for x in (chosen_logp, rejected_logp))
    prefer = dpo(*rewards, beta=beta, label_smoothing=label_smoothing)
    return prefer + cpo_alpha * sft(chosen_logp, chosen_len)


def cpo_hinge(
    chosen_logp: Float[Array, " N"],
    rejected_logp: Float[Array, " N"],
    chosen_len: Float[Array, " N"],
    *,
    beta: float,
    cpo_alpha: float,
    alphapo_alpha: float = 0.0,
) -> Float[Array, " N"]:
    """max(0, 1 - β (log π(chosen) - log π(rejected))) + α sft: `cpo` with `hinge`.

    With β = 1 / δ it is δ times smaller than SLiC-HF's calibration loss of margin δ, eq. 2
    (https://arxiv.org/abs/2305.10425).
    """
    rewards = (alpha_reward(x, alphapo_alpha) for x in (chosen_logp, rejected_logp))
    return hinge(*rewards, beta=beta) + cpo_alpha * sft(chosen_logp, chosen_len)


def cpo_ipo(
    chosen: Float[Array, " N"],
    rejected: Float[Array, " N"],
    chosen_logp: Float[Array, " N"],
    chosen_len: Float[Array, " N"],
    *,
    beta: float,
    cpo_alpha: float,
    alphapo_alpha: float = 0.0,
) -> Float[Array, " N"]:
    """(log π(chosen) - log π(rejected) - 1 / (2 β))² + α sft: `cpo` with `ipo`.

    The square is IPO's, eq. 17 of https://arxiv.org/abs/2310.12036, with a uniform reference; as
    for `ipo`, sums over tokens or, as in TRL, means.
    """
    rewards = (alpha_reward(x, alphapo_alpha) for x in (chosen, rejected))
    return ipo(*rewards, beta=beta) + cpo_alpha * sft(chosen_logp, chosen_len)


def orpo(
    chosen: Float[Array, " N"],
    rejected: Float[Array, " N"],
    chosen_logp: Float[Array, " N"],
    chosen_len: Float[Array, " N"],
    *,
    beta: float,
) -> Float[Array, " N"]:
    """sft - β log σ(log odds(chosen) - log odds(rejected)): ORPO, eqs. 6 and 7.

    https://arxiv.org/abs/2403.07691: odds = p / (1 - p) with log p = log π(y|x) / |y|, the means
    `chosen` and `rejected`; β is the paper's λ.
    """
    log_odds = _log_odds(chosen) - _log_odds(rejected)
    return sft(chosen_logp, chosen_len) - beta * jax.nn.log_sigmoid(log_odds)


def alpha_reward(logp: Float[Array, " N"], alpha: float) -> Float[Array, " N"]:
    """(1 - p^-α) / α of log p, and log p for α = 0: AlphaPO (https://arxiv.org/abs/2501.03884)."""
    if not alpha:
        return logp
    return -jnp.expm1(jnp.minimum(-alpha * logp, MAX_EXPONENT)) / alpha


def _log_odds(logp: Float[Array, " N"]) -> Float[Array, " N"]:
    """log(p / (1 - p)) of log p, finite for p up to 1 - 1e-7."""
    logp = jnp.minimum(logp, -1e-7)
    return logp - jnp.log(-jnp.expm1(logp))
