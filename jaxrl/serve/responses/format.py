"""Formats responses as OpenAI's Responses API does: the response object, and the typed events."""

import secrets
import time
from collections.abc import Iterator

from jaxrl.data.chat.encoding import ChatRenderer
from jaxrl.http.errors import RequestError
from jaxrl.json_text import Json
from jaxrl.serve.choice import Choice, Delta
from jaxrl.serve.json_pieces import json_pieces
from jaxrl.serve.openai_format import ResponseFormatter
from jaxrl.serve.response import ActiveResponse
from jaxrl.serve.token_text import TokenTexts


class ResponsesFormatter:
    """Formats one response, in full or as events."""

    def __init__(
        self, response: ActiveResponse, renderer: ChatRenderer, tokens: TokenTexts, repeated: Json
    ):
        """`repeated` are the fields of the response object that repeat the request."""
        self._response = response
        self._chat = ResponseFormatter(response, renderer, tokens)
        self._head = {
            "id": f"resp_{secrets.token_hex(12)}",
            "object": "response",
            "created_at": int(time.time()),
            "model": response.request.model,
        } | repeated
        self._output: list[Json] = []  # complete items
        self._open: Json | None = None  # the message whose text is being streamed
        self._n_events = 0

    def full(self) -> Iterator[str]:
        """The response object as JSON, after the choice has ended."""
        [choice] = self._response.choices
        content, calls = self._chat.content_and_calls(choice, choice.text)
        if content or not calls:
            part = _text_part(content) | {"logprobs": self._chat.token_logprobs(choice, 0)}
            self._output.append(_message("completed", [part]))
        self._output += [_call_item(call) for call in calls]
        yield "".join(json_pieces(self._object(choice)))

    def start_events(self) -> Iterator[str]:
        for kind in "response.created", "response.in_progress":
            yield self._event(kind, {"response": self._body("in_progress")})

    def delta_events(self, choice: Choice, delta: Delta) -> Iterator[str]:
        content, calls = self._chat.content_and_calls(choice, delta.text)
        logprobs = self._chat.token_logprobs(choice, delta.first_token)
        if content or logprobs:
            yield from self._add_text(content, logprobs)
        for call in calls:
            yield from self._close_text()
            yield from self._call_events(_call_item(call))

    def end_events(self) -> Iterator[str]:
        [choice] = self._response.choices
        if self._open is None and not self._output:
            yield from self._add_text("", [])
        yield from self._close_text()
        body = self._object(choice)
        yield self._event(f"response.{body['status']}", {"response": body})

    def error_events(self, error: RequestError) -> Iterator[str]:
        details = error.body()["error"]
        code = details["code"] or details["type"]
        yield self._event("error", {"code": code, "message": error.message, "param": error.param})

    def _add_text(self, text: str, logprobs: list[Json]) -> Iterator[str]:
        if self._open is None:
            self._open = _message("in_progress", [])
            yield self._item_event("response.output_item.added", {"item": self._open})
            self._open["content"].append(_text_part(""))
            yield self._part_event("response.content_part.added", {"part": _text_part("")})
        [part] = self._open["content"]
        part["text"] += text
        part["logprobs"] += logprobs
        yield self._part_event("response.output_text.delta", {"delta": text, "logprobs": logprobs})

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

    def _object(self, choice: Choice) -> Json:
        usage = self._chat.usage()
        cut = choice.finish_reason == "length"
        if cut and self._output:
            self._output[-1]["status"] = "incomplete"
        return self._body("incomplete" if cut else "completed") | {
            "incomplete_details": {"reason": "max_output_tokens"} if cut else None,
            "usage": {
                "input_tokens": usage["prompt_tokens"],
                "input_tokens_details": {"cached_tokens": 0},
                "output_tokens": usage["completion_tokens"],
                "output_tokens_details": {"reasoning_tokens": 0},
                "total_tokens": usage["total_tokens"],
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
        body = {"type": kind, "sequence_number": self._n_events} | fields
        self._n_events += 1
        return f"event: {kind}\ndata: {''.join(json_pieces(body))}\n\n"


def _message(status: str, content: list[Json]) -> Json:
    item = {"type": "message", "id": f"msg_{secrets.token_hex(12)}", "status": status}
    return item | {"role": "assistant", "content": content}


def _text_part(text: str) -> Json:
    return {"type": "output_text", "text": text, "annotations": [], "logprobs": []}


def _call_item(call: Json) -> Json:
    item = {"type": "function_call", "id": f"fc_{secrets.token_hex(12)}", "call_id": call["id"]}
    return item | call["function"] | {"status": "completed"}
