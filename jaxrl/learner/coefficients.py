"""KL and entropy coefficients that adapt to their targets between steps; saved in checkpoints."""

import dataclasses
from collections.abc import Mapping

from jaxrl.config.keys import RunConfig
from jaxrl.learner.policy_objective import Coefs


@dataclasses.dataclass(frozen=True)
class Coefficients:
    """The coefficients of the next step."""

    kl: float
    entropy: float
    entropy_is_low: bool = True  # the bonus is off while the entropy is above its target

    def loss_coefs(self) -> Coefs:
        """The coefficients as inputs of the compiled loss."""
        return Coefs(kl=self.kl, entropy=self.entropy if self.entropy_is_low else 0.0)


def initial_coefficients(cfg: RunConfig) -> Coefficients:
    """The coefficients of the first step, from the config."""
    return Coefficients(cfg.algorithm.kl_coef, cfg.algorithm.entropy_coef)


def adapt_coefficients(
    now: Coefficients, metrics: Mapping[str, float], cfg: RunConfig, *, n_samples: int
) -> Coefficients:
    """The coefficients of the next step, from the KL and entropy measured in this step.

    A step without an update has no measurements and changes nothing.
    """
    algo = cfg.algorithm
    kl = metrics.get("reward/kl" if algo.kl_in == "reward" else "loss/kl")
    entropy = metrics.get("loss/entropy")
    if algo.kl_target and kl is not None:
        coef = adaptive_kl_coef(
            now.kl, kl, target=algo.kl_target, horizon=algo.kl_horizon, n_samples=n_samples
        )
        now = dataclasses.replace(now, kl=coef)
    if algo.entropy_target and entropy is not None:
        coef = adaptive_entropy_coef(
            now.entropy, entropy, target=algo.entropy_target, delta=algo.entropy_delta
        )
        low = entropy <= algo.entropy_target
        now = dataclasses.replace(now, entropy=coef, entropy_is_low=low)
    return now


def coefficient_metrics(now: Coefficients, cfg: RunConfig) -> dict[str, float]:
    """loss/kl_coef and loss/entropy_coef of the step, if the config adapts them."""
    coefs, algo = now.loss_coefs(), cfg.algorithm
    kl = {"loss/kl_coef": float(coefs.kl)} if algo.kl_target else {}
    return kl | ({"loss/entropy_coef": float(coefs.entropy)} if algo.entropy_target else {})


def adaptive_kl_coef(
    coef: float, kl: float, *, target: float, horizon: float, n_samples: int
) -> float:
    """coef (1 + clip(kl / target - 1, -0.2, 0.2) n_samples / horizon).

    Fine-tuning from human preferences, section 2.2 (https://arxiv.org/abs/1909.08593), with the
    gain per sample that verl and OpenRLHF use. `kl` and `target` are per token, `horizon` is in
    samples.
    """
    error = min(max(kl / target - 1.0, -0.2), 0.2)
    return coef * (1.0 + error * n_samples / horizon)


def adaptive_entropy_coef(coef: float, entropy: float, *, target: float, delta: float) -> float:
    """coef + delta if the entropy is below its target, coef - delta otherwise; never below 0.

    Skywork-OR1, adaptive entropy control (https://arxiv.org/abs/2505.22312), which also disables
    the bonus while the entropy is above the target.
    """
    return max(coef + delta if entropy < target else coef - delta, 0.0)
