"""Opens a run from its config in four stages, each of which takes the value of the one before.

    session    the process group, the lock of the run folder, progress output     session.py
    host side  models' folders, tokenizer, data, rewards, environments            host.py
    devices    mesh, plan, learner, engine; programs compile from now on          this file
    run        weights, checkpoints, loggers; the rest of the compilation         this file

RL, offline training and evaluation share them. The errors of a stage are ValueError or OSError, and
come before the work of the next one.
"""

import contextlib
import dataclasses
import functools
from collections.abc import Iterator
from pathlib import Path

import jax
import jax.numpy as jnp

from jaxrl.checkpoint.checkpointer import Checkpointer
from jaxrl.config.keys import RunConfig
from jaxrl.config.resolve import check_only_offline
from jaxrl.data.content import check_content, content
from jaxrl.layout import Layout, training_rules
from jaxrl.learner.coefficients import Coefficients, initial_coefficients
from jaxrl.learner.image_encoder import ImageEncoder
from jaxrl.learner.requirements import needs_ref, shares_base
from jaxrl.learner.reward_model import RewardModel
from jaxrl.learner.roles import Learner, make_learner
from jaxrl.learner.router_replay import with_router_replay
from jaxrl.learner.state import checkpoint_state, init_state
from jaxrl.models.config import DecoderConfig
from jaxrl.models.decoder import Decoder, decoder_specs
from jaxrl.models.files.adapter import load_with_adapters
from jaxrl.models.files.hf_load import load_params
from jaxrl.models.files.kept_record import write_record
from jaxrl.models.lora import with_base
from jaxrl.models.spec import partition_specs
from jaxrl.models.vision.files import load_whole
from jaxrl.planner.chips import chip_of
from jaxrl.planner.programs import OfflineWorkload
from jaxrl.rewards.pool import RewardPool
from jaxrl.rewards.worker_thread import OwnFunctions
from jaxrl.rollout.engines import Engines
from jaxrl.rollout.remote.weights import RemoteWeights
from jaxrl.runtime.compilation import CompileThreads
from jaxrl.runtime.start import end_loading
from jaxrl.tracking.loggers import make_loggers
from jaxrl.trainer.checkpointing import check_disk
from jaxrl.trainer.core import Clock, Core, Run
from jaxrl.trainer.loop import run_to_end
from jaxrl.trainer.memory import explain_out_of_memory
from jaxrl.trainer.offline.objective import (
    OfflineObjective,
    OfflineRun,
    train_step,
    validate,
    with_objective,
)
from jaxrl.trainer.phases.length_stages import LengthStage
from jaxrl.trainer.phases.rewards import RewardErrors, RewardScale
from jaxrl.trainer.phases.update import load_reference_towers
from jaxrl.trainer.setup.devices import Policy, open_plan, open_policy
from jaxrl.trainer.setup.engines import (
    check_rollout_layout,
    load_reward_model,
    make_source,
    open_engines,
    open_images,
    open_local_judge,
    with_idle_policy,
)
from jaxrl.trainer.setup.host import HostSide, open_evaluation_host, open_host, open_offline_host
from jaxrl.trainer.setup.session import open_session, record_start
from jaxrl.trainer.setup.warmup import lowered_before_loading, warm_up, warm_up_offline
from jaxrl.types import Prompt, TrainState
from sharding import Resharding, Rules, hosts, make_mesh, to_host


@dataclasses.dataclass(frozen=True)
class Devices:
    """The devices and programs of a run, before its weights are loaded."""

    host: HostSide
    policy: Policy
    learner: Learner
    threads: CompileThreads  # compile the programs that read the policy
    engines: Engines | None = None  # None in offline training
    reward_model: RewardModel | None = None  # None if none is configured


@dataclasses.dataclass(frozen=True)
class Evaluation:
    """A model, prompts and rewards for sampling without training."""

    prompts: list[Prompt]
    rewards: RewardPool
    reward_model: RewardModel | None
    engines: Engines
    params: Decoder  # sharded by engines.layout


@contextlib.contextmanager
def open_run(cfg: RunConfig, own_rewards: OwnFunctions | None = None) -> Iterator[Run]:
    """Opens an RL run, resumed from the newest checkpoint in its folder.

    `own_rewards` are the functions of this process that reward.functions names, if it names such.
    Raises ValueError or OSError if the config, the models, the data or the folder is invalid.
    """
    check_only_offline(cfg)
    with contextlib.ExitStack() as stack:
        session = open_session(cfg, stack)
        host = open_host(session, own_rewards)
        devices = open_devices(host)
        yield start_run(devices)


