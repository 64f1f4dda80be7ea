"""python -m jaxrl.launch --config=... --num-hosts=4 --accelerator=gpu:8: one training process a host of a Ray cluster.

Ray finds the hosts, starts the processes and starts them anew from the newest checkpoint when a host dies. It is
not in the inner loop: the processes talk to each other through jax.distributed alone.
"""

import argparse
import ctypes
import dataclasses
import importlib
import os
import queue
import signal
import socket
import subprocess
import sys
import threading
import time
from collections import deque
from collections.abc import Iterator, Sequence
from types import ModuleType
from typing import Any

from jaxrl.config.command_line import parse

PASSED_ON = ("JAX_", "XLA_", "LIBTPU_", "NCCL_", "HF_", "WANDB_", "MLFLOW_", "PYTHONPATH")
TAIL = 40  # last lines of a process that failed, shown where it is not the first
GONE = 137  # status of a process that vanished with its host: as if killed
MISTAKE, INTERRUPTED = 1, 130  # statuses of jaxrl.train
PR_SET_PDEATHSIG = 1


@dataclasses.dataclass(frozen=True)
class Ended:
    """The last word of a process."""

    status: int
    tail: tuple[str, ...] = ()


class Host:
    """The Ray actor of one host: runs the training process there and hands on what it prints."""

    def __init__(self, environment: dict[str, str], folder: str):
        self._environment, self._folder = environment, folder
        self._process: subprocess.Popen | None = None

    def address(self) -> str:
        """host:port, free now, at which this host can be reached."""
        with socket.socket() as s:
            s.bind(("", 0))
            return (
                f"{importlib.import_module('ray.util').get_node_ip_address()}:{s.getsockname()[1]}"
            )

    def run(self, arguments: list[str]) -> Iterator[str | int]:
        """The lines that `python -m jaxrl.train` prints, then its exit status."""

        def die_with_actor() -> None:  # a process without its actor would hold the accelerator
            ctypes.CDLL(None).prctl(PR_SET_PDEATHSIG, signal.SIGKILL)
            # Threads of an actor have it blocked.
            signal.pthread_sigmask(signal.SIG_UNBLOCK, [signal.SIGINT])

        self._process = subprocess.Popen(
            [sys.executable, "-u", "-m", "jaxrl.train", *arguments],
            env=os.environ | self._environment,
            cwd=self._folder,
            stdin=subprocess.DEVNULL,
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            text=True,
            errors="replace",
            preexec_fn=die_with_actor,
            start_new_session=True,
        )
        assert self._process.stdout is not None
        for line in self._process.stdout:
            yield line.rstrip("\n")
        yield self._process.wait()

    def send(self, number: int) -> None:
        """Sends a signal to the training process."""
        if self._process is not None and self._process.poll() is None:
            self._process.send_signal(number)


def main(argv: Sequence[str] | None = None) -> int:
    """Exit status: that of the run, see jaxrl.train; 1 where it failed more than --max-failures times."""
    argv = sys.argv[1:] if argv is None else list(argv)
    args, config_arguments = read_arguments(argv)
    parse(
        config_arguments
    )  # a mistake in the config is answered here, before any host is asked for
    try:
        ray = need_ray()
        ray.init(address=args.address, log_to_driver=False, configure_logging=False)
        for number in (signal.SIGINT, signal.SIGTERM):  # Ray's own would end all without a save
            signal.signal(number, signal.default_int_handler)
        return keep_running(ray, args, config_arguments)
    except (ValueError, ConnectionError) as problem:
        print(f"error: {problem}", file=sys.stderr)
        return MISTAKE
    except KeyboardInterrupt:  # before the processes started
        return INTERRUPTED


def read_arguments(argv: Sequence[str]) -> tuple[argparse.Namespace, list[str]]:
    """The launcher's own arguments, and those of the run."""
    parser = argparse.ArgumentParser(
        prog="python -m jaxrl.launch",
        description="Trains on several hosts of a Ray cluster. All other arguments are those of jaxrl.train.",
        allow_abbrev=False,
    )
    add = parser.add_argument
    add("--num-hosts", type=int, required=True, help="hosts, each with one process")
    add("--accelerator", default="cpu", help="cpu, or gpu:8, tpu:4: what every host must offer")
    add("--max-failures", type=int, default=3, help="restarts before giving up")
    add("--address", default="auto", help="of the Ray cluster")
    add("--wait-s", type=float, default=600.0, help="seconds to wait for the hosts to be free")
    return parser.parse_known_args(argv)


def need_ray() -> ModuleType:
    try:
        return importlib.import_module("ray")
    except ImportError as error:
        raise ValueError(
            f"jaxrl.launch needs Ray, which cannot be imported ({error}); install it on all hosts with "
            "`uv sync --extra ray` or pip install 'jaxrl[ray]', or start the processes yourself (docs/how_to/multihost.md)"
        ) from error


def resources(accelerator: str) -> dict[str, int]:
    """What Ray reserves on each host for "cpu", "gpu:8" or "tpu:4"."""
    kind, _, count = accelerator.partition(":")
    if kind == "cpu" and not count:
        return {"CPU": 1}
    if kind not in ("gpu", "tpu") or not count.isdigit() or int(count) < 1:
        raise ValueError(
            f"--accelerator={accelerator} is not known; give cpu, or gpu:N or tpu:N with the number a host has"
        )
    return {"CPU": 1, kind.upper(): int(count)}


