"""Settings of another framework by name, as a command line or a YAML file gives them."""

import dataclasses
import re
from collections.abc import Iterable, Mapping, Sequence
from typing import Any

import yaml

from jaxrl.config.schema import flatten
from jaxrl.migrate.shell_expansion import causes, mark

OVERRIDE = re.compile(
    r"(?P<kind>\+\+|\+|~)?(?P<name>[A-Za-z_][\w.@/-]*)(?:=(?P<value>.*))?", re.DOTALL
)
REFERENCE = re.compile(r"\$\{([^{}$]*)\}")
FLAG = re.compile(r"--?([A-Za-z][\w.-]*)(?:=(.*))?", re.DOTALL)


@dataclasses.dataclass
class Settings:
    """The settings that a run of another framework is given."""

    values: dict[str, Any] = dataclasses.field(default_factory=dict)
    unresolved: dict[str, str] = dataclasses.field(default_factory=dict)  # texts with marks
    deleted: list[str] = dataclasses.field(default_factory=list)  # Hydra's ~key
    words: list[str] = dataclasses.field(default_factory=list)  # what is not a setting

    def set(self, name: str, text: str) -> None:
        """Sets a name to the value of a text, which may have marks."""
        self.values.pop(name, None)
        self.unresolved.pop(name, None)
        if causes(text):
            self.unresolved[name] = text
        else:
            self.put(name, value(text))

    def put(self, name: str, content: Any) -> None:
        """Sets a name to a value; a mapping sets the names inside it."""
        if isinstance(content, Mapping) and content:
            for inner, one in flatten(content, f"{name}.").items():
                self.put(inner, one)
        else:
            self.unresolved.pop(name, None)
            self.values[name] = content

    def below(self, other: "Settings") -> "Settings":
        """These settings, overridden by `other`."""
        names = {*other.values, *other.unresolved, *other.deleted}
        return Settings(
            {k: v for k, v in self.values.items() if k not in names} | other.values,
            {k: v for k, v in self.unresolved.items() if k not in names} | other.unresolved,
            other.deleted,
            [*self.words, *other.words],
        )


def value(text: str) -> Any:
    """The value of a text: true, null, a number, a list or mapping, else the text itself."""
    if re.fullmatch(r"[\w./+-]*", text):  # no syntax of YAML
        return typed(text)
    try:
        found = typed(yaml.load(text, Loader=yaml.BaseLoader))
    except yaml.YAMLError:
        return text
    nested = isinstance(found, str) and found != text and found.startswith("[")
    return value(found) if nested else found


def typed(content: Any) -> Any:
    """Content of YAML whose scalars are texts, with numbers, booleans and null."""
    if isinstance(content, Mapping):
        return {str(name): typed(one) for name, one in content.items()}
    if isinstance(content, list):
        return [typed(one) for one in content]
    if not isinstance(content, str):
        return content
    constants = {"true": True, "false": False, "null": None, "": ""}
    if content.lower() in constants:
        return constants[content.lower()]
    for kind, pattern in (
        (int, r"[+-]?\d+"),
        (float, r"[+-]?(\d+\.?\d*|\.\d+)(e[+-]?\d+)?|[+-]?inf"),
    ):
        if re.fullmatch(pattern, content, re.IGNORECASE):
            return kind(content)
    return content


def hydra(words: Iterable[str]) -> Settings:
    """The settings in words of the forms key=value, +key=value, ++key=value and ~key."""
    found = Settings()
    for word in words:
        match = OVERRIDE.fullmatch(word)
        if match is None or (match["value"] is None and match["kind"] != "~"):
            found.words.append(word)
        elif match["kind"] == "~":
            found.deleted.append(match["name"])
            for known in (found.values, found.unresolved):
                for name in [n for n in known if f"{n}.".startswith(f"{match['name']}.")]:
                    del known[name]
        else:
            found.set(match["name"], match["value"])
    return found


def flags(words: Sequence[str]) -> Settings:
    """The settings in words of the forms --name=value, --name value and --name (True).

    A name followed by several values has a list of them.
    """
    found, at = Settings(), 0
    while at < len(words):
        match = FLAG.fullmatch(words[at])
        at += 1
        if match is None:
            found.words.append(words[at - 1])
            continue
        texts = [] if match[2] is None else [match[2]]
        while match[2] is None and at < len(words) and not re.match(r"--?[A-Za-z]", words[at]):
            texts.append(words[at])
            at += 1
        if len(texts) > 1 and not any(causes(text) for text in texts):
            found.put(match[1], [value(text) for text in texts])
        else:
            found.set(match[1], " ".join(texts) if texts else "true")
    return found


def yaml_file(text: str, environment: Mapping[str, str]) -> Settings:
    """The settings of a YAML file by dotted name, with OmegaConf's references replaced.

    Raises ValueError for a text that is not a mapping in YAML.
    """
    try:
        content = typed(yaml.load(text, Loader=yaml.BaseLoader))
    except yaml.YAMLError as error:
        raise ValueError(f"not YAML: {error}") from error
    if not isinstance(content, Mapping):
        raise ValueError("not a YAML mapping of settings")
    found = Settings()
    tree = {name: one for name, one in content.items() if name not in ("defaults", "hydra")}
    flat = flatten(tree)
    for name, one in flat.items():
        if isinstance(one, str) and "${" in one:
            found.set(name, _replaced(one, flat, environment))
        else:
            found.put(name, one)
    return found


def _replaced(text: str, flat: Mapping[str, Any], environment: Mapping[str, str]) -> str:
    """A text whose `${a.b}`, `${oc.env:X,default}` and `${oc.select:a.b,default}` are replaced."""

    def one(match: re.Match) -> str:
        name, _, default = match[1].partition(",")
        kind, _, key = name.partition(":")
        if kind == "oc.env" and key in environment:
            return environment[key]
        key = key if kind == "oc.select" else name
        if key in flat:
            return str(flat[key])
        return default if default else mark(f"${{{match[1]}}}")

    for _ in range(10):
        replaced = REFERENCE.sub(one, text)
        if replaced == text:
            break
        text = replaced
    return text
