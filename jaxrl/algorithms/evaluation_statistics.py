"""Evaluation statistics from sampled responses: pass@k and standard errors."""

import numpy as np
from jaxtyping import Float, Int


def pass_at_k(
    n_passed: Int[np.ndarray, "prompts"], *, n: int, k: int
) -> Float[np.ndarray, "prompts"]:
    """Probability that at least one of k responses passes, if c = `n_passed` of n samples passed:

        1 - C(n - c, k) / C(n, k) = 1 - prod_{i = n - c + 1}^{n} (1 - k / i)

    It is unbiased; 1 - (1 - c / n)^k is not. Chen et al. 2021, eq. 1
    (https://arxiv.org/abs/2107.03374). Raises ValueError unless 1 <= k <= n.
    """
    if not 1 <= k <= n:
        raise ValueError(
            f"pass@{k} cannot be estimated from {n} samples per prompt; sample at least {k}, and "
            "set k to 1 or more"
        )
    i = np.arange(1, n + 1)
    drawn = i > n - n_passed[:, None]  # [prompts, n]
    return 1.0 - np.prod(np.where(drawn, np.maximum(1.0 - k / i, 0.0), 1.0), axis=1)


def standard_error(prompt_means: Float[np.ndarray, "prompts"]) -> float:
    """Standard error of the mean over randomly drawn prompts with equally many responses each:

        sqrt( sum_p (m_p - mean)^2 / (P - 1) / P )

    Responses to one prompt are correlated, so the prompt is the unit: this is the clustered
    standard error with one cluster per prompt (Miller 2024, section 2.2,
    https://arxiv.org/abs/2411.00640, with P - 1 instead of P). NaN for a single prompt.
    """
    P = len(prompt_means)
    return float(np.std(prompt_means, ddof=1) / np.sqrt(P)) if P > 1 else float("nan")
