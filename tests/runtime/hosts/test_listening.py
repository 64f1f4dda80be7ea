"""Addresses that a run listens on: none in one process, the coordinator's in several.

Tests of jaxrl/runtime/multihost.py.
"""

import contextlib
import ipaddress
import struct
import time
from pathlib import Path

import pytest

from jaxrl.config.keys import DistributedConfig
from jaxrl.runtime.multihost import coordinator_bind_address

LISTEN = "0A"  # state of a socket in /proc/net/tcp


def listening() -> dict[str, tuple[str, int]]:
    """inode -> (address, port) of every TCP socket of this machine that listens."""
    found = {}
    for table in ("tcp", "tcp6"):
        for line in Path("/proc/net", table).read_text().splitlines()[1:]:
            _, local, _, state, *rest = line.split()
            if state == LISTEN:
                address, port = local.split(":")
                words = [
                    struct.pack("=I", int(address[i : i + 8], 16))
                    for i in range(0, len(address), 8)
                ]
                ip = ipaddress.ip_address(b"".join(words))
                ip = getattr(ip, "ipv4_mapped", None) or ip
                found[rest[5]] = (str(ip), int(port, 16))
    return found


def family(pid: int) -> set[int]:
    """A process and its descendants."""
    found = {pid}
    with contextlib.suppress(OSError):
        for task in Path(f"/proc/{pid}/task").iterdir():
            for child in (task / "children").read_text().split():
                found |= family(int(child))
    return found


def sockets(pid: int) -> set[tuple[str, int]]:
    """Addresses at which a process or its descendants listen."""
    table, found = listening(), set()
    for one in family(pid):
        with contextlib.suppress(OSError):
            for link in Path(f"/proc/{one}/fd").iterdir():
                with contextlib.suppress(OSError):
                    inode = str(link.readlink()).removeprefix("socket:[").rstrip("]")
                    if inode in table:
                        found.add(table[inode])
    return found


def observed(group, timeout_s: float = 240) -> list[set[tuple[str, int]]]:
    """Addresses at which each process of a group listens at any time, until all have ended."""
    found: list[set[tuple[str, int]]] = [set() for _ in group.processes]
    deadline = time.monotonic() + timeout_s
    while any(process.poll() is None for process in group.processes):
        assert time.monotonic() < deadline, group.texts()
        for process, addresses in zip(group.processes, found, strict=True):
            addresses |= sockets(process.pid)
        time.sleep(0.2)
    return found


@pytest.mark.thorough
def test_a_run_of_one_process_listens_nowhere(start_group, group_config):
    group_config.total_steps = 1
    group = start_group(group_config, n=1, n_devices=8)
    found = observed(group)
    group.finish()
    assert found == [set()]


@pytest.mark.thorough
def test_processes_on_one_machine_have_their_coordinator_on_loopback(start_group, group_config):
    group_config.total_steps = 1
    group = start_group(group_config, n=2, n_devices=4)
    found = observed(group)
    group.finish()
    ports = [{address for address, port in one if port == group.port} for one in found]
    assert ports == [{"127.0.0.1"}, set()], found


@pytest.mark.parametrize(
    ("coordinator", "expected"),
    [
        ("127.0.0.1:80", "127.0.0.1:80"),
        ("localhost:80", "127.0.0.1:80"),
        ("[::1]:80", "[::1]:80"),
        ("node-17:80", None),  # its address may differ between the hosts
        ("192.0.2.1:80", None),  # of no machine: an address behind a gateway
        ("", None),
    ],
)
def test_the_coordinator_listens_at_its_own_address(coordinator, expected):
    if coordinator.startswith("[") and not Path("/proc/net/if_inet6").exists():
        pytest.skip("no IPv6 on this machine")
    distributed = DistributedConfig(coordinator=coordinator)
    assert coordinator_bind_address(distributed, {}) == expected
    env = {"JAX_COORDINATOR_ADDRESS": coordinator}
    assert coordinator_bind_address(DistributedConfig(), env) == expected
    assert (
        coordinator_bind_address(distributed, {"JAX_COORDINATOR_BIND_ADDRESS": "[::]:80"}) is None
    )
