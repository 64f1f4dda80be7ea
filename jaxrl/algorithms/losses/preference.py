"""Preference losses over pairs of completions, against a reference model.

Each loss takes r = log π(y|x) - log π_ref(y|x) of the chosen and of the rejected completions,
summed over their tokens, [N], and returns one loss per pair, [N]. The table of all losses is in
preference_table.py, those without a reference are in reference_free.py.

A loss of sequence logprobs has the same gradient as a policy gradient whose advantage, at every
token of a completion, is minus the derivative of the loss with respect to that completion's
logprob: see `advantages`. So the two completions of a pair may be in different rows and
micro-batches, and the learner does not know about pairs.
"""

import functools
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


def hinge(
    chosen: Float[Array, " N"], rejected: Float[Array, " N"], *, beta: float
) -> Float[Array, " N"]:
    """max(0, 1 - β (r_chosen - r_rejected)): RSO (https://arxiv.org/abs/2309.06657).

    It is the loss of SLiC (https://arxiv.org/abs/2305.10425) with likelihoods relative to π_ref.
    """
    return jax.nn.relu(1.0 - beta * (chosen - rejected))


def robust(
    chosen: Float[Array, " N"], rejected: Float[Array, " N"], *, beta: float, label_smoothing: float
) -> Float[Array, " N"]:
    """((1 - ε) DPO(chosen, rejected) - ε DPO(rejected, chosen)) / (1 - 2 ε): Robust DPO.

    https://arxiv.org/abs/2403.00409: the mean over labels that are swapped with the
    probability ε = `label_smoothing` < 1/2 is the loss of the right labels.
    """
    right, wrong = dpo(chosen, rejected, beta=beta), dpo(rejected, chosen, beta=beta)
    return ((1.0 - label_smoothing) * right - label_smoothing * wrong) / (1.0 - 2 * label_smoothing)


def exo_pair(
    chosen: Float[Array, " N"], rejected: Float[Array, " N"], *, beta: float, label_smoothing: float
) -> Float[Array, " N"]:
    """KL(p, q) of p = softmax(β r) over both completions and q = (1 - ε, ε): EXO-pref, eq. 16.

    https://arxiv.org/abs/2402.00856, with K = 2. ε = `label_smoothing` > 0.
    """
    margin = beta * (chosen - rejected)
    log_chosen, log_rejected = jax.nn.log_sigmoid(margin), jax.nn.log_sigmoid(-margin)
    to_chosen = jnp.exp(log_chosen) * (log_chosen - jnp.log1p(-label_smoothing))
    return to_chosen + jnp.exp(log_rejected) * (log_rejected - jnp.log(label_smoothing))


def nca_pair(
    chosen: Float[Array, " N"], rejected: Float[Array, " N"], *, beta: float
) -> Float[Array, " N"]:
    """-log σ(β r_chosen) - (log σ(-β r_chosen) + log σ(-β r_rejected)) / 2: pairwise NCA.

    https://arxiv.org/abs/2402.05369, with K = 2 and a hard preference.
    """
    others = jax.nn.log_sigmoid(-beta * chosen) + jax.nn.log_sigmoid(-beta * rejected)
    return -jax.nn.log_sigmoid(beta * chosen) - 0.5 * others


def bco_pair(
    chosen: Float[Array, " N"], rejected: Float[Array, " N"], *, beta: float
) -> Float[Array, " N"]:
    """-log σ(β r_chosen) - log σ(-β r_rejected): BCO (https://arxiv.org/abs/2404.04656).

    The shift of the rewards δ is 0, as in TRL and in MPO (https://arxiv.org/abs/2411.10442).
    """
    return -jax.nn.log_sigmoid(beta * chosen) - jax.nn.log_sigmoid(-beta * rejected)


def sppo_hard(
    chosen: Float[Array, " N"], rejected: Float[Array, " N"], *, beta: float
) -> Float[Array, " N"]:
    """(r_chosen - 1 / (2 β))² + (r_rejected + 1 / (2 β))²: SPPO, eq. 4.7.

    https://arxiv.org/abs/2405.00675, with win rates of 1 and 0; 1 / β is the paper's η.
    """
    half = 0.5 / beta
    return (chosen - half) ** 2 + (rejected + half) ** 2


