"""The preference losses by their configured names, and their weighted sum.

The functions of preference.py and reference_free.py say what they take by name: `chosen` and
`rejected` are log ratios to the reference (or logprobs, without one), as sums or means over tokens.
"""

import dataclasses
from collections.abc import Callable, Sequence

import jax
import jax.numpy as jnp
import numpy as np
from flax import struct
from jaxtyping import Array, Float

from jaxrl.algorithms.losses import preference, reference_free
from jaxrl.algorithms.table import apply, lookup
from jaxrl.config.choices import IPO_LOSSES, MEAN_LOSSES, REFERENCE_FREE_LOSSES
from jaxrl.config.keys import PreferenceConfig

MAX_EXPONENT = 80.0  # of f-divergences, whose powers of π_ref / π exceed float32 beyond


@dataclasses.dataclass(frozen=True)
class PreferenceLoss:
    """A row of the table."""

    function: Callable[..., Float[Array, " N"]]
    inputs: tuple[str, ...] = ("chosen", "rejected")
    hyper_parameters: tuple[str, ...] = ("beta",)


@struct.dataclass
class PairLogps:
    """Logprobs of N pairs of completions, summed over their tokens: chosen, then rejected.

    The ratio is a sum of differences of tokens, which is more exact than a difference of sums.
    """

    ratio: Array  # float32 [2N], log π / π_ref; log π without a reference model
    reference: Array  # float32 [2N], log π_ref; 0 without a reference model
    n_tokens: Array  # float32 [2N]
    shift: Array  # float32 [], subtracted from ratios: KTO's and BCO's z
    weights: Array | float = 1.0  # float32 [N], factor of each pair's loss (WPO)

    @property
    def policy(self) -> Float[Array, " M"]:
        return self.ratio + self.reference


ONE_SIDE, BOTH_SIDES = ("chosen_logp", "chosen_len"), ("chosen_logp", "rejected_logp")
REFERENCES = ("chosen_ref_logp", "rejected_ref_logp")
SMOOTHED = ("beta", "label_smoothing")
CPO, ALPHA = (*BOTH_SIDES, "chosen_len"), ("alphapo_alpha",)
LOSSES = {
    "dpo": PreferenceLoss(preference.dpo, hyper_parameters=SMOOTHED),
    "dpo_norm": PreferenceLoss(preference.dpo),
    "hinge": PreferenceLoss(preference.hinge),
    "ipo": PreferenceLoss(preference.ipo),
    "robust": PreferenceLoss(preference.robust, hyper_parameters=SMOOTHED),
    "exo_pair": PreferenceLoss(preference.exo_pair, hyper_parameters=SMOOTHED),
    "nca_pair": PreferenceLoss(preference.nca_pair),
    "bco_pair": PreferenceLoss(preference.bco_pair),
    "sppo_hard": PreferenceLoss(preference.sppo_hard),
    "aot": PreferenceLoss(preference.aot, (*BOTH_SIDES, *REFERENCES), SMOOTHED),
    "aot_unpaired": PreferenceLoss(preference.aot_unpaired, hyper_parameters=SMOOTHED),
    "apo_zero": PreferenceLoss(preference.apo_zero),
    "apo_down": PreferenceLoss(preference.apo_down),
    "discopop": PreferenceLoss(preference.discopop, hyper_parameters=("beta", "discopop_tau")),
    "kto": PreferenceLoss(
        preference.kto,
        ("chosen", "rejected", "kl"),
        ("beta", "chosen_weight", "rejected_weight"),
    ),
    "bco": PreferenceLoss(
        preference.bco,
        ("chosen", "rejected", "shift"),
        ("beta", "chosen_weight", "rejected_weight"),
    ),
    "apo_zero_unpaired": PreferenceLoss(
        preference.apo_zero_unpaired,
        hyper_parameters=("beta", "chosen_weight", "rejected_weight"),
    ),
    "simpo": PreferenceLoss(
        reference_free.simpo, hyper_parameters=("beta", "simpo_gamma", *ALPHA, "label_smoothing")
    ),
    "cpo": PreferenceLoss(
        reference_free.cpo, CPO, ("beta", "cpo_alpha", *ALPHA, "label_smoothing")
    ),
    "cpo_hinge": PreferenceLoss(reference_free.cpo_hinge, CPO, ("beta", "cpo_alpha", *ALPHA)),
    "cpo_ipo": PreferenceLoss(
        reference_free.cpo_ipo,
        ("chosen", "rejected", *ONE_SIDE),
        ("beta", "cpo_alpha", *ALPHA),
    ),
    "orpo": PreferenceLoss(reference_free.orpo, ("chosen", "rejected", *ONE_SIDE)),
    "sft": PreferenceLoss(reference_free.sft, ONE_SIDE, ()),
}


