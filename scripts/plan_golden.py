"""Writes the plans of the committed configs to docs/plans/: tables, and their numbers for tests.

    python scripts/plan_golden.py [NAME ...]    (default: all; the large ones take minutes each)

Prints each table and writes docs/plans/NAME.txt and NAME.json. WORKED_PLANS are also rows of the
table in docs/concepts/memory.md, printed after it. SMALL are programs of two layers for the
devices of one host, whose numbers are written to tests/planner/plans/NAME.json. It needs the
TPU and CUDA compilers for the TPU and GPU plans (see jaxrl/planner/topology.py). Example output:

    cpu:2: CPU core, 11.77 GiB per device, mesh fsdp 2; sequences of 64 + 16 tokens
    ...
    step at peak rates: 32.5 s, 158 tokens/s
"""

import dataclasses
import json
import math
import os
import pathlib
import sys

os.environ["JAX_PLATFORMS"] = "cpu"

import jax

from jaxrl.config.command_line import override
from jaxrl.config.config_file import load_config
from jaxrl.config.keys import RunConfig
from jaxrl.config.resolve import resolve
from jaxrl.plan import make_job, plan_job
from jaxrl.planner.compilation import compile_programs
from jaxrl.planner.compiled.timeline import Loop, times
from jaxrl.planner.model_shape import model_shape
from jaxrl.planner.plan import Plan
from jaxrl.planner.programs import Lengths, run_programs
from jaxrl.planner.report import as_text
from jaxrl.planner.topology import topology
from sharding import make_mesh

