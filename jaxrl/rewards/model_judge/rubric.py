"""Rubrics: the criteria by which a model judges a response, and its verdicts.

instructions: The assistant answers questions about cooking.    # optional
criteria:
  - name: correct
    description: The answer is correct and complete.
    weight: 2                                                   # default 1
    scale: [1, 5]                                               # default [0, 1]
"""

import dataclasses
import re
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import yaml

from jaxrl.json_text import Json, parse_json, shown

EXPLANATION = "explanation"  # the field of a verdict before the scores
PREFERENCES = {"A": 1.0, "B": 0.0, "tie": 0.5}  # share of the first response in a comparison
RESERVED = (  # fields of results and counts next to the scores
    EXPLANATION,
    *("score", "counts", "latency_s", "requests", "cached", "failures"),
    *("prompt_tokens", "completion_tokens", "cost"),
    *("pairs", "failed_pairs", "equal_pairs", "inconsistent", "preferred_first"),
    *("preferred_second", "ties"),
)
MAX_LEVELS = 101  # integers of a scale: the schema lists them
_NAME = re.compile(r"[A-Za-z_][A-Za-z0-9_]{0,63}")
_HINT = "docs/how_to/rewards.md has the form of a rubric"


@dataclasses.dataclass(frozen=True)
class Criterion:
    """One question that the judge answers with an integer of a scale."""

    name: str
    description: str
    weight: float
    low: int
    high: int

    @property
    def levels(self) -> list[int]:
        return list(range(self.low, self.high + 1))


@dataclasses.dataclass(frozen=True)
class Rubric:
    """The criteria of a judge, and what it should know about the task."""

    criteria: tuple[Criterion, ...]
    instructions: str = ""

    def schema(self, explain: bool) -> Json:
        """The JSON schema of a verdict: an explanation with `explain`, an integer per criterion."""
        scores: Json = {c.name: {"type": "integer", "enum": c.levels} for c in self.criteria}
        return _schema(scores, explain)

    def pair_schema(self, explain: bool) -> Json:
        """The JSON schema of a comparison: an explanation with `explain`, then the better one."""
        better: Json = {"type": "string", "enum": list(PREFERENCES)}
        return _schema({c.name: better for c in self.criteria}, explain)

    def read_verdict(self, text: str) -> dict[str, int]:
        """The score of each criterion.

        Raises ValueError unless the text is a JSON object with an integer within its scale for
        every criterion, and nothing else but the explanation.
        """
        value = self._read(text)
        for c in self.criteria:
            score = value[c.name]
            if type(score) is not int or not c.low <= score <= c.high:
                raise ValueError(f"{c.name} is {shown(score)}, no integer from {c.low} to {c.high}")
        return value

    def read_comparison(self, text: str) -> dict[str, float]:
        """How far the first response is better, by criterion: 1 better, 0 worse, 0.5 a tie.

        Raises ValueError unless the text is a JSON object with "A", "B" or "tie" for every
        criterion, and nothing else but the explanation.
        """
        value = self._read(text)
        for name, found in value.items():
            if not isinstance(found, str) or found not in PREFERENCES:
                raise ValueError(f"{name} is {shown(found)}, neither A, B nor tie")
        return {name: PREFERENCES[found] for name, found in value.items()}

    def _read(self, text: str) -> dict[str, Any]:
        """The fields of the criteria in a JSON object. Raises ValueError."""
        value = parse_json(text)
        if not isinstance(value, dict):
            raise ValueError(f"it is a JSON {type(value).__name__}, not an object")
        names = [c.name for c in self.criteria]
        if lacking := [name for name in names if name not in value]:
            raise ValueError(f"it has no score for {', '.join(lacking)}")
        if unknown := value.keys() - {EXPLANATION, *names}:
            raise ValueError(f"it has fields that are no criteria: {', '.join(sorted(unknown))}")
        return {name: value[name] for name in names}

    def score(self, verdict: Mapping[str, int]) -> float:
        """Σ w_i (s_i - low_i) / (high_i - low_i) / Σ w_i, from 0 to 1."""
        parts = [c.weight * (verdict[c.name] - c.low) / (c.high - c.low) for c in self.criteria]
        return sum(parts) / self._total

    def weighted(self, values: Mapping[str, float]) -> float:
        """Σ w_i v_i / Σ w_i of a value per criterion."""
        return sum(c.weight * values[c.name] for c in self.criteria) / self._total

    @property
    def _total(self) -> float:
        return sum(c.weight for c in self.criteria)


