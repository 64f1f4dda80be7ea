"""Requests in other dialects than chat completions, which they are translated to."""

import dataclasses

from jaxrl.data.chat.encoding import ChatRenderer
from jaxrl.http.dialects.messages import chat_of_count, chat_of_messages
from jaxrl.http.dialects.messages_events import MessagesWriter
from jaxrl.http.dialects.responses import chat_of_responses, repeated_fields, responses_names
from jaxrl.http.dialects.responses_events import ResponsesWriter
from jaxrl.http.dialects.turn import TurnWriter
from jaxrl.http.openai import read_object
from jaxrl.json_text import Json
from jaxrl.serve.requests.prompt import ServerLimits
from jaxrl.serve.requests.request import GenerationRequest, chat_request
from jaxrl.serve.structured.tools import token_ids
from jaxrl.tool_calls.reasoning import THINK

type WrittenRequest = tuple[GenerationRequest, TurnWriter]


def parse_responses(raw: bytes, renderer: ChatRenderer, limits: ServerLimits) -> WrittenRequest:
    """The request of a body of /v1/responses, and the writer of its response.

    Raises RequestError if the body is invalid.
    """
    body = read_object(raw, max_values=limits.max_values)
    with responses_names():
        request = chat_request(chat_of_responses(body), renderer, limits)
    writer = ResponsesWriter(request.model, repeated_fields(body))
    return dataclasses.replace(request, endpoint="responses"), writer


def parse_messages(raw: bytes, renderer: ChatRenderer, limits: ServerLimits) -> WrittenRequest:
    """The request of a body of /v1/messages, and the writer of its response.

    Raises RequestError if the body is invalid.
    """
    body = read_object(raw, max_values=limits.max_values)
    request = chat_request(chat_of_messages(body), renderer, limits)
    kept = request.kept_ids | token_ids(renderer.tokenizer, thought_markers(limits))
    request = dataclasses.replace(request, endpoint="messages", kept_ids=kept)
    return request, MessagesWriter(request.model)


def count_tokens(raw: bytes, renderer: ChatRenderer, limits: ServerLimits) -> Json:
    """The response to a body of /v1/messages/count_tokens. Raises RequestError."""
    body = chat_of_count(read_object(raw, max_values=limits.max_values))
    return {"input_tokens": chat_request(body, renderer, limits).n_prompt_tokens}


def thought_markers(limits: ServerLimits) -> tuple[str, str]:
    """The markers of the model's reasoning."""
    return THINK if limits.tool_format is None else limits.tool_format.thought
