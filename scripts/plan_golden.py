"""Writes the plans of the committed configs to docs/plans/: a table for people, and its numbers for tests.

python scripts/plan_golden.py [NAME ...]      (default: all; the large ones take minutes each)
"""

import json
import os
import pathlib
import sys

os.environ["JAX_PLATFORMS"] = "cpu"

import jax

from jaxrl.config.command_line import load_config, override
from jaxrl.config.resolve import resolve
from jaxrl.planner.model_shape import model_shape
from jaxrl.planner.plan import Plan, make_plan
from jaxrl.planner.report import as_text
from jaxrl.planner.topology import topology

ROOT = pathlib.Path(__file__).parents[1]
FOLDER = ROOT / "docs" / "plans"
PLANS = {  # name -> config, topology, overrides
    "quickstart.cpu-2": (
        "quickstart",
        "cpu:2",
        {"model.layers": "stacked", "learner.halvings": "0"},
    ),
    "grpo_1p5b.h100-1": ("grpo_1p5b", "h100:1", {}),
    "grpo_1p5b.v5e-2x4": ("grpo_1p5b", "v5e:2x4", {}),
    "grpo_7b.h100-64": ("grpo_7b", "h100:64", {}),
    "grpo_7b.v5p-4x4x4": ("grpo_7b", "v5p:4x4x4", {}),
    "grpo_70b_longctx.v5p-4x8x8": ("grpo_70b_longctx", "v5p:4x8x8", {}),
    "grpo_30b_a3b.v5p-4x4x4": ("grpo_30b_a3b", "v5p:4x4x4", {}),
}


def plan_of(name: str) -> Plan:
    file, machine_name, overrides = PLANS[name]
    config = load_config(str(ROOT / "configs" / f"{file}.py"))
    for key, text in overrides.items():
        override(config, key, text)
    machine = topology(machine_name)
    cfg = resolve(config, n_devices=len(machine.devices))
    return make_plan(cfg, model_shape(cfg.model.path), machine)


def command(name: str) -> str:
    file, machine_name, overrides = PLANS[name]
    keys = "".join(f" --config.{key}={text}" for key, text in overrides.items())
    return f"python -m jaxrl.plan --config=configs/{file}.py --topology={machine_name}{keys}"


def numbers(plan: Plan) -> dict:
    """The object of --json without what differs from run to run."""
    found = plan.json()
    for program in found["programs"].values():
        del program["compile_s"]
    return found


def main() -> None:
    jax.config.update("jax_num_cpu_devices", 8)
    FOLDER.mkdir(exist_ok=True)
    for name in sys.argv[1:] or PLANS:
        plan = plan_of(name)
        table = as_text(plan)
        (FOLDER / f"{name}.txt").write_text(f"$ {command(name)}\n{table}")
        (FOLDER / f"{name}.json").write_text(json.dumps(numbers(plan), indent=1) + "\n")
        print(table, flush=True)


if __name__ == "__main__":
    main()
