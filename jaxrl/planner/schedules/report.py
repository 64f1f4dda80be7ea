"""Simulated schedules as text: a table, the best one, and the assumptions of the numbers."""

import textwrap
from collections.abc import Callable, Sequence

import numpy as np
from rich.box import MARKDOWN
from rich.console import Console
from rich.table import Table

from jaxrl.config.keys import RunConfig
from jaxrl.models.config import DecoderConfig
from jaxrl.planner.options import Simulation
from jaxrl.planner.schedules.costs import Numbers, RunCosts
from jaxrl.planner.schedules.lengths import simulated_lengths
from jaxrl.planner.schedules.search import Simulated, Simulator, best

COLUMNS = (
    "schedule", "devices", "max_staleness", "s/step", "training s", "tokens/s", "to sync",
    "rollout idle", "trainer idle", "mean staleness", "versions",
)  # fmt: skip
WIDTH = 160


def simulate_text(
    simulation: Simulation,
    cfg: RunConfig,
    decoder: DecoderConfig,
    plan: Numbers,
    on_start: Callable[[str], None],
) -> str:
    """Table, best schedule and assumptions of a simulation from a plan's numbers.

    `on_start` is called with a line before each simulation, which may take half a minute. Raises
    ValueError if no split fits, OSError if the lengths cannot be read.
    """
    costs, devices = RunCosts(cfg, decoder, plan), simulation.rollout_devices
    lengths = simulated_lengths(simulation.lengths, cfg)
    simulator = Simulator(costs, lengths, on_start)
    if simulation.search:
        found = simulator.search()
    else:
        split = costs.split(devices) if devices else None
        found = simulator.schedule(simulation.schedule, split)
    return schedules_text(costs, found, lengths, simulation.lengths)


def schedules_text(
    costs: RunCosts, found: Sequence[Simulated], lengths: np.ndarray, spec: str
) -> str:
    """The simulated schedules as a Markdown table; the first one is the baseline."""
    chosen = best(list(found))
    lines = [
        f"simulated schedules of {costs.cfg.name} on {costs.plan['topology']}",
        "",
        _table(found),
        "",
        f"best: {_name(chosen)}, {_gain(chosen, found[0])} of {_name(found[0])}",
        "",
        "assumptions:",
        *(textwrap.fill(one, 120, initial_indent="- ", subsequent_indent="  ")
          for one in _assumptions(costs, lengths, spec)),
    ]  # fmt: skip
    return "\n".join(lines) + "\n"


def _table(found: Sequence[Simulated]) -> str:
    table = Table(box=MARKDOWN)
    for i, name in enumerate(COLUMNS):
        table.add_column(name, justify="left" if i < 2 else "right", no_wrap=True)
    for one in found:
        schedule, outcome = one.schedule, one.outcome
        table.add_row(
            schedule.mode,
            str(one.split),
            str(schedule.max_staleness),
            f"{outcome.step_s:,.1f}",
            f"{outcome.training_s:,.1f}",
            f"{outcome.tokens_per_s:,.0f}",
            _gain(one, found[0]),
            f"{outcome.rollout_idle:.0%}",
            "" if one.split.shared else f"{outcome.trainer_idle:.0%}",
            f"{outcome.staleness_mean:.2f}",
            f"{outcome.versions_per_response:.2f}",
        )
    console = Console(width=WIDTH, force_terminal=False, color_system=None)
    with console.capture() as captured:
        console.print(table)
    return "\n".join(line.rstrip() for line in captured.get().splitlines() if line.strip())


def _name(one: Simulated) -> str:
    if one.schedule.mode == "sync":
        return "sync"
    devices = "" if one.split.shared else f" on {one.split} devices"
    return f"{one.schedule.mode}{devices} with max_staleness={one.schedule.max_staleness}"


def _gain(one: Simulated, base: Simulated) -> str:
    return f"{one.outcome.tokens_per_s / base.outcome.tokens_per_s:.2f}x"


def _assumptions(costs: RunCosts, lengths: np.ndarray, spec: str) -> list[str]:
    cfg, plan = costs.cfg, costs.plan
    mesh = " x ".join(f"{axis} {n}" for axis, n in plan["mesh"].items() if n > 1) or "1"
    planned = plan["lengths"]
    held = [f"{costs.sequences(costs.shared())} (shared devices)"]
    held += [str(costs.sequences(split)) for split in costs.splits()[:1]]
    n = costs.replica_devices
    replica = "1 device" if n == 1 else f"{n} devices"
    times = (
        "every program takes its calibrated time (docs/concepts/planner_accuracy.md), and the host "
        "its time between dispatches"
        if costs.factors
        else "every program takes its time at peak rates, as the plan computes it, with compute, "
        "HBM traffic and collectives overlapped; the host takes no time"
    )
    return [
        f"{cfg.data.prompts_per_step} prompts of {planned['prompt']} tokens x {cfg.rollout.n} "
        f"samples per step; lengths of responses: {spec}, mean {lengths.mean():,.0f}, median "
        f"{np.median(lengths):,.0f}, longest {lengths.max():,} tokens, "
        f"{(lengths == lengths.max()).mean():.0%} of that length",
        f"{times}; rewards and checkpoints take no time. Mesh {mesh}, sequences of "
        f"{planned['prompt']} + {planned['response']} tokens",
        f"an engine replica has {replica}, and KV pages for {' or '.join(held)} sequences of "
        "maximum length",
    ]