@contextlib.contextmanager
def open_offline(cfg: RunConfig, objective: OfflineObjective) -> Iterator[OfflineRun]:
    """Opens an offline training run (SFT, DPO, reward modelling).

    Raises the errors of `open_run`.
    """
    with contextlib.ExitStack() as stack:
        session = open_session(cfg, stack)
        host = open_offline_host(session, objective.maker)
        devices = open_offline_devices(host, objective.workload(cfg))
        yield start_offline(devices, objective)


@contextlib.contextmanager
def open_evaluation(
    cfg: RunConfig, own_rewards: OwnFunctions | None = None
) -> Iterator[Evaluation]:
    """Opens a model with its compiled engine, the validation prompts and the rewards.

    `own_rewards` and the errors are those of `open_run`.
    """
    with contextlib.ExitStack() as stack:
        session = open_session(cfg, stack)
        host = open_evaluation_host(session, own_rewards)
        stack.enter_context(explain_out_of_memory(cfg.run_path, None))
        policy = open_policy(host)
        reward_model = load_reward_model(host, policy)
        engines = open_engines(host, policy, cfg.rollout)
        layout = engines.layout
        assert isinstance(layout, Layout) and host.rewards is not None
        stack.enter_context(layout.on_mesh())
        engines = with_own_tower(engines, host, policy)
        with session.progress.waiting("loading weights, compiling prefill and decode"):
            folder = host.models.folders.policy
            params = load_params(folder, layout.rules, policy.decoder, layout.dtype)
            params = layout.prepare(params)
            engines.engine.warmup(params)
        yield Evaluation(list(host.val), host.rewards, reward_model, engines, params)


def open_devices(host: HostSide) -> Devices:
    """The mesh, the plan, the learner and the engine of an RL run. Compilation has started."""
    policy = open_policy(host)
    host = with_replay(host, policy)
    cfg = host.session.cfg
    check_rollout_layout(cfg, policy)
    plan = open_plan(host, policy)
    reward_model = load_reward_model(host, policy)
    rollout = dataclasses.replace(cfg.rollout, n_pages=plan.kv_pages) if plan else cfg.rollout
    learner = build_learner(host, policy)
    engines = open_engines(host, policy, rollout, learner.encoder)
    threads = host.session.stack.enter_context(CompileThreads())
    threads.lower(lowered_before_loading(cfg, learner, engines.layout, engines.engine))
    return Devices(host, policy, learner, threads, engines, reward_model)


def with_replay(host: HostSide, policy: Policy) -> HostSide:
    """The host side with learner.router_replay resolved, which is shown for models with experts."""
    session = host.session
    cfg, reason = with_router_replay(session.cfg, policy.decoder, jax.default_backend())
    if policy.decoder.expert_layers:
        why = f" (auto: {reason})" if reason else ""
        session.progress.status(f"router replay: {cfg.learner.router_replay}{why}")
    return dataclasses.replace(host, session=dataclasses.replace(session, cfg=cfg))


def open_offline_devices(host: HostSide, workload: OfflineWorkload) -> Devices:
    """As `open_devices`, for offline training: there is no engine."""
    if (replay := host.session.cfg.learner.router_replay) not in ("auto", "off"):
        raise ValueError(
            f"config.learner.router_replay={replay!r} replays the experts of rollouts, which "
            "offline training does not have; set it to 'auto' or 'off'"
        )
    policy = open_policy(host)
    policy = dataclasses.replace(policy, decoder=workload.trained(policy.decoder))
    open_plan(host, policy, workload)
    learner = build_learner(host, policy)
    threads = host.session.stack.enter_context(CompileThreads())
    threads.lower(lowered_before_loading(host.session.cfg, learner))
    return Devices(host, policy, learner, threads)


def build_learner(host: HostSide, policy: Policy) -> Learner:
    """The learner on training's mesh, which is the current one.

    Raises ValueError if the state or a layout is invalid.
    """
    cfg, folders, iterator = host.session.cfg, host.models.folders, host.iterator
    assert iterator is not None
    return make_learner(
        cfg,
        policy.decoder,
        policy.dtype,
        total_steps=cfg.total_steps or iterator.steps_per_epoch * cfg.total_epochs,
        backbones=folders.other_configs(),
        critic_folder=folders.critic,
        encoder=make_encoder(host, policy, training_rules(cfg)),
    )


def make_encoder(host: HostSide, policy: Policy, rules: Rules) -> ImageEncoder | None:
    """Returns the encoder of images on the current mesh, or None for a run without images."""
    models = host.models
    if models.tower is None:
        return None
    return ImageEncoder(models.folders.policy, models.tower, policy.decoder, rules, policy.dtype)


