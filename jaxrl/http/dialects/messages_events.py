"""Writes turns as Anthropic's Messages API does: the message, its events, and its errors."""

import secrets
from collections.abc import Iterator

from jaxrl.http.dialects.turn import EndOfTurn, TurnPiece, typed_event
from jaxrl.http.errors import RequestError, anthropic_body
from jaxrl.json_text import Json, parse_json

UNSIGNED = "unsigned"  # clients return a signature with a thinking block; it is not checked


class MessagesWriter:
    """Writes one turn as a message, in full or as events."""

    splits_reasoning = True

    def __init__(self, model: str):
        self._head = {
            "id": f"msg_{secrets.token_hex(12)}",
            "type": "message",
            "role": "assistant",
            "model": model,
        }
        self._n_blocks = 0  # that are complete
        self._open = ""  # type of the block that is being streamed
        self._called = False

    def full(self, turn: TurnPiece, end: EndOfTurn) -> Json:
        content: list[Json] = []
        if turn.reasoning:
            content.append(_thinking(turn.reasoning, UNSIGNED))
        if turn.content:
            content.append({"type": "text", "text": turn.content})
        for call in turn.calls:
            content.append(_tool_use(call, parse_json(call["function"]["arguments"])))
        self._called = bool(turn.calls)
        return self._head | {
            "content": content,
            **self._stop(end),
            "usage": _usage(end.n_prompt_tokens, end.n_tokens),
        }

    def start(self, n_prompt_tokens: int) -> Iterator[str]:
        message = self._head | {
            "content": [],
            "stop_reason": None,
            "stop_sequence": None,
            "usage": _usage(n_prompt_tokens, 0),
        }
        yield typed_event("message_start", {"message": message})
        yield typed_event("ping", {})

    def add(self, piece: TurnPiece) -> Iterator[str]:
        if piece.reasoning:
            yield from self._open_block("thinking", _thinking("", ""))
            yield self._delta("thinking_delta", "thinking", piece.reasoning)
        if piece.content:
            yield from self._open_block("text", {"type": "text", "text": ""})
            yield self._delta("text_delta", "text", piece.content)
        for call in piece.calls:
            self._called = True
            yield from self._close_block()
            yield from self._open_block("tool_use", _tool_use(call, {}))
            yield self._delta("input_json_delta", "partial_json", call["function"]["arguments"])
            yield from self._close_block()

    def end(self, end: EndOfTurn) -> Iterator[str]:
        yield from self._close_block()
        usage = _usage(end.n_prompt_tokens, end.n_tokens)
        yield typed_event("message_delta", {"delta": self._stop(end), "usage": usage})
        yield typed_event("message_stop", {})

    def error(self, error: RequestError) -> Iterator[str]:
        yield typed_event("error", anthropic_body(error))

    def _stop(self, end: EndOfTurn) -> Json:
        if end.finish == "length":
            reason = "max_tokens"
        elif self._called:
            reason = "tool_use"
        else:
            reason = "stop_sequence" if end.stop_string else "end_turn"
        return {"stop_reason": reason, "stop_sequence": end.stop_string or None}

    def _open_block(self, kind: str, block: Json) -> Iterator[str]:
        if self._open == kind:
            return
        yield from self._close_block()
        self._open = kind
        fields = {"index": self._n_blocks, "content_block": block}
        yield typed_event("content_block_start", fields)

    def _close_block(self) -> Iterator[str]:
        if not self._open:
            return
        if self._open == "thinking":
            yield self._delta("signature_delta", "signature", UNSIGNED)
        yield typed_event("content_block_stop", {"index": self._n_blocks})
        self._n_blocks, self._open = self._n_blocks + 1, ""

    def _delta(self, kind: str, field: str, text: str) -> str:
        fields = {"index": self._n_blocks, "delta": {"type": kind, field: text}}
        return typed_event("content_block_delta", fields)


def _thinking(text: str, signature: str) -> Json:
    return {"type": "thinking", "thinking": text, "signature": signature}


def _tool_use(call: Json, arguments: Json) -> Json:
    return {
        "type": "tool_use",
        "id": call["id"],
        "name": call["function"]["name"],
        "input": arguments,
    }


def _usage(n_prompt: int, n_response: int) -> Json:
    return {
        "input_tokens": n_prompt,
        "cache_creation_input_tokens": 0,
        "cache_read_input_tokens": 0,
        "output_tokens": n_response,
    }
