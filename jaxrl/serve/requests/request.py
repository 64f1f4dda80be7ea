"""Parses and validates request bodies, into prompts and sampling parameters for the engine."""

import dataclasses
import json
import secrets
from collections.abc import Mapping, Sequence
from typing import Any, Literal

import numpy as np

from jaxrl.config.keys import SamplingConfig
from jaxrl.data.chat.encoding import ChatRenderer, opens_thought
from jaxrl.engine.api import LogitAdjustments
from jaxrl.http.errors import RequestError
from jaxrl.http.openai import read_messages, read_object, read_stop
from jaxrl.json_text import Message
from jaxrl.serve.requests.fields import ChatFields, CompletionFields, Fields, read_fields
from jaxrl.serve.requests.logit_fields import read_adjustments
from jaxrl.serve.requests.prompt import ServerLimits, check_size, encode_text, is_id, too_long
from jaxrl.serve.structured.response_format import read_response_format
from jaxrl.serve.structured.tools import ToolJson, ToolUse, read_tools
from jaxrl.types import ImageInput, PlacedImage

DEFAULT_COMPLETION_TOKENS = 16  # max_tokens of a completion request that sets none, as OpenAI
GREEDY_BELOW = 1e-4  # smaller temperatures would overflow the logits
MAX_ARGUMENTS_LEN = 4096  # characters of chat_template_kwargs as JSON


@dataclasses.dataclass(frozen=True)
class GenerationRequest:
    """A validated request for `n` choices per prompt."""

    endpoint: Literal["chat", "completions", "messages", "responses"]
    model: str  # its name
    adapter: int  # of the engine; 0 = the base model
    prompts: tuple[np.ndarray, ...]  # int32 [prompt_len] each
    max_tokens: tuple[int, ...]  # one per prompt
    sampling: SamplingConfig
    adjustments: LogitAdjustments | None
    seed: int
    n: int
    logprobs: bool
    n_top: int  # alternatives per token whose logprobs are returned
    echo: bool
    stream: bool
    include_usage: bool
    ignore_stop: bool
    return_token_ids: bool
    tools: ToolUse | None = None
    kept_ids: frozenset[int] = frozenset()  # special tokens that the text of a response has
    images: tuple[PlacedImage, ...] = ()  # of the conversation, at their tokens
    # Most likely tokens whose logprobs are returned at each token of the prompt; None: no logprobs
    prompt_logprobs: int | None = None

    @property
    def chat(self) -> bool:
        """Whether the prompt is a conversation."""
        return self.endpoint != "completions"

    @property
    def needs_scoring(self) -> bool:
        """Whether it needs logprobs of its prompts, which sampling does not produce."""
        return (self.logprobs and self.echo) or self.prompt_logprobs is not None

    @property
    def min_tokens(self) -> int:
        return self.adjustments.min_tokens if self.adjustments else 0

    @property
    def n_prompt_tokens(self) -> int:
        return sum(map(len, self.prompts))


def parse_chat(raw: bytes, renderer: ChatRenderer, limits: ServerLimits) -> GenerationRequest:
    """The request of a body of /v1/chat/completions. Raises RequestError if it is invalid."""
    return chat_request(read_object(raw, max_values=limits.max_values), renderer, limits)


def chat_request(
    body: Mapping[str, Any], renderer: ChatRenderer, limits: ServerLimits
) -> GenerationRequest:
    """The request of the fields of a body. Raises RequestError if it is invalid."""
    fields, present = read_fields(ChatFields, body, limits.model_names)
    _check_limits(fields, limits, n_prompts=1)
    body, images = read_images(body, limits)
    messages = messages_in_context(body, limits)
    tools = read_tools(body, limits.tool_format, parallel=fields.parallel_tool_calls)
    renderer = with_template_arguments(body, renderer)
    text = render_messages(messages, renderer, tools=tools and tools.tools)
    # the template already contains the special tokens
    prompt = encode_text(text, renderer, limits, special_tokens=False)
    prompt, placed = place_images(prompt, images, renderer)
    if tools is not None:
        tools = dataclasses.replace(tools, in_thought=opens_thought(text))
    names = [name for name in ("max_completion_tokens", "max_tokens") if name in present]
    if fields.top_logprobs and not fields.logprobs:
        raise RequestError(400, "top_logprobs requires logprobs=true", param="top_logprobs")
    request = _request(
        fields,
        body,
        limits,
        [prompt],
        endpoint="chat",
        max_tokens=present[names[0]] if names else None,
        has_seed="seed" in present,
        logprobs=fields.logprobs,
        n_top=fields.top_logprobs,
        tools=tools,
        kept_ids=tools.kept_ids(renderer.tokenizer) if tools else frozenset(),
    )
    return dataclasses.replace(request, images=placed)


