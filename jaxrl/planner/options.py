"""The arguments of `jaxrl.plan`: its own options, and the keys of a run. No jax."""

import dataclasses
from collections.abc import Mapping, Sequence

from jaxrl.config.command_line import print_help, read_args, read_options, stop
from jaxrl.config.keys import RunConfig, ScheduleConfig
from jaxrl.config.resolve import resolve
from jaxrl.planner.chips import KNOWN, split_name

HELP = """Plans memory and step time: does a run fit, how fast can it be?

    python -m jaxrl.plan --config=configs/grpo_7b.py --topology=v5p:4x4x4

Compiles the programs of a run for devices that need not be attached, from the model's config.json.

    --topology=NAME        v4:2x2x4, v5e:2x4, v5p:4x4x4, v6e:16x16, v7x:2x2x2, a100:8,
                           rtx4090:1, h100:64, h200:8, b200:8, cpu:8
    --model-config=PATH    config.json (or its folder) of a model that is not on this machine
    --prompt-len=N         average prompt length in tokens (default: data.max_prompt_len)
    --response-len=N       average response length in tokens (default: data.max_response_len)
    --job=NAME             program that the config is for: train (default), sft, dpo, reward_model
    --json                 print one JSON object instead of tables
    --json=FILE            write that object to a file, and print the tables
    --search[=N]           try meshes, token budgets and remat policies; compile until N (4) fit,
                           then the best with up to 6 compiler options
    --compare A B          print the numbers in which two plans differ (files with --json output)

Simulates schedules of rollout and training (sync, partial, async) from the plan's lower bounds:

    python -m jaxrl.plan --config=configs/boba_7b.py --topology=h100:192 --schedule=async \\
        --lengths="lognormal?mean=14000" --search

    --schedule=NAME        sync, partial or async; async on every split of the devices
    --lengths=FILE         response lengths, one prompt's per line, or "lognormal?mean=N&sigma=X"
    --max-staleness=N      training steps between the first token and the update (1)
    --oversample=X         steps of groups in flight (as many as max-staleness allows)
    --rollout-devices=N    this split only
    --search               all schedules, splits and staleness; names the best
    --plan=FILE            --json output to simulate, instead of compiling
"""
SCHEDULE_OPTIONS = (
    "schedule",
    "lengths",
    "max-staleness",
    "oversample",
    "rollout-devices",
    "plan",
)
OPTIONS = (
    "topology",
    "model-config",
    "prompt-len",
    "response-len",
    "search",
    "job",
    "json",
    *SCHEDULE_OPTIONS,
)
JOBS = ("train", "sft", "dpo", "reward_model")
MODES = ("sync", "partial", "async")


@dataclasses.dataclass(frozen=True)
class Simulation:
    """The schedules to simulate."""

    schedule: ScheduleConfig
    lengths: str
    rollout_devices: int  # 0 = every split
    search: bool


@dataclasses.dataclass(frozen=True)
class PlanArguments:
    """One plan, or two files to compare."""

    cfg: RunConfig = dataclasses.field(default_factory=RunConfig)  # checked, but for the devices
    options: dict[str, str] = dataclasses.field(default_factory=dict)
    simulation: Simulation | None = None
    compared: tuple[str, ...] = ()


def read(argv: Sequence[str]) -> PlanArguments:
    """The arguments. Exits with a message if one is invalid, and after printing a help text."""
    if {"-h", "--help"} & set(argv):  # --config.help lists the keys of a run
        print_help(HELP)
    if "--compare" in argv:
        if argv[0] != "--compare" or len(argv) != 3:
            stop("--compare takes two files with --json output and nothing else: --compare A B")
        return PlanArguments(compared=tuple(argv[1:]))
    config, rest = read_args(argv)
    options = read_options(rest, OPTIONS)
    try:
        _check(options)
        return PlanArguments(resolve(config), options, read_simulation(options))
    except ValueError as error:
        stop(str(error))


def _check(options: dict[str, str]) -> None:
    """Raises ValueError if options are missing, unknown or contradict each other."""
    if "topology" in options:
        split_name(options["topology"])
    elif "plan" not in options:
        raise ValueError(f"--topology is missing; set it to one of {KNOWN}")
    job = options.get("job", "train")
    if job not in JOBS:
        raise ValueError(f"unknown --job={job}; set one of {', '.join(JOBS)}")
    if "schedule" in options and job != "train":
        raise ValueError("--schedule is for --job=train: offline training has no rollout")
    for name in ("prompt-len", "response-len", "search"):
        if not (text := options.get(name) or "1").isdigit() or not int(text):
            raise ValueError(f"--{name}={text} is not a number of 1 or more")


def read_simulation(options: Mapping[str, str]) -> Simulation | None:
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


def _number(options: Mapping[str, str], name: str, default: int | float) -> float:
    text = options.get(name, str(default))
    try:
        return float(text)
    except ValueError as error:
        raise ValueError(f"--{name}={text} is not a number") from error
