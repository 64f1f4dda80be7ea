"""Adaptive loss coefficients, updated once per step from measured values. Plain host numbers."""


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
