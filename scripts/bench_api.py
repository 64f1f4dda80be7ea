"""Training API: useful tokens per CPU-second of the server, by the number of clients.

    python scripts/bench_api.py clients --model=FOLDER --counts=1,2,4,8
    python scripts/bench_api.py clients --model=FOLDER --counts=1,2,4,8 --sequences=4 --sampled=32
    python scripts/bench_api.py memory --model=FOLDER
    python scripts/bench_api.py chip --model=Qwen2.5-7B-Instruct --topology=h100:1 --len=512

`clients` starts a server for each number of clients. Each client trains its own adapter: a step is
forward_backward with a few random sequences, and optim_step. With --sampled=K a step is one of RL:
save_weights_for_sampler, asample of K tokens for each sequence, whose prompt has the other tokens,
then forward_backward with importance_sampling on the samples, and optim_step.
The clients run one after the other, then all at the same time, after rounds of 1, 2, 4, ... clients
that compile the programs. A token is useful if it is in a sequence; one that was sampled counts
once. The CPU time is that of the server alone, and each client keeps its connection.
Format of a line:

    N clients  one after the other A tokens/CPU-s  together B tokens/CPU-s  B/A x

`memory` compiles the gradients of one lane as long as the token budget, and of 8 lanes with as many
tokens together and 8 adapters, and prints what each needs next to the base model's weights.

`chip` compiles the gradients of 1, 2, 4, ... clients with a lane of --len tokens each for a chip
that need not be attached (the compilers of `python -m jaxrl.plan`), and prints their times with
kernels one after the other at the chip's peak rates. --model may be a name in configs/shapes, of
which it has the first --layers.
Format of a line:

    N clients of T tokens: A ms at peak rates, B TFLOP, C GB, N * (A of one client) / A x
"""

import argparse
import dataclasses
import functools
import http.client
import json
import math
import os
import re
import subprocess
import sys
import tempfile
import threading
import time
import urllib.error
import urllib.request
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np

from jaxrl.api.wire import as_bytes, bytes_field, number_field, read_fields
from jaxrl.json_text import parse_json

FLOAT32, INT64 = 1, 2  # among the dtypes of tensors
IDLE_CPU_S = 0.1  # per second
LANE_AXES = (None, "batch", "time")  # of the batch of a dispatch


def main() -> None:
    args = parse_args()
    if args.command != "clients":
        {"memory": measure_memory, "chip": measure_chip}[args.command](args)
        return
    for count in map(int, args.counts.split(",")):
        measure_clients(args, count)


