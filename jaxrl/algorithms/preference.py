"""Losses over pairs of answers. Each takes r = log π(y|x) - log π_ref(y|x) of the chosen and of the rejected
answers, sums over their tokens, [N], and returns one loss per pair, [N].

A loss that is a function of whole-answer logprobs has the gradient of a policy gradient whose advantage,
at every token of an answer, is minus its derivative there: `advantages`. So a pair need not lie in one row,
nor in one micro-batch, and the learner knows nothing of pairs.
"""

from collections.abc import Callable

import jax
import jax.numpy as jnp
from jaxtyping import Array, Float

PairLoss = Callable[[Float[Array, " N"], Float[Array, " N"]], Float[Array, " N"]]


def dpo(
    chosen: Float[Array, " N"],
    rejected: Float[Array, " N"],
    *,
    beta: float,
    label_smoothing: float = 0.0,
) -> Float[Array, " N"]:
    """-log σ(β (r_chosen - r_rejected)): DPO, eq. 7 (https://arxiv.org/abs/2305.18290).

    With a label_smoothing of ε the labels are taken to be wrong with that probability, which is cDPO
    (https://ericmitchell.ai/cdpo.pdf, eq. 3).
    """
    margin = beta * (chosen - rejected)
    right, wrong = -jax.nn.log_sigmoid(margin), -jax.nn.log_sigmoid(-margin)
    return (1.0 - label_smoothing) * right + label_smoothing * wrong


def ipo(
    chosen: Float[Array, " N"], rejected: Float[Array, " N"], *, beta: float
) -> Float[Array, " N"]:
    """(r_chosen - r_rejected - 1 / (2 β))²: IPO, eq. 17 (https://arxiv.org/abs/2310.12036), β being its τ."""
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
    """Mean of λ_D (1 - σ(β (r_chosen - z))) and λ_U (1 - σ(β (z - r_rejected))): KTO, eq. 8
    (https://arxiv.org/abs/2402.01306), where each answer is judged by itself.

    z = `kl` is an estimate of KL(π | π_ref), which has no gradient: max(0, mean r) over answers to other
    prompts.
    """
    good = chosen_weight * jax.nn.sigmoid(-beta * (chosen - kl))
    bad = rejected_weight * jax.nn.sigmoid(-beta * (kl - rejected))
    return 0.5 * (good + bad)


def bradley_terry(
    chosen: Float[Array, " N"], rejected: Float[Array, " N"], *, margin: Float[Array, " N"]
) -> Float[Array, " N"]:
    """-log σ(r_chosen - r_rejected - m), r being a reward model's scores: InstructGPT, eq. 1
    (https://arxiv.org/abs/2203.02155); with a margin m it is Llama 2's eq. 2 (https://arxiv.org/abs/2307.09288).
    """
    return -jax.nn.log_sigmoid(chosen - rejected - margin)


def advantages(
    loss: PairLoss, chosen: Float[Array, " N"], rejected: Float[Array, " N"]
) -> tuple[Float[Array, " N"], Float[Array, " N"], Float[Array, " N"]]:
    """(loss of every pair, advantage of its chosen answer, of its rejected answer)."""
    value, slope = jax.vjp(loss, chosen, rejected)
    to_chosen, to_rejected = slope(jnp.ones_like(value))
    return value, -to_chosen, -to_rejected
