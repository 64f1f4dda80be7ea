"""A turn of the model for a client, and what an API's dialect makes of it.

A dialect has a function that translates the body of a request into the body of a chat completion,
and a writer of the response. Both endpoints, the server's and that of agents, use these.
"""

import dataclasses
from collections.abc import Iterator
from typing import Any, Protocol, runtime_checkable

from jaxrl.http.errors import RequestError
from jaxrl.http.json_pieces import json_pieces
from jaxrl.json_text import Json


@dataclasses.dataclass(frozen=True)
class TurnPiece:
    """A turn, or the part of it that one piece of a stream adds, in this order."""

    reasoning: str = ""  # only for a dialect whose `splits_reasoning`; else part of the content
    content: str = ""
    logprobs: tuple[Json, ...] = ()  # of a chat completion, by token; () if not requested
    calls: tuple[Json, ...] = ()  # in OpenAI's form


@dataclasses.dataclass(frozen=True)
class EndOfTurn:
    """How a turn has ended."""

    finish: str  # "stop" | "length", of the engine
    n_prompt_tokens: int
    n_tokens: int
    stop_string: str = ""  # that ended it


@runtime_checkable
class TurnWriter(Protocol):
    """Writes one turn, in full or as events: `start`, `add` for each piece, then `end`."""

    splits_reasoning: bool

    def full(self, turn: TurnPiece, end: EndOfTurn) -> Json: ...

    def start(self, n_prompt_tokens: int) -> Iterator[str]: ...

    def add(self, piece: TurnPiece) -> Iterator[str]: ...

    def end(self, end: EndOfTurn) -> Iterator[str]: ...

    def error(self, error: RequestError) -> Iterator[str]: ...


def typed_event(kind: str, fields: dict[str, Any]) -> str:
    """A server-sent event with a type, which its data repeats."""
    return f"event: {kind}\ndata: {''.join(json_pieces({'type': kind} | fields))}\n\n"
