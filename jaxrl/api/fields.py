"""Fields of the JSON bodies of the API, by the types of the package `tinker` 0.38."""

import base64
import dataclasses
import math
from collections.abc import Collection, Mapping
from typing import Any

import numpy as np

from jaxrl.api.adapters import PARTS, AdapterChoice
from jaxrl.api.images import Chunk, ImageChunk, place_chunks
from jaxrl.api.lanes import AdamParams
from jaxrl.config.keys.rollout import SamplingConfig
from jaxrl.data.images.placed import PlacedTokens
from jaxrl.data.images.reader import ImageReader
from jaxrl.engine.device.adjustments import N_TOP
from jaxrl.http.errors import RequestError
from jaxrl.http.fields import unknown_field
from jaxrl.http.openai import read_stop
from jaxrl.types import PlacedImage

SAMPLE_FIELDS = {  # of a sample request; values that change nothing are allowed for the others
    "num_samples",
    "prompt",
    "sampling_params",
    "sampling_session_id",
    "seq_id",
    "prompt_logprobs",
    "topk_prompt_logprobs",
    "topk_sample_logprobs",
    "prompt_logprobs_last_n",
    "base_model",
    "model_path",
    "type",
}
UNSUPPORTED = {"target_prompt_logprobs", "prompt_alt_tokens_k", "record_stability_info"}


@dataclasses.dataclass(frozen=True)
class SampleRequest:
    """A prompt, and how to sample from it."""

    tokens: np.ndarray  # int32 [prompt_len]
    n: int
    max_tokens: int
    sampling: SamplingConfig
    seed: int | None
    ignore_stop: bool
    prompt_logprobs: bool
    n_scored: int  # last tokens of the prompt that are scored
    n_top: int  # most likely tokens per sampled token
    n_top_prompt: int  # per token of the prompt
    images: tuple[PlacedImage, ...] = ()


def check_names(body: Mapping[str, Any], known: Collection[str]) -> None:
    """Raises RequestError (400) for a field that is not known."""
    for name in body:
        if name not in known:
            raise unknown_field(name, known)


def text(body: Mapping[str, Any], name: str) -> str:
    value = body.get(name)
    if not isinstance(value, str) or not value:
        raise RequestError(400, f"{name} must be a text", param=name)
    return value


def integer(body: Mapping[str, Any], name: str, default: int | None = None) -> int:
    """A field that is an integer from 0 on; `default` None: it must be there."""
    value = body.get(name)
    value = default if value is None else value
    if not isinstance(value, int) or isinstance(value, bool) or value < 0:
        raise RequestError(400, f"{name} must be an integer from 0 on", param=name)
    return value


def flag(body: Mapping[str, Any], name: str, default: bool) -> bool:
    value = body.get(name)
    value = default if value is None else value
    if not isinstance(value, bool):
        raise RequestError(400, f"{name} must be true or false", param=name)
    return value


def mapping(body: Mapping[str, Any], name: str) -> Mapping[str, Any]:
    """A field that is an object; {} without it."""
    value = body.get(name) or {}
    if not isinstance(value, Mapping):
        raise RequestError(400, f"{name} must be an object", param=name)
    return value


def number(body: Mapping[str, Any], name: str, default: float) -> float:
    value = body.get(name)
    value = default if value is None else value
    if not isinstance(value, int | float) or isinstance(value, bool) or not math.isfinite(value):
        raise RequestError(400, f"{name} must be a finite number", param=name)
    return float(value)


def adapter_choice(body: Mapping[str, Any]) -> tuple[AdapterChoice | None, int | None]:
    """(adapter, seed or None) of a create_model request. Raises RequestError (400).

    Without lora_config, or with the rank 0, all weights are trained and there is no adapter.
    """
    optimizer = mapping(body, "optimizer_config")
    if optimizer.get("type", "adamw") != "adamw":
        kind = optimizer["type"]
        message = f"the optimizer {kind!r} is not supported; leave it out for adamw"
        raise RequestError(400, message, param="optimizer_config")
    if not body.get("lora_config"):
        return None, None
    lora = mapping(body, "lora_config")
    check_names(lora, ("rank", "seed", *PARTS))
    switches = {name: flag(lora, name, True) for name in PARTS}
    seed = None if lora.get("seed") is None else integer(lora, "seed")
    rank = integer(lora, "rank")
    return (AdapterChoice(rank, **switches) if rank else None), seed


def adam_params(body: Mapping[str, Any]) -> AdamParams:
    """The step of an optim_step request. Raises RequestError (400)."""
    if "adam_params" not in body:
        message = "only adam_params are supported, as models are created with adamw"
        raise RequestError(400, message, param="optimizer_params")
    given = mapping(body, "adam_params")
    fields = dataclasses.asdict(AdamParams())
    check_names(given, fields)
    params = AdamParams(**{name: number(given, name, fields[name]) for name in fields})
    for name in ("beta1", "beta2"):
        if not 0 <= getattr(params, name) < 1:
            raise RequestError(400, f"{name} must be from 0 on and below 1", param=name)
    for name in ("learning_rate", "eps", "weight_decay", "grad_clip_norm"):
        if getattr(params, name) < 0:
            raise RequestError(400, f"{name} must be at least 0", param=name)
    return params