ROOT = pathlib.Path(__file__).parents[1]
FOLDER = ROOT / "docs" / "plans"
SMALL_FOLDER = ROOT / "tests" / "planner" / "plans"
BOBA_LENGTHS = Lengths(prompt=256, response=14000)
GEO3K_LENGTHS = Lengths(prompt=400, response=512)
SHORT_ROWS = {"learner.token_budget": "4096"}
STACKED = {"model.layers": "stacked"}  # compiles in a tenth of the time
FSDP_8 = {"mesh.replica": "1", "mesh.fsdp": "8", "mesh.tensor": "1"}
ONE_DEVICE = {"mesh.replica": "1", "mesh.fsdp": "1", "mesh.tensor": "1", "rollout.tensor": "1"}
OFFLOADED = {"learner.remat": "offload", "learner.offload": "optimizer,reference"}
RELEASE_KV = {"rollout.release_kv": "True"}
LENGTHS = {  # of an average sequence, where it is not the longest
    "boba_1p5b.h100-8": BOBA_LENGTHS,
    "boba_7b.h100-64": BOBA_LENGTHS,
    "boba_7b.v5p-4x4x4": BOBA_LENGTHS,
    "geo3k_qwen3_vl_8b.h100-8": GEO3K_LENGTHS,
    "geo3k_qwen3_vl_8b.v5p-2x2x2": GEO3K_LENGTHS,
    "geo3k_qwen3_5_9b_lora.h100-8": GEO3K_LENGTHS,
}
PLANS = {  # name -> config, topology, overrides
    "quickstart.cpu-2": (
        "quickstart",
        "cpu:2",
        {"model.layers": "stacked", "learner.halvings": "0"},
    ),
    "grpo_1p5b_h100.h100-1": ("grpo_1p5b_h100", "h100:1", {}),
    "grpo_1p5b.v5e-2x4": ("grpo_1p5b", "v5e:2x4", {}),
    "grpo_7b_h100.h100-64": ("grpo_7b_h100", "h100:64", {}),
    "grpo_7b.v5p-4x4x4": ("grpo_7b", "v5p:4x4x4", {}),
    "grpo_70b_longctx.v5p-4x8x8": ("grpo_70b_longctx", "v5p:4x8x8", {}),
    "boba_1p5b.h100-8": ("boba_1p5b", "h100:8", {"mesh.replica": "1"} | STACKED),
    "boba_7b.h100-64": ("boba_7b", "h100:64", {"mesh.replica": "8"} | STACKED),
    "boba_7b.v5p-4x4x4": (
        "boba_7b",
        "v5p:4x4x4",
        {"mesh.replica": "1", "mesh.fsdp": "64", "learner.xla": "('overlap',)"} | STACKED,
    ),
    "boba_1p5b.h100-128": ("boba_1p5b", "h100:128", {}),
    "boba_7b.h100-192": ("boba_7b", "h100:192", {}),
    "grpo_llama_70b_longctx.h100-128": ("grpo_llama_70b_longctx", "h100:128", {}),
    "grpo_30b_a3b.v5p-4x4x4": ("grpo_30b_a3b", "v5p:4x4x4", {}),
    "grpo_30b_a3b_h100.h100-64": ("grpo_30b_a3b_h100", "h100:64", {}),
    "grpo_qwen3_5_9b.v5p-4x4x2": ("grpo_qwen3_5_9b", "v5p:4x4x2", {}),
    "grpo_qwen3_5_9b_h100.h100-8": ("grpo_qwen3_5_9b_h100", "h100:8", STACKED),
    "grpo_qwen3_5_35b_a3b.v5p-4x4x4": ("grpo_qwen3_5_35b_a3b", "v5p:4x4x4", {}),
    "grpo_qwen3_5_35b_a3b_h100.h100-64": ("grpo_qwen3_5_35b_a3b_h100", "h100:64", {}),
    "grpo_gpt_oss_120b.v5p-4x4x4": ("grpo_gpt_oss_120b", "v5p:4x4x4", {}),
    "grpo_gemma_4_e4b.v5e-2x4": ("grpo_gemma_4_e4b", "v5e:2x4", {}),
    "grpo_gemma_4_31b_lora.v5e-2x4": ("grpo_gemma_4_31b_lora", "v5e:2x4", {}),
    "grpo_gemma_4_31b_nf4_lora.v5e-2x4": (
        "grpo_gemma_4_31b_lora",
        "v5e:2x4",
        {"lora.base_dtype": "nf4", "learner.offload": "()"},
    ),
    "grpo_deepseek_v3.v5p-4x8x8": ("grpo_deepseek_v3", "v5p:4x8x8", {}),
    "grpo_deepseek_v3_h100.h100-256": ("grpo_deepseek_v3_h100", "h100:256", {}),
    "grpo_deepseek_v3_lora_h100.h100-64": ("grpo_deepseek_v3_lora_h100", "h100:64", {}),
    "grpo_glm_4_5_air.h100-8": ("grpo_glm_4_5_air", "h100:8", {}),
    "grpo_glm_4_5_air.v5p-2x2x2": ("grpo_glm_4_5_air", "v5p:2x2x2", {}),
    "distill_7b_from_32b_h100.h100-64": ("distill_7b_from_32b_h100", "h100:64", STACKED),
    "geo3k_qwen3_vl_8b.v5p-2x2x2": ("geo3k_qwen3_vl_8b", "v5p:2x2x2", {}),
    "geo3k_qwen3_5_9b_lora.h100-8": ("geo3k_qwen3_5_9b_lora", "h100:8", STACKED),
}
WORKED_PLANS = {  # those of docs/concepts/memory.md, as PLANS
    "grpo_7b.v5e-2x4": (
        "grpo_7b",
        "v5e:2x4",
        FSDP_8 | {"rollout.tensor": "4", "learner.token_budget": "4096"} | OFFLOADED | RELEASE_KV,
    ),
    "grpo_7b_lora.rtx4090-1": (
        "grpo_7b",
        "rtx4090:1",
        ONE_DEVICE
        | {"lora.rank": "16", "lora.base_dtype": "int8"}
        | {"learner.token_budget": "4096", "learner.remat": "offload"}
        | RELEASE_KV
        | STACKED,
    ),
    "grpo_7b.h100-1": (
        "grpo_7b",
        "h100:1",
        ONE_DEVICE | {"learner.token_budget": "8192"} | OFFLOADED | RELEASE_KV,
    ),
    "grpo_72b_lora.h100-8": (
        "grpo_7b",
        "h100:8",
        {"model.path": "Qwen/Qwen2.5-72B-Instruct"}
        | STACKED
        | FSDP_8
        | {"rollout.tensor": "8", "learner.remat": "full", "learner.token_budget": "4096"}
        | {"lora.rank": "32"}
        | RELEASE_KV,
    ),
    "grpo_llama_70b_longctx.h100-64": (
        "grpo_llama_70b_longctx",
        "h100:64",
        {"mesh.fsdp": "1"} | STACKED | {"learner.remat": "full"} | RELEASE_KV,
    ),
    "grpo_70b_longctx.v5p-4x4x4": (
        "grpo_70b_longctx",
        "v5p:4x4x4",
        {"mesh.replica": "1", "mesh.fsdp": "1", "mesh.sequence": "8", "mesh.tensor": "8"}
        | {"learner.zero": "0", "rollout.release_kv": "False"},
    ),
    "grpo_qwen3_5_9b_lora.h100-1": (
        "grpo_qwen3_5_9b_h100",
        "h100:1",
        STACKED | ONE_DEVICE | {"learner.remat": "full", "lora.rank": "32"},
    ),
    "grpo_qwen3_5_35b_a3b_lora.h100-8": (
        "grpo_qwen3_5_35b_a3b_h100",
        "h100:8",
        FSDP_8
        | {"learner.zero": "0", "learner.remat": "full", "learner.token_budget": "16384"}
        | {"data.prompts_per_step": "64", "learner.mini_batch_prompts": "16"}
        | {"lora.rank": "32"},
    ),
    "grpo_gpt_oss_120b_h100.h100-64": ("grpo_gpt_oss_120b_h100", "h100:64", {}),
    "geo3k_qwen3_vl_8b.h100-8": ("geo3k_qwen3_vl_8b", "h100:8", STACKED),
}
PLANS |= WORKED_PLANS
GIB = 2**30

