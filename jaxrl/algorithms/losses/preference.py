"""Preference losses over pairs of completions.

Each loss takes r = log π(y|x) - log π_ref(y|x) of the chosen and of the rejected completions,
summed over their tokens, [N], and returns one loss per pair, [N].

A loss of sequence logprobs has the same gradient as a policy gradient whose advantage, at every
token of a completion, is minus the derivative of the loss with respect to that completion's
logprob: see `advantages`. So the two completions of a pair may be in different rows and
micro-batches, and the learner does not know about pairs.
"""

from collections.abc import Callable

import jax
import jax.numpy as jnp
from jaxtyping import Array, Bool, Float

PairLoss = Callable[[Float[Array, " N"], Float[Array, " N"]], Float[Array, " N"]]


def dpo(
    chosen: Float[Array, " N"],
    rejected: Float[Array, " N"],
    *,
    beta: float,
    label_smoothing: float = 0.0,
) -> Float[Array, " N"]:
    """-log σ(β (r_chosen - r_rejected)): DPO, eq. 7 (https://arxiv.org/abs/2305.18290).

    `label_smoothing` is the assumed probability that a label is wrong: cDPO, eq. 3
    (https://ericmitchell.ai/cdpo.pdf).
    """
    margin = beta * (chosen - rejected)
    right, wrong = -jax.nn.log_sigmoid(margin), -jax.nn.log_sigmoid(-margin)
    return (1.0 - label_smoothing) * right + label_smoothing * wrong


def ipo(
    chosen: Float[Array, " N"], rejected: Float[Array, " N"], *, beta: float
) -> Float[Array, " N"]:
    """(r_chosen - r_rejected - 1 / (2 β))²: IPO, eq. 17 (https://arxiv.org/abs/2310.12036).

    β is the paper's τ. r is the sum over the tokens of a completion in the equation. TRL has the
    mean instead, which its authors report as the form of the paper's experiments; the target of the
    margin, 1 / (2 β), is then per token.
    """
    return (chosen - rejected - 1.0 / (2.0 * beta)) ** 2


def kto(
    chosen: Float[Array, " N"],
    rejected: Float[Array, " N"],
    *,
    beta: float,
    kl: float,
    chosen_weight: float,
    rejected_weight: float,
) -> Float[Array, " N"]:
    """Mean of λ_D (1 - σ(β (r_chosen - z))) and λ_U (1 - σ(β (z - r_rejected))): KTO, eq. 8.

    https://arxiv.org/abs/2402.01306: each completion is scored on its own. z = `kl` is an estimate
    of KL(π | π_ref) without gradient: max(0, mean r) over all completions, chosen and rejected,
    combined with other prompts.
    """

    def each(ratio: Float[Array, " N"], desirable: bool) -> Float[Array, " N"]:
        return kto_labelled(
            ratio,
            jnp.full(ratio.shape, desirable),
            beta=beta,
            kl=kl,
            chosen_weight=chosen_weight,
            rejected_weight=rejected_weight,
        )

    return 0.5 * (each(chosen, True) + each(rejected, False))


def kto_labelled(
    ratio: Float[Array, " N"],
    desirable: Bool[Array, " N"],
    *,
    beta: float,
    kl: float,
    chosen_weight: float,
    rejected_weight: float,
) -> Float[Array, " N"]:
    """λ_D (1 - σ(β (r - z))) or λ_U (1 - σ(β (z - r))) of each completion: KTO, eq. 8.

    As `kto`, for completions that are no pairs; N counts completions.
    """
    sign = jnp.where(desirable, 1.0, -1.0)
    weight = jnp.where(desirable, chosen_weight, rejected_weight)
    return weight * jax.nn.sigmoid(-beta * sign * (ratio - kl))


def bradley_terry(
    chosen: Float[Array, " N"], rejected: Float[Array, " N"], *, margin: Float[Array, " N"]
) -> Float[Array, " N"]:
    """-log σ(r_chosen - r_rejected - m) of a reward model's scores r.

    InstructGPT, eq. 1 (https://arxiv.org/abs/2203.02155); with a margin m, Llama 2, eq. 2
    (https://arxiv.org/abs/2307.09288).
    """
    return -jax.nn.log_sigmoid(chosen - rejected - margin)


def advantages(
    loss: PairLoss, chosen: Float[Array, " N"], rejected: Float[Array, " N"]
) -> tuple[Float[Array, " N"], Float[Array, " N"], Float[Array, " N"]]:
    """(loss, advantage of the chosen completion, advantage of the rejected completion) per pair."""
    value, slope = jax.vjp(loss, chosen, rejected)
    to_chosen, to_rejected = slope(jnp.ones_like(value))
    return value, -to_chosen, -to_rejected