def with_own_tower(engines: Engines, host: HostSide, policy: Policy) -> Engines:
    """Engines whose images are read by a tower on the devices of this process, if the run has any.

    Rollout workers get the features with the requests, and have no tower.
    """
    layout = engines.layout
    if isinstance(layout, RemoteWeights):
        rules, mesh = layout.layout.rules, make_mesh(jax.local_devices()[:1])
    else:
        rules, mesh = layout.rules, layout.mesh(jax.sharding.get_mesh())
    with jax.set_mesh(mesh):
        if (encoder := make_encoder(host, policy, rules)) is None:
            return engines
        encoder.load()
    return dataclasses.replace(engines, images=open_images(host.models, encoder))


def with_moved_tower(engines: Engines, policy: Policy) -> Engines:
    """Engines whose own tower becomes training's before each rollout, if that is trained."""
    layout, images = engines.layout, engines.images
    if policy.decoder.tower is None or images is None:
        return engines
    assert isinstance(layout, Layout) and isinstance(layout.resharding, Resharding)
    specs = partition_specs(decoder_specs(policy.decoder).tower, layout.rules)
    move = functools.partial(layout.resharding.reshard, specs=specs, dtype=policy.dtype)
    return dataclasses.replace(engines, images=dataclasses.replace(images, move=move))


def start_run(devices: Devices) -> Run:
    """Loads the weights of an RL run and compiles the rest of its programs."""
    host, engines = devices.host, devices.engines
    assert engines is not None and host.rewards is not None
    cfg = host.session.cfg
    core = load_core(devices, has_reference=needs_ref(cfg))
    engines = with_idle_policy(engines, core)
    # A thread generates, or processes generate different responses: not in step with training
    alone = cfg.schedule.mode == "async" or engines.layout.per_process
    if alone:
        engines = with_moved_tower(with_own_tower(engines, host, devices.policy), devices.policy)
    run = Run(
        core=core,
        rewards=host.rewards,
        reward_errors=RewardErrors(
            cfg.reward.max_error_fraction, in_file="jsonl" in cfg.log.loggers
        ),
        reward_model=devices.reward_model,
        engines=engines,
        source=make_source(core, engines, host.rewards),
        judge=open_local_judge(host, engines),
    )
    if not core.clock.done:
        warm_up(run, devices.threads)
    return run


def start_offline(devices: Devices, objective: OfflineObjective) -> OfflineRun:
    """As `start_run`, for offline training."""
    workload = objective.workload(devices.host.session.cfg)
    core = load_core(devices, has_reference=workload.has_reference)
    if not core.clock.done:
        warm_up_offline(
            core,
            devices.threads,
            scores_policy="vocab" in workload.heads,
            scores_reference=workload.has_reference,
        )
    return OfflineRun(core, objective)


def load_core(devices: Devices, *, has_reference: bool) -> Core:
    """Loads weights; opens checkpoints and loggers.

    Restores the state from the newest checkpoint if there is one.
    """
    host, learner = devices.host, devices.learner
    session, cfg, iterator = host.session, host.session.cfg, host.iterator
    assert iterator is not None
    checkpoints = Checkpointer(cfg.run_path / "checkpoints", cfg.checkpoint)
    session.stack.callback(checkpoints.close)
    state, saved = load_state(host, devices.policy, learner, checkpoints)
    if learner.encoder is not None:
        learner.encoder.load(state.params.tower)
    step = saved.get("step", 0)
    contents = {name: content(items) for name, items in host.datasets.items()}
    if saved:
        iterator.restore(saved["iterator"])
        check_content(saved.get("contents", {}), contents)
    state, reference = dataclasses.replace(state, ref=None), state.ref
    if has_reference and reference is None and not shares_base(cfg):
        reference = load_reference(host, learner, state, step)
    resume_step = step if saved else None
    record_start(cfg.run_path, resume_step)
    if hosts.is_main_process():
        write_record(cfg.run_path, host.models.folders.policy, is_new=not saved)
    logger = make_loggers(cfg.log, cfg.run_path, cfg, resume_step, total_steps=learner.total_steps)
    session.stack.callback(logger.close)
    clock = Clock(
        cfg=cfg,
        total_steps=learner.total_steps,
        validates=bool(host.val),
        step=step,
        first_step=step,
        validated_at=saved.get("validated_at", -1),
        val_metrics=saved.get("val_metrics", {}),
        saved_at=step if saved else -1,
    )
    core = Core(
        cfg=cfg,
        session=session,
        checkpoints=checkpoints,
        logger=logger,
        models=host.models,
        learner=learner,
        iterator=iterator,
        val=host.val,
        contents=contents,
        clock=clock,
        state=state,
        reference=reference,
        more_references=load_teachers(host, learner) if has_reference else (),
        coefs=Coefficients(**saved["coefs"]) if saved else initial_coefficients(cfg),
        reward_scale=RewardScale(**saved.get("reward_scale", {})),
        role_baselines=saved.get("role_baselines", {}),
        peak_flops=peak_flops(devices.policy.dtype),
        position=iterator.state(),
        in_flight=(lambda: saved["in_flight"]) if "in_flight" in saved else None,
        length_stage=LengthStage(**saved.get("length_stage", {})),
        demonstrations=host.demonstrations,
        endpoints=host.endpoints,
    )
    if learner.encoder is not None:
        load_reference_towers(core)
    check_disk(core)
    return core