# Two layers on devices of one host, with the same axes as the whole plan: name -> as in PLANS.
SMALL = {
    "small_7b.v5p-2x2x1": (
        "grpo_7b",
        "v5p:2x2x1",
        {"mesh.replica": "2", "mesh.fsdp": "2", "rollout.tensor": "2"} | SHORT_ROWS,
    ),
    "small_7b_h100.h100-8": (
        "grpo_7b_h100",
        "h100:8",
        {"mesh.replica": "2", "mesh.fsdp": "4"} | SHORT_ROWS,
    ),
}
SMALL_LAYERS = 2
SMALL_PROGRAMS = ("accumulate", "decode")


def config_of(name: str) -> RunConfig:
    """The run of one of PLANS or SMALL."""
    file, machine_name, overrides = (PLANS | SMALL)[name]
    config = load_config(str(ROOT / "configs" / f"{file}.py"))
    for key, text in overrides.items():
        override(config, key, text)
    sizes = machine_name.partition(":")[2].split("x")
    return resolve(config, n_devices=math.prod(map(int, sizes)))


def plan_of(name: str) -> Plan:
    """Compiles the plan of one of PLANS."""
    cfg, machine = config_of(name), topology(PLANS[name][1])
    longest = Lengths(cfg.data.max_prompt_len, cfg.data.max_response_len)
    lengths = LENGTHS.get(name, longest)
    return plan_job(make_job(cfg, model_shape(cfg.model.path), machine, lengths, {}))


def command(name: str) -> str:
    """The command line that prints the same plan."""
    file, machine_name, overrides = PLANS[name]
    keys = "".join(f" --config.{key}={text}" for key, text in overrides.items())
    if lengths := LENGTHS.get(name):
        keys += f" --prompt-len={lengths.prompt} --response-len={lengths.response}"
    return f"python -m jaxrl.plan --config=configs/{file}.py --topology={machine_name}{keys}"


