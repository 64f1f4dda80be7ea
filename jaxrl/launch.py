"""Starts one training process per host of a Ray cluster.

    python -m jaxrl.launch --config=FILE.py --num-hosts=4 --accelerator=gpu:8
    python -m jaxrl.launch --config=FILE.py --num-hosts=8 --rollout-hosts=4:8 --accelerator=gpu:8

Ray finds the hosts, starts the processes, and restarts them from the newest checkpoint when a host
dies. The training processes communicate only through jax.distributed. With --rollout-hosts they
also exchange requests, tokens and weights with their rollout workers through Ray, never inside a
compiled program.
"""

import argparse
import ctypes
import dataclasses
import importlib
import os
import queue
import signal
import subprocess
import sys
import threading
import time
from collections import deque
from collections.abc import Iterator, Sequence
from typing import Any

if __name__ == "__main__":
    from jaxrl.ending import end_on_signals

    end_on_signals()

from jaxrl.config.accelerators import resources
from jaxrl.config.command_line import parse, read_args
from jaxrl.runtime.ray_cluster import (
    actor_options,
    forwarded_environment,
    free_address,
    import_ray,
)

ALTERNATIVE = "start the processes yourself (docs/how_to/multihost.md)"
TAIL_LINES = 40  # last lines shown of a failed process other than process 0
LOST = 137  # status of a process that vanished with its host, as if killed
USER_ERROR, INTERRUPTED = 1, 130  # statuses of jaxrl.train
PR_SET_PDEATHSIG = 1


@dataclasses.dataclass(frozen=True)
class ProcessResult:
    """Exit status and last lines of a process."""

    status: int
    tail: tuple[str, ...] = ()


class Host:
    """The Ray actor of one host: runs the training process and forwards its output."""

    def __init__(self, environment: dict[str, str], folder: str):
        self._environment, self._folder = environment, folder
        self._process: subprocess.Popen | None = None

    def address(self) -> str:
        """A host:port of this host that is free now."""
        return free_address(importlib.import_module("ray.util").get_node_ip_address())

    def run(self, arguments: list[str]) -> Iterator[str | int]:
        """The lines that `python -m jaxrl.train` prints, then its exit status."""

        def die_with_actor() -> None:  # a process without its actor would hold the accelerator
            ctypes.CDLL(None).prctl(PR_SET_PDEATHSIG, signal.SIGKILL)
            # The threads of an actor block SIGINT.
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
    """Runs the launcher. Returns the exit status of the run (see jaxrl.train).

    The status is 1 if the run failed more than --max-failures times.
    """
    argv = sys.argv[1:] if argv is None else list(argv)
    args, config_arguments = read_arguments(argv)
    try:
        config_arguments += rollout_arguments(args, config_arguments)
        parse(config_arguments)  # reports config errors before any host is reserved
        ray = import_ray("jaxrl.launch", ALTERNATIVE)
        ray.init(address=args.address, log_to_driver=False, configure_logging=False)
        for number in (signal.SIGINT, signal.SIGTERM):  # Ray's handlers would end without a save
            signal.signal(number, signal.default_int_handler)
        return run_with_restarts(ray, args, config_arguments)
    except (ValueError, ConnectionError) as error:
        print(f"error: {error}", file=sys.stderr)
        return USER_ERROR
    except KeyboardInterrupt:  # before the processes started
        return INTERRUPTED


def parser() -> argparse.ArgumentParser:
    """The parser of the launcher's arguments."""
    parser = argparse.ArgumentParser(
        prog="python -m jaxrl.launch",
        description="Trains on several hosts of a Ray cluster. "
        "All other arguments are those of jaxrl.train.",
        allow_abbrev=False,
    )
    add = parser.add_argument
    add("--num-hosts", type=int, required=True, help="hosts that train; each runs one process")
    add(
        "--rollout-hosts",
        default="",
        help="further hosts that only generate: N, or N:M, at most M; they are "
        "schedule.rollout_workers of schedule.hosts_per_worker hosts each",
    )
    add("--accelerator", default="cpu", help="resources of each host: cpu, gpu:8 or tpu:4")
    add("--max-failures", type=int, default=3, help="restarts before giving up")
    add("--address", default="auto", help="address of the Ray cluster")
    add("--wait-s", type=float, default=600.0, help="seconds to wait until the hosts are free")
    return parser


def read_arguments(argv: Sequence[str]) -> tuple[argparse.Namespace, list[str]]:
    """The launcher's arguments, and those for the run."""
    return parser().parse_known_args(argv)


