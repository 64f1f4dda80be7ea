"""The body of a request: read, checked, and turned into what the engine is asked for."""

import dataclasses
import secrets
from collections.abc import Mapping
from typing import Any

import numpy as np

from jaxrl.config.keys import SamplingConfig
from jaxrl.config.schema import build, flatten, key, keys, nearest, to_dict
from jaxrl.data.chat import ChatRenderer
from jaxrl.serve.errors import Refused
from jaxrl.serve.score import N_TOP

COMPLETION_TOKENS = 16  # of a completion that names no max_tokens, as OpenAI has it
GREEDY_BELOW = 1e-4  # temperatures that would overflow the logits
# Fields that other servers know and this one does not, with the values that ask for nothing.
WITHOUT_EFFECT: dict[str, tuple[Any, ...]] = {
    "best_of": (1,),
    "frequency_penalty": (0,),
    "function_call": ("none", "auto"),
    "functions": ([],),
    "logit_bias": (),
    "modalities": (["text"],),
    "presence_penalty": (0,),
    "repetition_penalty": (1,),
    "response_format": (),
    "response_format.type": ("text",),
    "skip_special_tokens": (True,),
    "suffix": ("",),
    "tool_choice": ("none", "auto"),
    "tools": ([],),
}
IGNORED = (
    "metadata",
    "parallel_tool_calls",
    "prompt_cache_key",
    "safety_identifier",
    "service_tier",
    "store",
    "user",
)
BY_HAND = ("messages", "prompt", "stop")  # fields that are of several types


@dataclasses.dataclass(frozen=True)
class StreamOptions:
    include_usage: bool = key(False, "a last chunk has the token counts")


@dataclasses.dataclass(frozen=True)
class Body:
    """Fields that both endpoints have: OpenAI's, then those that vLLM's clients add."""

    model: str = key("", "name of the model served; '' = that one")
    max_tokens: int = key(
        0, "tokens of a response; absent = to the end of the context, or 16", ge=0
    )
    temperature: float = key(1.0, "the logits are divided by it; 0 = greedy", ge=0)
    top_p: float = key(1.0, "only the likeliest tokens that reach this probability", gt=0, le=1)
    n: int = key(1, "responses to each prompt", ge=1)
    seed: int = key(0, "of the random numbers; absent = another one each time")
    stream: bool = key(False, "send the response piece by piece")
    stream_options: StreamOptions = dataclasses.field(default_factory=StreamOptions)
    top_k: int = key(0, "only the k likeliest tokens; 0 or -1 = off", ge=-1)
    min_p: float = key(
        0.0, "only tokens of this fraction of the likeliest one's probability", ge=0, le=1
    )
    stop_token_ids: tuple[int, ...] = key((), "tokens that end a response", ge=0)
    ignore_eos: bool = key(False, "go on to max_tokens whatever is sampled")
    return_token_ids: bool = key(False, "the tokens of prompt and response come with the answer")


@dataclasses.dataclass(frozen=True)
class ChatBody(Body):
    max_completion_tokens: int = key(0, "OpenAI's newer name of max_tokens", ge=0)
    logprobs: bool = key(False, "the logprob of every token comes with the answer")
    top_logprobs: int = key(0, "and those of this many likeliest", ge=0, le=N_TOP)


@dataclasses.dataclass(frozen=True)
class CompletionBody(Body):
    logprobs: int = key(
        0,
        "the logprob of every token comes with the answer, and those of this many likeliest",
        ge=0,
        le=N_TOP,
    )
    echo: bool = key(False, "the text of the prompt comes before that of the response")


@dataclasses.dataclass(frozen=True)
class Limits:
    """What the served model can do."""

    name: str
    context: int  # tokens of prompt and response together
    vocab: int
    n_stop: int  # stop token ids beside the model's own
    n_choices: int  # responses that may be under way