def page_row(name: str) -> str:
    """The row of one of WORKED_PLANS in docs/concepts/memory.md, from its stored numbers.

    Memory per device in GiB: state, peaks of the phases without KV pages, usable, host memory.
    """
    plan = json.loads((FOLDER / f"{name}.json").read_text())
    on_host = plan.get("host_resident", {})
    state = sum(n for role, n in plan["resident"].items() if role not in on_host)
    peaks = [plan["phases"][phase]["live_bytes"] for phase in ("rollout", "scoring", "update")]
    sizes = (state, *peaks, plan["budget_bytes"], sum(on_host.values()))
    counts = (plan["kv_pages"], plan["max_concurrent_sequences"])
    times = (plan["expected_step_s"], plan["serial_step_s"])
    rollout = plan["phases"]["rollout"]["roofline_s"] / plan["expected_step_s"]
    cells = [f"`{name}`", *(f"{n / GIB:.1f}" for n in sizes), *(f"{n:,}" for n in counts)]
    cells += [*(f"{s:,.0f} s" for s in times), f"{rollout:.0%}"]
    return f"| {' | '.join(cells)} |"


def numbers(plan: Plan) -> dict:
    """The object printed with --json, without compile times."""
    found = plan.json()
    for program in found["programs"].values():
        del program["compile_s"]
    return found


def work_of(name: str) -> dict:
    """The work of each program of one of SMALL on a device: {program: {number: value}}.

    `covered` is the share of the time of all-gathers in which kernels run, and of those in loops,
    which gather the weights of stacked layers. No other times.
    """
    cfg, machine = config_of(name), topology(SMALL[name][1])
    decoder = model_shape(cfg.model.path)
    decoder = dataclasses.replace(decoder, layers=decoder.layers[:SMALL_LAYERS])
    with jax.set_mesh(make_mesh(machine.devices, **dataclasses.asdict(cfg.mesh))):
        run = run_programs(cfg, decoder, machine.chip.memory_bytes)
        table = {program: run.table[program] for program in SMALL_PROGRAMS}
        run = dataclasses.replace(run, table=table)
        lengths = Lengths(cfg.data.max_prompt_len, cfg.data.max_response_len)
        programs = compile_programs(run, lengths, machine)
    return {
        program: {
            "temp_bytes": found.temp_bytes,
            "flops": found.cost.total_flops,
            "bytes_accessed": found.cost.bytes_accessed,
            "collective_bytes": {
                kind: one["bytes"] for kind, one in found.cost.collectives_by_kind().items()
            },
            "covered": {
                part: round(times(steps, machine.chip).covered("all-gather"), 3)
                for part, steps in (
                    ("all", found.cost.steps),
                    ("loops", [step for step in found.cost.steps if isinstance(step, Loop)]),
                )
            },
        }
        for program, found in programs.items()
    }


def main() -> None:
    if "-h" in sys.argv or "--help" in sys.argv:
        print(f"{__doc__}\nnames: {', '.join(PLANS | SMALL)}")
        return
    jax.config.update("jax_num_cpu_devices", 8)
    FOLDER.mkdir(exist_ok=True)
    SMALL_FOLDER.mkdir(exist_ok=True)
    for name in sys.argv[1:] or PLANS | SMALL:
        if name in SMALL:
            text = json.dumps(work_of(name), indent=1)
            (SMALL_FOLDER / f"{name}.json").write_text(f"{text}\n")
            print(text, flush=True)
            continue
        plan = plan_of(name)
        table = as_text(plan)
        (FOLDER / f"{name}.txt").write_text(f"$ {command(name)}\n{table}")
        (FOLDER / f"{name}.json").write_text(json.dumps(numbers(plan), indent=1) + "\n")
        print(table, flush=True)
        if name in WORKED_PLANS:
            print(page_row(name), flush=True)


if __name__ == "__main__":
    main()
