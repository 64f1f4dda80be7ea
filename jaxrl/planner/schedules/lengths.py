"""Response lengths for simulated schedules: measured ones from a file, or a lognormal."""

import math
import statistics
from pathlib import Path

import numpy as np

from jaxrl.config.keys import RunConfig
from jaxrl.config.plugins import options

N_STEPS = 8  # of groups, which repeat afterwards
OPTIONS = {"mean": 0.0, "limit": 0.0, "sigma": 1.0, "between": 0.5}


def simulated_lengths(spec: str, cfg: RunConfig) -> np.ndarray:
    """`response_lengths` of the groups of a simulated run, the same for the same arguments."""
    n_groups = N_STEPS * cfg.data.prompts_per_step
    return response_lengths(spec, n_groups, cfg.rollout.n, cfg.data.max_response_len)


def response_lengths(spec: str, n_groups: int, n: int, limit: int, seed: int = 0) -> np.ndarray:
    """int [n_groups, n] lengths of the responses of each prompt, in tokens.

    `spec` is a text file, or "lognormal?mean=14000&sigma=1" with these options: `mean` of the
    lengths after the limit, `limit` (default: the argument), `sigma` of their logarithm, and
    `between`, the share of its variance that is between prompts, not between the samples of one.
    A line of the file has the lengths of one prompt's responses, or one length per line; groups are
    drawn from it. Raises ValueError or OSError for an invalid file or option.
    """
    rng = np.random.default_rng(seed)
    if spec.partition("?")[0] == "lognormal":
        return _lognormal(spec, n_groups, n, limit, rng)
    groups = _read(Path(spec), limit)
    if all(len(group) == 1 for group in groups):
        return rng.choice(np.concatenate(groups), (n_groups, n))
    chosen = rng.integers(0, len(groups), n_groups)
    return np.stack([rng.choice(groups[i], n, replace=n != len(groups[i])) for i in chosen])


def _read(path: Path, limit: int) -> list[np.ndarray]:
    groups = []
    for number, line in enumerate(path.read_text().splitlines(), 1):
        try:
            lengths = np.array([int(word) for word in line.replace(",", " ").split()])
        except ValueError as error:
            raise ValueError(
                f"{path}, line {number}: {line.strip()[:40]!r} is not a list of token counts; "
                "write the response lengths of one prompt per line"
            ) from error
        if lengths.size and not 1 <= lengths.min() <= lengths.max() <= limit:
            raise ValueError(
                f"{path}, line {number}: lengths from {lengths.min()} to {lengths.max()}, but "
                f"responses have 1 to {limit} tokens; set data.max_response_len"
            )
        groups += [lengths] if lengths.size else []
    if not groups:
        raise ValueError(f"{path} has no response lengths; write those of one prompt per line")
    return groups


def _lognormal(
    spec: str, n_groups: int, n: int, limit: int, rng: np.random.Generator
) -> np.ndarray:
    given = options(spec)
    if unknown := given.keys() - OPTIONS.keys():
        raise ValueError(
            f"unknown option {sorted(unknown)[0]} of {spec!r}; known: {', '.join(OPTIONS)}"
        )
    values = OPTIONS | {"limit": limit} | given
    mean, most, sigma, between = (float(values[name]) for name in OPTIONS)
    if not (0 < mean < most and sigma > 0 and 0 <= between <= 1):
        raise ValueError(
            f"{spec!r} has mean={mean:g}, limit={most:g}, sigma={sigma:g}, between={between:g}; "
            "set 0 < mean < limit, sigma > 0 and 0 <= between <= 1"
        )
    of_prompt, of_sample = rng.standard_normal((n_groups, 1)), rng.standard_normal((n_groups, n))
    noise = math.sqrt(between) * of_prompt + math.sqrt(1 - between) * of_sample
    lengths = np.exp(_log_median(mean, most, sigma) + sigma * noise)
    return np.clip(np.round(lengths), 1, most).astype(int)


def _log_median(mean: float, limit: float, sigma: float) -> float:
    """Logarithm of the median for which min(length, limit) has the given mean."""
    low, high = math.log(mean) - 10 * sigma, math.log(limit) + 10 * sigma
    for _ in range(100):
        middle = (low + high) / 2
        low, high = (middle, high) if _mean(middle, limit, sigma) < mean else (low, middle)
    return low


def _mean(log_median: float, limit: float, sigma: float) -> float:
    """E[min(X, limit)] of a lognormal X."""
    z = (math.log(limit) - log_median) / sigma
    below = statistics.NormalDist().cdf(z - sigma) * math.exp(log_median + sigma**2 / 2)
    return below + limit * (1 - statistics.NormalDist().cdf(z))