def peak_flops(dtype: jnp.dtype) -> float | None:
    """The peak FLOP/s of all devices at weights of this dtype; None if it is unknown."""
    chip = chip_of(jax.devices()[0].device_kind)
    if chip is None:
        return None
    return jax.device_count() * chip.rate("bf16" if dtype.itemsize == 2 else "f32")


def load_state(
    host: HostSide, policy: Policy, learner: Learner, checkpoints: Checkpointer
) -> tuple[TrainState, dict]:
    """(state, host values) of the newest checkpoint, or (initial state, {}) without a checkpoint.

    Also loads or restores the state of a separate critic, in place.
    """
    cfg, models = host.session.cfg, host.models
    rules, critic = learner.rules, learner.critic
    step, offload = hosts.broadcast(checkpoints.latest_step()), "optimizer" in cfg.learner.offload
    if step is None:
        if cfg.resume:
            raise ValueError(
                f"there is no checkpoint in {cfg.run_path}/checkpoints to resume from; "
                "set config.run_dir to the folder of the run, or leave out config.resume"
            )
        params = load_with_adapters(
            models.folders.policy,
            rules,
            policy.decoder,
            policy.dtype,
            seed=cfg.seed,
            adapter=cfg.lora.path,
        )
        if critic is not None:
            critic.load(offload=offload)
        return init_state(params, learner.optimizer, offload=offload), {}
    host.session.progress.status(f"resuming after step {step}")
    abstract, mesh = learner.abstract, jax.sharding.get_mesh()
    if cfg.algorithm.ref_refresh_every:
        ref = learner.ref_scorer.layout.abstract_weights(policy.decoder, mesh)
        offload_ref = "reference" in cfg.learner.offload
        abstract = dataclasses.replace(abstract, ref=to_host(ref) if offload_ref else ref)
    abstract = checkpoint_state(abstract)
    if critic is not None:
        abstract = dataclasses.replace(abstract, critic=checkpoint_state(critic.state))
    saved, values = checkpoints.restore(abstract, step)
    if critic is not None:
        critic.restore(saved.critic)
    params = saved.params
    if policy.decoder.lora is not None:
        base = load_whole(models.folders.policy, rules, policy.decoder, policy.dtype)
        params = with_base(params, base)
    return dataclasses.replace(saved, params=params, critic=None), values


def load_reference(host: HostSide, learner: Learner, state: TrainState, step: int) -> Decoder:
    """The frozen reference model: the policy of step 0, or a teacher."""
    cfg, folder = host.session.cfg, host.models.folders.reference
    layout = learner.ref_scorer.layout
    if step or layout.resharding is not None or cfg.algorithm.teacher:
        return load_frozen(cfg, folder, layout, learner.ref_decoder)
    ref = layout.copy(state.params)
    return to_host(ref) if "reference" in cfg.learner.offload else ref


def load_teachers(host: HostSide, learner: Learner) -> list[Decoder]:
    """The models of algorithm.more_teachers on the devices, each in host memory if offloaded."""
    cfg, folders = host.session.cfg, host.models.folders.teachers
    return [
        load_frozen(cfg, folders[teacher.role], teacher.scorer.layout, teacher.decoder)
        for teacher in learner.teachers
    ]


def load_frozen(cfg: RunConfig, folder: Path, layout: Layout, decoder: DecoderConfig) -> Decoder:
    """A model that scores as a reference, in host memory if learner.offload has "reference"."""
    with layout.on_mesh():
        ref = load_whole(folder, layout.rules, decoder, layout.dtype)
    return to_host(ref) if "reference" in cfg.learner.offload else ref


def train_offline(cfg: RunConfig, objective: OfflineObjective) -> bool:
    """Trains to the last step. Returns False if the run was interrupted and its state saved."""
    with open_offline(with_objective(cfg, objective), objective) as run:
        end_loading()
        return run_to_end(run, train_step, validate)
