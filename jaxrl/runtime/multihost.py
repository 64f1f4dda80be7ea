"""Several processes of one run, one per host: joining them, and checking that they run the same."""

import dataclasses
import ipaddress
import os
import signal
import socket
import sys
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import jax

from jaxrl.config.disk import ADVICE, is_full
from jaxrl.config.keys import DistributedConfig, RunConfig
from jaxrl.config.saved import differences
from jaxrl.data.content import Item, content
from jaxrl.data.digest import digest
from jaxrl.ending import SIGNALS
from jaxrl.runtime.backend import open_backend
from jaxrl.runtime.versions import versions
from sharding import hosts

SHUTDOWN_TIMEOUT_S = 30  # how long a process waits for the others at a normal exit


def join(cfg: RunConfig) -> None:
    """Joins the other processes of the run, if there are any, before any device is opened.

    Raises ValueError if the others cannot be reached, or if they run something else.
    """
    distributed = cfg.distributed
    if not jax.distributed.is_initialized():
        if not is_multi_process(distributed, os.environ):
            return
        initialize(distributed)
    open_backend()
    hosts.exit_immediately_on_errors()
    hosts.warm_up()
    check_same_identity(hosts.gather(process_identity(cfg)))


def is_multi_process(distributed: DistributedConfig, env: Mapping[str, str]) -> bool:
    """Whether the config or the environment shows that the run has several processes."""
    if distributed.start != "auto":
        return distributed.start == "on"
    counts = ("SLURM_STEP_NUM_TASKS", "OMPI_COMM_WORLD_SIZE", "MEGASCALE_NUM_SLICES")
    return (
        bool(distributed.coordinator or env.get("JAX_COORDINATOR_ADDRESS"))
        or any(int(env.get(name, "1")) > 1 for name in counts)
        or "," in env.get("TPU_WORKER_HOSTNAMES", "")
    )


def slurm_devices(env: Mapping[str, str]) -> list[int] | None:
    """All GPUs of the node if Slurm runs one task per node; JAX by default takes only the first."""
    n_tasks, n_nodes = env.get("SLURM_STEP_NUM_TASKS"), env.get("SLURM_STEP_NUM_NODES")
    if n_tasks is None or n_tasks != n_nodes or "SLURM_GPUS_ON_NODE" not in env:
        return None
    return list(range(int(env["SLURM_GPUS_ON_NODE"])))


def initialize(distributed: DistributedConfig) -> None:
    """Joins other processes through jax.distributed, before any device is opened.

    Raises ValueError if they cannot be reached.
    """
    explicit = distributed.coordinator and distributed.num_processes and distributed.process_id >= 0
    try:
        jax.distributed.initialize(
            distributed.coordinator or None,
            distributed.num_processes or None,
            distributed.process_id if distributed.process_id >= 0 else None,
            local_device_ids=None if explicit else slurm_devices(os.environ),
            # cluster detection would select devices even if all processes are given explicitly
            cluster_detection_method="deactivate" if explicit else None,
            coordinator_bind_address=coordinator_bind_address(distributed, os.environ),
            initialization_timeout=distributed.start_timeout_s,
            heartbeat_timeout_seconds=distributed.heartbeat_timeout_s,
            shutdown_timeout_seconds=SHUTDOWN_TIMEOUT_S,
        )
    except (ValueError, RuntimeError) as error:
        reason = " ".join(str(error).split())
        raise ValueError(
            f"this process cannot join the others of the run ({reason[:300]}); set "
            "config.distributed.coordinator, num_processes and process_id, the first two alike on "
            "all hosts, or distributed.start='off' for a run of one process"
        ) from error
    for number in SIGNALS:  # JAX's handler of SIGTERM, from here on, would only log it
        signal.signal(number, signal.getsignal(number))


def coordinator_bind_address(distributed: DistributedConfig, env: Mapping[str, str]) -> str | None:
    """The address at which process 0 listens; None leaves the choice to JAX.

    JAX listens on all interfaces, without authentication. A coordinator that is given as an IP
    address of this machine, or as localhost, needs that interface only.
    """
    coordinator = distributed.coordinator or env.get("JAX_COORDINATOR_ADDRESS", "")
    host, _, port = coordinator.rpartition(":")
    host = "127.0.0.1" if host == "localhost" else host.strip("[]")
    if "JAX_COORDINATOR_BIND_ADDRESS" in env:
        return None
    try:
        is_v6 = ipaddress.ip_address(host).version == 6
        with socket.socket(socket.AF_INET6 if is_v6 else socket.AF_INET) as probe:
            probe.bind((host, 0))
    except (ValueError, OSError):  # a name, or an address of another machine or of a gateway
        return None
    return f"[{host}]:{port}" if is_v6 else f"{host}:{port}"