def weighted_losses(logps: PairLogps, cfg: PreferenceConfig) -> Float[Array, " N"]:
    """The sum of the configured losses of each pair, times their weights and the pair's."""
    total = jnp.zeros(len(logps.ratio) // 2)
    for name, weight in cfg.terms:
        row = lookup(LOSSES, name, "preference.loss")
        total += weight * apply(row, _inputs(name, logps, cfg), cfg)
    return total * logps.weights


def pair_weights(
    logps: Sequence[np.ndarray], collisions: Sequence[np.ndarray]
) -> Float[np.ndarray, " N"]:
    """w(chosen) w(rejected) with w(y) = exp(1/|y| Σ_t (log π(y_t) - log Σ π²)): WPO, eq. 2.

    https://arxiv.org/abs/2406.11827: about 1 for answers that the policy would sample itself. The
    logprobs and log Σ π² are those of the tokens of the chosen answers, then of the rejected ones.
    """
    pairs = zip(logps, collisions, strict=True)
    means = [(logp - square).mean() if len(logp) else 0.0 for logp, square in pairs]
    return np.exp(np.add(*np.split(np.array(means, np.float64), 2))).astype(np.float32)


def log_ratios(name: str, logps: PairLogps, cfg: PreferenceConfig) -> Float[Array, " M"]:
    """The numbers that a loss compares: log π / π_ref or log π, as sums or means over tokens."""
    if name in REFERENCE_FREE_LOSSES:
        ratio = logps.policy
    else:
        ratio = divergence_scores(logps.ratio, cfg.f_divergence, cfg.f_alpha)
    is_mean = name in MEAN_LOSSES or (name in IPO_LOSSES and cfg.ipo_reduction == "mean")
    return ratio / logps.n_tokens if is_mean else ratio


def _inputs(name: str, logps: PairLogps, cfg: PreferenceConfig) -> dict[str, Array]:
    """Every array that a loss can name."""
    sides = {
        "": log_ratios(name, logps, cfg),
        "_logp": logps.policy,
        "_ref_logp": logps.reference,
        "_len": logps.n_tokens,
    }
    found: dict[str, Array] = {"kl": logps.shift, "shift": logps.shift}
    for suffix, both in sides.items():
        found["chosen" + suffix], found["rejected" + suffix] = jnp.split(both, 2)
    return found


def divergence_scores(
    ratio: Float[Array, " M"], divergence: str, alpha: float
) -> Float[Array, " M"]:
    """f'(u) at u = π / π_ref up to a constant, of r = log u: f-DPO.

    https://arxiv.org/abs/2309.16240: DPO under the constraint of another divergence than the
    reverse KL compares f'(u) where DPO compares log u. The constants cancel in the difference:
    forward KL 1 - 1/u, Jensen-Shannon log(2 u / (1 + u)), alpha (u^(α - 1) - 1) / (α - 1).
    """
    if divergence == "forward_kl":
        return 1.0 - _exp(-ratio)
    if divergence == "js":
        return jnp.log(2.0) + jax.nn.log_sigmoid(ratio)
    if divergence == "alpha" and alpha != 1.0:
        return (_exp((alpha - 1.0) * ratio) - 1.0) / (alpha - 1.0)
    return ratio  # the reverse KL, also the limit of alpha = 1


def _exp(x: Float[Array, " M"]) -> Float[Array, " M"]:
    return jnp.exp(jnp.minimum(x, MAX_EXPONENT))


def length_weights(n_tokens: np.ndarray, alpha: float) -> list[np.ndarray]:
    """float32 [n] of each completion: 1 for its first tokens, `alpha` beyond the pair's shorter.

    LD-DPO (https://arxiv.org/abs/2409.06411). `n_tokens` are those of the chosen
    completions, then of the rejected ones.
    """
    shared = np.tile(np.minimum(*np.split(n_tokens, 2)), 2)
    return [
        np.where(np.arange(n) < common, 1.0, alpha).astype(np.float32)
        for n, common in zip(n_tokens.tolist(), shared.tolist(), strict=True)
    ]
