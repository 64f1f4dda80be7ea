"""The formulas of estimate.py against the compiled plans of docs/plans."""

import dataclasses
import math
import pathlib
import shlex
import types

import pytest

from jaxrl.config.command_line import parse
from jaxrl.json_text import parse_json
from jaxrl.planner.chips import CHIPS
from jaxrl.planner.estimate import estimate_memory, free_bytes, rollout_seconds, step_seconds
from jaxrl.planner.model_shape import model_shape
from jaxrl.planner.programs import Lengths
from jaxrl.planner.sizes import Job, model_sizes, settings_of
from jaxrl.planner.topology import Topology

PLANS = pathlib.Path(__file__).parents[2] / "docs" / "plans"


@dataclasses.dataclass(frozen=True)
class Stored:
    """A plan of docs/plans: the options of its command, and some of its numbers."""

    options: dict[str, str]
    update_bytes: float  # live without KV
    rollout_s: float  # kernels one after the other
    step_s: float

    @property
    def topology(self) -> Topology:
        name = self.options["--topology"]
        chip, shape = name.split(":")
        n_devices = math.prod(int(axis) for axis in shape.split("x"))
        platform = "tpu" if chip.startswith("v") else "cpu" if chip == "cpu" else "gpu"
        node = CHIPS[chip].node or n_devices
        devices = [types.SimpleNamespace(id=i, process_index=i // node) for i in range(n_devices)]
        return Topology(name, platform, CHIPS[chip], devices)

    @property
    def job(self) -> Job:
        keys = [f"{key}={value}" for key, value in self.options.items() if "--config" in key]
        cfg = parse(keys)
        prompt = int(self.options.get("--prompt-len", cfg.data.max_prompt_len))
        response = int(self.options.get("--response-len", cfg.data.max_response_len))
        model = self.options.get("--model-config", cfg.model.path)
        return Job(cfg, model_shape(model), self.topology, Lengths(prompt, response))


def stored(name: str) -> Stored:
    command = (PLANS / f"{name}.txt").read_text().splitlines()[0]
    numbers = parse_json((PLANS / f"{name}.json").read_text())
    phases = numbers["phases"]
    return Stored(
        dict(word.split("=", 1) for word in shlex.split(command)[4:]),
        phases["update"]["live_bytes"],
        phases["rollout"]["serial_s"],
        numbers["serial_step_s"],
    )


@pytest.mark.parametrize(
    ("name", "rollout"),
    [
        ("boba_7b.h100-64", 0.9),
        ("grpo_1p5b.v5e-2x4", 1.0),
        ("grpo_1p5b_h100.h100-1", 1.1),
        ("grpo_30b_a3b.v5p-4x4x4", 1.0),
        ("grpo_30b_a3b_h100.h100-64", 1.1),
        ("grpo_70b_longctx.v5p-4x8x8", 1.1),
        ("grpo_7b.h100-1", 1.25),
        ("grpo_7b.v5p-4x4x4", 0.95),
        ("grpo_7b_h100.h100-64", 1.1),
        ("grpo_gpt_oss_120b_h100.h100-64", 0.85),
        ("grpo_qwen3_5_35b_a3b.v5p-4x4x4", 0.85),
        ("grpo_qwen3_5_35b_a3b_h100.h100-64", 0.95),
        ("grpo_qwen3_5_35b_a3b_lora.h100-8", 0.9),
        ("grpo_qwen3_5_9b_h100.h100-8", 0.95),
    ],
)
def test_estimates_agree_with_compiled_plans(name, rollout):
    plan = stored(name)
    job = plan.job
    chosen = settings_of(job)
    memory = estimate_memory(job, chosen)
    assert 0.9 < memory.update / plan.update_bytes < 1.3
    free = free_bytes(job, chosen, memory)
    decode_s = rollout_seconds(job, model_sizes(job, "policy", chosen), free)
    assert decode_s / plan.rollout_s == pytest.approx(rollout, abs=0.1)
    training = (step_seconds(job, chosen, memory) - decode_s) / (plan.step_s - plan.rollout_s)
    assert 0.7 < training < 1.0
