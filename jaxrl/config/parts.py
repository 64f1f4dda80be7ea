"""Parts of the objective: algorithm.parts, as in "observations?weight=0.1", by data source too."""

import dataclasses
import functools

from jaxrl.config.choices import (
    GIVEN_PARTS,
    KL_PARTS,
    OBSERVATION_ROLES,
    PART_AGGREGATIONS,
    PART_KINDS,
    RESPONSE_PARTS,
)
from jaxrl.config.keys import AlgorithmConfig
from jaxrl.config.plugins import read_options
from jaxrl.config.schema import did_you_mean, key


@dataclasses.dataclass(frozen=True)
class PartSettings:
    weight: float = key(1.0, "Weight of the part in the loss", ge=0)
    aggregation: str = key(
        "",
        "Reduction of its token losses to one number, with its own denominator; '' = token_mean, "
        "for parts of the responses algorithm.aggregation",
        choices=("", *PART_AGGREGATIONS),
    )
    source: str = key(
        "", "Only the tokens of rows with this data_source; '' = of all that no other entry names"
    )
    role: str = key(
        "",
        "Observations: only those whose messages all have this role; '' = all that no other entry "
        "names",
        choices=("", *OBSERVATION_ROLES),
    )
    final_weight: float = key(0.0, "The weight moves linearly to this one over `ramp` steps", ge=0)
    ramp: int = key(0, "Steps over which the weight moves to final_weight; 0 = constant", ge=0)


@dataclasses.dataclass(frozen=True)
class Part:
    """One term of the loss, over its tokens."""

    kind: str  # one of PART_KINDS
    options: PartSettings = PartSettings()

    @property
    def name(self) -> str:
        """The name in metrics, without the package."""
        source, role = self.options.source, self.options.role
        masks = [source, f"role_{role}" if role else ""]
        return "/".join([self.kind, *filter(None, masks)])

    @property
    def of_responses(self) -> bool:
        """Whether its tokens are those that the policy sampled."""
        return self.kind in RESPONSE_PARTS

    def aggregation(self, cfg: AlgorithmConfig) -> str:
        """The reduction of its token losses."""
        default = cfg.aggregation if self.of_responses else "token_mean"
        return self.options.aggregation or default

    def weight(self, step: int) -> float:
        """The weight in a step, counted from 0."""
        first, last, ramp = self.options.weight, self.options.final_weight, self.options.ramp
        return first + (last - first) * min(step / ramp, 1.0) if ramp else first


# Terms of the loss that have their weight from a part, or from these keys.
WEIGHT_KEYS = {
    "kl": ("algorithm.kl_coef", "algorithm.kl_target"),
    "distillation": ("algorithm.kl_coef", "algorithm.kl_target"),
    "entropy": ("algorithm.entropy_coef", "algorithm.entropy_target"),
    "router": ("learner.router_aux_coef",),
}


@dataclasses.dataclass(frozen=True)
class SourceSettings:
    parts: str = key("", "Names of entries of algorithm.parts, joined by commas")


@functools.cache
def parse_parts(specs: tuple[str, ...]) -> tuple[Part, ...]:
    """The parts of "KIND?weight=W&...". Raises ValueError for unknown names or options."""
    found = [read_part(spec) for spec in specs]
    if errors := [line for _, lines in found for line in lines]:
        raise ValueError("; ".join(errors))
    return tuple(part for part, _ in found)


def read_part(spec: str) -> tuple[Part, list[str]]:
    """(Part, one line per unknown or invalid name or option)."""
    name = spec.partition("?")[0]
    options, errors = read_options(PartSettings, spec)
    if name not in PART_KINDS:
        hint = did_you_mean(name, PART_KINDS)
        errors = [f"{spec!r} is not known; {hint}set one of {', '.join(PART_KINDS)}"]
    elif not options.ramp and options.final_weight:
        errors.append(
            f"{spec!r}: final_weight has no effect without ramp, the number of steps; set both"
        )
    elif not (options.weight or options.final_weight or name == "policy"):
        errors.append(f"{spec!r} has no weight in any step; set weight above 0, or leave it out")
    elif options.role and name != "observations":
        errors.append(
            f"{spec!r}: only observations have messages of several roles; leave out "
            f"role={options.role}"
        )
    elif name == "router" and (options.source or options.aggregation):
        errors.append(
            f"{spec!r}: the load of the experts is that of all tokens of an update, and has its "
            "own mean; leave out source and aggregation"
        )
    return Part(name, options), errors


@functools.cache
def parse_source_parts(specs: tuple[str, ...]) -> dict[str, tuple[str, ...]]:
    """data_source -> the kinds of "SOURCE?parts=KIND,KIND". Raises ValueError for wrong options."""
    found = [read_source_parts(spec) for spec in specs]
    if errors := [line for *_, lines in found for line in lines]:
        raise ValueError("; ".join(errors))
    return {source: kinds for source, kinds, _ in found}


def read_source_parts(spec: str) -> tuple[str, tuple[str, ...], list[str]]:
    """(data_source, kinds of its parts, one line per wrong option)."""
    options, errors = read_options(SourceSettings, spec)
    source = spec.partition("?")[0]
    kinds = tuple(kind.strip() for kind in options.parts.split(",") if kind.strip())
    if not errors and not (source and kinds):
        errors.append(f"{spec!r} has no source or no parts; write it as 'SOURCE?parts=policy,kl'")
    return source, kinds, errors


def part_of(cfg: AlgorithmConfig, kind: str, source: str, role: str = "") -> int | None:
    """Index of the part of this kind for a row of `source`; None if no part has its tokens.

    `role` is that of an observation; "" if its messages have several. An entry with the source goes
    before one with the role.
    """
    kinds = parse_source_parts(cfg.source_parts).get(source)
    if kinds is not None and kind not in kinds:
        return None
    entries = {
        (part.options.source, part.options.role): i
        for i, part in enumerate(parse_parts(cfg.parts))
        if part.kind == kind
    }
    masks = (source, role), (source, ""), ("", role), ("", "")
    return next((entries[mask] for mask in masks if mask in entries), None)


def names_roles(cfg: AlgorithmConfig) -> bool:
    """Whether a part has only observations of one role."""
    return any(part.options.role for part in parse_parts(cfg.parts))


def names_kl(cfg: AlgorithmConfig) -> bool:
    """Whether the KL or divergence to the reference is one of the named parts."""
    return bool(cfg.part_kinds & {*KL_PARTS})


def names_given(cfg: AlgorithmConfig) -> bool:
    """Whether a part is a cross-entropy on tokens that the policy did not sample."""
    return bool(cfg.part_kinds & {*GIVEN_PARTS})
