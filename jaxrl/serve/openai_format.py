"""Formats responses as OpenAI's API does: full bodies and the chunks of a stream."""

import secrets
import time
from collections.abc import Iterator
from typing import Any

from jaxrl.data.chat.encoding import ChatRenderer
from jaxrl.http.errors import RequestError
from jaxrl.http.replies import END_OF_EVENTS, event
from jaxrl.serve.choice import REPLACEMENT, Choice, Delta, TopLogprobs, text_offsets
from jaxrl.serve.response import ActiveResponse
from jaxrl.serve.structured.tool_output import ToolOutput

Json = dict[str, Any]


class ResponseFormatter:
    """Formats one response, in full or as chunks."""

    def __init__(self, response: ActiveResponse, renderer: ChatRenderer):
        self._response, self._request, self._renderer = response, response.request, renderer
        tools = self._request.tools
        self._outputs = [ToolOutput(tools) for _ in response.choices] if tools else []
        self._head = {
            "id": f"{'chatcmpl' if self._request.chat else 'cmpl'}-{secrets.token_hex(12)}",
            "object": "chat.completion" if self._request.chat else "text_completion",
            "created": int(time.time()),
            "model": self._request.model,
        }

    def full(self) -> Json:
        """The body of a response whose choices have all ended."""
        choices = []
        for choice in self._response.choices:
            if self._request.chat:
                text: Json = {"message": {"role": "assistant"} | self._message(choice)}
            else:
                text = {"text": self._echo(choice) + choice.text}
            choices.append(text | self._details(choice, 0))
        return self._body(choices) | {"usage": self.usage()}

    def content_and_calls(self, choice: Choice, text: str) -> tuple[str, list[Json]]:
        """What the next piece of a choice's text adds: content, and tool calls with their index."""
        if not self._outputs:
            return text, []
        delta = self._outputs[choice.index].add(text, ended=bool(choice.finish_reason))
        self._response.count_malformed_calls(delta.n_malformed)
        return delta.content, list(delta.calls)

    def token_logprobs(self, choice: Choice, first_token: int) -> list[Json]:
        """Chat logprobs of the tokens from `first_token` on; none if they are not requested."""
        return self._logprobs(choice, first_token)["content"] if self._request.logprobs else []

    def _message(self, choice: Choice) -> Json:
        """Content and tool calls of a choice that has ended."""
        content, calls = self.content_and_calls(choice, choice.text)
        if not calls:
            return {"content": content}
        calls = [{k: v for k, v in call.items() if k != "index"} for call in calls]
        return {"content": content or None, "tool_calls": calls}

    def first_chunks(self) -> Iterator[Json]:
        """The chunks of a stream before the first delta: roles, or echoed prompts."""
        for choice in self._response.choices:
            if self._request.chat:
                yield self._choice_chunk(choice, {"delta": {"role": "assistant", "content": ""}})
            elif self._request.echo:
                yield self._choice_chunk(choice, {"text": self._echo(choice)})

    def chunk(self, choice: Choice, delta: Delta) -> Json | None:
        """The chunk of a delta; None if it has nothing for the client."""
        request = self._request
        content, calls = self.content_and_calls(choice, delta.text)
        has_details = choice.finish_reason or request.logprobs or request.return_token_ids
        if not (content or calls or has_details):
            return None
        if request.chat:
            fields: Json = {"delta": ({"content": content} if content else {})}
            fields["delta"] |= {"tool_calls": calls} if calls else {}
        else:
            fields = {"text": content}
        return self._choice_chunk(choice, fields | self._details(choice, delta.first_token))

    def start_events(self) -> Iterator[str]:
        return map(event, self.first_chunks())

    def delta_events(self, choice: Choice, delta: Delta) -> Iterator[str]:
        if (chunk := self.chunk(choice, delta)) is not None:
            yield event(chunk)

    def end_events(self) -> Iterator[str]:
        if self._request.include_usage:
            yield event(self.usage_chunk())
        yield END_OF_EVENTS

    def error_events(self, error: RequestError) -> Iterator[str]:
        yield event(error.body())

    def usage_chunk(self) -> Json:
        """The final chunk of a stream with `include_usage`."""
        return self._chunk([]) | {"usage": self.usage()}

    def usage(self) -> Json:
        n_prompt, n_response = self._request.n_prompt_tokens, self._response.n_tokens
        return {
            "prompt_tokens": n_prompt,
            "completion_tokens": n_response,
            "total_tokens": n_prompt + n_response,
        }

    def _choice_chunk(self, choice: Choice, fields: Json) -> Json:
        body = {"index": choice.index, "logprobs": None, "finish_reason": None} | fields
        usage = {"usage": None} if self._request.include_usage else {}
        return self._chunk([body]) | usage

    def _body(self, choices: list[Json]) -> Json:
        step = self._response.step
        fingerprint = None if step is None else f"step-{step}"
        return self._head | {"system_fingerprint": fingerprint, "choices": choices}

    def _chunk(self, choices: list[Json]) -> Json:
        kind = {"object": "chat.completion.chunk"} if self._request.chat else {}
        return self._body(choices) | kind

    def _details(self, choice: Choice, first_token: int) -> Json:
        """The fields of a choice other than its text, for its tokens from `first_token` on."""
        details: Json = {
            "index": choice.index,
            "logprobs": self._logprobs(choice, first_token) if self._request.logprobs else None,
            "finish_reason": self._finish_reason(choice) or None,
        }
        if self._request.return_token_ids:
            details["token_ids"] = choice.tokens[first_token:]
            if first_token == 0:
                details["prompt_token_ids"] = self._response.prompt_of(choice).tolist()
        return details

    def _finish_reason(self, choice: Choice) -> str:
        if not self._outputs:
            return choice.finish_reason
        return self._outputs[choice.index].finish_reason(choice.finish_reason)

    def _logprobs(self, choice: Choice, first_token: int) -> Json:
        """Logprobs of the tokens from `first_token` on, and of the prompt if it is echoed."""
        prompt, echo = self._response.prompt_of(choice).tolist(), self._request.echo
        tokens, logp = choice.tokens[first_token:], [*choice.logp[first_token:]]
        found: list[TopLogprobs | None] = [*choice.top[first_token : len(choice.tokens)]]
        found = found or [None] * len(tokens)
        if echo and (scores := self._response.scores.get(choice.index)) is not None:
            logp, found = [None, *scores.logp.tolist(), *logp], [None, *scores.pairs(), *found]
        if echo:
            tokens = [*prompt, *tokens]
        names = [self._token_text(token) for token in tokens]
        tops = [None if top is None else self._top(top) for top in found]
        if self._request.chat:
            content = [
                _chat_logprob(name, p)
                | {"top_logprobs": [_chat_logprob(*other) for other in top or []]}
                for name, p, top in zip(names, logp, tops, strict=True)
            ]
            return {"content": content, "refusal": None}
        n_echo = len(self._echo(choice))
        offsets = [n_echo + n for n in choice.offsets[first_token:]]
        rows = zip(names, logp, tops, strict=True)
        return {
            "tokens": names,
            "token_logprobs": logp,
            # Includes the token itself. Of two tokens with the same text the more likely one wins.
            "top_logprobs": [top and {name: p} | dict(top[::-1]) for name, p, top in rows]
            if self._request.n_top
            else None,
            "text_offset": (text_offsets(self._renderer.decode, prompt) if echo else []) + offsets,
        }

    def _top(self, top: TopLogprobs) -> list[tuple[str, float]]:
        """(text, logprob) of the most likely tokens at a position."""
        return [(self._token_text(token), p) for token, p in top[: self._request.n_top]]

    def _token_text(self, token: int) -> str:
        return self._renderer.decode([token], skip_special=False)

    def _echo(self, choice: Choice) -> str:
        prompt = self._response.prompt_of(choice)
        return self._renderer.decode(prompt) if self._request.echo else ""


def _chat_logprob(text: str, logp: float | None) -> Json:
    # The bytes of a token that is part of a character are unknown.
    return {
        "token": text,
        "logprob": logp,
        "bytes": None if REPLACEMENT in text else list(text.encode()),
    }