@dataclasses.dataclass(frozen=True)
class Asked:
    """A checked request: `n` responses to each of `prompts`."""

    chat: bool
    prompts: tuple[np.ndarray, ...]  # int32 [prompt_len] each
    max_tokens: tuple[int, ...]  # one a prompt
    sampling: SamplingConfig
    seed: int
    n: int
    logprobs: bool
    n_top: int  # likeliest tokens whose logprobs come with that of each token
    echo: bool
    stream: bool
    include_usage: bool
    ignore_stop: bool
    return_token_ids: bool

    @property
    def scored(self) -> bool:
        """Whether logprobs are asked for that the engine does not give."""
        return self.logprobs and (self.n_top > 0 or self.echo)

    @property
    def n_prompt_tokens(self) -> int:
        return sum(map(len, self.prompts))


def read_chat(body: Any, renderer: ChatRenderer, limits: Limits) -> Asked:
    """Raises Refused for whatever is wrong with the body."""
    fields, given = _fields(ChatBody, body, limits)
    messages = body.get("messages")
    if not isinstance(messages, list) or not messages:
        raise Refused(400, "messages must be a list of one message or more", param="messages")
    try:
        prompt = renderer.render([_message(m) for m in messages])
    except ValueError as problem:  # of the template
        raise Refused(400, str(problem), param="messages") from problem
    named = [name for name in ("max_completion_tokens", "max_tokens") if name in given]
    wanted = given[named[0]] if named else None
    return _asked(fields, body, given, limits, [prompt], wanted, chat=True)


def read_completion(body: Any, renderer: ChatRenderer, limits: Limits) -> Asked:
    """Raises Refused for whatever is wrong with the body."""
    fields, given = _fields(CompletionBody, body, limits)
    prompts = [_tokens(p, renderer, limits.vocab) for p in _prompts(body.get("prompt"))]
    wanted = given.get("max_tokens", COMPLETION_TOKENS)
    return _asked(fields, body, given, limits, prompts, wanted, chat=False)


def _fields(schema: type, body: Any, limits: Limits) -> tuple[Any, dict[str, Any]]:
    """(the fields that have a type, those of them that are given)."""
    if not isinstance(body, Mapping):
        raise Refused(400, "the body of the request must be a JSON object")
    known = keys(schema)
    given = {}
    for name, value in flatten({k: v for k, v in body.items() if k not in BY_HAND}).items():
        field = name.split(".")[0]
        if value is None or field in IGNORED or value in WITHOUT_EFFECT.get(name, ()):
            continue
        if field in WITHOUT_EFFECT:
            raise Refused(400, f"{field} is not offered by this server; leave it out", param=field)
        if name not in known:
            guess = nearest(name, known)
            hint = f"; did you mean {guess}?" if guess else ""
            raise Refused(400, f"there is no field {name}{hint}", param=name)
        given[name] = value
    fields, problems = build(schema, flatten(to_dict(schema())) | given)
    if problems:
        raise Refused(400, "; ".join(problems))
    if fields.model not in ("", limits.name):
        raise Refused(
            404,
            f"the model {fields.model!r} is not served here; {limits.name!r} is",
            param="model",
            code="model_not_found",
        )
    return fields, given


def _asked(
    fields: Any,
    body: Mapping[str, Any],
    given: Mapping[str, Any],
    limits: Limits,
    prompts: list[np.ndarray],
    wanted: int | None,
    *,
    chat: bool,
) -> Asked:
    _check(fields, limits, len(prompts))
    echo = not chat and fields.echo
    logprobs, n_top = _logprobs(fields, given, echo=echo, chat=chat)
    temperature = 0.0 if fields.temperature < GREEDY_BELOW else fields.temperature
    return Asked(
        chat=chat,
        prompts=tuple(prompts),
        max_tokens=tuple(_max_tokens(len(p), wanted, limits.context) for p in prompts),
        sampling=SamplingConfig(
            temperature=temperature,
            top_k=min(max(fields.top_k, 0), limits.vocab),
            top_p=fields.top_p,
            min_p=fields.min_p,
            stop=_stop(body.get("stop")),
            stop_token_ids=fields.stop_token_ids,
        ),
        seed=fields.seed if "seed" in given else secrets.randbits(32),
        n=fields.n,
        logprobs=logprobs,
        n_top=n_top,
        echo=echo,
        stream=fields.stream,
        include_usage=fields.stream_options.include_usage,
        ignore_stop=fields.ignore_eos,
        return_token_ids=fields.return_token_ids,
    )


