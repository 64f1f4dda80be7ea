"""A training server in a thread, and a client that speaks HTTP without the package `tinker`."""

import base64
import contextlib
import dataclasses
from pathlib import Path
from typing import Any

import httpx2 as httpx
import numpy as np

from jaxrl.api.__main__ import load_model, make_service, server
from jaxrl.api.images import ImageChunk
from jaxrl.api.options import read
from jaxrl.api.store import Store
from jaxrl.api.wire import as_bytes, bytes_field, number_field, read_double, read_fields
from jaxrl.http.listener import listener, url
from tests.serve.serve_cases import running

DTYPES = {"f": 1, "i": 2}


def arguments(model_folder, run_dir, *more):
    return [
        f"--model={model_folder}",
        "--name=tiny",
        f"--run-dir={run_dir}",
        "--port=0",
        "--max-len=128",
        "--max-rank=4",
        "--slots=2",
        "--max-models=24",
        "--config.rollout.max_num_seqs=4",
        "--config.rollout.max_num_batched_tokens=128",
        "--config.learner.token_budget=256",  # one lane of 256 tokens, or up to two of 128
        "--config.learner.halvings=1",
        "--config.mesh.fsdp=1",
        *more,
    ]


@contextlib.contextmanager
def serving(options, run, model):
    """The URL of a server with this loaded model, on the run folder of the options."""
    service = make_service(options, run, Store(Path(options.run_dir)), model)
    with (
        listener(options.host, 0) as listening,
        running(server(service, options), listening),
    ):
        yield url(listening)


def loaded(argv):
    """(options, config, model) of a command line."""
    options, run = read(argv)
    return options, run, load_model(options, run)


def encoded(model: str, seq_id: int, loss: str, data, *, forward_only=False) -> bytes:
    """A request of forward_backward; `data` are (tokens or chunks, tensors by name)."""
    parts = bytes_field(1, model) + number_field(2, seq_id) + bytes_field(4, loss)
    parts += number_field(6, int(forward_only))
    for tokens, tensors in data:
        datum = b"".join(bytes_field(1, encoded_chunk(chunk)) for chunk in chunks(tokens))
        for name, values in tensors.items():
            wide = np.asarray(values)
            wide = wide.astype(np.float32 if wide.dtype.kind == "f" else np.int64)
            tensor = bytes_field(1, wide.tobytes()) + number_field(3, DTYPES[wide.dtype.kind])
            datum += bytes_field(2, bytes_field(1, name) + bytes_field(2, tensor))
        parts += bytes_field(3, datum)
    return parts


def chunks(tokens) -> list:
    """A model input as chunks: lists of tokens, and images."""
    mixed = isinstance(tokens, list) and not all(isinstance(token, int) for token in tokens)
    return tokens if mixed else [tokens]


def encoded_chunk(chunk) -> bytes:
    if not isinstance(chunk, ImageChunk):
        return bytes_field(1, bytes_field(1, np.asarray(chunk, np.int32).tobytes()))
    fields = bytes_field(1, chunk.data) + bytes_field(2, chunk.format)
    if chunk.expected_tokens is not None:
        fields += number_field(3, chunk.expected_tokens)
    return bytes_field(2, fields)


def json_chunk(chunk) -> dict:
    if not isinstance(chunk, ImageChunk):
        return {"type": "encoded_text", "tokens": list(map(int, chunk))}
    data = base64.b64encode(chunk.data).decode()
    fields = {"type": "image", "data": data, "format": chunk.format}
    return fields | {"expected_tokens": chunk.expected_tokens}


