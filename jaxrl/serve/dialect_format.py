"""Formats responses in a dialect other than chat completions, from what these would have."""

from collections.abc import Iterator

from jaxrl.http.dialects.turn import EndOfTurn, TurnPiece, TurnWriter
from jaxrl.http.errors import RequestError
from jaxrl.http.json_pieces import json_pieces
from jaxrl.serve.choice import Choice, Delta
from jaxrl.serve.openai_format import ResponseFormatter
from jaxrl.serve.response import ActiveResponse
from jaxrl.tool_calls.reasoning import ReasoningSplitter


class DialectFormatter:
    """Formats one response with a single choice, in full or as events."""

    def __init__(
        self,
        response: ActiveResponse,
        chat: ResponseFormatter,
        writer: TurnWriter,
        splitter: ReasoningSplitter,
    ):
        self._response, self._chat = response, chat
        self._writer, self._splitter = writer, splitter

    def full(self) -> Iterator[str]:
        """The body as JSON, after the choice has ended."""
        [choice] = self._response.choices
        turn = self._piece(choice, Delta(choice.text, 0))
        yield "".join(json_pieces(self._writer.full(turn, self._end(choice))))

    def start_events(self) -> Iterator[str]:
        return self._writer.start(self._response.request.n_prompt_tokens)

    def delta_events(self, choice: Choice, delta: Delta) -> Iterator[str]:
        return self._writer.add(self._piece(choice, delta))

    def end_events(self) -> Iterator[str]:
        [choice] = self._response.choices
        return self._writer.end(self._end(choice))

    def error_events(self, error: RequestError) -> Iterator[str]:
        return self._writer.error(error)

    def _piece(self, choice: Choice, delta: Delta) -> TurnPiece:
        content, calls = self._chat.content_and_calls(choice, delta.text)
        reasoning = ""
        if self._writer.splits_reasoning:
            reasoning, content = self._splitter.add(content, ended=bool(choice.finish_reason))
        logprobs = self._chat.token_logprobs(choice, delta.first_token)
        return TurnPiece(reasoning, content, tuple(logprobs), tuple(calls))

    def _end(self, choice: Choice) -> EndOfTurn:
        usage = self._chat.usage()
        return EndOfTurn(
            choice.finish_reason,
            usage["prompt_tokens"],
            usage["completion_tokens"],
            choice.stop_string,
        )
