"""python -m jaxrl.plan --config=FILE.py --topology=v5p:4x4x4: does a run fit, how fast can it be?

Compiles the programs of the run for devices that need not be attached.
"""

import dataclasses
import json
import math
import os
import pathlib
import sys
from collections.abc import Callable, Mapping

from jaxrl.planner.options import PlanArguments, Simulation, read
from jaxrl.runtime.start import begin_program

if __name__ == "__main__":  # answers a mistyped argument before the imports that take seconds
    os.environ["JAX_PLATFORMS"] = "cpu"  # does not open attached devices
    os.environ.setdefault("TF_CPP_MIN_LOG_LEVEL", "3")
    ARGUMENTS = read(sys.argv[1:])
    begin_program()

import jax

from jaxrl.config.command_line import stop
from jaxrl.config.keys import RunConfig
from jaxrl.config.resolve import check_devices, check_only_offline
from jaxrl.config.teachers import model_teachers
from jaxrl.models.config import DecoderConfig
from jaxrl.models.vision.towers import with_trained_tower
from jaxrl.planner.chips import split_name
from jaxrl.planner.compare import comparison_text
from jaxrl.planner.compilation import ProgramTooLarge
from jaxrl.planner.model_shape import model_shape, tower_shape
from jaxrl.planner.option_trials import try_options
from jaxrl.planner.plan import Plan, make_plan
from jaxrl.planner.programs import Lengths, OfflineWorkload
from jaxrl.planner.remedies import remedies_text
from jaxrl.planner.report import search_text, show, trials_text
from jaxrl.planner.saved_plan import check_config, read_plan
from jaxrl.planner.schedules.lengths import simulated_lengths
from jaxrl.planner.schedules.report import simulate_text
from jaxrl.planner.search import FINALISTS, search
from jaxrl.planner.sizes import Job
from jaxrl.planner.topology import Topology, topology
from jaxrl.trainer.offline.dpo import DPO
from jaxrl.trainer.offline.objective import OfflineObjective, with_objective
from jaxrl.trainer.offline.reward_model import score_objective
from jaxrl.trainer.offline.sft import SFT

OBJECTIVES: dict[str, Callable[[RunConfig], OfflineObjective]] = {
    "sft": lambda cfg: SFT,
    "dpo": lambda cfg: DPO,
    "reward_model": score_objective,
}


def main(arguments: PlanArguments) -> int:
    """Exit status: 0 the run fits, 1 an error that the message explains, 2 it does not fit."""
    cfg, options, simulation = arguments.cfg, arguments.options, arguments.simulation
    try:
        if arguments.compared:
            _compare(*arguments.compared)
            return 0
        decoder = model_shape(cfg.model.path, options.get("model-config", ""))
        if "plan" in options:
            plan = read_plan(options["plan"], "rollout_weight_bytes")
            _check_all_devices(cfg)
            check_devices(cfg, math.prod(plan["mesh"].values()))
            check_config(options["plan"], plan, cfg)
        else:
            compiled, job = _compiled_plan(cfg, decoder, options, simulation)
            if simulation is None or compiled is None:
                return _show(compiled, job, options)
            plan = compiled.json()
        assert simulation is not None, "read_simulation rejects --plan without --schedule"
        print(simulate_text(simulation, cfg, decoder, plan, _report_progress), end="")
    except ProgramTooLarge as error:
        print(error, file=sys.stderr)
        return 2
    except (ValueError, OSError) as error:
        stop(str(error))
    return 0


def _compiled_plan(
    cfg: RunConfig, decoder: DecoderConfig, options: dict[str, str], simulation: Simulation | None
) -> tuple[Plan | None, Job]:
    """(plan or None if a program is too large, the run), compiled for the topology."""
    kind, n = split_name(options["topology"])
    if kind == "cpu":
        jax.config.update("jax_num_cpu_devices", n)
    machine = topology(options["topology"])
    searches = "search" in options and simulation is None
    if not searches:
        check_devices(cfg, len(machine.devices), machine.n_processes)
    if searches or simulation:
        _check_all_devices(cfg)
    response_len = cfg.data.max_response_len
    if simulation:
        response_len = round(float(simulated_lengths(simulation.lengths, cfg).mean()))
    lengths = Lengths(
        int(options.get("prompt-len", cfg.data.max_prompt_len)),
        int(options.get("response-len", response_len)),
    )
    job = make_job(cfg, decoder, machine, lengths, options)
    return _search(job, options) if searches else plan_job(job), job