def check_all_joined() -> None:
    """Raises ValueError if the devices span several hosts whose processes did not join."""
    if jax.process_count() > 1 and not jax.distributed.is_initialized():
        raise ValueError(
            f"the {jax.device_count()} devices belong to {jax.process_count()} hosts, but the "
            "processes did not join; set config.distributed.start='on'"
        )


@dataclasses.dataclass(frozen=True)
class Identity:
    """The properties that must be the same in all processes of a run, except the host name."""

    host: str  # for messages
    cfg: RunConfig
    versions: Mapping[str, str]


def process_identity(cfg: RunConfig) -> Identity:
    """The identity of this process."""
    found = versions()
    files = [
        f.partition("?")[0].rpartition(":")[0] for f in (*cfg.reward.functions, cfg.env.episodes)
    ]
    for name in (*files, cfg.data.chat_template):
        if (path := Path(name)).is_file():
            found[name] = digest([path.read_bytes()])
    same = dataclasses.replace(cfg, distributed=DistributedConfig(), compilation_cache="")
    return Identity(socket.gethostname(), same, found)


def check_same_identity(identities: Sequence[Identity]) -> None:
    """Raises AgreedError, with hosts, keys and values, if a process differs from the first one."""
    lines, first = [], identities[0]
    for i, other in enumerate(identities):
        changes = differences(first.cfg, other.cfg)
        changes += [
            f"{name}: {first.versions.get(name, 'missing')} -> "
            f"{other.versions.get(name, 'missing')}"
            for name in sorted(first.versions.keys() | other.versions.keys())
            if first.versions.get(name) != other.versions.get(name)
        ]
        if changes:
            lines.append(f"  process {i} on {other.host}: {'; '.join(changes)}")
    if lines:
        raise hosts.AgreedError(
            f"the processes of this run differ from process 0 on {first.host}:\n"
            + "\n".join(lines)
            + "\nstart all of them with the same command in the same environment"
        )


def check_same_data(datasets: Mapping[str, Sequence[Item]]) -> None:
    """Raises AgreedError if the processes read different data; by the keys of the sources."""
    if hosts.n_processes() == 1:
        return
    mine = {
        name: (len(items), digest(map(str.encode, content(items).values())))
        for name, items in datasets.items()
    }
    found = hosts.gather(mine)
    lines = [
        f"  {name}: process {i} has {other[name][0]} rows, hash {other[name][1]}; "
        f"process 0 has {found[0][name][0]}, hash {found[0][name][1]}"
        for i, other in enumerate(found)
        for name in datasets
        if other[name] != found[0][name]
    ]
    if lines:
        raise hosts.AgreedError(
            "the processes of this run read different data:\n"
            + "\n".join(lines)
            + "\nput the same files on all hosts, or on a shared disk"
        )


def check_same_order(state: Mapping[str, Any]) -> None:
    """Raises AgreedError if the iterators of the processes differ, as by other streamed files."""
    if hosts.n_processes() == 1:
        return
    found = hosts.gather(dict(state))
    if others := [i for i, other in enumerate(found) if other != found[0]]:
        raise hosts.AgreedError(
            f"the data iterators of the processes {others} differ from that of process 0, which is "
            f"{str(found[0])[:300]}; put the same files on all hosts, or on a shared disk"
        )


def print_error(error: Exception) -> None:
    """Prints why the run stops: once if all processes raise the error, else on each that does."""
    is_agreed = isinstance(error, hosts.AgreedError)
    if is_agreed and not hosts.is_main_process():
        return
    is_local = hosts.n_processes() > 1 and not is_agreed
    where = f"process {hosts.process_id()} on {socket.gethostname()}: " if is_local else ""
    advice = f"; {ADVICE}" if is_full(error) and "free disk space" not in str(error) else ""
    print(f"error: {where}{error}{advice}", file=sys.stderr, flush=True)
