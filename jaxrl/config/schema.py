"""Typed keys: frozen dataclasses whose fields know their meaning and their range, and nested mappings.

`key()` declares a field, `keys()` lists the dotted keys of a schema, `build()` turns a mapping (a ConfigDict, parsed
JSON) into the dataclass and says everything that is wrong with it at once.
"""

import dataclasses
import difflib
import typing
from collections.abc import Iterable, Mapping
from typing import Any


@dataclasses.dataclass(frozen=True)
class Key:
    """One leaf of a schema."""

    name: str  # dotted: "rollout.sampling.top_k"
    type: Any  # bool, int, float, str or a tuple of one of these
    default: Any
    doc: str
    least: int | float | None = None
    most: int | float | None = None
    above: int | float | None = None
    among: tuple[str, ...] = ()

    @property
    def type_name(self) -> str:
        element = _element(self.type)
        return self.type.__name__ if element is None else f"tuple of {element.__name__}"

    @property
    def range(self) -> str:
        """The allowed values in words; "" where every value of the type is allowed."""
        if self.among:
            return " | ".join(self.among)
        bounds = [(">=", self.least), (">", self.above), ("<=", self.most)]
        return ", ".join(f"{sign} {bound:g}" for sign, bound in bounds if bound is not None)


def key(
    default: Any,
    doc: str,
    *,
    least: int | float | None = None,
    most: int | float | None = None,
    above: int | float | None = None,
    among: tuple[str, ...] = (),
) -> Any:
    """A field: its default, one line on meaning and unit, and the values it may take."""
    limits = {"least": least, "most": most, "above": above, "among": among}
    return dataclasses.field(default=default, metadata={"doc": doc, **limits})


def keys(schema: type, prefix: str = "") -> dict[str, Key]:
    """Dotted name -> Key, of every leaf, in the order of the schema.

    A nested schema takes its defaults from the instance its field makes, so two fields of one type may differ.
    """
    return _keys(schema(), prefix)


def _keys(instance: Any, prefix: str) -> dict[str, Key]:
    found = {}
    for field in dataclasses.fields(instance):
        value, name = getattr(instance, field.name), prefix + field.name
        if dataclasses.is_dataclass(value):
            found |= _keys(value, name + ".")
        else:
            found[name] = Key(name, field.type, value, **field.metadata)
    return found


def nearest(name: str, known: Iterable[str]) -> str:
    """The known name that `name` was probably meant to be, or "" when nothing is close.

    Of dotted names the last part counts for itself, too: the section may be the mistake.
    """
    known, leaf = list(known), _leaf(name)
    if close := difflib.get_close_matches(name, known, n=1, cutoff=0.75):
        return close[0]
    close = difflib.get_close_matches(leaf, map(_leaf, known), n=1, cutoff=0.75)
    return next((other for other in known if close and _leaf(other) == close[0]), "")


def unknown_key(name: str, known: Iterable[str]) -> str:
    """The complaint about a key that does not exist, with the keys that were probably meant."""
    known = list(known)
    meant = [other for other in known if _leaf(other) == _leaf(name)] or [nearest(name, known)]
    hint = f"did you mean {' or '.join(meant)}?" if any(meant) else "--config.help lists the keys"
    return f"there is no key {name}; {hint}"


def _leaf(name: str) -> str:
    return name.rsplit(".", 1)[-1]


def convert(value: Any, spec: Key) -> Any:
    """`value` as the type of the key: an int may stand for a float, a list for a tuple, and nothing else.

    Raises ValueError naming the key, the value and the type it must have.
    """
    element = _element(spec.type)
    if element and isinstance(value, list | tuple) and all(_is(element, v) for v in value):
        return tuple(element(v) for v in value)
    if not element and _is(spec.type, value):
        return spec.type(value)
    article = "an" if spec.type_name == "int" else "a"
    hint = " such as ('a', 'b')" if element is str else ""
    raise ValueError(
        f"{spec.name}={value!r} is of type {type(value).__name__}; "
        f"set {article} {spec.type_name}{hint}"
    )


def out_of_range(value: Any, spec: Key) -> list[str]:
    """One line for every value of the key that its range or its names do not allow."""
    problems = []
    for one in value if isinstance(value, tuple) else (value,):
        if spec.among and one not in spec.among:
            guess = nearest(one, spec.among)
            hint = f"did you mean {guess!r}? " if guess else ""
            problems.append(
                f"{spec.name}={one!r} is not known; {hint}set one of {', '.join(spec.among)}"
            )
        low = (spec.least is not None and not one >= spec.least) or (
            spec.above is not None and not one > spec.above
        )
        if low or (spec.most is not None and not one <= spec.most):
            problems.append(f"{spec.name}={one!r} is out of range; set a value {spec.range}")
    return problems


def build(schema: type, values: Mapping[str, Any]) -> tuple[Any, list[str]]:
    """The dataclass that holds `values`, and one line per unknown key, missing key, wrong type or value out of range.

    A value that cannot be used is replaced by its default; the caller raises when there are problems.
    """
    known = keys(schema)
    flat = flatten(values)
    problems = [unknown_key(name, known) for name in flat if name not in known]
    used = {}
    for name, spec in known.items():
        if name not in flat:
            problems.append(f"the key {name} is missing; build the config from default_config()")
            continue
        try:
            used[name] = convert(flat[name], spec)
        except ValueError as wrong_type:
            problems.append(str(wrong_type))
        else:
            problems += out_of_range(used[name], spec)
    return _fill(schema(), used, ""), problems


def flatten(values: Mapping[str, Any], prefix: str = "") -> dict[str, Any]:
    """Dotted name -> leaf of a nested mapping."""
    flat = {}
    for name, value in values.items():
        path = f"{prefix}{name}"
        flat |= flatten(value, path + ".") if isinstance(value, Mapping) else {path: value}
    return flat


def to_dict(config: Any) -> dict[str, Any]:
    """The nested dict of a schema's instance; tuples stay tuples."""
    return {
        f.name: to_dict(value) if dataclasses.is_dataclass(value) else value
        for f in dataclasses.fields(config)
        for value in (getattr(config, f.name),)
    }


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
    """Element type of a tuple type, None for a plain type."""
    return typing.get_args(kind)[0] if typing.get_origin(kind) is tuple else None


def _is(kind: type, value: Any) -> bool:
    if kind is float:
        return isinstance(value, int | float) and not isinstance(value, bool)
    return isinstance(value, kind) and (kind is bool or not isinstance(value, bool))
