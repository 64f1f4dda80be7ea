"""Requests of agents in other dialects than chat completions, which they are translated to."""

import dataclasses

from jaxrl.data.images.reader import ImageReader
from jaxrl.http.dialects.messages import chat_of_count, chat_of_messages
from jaxrl.http.dialects.messages_events import MessagesWriter
from jaxrl.http.dialects.responses import chat_of_responses, repeated_fields
from jaxrl.http.dialects.responses_events import ResponsesWriter
from jaxrl.http.dialects.turn import TurnWriter
from jaxrl.http.openai import read_object
from jaxrl.rollout.agents.chat import MAX_VALUES, MODEL, ChatRequest, chat_request

type WrittenChat = tuple[ChatRequest, TurnWriter]


def parse_messages(raw: bytes, reader: ImageReader | None = None) -> WrittenChat:
    """The request of a body of /messages, and the writer of its response.

    Raises RequestError (400) if the body is invalid.
    """
    request = chat_request(chat_of_messages(read_object(raw, max_values=MAX_VALUES)), reader)
    return dataclasses.replace(request, splits_reasoning=True), MessagesWriter(MODEL)


def parse_count(raw: bytes, reader: ImageReader | None = None) -> ChatRequest:
    """The request of a body of /messages/count_tokens. Raises RequestError (400)."""
    return chat_request(chat_of_count(read_object(raw, max_values=MAX_VALUES)), reader)


def parse_responses(raw: bytes, reader: ImageReader | None = None) -> WrittenChat:
    """The request of a body of /responses, and the writer of its response.

    Raises RequestError (400) if the body is invalid.
    """
    body = read_object(raw, max_values=MAX_VALUES)
    request = chat_request(chat_of_responses(body), reader)
    return request, ResponsesWriter(MODEL, repeated_fields(body))
