"""Formats responses as OpenAI's API does: full bodies and the chunks of a stream."""

from collections.abc import Iterator

from jaxrl.data.chat.encoding import ChatRenderer
from jaxrl.data.token_text import TokenTexts
from jaxrl.http.errors import RequestError
from jaxrl.http.json_pieces import dump, json_pieces
from jaxrl.http.openai import response_head, usage
from jaxrl.http.replies import END_OF_EVENTS, event
from jaxrl.json_text import Json
from jaxrl.serve.choice import Choice, Delta, TopLogprobs, text_offsets
from jaxrl.serve.response import ActiveResponse
from jaxrl.serve.structured.tool_output import ToolOutput


class ResponseFormatter:
    """Formats one response, in full or as chunks."""

    def __init__(self, response: ActiveResponse, renderer: ChatRenderer, tokens: TokenTexts):
        self._response, self._request, self._renderer = response, response.request, renderer
        self._tokens = tokens
        tools = self._request.tools
        self._outputs = [ToolOutput(tools) for _ in response.choices] if tools else []
        kind = "chat.completion" if self._request.chat else "text_completion"
        self._head = response_head(kind, self._request.model)

    def full(self) -> Iterator[str]:
        """The body of a response whose choices have all ended, as JSON: a part per choice."""
        fields = self._body([])
        fields.pop("choices")
        yield dump(fields)[:-1] + ',"choices":['
        for i, choice in enumerate(self._response.choices):
            yield ("," if i else "") + "".join(json_pieces(self._full_choice(choice)))
        yield f'],"usage":{dump(self.usage())}}}'

    def _full_choice(self, choice: Choice) -> Json:
        if self._request.chat:
            text: Json = {"message": {"role": "assistant"} | self._message(choice)}
        else:
            text = {"text": self._echo(choice) + choice.text}
        return text | self._details(choice, 0)

    def content_and_calls(self, choice: Choice, text: str) -> tuple[str, list[Json]]:
        """The delta of the next piece of a choice's text: content, and indexed tool calls."""
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
        return usage(self._request.n_prompt_tokens, self._response.n_tokens)

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
        if self._request.prompt_logprobs is not None:
            details["prompt_logprobs"] = self._prompt_logprobs(choice)
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
        tokens, logp = choice.tokens[first_token:], [*choice.logp[first_token:]]
        found: list[TopLogprobs | None] = [*choice.top[first_token : len(choice.tokens)]]
        found = found or [None] * len(tokens)
        offsets = choice.offsets[first_token:]
        if self._request.echo:
            prompt = self._response.prompt_of(choice).tolist()
            if (scores := self._response.scores.get(choice.index)) is not None:
                logp, found = [None, *scores.logp.tolist(), *logp], [None, *scores.pairs(), *found]
            tokens, n_echo = [*prompt, *tokens], len(self._echo(choice))
            offsets = [*text_offsets(self._renderer.decode, prompt), *(n_echo + n for n in offsets)]
        n_top = self._request.n_top
        rows = zip(tokens, logp, [top and top[:n_top] for top in found], strict=True)
        if self._request.chat:
            content = [
                self._chat_logprob(token, p)
                | {"top_logprobs": [self._chat_logprob(*other) for other in top or []]}
                for token, p, top in rows
            ]
            return {"content": content, "refusal": None}
        return {
            "tokens": [self._tokens[token].name for token in tokens],
            "token_logprobs": logp,
            "top_logprobs": [top and self._named(token, p, top) for token, p, top in rows]
            if n_top
            else None,
            "text_offset": offsets,
        }

    def _prompt_logprobs(self, choice: Choice) -> list[Json | None]:
        """The logprobs of the prompt's tokens and of the most likely ones, in vLLM's form.

        The first token has none. A token's own entry has no rank if it is not among them.
        """
        scores, n_top = self._response.scores[choice.index], self._request.prompt_logprobs
        prompt = self._response.prompt_of(choice).tolist()[1:]
        rows: list[Json | None] = [None]
        for token, p, top in zip(prompt, scores.logp.tolist(), scores.pairs(), strict=True):
            row = {str(token): self._prompt_logprob(token, p, None)}
            for rank, (other, logp) in enumerate(top[:n_top], 1):
                row[str(other)] = self._prompt_logprob(other, logp, rank)
            rows.append(row)
        return rows

    def _prompt_logprob(self, token: int, logp: float, rank: int | None) -> Json:
        return {"logprob": logp, "rank": rank, "decoded_token": self._tokens[token].text}

    def _chat_logprob(self, token: int, logp: float | None) -> Json:
        found = self._tokens[token]
        return {"token": found.text, "logprob": logp, "bytes": list(found.bytes)}

    def _named(self, token: int, logp: float | None, top: TopLogprobs) -> dict[str, float | None]:
        """Logprobs by name: the token's own, then the most likely tokens'.

        A token that has the name of another one is `token_id:ID`, as in vLLM.
        """
        named = {self._tokens[token].name: logp}
        for other, p in top:
            name = self._tokens[other].name
            if other != token:
                named[f"token_id:{other}" if name in named else name] = p
        return named

    def _echo(self, choice: Choice) -> str:
        prompt = self._response.prompt_of(choice)
        return self._renderer.decode(prompt) if self._request.echo else ""
