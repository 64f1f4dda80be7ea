"""A turn of the model as an agent receives it: text without stop strings, and tool calls."""

from collections.abc import Sequence

import numpy as np

from jaxrl.data.chat.encoding import ChatRenderer
from jaxrl.data.images.placed import PlacedTokens
from jaxrl.data.token_text import TokenTexts
from jaxrl.http.errors import RequestError
from jaxrl.json_text import Json
from jaxrl.rollout.agents.chat import ChatRequest, Reply
from jaxrl.rollout.agents.episode import AgentEpisode, PendingTurn, PlacedTurn
from jaxrl.rollout.turns import Response
from jaxrl.tool_calls.calls import ParsedTurn, openai_form
from jaxrl.tool_calls.formats import ToolFormat, tool_format
from jaxrl.tool_calls.parser import parse_turn
from jaxrl.tool_calls.reasoning import THINK, split_reasoning


class TurnReader:
    """Begins turns and reads finished ones."""

    def __init__(self, renderer: ChatRenderer, eos_ids: tuple[int, ...]):
        self.renderer, self.eos_ids = renderer, eos_ids
        self._format: ToolFormat | None = None
        self._texts = TokenTexts(renderer)

    def place(self, episode: AgentEpisode, request: ChatRequest) -> PlacedTurn:
        """The turn that a request with checked tools asks for. Raises RequestError."""
        self._check_tools(request)
        return episode.place_turn(request)

    def find(self, episode: AgentEpisode, request: ChatRequest) -> PlacedTurn:
        """As `place`, for a turn that does not follow: nothing of the episode changes."""
        self._check_tools(request)
        return episode.find_turn(request)

    def render(self, placed: PlacedTurn) -> PlacedTokens:
        """The tokens of a turn's new messages; on any thread. Raises RequestError."""
        try:
            return placed.render(self.renderer, self.eos_ids)
        except ValueError as error:  # of the chat template
            raise RequestError(400, str(error), param="messages") from error

    def reply(
        self, turn: PendingTurn, response: Response, stop: Sequence[str]
    ) -> tuple[Reply, int]:
        """(the turn as its agent gets it, number of malformed tool calls)."""
        message, n_malformed = self._message(turn, response, stop)
        ended_by = "" if response.finish != "stop" else _first_stop(self._text(response), stop)
        reply = Reply(
            message,
            response.finish,
            len(turn.input),
            len(response.tokens),
            self._logprobs(response) if turn.request.logprobs else (),
            ended_by if ended_by in turn.request.stop else "",
        )
        return reply, n_malformed

    def _check_tools(self, request: ChatRequest) -> None:
        """Finds the format of tool calls. Raises RequestError if the template has none."""
        try:
            if request.tools and self._format is None:
                self._format = tool_format(self.renderer.template)
        except ValueError as error:
            raise RequestError(400, str(error), param="tools") from error

    def _message(
        self, turn: PendingTurn, response: Response, stop: Sequence[str]
    ) -> tuple[Json, int]:
        """(message in OpenAI's form, number of malformed tool calls)."""
        in_thought = self.renderer.opens_thought(turn.input.tokens)
        parsed = ParsedTurn(self._visible(response, stop))
        if turn.request.tools and turn.request.may_call:
            assert self._format is not None  # of `place`
            found = parse_turn(
                self._visible(response, stop, skip_special=False),
                self._format,
                tools=turn.request.tools,
                in_thought=in_thought,
            )
            # without a call that can be read the turn is text without special tokens
            content = found.content if found.calls else parsed.content
            parsed = ParsedTurn(content, found.attempts)
        reasoning, content = "", parsed.content
        if turn.request.splits_reasoning:
            markers = THINK if self._format is None else self._format.thought
            reasoning, content = split_reasoning(content, markers, in_thought=in_thought)
        message: Json = {"role": "assistant", "content": content}
        if reasoning:
            message["reasoning_content"] = reasoning
        if calls := parsed.calls if turn.request.parallel else parsed.calls[:1]:
            message |= {"content": content or None, "tool_calls": [*map(openai_form, calls)]}
        return message, len(parsed.malformed)

    def _logprobs(self, response: Response) -> tuple[Json, ...]:
        texts = [self._texts[token] for token in response.tokens]
        return tuple(
            {"token": t.text, "logprob": p, "bytes": list(t.bytes), "top_logprobs": []}
            for t, p in zip(texts, response.logp, strict=True)
        )

    def _visible(
        self, response: Response, stop: Sequence[str], *, skip_special: bool = True
    ) -> str:
        """The text of a turn up to the stop string that ended it."""
        text = self._text(response, skip_special=skip_special)
        found = _first_stop(text, stop) if response.finish == "stop" else ""
        return text[: text.find(found)] if found else text

    def _text(self, response: Response, *, skip_special: bool = True) -> str:
        """The text of a turn without its end-of-sequence token."""
        tokens = response.tokens
        if tokens and tokens[-1] in self.eos_ids:
            tokens = tokens[:-1]
        return self.renderer.decode(np.array(tokens, np.int32), skip_special=skip_special)


def _first_stop(text: str, stop: Sequence[str]) -> str:
    """The stop string that begins first in a text; "" if it has none."""
    return min((s for s in stop if s in text), key=text.find, default="")
