"""The compiled programs of a run: the run's own jitted functions, lowered from abstract values."""

import dataclasses
import functools
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jax.sharding import Mesh

from jaxrl.config.choices import ONE_LABEL
from jaxrl.config.keys import RunConfig
from jaxrl.config.teachers import model_teachers
from jaxrl.engine.device.kv_pool import NO_PAGES, PoolBytes
from jaxrl.engine.device.model_runner import COPIES
from jaxrl.engine.engine import PagedEngine
from jaxrl.layout import (
    Layout,
    check_idle_policy,
    rollout_layout,
    training_rules,
    worker_layout,
    worker_mesh,
)
from jaxrl.learner.critic import reward_model_scorer
from jaxrl.learner.image_encoder import ImageEncoder
from jaxrl.learner.programs import (
    Lower,
    TrainingModels,
    TrainingProgram,
    training_models,
    training_programs,
)
from jaxrl.learner.requirements import (
    needs_policy_logp,
    needs_ref_scores,
    shares_base,
)
from jaxrl.learner.roles import make_learner
from jaxrl.learner.router_replay import with_router_replay
from jaxrl.models.config import DecoderConfig, for_platform
from jaxrl.models.decoder import Decoder
from jaxrl.models.lora import with_adapters, without_adapters
from jaxrl.models.spec import abstract_params
from jaxrl.models.vision.config import TowerConfig
from jaxrl.models.vision.tower import tower_specs
from jaxrl.planner.judge import PREFIX as JUDGE
from jaxrl.planner.judge import PlannedJudge, plan_judge
from jaxrl.planner.rollout_devices import n_copies
from jaxrl.rollout.paged_engine import paged_engine
from jaxrl.types import Tree
from sharding import bytes_per_device, host_bytes_per_device, make_mesh, target_platform

# Weights in `RunPrograms.resident` that learner.offload keeps in host memory between uses.
IDLE_STATE = {
    "policy": ("params", "base"),
    "reference": ("ref",),  # and ref_2, ref_3, ... of further teachers
    "critic": ("critic", "critic_base"),
    "reward_model": ("reward_model",),
    "judge": ("judge",),  # its KV pages are freed
}


def idle_state(role: str, resident: Mapping[str, int]) -> list[str]:
    """The names of the state of a role of learner.offload that a run has."""
    names = IDLE_STATE.get(role, ())
    further = [name for name in resident if role == "reference" and name.startswith("ref_")]
    return [*(name for name in names if name in resident), *further]


@dataclasses.dataclass(frozen=True)
class Lengths:
    """Tokens of an average sequence, for time estimates."""

    prompt: int
    response: int


@dataclasses.dataclass(frozen=True)
class OfflineWorkload:
    """Shape of an offline training step (SFT, DPO, reward modelling), which samples nothing."""

    responses_per_example: int  # 1 for SFT, 2 (chosen, rejected) for preference pairs
    # Whether training scores the policy's logprobs. Validation alone needs less memory than an
    # update.
    scores_policy: bool
    has_reference: bool
    heads: tuple[str, ...] = ("vocab",)  # of the trained model
    labels: tuple[str, ...] = ONE_LABEL  # of its head "score"

    def trained(self, decoder: DecoderConfig) -> DecoderConfig:
        """The decoder with the heads that are trained."""
        return dataclasses.replace(decoder, heads=self.heads, labels=self.labels)


class PlannedProgram(NamedTuple):
    """A program of the plan that can be lowered."""

    lower: Lower
    phase: str  # of a step: "rollout", "scoring" or "update"
    # Run state that needs no extra memory while the program runs: it is among the program's
    # arguments, or offloaded to host memory at that time.
    counted_state: tuple[str, ...]
    offloads: tuple[str, ...] = ("policy",)  # roles of learner.offload on the devices meanwhile
    row: TrainingProgram | None = None  # None: it reshards weights, or is an engine's
    with_pages: bool = False  # it runs between rollouts of a step, whose KV pages are there
    lengths: Lengths | None = None  # of its sequences; None: those of the plan
    same_as: str = ""  # an earlier program, with the same shapes, that the run calls for it