def aot(
    chosen_logp: Float[Array, " N"],
    rejected_logp: Float[Array, " N"],
    chosen_ref_logp: Float[Array, " N"],
    rejected_ref_logp: Float[Array, " N"],
    *,
    beta: float,
    label_smoothing: float,
) -> Float[Array, " N"]:
    """DPO of sorted margins: paired AOT (https://arxiv.org/abs/2406.05882).

    The N margins log π(chosen) - log π(rejected) are sorted, and so are those of the reference;
    each is compared with that of its rank, so that the policy's margins dominate stochastically.
    """
    policy = jnp.sort(chosen_logp - rejected_logp)
    reference = jnp.sort(chosen_ref_logp - rejected_ref_logp)
    return dpo(policy, reference, beta=beta, label_smoothing=label_smoothing)


def aot_unpaired(
    chosen: Float[Array, " N"], rejected: Float[Array, " N"], *, beta: float, label_smoothing: float
) -> Float[Array, " N"]:
    """DPO of the sorted r_chosen and the sorted r_rejected: unpaired AOT.

    https://arxiv.org/abs/2406.05882: as `aot`, without the pairing of the completions.
    """
    ranked = jnp.sort(chosen), jnp.sort(rejected)
    return dpo(*ranked, beta=beta, label_smoothing=label_smoothing)


def apo_zero(
    chosen: Float[Array, " N"], rejected: Float[Array, " N"], *, beta: float
) -> Float[Array, " N"]:
    """1 - σ(β r_chosen) + σ(β r_rejected): APO-zero, eq. 7 (https://arxiv.org/abs/2408.06266).

    For chosen completions that are better than those of the model.
    """
    return 1.0 - jax.nn.sigmoid(beta * chosen) + jax.nn.sigmoid(beta * rejected)


def apo_down(
    chosen: Float[Array, " N"], rejected: Float[Array, " N"], *, beta: float
) -> Float[Array, " N"]:
    """σ(β r_chosen) + 1 - σ(β (r_chosen - r_rejected)): APO-down, eq. 8.

    https://arxiv.org/abs/2408.06266: for chosen completions that are worse than those of the model.
    Both likelihoods fall, that of the rejected completion more.
    """
    return jax.nn.sigmoid(beta * chosen) + 1.0 - jax.nn.sigmoid(beta * (chosen - rejected))


def discopop(
    chosen: Float[Array, " N"], rejected: Float[Array, " N"], *, beta: float, discopop_tau: float
) -> Float[Array, " N"]:
    """(1 - s) DPO + s exp(-ρ), ρ = β (r_chosen - r_rejected), s = σ(ρ / τ): DiscoPOP, eq. 5.

    https://arxiv.org/abs/2406.08414, log-ratio modulated loss. It rises with ρ near
    ρ = 0, unlike DPO.
    """
    margin = beta * (chosen - rejected)
    share = jax.nn.sigmoid(margin / discopop_tau)
    return (1.0 - share) * -jax.nn.log_sigmoid(margin) + share * jnp.exp(-margin)


