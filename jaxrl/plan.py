"""Plans memory and step time: does a run fit, how fast can it be?

    python -m jaxrl.plan --config=configs/grpo_7b.py --topology=v5p:4x4x4

Compiles the programs of a run for devices that need not be attached, from the model's config.json.

    --topology=NAME        v5e:2x4, v5p:4x4x4, v6e:16x16, h100:64, h200:8, cpu:8
    --model-config=PATH    config.json (or its folder) of a model that is not on this machine
    --prompt-len=N         average prompt length in tokens (default: data.max_prompt_len)
    --response-len=N       average response length in tokens (default: data.max_response_len)
    --job=NAME             program that the config is for: train (default), sft, dpo, reward_model
    --json                 print one JSON object instead of tables
    --search[=N]           try meshes, token budgets and remat policies; compile until N (3) fit
"""

import json
import os
import sys

if __name__ == "__main__":  # before jax is imported: does not open attached devices
    os.environ["JAX_PLATFORMS"] = "cpu"
    os.environ.setdefault("TF_CPP_MIN_LOG_LEVEL", "3")

import jax

from jaxrl.config.command_line import read_args, read_options, stop
from jaxrl.config.keys import RunConfig
from jaxrl.config.resolve import resolve
from jaxrl.models.config import DecoderConfig
from jaxrl.planner.compilation import ProgramTooLarge
from jaxrl.planner.model_shape import model_shape
from jaxrl.planner.plan import Plan, make_plan
from jaxrl.planner.programs import Lengths, OfflineWorkload
from jaxrl.planner.report import search_text, show
from jaxrl.planner.search import search
from jaxrl.planner.topology import KNOWN, Topology, simulated_cpus, topology
from jaxrl.trainer.offline.dpo import DPO
from jaxrl.trainer.offline.objective import with_objective
from jaxrl.trainer.offline.reward_model import REWARD_MODEL
from jaxrl.trainer.offline.sft import SFT

OPTIONS = ("topology", "model-config", "prompt-len", "response-len", "search", "job", "json")
OBJECTIVES = {"sft": SFT, "dpo": DPO, "reward_model": REWARD_MODEL}


def main() -> int:
    """Exit status: 0 the run fits, 1 an error that the message explains, 2 it does not fit."""
    config, rest = read_args(sys.argv[1:])
    options = read_options(rest, OPTIONS)
    _check_options(options)
    if n := simulated_cpus(options["topology"]):
        jax.config.update("jax_num_cpu_devices", n)
    try:
        machine = topology(options["topology"])
        n_devices = None if "search" in options else len(machine.devices)
        cfg = resolve(config, n_devices=n_devices)
        decoder = model_shape(cfg.model.path, options.get("model-config", ""))
        lengths = Lengths(
            int(options.get("prompt-len", cfg.data.max_prompt_len)),
            int(options.get("response-len", cfg.data.max_response_len)),
        )
        if "search" in options:
            plan = _search(cfg, decoder, machine, lengths, options)
        else:
            plan = _plan(cfg, decoder, machine, lengths, options.get("job", "train"))
    except ProgramTooLarge as error:
        print(error, file=sys.stderr)
        return 2
    except ValueError as error:
        stop(str(error))
    if plan is None:
        return 2
    if "json" in options:
        print(json.dumps(plan.json()))
    else:
        show(plan)
    return 0 if plan.fits else 2


def _check_options(options: dict[str, str]) -> None:
    """Exits with one message if options are missing or contradict each other."""
    if "topology" not in options:
        stop(f"--topology is missing; set it to one of {KNOWN}")
    job = options.get("job", "train")
    if job not in ("train", *OBJECTIVES):
        stop(f"unknown --job={job}; set one of train, {', '.join(OBJECTIVES)}")
    if "search" in options and job != "train":
        stop("--search is for --job=train; leave out one of them")


def _search(
    cfg: RunConfig,
    decoder: DecoderConfig,
    machine: Topology,
    lengths: Lengths,
    options: dict[str, str],
) -> Plan | None:
    """The best plan of a search, whose candidates it prints; None if no program compiled."""
    n = int(options["search"] or 3)
    found = search(cfg, decoder, machine, lengths=lengths, finalists=n, on_start=_report_progress)
    print(search_text(found), file=sys.stderr if "json" in options else sys.stdout)
    return found[0][1]


def _plan(
    cfg: RunConfig, decoder: DecoderConfig, machine: Topology, lengths: Lengths, job: str
) -> Plan:
    """The plan of the config as it is."""
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
    if objective := OBJECTIVES.get(job):
        cfg, workload = with_objective(cfg, objective), objective.workload
    return make_plan(
        cfg,
        decoder,
        machine,
        role_decoders=role_decoders,
        workload=workload,
        lengths=lengths,
        on_start=_report_progress,
    )


def _report_progress(line: str) -> None:
    print(line, file=sys.stderr, flush=True)


if __name__ == "__main__":
    sys.exit(main())