def rollout_arguments(args: argparse.Namespace, config_arguments: Sequence[str]) -> list[str]:
    """The config arguments for --rollout-hosts=N or N:M. Raises ValueError if it is invalid.

    The hosts are divided into workers as `config_arguments` say.
    """
    if not args.rollout_hosts:
        return []
    n, _, most = args.rollout_hosts.partition(":")
    numbers = [n, most or n]
    if not all(number.isdigit() and int(number) for number in numbers):
        raise ValueError(
            f"--rollout-hosts={args.rollout_hosts} is not known; give N, or N:M for at least N and "
            "at most M hosts"
        )
    config, _ = read_args(config_arguments)
    n_hosts = config.to_dict()["schedule"]["hosts_per_worker"]
    if any(int(number) % n_hosts for number in numbers):
        raise ValueError(
            f"--rollout-hosts={args.rollout_hosts} cannot be divided into workers of "
            f"config.schedule.hosts_per_worker={n_hosts} hosts; give multiples of {n_hosts}"
        )
    n_workers, most = (int(number) // n_hosts for number in numbers)
    values = {"rollout_workers": n_workers, "max_rollout_workers": most}
    values["worker_accelerator"] = args.accelerator
    return [f"--config.schedule.{name}={value}" for name, value in values.items()]


def run_with_restarts(ray: Any, args: argparse.Namespace, arguments: list[str]) -> int:
    """Runs the group, and restarts it from its newest checkpoint after a process was lost."""
    if args.num_hosts < 1:
        raise ValueError(f"--num-hosts={args.num_hosts}; give 1 or more")
    failures = 0
    while True:
        results = run_group(ray, args, arguments)
        statuses = [result.status for result in results]
        if not any(statuses):
            return 0
        if INTERRUPTED in statuses:
            return INTERRUPTED
        for rank, result in enumerate(results):
            if rank and result.status:
                log(
                    f"process {rank} ended with status {result.status}; its last lines:",
                    *(f"  {line}" for line in result.tail),
                )
        if all(status == USER_ERROR for status in statuses):
            return USER_ERROR  # every process reported it; a restart would fail the same way
        failures += 1
        if failures > args.max_failures:
            log(f"failed {failures} times, statuses {statuses}; --max-failures={args.max_failures}")
            return 1
        log(f"failure {failures} of at most {args.max_failures}, statuses {statuses}; restarting")


def run_group(ray: Any, args: argparse.Namespace, arguments: list[str]) -> list[ProcessResult]:
    """Runs the processes until all have ended; ends the others if one is lost."""
    group = importlib.import_module("ray.util.placement_group")
    strategies = importlib.import_module("ray.util.scheduling_strategies")
    bundle = resources(args.accelerator)
    placement = group.placement_group([bundle] * args.num_hosts, strategy="STRICT_SPREAD")
    environment = forwarded_environment()
    environment["RAY_ADDRESS"] = ray.get_runtime_context().gcs_address  # for rollout workers
    actors: list[Any] = []
    try:
        wait_for_hosts(ray, placement, args, bundle)
        make = ray.remote(Host).options
        for rank in range(args.num_hosts):
            strategy = strategies.PlacementGroupSchedulingStrategy(placement, rank)
            actors.append(
                make(
                    **actor_options(bundle),
                    scheduling_strategy=strategy,
                    max_concurrency=2,  # `send` during `run`
                ).remote(environment, os.getcwd())
            )
        return wait_for_processes(ray, actors, process_arguments(ray, actors, args, arguments))
    except ray.exceptions.RayError as error:
        return [ProcessResult(LOST, (f"{type(error).__name__}: {error}",))] * args.num_hosts
    finally:
        for actor in actors:
            ray.kill(actor)
        group.remove_placement_group(placement)


def wait_for_hosts(ray: Any, placement: Any, args: argparse.Namespace, bundle: dict) -> None:
    """Waits until the hosts are free. Raises ValueError with the cluster's resources on timeout."""
    if placement.wait(min(args.wait_s, 5.0)):
        return
    log(f"waiting for {args.num_hosts} hosts with {bundle} each")
    if not placement.wait(args.wait_s):
        have = [node["Resources"] for node in ray.nodes() if node["Alive"]]
        shown = [{k: v for k, v in one.items() if k in ("CPU", "GPU", "TPU")} for one in have]
        raise ValueError(
            f"no {args.num_hosts} free hosts with {bundle} each within {args.wait_s:g} s; the "
            f"cluster has {shown}; lower --num-hosts or --accelerator, or add hosts with "
            "`ray start`"
        )


def process_arguments(
    ray: Any, actors: list[Any], args: argparse.Namespace, arguments: list[str]
) -> list[list[str]]:
    """The arguments of each process, including how it joins the others."""
    if args.num_hosts == 1:
        return [arguments]
    if args.accelerator.startswith("tpu"):  # the TPU runtime orders the hosts of a slice
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


def wait_for_processes(
    ray: Any, actors: list[Any], arguments: list[list[str]]
) -> list[ProcessResult]:
    """Runs the processes and prints the output of process 0 until all have ended.

    After a failure the others get 60 s to end by themselves. Ctrl-C and SIGTERM are forwarded to
    the processes, which then save and stop.
    """
    finished: queue.Queue[tuple[int, ProcessResult]] = queue.Queue()

    def run(rank: int) -> None:
        finished.put((rank, stream_output(ray, actors[rank], arguments[rank], show=rank == 0)))

    for rank in range(len(actors)):
        threading.Thread(target=run, args=(rank,), daemon=True).start()
    results: dict[int, ProcessResult] = {}
    deadline = float("inf")
    while len(results) < len(actors) and time.monotonic() < deadline:
        try:
            rank, result = finished.get(timeout=1.0)
        except queue.Empty:
            continue
        except KeyboardInterrupt:
            for actor in actors:
                actor.send.remote(signal.SIGINT)
            continue
        results[rank] = result
        if result.status:
            deadline = min(deadline, time.monotonic() + 60.0)
    ended = ProcessResult(LOST, ("ended by the launcher",))
    return [results.get(rank, ended) for rank in range(len(actors))]


def stream_output(ray: Any, actor: Any, arguments: list[str], *, show: bool) -> ProcessResult:
    """Runs one process to its end, and prints its lines if `show`."""
    tail: deque[str] = deque(maxlen=TAIL_LINES)
    try:
        for reference in actor.run.options(num_returns="streaming").remote(arguments):
            value = ray.get(reference)
            if isinstance(value, int):
                return ProcessResult(value, tuple(tail))
            tail.append(value)
            if show:
                print(value, flush=True)
    except ray.exceptions.RayError as error:
        tail.append(f"its host is lost: {type(error).__name__}")
    return ProcessResult(LOST, tuple(tail))


def log(*lines: str) -> None:
    for line in lines:
        print(f"launch: {line}", flush=True)


if __name__ == "__main__":
    sys.exit(main())
