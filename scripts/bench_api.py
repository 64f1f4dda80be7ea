"""Training API: useful tokens per CPU-second of the server, by the number of clients.

    python scripts/bench_api.py clients --model=FOLDER --counts=1,2,4,8
    python scripts/bench_api.py memory --model=FOLDER

`clients` starts a server for each number of clients. Each client trains its own adapter: a step is
forward_backward with a few random sequences, and optim_step. The clients run one after the other,
then all at the same time, after one such round that compiles the programs. A token is useful if it
is in a sequence; the CPU time is that of the server alone, and each client keeps its connection.
Format of a line:

    N clients  one after the other A tokens/CPU-s  together B tokens/CPU-s  B/A x

`memory` compiles the gradients of one lane as long as the token budget, and of 8 lanes with as many
tokens together and 8 adapters, and prints what each needs next to the base model's weights.
"""

import argparse
import functools
import http.client
import json
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

from jaxrl.api.wire import bytes_field, number_field
from jaxrl.json_text import parse_json

INT64 = 2  # among the dtypes of tensors
LANE_AXES = (None, "batch", "time")  # of the batch of a dispatch


def main() -> None:
    args = parse_args()
    if args.command == "memory":
        measure_memory(args)
        return
    for count in map(int, args.counts.split(",")):
        measure_clients(args, count)


def parse_args() -> argparse.Namespace:
    parser = argparse.ArgumentParser(formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("command", choices=("clients", "memory"))
    parser.add_argument("--model", required=True, help="folder of a model")
    parser.add_argument("--counts", default="1,2,4,8", help="numbers of clients")
    parser.add_argument("--steps", type=int, default=20, help="steps of a client")
    parser.add_argument("--sequences", type=int, default=1, help="sequences of a step")
    parser.add_argument("--len", type=int, default=60, help="tokens of a sequence")
    parser.add_argument("--rank", type=int, default=8)
    parser.add_argument("--budget", type=int, default=1024, help="learner.token_budget")
    return parser.parse_args()


def measure_clients(args: argparse.Namespace, count: int) -> None:
    """Prints the line of one number of clients."""
    with tempfile.TemporaryDirectory() as folder:
        command = [sys.executable, "-m", "jaxrl.api", f"--model={args.model}", "--name=bench"]
        command += [f"--run-dir={folder}", "--port=0", f"--max-len={args.budget}"]
        command += [f"--max-rank={args.rank}", "--config.rollout.max_num_seqs=2"]
        with subprocess.Popen(command, stdout=subprocess.PIPE, text=True) as server:
            try:
                assert server.stdout is not None
                address = next(filter(None, map(find_address, server.stdout)))
                wait_until_open(address)
                clients = [Client(address, f"tml-{i}", args) for i in range(count)]
                together(clients, args.steps)  # compiles
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


def cpu_s(pid: int) -> float:
    """CPU time of a process so far, with all its threads."""
    fields = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()
    return (int(fields[11]) + int(fields[12])) / os.sysconf("SC_CLK_TCK")


def together(clients: Sequence["Client"], n_steps: int) -> None:
    threads = [threading.Thread(target=client.train, args=(n_steps,)) for client in clients]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()


class Client:
    """A client with one model in training."""

    def __init__(self, address: str, key: str, args: argparse.Namespace):
        self._key, self._seq_id = key, 0
        # Kept open, as the package tinker does.
        self._connection = http.client.HTTPConnection(address.rpartition("/")[2], timeout=600)
        rng = np.random.default_rng(len(key))
        self._data = b"".join(_datum(rng, args.len) for _ in range(args.sequences))
        session = self._call("create_session", {})["session_id"]
        body = {"session_id": session, "model_seq_id": 0, "base_model": "bench"}
        body |= {"lora_config": {"rank": args.rank, "seed": 0}}
        self._model = self._wait(self._call("create_model", body), "model_id")

    def train(self, n_steps: int) -> None:
        for _ in range(n_steps):
            self._seq_id += 2
            body = bytes_field(1, self._model) + number_field(2, self._seq_id - 1)
            body += bytes_field(4, "cross_entropy") + self._data
            step = {"model_id": self._model, "seq_id": self._seq_id}
            futures = [self._call("forward_backward", body)]
            futures += [self._call("optim_step", step | {"adam_params": {"learning_rate": 1e-4}})]
            self._wait(futures[0])
            self._wait(futures[1], "metrics")

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
        while True:
            raw = self._send("retrieve_future", {"request_id": future["request_id"]})
            if b'"try_again"' in raw:
                continue
            assert b'{"error": ' not in raw, raw
            return parse_json(raw.decode())[field] if field else None


def _datum(rng: np.random.Generator, n: int) -> bytes:
    tokens = rng.integers(3, 250, n).astype(np.int32)
    chunk = bytes_field(1, bytes_field(1, bytes_field(1, tokens.tobytes())))
    targets = rng.integers(3, 250, n).astype(np.int64)
    tensor = bytes_field(1, targets.tobytes()) + number_field(3, INT64)
    entry = bytes_field(1, "target_tokens") + bytes_field(2, tensor)
    return bytes_field(3, chunk + bytes_field(2, entry))


def measure_memory(args: argparse.Namespace) -> None:
    """Prints the bytes of the programs of one lane and of eight."""
    import jax
    import jax.numpy as jnp
    from jax.sharding import NamedSharding

    from jaxrl.api.adapters import room_for
    from jaxrl.api.losses import read_loss
    from jaxrl.api.options import read
    from jaxrl.api.room import AdapterRoom
    from jaxrl.api.training import lane_config, lane_gradients
    from jaxrl.data.packing import empty_batch
    from jaxrl.models.decoder import decoder_specs
    from jaxrl.models.files.hf_load import model_config
    from jaxrl.models.spec import ParamSpec
    from jaxrl.runtime.flat_program import flatten
    from sharding import make_mesh
    from sharding.rules import TRAIN

    _, run = read([f"--model={args.model}", f"--max-len={args.budget}"])
    decoder = model_config(args.model)
    room = AdapterRoom(decoder, room_for(decoder, args.rank), TRAIN)

    def abstract(
        shape: Sequence[int], axes: Sequence[str | None] = (), dtype: Any = jnp.float32
    ) -> jax.ShapeDtypeStruct:
        sharding = NamedSharding(jax.sharding.get_mesh(), TRAIN.spec(*axes))
        return jax.ShapeDtypeStruct(tuple(shape), dtype, sharding=sharding)

    def of_spec(spec: ParamSpec) -> jax.ShapeDtypeStruct:
        return abstract(spec.shape, spec.axes)

    with jax.set_mesh(make_mesh(fsdp=1)):
        specs = decoder_specs(decoder)
        frozen = flatten(room.frozen(jax.tree.map(of_spec, specs)))
        n_base = sum(leaf.size * leaf.dtype.itemsize for leaf in frozen.leaves)
        found = []
        for n in (1, 8):
            batch = jax.tree.map(
                lambda a, n=n: abstract((n, *a.shape), LANE_AXES, a.dtype),
                empty_batch(1, args.budget // n),
            )
            loss = jax.tree.map(
                lambda a, n=n: abstract((n,), dtype=a.dtype), read_loss("cross_entropy", {})
            )
            weights = [[of_spec(spec) for spec in room.group_specs] for _ in range(n)]
            of = dict(room=room, dtype=jnp.float32, cfg=lane_config(run, args.budget // n))
            program = jax.jit(functools.partial(lane_gradients, **of))
            lowered = program.lower(weights, abstract((n,)), loss, batch, frozen)
            memory = lowered.compile().memory_analysis()
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


if __name__ == "__main__":
    main()
