"""Typed keys: frozen dataclasses whose fields carry a help text and a range.

A key is a value of its type, or a mapping with names that the user chooses (`Mapping[str, Value]`).
`key()` declares a field, `keys()` lists the dotted keys of a schema, `build()` turns a nested
mapping (a ConfigDict, parsed JSON) into the dataclass and reports all errors at once.
"""

import dataclasses
import difflib
import functools
import typing
from collections.abc import Iterable, Mapping
from typing import Any

from jaxrl.config import other_frameworks

Value = bool | int | float | str | None  # a value in a mapping


@dataclasses.dataclass(frozen=True)
class Key:
    """One leaf of a schema."""

    name: str  # dotted: "rollout.sampling.top_k"
    type: Any  # bool, int, float, str, a tuple of one of these, or Mapping[str, Value]
    default: Any
    doc: str
    ge: int | float | None = None
    gt: int | float | None = None
    le: int | float | None = None
    choices: tuple[str, ...] = ()
    or_path: bool = False  # also "file.py:NAME" or "package.module:NAME", with options after "?"

    @property
    def is_mapping(self) -> bool:
        return typing.get_origin(self.type) is Mapping

    @property
    def type_name(self) -> str:
        if self.is_mapping:
            return "mapping"
        element = _element(self.type)
        return self.type.__name__ if element is None else f"tuple of {element.__name__}"

    @property
    def range(self) -> str:
        """The allowed values as text; "" if every value of the type is allowed."""
        if self.choices:
            return " | ".join((*self.choices, *(("file.py:NAME",) if self.or_path else ())))
        bounds = [(">=", self.ge), (">", self.gt), ("<=", self.le)]
        return ", ".join(f"{sign} {bound:g}" for sign, bound in bounds if bound is not None)


def key(
    default: Any,
    doc: str,
    *,
    ge: int | float | None = None,
    gt: int | float | None = None,
    le: int | float | None = None,
    choices: tuple[str, ...] = (),
    or_path: bool = False,
) -> Any:
    """A field: its default, its help text with unit, and the values it may take."""
    metadata = {"doc": doc, "ge": ge, "gt": gt, "le": le, "choices": choices, "or_path": or_path}
    if isinstance(default, dict):
        return dataclasses.field(default_factory=default.copy, hash=False, metadata=metadata)
    return dataclasses.field(default=default, metadata=metadata)


@functools.cache
def keys(schema: type) -> Mapping[str, Key]:
    """Dotted name -> Key for every leaf, in the order of the schema.

    Defaults of a nested schema come from the default of its field, so two fields of one type may
    have different ones.
    """
    return _keys(schema(), "")


def _keys(instance: Any, prefix: str) -> dict[str, Key]:
    found = {}
    for field in dataclasses.fields(instance):
        value, name = getattr(instance, field.name), prefix + field.name
        if dataclasses.is_dataclass(value):
            found |= _keys(value, name + ".")
        else:
            found[name] = Key(name, field.type, value, **field.metadata)
    return found


def find_key(name: str, known: Mapping[str, Key]) -> Key | None:
    """The key with this dotted name, or the mapping that contains it; None if there is none."""
    section = known.get(name.rpartition(".")[0])
    return known.get(name) or (section if section is not None and section.is_mapping else None)


def nearest(name: str, known: Iterable[str]) -> str:
    """The known name closest to `name`, or "" if none is close.

    A longer name comes first, then a similar one. If the dotted name has no match, its last part is
    compared alone: the section may be wrong.
    """
    known, leaf = list(known), _leaf(name)
    longer = [other for other in known if len(leaf) > 2 and _leaf(other).startswith(leaf)]
    if longer:
        return difflib.get_close_matches(name, longer, n=1, cutoff=0.0)[0]
    if close := difflib.get_close_matches(name, known, n=1, cutoff=0.75):
        return close[0]
    close = difflib.get_close_matches(leaf, map(_leaf, known), n=1, cutoff=0.75)
    return next((other for other in known if close and _leaf(other) == close[0]), "")


def did_you_mean(name: str, known: Iterable[str]) -> str:
    """The start of a remedy: a question with the known name closest to `name`, or ""."""
    guess = nearest(name, known)
    return f"did you mean {guess!r}? " if guess else ""


def is_import_path(spec: str) -> bool:
    """Whether a name is of the user's code: "file.py:NAME" or "package.module:NAME"."""
    return ":" in spec.partition("?")[0]


def unknown_key(name: str, known: Iterable[str]) -> str:
    """The error message for a key that does not exist: what another framework's key of this name
    is here, else the closest known keys."""
    return f"there is no key {name}; {key_hint(name, known)}"


def key_hint(name: str, known: Iterable[str], prefix: str = "") -> str:
    """The key to set instead of one that does not exist. Known keys are shown with the prefix."""
    known = list(known)
    if there := other_frameworks.answer(name):
        return there
    leaf = _leaf(name)
    same = [other for other in known if _leaf(other) == leaf]
    if not same and (there := other_frameworks.answer_by_last_part(leaf)):
        return there
    meant = same or [other for other in (nearest(name, known),) if other]
    shown = " or ".join(prefix + other for other in meant)
    return f"did you mean {shown}?" if meant else "--config.help lists the keys"


