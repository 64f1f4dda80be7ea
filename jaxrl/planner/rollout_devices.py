"""Devices that only generate: `schedule.rollout_devices`, or the devices of a rollout worker."""

from collections.abc import Sequence
from typing import Any

from jaxrl.config.accelerators import resources
from jaxrl.config.keys import RunConfig
from jaxrl.layout import split_devices
from jaxrl.planner.topology import Topology, topology

DEVICES_PER_CHIP = {"TPU v7x": 2}  # Ray counts chips; 1 for others


def sides(cfg: RunConfig, machine: Topology) -> tuple[Sequence[Any], Sequence[Any]]:
    """(devices of training, separate devices of the rollout: of one process or worker, or none).

    A worker has the same kind of devices as `machine`, on which the run trains. Raises ValueError
    if it reserves another kind, or if its devices have no known shape.
    """
    if not cfg.schedule.rollout_workers:
        return split_devices(cfg, machine.devices)
    return machine.devices, _devices(machine, _n_devices(cfg, machine))


def n_copies(cfg: RunConfig) -> int:
    """Copies of the weights on separate devices of the rollout.

    The next version arrives while the engine runs; a rollout worker replaces arrays one by one.
    """
    return 1 if cfg.schedule.rollout_workers else 2


def _n_devices(cfg: RunConfig, machine: Topology) -> int:
    """Devices that a rollout worker reserves on all of its hosts."""
    accelerator, kind = cfg.schedule.worker_accelerator, machine.platform
    n, n_hosts = resources(accelerator).get(kind.upper(), 0), cfg.schedule.hosts_per_worker
    if not n or (kind == "cpu") != (accelerator == "cpu"):
        per_host = -(-(cfg.rollout.tensor or cfg.mesh.tensor) // n_hosts)
        example = "cpu" if kind == "cpu" else f"{kind}:{per_host}"
        raise ValueError(
            f"schedule.worker_accelerator={accelerator!r} reserves no {kind} devices, and "
            f"{machine.name} plans {kind} devices for both sides; set {example!r}"
        )
    return n_hosts * n * DEVICES_PER_CHIP.get(machine.chip.name, 1)


def _devices(machine: Topology, n: int) -> Sequence[Any]:
    """`n` devices of further hosts with the chips of `machine`."""
    if n <= len(machine.devices):
        return machine.devices[:n]
    if machine.platform == "gpu":
        return topology(f"{machine.name.partition(':')[0]}:{n}").devices
    raise ValueError(
        f"{machine.name} has {len(machine.devices)} devices and a rollout worker {n}; the planner "
        "compiles for both on this topology: set one with as many devices"
    )
