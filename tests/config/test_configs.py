"""Tests of configs/: every file resolves; updates of large models type-check without devices."""

import ast
import dataclasses
import functools
import importlib
import pathlib

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from jaxrl.algorithms import advantages, kl
from jaxrl.algorithms.losses import aggregation, importance, policy_loss, rejection
from jaxrl.config import choices
from jaxrl.config.config_file import load_config
from jaxrl.config.keys import LearnerConfig, LogConfig, RunConfig
from jaxrl.config.resolve import resolve
from jaxrl.config.schema import to_dict
from jaxrl.environments import api
from jaxrl.kernels import attention, gated_delta, grouped_matmul, paged_attention
from jaxrl.learner.optimizer import make_optimizer
from jaxrl.learner.state import init_state
from jaxrl.learner.step import make_score, make_update, make_value_update, make_values
from jaxrl.models import remat
from jaxrl.models.decoder import decoder_specs
from jaxrl.models.lora import split
from jaxrl.models.mesh_check import check_mesh
from jaxrl.models.spec import abstract_params, count_params
from jaxrl.planner.chips import CHIPS
from jaxrl.planner.model_shape import model_shape
from jaxrl.planner.programs import Lengths
from jaxrl.planner.search import estimate
from jaxrl.planner.sizes import CandidateSettings, Job
from jaxrl.planner.topology import Topology
from jaxrl.rewards import functions
from jaxrl.tool_calls import formats
from jaxrl.tracking.loggers import make_loggers
from jaxrl.types import Batch, TrainState
from sharding import PRESETS, TRAIN, abstract_mesh

CONFIGS = pathlib.Path(__file__).parents[2] / "configs"
# Devices named in the docstring; 1 if it names none.
DEVICES = {
    "boba_1p5b": 128,
    "boba_7b": 192,
    "distill_7b_from_32b_h100": 64,
    "geo3k_qwen3_vl_8b": 8,
    "geo3k_qwen3_5_9b_lora": 8,
    "grpo_7b": 64,
    "grpo_7b_h100": 64,
    "ppo_7b": 64,
    "grpo_70b_longctx": 256,
    "grpo_llama_70b_longctx": 128,
    "grpo_30b_a3b": 64,
    "grpo_30b_a3b_h100": 64,
    "grpo_qwen3_5_9b": 32,
    "grpo_qwen3_5_9b_h100": 8,
    "grpo_qwen3_5_35b_a3b": 64,
    "grpo_qwen3_5_35b_a3b_h100": 64,
    "grpo_gpt_oss_120b": 64,
    "grpo_gpt_oss_120b_h100": 64,
    "grpo_deepseek_v3": 256,
    "grpo_deepseek_v3_h100": 256,
    "grpo_deepseek_v3_lora_h100": 64,
    "grpo_glm_4_5_air": 8,
    "grpo_gemma_4_e4b": 8,
    "grpo_gemma_4_31b_lora": 8,
}
FILES = sorted(path.stem for path in CONFIGS.glob("*.py"))
INTS = ("tokens", "targets", "segments", "positions", "until", "copies")
# Number of parameters of the model that a config names.
LARGE = {"grpo_7b": 7_615_616_512, "grpo_30b_a3b": 30_532_122_624}


def run_of(name: str) -> RunConfig:
    return resolve(load_config(str(CONFIGS / f"{name}.py")), n_devices=DEVICES.get(name, 1))


@pytest.mark.parametrize("name", FILES)
def test_config_resolves_for_the_devices_in_its_docstring(name):
    assert run_of(name).name == name


@pytest.mark.parametrize("name", FILES)
def test_the_docstring_of_a_config_has_its_command(name):
    doc = ast.get_docstring(ast.parse((CONFIGS / f"{name}.py").read_text())) or ""
    programs = {"sft": "sft", "vision": "sft", "dpo": "dpo", "reward": "reward_model"}
    program = "train" if name.endswith("_grpo") else programs.get(name.split("_")[0], "train")
    assert f"python -m jaxrl.{program} --config=configs/{name}.py" in doc
    assert importlib.import_module(f"configs.{name}").get_config() is not None


