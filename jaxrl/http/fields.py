"""Errors for fields of a body that an endpoint does not read, and fields that change no result."""

from collections.abc import Iterable

from jaxrl.config.schema import nearest
from jaxrl.http.errors import RequestError

IGNORED = ("metadata", "prompt_cache_key", "safety_identifier", "service_tier", "store", "user")


def unsupported_field(name: str) -> RequestError:
    return RequestError(400, f"{name} is not supported by this server; leave it out", param=name)


def unknown_field(name: str, known: Iterable[str]) -> RequestError:
    """The error for a field that is not in `known`, with the most similar one."""
    name = name[:64]
    guess = nearest(name, known)
    hint = f"; did you mean {guess}?" if guess else ""
    return RequestError(400, f"unknown field {name}{hint}", param=name)