@dataclasses.dataclass(frozen=True)
class RunPrograms:
    """A run's programs before compilation, and the bytes of its state. Bytes are per device."""

    cfg: RunConfig
    decoder: DecoderConfig
    table: dict[str, PlannedProgram]  # in the order in which they are compiled
    # State on the devices throughout: params, base (frozen weights below adapters), opt_state,
    # ref, critic, critic_base, critic_opt_state, reward_model, judge, judge_kv, tower,
    # rollout_tower.
    resident: dict[str, int]
    # State in host memory: opt_state, ref, critic, critic_base, critic_opt_state, reward_model,
    # judge, and the larger of the sums of gradients that the updates of policy and critic have in
    # turn.
    host_resident: dict[str, int]
    # Weights of the roles "score" and "rollout", and "ref" if it is training's base: ROLE_aliased
    # are training's own buffers, ROLE_copied are those that are copied, and rollout_made the copy,
    # merged or quantized. With separate devices of the rollout, rollout_aliased are the weights
    # there and rollout_copied what training reshards to send them.
    role_weights: dict[str, int]
    n_sequences: int  # per step
    # Of the rollout; None and 0 in offline training.
    engine: PagedEngine | None = None
    pool_bytes: PoolBytes = NO_PAGES  # of a replica on a device
    state_bytes: int = 0  # of a replica's slots of state on a device
    n_replicas: int = 0  # of all engines
    n_pages: int = 0  # of the pool that the engine's programs are lowered for
    n_rollout_devices: int = 0  # separate from training's; 0: the same
    n_workers: int = 0  # that these devices belong to
    judge: PagedEngine | None = None  # of reward.judge.path


def run_programs(
    cfg: RunConfig,
    decoder: DecoderConfig,
    memory_bytes: int | float,
    role_decoders: Mapping[str, DecoderConfig] | None = None,
    workload: OfflineWorkload | None = None,
    rollout_devices: Sequence[Any] = (),
    tower: TowerConfig | None = None,
) -> RunPrograms:
    """The programs of a run at their largest declared shapes, on the current mesh.

    The rollout's programs are on `rollout_devices` if there are some: the devices of one process or
    rollout worker, which a run with workers may leave out. `role_decoders` has the shapes
    of "critic" (a separate backbone), "teacher", "teacher_2", ..., "reward_model" and "judge"; the
    default is the policy's.
    With `workload` the run is offline training instead of RL. `tower` computes the features of
    images, between other programs and with less memory than they need.

    The KV pool has all pages that the run could fill if they fit in half of the memory that the
    state leaves free. A run that fits then uses exactly the programs that its plan compiled.
    """
    teachers = ("teacher", *model_teachers(cfg.algorithm))
    roles = {name: decoder for name in ("critic", *teachers, "reward_model", "judge")}
    roles |= dict(role_decoders or {})
    dtype, decoder = for_platform(cfg, decoder, target_platform())
    decoder = with_adapters(cfg.lora, decoder)
    if workload is None:
        cfg, _ = with_router_replay(cfg, decoder, target_platform())
    else:
        decoder = workload.trained(decoder)
    models, layouts = _models(cfg, decoder, roles, dtype, workload, tower)
    params = models.state.params
    rows = training_programs(models)
    table = {
        name: PlannedProgram(
            lower,
            row.phase,
            row.reads[name],
            ("policy", *row.offloads),
            row,
            with_pages=row.with_pages,
        )
        for row in rows
        for name, lower in row.largest().items()
    }
    if {"score", "reference"} <= set(table) and models.ref_scorer is models.scorer:
        table["reference"] = table["reference"]._replace(same_as="score")
    state = {name: tree for row in rows for name, tree in row.state.items()}
    if models.kl_params is not None and not shares_base(cfg):
        state["ref"] = models.kl_params
    if isinstance(encoder := models.update.encoder, ImageEncoder):
        state["tower"] = encoder.abstract_tower()
    resident = {name: bytes_per_device(tree) for name, tree in state.items()}
    if workload is None and tower is not None:
        resident |= rollout_tower(cfg, tower, decoder, dtype, rollout_devices)
    judge = plan_judge(cfg, roles["judge"]) if workload is None else None
    if judge is not None:
        resident |= judge.resident
        table |= _judge_programs(cfg, judge)
    on_host = {"opt_state": 0, "gradients": _sums_on_host(models)} | {
        name: host_bytes_per_device(tree) for name, tree in state.items() if "opt_state" in name
    }
    role_weights = _add_resharding(table, cfg, layouts, params)
    responses = cfg.rollout.n if workload is None else workload.responses_per_example
    programs = RunPrograms(
        cfg=cfg,
        decoder=decoder,
        table=table,
        resident=resident,
        host_resident=host_state(cfg, resident, on_host),
        role_weights=role_weights,
        n_sequences=cfg.data.prompts_per_step * responses,
        judge=None if judge is None else judge.engine,
    )
    if workload is None and (rollout_devices or not cfg.schedule.rollout_workers):
        programs = _with_engine(programs, params, dtype, memory_bytes, rollout_devices, tower)
    for role in cfg.learner.offload:
        idle = idle_state(role, resident)
        for name, program in table.items():
            there: Sequence[str] = idle if role in program.offloads else ()
            if role == "reference" and there:  # of several teachers, one at a time
                there = program.counted_state
            counted = (*program.counted_state, *(n for n in idle if n not in there))
            table[name] = program._replace(counted_state=counted)
    return programs