def _check(fields: Any, limits: Limits, n_prompts: int) -> None:
    """What the types and ranges of the fields do not say."""
    if n_prompts * fields.n > limits.n_choices:
        raise Refused(
            400,
            f"{n_prompts} prompts with n = {fields.n} are {n_prompts * fields.n} responses, this server "
            f"takes {limits.n_choices}; send several requests",
            param="n",
        )
    ids = fields.stop_token_ids
    if len(ids) > limits.n_stop or max(ids, default=0) >= limits.vocab:
        raise Refused(
            400,
            f"stop_token_ids may be {limits.n_stop} at most, each below {limits.vocab}",
            param="stop_token_ids",
        )


def _logprobs(fields: Any, given: Mapping[str, Any], *, echo: bool, chat: bool) -> tuple[bool, int]:
    """(whether logprobs are asked for, of how many likeliest tokens too)."""
    wanted = fields.logprobs if chat else "logprobs" in given
    n_top = fields.top_logprobs if chat else fields.logprobs
    if n_top and not wanted:
        raise Refused(400, "top_logprobs needs logprobs to be true", param="top_logprobs")
    if fields.stream and wanted and (n_top or echo):
        raise Refused(
            400,
            "a stream has no logprobs of other tokens or of the prompt; set stream to false",
            param="logprobs",
        )
    return wanted, n_top


def _max_tokens(prompt_len: int, wanted: int | None, context: int) -> int:
    """Tokens that the response may have; None: all that the context has room for."""
    if prompt_len == 0:
        raise Refused(400, "the prompt has no token; send some text", param="prompt")
    if prompt_len >= context or (wanted or 0) > context - prompt_len:
        also = f" and {wanted} for the response" if wanted else ""
        raise Refused(
            400,
            f"this model's context is {context} tokens; the request has {prompt_len} in the prompt{also}; "
            "shorten the prompt or lower max_tokens",
            code="context_length_exceeded",
        )
    if wanted == 0:
        raise Refused(400, "max_tokens is 0; ask for one token or more", param="max_tokens")
    return context - prompt_len if wanted is None else wanted


def _message(message: Any) -> dict[str, str]:
    """Role and text of a chat message; the text may come in parts."""
    role, content = (
        (message.get("role"), message.get("content"))
        if isinstance(message, Mapping)
        else (None, None)
    )
    if isinstance(content, list):
        parts = [
            p.get("text") if isinstance(p, Mapping) and p.get("type") == "text" else None
            for p in content
        ]
        content = None if None in parts else "".join(map(str, parts))
    if not isinstance(role, str) or not isinstance(content, str):
        raise Refused(
            400,
            "a message needs a role and a content of text; other content is not offered",
            param="messages",
        )
    return {"role": role, "content": content}


def _prompts(prompt: Any) -> list[str | list[int]]:
    """One prompt or several, as text or as token ids."""
    if isinstance(prompt, str):
        return [prompt]
    if isinstance(prompt, list) and prompt:
        if all(_is_id(p) for p in prompt):
            return [prompt]
        if all(isinstance(p, str) for p in prompt):
            return prompt
        if all(isinstance(p, list) and all(_is_id(t) for t in p) for p in prompt):
            return prompt
    raise Refused(
        400, "prompt must be a text, a list of token ids, or a list of one of these", param="prompt"
    )


def _is_id(value: Any) -> bool:
    return isinstance(value, int) and not isinstance(value, bool)


def _tokens(prompt: str | list[int], renderer: ChatRenderer, vocab: int) -> np.ndarray:
    ids = renderer.tokenizer(prompt)["input_ids"] if isinstance(prompt, str) else prompt
    if ids and not 0 <= min(ids) <= max(ids) < vocab:
        raise Refused(400, f"token ids of a prompt must be 0 to {vocab - 1}", param="prompt")
    return np.array(ids, np.int32)


def _stop(stop: Any) -> tuple[str, ...]:
    strings = [stop] if isinstance(stop, str) else [] if stop is None else stop
    if not isinstance(strings, list) or not all(isinstance(s, str) and s for s in strings):
        raise Refused(400, "stop must be a text or a list of texts, none empty", param="stop")
    return tuple(strings)
