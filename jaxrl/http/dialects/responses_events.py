"""Writes turns as OpenAI's Responses API does: the response object, and the typed events."""

import secrets
import time
from collections.abc import Iterator, Sequence

from jaxrl.http.dialects.turn import EndOfTurn, TurnPiece, typed_event
from jaxrl.http.errors import RequestError
from jaxrl.json_text import Json


class ResponsesWriter:
    """Writes one turn as a response object, in full or as events."""

    splits_reasoning = False

    def __init__(self, model: str, repeated: Json):
        """`repeated` are the fields of the response object that repeat the request."""
        self._head = {
            "id": f"resp_{secrets.token_hex(12)}",
            "object": "response",
            "created_at": int(time.time()),
            "model": model,
        } | repeated
        self._output: list[Json] = []  # complete items
        self._open: Json | None = None  # the message whose text is being streamed
        self._n_events = 0

    def full(self, turn: TurnPiece, end: EndOfTurn) -> Json:
        if turn.content or not turn.calls:
            part = _text_part(turn.content) | {"logprobs": list(turn.logprobs)}
            self._output.append(_message("completed", [part]))
        self._output += [_call_item(call) for call in turn.calls]
        return self._object(end)

    def start(self, n_prompt_tokens: int) -> Iterator[str]:
        for kind in "response.created", "response.in_progress":
            yield self._event(kind, {"response": self._body("in_progress")})

    def add(self, piece: TurnPiece) -> Iterator[str]:
        if piece.content or piece.logprobs:
            yield from self._add_text(piece.content, piece.logprobs)
        for call in piece.calls:
            yield from self._close_text()
            yield from self._call_events(_call_item(call))

    def end(self, end: EndOfTurn) -> Iterator[str]:
        if self._open is None and not self._output:
            yield from self._add_text("", ())
        yield from self._close_text()
        body = self._object(end)
        yield self._event(f"response.{body['status']}", {"response": body})

    def error(self, error: RequestError) -> Iterator[str]:
        details = error.body()["error"]
        code = details["code"] or details["type"]
        yield self._event("error", {"code": code, "message": error.message, "param": error.param})

    def _add_text(self, text: str, logprobs: Sequence[Json]) -> Iterator[str]:
        if self._open is None:
            self._open = _message("in_progress", [])
            yield self._item_event("response.output_item.added", {"item": self._open})
            self._open["content"].append(_text_part(""))
            yield self._part_event("response.content_part.added", {"part": _text_part("")})
        [part] = self._open["content"]
        part["text"] += text
        part["logprobs"] += logprobs
        yield self._part_event(
            "response.output_text.delta", {"delta": text, "logprobs": [*logprobs]}
        )

    def _close_text(self) -> Iterator[str]:
        if (item := self._open) is None:
            return
        [part] = item["content"]
        item["status"] = "completed"
        yield self._part_event(
            "response.output_text.done", {"text": part["text"], "logprobs": part["logprobs"]}
        )
        yield self._part_event("response.content_part.done", {"part": part})
        yield self._item_event("response.output_item.done", {"item": item})
        self._output.append(item)
        self._open = None

    def _call_events(self, item: Json) -> Iterator[str]:
        started = item | {"arguments": "", "status": "in_progress"}
        yield self._item_event("response.output_item.added", {"item": started})
        for kind, field in ("delta", "delta"), ("done", "arguments"):
            fields = {field: item["arguments"], "item_id": item["id"]}
            if kind == "done":
                fields["name"] = item["name"]
            yield self._item_event(f"response.function_call_arguments.{kind}", fields)
        yield self._item_event("response.output_item.done", {"item": item})
        self._output.append(item)

    def _object(self, end: EndOfTurn) -> Json:
        cut = end.finish == "length"
        if cut and self._output:
            self._output[-1]["status"] = "incomplete"
        return self._body("incomplete" if cut else "completed") | {
            "incomplete_details": {"reason": "max_output_tokens"} if cut else None,
            "usage": {
                "input_tokens": end.n_prompt_tokens,
                "input_tokens_details": {"cached_tokens": 0},
                "output_tokens": end.n_tokens,
                "output_tokens_details": {"reasoning_tokens": 0},
                "total_tokens": end.n_prompt_tokens + end.n_tokens,
            },
        }

    def _body(self, status: str) -> Json:
        return self._head | {
            "status": status,
            "error": None,
            "incomplete_details": None,
            "output": self._output,
            "usage": None,
        }

    def _item_event(self, kind: str, fields: Json) -> str:
        return self._event(kind, {"output_index": len(self._output)} | fields)

    def _part_event(self, kind: str, fields: Json) -> str:
        assert self._open is not None
        return self._item_event(kind, {"item_id": self._open["id"], "content_index": 0} | fields)

    def _event(self, kind: str, fields: Json) -> str:
        self._n_events += 1
        return typed_event(kind, {"sequence_number": self._n_events - 1} | fields)


def _message(status: str, content: list[Json]) -> Json:
    item = {"type": "message", "id": f"msg_{secrets.token_hex(12)}", "status": status}
    return item | {"role": "assistant", "content": content}


def _text_part(text: str) -> Json:
    return {"type": "output_text", "text": text, "annotations": [], "logprobs": []}


def _call_item(call: Json) -> Json:
    item = {"type": "function_call", "id": f"fc_{secrets.token_hex(12)}", "call_id": call["id"]}
    return item | call["function"] | {"status": "completed"}