def _check_all_devices(cfg: RunConfig) -> None:
    """Raises ValueError if the run splits its devices."""
    if cfg.schedule.mode == "async":
        raise ValueError(
            "--search and --schedule plan runs on all devices, but config.schedule.mode='async' "
            "splits them; leave out config.schedule, or the options"
        )


def _show(plan: Plan | None, job: Job, options: dict[str, str]) -> int:
    """Prints a plan, and what to change if it does not fit; returns the exit status."""
    if plan is None:
        return 2
    if file := options.get("json"):
        pathlib.Path(file).write_text(json.dumps(plan.json()))
    if _prints_json(options):
        print(json.dumps(plan.json()))
    else:
        show(plan)
    if not plan.fits and "search" not in options:
        print(remedies_text(job), file=sys.stderr if _prints_json(options) else sys.stdout)
    return 0 if plan.fits else 2


def _prints_json(options: dict[str, str]) -> bool:
    """Whether the object is printed: a bare --json names no file."""
    return options.get("json") == ""


def _compare(*files: str) -> None:
    a, b = (read_plan(file, "programs") for file in files)
    stems = [pathlib.Path(file).stem for file in files]
    print(comparison_text(a, b, (stems[0], stems[1])), end="")


def _search(job: Job, options: dict[str, str]) -> Plan | None:
    """The best plan of a search, whose candidates it prints; None if no program compiled."""
    n = int(options["search"] or FINALISTS)
    found = search(job, finalists=n, on_start=_report_progress)
    found, trials = try_options(job, found, on_start=_report_progress)
    text = f"{search_text(found, job.cfg)}\n{trials_text(trials, found[0][1])}"
    print(text, file=sys.stderr if _prints_json(options) else sys.stdout)
    return found[0][1]


def make_job(
    cfg: RunConfig,
    decoder: DecoderConfig,
    machine: Topology,
    lengths: Lengths,
    options: Mapping[str, str],
) -> Job:
    """The run with all its models; --job is "train" or the name of an offline objective.

    Raises ValueError for a model whose shape is not known, or whose vision tower does not fit.
    """
    paths = {
        "critic": ("critic.path", cfg.critic.path),
        "reward_model": ("reward_model.path", cfg.reward_model.path),
        "judge": ("reward.judge.path", cfg.reward.judge.path),
    }
    paths |= {
        role: (teacher.key, teacher.path) for role, teacher in model_teachers(cfg.algorithm).items()
    }
    role_decoders = {
        name: model_shape(path, option=f"--config.{key}")
        for name, (key, path) in paths.items()
        if path
    }
    if weights := cfg.reward_model.label_weights:  # one for each label of the model
        labels = tuple(f"LABEL_{i}" for i in range(len(weights)))
        role_decoders["reward_model"] = dataclasses.replace(
            role_decoders["reward_model"], labels=labels
        )
    workload: OfflineWorkload | None = None
    if of_config := OBJECTIVES.get(options.get("job", "train")):
        objective = of_config(cfg)
        cfg, workload = with_objective(cfg, objective), objective.workload(cfg)
    else:
        check_only_offline(cfg)
    file = options.get("model-config", "")
    tower = tower_shape(cfg.model.path, file) if cfg.data.images else None
    for name, (key, path) in paths.items():
        if tower is None or not path or name == "judge" or (other := tower_shape(path)) == tower:
            continue
        if name != "teacher":
            raise ValueError(
                f"--config.{key}={path} has another vision tower than the policy, whose features "
                "it would read; leave it out"
            )
        role_decoders[name] = dataclasses.replace(role_decoders[name], tower=other)
    decoder = with_trained_tower(decoder, tower, cfg.model.freeze_vision)
    return Job(cfg, decoder, machine, lengths, role_decoders, workload, tower)


def plan_job(job: Job) -> Plan:
    """The plan of the config as it is. Raises ProgramTooLarge, with what to change."""
    try:
        return make_plan(
            job.cfg,
            job.decoder,
            job.machine,
            role_decoders=job.role_decoders,
            workload=job.workload,
            tower=job.tower,
            lengths=job.lengths,
            on_start=_report_progress,
        )
    except ProgramTooLarge as error:
        raise ProgramTooLarge(f"{error}\n{remedies_text(job)}") from error


def _report_progress(line: str) -> None:
    print(line, file=sys.stderr, flush=True)


if __name__ == "__main__":
    sys.exit(main(ARGUMENTS))
