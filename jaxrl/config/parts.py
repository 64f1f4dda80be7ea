"""Further parts of the objective: algorithm.parts, as in "observations?weight=0.1"."""

import dataclasses
import functools

from jaxrl.config.choices import PART_AGGREGATIONS, PART_TOKENS
from jaxrl.config.plugins import read_options
from jaxrl.config.schema import did_you_mean, key


@dataclasses.dataclass(frozen=True)
class PartSettings:
    weight: float = key(1.0, "Weight of the part in the loss; the policy's terms have 1", ge=0)
    aggregation: str = key(
        "token_mean",
        "Reduction of its token losses to one number, with its own denominator",
        choices=PART_AGGREGATIONS,
    )
    source: str = key(
        "", "Only the tokens of rows with this data_source; '' = of all that no other entry names"
    )
    final_weight: float = key(0.0, "The weight moves linearly to this one over `ramp` steps", ge=0)
    ramp: int = key(0, "Steps over which the weight moves to final_weight; 0 = constant", ge=0)


@dataclasses.dataclass(frozen=True)
class Part:
    """Cross-entropy on tokens that the policy did not sample."""

    tokens: str  # one of PART_TOKENS
    options: PartSettings = PartSettings()

    @property
    def name(self) -> str:
        """The name in metrics, without the package."""
        source = self.options.source
        return f"{self.tokens}/{source}" if source else self.tokens

    def weight(self, step: int) -> float:
        """The weight in a step, counted from 0."""
        first, last, ramp = self.options.weight, self.options.final_weight, self.options.ramp
        return first + (last - first) * min(step / ramp, 1.0) if ramp else first


@functools.cache
def parse_parts(specs: tuple[str, ...]) -> tuple[Part, ...]:
    """The parts of "TOKENS?weight=W&...". Raises ValueError for unknown names or options."""
    found = [read_part(spec) for spec in specs]
    if errors := [line for _, lines in found for line in lines]:
        raise ValueError("; ".join(errors))
    return tuple(part for part, _ in found)


def read_part(spec: str) -> tuple[Part, list[str]]:
    """(Part, one line per unknown or invalid name or option)."""
    name = spec.partition("?")[0]
    options, errors = read_options(PartSettings, spec)
    if name not in PART_TOKENS:
        hint = did_you_mean(name, PART_TOKENS)
        errors = [f"{spec!r} is not known; {hint}set one of {', '.join(PART_TOKENS)}"]
    elif not options.ramp and options.final_weight:
        errors.append(
            f"{spec!r}: final_weight has no effect without ramp, the number of steps; set both"
        )
    elif not (options.weight or options.final_weight):
        errors.append(f"{spec!r} has no weight in any step; set weight above 0, or leave it out")
    return Part(name, options), errors


def part_of(parts: tuple[Part, ...], tokens: str, source: str) -> int | None:
    """Index of the part for these tokens of a row of `source`; None if no part has them."""
    entries = {p.options.source: i for i, p in enumerate(parts) if p.tokens == tokens}
    return entries.get(source, entries.get(""))
