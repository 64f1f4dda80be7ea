"""A turn of the model as an agent receives it: text without stop strings, and tool calls."""

from collections.abc import Sequence
from typing import Any

import numpy as np

from jaxrl.data.chat.encoding import ChatRenderer
from jaxrl.http.errors import RequestError
from jaxrl.rollout.agents.chat import ChatRequest
from jaxrl.rollout.agents.episode import AgentEpisode, PendingTurn, PlacedTurn
from jaxrl.rollout.turns import Response
from jaxrl.tool_calls.calls import openai_form
from jaxrl.tool_calls.formats import ToolFormat, tool_format
from jaxrl.tool_calls.parser import parse_turn


class TurnReader:
    """Begins turns and reads finished ones."""

    def __init__(self, renderer: ChatRenderer, eos_ids: tuple[int, ...]):
        self.renderer, self.eos_ids = renderer, eos_ids
        self._format: ToolFormat | None = None

    def place(self, episode: AgentEpisode, request: ChatRequest) -> PlacedTurn:
        """The turn that a request with checked tools asks for. Raises RequestError."""
        try:
            if request.tools and self._format is None:
                self._format = tool_format(self.renderer.template)
        except ValueError as error:
            raise RequestError(400, str(error), param="tools") from error
        return episode.place_turn(request)

    def render(self, placed: PlacedTurn) -> np.ndarray:
        """int32, the tokens of a turn's new messages; on any thread. Raises RequestError."""
        try:
            return placed.render(self.renderer, self.eos_ids)
        except ValueError as error:  # of the chat template
            raise RequestError(400, str(error), param="messages") from error

    def message(
        self, turn: PendingTurn, response: Response, stop: Sequence[str]
    ) -> tuple[dict[str, Any], str, int]:
        """(message in OpenAI's form, finish reason, number of malformed tool calls)."""
        plain = self._text(response, stop, skip_special=True)
        message = {"role": "assistant", "content": plain}
        if not turn.request.tools or not turn.request.may_call:
            return message, response.finish, 0
        assert self._format is not None  # of `place`
        parsed = parse_turn(
            self._text(response, stop, skip_special=False),
            self._format,
            tools=turn.request.tools,
            in_thought=self.renderer.opens_thought(turn.tokens),
        )
        if not parsed.calls:  # a malformed call stays text
            return message, response.finish, len(parsed.malformed)
        message = {
            "role": "assistant",
            "content": parsed.content or None,
            "tool_calls": [openai_form(call) for call in parsed.calls],
        }
        finish = "tool_calls" if response.finish == "stop" else response.finish
        return message, finish, len(parsed.malformed)

    def _text(self, response: Response, stop: Sequence[str], *, skip_special: bool) -> str:
        """The text of a turn up to the stop string that ended it, without end-of-sequence token."""
        tokens = response.tokens
        if tokens and tokens[-1] in self.eos_ids:
            tokens = tokens[:-1]
        text = self.renderer.decode(np.array(tokens, np.int32), skip_special=skip_special)
        if response.finish != "stop":
            return text
        return text[: min((i for s in stop if (i := text.find(s)) >= 0), default=len(text))]
