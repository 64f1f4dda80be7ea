import json
import pathlib

import numpy as np
import pytest

from jaxrl.api.images import ImageChunk
from jaxrl.api.messages import (
    SampledTokens,
    TopMatrix,
    read_training_request,
    sample_output,
    training_output,
)
from jaxrl.api.wire import as_bytes, bytes_field, number_field, read_double, read_fields
from jaxrl.http.errors import RequestError

GOLDEN = pathlib.Path(__file__).parent / "golden"


@pytest.mark.parametrize("name", ["cross_entropy", "ppo"])
def test_a_request_is_read_as_the_client_meant_it(name):
    call = read_training_request((GOLDEN / f"{name}.bin").read_bytes())
    wanted = json.loads((GOLDEN / f"{name}.json").read_text())
    assert (call.model_id, call.seq_id, call.loss) == ("s:train:0", 7, wanted["loss"])
    assert (dict(call.options), call.forward_only) == (wanted["options"], wanted["forward_only"])
    for datum, expected in zip(call.data, wanted["data"], strict=True):
        assert np.concatenate(datum.chunks).tolist() == expected.pop("tokens")
        assert {name: a.tolist() for name, a in datum.tensors.items()} == expected


def chunk(number: int, fields: bytes = b"") -> bytes:
    return bytes_field(3, bytes_field(1, bytes_field(number, fields)))


def test_an_image_is_read_with_its_number_of_tokens():
    fields = bytes_field(1, b"pixels") + bytes_field(2, "png")
    for more, expected in ((b"", None), (number_field(3, 6), 6)):
        [datum] = read_training_request(chunk(2, fields + more)).data
        assert datum.chunks == (ImageChunk(b"pixels", "png", expected),)


def sparse() -> bytes:
    tensor = bytes_field(2, b"") + number_field(3, 1)
    return bytes_field(3, bytes_field(2, bytes_field(1, "weights") + bytes_field(2, tensor)))


def text_option() -> bytes:
    return bytes_field(7, bytes_field(1, "loss_id") + bytes_field(2, bytes_field(2, "x")))


@pytest.mark.parametrize(
    ("raw", "message"),
    [
        (b"\x08", "is no request"),
        (number_field(9, 1), "field 9"),
        (chunk(3), "leave out audio"),
        (chunk(2, bytes_field(4, b"")), "override_dimensions of an image is not supported"),
        (sparse(), "send a dense one"),
        (text_option(), "must be a number"),
        (bytes_field(3, bytes_field(1, bytes_field(1, bytes_field(1, b"abc")))), "is no request"),
    ],
)
def test_what_is_not_supported_is_named(raw, message):
    with pytest.raises(RequestError, match=message) as failed:
        read_training_request(raw)
    assert failed.value.status == 400


def test_outputs_have_the_logprobs_of_each_sequence():
    logprobs = [np.array([-1, -2], np.float32), np.array([-3], np.float32)]
    fields = list(read_fields(training_output(logprobs, {"loss:sum": 1.5})))
    (_, kind), (_, record), (_, metric) = fields
    entry = dict(read_fields(as_bytes(metric)))
    assert (kind, entry[1], read_double(entry[2])) == (b"ArrayRecord", b"loss:sum", 1.5)
    record = dict(read_fields(as_bytes(record)))
    tensor = dict(read_fields(as_bytes(dict(read_fields(as_bytes(record[2])))[2])))
    assert record[3] == 2  # sequences
    assert np.frombuffer(as_bytes(tensor[1]), np.float32).tolist() == [-1, -2, -3]
    assert np.frombuffer(as_bytes(tensor[2]), np.int64).tolist() == [0, 8, 12]  # in bytes


def test_samples_have_tokens_logprobs_and_a_stop_reason():
    top = TopMatrix(np.array([[7, 8]], np.int32), np.array([[-0.5, -1]], np.float32))
    sample = SampledTokens(np.array([7], np.int32), np.array([-0.5], np.float32), "length", top)
    (_, one), (number, prompt) = read_fields(
        sample_output([sample], np.array([np.nan, -2], np.float32), None)
    )
    fields = dict(read_fields(as_bytes(one)))
    assert fields[1] == 1  # STOP_REASON_LENGTH
    assert np.frombuffer(as_bytes(fields[2]), np.int32).tolist() == [7]
    k_and_n = dict(read_fields(as_bytes(fields[4])))
    assert (k_and_n[3], k_and_n[4]) == (2, 1)
    assert number == 2
    assert np.isnan(np.frombuffer(as_bytes(prompt), np.float32)).tolist() == [True, False]