def prompt_tokens(
    body: Mapping[str, Any], n_vocab: int, reader: ImageReader | None
) -> PlacedTokens:
    """The tokens of a ModelInput, with its images. Raises RequestError (400) for other input."""
    chunks = mapping(body, "prompt").get("chunks") or []
    found = [_chunk(chunk, n_vocab) for chunk in chunks]
    placed = place_chunks(found, reader, "the prompt", "prompt")
    if not len(placed):
        raise RequestError(400, "the prompt has no tokens", param="prompt")
    return placed


def _chunk(chunk: Any, n_vocab: int) -> Chunk:
    """A chunk of a prompt, by its type."""
    kind = chunk.get("type") if isinstance(chunk, Mapping) else None
    if kind == "image":
        check_names(chunk, ("type", "data", "format", "expected_tokens"))
        expected = chunk.get("expected_tokens")
        n = None if expected is None else integer(chunk, "expected_tokens")
        try:
            data = base64.b64decode(text(chunk, "data"), validate=True)
        except ValueError as error:
            raise RequestError(400, "the data of an image is no base64", param="prompt") from error
        return ImageChunk(data, text(chunk, "format"), n)
    if kind != "encoded_text":
        advice = "send the image as an ImageChunk" if kind == POINTER else "leave out the others"
        message = f"a chunk of the type {kind!r} is not supported, only tokens and images; {advice}"
        raise RequestError(400, message, param="prompt")
    tokens = chunk.get("tokens") or []
    if not all(isinstance(token, int) and 0 <= token < n_vocab for token in tokens):
        message = f"a token of the prompt is not within 0 to {n_vocab - 1}"
        raise RequestError(400, message, param="prompt")
    return np.asarray(tokens, np.int32)


def sample_request(
    body: Mapping[str, Any],
    *,
    n_vocab: int,
    max_len: int,
    max_samples: int,
    reader: ImageReader | None = None,
) -> SampleRequest:
    """`reader` reads images. Raises RequestError (400) for what is invalid or not supported."""
    check_names(body, SAMPLE_FIELDS | UNSUPPORTED)
    for name in UNSUPPORTED:
        if body.get(name):
            raise RequestError(400, f"{name} is not supported; leave it out", param=name)
    prompt = prompt_tokens(body, n_vocab, reader)
    tokens = prompt.tokens
    room = max_len - len(tokens)
    params = mapping(body, "sampling_params")
    check_names(params, ("max_tokens", "seed", "stop", "temperature", "top_k", "top_p"))
    max_tokens = integer(params, "max_tokens", max(room, 1))
    if not 0 < max_tokens <= room:
        raise RequestError(
            400,
            f"{len(tokens)} tokens of the prompt and max_tokens={max_tokens} are not within 1 to "
            f"{max_len} tokens together",
            param="max_tokens",
        )
    n = integer(body, "num_samples", 1)
    if not 0 < n <= max_samples:
        raise RequestError(400, f"num_samples={n} is not within 1 to {max_samples}")
    tops = {name: integer(body, name, 0) for name in ("topk_sample_logprobs", TOP_PROMPT)}
    for name, top in tops.items():
        if top > N_TOP:
            raise RequestError(400, f"{name}={top} is above {N_TOP}", param=name)
    scores_prompt = flag(body, "prompt_logprobs", False)
    if prompt.images and (scores_prompt or tops[TOP_PROMPT]):
        raise RequestError(
            400,
            "logprobs of a prompt with images are not supported; call forward of a training client "
            "with cross_entropy",
            param="prompt_logprobs",
        )
    sampling, ignore_stop = _sampling(params)
    n_scored = integer(body, "prompt_logprobs_last_n", len(tokens))
    return SampleRequest(
        tokens,
        n,
        max_tokens,
        sampling,
        None if params.get("seed") is None else integer(params, "seed"),
        ignore_stop,
        scores_prompt,
        n_scored,
        tops["topk_sample_logprobs"],
        tops[TOP_PROMPT],
        prompt.images,
    )


TOP_PROMPT = "topk_prompt_logprobs"
POINTER = "image_asset_pointer"


def _sampling(params: Mapping[str, Any]) -> tuple[SamplingConfig, bool]:
    """(sampling parameters, whether no token ends a response)."""
    temperature, top_p = number(params, "temperature", 1.0), number(params, "top_p", 1.0)
    if temperature < 0 or not 0 < top_p <= 1:
        message = f"temperature={temperature} must be at least 0, and top_p={top_p} within 0 and 1"
        raise RequestError(400, message, param="sampling_params")
    top_k = -1 if params.get("top_k") in (None, -1) else integer(params, "top_k")
    stop = params.get("stop")
    strings: tuple[str, ...] = ()
    ids: tuple[int, ...] = ()
    if isinstance(stop, list) and stop and all(type(token) is int and token >= 0 for token in stop):
        ids = tuple(stop)
    else:
        strings = read_stop(stop)
    sampling = SamplingConfig(
        temperature=temperature,
        top_k=max(top_k, 0),
        top_p=top_p,
        stop=strings,
        stop_token_ids=ids,
    )
    return sampling, stop == []
