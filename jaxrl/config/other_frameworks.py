"""The keys of verl, OpenRLHF, TRL, prime-rl and Tunix, and the key here for each.

The table is other_frameworks.tsv. A row has the framework (and its programs), their names, the keys
here and a remark. A row without keys here says why in its remark: "not needed" means that it always
happens or that there is nothing to choose, "not yet" that it is missing. `*` in a name stands for
any text; a name without it counts first, then the first pattern that matches.
docs/reference/keys.md is made from the table.
"""

import csv
import functools
import importlib.resources
import re
from collections.abc import Callable
from typing import NamedTuple

NOT_NEEDED, NOT_YET = "not needed", "not yet"
_FILE = "other_frameworks.tsv"
_OTHER = "other names"  # of no framework in particular
_SECTIONS = {  # sections of other frameworks' configs whose keys are not all in the table
    "actor_rollout_ref": "verl",
    "trainer": "verl",
    "ray_kwargs": "verl",
    "custom_reward_function": "verl",
}
_MAX_ANSWERS = 3


class Counterpart(NamedTuple):
    """Names of one framework that have the same answer."""

    framework: str  # for example "OpenRLHF, SFT, DPO and reward models"
    names: tuple[str, ...]  # as one writes them there; none for a key that only exists here
    ours: tuple[str, ...]
    remark: str  # Markdown


@functools.cache
def table() -> tuple[Counterpart, ...]:
    """All rows, in the order of the page."""
    text = importlib.resources.files(__package__).joinpath(_FILE).read_text(encoding="utf-8")
    lines = csv.reader(text.splitlines()[1:], delimiter="\t", quoting=csv.QUOTE_NONE)
    return tuple(
        Counterpart(framework, tuple(names.split()), tuple(ours.split()), remark)
        for framework, names, ours, remark in lines
    )


def answer(name: str) -> str:
    """A sentence that names the key here for one of another framework; "" if no framework has it.

    A dotted name may lack its first sections: "rollout.mode" is verl's
    "actor_rollout_ref.rollout.mode".
    """
    name = name.lstrip("-+")
    found = _rows(lambda theirs: theirs == name or theirs == name.replace("-", "_"))
    if not found and "." in name:
        found = _rows(lambda theirs: theirs.endswith("." + name))
    if not found:
        frameworks = dict.fromkeys(family(row) for row in table())
        rows = [counterpart(framework, name) for framework in frameworks]
        found = [_sentence(row, name) for row in rows if row]
    if found:
        return "; ".join(found[:_MAX_ANSWERS])
    section = name.partition(".")[0]
    if section in _SECTIONS:
        return (
            f"{_SECTIONS[section]}'s {section} has other names here; docs/reference/keys.md lists "
            "them"
        )
    return ""


def family(row: Counterpart) -> str:
    """The framework of a row, without its programs: "OpenRLHF"."""
    return row.framework.partition(",")[0]


def counterpart(framework: str, name: str, program: str = "") -> Counterpart | None:
    """The row for a whole name of a framework; rows of `program` count before the others."""
    exact, patterns = _names(framework, program)
    if name in exact:
        return exact[name]
    return next((row for pattern, row in patterns if pattern.fullmatch(name)), None)


@functools.cache
def _names(
    framework: str, program: str
) -> tuple[dict[str, Counterpart], list[tuple[re.Pattern[str], Counterpart]]]:
    """Rows of a framework by name, and by pattern in the order of the table."""
    rows = [row for row in table() if family(row) == framework]
    rows.sort(key=lambda row: bool(program) and program not in row.framework.partition(",")[2])
    named = [(theirs.lstrip("-"), row) for row in rows for theirs in row.names]
    exact = {theirs: row for theirs, row in reversed(named) if "*" not in theirs}
    patterns = [(theirs, row) for theirs, row in named if "*" in theirs]
    return exact, [(re.compile(".*".join(map(re.escape, t.split("*")))), r) for t, r in patterns]


def answer_by_last_part(name: str) -> str:
    """As `answer`, for the last part of a dotted name: "ppo_mini_batch_size"."""
    if exact := answer(name):
        return exact
    if "_" not in name:
        return ""
    return "; ".join(_rows(lambda theirs: theirs.endswith("." + name))[:_MAX_ANSWERS])


def _rows(matches: Callable[[str], bool]) -> list[str]:
    """The sentences of the rows with a matching name; rows with the same answer count once."""
    found: dict[tuple[tuple[str, ...], str], str] = {}
    for row in table():
        for theirs in row.names:
            if matches(theirs.lstrip("-")):
                found.setdefault((row.ours, row.remark), _sentence(row, theirs))
    return list(found.values())


def _sentence(row: Counterpart, theirs: str) -> str:
    owner = "" if row.framework == _OTHER else f"{family(row)}'s "
    named, remark = owner + theirs, plain(row.remark)
    if row.ours:
        return f"{named} is {' and '.join(row.ours)} here" + (f" ({remark})" if remark else "")
    reason = remark.removeprefix(NOT_NEEDED).removeprefix(NOT_YET)
    what = "is not needed here" if remark.startswith(NOT_NEEDED) else "does not exist here yet"
    return f"{named} {what}{reason}"


def plain(markdown: str) -> str:
    """Text without code marks and link targets."""
    return re.sub(r"\[([^]]*)\]\([^)]*\)", r"\1", markdown).replace("`", "")