@dataclasses.dataclass
class Client:
    """One client; `key` is its API key."""

    base: str
    key: str
    session: str = ""
    seq_ids: dict[str, int] = dataclasses.field(default_factory=dict)

    def send(self, path: str, body: Any = None, method: str = "POST") -> httpx.Response:
        headers, content = {"X-API-Key": self.key}, None
        if isinstance(body, bytes):
            headers["Content-Type"] = "application/x-protobuf"
            body, content = None, body
        address = f"{self.base}/api/v1/{path}"
        return httpx.request(
            method, address, headers=headers, timeout=120, json=body, content=content
        )

    def call(self, path: str, body: Any) -> Any:
        response = self.send(path, body)
        assert response.status_code == 200, response.text
        return response.json()

    def open(self) -> "Client":
        self.session = self.call("create_session", {"tags": [], "user_metadata": {}})["session_id"]
        return self

    def wait(self, future: Any) -> httpx.Response:
        """The result of a request that does not fail."""
        response = self.poll(future)
        assert b'{"error": ' not in response.content, response.text
        return response

    def poll(self, future: Any) -> httpx.Response:
        """The response when a request has ended."""
        while True:
            response = self.send("retrieve_future", {"request_id": future["request_id"]})
            assert response.status_code == 200, response.text
            if b'"try_again"' not in response.content:
                return response

    def failure(self, future: Any) -> Any:
        """The error of a request that fails."""
        failed = self.poll(future).json()
        assert failed.keys() == {"error", "category"}
        return failed

    def create(self, number: int, rank: int = 4, **lora) -> str:
        config = {"rank": rank, "seed": 0} | lora
        body = {"session_id": self.session, "model_seq_id": number, "base_model": "tiny"}
        made = self.wait(self.call("create_model", body | {"lora_config": config}))
        return made.json()["model_id"]

    def next_id(self, model: str) -> int:
        self.seq_ids[model] = self.seq_ids.get(model, 0) + 1
        return self.seq_ids[model]

    def train(self, model: str, loss: str, data, **options) -> Any:
        """The future of forward_backward."""
        body = encoded(model, self.next_id(model), loss, data, **options)
        return self.call("forward_backward", body)

    def model_call(self, path: str, model: str, /, **fields) -> Any:
        """The future of a request of a model."""
        return self.call(path, {"model_id": model, "seq_id": self.next_id(model)} | fields)

    def step(self, model: str, **adam) -> Any:
        return self.model_call("optim_step", model, adam_params={"learning_rate": 0.01} | adam)

    def sampler(self, model: str, number: int) -> str:
        """A sampling session with the current weights of a model."""
        saved = self.model_call("save_weights_for_sampler", model, sampling_session_seq_id=number)
        return self.wait(saved).json()["sampling_session_id"]

    def sample(self, sampler: str, seq_id: int, tokens, **fields) -> Any:
        """The future of a sample request; `tokens` or chunks are the prompt."""
        params = {"max_tokens": 6, "seed": 3} | fields.pop("sampling_params", {})
        prompt = {"chunks": list(map(json_chunk, chunks(tokens)))}
        body = {"sampling_session_id": sampler, "seq_id": seq_id, "prompt": prompt}
        return self.call("asample", body | {"sampling_params": params} | fields)


def loss_sum(response: httpx.Response) -> float:
    """The metric loss:sum of a result of forward_backward."""
    metrics = [value for number, value in read_fields(response.content) if number == 3]
    [entry] = [dict(read_fields(as_bytes(metric))) for metric in metrics]
    return read_double(entry[2])


def sampled(response: httpx.Response) -> list[tuple[list[int], list[float], int]]:
    """(tokens, logprobs, stop reason) of each sequence of a result of asample."""
    sequences = [value for number, value in read_fields(response.content) if number == 1]
    found = []
    for sequence in sequences:
        fields = dict(read_fields(as_bytes(sequence)))
        tokens = np.frombuffer(as_bytes(fields[2]), np.int32).tolist()
        logprobs = np.frombuffer(as_bytes(fields[3]), np.float32).tolist()
        found.append((tokens, logprobs, fields[1]))
    return found


def prompt_logprobs(response: httpx.Response) -> np.ndarray:
    return np.frombuffer(as_bytes(dict(read_fields(response.content))[2]), np.float32)