def abstract_batch(run: RunConfig, mesh) -> Batch:
    """The largest micro-batch of a run: rows for every data-parallel rank."""
    rows, row_len = run.learner.shapes[-1]
    rows *= mesh.shape["replica"] * mesh.shape["fsdp"] * mesh.shape["expert"]
    sharding = jax.sharding.NamedSharding(mesh, TRAIN.spec("batch", "time"))
    return Batch(
        **{
            name: jax.ShapeDtypeStruct(
                (rows, row_len), jnp.int32 if name in INTS else jnp.float32, sharding=sharding
            )
            for name in Batch.__dataclass_fields__
            if name not in ("support", "experts", "images", "axis_positions", "parts", "teacher")
        }
    )


@pytest.fixture
def no_compiler_options(monkeypatch):
    """JAX refuses them for a program within `jax.eval_shape`."""
    monkeypatch.setattr("jaxrl.learner.step._options", lambda cfg: None)


@pytest.mark.parametrize(
    ("name", "stacked"),
    [
        ("grpo_7b", True),
        pytest.param("grpo_7b", False, marks=pytest.mark.thorough),
        pytest.param("grpo_30b_a3b", True, marks=pytest.mark.thorough),
    ],
)
def test_update_and_scoring_of_a_large_model_type_check_on_an_abstract_mesh(
    name, stacked, no_compiler_options
):
    run = run_of(name)
    model = dataclasses.replace(model_shape(run.model.path), stacked=stacked)
    specs = decoder_specs(model)
    assert count_params(specs) == LARGE[name]
    sizes = {axis: getattr(run.mesh, axis) for axis in ("replica", "fsdp", "expert", "tensor")}
    mesh = abstract_mesh(64, **sizes)
    check_mesh(model, mesh.shape)
    with jax.sharding.use_abstract_mesh(mesh):
        optimizer = make_optimizer(run.learner, 1000, split(specs)[0])
        params = abstract_params(specs, TRAIN, jnp.bfloat16)
        state = jax.eval_shape(lambda params: init_state(params, optimizer), params)
        batch = abstract_batch(run, mesh)
        logp, entropy = jax.eval_shape(make_score(run, TRAIN), state.params, batch)
        assert logp.shape == entropy.shape == batch.tokens.shape and logp.dtype == jnp.float32
        update = make_update(run, optimizer, TRAIN)
        total = jax.eval_shape(update.zeros, state.params)
        total = jax.eval_shape(update.accumulate, state.params, None, total, batch)
        step = functools.partial(update.apply, extra_weight=np.float32(0))
        new, metrics = jax.eval_shape(step, state, total)
    assert_same_types(new, state)
    assert metrics["loss/total"].shape == ()


def test_the_critic_of_a_large_model_type_checks_on_an_abstract_mesh(no_compiler_options):
    run = run_of("ppo_7b").critic_run
    model = dataclasses.replace(model_shape(run.model.path), stacked=True, heads=("score",))
    specs = decoder_specs(model)
    # Qwen2.5-7B without its unembedding [152064, 3584], with a head of 3584 numbers
    assert count_params(specs) == LARGE["grpo_7b"] - 152064 * 3584 + 3584
    mesh = abstract_mesh(64, fsdp=run.mesh.fsdp, tensor=run.mesh.tensor)
    with jax.sharding.use_abstract_mesh(mesh):
        optimizer = make_optimizer(run.learner, 1000, split(specs)[0])
        params = abstract_params(specs, TRAIN, jnp.bfloat16)
        state = jax.eval_shape(lambda params: init_state(params, optimizer), params)
        batch = abstract_batch(run, mesh)
        assert batch.tokens.shape == (16 * 8, 4096)  # 32768 tokens a rank
        values = jax.eval_shape(make_values(run, TRAIN), state.params, batch)
        assert values.shape == batch.tokens.shape and values.dtype == jnp.float32
        update = make_value_update(run, optimizer, TRAIN)
        total = jax.eval_shape(update.zeros, state.params)
        total = jax.eval_shape(update.accumulate, state.params, None, total, batch)
        step = functools.partial(update.apply, extra_weight=np.float32(0))
        new, metrics = jax.eval_shape(step, state, total)
    assert_same_types(new, state)
    assert metrics["critic/loss"].shape == ()