def read_images(
    body: Mapping[str, Any], limits: ServerLimits
) -> tuple[Mapping[str, Any], tuple[ImageInput, ...]]:
    """(the body with marks at the places of images in its messages, these images).

    Raises RequestError (400) for images that cannot be used, and if the server reads none.
    """
    messages = body.get("messages")
    if limits.images is None or not isinstance(messages, list):
        return body, ()
    try:
        marked, images = limits.images.read_messages(messages)
    except ValueError as error:
        raise RequestError(400, str(error), param="messages") from error
    return {**body, "messages": marked}, images


def place_images(
    prompt: np.ndarray, images: Sequence[ImageInput], renderer: ChatRenderer
) -> tuple[np.ndarray, tuple[PlacedImage, ...]]:
    """(the prompt with as many tokens for each image as it has, the images at their tokens)."""
    if renderer.images is None:
        return prompt, ()
    try:
        tokens = renderer.images.expand(prompt, images)
    except ValueError as error:
        raise RequestError(400, str(error), param="messages") from error
    return tokens, renderer.images.place(tokens, images)


def parse_completion(raw: bytes, renderer: ChatRenderer, limits: ServerLimits) -> GenerationRequest:
    """The request of a body of /v1/completions. Raises RequestError if it is invalid."""
    body = read_object(raw, max_values=limits.max_values)
    fields, present = read_fields(CompletionFields, body, limits.model_names)
    texts = _prompts(body.get("prompt"))
    _check_limits(fields, limits, len(texts))
    prompts = [_tokenize(text, renderer, limits) for text in texts]
    request = _request(
        fields,
        body,
        limits,
        prompts,
        endpoint="completions",
        max_tokens=present.get("max_tokens", DEFAULT_COMPLETION_TOKENS),
        has_seed="seed" in present,
        logprobs="logprobs" in present,
        n_top=fields.logprobs,
        echo=fields.echo,
    )
    if "prompt_logprobs" not in present:
        return request
    if fields.stream:
        raise RequestError(
            400, "a stream has no prompt logprobs; set stream to false", param="prompt_logprobs"
        )
    return dataclasses.replace(request, prompt_logprobs=fields.prompt_logprobs)


def _request(
    fields: Fields,
    body: Mapping[str, Any],
    limits: ServerLimits,
    prompts: list[np.ndarray],
    *,
    endpoint: Literal["chat", "completions"],
    max_tokens: int | None,
    has_seed: bool,
    logprobs: bool,
    n_top: int,
    echo: bool = False,
    tools: ToolUse | None = None,
    kept_ids: frozenset[int] = frozenset(),
) -> GenerationRequest:
    """The request of fields that both endpoints share."""
    if fields.stream and logprobs and echo:
        raise RequestError(
            400, "a stream has no prompt logprobs; set stream or echo to false", param="logprobs"
        )
    grammar = read_response_format(body.get("response_format"), limits.grammars)
    if tools is not None:
        grammar = tools.grammar(limits.grammars)
    adjustments = read_adjustments(fields, body.get("logit_bias"), grammar, limits)
    model = fields.model or limits.model_name
    return GenerationRequest(
        endpoint=endpoint,
        model=model,
        adapter=limits.model_names.index(model),
        prompts=tuple(prompts),
        max_tokens=tuple(_max_tokens(len(p), max_tokens, fields, limits) for p in prompts),
        sampling=SamplingConfig(
            temperature=0.0 if fields.temperature < GREEDY_BELOW else fields.temperature,
            top_k=min(max(fields.top_k, 0), limits.vocab),
            top_p=fields.top_p,
            min_p=fields.min_p,
            stop=read_stop(body.get("stop")),
            stop_token_ids=fields.stop_token_ids,
        ),
        adjustments=adjustments,
        seed=fields.seed if has_seed else secrets.randbits(32),
        n=fields.n,
        logprobs=logprobs,
        n_top=n_top,
        echo=echo,
        stream=fields.stream,
        include_usage=fields.stream_options.include_usage,
        ignore_stop=fields.ignore_eos,
        return_token_ids=fields.return_token_ids,
        tools=tools,
        kept_ids=kept_ids,
    )


