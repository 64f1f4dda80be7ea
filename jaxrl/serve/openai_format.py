"""Answers as OpenAI's API writes them: whole bodies and the chunks of a stream."""

import secrets
import time
from collections.abc import Iterator
from typing import Any

from jaxrl.data.chat import ChatRenderer
from jaxrl.serve.choice import Choice, Delta
from jaxrl.serve.response import Answer
from jaxrl.serve.score import Scores
from jaxrl.serve.text import UNFINISHED, text_offsets

Json = dict[str, Any]


class Writer:
    """Writes one answer, whole or in chunks."""

    def __init__(self, answer: Answer, renderer: ChatRenderer, model: str):
        self._answer, self._asked, self._renderer = answer, answer.asked, renderer
        self._head = {
            "id": f"{'chatcmpl' if self._asked.chat else 'cmpl'}-{secrets.token_hex(12)}",
            "object": "chat.completion" if self._asked.chat else "text_completion",
            "created": int(time.time()),
            "model": model,
        }

    def whole(self) -> Json:
        """The body of an answer whose choices have ended."""
        choices = []
        for choice in self._answer.choices:
            if self._asked.chat:
                said: Json = {"message": {"role": "assistant", "content": choice.text}}
            else:
                said = {"text": self._echo(choice) + choice.text}
            choices.append(said | self._rest(choice, 0))
        return self._body(choices) | {"usage": self.usage()}

    def first(self) -> Iterator[Json]:
        """What a stream says before the first delta."""
        for choice in self._answer.choices:
            if self._asked.chat:
                yield self._of(choice, {"delta": {"role": "assistant", "content": ""}})
            elif self._asked.echo:
                yield self._of(choice, {"text": self._echo(choice)})

    def chunk(self, choice: Choice, delta: Delta) -> Json:
        said = {"delta": {"content": delta.text}} if self._asked.chat else {"text": delta.text}
        return self._of(choice, said | self._rest(choice, delta.first))

    def last(self) -> Json:
        """The chunk of a stream that has the token counts."""
        return self._chunk([]) | {"usage": self.usage()}

    def usage(self) -> Json:
        n_prompt, n_response = self._asked.n_prompt_tokens, self._answer.n_tokens
        return {
            "prompt_tokens": n_prompt,
            "completion_tokens": n_response,
            "total_tokens": n_prompt + n_response,
        }

    def _of(self, choice: Choice, said: Json) -> Json:
        body = {"index": choice.index, "logprobs": None, "finish_reason": None} | said
        usage = {"usage": None} if self._asked.include_usage else {}
        return self._chunk([body]) | usage

    def _body(self, choices: list[Json]) -> Json:
        step = self._answer.step
        fingerprint = None if step is None else f"step-{step}"
        return self._head | {"system_fingerprint": fingerprint, "choices": choices}

    def _chunk(self, choices: list[Json]) -> Json:
        kind = {"object": "chat.completion.chunk"} if self._asked.chat else {}
        return self._body(choices) | kind

    def _rest(self, choice: Choice, first: int) -> Json:
        """What stands beside the text of a choice, of its tokens from `first` on."""
        rest: Json = {
            "index": choice.index,
            "logprobs": self._logprobs(choice, first) if self._asked.logprobs else None,
            "finish_reason": choice.finish or None,
        }
        if self._asked.return_token_ids:
            rest["token_ids"] = choice.tokens[first:]
            if first == 0:
                rest["prompt_token_ids"] = self._answer.prompt_of(choice).tolist()
        return rest

    def _logprobs(self, choice: Choice, first: int) -> Json:
        """Of the choice's tokens from `first` on, behind those of the prompt where that is echoed."""
        prompt, echo = self._answer.prompt_of(choice).tolist(), self._asked.echo
        tokens = [*(prompt if echo else []), *choice.tokens[first:]]
        start = 0 if echo else len(prompt) + first
        scores = self._answer.scores.get(choice.index)
        logp: list[float | None] = [*choice.logp[first:]]
        if scores is not None and echo:
            logp = [None, *scores.logp[: len(prompt) - 1].tolist(), *logp]
        names = [self._name(token) for token in tokens]
        tops = [self._top(scores, place) for place in range(start, start + len(tokens))]
        if self._asked.chat:
            content = [
                _token(name, p) | {"top_logprobs": [_token(*other) for other in top or []]}
                for name, p, top in zip(names, logp, tops, strict=True)
            ]
            return {"content": content, "refusal": None}
        n_echo = len(self._echo(choice))
        offsets = [n_echo + n for n in choice.offsets[first:]]
        rows = zip(names, logp, tops, strict=True)
        return {
            "tokens": names,
            "token_logprobs": logp,
            # the token itself comes with the likeliest; two that look alike count as the likelier
            "top_logprobs": [top and {name: p} | dict(top[::-1]) for name, p, top in rows]
            if self._asked.n_top
            else None,
            "text_offset": (text_offsets(self._renderer.decode, prompt) if echo else []) + offsets,
        }

    def _top(self, scores: Scores | None, place: int) -> list[tuple[str, float]] | None:
        """The likeliest tokens at a place in prompt and response, and their logprobs; None at the start."""
        if scores is None or place == 0:
            return None
        n = self._asked.n_top
        ids, logp = scores.top[place - 1, :n].tolist(), scores.top_logp[place - 1, :n].tolist()
        return [(self._name(token), p) for token, p in zip(ids, logp, strict=True)]

    def _name(self, token: int) -> str:
        return self._renderer.decode([token], skip_special=False)

    def _echo(self, choice: Choice) -> str:
        prompt = self._answer.prompt_of(choice)
        return self._renderer.decode(prompt) if self._asked.echo else ""


def _token(name: str, logp: float | None) -> Json:
    # part of a character has no bytes that could be told
    return {
        "token": name,
        "logprob": logp,
        "bytes": None if UNFINISHED in name else list(name.encode()),
    }
