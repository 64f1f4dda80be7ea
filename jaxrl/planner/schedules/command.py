"""The simulation of schedules as options of `python -m jaxrl.plan`."""

import dataclasses
from collections.abc import Callable, Mapping

import numpy as np

from jaxrl.config.keys import RunConfig, ScheduleConfig
from jaxrl.models.config import DecoderConfig
from jaxrl.planner.options import SCHEDULE_OPTIONS
from jaxrl.planner.schedules.costs import Numbers, RunCosts
from jaxrl.planner.schedules.lengths import response_lengths
from jaxrl.planner.schedules.report import schedules_text
from jaxrl.planner.schedules.search import Simulator

MODES = ("sync", "partial", "async")
N_STEPS = 8  # of groups, which repeat afterwards


@dataclasses.dataclass(frozen=True)
class Simulation:
    """The schedules to simulate."""

    schedule: ScheduleConfig
    lengths: str
    rollout_devices: int  # 0 = every split
    search: bool

    def response_lens(self, cfg: RunConfig) -> np.ndarray:
        """int [groups, samples] lengths of responses, the same for the same options."""
        n_groups = N_STEPS * cfg.data.prompts_per_step
        return response_lengths(self.lengths, n_groups, cfg.rollout.n, cfg.data.max_response_len)

    def mean_len(self, cfg: RunConfig) -> int:
        """Mean length of the responses, in tokens."""
        return round(float(self.response_lens(cfg).mean()))


def read_schedule(options: Mapping[str, str]) -> Simulation | None:
    """The simulation that the options describe; None without --schedule.

    Raises ValueError for values that cannot be simulated.
    """
    if "schedule" not in options:
        if given := [name for name in SCHEDULE_OPTIONS if name in options]:
            raise ValueError(f"--{given[0]} is for simulations; set --schedule=async as well")
        return None
    mode, spec = options["schedule"], options.get("lengths", "")
    if mode not in MODES:
        raise ValueError(f"unknown --schedule={mode}; set one of {', '.join(MODES)}")
    if not spec:
        raise ValueError(
            "--lengths is missing; set it to a file with response lengths, or to "
            "'lognormal?mean=14000'"
        )
    staleness = _number(options, "max-staleness", 0 if mode == "sync" else 1)
    if mode == "sync" and staleness:
        raise ValueError("--schedule=sync has no staleness; leave out --max-staleness")
    if staleness < 0 or staleness != int(staleness):
        raise ValueError(f"--max-staleness={staleness:g}: set a staleness of 0 or more whole steps")
    schedule = ScheduleConfig(mode=mode, max_staleness=int(staleness))
    oversample, most = _number(options, "oversample", 0), schedule.max_oversample
    if "oversample" in options and not 1 <= oversample <= most:
        raise ValueError(
            f"--oversample={oversample:g}: set 1 to {most} steps of groups in flight, or a larger "
            "--max-staleness"
        )
    devices = _number(options, "rollout-devices", 0)
    if devices and mode != "async":
        raise ValueError("--rollout-devices is for --schedule=async")
    schedule = dataclasses.replace(schedule, oversample=oversample)
    return Simulation(schedule, spec, int(devices), "search" in options)


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
    lengths = simulation.response_lens(cfg)
    simulator = Simulator(costs, lengths, on_start)
    if simulation.search:
        found = simulator.search()
    else:
        split = costs.split(devices) if devices else None
        found = simulator.schedule(simulation.schedule, split)
    return schedules_text(costs, found, lengths, simulation.lengths)


def _number(options: Mapping[str, str], name: str, default: int | float) -> float:
    text = options.get(name, str(default))
    try:
        return float(text)
    except ValueError as error:
        raise ValueError(f"--{name}={text} is not a number") from error
