"""The rejections of a run: algorithm.rejection, and those of algorithm.more_rejections."""

import dataclasses
from collections.abc import Iterator

from jaxrl.config.choices import RATIO_REJECTIONS, REJECTIONS
from jaxrl.config.keys import AlgorithmConfig
from jaxrl.config.plugins import options, read_options
from jaxrl.config.schema import did_you_mean, key


@dataclasses.dataclass(frozen=True)
class RejectionBounds:
    low: float = key(0.99, "Rejections by k1: minimum ratio", ge=0)
    high: float = key(1.01, "Rejections by k1: maximum ratio", gt=0)
    max: float = key(0.01, "Rejections by k2 or k3: maximum value", gt=0)


def rejections(algorithm: AlgorithmConfig) -> Iterator[tuple[str, AlgorithmConfig]]:
    """(name or import path, the settings with its bounds) of each rejection.

    A token that one of them masks is rejected. Raises ValueError for unknown names or options.
    """
    yield algorithm.rejection, algorithm
    for spec in algorithm.more_rejections:
        bounds, errors = read_rejection(spec)
        if errors:
            raise ValueError("; ".join(errors))
        yield (
            spec.partition("?")[0],
            dataclasses.replace(
                algorithm,
                rejection_low=bounds.low,
                rejection_high=bounds.high,
                rejection_max=bounds.max,
            ),
        )


def read_rejection(spec: str) -> tuple[RejectionBounds, list[str]]:
    """(bounds of "NAME?OPTION=VALUE&...", one line per unknown name or invalid option).

    Every bound that the rejection has must be given.
    """
    name, given = spec.partition("?")[0], options(spec)
    bounds, errors = read_options(RejectionBounds, spec)
    known = [value for value in REJECTIONS if value != "none"]
    if name not in known:
        hint = did_you_mean(name, known)
        return bounds, [f"{spec!r} is not known; {hint}set one of {', '.join(known)}"]
    needed = ("low", "high") if name in RATIO_REJECTIONS else ("max",)
    if not errors and set(given) != set(needed):
        example = "&".join(f"{option}=..." for option in needed)
        errors = [f"{spec!r} has other bounds than {name}; write '{name}?{example}'"]
    if not errors and name in RATIO_REJECTIONS and not bounds.low < bounds.high:
        errors = [f"{spec!r} rejects everything: low is not below high; set bounds around 1"]
    return bounds, errors
