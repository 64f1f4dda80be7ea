"""Plans memory and step time: does a run fit, how fast can it be?

    python -m jaxrl.plan --config=configs/grpo_7b.py --topology=v5p:4x4x4

Compiles the programs of a run for devices that need not be attached, from the model's config.json.

    --topology=NAME        v4:2x2x4, v5e:2x4, v5p:4x4x4, v6e:16x16, v7x:2x2x2, a100:8,
                           rtx4090:1, h100:64, h200:8, b200:8, cpu:8
    --model-config=PATH    config.json (or its folder) of a model that is not on this machine
    --prompt-len=N         average prompt length in tokens (default: data.max_prompt_len)
    --response-len=N       average response length in tokens (default: data.max_response_len)
    --job=NAME             program that the config is for: train (default), sft, dpo, reward_model
    --json                 print one JSON object instead of tables
    --search[=N]           try meshes, token budgets and remat policies; compile until N (4) fit
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

import json
import math
import os
import pathlib
import sys
from typing import Any

if __name__ == "__main__":  # before jax is imported: does not open attached devices
    os.environ["JAX_PLATFORMS"] = "cpu"
    os.environ.setdefault("TF_CPP_MIN_LOG_LEVEL", "3")

    from jaxrl.config.command_line import print_help
    from jaxrl.ending import end_on_signals

    end_on_signals()
    if {"-h", "--help"} & set(sys.argv[1:]):  # --config.help lists the keys of a run
        print_help(__doc__ or "")

import jax
from ml_collections import ConfigDict

from jaxrl.config.command_line import read_args, read_options, stop
from jaxrl.config.keys import RunConfig
from jaxrl.config.resolve import check_devices, resolve
from jaxrl.json_text import parse_json
from jaxrl.models.config import DecoderConfig
from jaxrl.planner.compare import comparison_text
from jaxrl.planner.compilation import ProgramTooLarge
from jaxrl.planner.model_shape import model_shape
from jaxrl.planner.plan import Plan, make_plan
from jaxrl.planner.programs import Lengths, OfflineWorkload
from jaxrl.planner.report import search_text, show
from jaxrl.planner.schedules.command import (
    SCHEDULE_OPTIONS,
    Simulation,
    read_schedule,
    simulate_text,
)
from jaxrl.planner.search import FINALISTS, search
from jaxrl.planner.sizes import Job
from jaxrl.planner.topology import KNOWN, Topology, simulated_cpus, topology
from jaxrl.trainer.offline.dpo import DPO
from jaxrl.trainer.offline.objective import with_objective
from jaxrl.trainer.offline.reward_model import REWARD_MODEL
from jaxrl.trainer.offline.sft import SFT

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
OBJECTIVES = {"sft": SFT, "dpo": DPO, "reward_model": REWARD_MODEL}


def main() -> int:
    """Exit status: 0 the run fits, 1 an error that the message explains, 2 it does not fit."""
    arguments = sys.argv[1:]
    if "--compare" in arguments:
        return _compare(arguments)
    config, rest = read_args(arguments)
    options = read_options(rest, OPTIONS)
    _check_options(options)
    try:
        simulation = read_schedule(options)
        plan = _saved_plan(options["plan"], "rollout_weight_bytes") if "plan" in options else None
        if plan is not None:
            cfg = resolve(config)
            _check_all_devices(cfg)
            check_devices(cfg, math.prod(plan["mesh"].values()))
            decoder = model_shape(cfg.model.path, options.get("model-config", ""))
        else:
            compiled, cfg, decoder = _compiled_plan(config, options, simulation)
            if simulation is None or compiled is None:
                return _show(compiled, options)
            plan = compiled.json()
        assert simulation is not None, "read_schedule rejects --plan without --schedule"
        print(simulate_text(simulation, cfg, decoder, plan), end="")
    except ProgramTooLarge as error:
        print(error, file=sys.stderr)
        return 2
    except (ValueError, OSError) as error:
        stop(str(error))
    return 0


def _compiled_plan(
    config: ConfigDict, options: dict[str, str], simulation: Simulation | None
) -> tuple[Plan | None, RunConfig, DecoderConfig]:
    """(plan or None if a program is too large, the run, its model), compiled for the topology."""
    if n := simulated_cpus(options["topology"]):
        jax.config.update("jax_num_cpu_devices", n)
    machine = topology(options["topology"])
    searches = "search" in options and simulation is None
    n_devices = None if searches else len(machine.devices)
    cfg = resolve(config, n_devices=n_devices, n_processes=machine.n_processes)
    if searches or simulation:
        _check_all_devices(cfg)
    decoder = model_shape(cfg.model.path, options.get("model-config", ""))
    response_len = simulation.mean_len(cfg) if simulation else cfg.data.max_response_len
    lengths = Lengths(
        int(options.get("prompt-len", cfg.data.max_prompt_len)),
        int(options.get("response-len", response_len)),
    )
    job = _job(cfg, decoder, machine, lengths, options.get("job", "train"))
    return _search(job, options) if searches else _plan(job), cfg, decoder


def _check_all_devices(cfg: RunConfig) -> None:
    """Raises ValueError if the run splits its devices."""
    if cfg.schedule.mode == "async":
        raise ValueError(
            "--search and --schedule plan runs on all devices, but config.schedule.mode='async' "
            "splits them; leave out config.schedule, or the options"
        )


def _show(plan: Plan | None, options: dict[str, str]) -> int:
    """Prints a plan; returns the exit status."""
    if plan is None:
        return 2
    if "json" in options:
        print(json.dumps(plan.json()))
    else:
        show(plan)
    return 0 if plan.fits else 2


def _saved_plan(file: str, needed: str) -> dict[str, Any]:
    """The object in a file with --json output, which must have the key `needed`."""
    try:
        plan = parse_json(pathlib.Path(file).read_text())
    except ValueError as error:
        raise ValueError(f"{file} is not JSON ({error}); write it with --json") from error
    if not isinstance(plan, dict) or needed not in plan:
        raise ValueError(f"{file} is not a plan with {needed}; write it again with --json")
    return plan


def _compare(arguments: list[str]) -> int:
    at = arguments.index("--compare")
    files = arguments[at + 1 :]
    if len(files) != 2 or at:
        stop("--compare takes two files with --json output and nothing else: --compare A B")
    try:
        a, b = (_saved_plan(file, "programs") for file in files)
    except (ValueError, OSError) as error:
        stop(str(error))
    print(comparison_text(a, b, (pathlib.Path(files[0]).stem, pathlib.Path(files[1]).stem)), end="")
    return 0


def _check_options(options: dict[str, str]) -> None:
    """Exits with one message if options are missing or contradict each other."""
    if "topology" not in options and "plan" not in options:
        stop(f"--topology is missing; set it to one of {KNOWN}")
    job = options.get("job", "train")
    if job not in ("train", *OBJECTIVES):
        stop(f"unknown --job={job}; set one of train, {', '.join(OBJECTIVES)}")
    if "schedule" in options and job != "train":
        stop("--schedule is for --job=train: offline training has no rollout")


def _search(job: Job, options: dict[str, str]) -> Plan | None:
    """The best plan of a search, whose candidates it prints; None if no program compiled."""
    n = int(options["search"] or FINALISTS)
    found = search(job, finalists=n, on_start=_report_progress)
    print(search_text(found, job.cfg), file=sys.stderr if "json" in options else sys.stdout)
    return found[0][1]


def _job(
    cfg: RunConfig, decoder: DecoderConfig, machine: Topology, lengths: Lengths, program: str
) -> Job:
    """The run with all its models; `program` is "train" or the name of an offline objective."""
    paths = {
        "critic": ("critic.path", cfg.critic.path),
        "teacher": ("algorithm.teacher", cfg.algorithm.teacher),
        "reward_model": ("reward_model.path", cfg.reward_model.path),
    }
    role_decoders = {
        name: model_shape(path, option=f"--config.{key}")
        for name, (key, path) in paths.items()
        if path
    }
    workload: OfflineWorkload | None = None
    if objective := OBJECTIVES.get(program):
        cfg, workload = with_objective(cfg, objective), objective.workload
    return Job(cfg, decoder, machine, lengths, role_decoders, workload)


def _plan(job: Job) -> Plan:
    """The plan of the config as it is."""
    return make_plan(
        job.cfg,
        job.decoder,
        job.machine,
        role_decoders=job.role_decoders,
        workload=job.workload,
        lengths=job.lengths,
        on_start=_report_progress,
    )


def _report_progress(line: str) -> None:
    print(line, file=sys.stderr, flush=True)


if __name__ == "__main__":
    sys.exit(main())