def _leaf(name: str) -> str:
    return name.rsplit(".", 1)[-1]


def convert(value: Any, spec: Key) -> Any:
    """`value` in the type of the key. Accepts an int as a float and a list as a tuple.

    Raises ValueError with the key, the value and the expected type for anything else, and for an
    int that is too large for a float.
    """
    if spec.is_mapping and isinstance(value, Mapping) and all(_is_value(v) for v in value.values()):
        return dict(value)
    element = _element(spec.type)
    if element and isinstance(value, list | tuple) and all(_is(element, v) for v in value):
        return tuple(element(v) for v in value)
    if not element and not spec.is_mapping and _is(spec.type, value):
        try:
            return spec.type(value)
        except OverflowError:
            raise ValueError(f"{spec.name}={value!r} is too large for a float") from None
    raise ValueError(
        f"{spec.name}={value!r} is of type {type(value).__name__}; set {type_text(spec, value)}"
    )


def type_text(spec: Key, value: Any = None) -> str:
    """The type of a key with an example: the `value` that is to be in a tuple."""
    element, article = _element(spec.type), "an" if spec.type_name == "int" else "a"
    hint = " such as ('a', 'b')" if element is str else ""
    hint = f" such as ({value!r},)" if element and _is(element, value) else hint
    hint = " of names to numbers, texts, True, False or None" if spec.is_mapping else hint
    return f"{article} {spec.type_name}{hint}"


def out_of_range(value: Any, spec: Key) -> list[str]:
    """One line per value of the key outside its range or choices."""
    errors = []
    for one in value if isinstance(value, tuple) else (value,):
        named = one in spec.choices or (spec.or_path and is_import_path(one))
        if spec.choices and not named:
            hint = did_you_mean(one, spec.choices)
            known = ", ".join(spec.choices) + (", or 'file.py:NAME'" if spec.or_path else "")
            errors.append(f"{spec.name}={one!r} is not known; {hint}set one of {known}")
        low = (spec.ge is not None and not one >= spec.ge) or (
            spec.gt is not None and not one > spec.gt
        )
        if low or (spec.le is not None and not one <= spec.le):
            errors.append(f"{spec.name}={one!r} is out of range; set a value {spec.range}")
    return errors


def build(schema: type, values: Mapping[str, Any]) -> tuple[Any, list[str]]:
    """The dataclass with `values`, and a list of errors.

    There is one error per unknown key, missing key, wrong type and value out of range. Invalid
    values are replaced by their defaults; the caller raises if there are errors.
    """
    known = keys(schema)
    flat = flatten(values)
    errors = [unknown_key(name, known) for name in flat if find_key(name, known) is None]
    flat |= {name: _inside(flat, name) for name, spec in known.items() if spec.is_mapping}
    used = {}
    for name, spec in known.items():
        if name not in flat:
            errors.append(f"the key {name} is missing; build the config from default_config()")
            continue
        try:
            used[name] = convert(flat[name], spec)
        except ValueError as wrong_type:
            errors.append(str(wrong_type))
        else:
            errors += out_of_range(used[name], spec)
    return _fill(schema(), used, ""), errors


def flatten(values: Mapping[str, Any], prefix: str = "") -> dict[str, Any]:
    """Dotted name -> leaf for a nested mapping."""
    flat = {}
    for name, value in values.items():
        path = f"{prefix}{name}"
        flat |= flatten(value, path + ".") if isinstance(value, Mapping) else {path: value}
    return flat


def _inside(flat: Mapping[str, Any], name: str) -> Any:
    """The mapping `name` of a flattened config: empty mappings have no leaf."""
    inside = {n.removeprefix(f"{name}."): v for n, v in flat.items() if n.startswith(f"{name}.")}
    return flat.get(name, inside)


def to_dict(config: Any) -> dict[str, Any]:
    """A config dataclass as a nested dict; tuples stay tuples."""
    return {
        f.name: to_dict(value) if dataclasses.is_dataclass(value) else value
        for f in dataclasses.fields(config)
        for value in (getattr(config, f.name),)
    }


def changed_keys(section: str, values: Any, defaults: Any) -> list[str]:
    """The keys of a section that differ from their defaults."""
    found, default = flatten(to_dict(values)), flatten(to_dict(defaults))
    return [f"{section}.{name}={v!r}" for name, v in found.items() if v != default[name]]


def _fill(instance: Any, flat: Mapping[str, Any], prefix: str) -> Any:
    """`instance` with the leaves named in `flat` replaced."""
    new = {}
    for field in dataclasses.fields(instance):
        value, name = getattr(instance, field.name), prefix + field.name
        if dataclasses.is_dataclass(value):
            new[field.name] = _fill(value, flat, name + ".")
        elif name in flat:
            new[field.name] = flat[name]
    return dataclasses.replace(instance, **new)


def _element(kind: Any) -> type | None:
    """The element type of a tuple type; None for a plain type."""
    return typing.get_args(kind)[0] if typing.get_origin(kind) is tuple else None


def _is_value(value: Any) -> bool:
    return value is None or isinstance(value, bool | int | float | str)


def _is(kind: type, value: Any) -> bool:
    if kind is float:
        return isinstance(value, int | float) and not isinstance(value, bool)
    return isinstance(value, kind) and (kind is bool or not isinstance(value, bool))