def keep_running(ray: Any, args: argparse.Namespace, arguments: list[str]) -> int:
    """Runs the group, and again from its last checkpoint where a process was lost."""
    if args.num_hosts < 1:
        raise ValueError(f"--num-hosts={args.num_hosts}; give 1 or more")
    failures = 0
    while True:
        ended = run_group(ray, args, arguments)
        statuses = [one.status for one in ended]
        if not any(statuses):
            return 0
        if INTERRUPTED in statuses:
            return INTERRUPTED
        for rank, one in enumerate(ended):
            if rank and one.status:
                say(
                    f"process {rank} ended with status {one.status}; its last lines:",
                    *(f"  {line}" for line in one.tail),
                )
        if all(status == MISTAKE for status in statuses):
            return MISTAKE  # all of them know why, and would stop there again
        failures += 1
        if failures > args.max_failures:
            say(f"failed {failures} times, statuses {statuses}; --max-failures={args.max_failures}")
            return 1
        say(f"failure {failures} of at most {args.max_failures}, statuses {statuses}; restarting")


def run_group(ray: Any, args: argparse.Namespace, arguments: list[str]) -> list[Ended]:
    """One life of the group: its processes run until all have ended, or one is lost and the rest is ended."""
    group = importlib.import_module("ray.util.placement_group")
    strategies = importlib.import_module("ray.util.scheduling_strategies")
    bundle = resources(args.accelerator)
    places = group.placement_group([bundle] * args.num_hosts, strategy="STRICT_SPREAD")
    actors: list[Any] = []
    try:
        wait_for_hosts(ray, places, args, bundle)
        make = ray.remote(Host).options
        for rank in range(args.num_hosts):
            strategy = strategies.PlacementGroupSchedulingStrategy(places, rank)
            actors.append(
                make(
                    num_cpus=bundle["CPU"],
                    num_gpus=bundle.get("GPU", 0),
                    resources={"TPU": bundle["TPU"]} if "TPU" in bundle else {},
                    scheduling_strategy=strategy,
                    max_concurrency=2,  # `send` while `run` goes on
                ).remote(passed_on(), os.getcwd())
            )
        return follow(ray, actors, joined_arguments(ray, actors, args, arguments))
    except ray.exceptions.RayError as error:
        return [Ended(GONE, (f"{type(error).__name__}: {error}",))] * args.num_hosts
    finally:
        for actor in actors:
            ray.kill(actor)
        group.remove_placement_group(places)


def wait_for_hosts(ray: Any, places: Any, args: argparse.Namespace, bundle: dict) -> None:
    """Until the hosts are there. Raises ValueError with what the cluster has when they do not come."""
    if places.wait(min(args.wait_s, 5.0)):
        return
    say(f"waiting for {args.num_hosts} hosts with {bundle} each")
    if not places.wait(args.wait_s):
        have = [node["Resources"] for node in ray.nodes() if node["Alive"]]
        shown = [{k: v for k, v in one.items() if k in ("CPU", "GPU", "TPU")} for one in have]
        raise ValueError(
            f"no {args.num_hosts} free hosts with {bundle} each within {args.wait_s:g} s; the cluster has {shown}; "
            "lower --num-hosts or --accelerator, or add hosts with `ray start`"
        )


def joined_arguments(
    ray: Any, actors: list[Any], args: argparse.Namespace, arguments: list[str]
) -> list[list[str]]:
    """The arguments of each process, with how it finds the others."""
    if args.num_hosts == 1:
        return [arguments]
    if args.accelerator.startswith("tpu"):  # the order of a slice's hosts is the TPU runtime's
        return [[*arguments, "--config.distributed.start=on"]] * args.num_hosts
    address = ray.get(actors[0].address.remote())
    return [
        [
            *arguments,
            f"--config.distributed.coordinator={address}",
            f"--config.distributed.num_processes={args.num_hosts}",
            f"--config.distributed.process_id={rank}",
        ]
        for rank in range(args.num_hosts)
    ]


def follow(ray: Any, actors: list[Any], arguments: list[list[str]]) -> list[Ended]:
    """Prints what the first process prints, until all have ended. Once one has failed, the others get
    some time to end by themselves. Ctrl-C and SIGTERM go to the processes, which then save and stop."""
    news: queue.Queue[tuple[int, Ended]] = queue.Queue()

    def listen(rank: int) -> None:
        news.put((rank, heard(ray, actors[rank], arguments[rank], show=rank == 0)))

    for rank in range(len(actors)):
        threading.Thread(target=listen, args=(rank,), daemon=True).start()
    ended: dict[int, Ended] = {}
    deadline = float("inf")
    while len(ended) < len(actors) and time.monotonic() < deadline:
        try:
            rank, last = news.get(timeout=1.0)
        except queue.Empty:
            continue
        except KeyboardInterrupt:
            for actor in actors:
                actor.send.remote(signal.SIGINT)
            continue
        ended[rank] = last
        if last.status:
            deadline = min(deadline, time.monotonic() + 60.0)
    return [ended.get(rank, Ended(GONE, ("ended by the launcher",))) for rank in range(len(actors))]


def heard(ray: Any, actor: Any, arguments: list[str], *, show: bool) -> Ended:
    """Listens to one process to its end."""
    tail: deque[str] = deque(maxlen=TAIL)
    try:
        for one in actor.run.options(num_returns="streaming").remote(arguments):
            value = ray.get(one)
            if isinstance(value, int):
                return Ended(value, tuple(tail))
            tail.append(value)
            if show:
                print(value, flush=True)
    except ray.exceptions.RayError as error:
        tail.append(f"its host is lost: {type(error).__name__}")
    return Ended(GONE, tuple(tail))


def passed_on() -> dict[str, str]:
    """Environment variables that the processes on all hosts get from here."""
    return {name: value for name, value in os.environ.items() if name.startswith(PASSED_ON)}


def say(*lines: str) -> None:
    for line in lines:
        print(f"launch: {line}", flush=True)


if __name__ == "__main__":
    sys.exit(main())