def _judge_programs(cfg: RunConfig, judge: PlannedJudge) -> dict[str, PlannedProgram]:
    """The programs of the engine of a judge from reward.judge.path."""
    return {
        name: PlannedProgram(
            lower,
            "scoring",
            counted,
            ("policy", "judge"),
            with_pages=True,
            lengths=_judge_lengths(cfg),
        )
        for name, (lower, counted) in judge.lowerings().items()
    }


def _judge_lengths(cfg: RunConfig) -> Lengths:
    """The longest request to a judge on the devices, and its verdict."""
    return Lengths(cfg.reward.judge.max_prompt_len, cfg.reward.judge.max_verdict_len)


def _models(
    cfg: RunConfig,
    decoder: DecoderConfig,
    roles: Mapping[str, DecoderConfig],
    dtype: jnp.dtype,
    workload: OfflineWorkload | None,
    tower: TowerConfig | None,
) -> tuple[TrainingModels, dict[str, Layout]]:
    """The models of training with abstract weights; the layouts in which logprobs are scored."""
    steps, mesh = cfg.total_steps or 10**6, jax.sharding.get_mesh()
    rules = training_rules(cfg)
    encoder = None if tower is None else ImageEncoder(Path(), tower, decoder, rules, dtype)
    learner = make_learner(cfg, decoder, dtype, total_steps=steps, backbones=roles, encoder=encoder)
    layouts = {"score": learner.scorer.layout, "reference": learner.ref_scorer.layout}
    if shares_base(cfg):
        ref_params = without_adapters(learner.abstract.params)
    else:
        ref_params = layouts["reference"].abstract_weights(learner.ref_decoder, mesh)
    models = training_models(
        cfg,
        learner,
        learner.abstract,
        ref_params,
        scores_policy=needs_policy_logp(cfg) if workload is None else workload.scores_policy,
        scores_reference=needs_ref_scores(cfg) if workload is None else workload.has_reference,
        more_refs=[
            teacher.scorer.layout.abstract_weights(teacher.decoder, mesh)
            for teacher in learner.teachers
        ],
    )
    if cfg.reward_model.path:
        models.reward_scorer, shape = reward_model_scorer(cfg, roles["reward_model"], dtype)
        models.reward_params = models.reward_scorer.layout.abstract_weights(shape, mesh)
    return models, layouts


def _sums_on_host(models: TrainingModels) -> int:
    """Bytes of host memory per device that summed gradients take; the updates take turns."""
    sums = [models.update.abstract_zeros(models.state.params).grads]
    if (critic := models.critic) is not None:
        with critic.scorer.layout.on_mesh():
            sums.append(critic.update.abstract_zeros(critic.state.params).grads)
    return max(map(host_bytes_per_device, sums))


def _add_resharding(
    table: dict[str, PlannedProgram], cfg: RunConfig, layouts: Mapping[str, Layout], params: Decoder
) -> dict[str, int]:
    """Adds the resharding of training's weights for scoring; returns the bytes of its roles.

    The reference is scored with training's weights if it is the base of adapters.
    """
    weights = {"score": ("score", params)}
    if shares_base(cfg):
        weights["reference"] = ("ref", without_adapters(params))
    role_weights = {}
    for name, (role, training) in weights.items():
        aliased, copied = layouts[name].weight_bytes(training)
        role_weights |= {f"{role}_aliased": aliased, f"{role}_copied": copied}
        if copied and name in table:
            lower = functools.partial(layouts[name].lower, training)
            table[f"reshard_{role}"] = PlannedProgram(lower, "scoring", (f"{role}_copied",))
    return role_weights


def rollout_tower(
    cfg: RunConfig,
    tower: TowerConfig,
    decoder: DecoderConfig,
    dtype: jnp.dtype,
    devices: Sequence[Any],
) -> dict[str, int]:
    """{"rollout_tower": bytes} of the tower of requests on training's devices, if it is a copy.

    With rollout workers it is on the first device of a process.
    """
    mesh = jax.sharding.get_mesh()
    if cfg.schedule.rollout_workers:
        mesh = make_mesh(list(mesh.devices.flat[:1]))
        layout = worker_layout(cfg, decoder, dtype, mesh)
        return {"rollout_tower": rollout_tower_bytes(tower, layout, mesh)}
    layout = rollout_layout(cfg, decoder, dtype, devices)
    copied = layout.per_process and not devices
    return {"rollout_tower": rollout_tower_bytes(tower, layout, mesh)} if copied else {}


def rollout_tower_bytes(tower: TowerConfig | None, layout: Layout, mesh: Mesh) -> int:
    """Bytes per device of a tower on the mesh of a rollout."""
    if tower is None:
        return 0
    specs = tower_specs(tower)
    return bytes_per_device(abstract_params(specs, layout.rules, layout.dtype, layout.mesh(mesh)))


