"""The translation of one run: settings read, keys set, and a note for all that is not carried over.

A translation reads a setting by `get` or `number` only where it uses it. Whatever it does not read
is named at the end, with the reason from the framework's own table or other_frameworks.tsv.
"""

import dataclasses
import re
from collections.abc import Callable, Iterable, Mapping
from typing import Any

from jaxrl.config.other_frameworks import NOT_NEEDED, NOT_YET, counterpart, plain
from jaxrl.migrate.settings import Settings
from jaxrl.migrate.shell_expansion import shown

# Kinds of notes, in the order of the report.
REFUSED = "error"
DECIDE = "needs a decision"
NONE = "no counterpart"
DIFFERS = "differs"
UNNEEDED = "not needed"
KINDS = (REFUSED, DECIDE, NONE, DIFFERS, UNNEEDED)

Reasons = tuple[tuple[str, str, str], ...]  # (pattern of whole names, kind, reason)


@dataclasses.dataclass(frozen=True)
class Note:
    kind: str
    setting: str  # "name=value", or a sentence's subject
    reason: str
    ours: tuple[str, ...] = ()  # keys that settle a refusal, if given


class Migration:
    """The settings of a run, and the config and notes that they lead to."""

    def __init__(
        self,
        settings: Settings,
        *,
        framework: str,
        defaults: Mapping[str, Any],
        program: str,
        optional: str,
    ):
        """`optional` matches names that change no number; only those may be unknown."""
        self.settings = settings
        self.framework = framework
        self.program = program  # the module of jaxrl that runs the config
        self.config: dict[str, Any] = {}
        self.notes: list[Note] = []
        self.n_devices: int | None = None  # of the run, in all processes
        self.n_processes = 1
        self._defaults = defaults
        self._optional = optional
        self._read: dict[str, None] = {}  # in order
        self._missed: set[str] = set()  # read, but not known

    def given(self, name: str) -> bool:
        """Whether the run sets this name, to a value that is known or not."""
        return name in self.settings.values or name in self.settings.unresolved

    def has(self, name: str) -> bool:
        """Whether the run sets this name to a value that is not null or empty, or not known."""
        return bool(self.settings.values.get(name)) or name in self.settings.unresolved

    def get(self, name: str, default: Any = None) -> Any:
        """The framework's value of a setting; marks it as carried over.

        The framework's default, else `default`, for what is not given or not known.
        """
        value = self.settings.values.get(name)
        if name in self.settings.values:
            self._read[name] = None
        elif name in self.settings.unresolved:
            self._missed.add(name)
        if value is None:
            value = self._defaults.get(name)
        return default if value is None else value

    def number(self, name: str, default: Any = None) -> Any:
        """As `get`, for a number: another value is refused, or needs a decision if it may be."""
        value = self.get(name, default)
        if value is default or (isinstance(value, int | float) and not isinstance(value, bool)):
            return value
        decides = not re.fullmatch(self._optional, name)
        self.note(REFUSED if decides else DECIDE, name, "a number is expected")
        return self._defaults.get(name, default)

    def first(self, *names: str) -> Any:
        """The value of the first of several names of one setting that is given; marks them all."""
        values = [self.get(name) for name in names]
        return next((value for value in values if value is not None), None)

    def apply(self, translation: Callable[["Migration"], None]) -> None:
        """Runs a translation. Raises ValueError for a value that it cannot work with."""
        try:
            translation(self)
        except (TypeError, ZeroDivisionError, OverflowError) as error:
            last = ", ".join(self._shown(name) for name in list(self._read)[-4:])
            raise ValueError(
                f"a setting has a value that cannot be used ({error}); the last settings read are "
                f"{last}"
            ) from error

    def carry(self, name: str, ours: str, convert: Callable[[Any], Any] = lambda v: v) -> None:
        """Sets a key here to the value of a setting, unless it is absent or null."""
        value = self.get(name)
        if value is not None:
            self.config[ours] = convert(value)

    def choose(self, name: str, choices: Mapping[str, str], ours: str) -> None:
        """Sets a key to the name here of a choice there; refuses a choice that is not here."""
        if name in self.settings.unresolved:
            return
        value = str(self.get(name))
        if value in choices:
            self.config[ours] = choices[value]
        else:
            known = ", ".join(sorted(set(choices.values())))
            self.refuse(name, f"jaxrl has {known}", ours)

    def note(self, kind: str, name: str, reason: str) -> None:
        self.notes.append(Note(kind, self._shown(name), reason))
        self._read[name] = None

    def refuse(self, name: str, reason: str, *ours: str) -> None:
        """No config can mean the same, unless one of the keys `ours` is given."""
        self.notes.append(Note(REFUSED, self._shown(name), reason, ours))
        self._read[name] = None

    def refuse_unless(self, name: str, neutral: Any, reason: str, *ours: str) -> None:
        """Refuses a setting that changes the numbers, unless its value has no effect."""
        if self.get(name, neutral) != neutral:
            self.refuse(name, f"{reason}; add ~{name} to leave it out", *ours)

    def require(self, name: str, ours: str, reasons: Mapping[str, str]) -> None:
        """Refuses a run whose setting `name` is not known."""
        if name in self.settings.unresolved:
            self.refuse(name, unresolved_reason(self.settings.unresolved[name], reasons), ours)
        elif not self.config.get(ours):
            what = "has no value" if self.given(name) else "is not given"
            self.refuse(name, f"{what}; add {name}=VALUE", ours)

    def finish(self, own_reasons: Reasons, reasons: Mapping[str, str]) -> None:
        """Adds a note for every setting that no translation has read."""
        for name in self.settings.deleted:
            if name not in self._read:
                self.notes.append(Note(DIFFERS, f"~{name}", "the default here is used"))
        for name, text in self.settings.unresolved.items():
            if name not in self._read:
                needed = name in self._missed and not re.fullmatch(self._optional, name)
                self.note(REFUSED if needed else DECIDE, name, unresolved_reason(text, reasons))
        for name, value in list(self.settings.values.items()):
            if name not in self._read:
                kind, reason = self._reason(name, value, own_reasons)
                self.note(kind, name, reason)
        for word in self.settings.words:
            self.notes.append(Note(DECIDE, shown(word), "not read as a setting"))

    def _reason(self, name: str, value: Any, own_reasons: Reasons) -> tuple[str, str]:
        off = value in (None, False, "", [], {})
        for pattern, kind, reason in own_reasons:
            if re.fullmatch(pattern, name):
                return (UNNEEDED, "off or empty") if off and kind != UNNEEDED else (kind, reason)
        if off:
            return UNNEEDED, "off or empty"
        section = "" if self.program == "jaxrl.train" else "SFT"
        if row := counterpart(self.framework, name, section):
            remark = plain(row.remark)
            if row.ours:
                differs = f"{' and '.join(row.ours)} here"
                return DIFFERS, differs + (f": {remark}" if remark else "")
            if remark.startswith(NOT_NEEDED):
                return UNNEEDED, remark.removeprefix(NOT_NEEDED).lstrip(": ") or "always so"
            return NONE, remark.removeprefix(NOT_YET).lstrip(": ") or "jaxrl does not have it yet"
        return NONE, "jaxrl has no key for it"

    def _shown(self, name: str) -> str:
        settings = self.settings
        if name in settings.unresolved:
            return f"{name}={shown(settings.unresolved[name])}"
        return f"{name}={settings.values[name]}" if name in settings.values else name