def read_rubric(path: str) -> Rubric:
    """The rubric in a YAML or JSON file. Raises ValueError with what is wrong in it."""
    try:
        value = yaml.safe_load(Path(path).read_text())
        return _rubric(value)
    except (OSError, UnicodeDecodeError, yaml.YAMLError, RecursionError) as error:
        raise ValueError(f"the rubric {path} cannot be read ({error}); {_HINT}") from error
    except ValueError as error:
        raise ValueError(f"the rubric {path}: {error}; {_HINT}") from error


def _schema(fields: Json, explain: bool) -> Json:
    """The JSON schema of an object with these fields, after an explanation with `explain`."""
    if explain:
        fields = {EXPLANATION: {"type": "string"}} | fields
    return {
        "type": "object",
        "properties": fields,
        "required": list(fields),
        "additionalProperties": False,
    }


def _rubric(value: Any) -> Rubric:
    _check_fields(value, "it", required=("criteria",), optional=("instructions",))
    instructions, criteria = value.get("instructions", ""), value["criteria"]
    if not isinstance(instructions, str):
        raise ValueError(f"instructions is {shown(instructions)}, no text")
    if not isinstance(criteria, list) or not criteria:
        raise ValueError(f"criteria is {shown(criteria)}, no list of criteria")
    found = tuple(_criterion(one) for one in criteria)
    names = [c.name for c in found]
    if doubled := sorted({name for name in names if names.count(name) > 1}):
        raise ValueError(f"several criteria have the name {', '.join(doubled)}")
    return Rubric(found, instructions.strip())


def _criterion(value: Any) -> Criterion:
    _check_fields(
        value, "a criterion", required=("name", "description"), optional=("weight", "scale")
    )
    name, description = value["name"], value["description"]
    if not isinstance(name, str) or not _NAME.fullmatch(name) or name in RESERVED:
        raise ValueError(
            f"a criterion has the name {shown(name)}; use letters, digits and _, but none of "
            f"{', '.join(RESERVED)}"
        )
    if not isinstance(description, str) or not description.strip():
        raise ValueError(f"the description of {name} is {shown(description)}, no text")
    weight, scale = value.get("weight", 1), value.get("scale", [0, 1])
    if type(weight) not in (int, float) or not 0 < weight < float("inf"):
        raise ValueError(f"the weight of {name} is {shown(weight)}, no number above 0")
    match scale:
        case [int(low), int(high)] if low < high < low + MAX_LEVELS and bool not in map(
            type, scale
        ):
            return Criterion(name, description.strip(), float(weight), low, high)
    raise ValueError(
        f"the scale of {name} is {shown(scale)}; set two integers such as [1, 5], the lowest and "
        f"the highest score, at most {MAX_LEVELS - 1} apart"
    )


def _check_fields(
    value: Any, what: str, *, required: tuple[str, ...], optional: tuple[str, ...]
) -> None:
    if not isinstance(value, dict):
        raise ValueError(f"{what} is {shown(value)}, no mapping")
    if lacking := [name for name in required if name not in value]:
        raise ValueError(f"{what} has no {' and no '.join(lacking)}")
    if unknown := [shown(name) for name in value if name not in (*required, *optional)]:
        raise ValueError(
            f"{what} has the unknown field {', '.join(unknown)}; known are "
            f"{', '.join((*required, *optional))}"
        )