def _check_limits(fields: Fields, limits: ServerLimits, n_prompts: int) -> None:
    """Checks that depend on the served model, in addition to types and ranges."""
    if n_prompts * fields.n > limits.n_choices:
        raise RequestError(
            400,
            f"{n_prompts} prompts with n = {fields.n} are {n_prompts * fields.n} choices and this "
            f"server accepts {limits.n_choices}; send several requests",
            param="n",
        )
    ids = fields.stop_token_ids
    if len(ids) > limits.n_stop_ids or max(ids, default=0) >= limits.vocab:
        raise RequestError(
            400,
            f"stop_token_ids accepts at most {limits.n_stop_ids} ids, each below {limits.vocab}",
            param="stop_token_ids",
        )


def _max_tokens(prompt_len: int, wanted: int | None, fields: Fields, limits: ServerLimits) -> int:
    """Tokens that the response may have; with None, the rest of the context."""
    context = limits.max_model_len
    if prompt_len == 0:
        raise RequestError(400, "the prompt is empty; send at least one token", param="prompt")
    if prompt_len >= context or (wanted or 0) > context - prompt_len:
        raise too_long(str(prompt_len), context, f"{wanted} for the response" if wanted else "")
    if wanted == 0:
        raise RequestError(400, "max_tokens is 0; request at least one token", param="max_tokens")
    n_tokens = context - prompt_len if wanted is None else wanted
    if fields.min_tokens > n_tokens:
        raise RequestError(
            400,
            f"min_tokens is {fields.min_tokens} and the response may have {n_tokens} tokens; lower "
            "min_tokens",
            param="min_tokens",
        )
    return n_tokens


def with_template_arguments(body: Mapping[str, Any], renderer: ChatRenderer) -> ChatRenderer:
    """The renderer with the `chat_template_kwargs` of a body. Raises RequestError (400)."""
    arguments, param = body.get("chat_template_kwargs"), "chat_template_kwargs"
    if arguments is None:
        return renderer
    if not isinstance(arguments, dict) or len(json.dumps(arguments)) > MAX_ARGUMENTS_LEN:
        raise RequestError(
            400, f"{param} must be an object of up to {MAX_ARGUMENTS_LEN} characters", param=param
        )
    try:
        return renderer.with_arguments(arguments)
    except ValueError as error:
        raise RequestError(400, str(error), param=param) from error


def render_messages(
    messages: list[Message],
    renderer: ChatRenderer,
    *,
    generation_prompt: bool = True,
    tools: Sequence[ToolJson] | None = None,
) -> str:
    """The text of a conversation. Raises RequestError (400) if the template rejects it."""
    try:
        return renderer.text(messages, generation_prompt=generation_prompt, tools=tools or ())
    except ValueError as error:
        param = "tools" if tools else "messages"
        raise RequestError(400, str(error), param=param) from error


def messages_in_context(body: Mapping[str, Any], limits: ServerLimits) -> list[Message]:
    """The messages of a body. Raises RequestError (400) if they are invalid or too long.

    The size of tools counts like the size of messages.
    """
    messages = body.get("messages")
    if isinstance(messages, list) and len(messages) > limits.max_model_len:
        raise too_long(f"{len(messages)} messages", limits.max_model_len)
    read = read_messages(messages)
    others = [{k: m[k] for k in m if k not in ("role", "content")} for m in read]
    n_bytes = len(json.dumps([body.get("tools"), others], ensure_ascii=False).encode())
    check_size(n_bytes + sum(len(m["content"].encode()) for m in read), limits)
    return read


def _prompts(prompt: Any) -> list[str | list[int]]:
    """One prompt or several, as text or as token ids."""
    if isinstance(prompt, str):
        return [prompt]
    if isinstance(prompt, list) and prompt:
        if all(is_id(p) for p in prompt):
            return [prompt]
        if all(isinstance(p, str) for p in prompt):
            return prompt
        if all(isinstance(p, list) and all(is_id(t) for t in p) for p in prompt):
            return prompt
    raise RequestError(
        400, "prompt must be a string, a list of token ids, or a list of either", param="prompt"
    )


def _tokenize(prompt: str | list[int], renderer: ChatRenderer, limits: ServerLimits) -> np.ndarray:
    if isinstance(prompt, str):
        return encode_text(prompt, renderer, limits, special_tokens=True)
    if prompt and not 0 <= min(prompt) <= max(prompt) < limits.vocab:
        raise RequestError(
            400, f"token ids of a prompt must be 0 to {limits.vocab - 1}", param="prompt"
        )
    return np.array(prompt, np.int32)