def unresolved_reason(text: str, reasons: Mapping[str, str]) -> str:
    """Why a text is not known, and how to give it."""
    from_variables, others = [], []
    for name in dict.fromkeys(re.findall("\ue000(.*?)\ue001", text, re.DOTALL)):
        reason = reasons.get(name, "")
        if re.fullmatch(r"[A-Za-z_]\w*", name):
            named = f"{name} {reason}" if reason.startswith("is ") else f"{name}: {reason}"
            from_variables.append(f"{named}; give --set {name}=VALUE")
        elif name.isdigit():
            others.append(f"${name} is {reason}; give the script's arguments after --")
        else:
            others.append(f"{name}: {reason or 'only a run can evaluate it'}; give KEY=VALUE")
    return "; ".join(from_variables + others)


def freeze_vision(found: Migration, name: str) -> None:
    """Trains the vision tower of a run with images, unless the setting `name` freezes it.

    It stays frozen, with a note, if the config cannot train it as it is.
    """
    config = found.config
    if not config.get("data.images") or found.get(name, False) is True:
        return
    if config.get("lora.rank"):
        reason = r"lora.target_modules has no names of it, such as 'visual\..*'"
    elif config.get("algorithm.advantage") == "gae":
        reason = "a separate critic has no tower; set critic.shared=True"
    else:
        config["model.freeze_vision"] = "none"
        return
    found.note(DIFFERS, name, f"the tower is frozen: {reason}, and model.freeze_vision='none'")


def listed(value: Any) -> tuple[str, ...]:
    """A text or a list of texts as a tuple."""
    if value is None:
        return ()
    return (
        (str(value),)
        if not isinstance(value, Iterable) or isinstance(value, str)
        else tuple(map(str, value))
    )
