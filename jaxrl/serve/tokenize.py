"""The endpoints /tokenize and /detokenize, with vLLM's fields."""

import dataclasses
from typing import Any

from jaxrl.config.schema import key
from jaxrl.data.chat.encoding import ChatRenderer
from jaxrl.http.errors import RequestError
from jaxrl.http.openai import read_object
from jaxrl.serve.requests.fields import ModelFields, read_fields
from jaxrl.serve.requests.prompt import ServerLimits, encode_text, is_id
from jaxrl.serve.requests.request import (
    messages_in_context,
    render_messages,
    with_template_arguments,
)
from jaxrl.serve.structured.tools import check_tools


@dataclasses.dataclass(frozen=True)
class TokenizeFields(ModelFields):
    untyped = ("chat_template_kwargs", "messages", "prompt", "tools")
    add_special_tokens: bool = key(
        False, "add the tokenizer's special tokens; default: true for a prompt, false for messages"
    )
    add_generation_prompt: bool = key(True, "end messages with the header of the assistant's turn")
    return_token_strs: bool = key(False, "return the text of every token")


@dataclasses.dataclass(frozen=True)
class DetokenizeFields(ModelFields):
    untyped = ("tokens",)


def tokenize(raw: bytes, renderer: ChatRenderer, limits: ServerLimits) -> dict[str, Any]:
    """The tokens of a prompt or of messages. Raises RequestError if the body is invalid."""
    body = read_object(raw, max_values=limits.max_values)
    fields, present = read_fields(TokenizeFields, body, limits.model_names)
    if (body.get("prompt") is None) == (body.get("messages") is None):
        raise RequestError(400, "send either prompt or messages", param="prompt")
    if (text := body.get("prompt")) is None:
        messages = messages_in_context(body, limits)
        text = render_messages(
            messages,
            with_template_arguments(body, renderer),
            generation_prompt=fields.add_generation_prompt,
            tools=check_tools(body.get("tools")),
        )
    elif not isinstance(text, str):
        raise RequestError(400, "prompt must be a string", param="prompt")
    special_tokens = present.get("add_special_tokens", body.get("messages") is None)
    tokens = encode_text(text, renderer, limits, special_tokens=special_tokens).tolist()
    texts = renderer.tokenizer.convert_ids_to_tokens(tokens) if fields.return_token_strs else None
    return {
        "count": len(tokens),
        "max_model_len": limits.max_model_len,
        "tokens": tokens,
        "token_strs": texts,
    }


def detokenize(raw: bytes, renderer: ChatRenderer, limits: ServerLimits) -> dict[str, Any]:
    """The text of tokens, special ones included. Raises RequestError if the body is invalid."""
    body = read_object(raw, max_values=limits.max_values)
    read_fields(DetokenizeFields, body, limits.model_names)
    tokens = body.get("tokens")
    if not isinstance(tokens, list) or not all(is_id(t) and 0 <= t < limits.vocab for t in tokens):
        raise RequestError(
            400, f"tokens must be a list of token ids from 0 to {limits.vocab - 1}", param="tokens"
        )
    return {"prompt": renderer.decode(tokens, skip_special=False)}