@pytest.mark.parametrize(
    ("name", "n_params"),
    [
        ("boba_1p5b", 1_777_088_000),
        ("boba_7b", 7_615_616_512),
        ("distill_7b_from_32b_h100", 7_615_616_512),
        ("grpo_llama_70b_longctx", 70_553_706_496),
        ("geo3k_qwen3_vl_8b", 8_190_735_360),
    ],
)
def test_a_benchmark_case_fits_its_gpus_by_the_formulas_of_the_planner(name, n_params):
    run = run_of(name)
    decoder = dataclasses.replace(model_shape(run.model.path), stacked=True)
    assert count_params(decoder_specs(decoder)) == n_params
    mesh = {axis: size for axis, size in to_dict(run.mesh).items() if size > 1}
    check_mesh(decoder, mesh)
    check_mesh(decoder, {"tensor": run.rollout.tensor or run.mesh.tensor})
    machine = Topology("h100", "gpu", CHIPS["h100"], [None] * DEVICES[name])
    learner = run.learner
    lengths = Lengths(run.data.max_prompt_len, run.data.max_response_len)
    settings = CandidateSettings(
        mesh,
        learner.token_budget,
        learner.remat,
        learner.offload,
        learner.zero,
        learner.mlp_chunk,
    )
    teacher = run.algorithm.teacher
    others = {"teacher": model_shape(teacher)} if teacher else {}
    found = estimate(Job(run, decoder, machine, lengths, others), settings)
    share = run.rollout.memory_utilization
    assert found.bytes < share * machine.chip.memory_bytes


def assert_same_types(new: TrainState, old: TrainState) -> None:
    """The update keeps shape, dtype and sharding of every array."""
    for a, b in zip(jax.tree.leaves(new), jax.tree.leaves(old), strict=True):
        assert (a.shape, a.dtype) == (b.shape, b.dtype)
        if b.ndim:  # counters are replicated
            assert a.sharding.spec == b.sharding.spec


TABLES = {
    "advantage": (choices.ADVANTAGES, advantages.ADVANTAGES),
    "policy_loss": (choices.POLICY_LOSSES, policy_loss.POLICY_LOSSES),
    "aggregation": (choices.AGGREGATIONS, aggregation.AGGREGATIONS),
    "kl": (choices.KLS, kl.KL_ESTIMATORS),
    "correction": (choices.CORRECTIONS, importance.CORRECTIONS),
    "rejection": (choices.REJECTIONS, rejection.REJECTIONS),
    "remat": (choices.REMATS, remat.REMAT_POLICIES),
    "rewards": (choices.REWARDS, functions.BUILT_IN),
    "environments": (choices.ENVIRONMENTS, api.BUILT_IN),
    "agents": (choices.AGENTS, api.AGENTS),
    "tool_formats": (choices.TOOL_FORMATS, {"auto", *formats.FORMATS}),
    "attention": (choices.ATTENTIONS, {"auto", *attention.IMPLEMENTATIONS}),
    "paged_attention": (choices.PAGED_ATTENTIONS, {"auto", *paged_attention.IMPLEMENTATIONS}),
    "gated_delta": (choices.GATED_DELTAS, {"auto", *gated_delta.STEPS}),
    "grouped_matmul": (
        choices.GROUPED_MATMULS,
        {"auto", *grouped_matmul.IMPLEMENTATIONS},
    ),
}


@pytest.mark.parametrize("key", TABLES)
def test_choices_of_a_key_are_the_names_in_the_code(key):
    names, table = TABLES[key]
    assert set(names) == set(table)


def test_every_sequence_parallelism_is_a_preset_that_shards_rows():
    assert all(PRESETS[name].time == "sequence" for name in choices.SEQUENCE_PARALLELS)


def error_of(make, *args) -> str:
    with pytest.raises(ValueError) as error:
        make(*args)
    return str(error.value)


def test_choices_are_the_names_that_loggers_and_optimizers_accept(tmp_path):
    run = run_of("gsm8k_smollm2")
    loggers = error_of(make_loggers, LogConfig(loggers=("no",)), tmp_path, run, None)
    optimizer = error_of(make_optimizer, LearnerConfig(optimizer="no"), 10, {})
    schedule = error_of(make_optimizer, LearnerConfig(lr_schedule="no"), 10, {})
    assert loggers.endswith(", ".join(choices.LOGGERS))
    assert optimizer.endswith(", ".join(map(repr, choices.OPTIMIZERS)))
    assert schedule.endswith(", ".join(map(repr, choices.LR_SCHEDULES)))