def parse_args() -> argparse.Namespace:
    parser = argparse.ArgumentParser(formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("command", choices=("clients", "memory", "chip"))
    parser.add_argument("--model", required=True, help="folder of a model")
    parser.add_argument("--topology", default="h100:1", help="as of jaxrl.plan; of its first chip")
    parser.add_argument("--layers", type=int, default=4, help="layers that `chip` compiles")
    parser.add_argument("--counts", default="1,2,4,8", help="numbers of clients")
    parser.add_argument("--steps", type=int, default=20, help="steps of a client")
    parser.add_argument("--sequences", type=int, default=1, help="sequences of a step")
    parser.add_argument("--len", type=int, default=60, help="tokens of a sequence")
    parser.add_argument("--sampled", type=int, default=0, help="sampled tokens of a sequence")
    parser.add_argument("--rank", type=int, default=8)
    parser.add_argument("--budget", type=int, default=1024, help="learner.token_budget")
    return parser.parse_args()


def measure_clients(args: argparse.Namespace, count: int) -> None:
    """Prints the line of one number of clients."""
    with tempfile.TemporaryDirectory() as folder:
        command = [sys.executable, "-m", "jaxrl.api", f"--model={args.model}", "--name=bench"]
        command += [f"--run-dir={folder}", "--port=0", f"--max-len={args.budget}"]
        n_sampled = count * args.sequences if args.sampled else 2
        command += [f"--max-rank={args.rank}", f"--config.rollout.max_num_seqs={n_sampled}"]
        with subprocess.Popen(command, stdout=subprocess.PIPE, text=True) as server:
            try:
                assert server.stdout is not None
                address = next(filter(None, map(find_address, server.stdout)))
                wait_until_open(address)
                clients = [Client(address, f"tml-{i}", args) for i in range(count)]
                compile_sizes(clients, args.steps)
                wait_until_idle(server.pid)  # it compiles further ones in the background
                serial = cpu_s(server.pid)
                for client in clients:
                    client.train(args.steps)
                parallel = cpu_s(server.pid)
                together(clients, args.steps)
                end = cpu_s(server.pid)
            finally:
                server.terminate()
    tokens = count * args.steps * args.sequences * args.len
    rates = tokens / (parallel - serial), tokens / (end - parallel)
    print(
        f"{count} clients  one after the other {rates[0]:.0f} tokens/CPU-s  together "
        f"{rates[1]:.0f} tokens/CPU-s  {rates[1] / rates[0]:.2f} x",
        flush=True,
    )


def find_address(line: str) -> str | None:
    found = re.search(r"http://\S+:\d+", line)
    return found and found.group()


def wait_until_open(address: str) -> None:
    """Returns when the server accepts connections."""
    while True:
        try:
            urllib.request.urlopen(f"{address}/api/v1/healthz", timeout=60).close()
        except urllib.error.HTTPError:  # it wants a key
            return
        except urllib.error.URLError:
            time.sleep(0.1)
        else:
            return


def wait_until_idle(pid: int) -> None:
    """Returns after a second without CPU time."""
    before = -math.inf
    while (now := cpu_s(pid)) - before > IDLE_CPU_S:
        before = now
        time.sleep(1.0)


def cpu_s(pid: int) -> float:
    """CPU time of a process so far, with all its threads."""
    fields = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()
    return (int(fields[11]) + int(fields[12])) / os.sysconf("SC_CLK_TCK")


def compile_sizes(clients: Sequence["Client"], n_steps: int) -> None:
    """Runs 1, 2, 4, ... and all clients, whose dispatches have other sizes."""
    size = 1
    while size < len(clients):
        together(clients[:size], n_steps)
        size *= 2
    together(clients, n_steps)


def together(clients: Sequence["Client"], n_steps: int) -> None:
    threads = [threading.Thread(target=client.train, args=(n_steps,)) for client in clients]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()


class Client:
    """A client with one model in training."""

    def __init__(self, address: str, key: str, args: argparse.Namespace):
        self._key, self._seq_id, self._n_samples, self._args = key, 0, 0, args
        # Kept open, as the package tinker does.
        self._connection = http.client.HTTPConnection(address.rpartition("/")[2], timeout=600)
        self._rng = np.random.default_rng(int(key.rpartition("-")[2]))
        self._data = b"".join(_datum(self._rng, args.len) for _ in range(args.sequences))
        session = self._call("create_session", {})["session_id"]
        body = {"session_id": session, "model_seq_id": 0, "base_model": "bench"}
        body |= {"lora_config": {"rank": args.rank, "seed": 0}}
        self._model = self._wait(self._call("create_model", body), "model_id")

    def train(self, n_steps: int) -> None:
        for _ in range(n_steps):
            loss, data = "cross_entropy", self._data
            if self._args.sampled:
                loss, data = "importance_sampling", self._sample()
            body = bytes_field(1, self._model) + number_field(2, self._next())
            futures = [self._call("forward_backward", body + bytes_field(4, loss) + data)]
            step = {"adam_params": {"learning_rate": 1e-4}}
            futures += [self._call("optim_step", self._of_model() | step)]
            self._wait(futures[0])
            self._wait(futures[1], "metrics")

    def _sample(self) -> bytes:
        """Sequences that the current weights sample, as data of forward_backward."""
        args = self._args
        self._n_samples += 1
        saved = self._of_model() | {"sampling_session_seq_id": self._n_samples, "kind": "inflight"}
        future = self._call("save_weights_for_sampler", saved)
        body = {"sampling_session_id": self._wait(future, "sampling_session_id"), "seq_id": 0}
        prompt = self._rng.integers(3, 250, args.len - args.sampled)
        body["prompt"] = {"chunks": [{"type": "encoded_text", "tokens": prompt.tolist()}]}
        params = {"max_tokens": args.sampled, "seed": self._n_samples}
        body |= {"num_samples": args.sequences, "sampling_params": params}
        raw = self._result(self._call("asample", body))
        samples = [value for number, value in read_fields(raw) if number == 1]
        assert len(samples) == args.sequences
        return b"".join(_sampled_datum(prompt, as_bytes(sample)) for sample in samples)

    def _next(self) -> int:
        self._seq_id += 1
        return self._seq_id

    def _of_model(self) -> dict[str, Any]:
        """The first fields of a request of the model."""
        return {"model_id": self._model, "seq_id": self._next()}

    def _call(self, path: str, body: Any) -> Any:
        return parse_json(self._send(path, body).decode())

    def _send(self, path: str, body: Any) -> bytes:
        is_json = not isinstance(body, bytes)
        kind = "application/json" if is_json else "application/x-protobuf"
        headers = {"X-API-Key": self._key, "Content-Type": kind}
        raw = json.dumps(body).encode() if is_json else body
        while True:
            try:
                self._connection.request("POST", f"/api/v1/{path}", raw, headers)
                with self._connection.getresponse() as response:
                    found = response.read()
            except ConnectionError:  # the server closed it while it was idle
                self._connection.close()
                continue
            assert response.status == 200, found
            return found

    def _wait(self, future: Any, field: str = "") -> Any:
        """A field of the result of a request, once it has ended."""
        raw = self._result(future)
        return parse_json(raw.decode())[field] if field else None

    def _result(self, future: Any) -> bytes:
        while True:
            raw = self._send("retrieve_future", {"request_id": future["request_id"]})
            assert b'{"error": ' not in raw, raw
            if b'"try_again"' not in raw:
                return raw


def _datum(rng: np.random.Generator, n: int) -> bytes:
    return _data_field(rng.integers(3, 250, n), target_tokens=rng.integers(3, 250, n))


def _sampled_datum(prompt: np.ndarray, sample: bytes) -> bytes:
    """A sample as a sequence whose prompt has no advantage."""
    fields = dict(read_fields(sample))
    tokens = np.frombuffer(as_bytes(fields[2]), np.int32)
    logprobs = np.frombuffer(as_bytes(fields[3]), np.float32)
    whole, n = np.concatenate([prompt, tokens]), len(prompt) - 1
    return _data_field(
        whole[:-1],
        target_tokens=whole[1:],
        logprobs=np.pad(logprobs, (n, 0)),
        advantages=np.pad(np.ones(len(tokens), np.float32), (n, 0)),
    )


def _data_field(tokens: np.ndarray, **tensors: np.ndarray) -> bytes:
    raw = tokens.astype(np.int32).tobytes()
    entries = bytes_field(1, bytes_field(1, bytes_field(1, raw)))
    for name, values in tensors.items():
        is_float = values.dtype.kind == "f"
        packed = values.astype(np.float32 if is_float else np.int64).tobytes()
        tensor = bytes_field(1, packed) + number_field(3, FLOAT32 if is_float else INT64)
        entries += bytes_field(2, bytes_field(1, name) + bytes_field(2, tensor))
    return bytes_field(3, entries)


def measure_memory(args: argparse.Namespace) -> None:
    """Prints the bytes of the programs of one lane and of eight."""
    import jax

    from jaxrl.models.files.hf_load import model_config
    from sharding import make_mesh

    found = []
    with jax.set_mesh(make_mesh(fsdp=1)):
        for n in (1, 8):
            compiled, n_base = compile_lanes(args, model_config(args.model), n, args.budget // n)
            memory = compiled.memory_analysis()
            assert memory is not None, "this platform does not say what a program needs"
            n_bytes = memory.argument_size_in_bytes + memory.output_size_in_bytes
            n_bytes += memory.temp_size_in_bytes
            found.append(n_bytes)
            print(
                f"{n} lanes of {args.budget // n} tokens: {n_bytes / 2**20:.0f} MiB, of which the "
                f"base {n_base / 2**20:.0f}, temporaries {memory.temp_size_in_bytes / 2**20:.0f}",
                flush=True,
            )
    print(f"{found[1] / found[0]:.3f} x")


def measure_chip(args: argparse.Namespace) -> None:
    """Prints the time of the lanes of each number of clients on a chip, from compiled programs."""
    os.environ["JAX_PLATFORMS"] = "cpu"  # does not open attached devices
    import jax

    from jaxrl.api.training import lane_config
    from jaxrl.kernels.attention.online_softmax import BLOCK
    from jaxrl.kernels.logprob import grouped_chunks
    from jaxrl.learner.loss import logprob_chunk
    from jaxrl.planner.compiled.cost import program_cost
    from jaxrl.planner.compiled.kernels import attention_work, cudnn_work
    from jaxrl.planner.compiled.timeline import times
    from jaxrl.planner.model_shape import model_shape
    from jaxrl.planner.topology import topology
    from sharding import make_mesh

    machine, decoder = topology(args.topology), model_shape(args.model)
    decoder = dataclasses.replace(decoder, layers=decoder.layers[: args.layers])

    def trips(op_name: str) -> float | None:
        if "logprob" in op_name:
            chunks = args.len / logprob_chunk(lane_config(read_run(args), args.len))
            return math.ceil(chunks / grouped_chunks() if "transpose" in op_name else chunks)
        return args.len / 2 / BLOCK + 1 if "attention" in op_name else None

    def kernels(op_name: str, operands: Any, results: Any) -> Any:
        l2_bytes = machine.chip.l2_bytes
        found = attention_work(
            op_name, operands, results, keys=args.len / 2, l2_cache_bytes=l2_bytes
        )
        return found or cudnn_work(op_name, operands, results, keys=args.len / 2)

    alone = math.nan
    with jax.set_mesh(make_mesh(machine.devices[:1], fsdp=1)):
        for n in map(int, f"1,{args.counts}".split(",")):
            compiled, _ = compile_lanes(args, decoder, n, args.len, dict(machine.compiler_options))
            text = compiled.as_text()
            assert text is not None, "CPU, GPU and TPU compilers print their programs"
            cost = program_cost(text, trips, kernels)
            seconds = times(cost.steps, machine.chip).total_s
            alone = seconds if n == 1 else alone
            print(
                f"{n} clients of {args.len} tokens: {seconds * 1e3:.1f} ms at peak rates, "
                f"{cost.total_flops / 1e12:.2f} TFLOP, {cost.bytes_accessed / 1e9:.1f} GB, "
                f"{n * alone / seconds:.2f} x",
                flush=True,
            )


def read_run(args: argparse.Namespace) -> Any:
    """The keys of a server with these options."""
    from jaxrl.api.options import read

    return read([f"--model={args.model}", f"--max-len={args.budget}"])[1]


def compile_lanes(
    args: argparse.Namespace,
    decoder: Any,
    n: int,
    row_len: int,
    compiler_options: dict[str, bool] | None = None,
) -> tuple[Any, int]:
    """(compiled gradients of `n` lanes with an adapter each, bytes of the base), on the mesh."""
    import jax
    import jax.numpy as jnp
    from jax.sharding import NamedSharding

    from jaxrl.api.adapters import room_for
    from jaxrl.api.losses import read_loss
    from jaxrl.api.room import AdapterRoom
    from jaxrl.api.training import lane_config, lane_gradients
    from jaxrl.data.packing import empty_batch
    from jaxrl.models.decoder import decoder_specs
    from jaxrl.models.spec import ParamSpec
    from jaxrl.runtime.flat_program import flatten
    from sharding.rules import TRAIN

    room = AdapterRoom(decoder, room_for(decoder, args.rank), TRAIN)
    mesh = jax.sharding.get_mesh()
    dtype = jnp.float32 if mesh.devices.flat[0].platform == "cpu" else jnp.bfloat16

    def abstract(
        shape: Sequence[int], axes: Sequence[str | None] = (), dtype: Any = jnp.float32
    ) -> jax.ShapeDtypeStruct:
        sharding = NamedSharding(mesh, TRAIN.spec(*axes))
        return jax.ShapeDtypeStruct(tuple(shape), dtype, sharding=sharding)

    def of_spec(spec: ParamSpec, dtype: Any = jnp.float32) -> jax.ShapeDtypeStruct:
        return abstract(spec.shape, spec.axes, dtype)

    base = jax.tree.map(lambda spec: of_spec(spec, dtype), decoder_specs(decoder))
    frozen = flatten(room.frozen(base))
    batch = jax.tree.map(
        lambda a: abstract((n, *a.shape), LANE_AXES, a.dtype), empty_batch(1, row_len)
    )
    loss = jax.tree.map(lambda a: abstract((n,), dtype=a.dtype), read_loss("cross_entropy", {}))
    weights = [[of_spec(spec) for spec in room.group_specs] for _ in range(n)]
    of = dict(room=room, dtype=dtype, cfg=lane_config(read_run(args), row_len))
    program = jax.jit(functools.partial(lane_gradients, **of))
    lowered = program.lower(weights, abstract((n,)), loss, batch, frozen)
    n_base = sum(leaf.size * leaf.dtype.itemsize for leaf in frozen.leaves)
    return lowered.compile(compiler_options or None), n_base


if __name__ == "__main__":
    main()
