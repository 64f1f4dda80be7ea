"""The messages of Tinker's API that clients send and read as protocol buffers.

The numbers are those of tinker_public.proto of the package `tinker` 0.38.
"""

import dataclasses
from collections.abc import Mapping, Sequence

import numpy as np

from jaxrl.api.images import Chunk, ImageChunk
from jaxrl.api.wire import (
    FieldValue,
    as_bytes,
    as_int,
    bytes_field,
    double_field,
    number_field,
    read_double,
    read_fields,
    read_packed,
)
from jaxrl.http.errors import RequestError

DTYPES = {1: np.dtype("<f4"), 2: np.dtype("<i8"), 3: np.dtype("<i4")}
FLOAT32 = 1
STOP_REASONS = {"stop": 0, "length": 1}
NO_LOGPROB = -99999.0  # of places without top logprobs; their token is 0


@dataclasses.dataclass(frozen=True)
class Datum:
    """One sequence with the tensors of its loss, each with one value per token."""

    chunks: tuple[Chunk, ...]
    tensors: Mapping[str, np.ndarray]  # by name, as sent


@dataclasses.dataclass(frozen=True)
class TrainingRequest:
    """A call of forward or forward_backward."""

    model_id: str
    seq_id: int
    data: tuple[Datum, ...]
    loss: str
    options: Mapping[str, float]
    forward_only: bool


def read_training_request(raw: bytes) -> TrainingRequest:
    """The call in a body. Raises RequestError (400) for what is malformed or not supported."""
    try:
        return _training_request(raw)
    except (ValueError, KeyError, IndexError) as error:
        raise RequestError(400, f"the body is no request of forward_backward: {error}") from error


def _training_request(raw: bytes) -> TrainingRequest:
    text = {1: "", 4: ""}
    numbers, data, options = {2: 0, 6: 0}, [], {}
    for number, value in read_fields(raw):
        if number in text:
            text[number] = as_bytes(value).decode()
        elif number in numbers:
            numbers[number] = as_int(value)
        elif number == 3:
            data.append(_datum(as_bytes(value)))
        elif number == 7:
            name, entry = _entry(value)
            options[name] = _option(name, entry)
        elif number != 5:  # the older form of 7
            raise ValueError(f"field {number} of the request is unknown")
    return TrainingRequest(text[1], numbers[2], tuple(data), text[4], options, bool(numbers[6]))


def _entry(value: FieldValue) -> tuple[str, bytes]:
    """(key, value) of an entry of a map."""
    found = dict(read_fields(as_bytes(value)))
    return as_bytes(found.get(1, b"")).decode(), as_bytes(found.get(2, b""))


def _option(name: str, raw: bytes) -> float:
    found = dict(read_fields(raw))
    if 1 not in found:
        raise RequestError(400, f"loss_fn_config[{name!r}] must be a number", param=name)
    return read_double(found[1])


def _datum(raw: bytes) -> Datum:
    chunks, tensors = [], {}
    for number, value in read_fields(raw):
        if number == 1:
            chunks.append(_chunk(as_bytes(value)))
        elif number == 2:
            name, tensor = _entry(value)
            tensors[name] = _tensor(name, tensor)
        elif number not in (3, 4):  # the origin of tokens, which no loss here reads
            raise ValueError(f"field {number} of a datum is unknown")
    return Datum(tuple(chunks), tensors)


def _chunk(raw: bytes) -> Chunk:
    [(kind, value)] = read_fields(raw)
    if kind == 2:
        return _image(as_bytes(value))
    if kind != 1:
        raise RequestError(400, "model input is tokens and images only; leave out audio")
    tokens = dict(read_fields(as_bytes(value))).get(1, b"")
    return np.frombuffer(as_bytes(tokens), np.dtype("<i4")).astype(np.int32)


def _image(raw: bytes) -> ImageChunk:
    found = dict(read_fields(raw))
    if 4 in found:
        message = "override_dimensions of an image is not supported; send it in that size"
        raise RequestError(400, message)
    expected = None if 3 not in found else as_int(found[3])
    data, name = (as_bytes(found.get(number, b"")) for number in (1, 2))
    return ImageChunk(data, name.decode(), expected)


def _tensor(name: str, raw: bytes) -> np.ndarray:
    values, dtype, shape = b"", 0, []
    for number, value in read_fields(raw):
        if number == 1:
            values = as_bytes(value)
        elif number == 3:
            dtype = as_int(value)
        elif number == 4:
            shape += read_packed(value)
        elif number == 2:
            raise RequestError(400, f"{name} is a sparse tensor; send a dense one", param=name)
        else:
            raise ValueError(f"field {number} of a tensor is unknown")
    if dtype not in DTYPES:
        raise ValueError(f"{name} has the dtype {dtype}; send float32 or int64")
    array = np.frombuffer(values, DTYPES[dtype])
    return array.reshape(shape) if shape else array


def training_output(logprobs: Sequence[np.ndarray], metrics: Mapping[str, float]) -> bytes:
    """ForwardBackwardOutput: the logprobs of each sequence's targets, and metrics."""
    ends = np.cumsum([0, *(len(one) for one in logprobs)]).astype("<i8") * 4
    values = b"".join(one.astype("<f4").tobytes() for one in logprobs)
    tensor = bytes_field(1, values) + bytes_field(2, ends.tobytes()) + number_field(3, FLOAT32)
    record = bytes_field(1, "ArrayRecord") + _map_entry(2, "logprobs", bytes_field(2, tensor))
    record += number_field(3, len(logprobs))
    parts = [_map_entry(3, name, double_field(2, value)) for name, value in metrics.items()]
    return bytes_field(1, "ArrayRecord") + bytes_field(2, record) + b"".join(parts)


def _map_entry(number: int, key: str, value: bytes) -> bytes:
    return bytes_field(number, bytes_field(1, key) + value)


@dataclasses.dataclass(frozen=True)
class TopMatrix:
    """The k most likely tokens at each of n places; NO_LOGPROB where there are none."""

    tokens: np.ndarray  # int32 [n, k]
    logprobs: np.ndarray  # float32 [n, k]

    def encoded(self) -> bytes:
        n, k = self.tokens.shape
        return (
            bytes_field(1, self.tokens.astype("<i4").tobytes())
            + bytes_field(2, self.logprobs.astype("<f4").tobytes())
            + number_field(3, k)
            + number_field(4, n)
        )


@dataclasses.dataclass(frozen=True)
class SampledTokens:
    """One sampled sequence."""

    tokens: np.ndarray  # int32 [n]
    logprobs: np.ndarray  # float32 [n]
    stop_reason: str  # "stop" | "length"
    top: TopMatrix | None = None

    def encoded(self) -> bytes:
        parts = number_field(1, STOP_REASONS[self.stop_reason])
        parts += bytes_field(2, self.tokens.astype("<i4").tobytes())
        parts += bytes_field(3, self.logprobs.astype("<f4").tobytes())
        return parts if self.top is None else parts + bytes_field(4, self.top.encoded())


def sample_output(
    samples: Sequence[SampledTokens], prompt: np.ndarray | None, top: TopMatrix | None
) -> bytes:
    """SampleResponse; `prompt` has the logprobs of the prompt's tokens, NaN where there are none.

    `top` has the most likely tokens at the places of the prompt.
    """
    parts = b"".join(bytes_field(1, one.encoded()) for one in samples)
    if prompt is not None:
        parts += bytes_field(2, prompt.astype("<f4").tobytes())
    return parts if top is None else parts + bytes_field(3, top.encoded())
