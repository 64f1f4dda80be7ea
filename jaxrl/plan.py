"""python -m jaxrl.plan --config=configs/grpo_7b.py --topology=v5p:4x4x4: does it fit, how fast can it be.

Compiles the programs of a run for devices that need not be attached, from the model's config.json alone.

    --topology=NAME        v5e:2x4, v5p:4x4x4, v6e:16x16, h100:64, h200:8, cpu:8
    --model-config=PATH    config.json (or its folder) of a model that is not on this machine
    --prompt-len=N         tokens of an average prompt (default: data.max_prompt_len)
    --response-len=N       tokens of an average response (default: data.max_response_len)
    --job=NAME             train (default), sft, dpo or reward_model: the program that the config is for
    --json                 one JSON object instead of tables
    --search[=N]           try meshes, token budgets and remat policies; compile until N of them fit (3)
"""

import json
import os
import sys

if __name__ == "__main__":  # before jax is imported: devices that are here are not asked for
    os.environ["JAX_PLATFORMS"] = "cpu"
    os.environ.setdefault("TF_CPP_MIN_LOG_LEVEL", "3")

import jax

from jaxrl.config.command_line import read_args, read_options, stop
from jaxrl.config.resolve import resolve
from jaxrl.planner.model_shape import model_shape
from jaxrl.planner.plan import make_plan
from jaxrl.planner.programs import Lengths, TooLarge
from jaxrl.planner.report import search_text, show
from jaxrl.planner.search import search
from jaxrl.planner.topology import KNOWN, simulated_cpus, topology
from jaxrl.trainer.offline.dpo import DPO
from jaxrl.trainer.offline.objective import with_objective
from jaxrl.trainer.offline.reward_model import REWARD_MODEL
from jaxrl.trainer.offline.sft import SFT

OPTIONS = ("topology", "model-config", "prompt-len", "response-len", "search", "job", "json")
LESSONS = {"sft": SFT, "dpo": DPO, "reward_model": REWARD_MODEL}


def main() -> int:
    """Exit status: 0 it fits, 1 a mistake that the message explains, 2 it does not fit."""
    config, rest = read_args(sys.argv[1:])
    options = read_options(rest, OPTIONS)
    if "topology" not in options:
        stop(f"no topology is given; set --topology to one of {KNOWN}")
    job = options.get("job", "train")
    if job not in ("train", *LESSONS):
        stop(f"--job={job} is not known; set one of train, {', '.join(LESSONS)}")
    if "search" in options and job != "train":
        stop("--search is for --job=train; leave one of them out")
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

        def say(name: str) -> None:
            print(name, file=sys.stderr, flush=True)

        if "search" in options:
            n = int(options["search"] or 3)
            found = search(cfg, decoder, machine, lengths=lengths, finalists=n, on_start=say)
            print(search_text(found), file=sys.stderr if "json" in options else sys.stdout)
            plan = found[0][1]
            if plan is None:
                return 2
        else:
            paths = {
                "critic": ("critic.path", cfg.critic.path),
                "teacher": ("algorithm.teacher", cfg.algorithm.teacher),
                "reward_model": ("reward_model.path", cfg.reward_model.path),
            }
            others = {
                name: model_shape(path, instead=f"--config.{key}")
                for name, (key, path) in paths.items()
                if path
            }
            workload = None
            if lesson := LESSONS.get(job):
                cfg, workload = with_objective(cfg, lesson), lesson.workload
            how = {"others": others, "workload": workload, "lengths": lengths, "on_start": say}
            plan = make_plan(cfg, decoder, machine, **how)
    except TooLarge as problem:
        print(f"{problem}", file=sys.stderr)
        return 2
    except ValueError as problem:
        stop(str(problem))
    if "json" in options:
        print(json.dumps(plan.json()))
    else:
        show(plan)
    return 0 if plan.fits else 2


if __name__ == "__main__":
    sys.exit(main())