def _with_engine(
    programs: RunPrograms,
    params: Tree,
    dtype: jnp.dtype,
    memory_bytes: int | float,
    devices: Sequence[Any],
    tower: TowerConfig | None,
) -> RunPrograms:
    """Adds the rollout's programs, on `devices` if given; `params` are the training weights.

    Prefill reads the features of images if there is a `tower`.
    """
    cfg, table, mesh = programs.cfg, programs.table, jax.sharding.get_mesh()
    n_workers = cfg.schedule.rollout_workers
    n_sides = n_workers or len({device.process_index for device in mesh.devices.flat})
    if n_workers:  # each has an engine over its devices, and loads weights array by array
        mesh = worker_mesh(cfg, devices)
        layout = worker_layout(cfg, programs.decoder, dtype, mesh)
    else:
        layout = rollout_layout(cfg, programs.decoder, dtype, devices)
        check_idle_policy(cfg, layout)
    engine = paged_engine(cfg, cfg.rollout, layout, programs.decoder, eos_ids=(), tower=tower)
    weights = layout.abstract_weights(programs.decoder, mesh)
    n_bytes = bytes_per_device(weights)
    aliased, copied = (0, 0) if devices else layout.weight_bytes(params)
    used = (
        n_copies(cfg) * n_bytes + (0 if n_workers else rollout_tower_bytes(tower, layout, mesh))
        if devices
        else sum(programs.resident.values()) + n_bytes - aliased
    )
    usable = cfg.rollout.memory_utilization * memory_bytes - used
    with jax.set_mesh(layout.mesh(mesh)):
        pool_bytes, n_replicas = engine.pool.bytes_per_device, engine.pool.n_replicas
        state_bytes = engine.pool.slots_bytes_per_device
    half = (usable - state_bytes) / 2
    max_pages = engine.shapes.max_pages_per_seq
    wanted = cfg.rollout.max_num_seqs * max_pages
    n_pages = cfg.rollout.n_pages or max(pool_bytes.n_pages_in(half, wanted), max_pages)

    @functools.cache
    def engine_program(kind: str, adjusted: bool = False) -> jax.stages.Lowered:
        with jax.set_mesh(layout.mesh(mesh)):
            return engine.runner.lower_largest(weights, n_pages, kind, adjusted=adjusted)

    reshard = functools.partial(layout.lower, params)
    if devices:
        aliased, copied = n_bytes, 0 if n_workers else layout.sent_bytes(params)
        if copied:
            table["send"] = PlannedProgram(reshard, "update", ("rollout_copied",))
    elif copied:
        table["reshard"] = PlannedProgram(reshard, "rollout", ("rollout_copied",))
    shared = () if "policy" in cfg.learner.offload else ("rollout_aliased",)
    for name in dict.fromkeys(one.kind for one in engine.runner.declared(adjustable=False)):
        counted = ("kv",) if name in COPIES else (*shared, "kv")
        lower = functools.partial(engine_program, name)
        table[name] = PlannedProgram(lower, "rollout", counted, offloads=())
    if cfg.reward.judge.on_own_engine:  # its prefill is that of the rollout
        table[f"{JUDGE}decode"] = PlannedProgram(
            functools.partial(engine_program, "decode", adjusted=True),
            "scoring",
            (*shared, "kv"),
            offloads=(),
            with_pages=True,
            lengths=_judge_lengths(cfg),
        )
    return dataclasses.replace(
        programs,
        engine=engine,
        role_weights=programs.role_weights
        | {
            "rollout_aliased": aliased,
            "rollout_copied": copied,
            "rollout_made": n_bytes - aliased,
        },
        pool_bytes=pool_bytes,
        state_bytes=state_bytes,
        n_replicas=n_replicas * (n_sides if devices else mesh.size // layout.mesh(mesh).size),
        n_pages=n_pages,
        n_rollout_devices=len(devices) * n_sides,
        n_workers=n_workers,
    )


def state_before_offload(resident: Mapping[str, int], on_host: Mapping[str, int]) -> int:
    """Bytes on a device when the rollout's copy is made, before the policy is offloaded."""
    idle = set(on_host) - set(IDLE_STATE["policy"])
    return sum(n_bytes for name, n_bytes in resident.items() if name not in idle)


def host_state(
    cfg: RunConfig, resident: Mapping[str, int], updates: Mapping[str, int]
) -> dict[str, int]:
    """Bytes per device of all state in host memory: of the updates, and of idle roles."""
    found = dict(updates)
    for role in cfg.learner.offload:
        found |= {name: resident[name] for name in idle_state(role, resident)}
    return {name: n_bytes for name, n_bytes in found.items() if n_bytes}