def kto(
    chosen: Float[Array, " N"],
    rejected: Float[Array, " N"],
    kl: float | Float[Array, ""],
    *,
    beta: float,
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


def bco(
    chosen: Float[Array, " N"],
    rejected: Float[Array, " N"],
    shift: float | Float[Array, ""],
    *,
    beta: float,
    chosen_weight: float,
    rejected_weight: float,
) -> Float[Array, " N"]:
    """Mean of -λ_D log σ(β (r_chosen - z)) and -λ_U log σ(-β (r_rejected - z)): BCO.

    https://arxiv.org/abs/2404.04656, a binary classifier of single completions with the reward
    shift δ = β z; z = `shift` is the running mean of r over all completions, without gradient.
    """
    weights = dict(chosen_weight=chosen_weight, rejected_weight=rejected_weight)
    good, bad = (jnp.full(chosen.shape, label) for label in (True, False))
    each = functools.partial(bco_labelled, beta=beta, shift=shift, **weights)
    return 0.5 * (each(chosen, good) + each(rejected, bad))


def bco_labelled(
    ratio: Float[Array, " N"],
    desirable: Bool[Array, " N"],
    *,
    beta: float,
    shift: float | Float[Array, ""],
    chosen_weight: float,
    rejected_weight: float,
) -> Float[Array, " N"]:
    """-λ_D log σ(β (r - z)) or -λ_U log σ(-β (r - z)) of each completion: BCO.

    As `bco`, for completions that are no pairs; N counts completions.
    """
    sign, weight = _sign_and_weight(desirable, chosen_weight, rejected_weight)
    return -weight * jax.nn.log_sigmoid(beta * sign * (ratio - shift))


def apo_zero_unpaired(
    chosen: Float[Array, " N"],
    rejected: Float[Array, " N"],
    *,
    beta: float,
    chosen_weight: float,
    rejected_weight: float,
) -> Float[Array, " N"]:
    """Mean of λ_D (1 - σ(β r_chosen)) and λ_U σ(β r_rejected): APO-zero of single completions.

    https://arxiv.org/abs/2408.06266, eq. 7, as KTO with z = 0.
    """
    weights = dict(chosen_weight=chosen_weight, rejected_weight=rejected_weight)
    return kto(chosen, rejected, 0.0, beta=beta, **weights)


def kto_labelled(
    ratio: Float[Array, " N"],
    desirable: Bool[Array, " N"],
    *,
    beta: float,
    kl: float | Float[Array, ""],
    chosen_weight: float,
    rejected_weight: float,
) -> Float[Array, " N"]:
    """λ_D (1 - σ(β (r - z))) or λ_U (1 - σ(β (z - r))) of each completion: KTO, eq. 8.

    As `kto`, for completions that are no pairs; N counts completions.
    """
    sign, weight = _sign_and_weight(desirable, chosen_weight, rejected_weight)
    return weight * jax.nn.sigmoid(-beta * sign * (ratio - kl))


def _sign_and_weight(
    desirable: Bool[Array, " N"], chosen_weight: float, rejected_weight: float
) -> tuple[Float[Array, " N"], Float[Array, " N"]]:
    """(1 or -1, λ_D or λ_U) of desirable and of other completions."""
    return jnp.where(desirable, 1.0, -1.0), jnp.where(desirable, chosen_weight, rejected_weight)


def bradley_terry(
    chosen: Float[Array, " N"], rejected: Float[Array, " N"], *, margin: Float[Array, " N"]
) -> Float[Array, " N"]:
    """-log σ(r_chosen - r_rejected - m) of a reward model's scores r.

    InstructGPT, eq. 1 (https://arxiv.org/abs/2203.02155); with a margin m, Llama 2, eq. 2
    (https://arxiv.org/abs/2307.09288).
    """
    return -jax.nn.log_sigmoid(chosen - rejected - margin)


def centering(chosen: Float[Array, " N"], rejected: Float[Array, " N"]) -> Float[Array, " N"]:
    """(r_chosen + r_rejected)² of a reward model's scores r, to be weighted by a coefficient.

    Eisenstein et al., section 2 (https://arxiv.org/abs/2312.09244): differences of scores leave
    their level open; this term centers it at 0.
    """
    return (chosen + rejected) ** 2


def advantages(
    loss: PairLoss, chosen: Float[Array, " N"], rejected: Float[Array, " N"]
) -> tuple[Float[Array, " N"], Float[Array, " N"], Float[Array, " N"]]:
    """(loss, advantage of the chosen completion, advantage of the rejected completion) per pair."""
    value, slope = jax.vjp(loss, chosen, rejected)
    to_chosen, to_rejected = slope(jnp.ones_like(value))
    return value, -to_chosen, -to_rejected
