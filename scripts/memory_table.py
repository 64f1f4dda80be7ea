"""Prints the compiled memory of an update under memory settings, as a Markdown table.

    python scripts/memory_table.py --topology=h100:1 --config=configs/grpo_1p5b_h100.py \\
        learner.remat=full learner.remat=offload "learner.remat=full learner.offload=optimizer"

A row is a set of keys, separated by spaces. Everything else is the config, which takes further
`--config.KEY=VALUE` options. Only the programs of the update are compiled; `python -m jaxrl.plan`
with the keys of a row plans the whole run. Bytes are per device:

    state     on the device during the update: weights, optimizer, roles that are not offloaded
    gradient  peak of `accumulate`: state, gradients and the temporaries of a micro-batch
    step      peak of `apply`: state, gradients and the temporaries of the optimizer step
    host      host memory: offloaded state, sums of gradients, and layer inputs of a micro-batch
    time      of a micro-batch's gradient by the planner, kernels one after the other, over row one
"""

import os
import sys

os.environ["JAX_PLATFORMS"] = "cpu"
os.environ.setdefault("TF_CPP_MIN_LOG_LEVEL", "3")

import dataclasses

import jax

from jaxrl.config.command_line import read_args, read_options
from jaxrl.config.keys import RunConfig
from jaxrl.config.resolve import resolve
from jaxrl.models.mesh_check import check_mesh
from jaxrl.planner.call_times import serial_seconds
from jaxrl.planner.compilation import ProgramTooLarge, compile_programs
from jaxrl.planner.model_shape import model_shape
from jaxrl.planner.plan import live_bytes
from jaxrl.planner.programs import Lengths, run_programs
from jaxrl.planner.topology import Topology, topology
from sharding import make_mesh

PROGRAMS = ("accumulate", "apply")
GIB = 2**30


def main() -> None:
    rows = [a for a in sys.argv[1:] if not a.startswith("--")]
    given = [a for a in sys.argv[1:] if a.startswith("--")]
    machine = topology(read_options(read_args(given)[1], ("topology",))["topology"])
    print(f"| keys ({machine.name}) | state | gradient | step | host | time |")
    print("|---|---|---|---|---|---|")
    first_s = 0.0
    for row in rows:
        overrides = [f"--config.{change}" for change in row.split()]
        cfg = resolve(read_args([*given, *overrides])[0], n_devices=len(machine.devices))
        label = f"`{row}`" if row else "the config"
        try:
            cells, seconds = measure(cfg, machine)
        except ProgramTooLarge as error:
            print(f"| {label} | {str(error).partition(';')[0]} | | | | |", flush=True)
            continue
        first_s = first_s or seconds
        print(f"| {label} | {' | '.join(cells)} | {seconds / first_s:.2f} |", flush=True)


def measure(cfg: RunConfig, machine: Topology) -> tuple[list[str], float]:
    """(state, gradient, step and host memory in GiB; seconds of a micro-batch's gradient)."""
    decoder = model_shape(cfg.model.path)
    mesh = make_mesh(machine.devices, **dataclasses.asdict(cfg.mesh))
    check_mesh(decoder, mesh.shape)
    with jax.set_mesh(mesh):
        run = run_programs(cfg, decoder, machine.chip.memory_bytes)
        for name in set(run.table) - set(PROGRAMS):
            del run.table[name]
        lengths = Lengths(cfg.data.max_prompt_len, cfg.data.max_response_len)
        programs = compile_programs(run, lengths, machine)
    live = {name: live_bytes(program, run, 0) for name, program in programs.items()}
    idle = set(run.table["accumulate"].counted_state) & set(run.host_resident)
    state = sum(n_bytes for name, n_bytes in run.resident.items() if name not in idle)
    others = {name: n for name, n in run.host_resident.items() if name != "gradients"}
    host = sum(others.values()) + programs["accumulate"].host_bytes
    numbers = (state, live["accumulate"], live["apply"], host)
    cells = [f"{n / GIB:.1f}" for n in numbers]
    return cells, serial_seconds(programs["accumulate"], machine.chip)


if __name__ == "__main__":
    main()
