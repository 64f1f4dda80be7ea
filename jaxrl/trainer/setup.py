"""Builds a run from its config. The cheap checks come first: folder, data, tokenizer, rewards; then devices."""

import contextlib
import dataclasses
import functools
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp

from jaxrl.config.keys import RolloutConfig, RunConfig
from jaxrl.config.resolve import check_devices
from jaxrl.data.chat import ChatRenderer
from jaxrl.data.iterator import BatchIterator
from jaxrl.data.tokenizer import stop_ids
from jaxrl.engine.engine import PagedEngine
from jaxrl.environments.pool import EnvironmentPool
from jaxrl.io.checkpoint.checkpointer import Checkpointer
from jaxrl.io.tracking.loggers import make_loggers
from jaxrl.io.tracking.progress import Progress
from jaxrl.layout import Layout, role_layout, rollout_layout, training_rules
from jaxrl.learner.critic import Critic, make_critic, policy_steps, shared_values
from jaxrl.learner.optimizer import Optimizer, make_optimizer
from jaxrl.learner.requirements import needs_ref
from jaxrl.learner.state import abstract_state, init_state
from jaxrl.learner.step import Scorer, make_update, make_value_update
from jaxrl.models.config import DecoderConfig, for_platform
from jaxrl.models.decoder import Decoder, decoder_specs
from jaxrl.models.files.hf_load import load_params, model_config
from jaxrl.models.files.source import resolve_model
from jaxrl.models.spec import count_params
from jaxrl.planner.check import check_plan, device_memory, plan_line
from jaxrl.planner.plan import Plan
from jaxrl.rewards.pool import RewardPool
from jaxrl.rollout.engines import Engines
from jaxrl.rollout.multi_turn import Limits
from jaxrl.runtime.compile_watch import CompileWatch
from jaxrl.runtime.host_memory import keep_freed_memory
from jaxrl.runtime.multihost import check_all_joined, check_same_data, join
from jaxrl.runtime.signals import StopFlag, stop_on_signals
from jaxrl.trainer.check_models import check_critic, check_teacher
from jaxrl.trainer.coefficients import Coefficients, first_coefficients
from jaxrl.trainer.folder import open_folder
from jaxrl.trainer.inputs import load_data, load_val, make_iterator, make_renderer
from jaxrl.trainer.offline.offline import Lesson, Offline
from jaxrl.trainer.run import Evaluation, Run
from jaxrl.trainer.scoring import RewardModel, open_reward_model
from jaxrl.trainer.shaping import RewardScale
from jaxrl.trainer.warmup import warm_up, warm_up_learner
from jaxrl.types import TrainState
from sharding import check_host_memory, hosts, make_mesh, to_host
from sharding.rules import Rules


@contextlib.contextmanager
def open_run(cfg: RunConfig) -> Iterator[Run]:
    """All parts of a run, from its newest checkpoint where the folder has one; closed at the end.

    Raises ValueError or OSError with one message for whatever the config, the model, the data or the
    folder is not right for.
    """
    with contextlib.ExitStack() as stack:
        base = open_base(cfg, stack)
        with hosts.raise_together():
            prompts, val_prompts = load_data(cfg, base.renderer, base.progress)
            iterator = make_iterator(cfg, prompts)
            rewards = stack.enter_context(reward_pool(cfg, base.renderer))
            environments = open_environments(cfg, stack)
        check_same_data(prompts, val_prompts)
        ready = open_devices(cfg, base, stack)
        folders = {"critic": base.critic_folder, "teacher": base.ref_folder}
        if base.reward_folder is not None:
            folders["reward_model"] = base.reward_folder
        others = {name: model_config(folder) for name, folder in folders.items()}
        plan = checked_plan(cfg, ready, others=others)
        reward_model = reward_model_of(cfg, ready)
        rollout = dataclasses.replace(cfg.rollout, n_pages=plan.kv_pages) if plan else cfg.rollout
        run = Run(
            **job(cfg, ready, stack, iterator, has_reference=needs_ref(cfg)),
            val=val_prompts,
            rewards=rewards,
            reward_model=reward_model,
            engines=make_engines(cfg, rollout, ready, environments),
        )
        if not run.done:
            warm_up(run)
        yield run


@contextlib.contextmanager
def open_evaluation(cfg: RunConfig) -> Iterator[Evaluation]:
    """The model of a run with its engine compiled, its validation prompts and its rewards: nothing learns.

    Raises as `open_run`.
    """
    with contextlib.ExitStack() as stack:
        base = open_base(cfg, stack)
        with hosts.raise_together():
            prompts = load_val(cfg, base.renderer)
            rewards = stack.enter_context(reward_pool(cfg, base.renderer))
            environments = open_environments(cfg, stack)
        base.progress.status(f"data: {len(prompts)} prompts")
        check_same_data([], prompts)
        ready = open_devices(cfg, base, stack)
        reward_model = reward_model_of(cfg, ready)
        engines = make_engines(cfg, cfg.rollout, ready, environments)
        layout = engines.layout
        stack.enter_context(layout.on_mesh())
        with base.progress.waiting("loading weights, compiling prefill and decode"):
            params = load_params(base.model_folder, layout.rules, ready.decoder, layout.dtype)
            params = layout.quantize(params)
            engines.engine.warmup(params)
        yield Evaluation(prompts, rewards, reward_model, engines, params)


@contextlib.contextmanager
def open_offline(cfg: RunConfig, lesson: Lesson) -> Iterator[Offline]:
    """All parts of a run that learns from given data; otherwise as `open_run`."""
    with contextlib.ExitStack() as stack:
        base = open_base(cfg, stack)
        with hosts.raise_together():
            load = functools.partial(
                lesson.load,
                renderer=base.renderer,
                data=cfg.data,
                stop=stop_ids(base.model_folder, base.renderer.tokenizer),
            )
            items = load(cfg.data.train)
            val = load(cfg.data.val, limit=cfg.data.val_prompts) if cfg.data.val else []
            iterator = make_iterator(cfg, items)
        base.progress.status(f"data: {len(items)} to learn from, {len(val)} held out")
        check_same_data(items, val)
        ready = open_devices(cfg, base, stack)
        given = lesson.given
        decoder = dataclasses.replace(ready.decoder, heads=given.heads)
        ready = dataclasses.replace(ready, decoder=decoder)
        checked_plan(cfg, ready, workload=given)
        run = Offline(
            **job(cfg, ready, stack, iterator, has_reference=given.has_reference),
            val=val,
            lesson=lesson,
        )
        if not run.done:
            warm_up_learner(run, policy="vocab" in given.heads, reference=given.has_reference)
        yield run


@dataclasses.dataclass(frozen=True)
class Base:
    """What every job has before its data and devices."""

    stop: StopFlag
    progress: Progress
    watch: CompileWatch
    model_folder: Path
    decoder: DecoderConfig
    renderer: ChatRenderer
    critic_folder: Path  # the policy's, where the critic has none of its own
    ref_folder: Path  # the policy's, where there is no teacher
    reward_folder: Path | None  # of a reward model


@dataclasses.dataclass(frozen=True)
class Ready(Base):
    """The same with its devices, on which 'auto' in `decoder` has a meaning."""

    dtype: jnp.dtype  # of the weights


def open_base(cfg: RunConfig, stack: contextlib.ExitStack) -> Base:
    """Joins the other processes and opens the folder, the model's config and its tokenizer."""
    keep_programs(cfg)
    join(cfg)
    stop = stack.enter_context(stop_on_signals())
    progress = stack.enter_context(Progress())
    watch = CompileWatch(progress.compiled)
    stack.callback(watch.detach)
    progress.status(f"run folder {cfg.run_path}")
    with hosts.main_process_first():
        open_folder(cfg)
        model_folder = resolve_model(cfg.model.path)
        critic_folder = other_folder("critic.path", cfg.critic.path) or model_folder
        ref_folder = other_folder("algorithm.teacher", cfg.algorithm.teacher) or model_folder
        reward_folder = other_folder("reward_model.path", cfg.reward_model.path)
    with hosts.raise_together():
        decoder = model_config(model_folder)
        renderer = make_renderer(cfg, model_folder, decoder)
        check_critic(cfg, critic_folder, renderer.tokenizer)
        check_teacher(cfg, ref_folder, renderer.tokenizer, decoder)
    folders = critic_folder, ref_folder, reward_folder
    return Base(stop, progress, watch, model_folder, decoder, renderer, *folders)


def other_folder(key: str, path: str) -> Path | None:
    """Of a model beside the policy."""
    return resolve_model(path, key=f"config.{key}") if path else None


def open_devices(cfg: RunConfig, base: Base, stack: contextlib.ExitStack) -> Ready:
    """Opens the devices and sets their mesh."""
    dtype, decoder = start_devices(cfg, base.decoder, base.progress)
    mesh = make_mesh(**dataclasses.asdict(cfg.mesh))
    stack.enter_context(jax.set_mesh(mesh))
    sizes = " x ".join(f"{axis} {n}" for axis, n in mesh.shape.items() if n > 1) or "1"
    where = f" in {n} processes" if (n := hosts.n_processes()) > 1 else ""
    kind = jax.devices()[0].device_kind
    base.progress.status(f"mesh {sizes} of {kind} ({jax.default_backend()}){where}")
    return Ready(**vars(base) | {"decoder": decoder, "dtype": dtype})


def checked_plan(cfg: RunConfig, ready: Ready, **how: Any) -> Plan | None:
    """The run's plan, which fits, where plan_check is on and devices report their memory; `how` goes to
    `check_plan`."""
    memory = device_memory()
    if not cfg.plan_check or memory is None:
        return None
    with ready.progress.waiting("planning: compiling all programs"):
        plan = check_plan(cfg, ready.decoder, memory, **how)
    ready.progress.status(plan_line(plan))
    return plan


def job(
    cfg: RunConfig,
    ready: Ready,
    stack: contextlib.ExitStack,
    iterator: BatchIterator,
    *,
    has_reference: bool,
) -> dict[str, Any]:
    """The fields of a Job but for its held-out data: weights, optimizer, compiled functions, checkpoints, logs."""
    rules = training_rules(cfg)
    checkpoints = Checkpointer(cfg.run_path / "checkpoints", cfg.checkpoint)
    stack.callback(checkpoints.close)
    steps = cfg.total_steps or iterator.steps_per_epoch * cfg.total_epochs
    specs = decoder_specs(ready.decoder)
    optimizer = make_optimizer(cfg.learner, policy_steps(cfg, steps) * cfg.updates_per_step, specs)
    has_score = "score" in ready.decoder.heads
    critic, values = None, shared_values(cfg, ready.dtype) if has_score else None
    if cfg.has_critic and values is None:
        critic = make_critic(cfg, ready.critic_folder, None, ready.dtype, steps)
        values = critic.values
    scorer = ref_scorer = Scorer(cfg, role_layout(cfg, "score", ready.decoder, ready.dtype))
    ref_decoder = ready.decoder
    if cfg.algorithm.teacher:
        teacher = model_config(ready.ref_folder)
        ref_decoder = for_platform(cfg, teacher, jax.default_backend())[1]
    if cfg.ref != cfg.score or cfg.algorithm.teacher:
        ref_scorer = Scorer(cfg, role_layout(cfg, "ref", ref_decoder, ready.dtype))
    of_ref = ref_scorer.layout
    state, host = first_state(cfg, rules, ready, optimizer, critic, checkpoints, of_ref)
    step = host.get("step", 0)
    if host:
        iterator.restore(host["iterator"])
    state, ref_params = dataclasses.replace(state, ref=None), state.ref
    if has_reference and ref_params is None:
        ref_params = reference(cfg, of_ref, state, step, ready, ref_decoder)
    make = make_update if "vocab" in ready.decoder.heads else make_value_update
    logger = make_loggers(cfg.log, cfg.run_path, cfg, step if host else None, total_steps=steps)
    stack.callback(logger.close)
    return dict(
        cfg=cfg,
        folder=cfg.run_path,
        model_folder=ready.model_folder,
        total_steps=steps,
        n_ranks=rules.n_shards("batch"),
        renderer=ready.renderer,
        iterator=iterator,
        optimizer=optimizer,
        update=make(cfg, optimizer, rules),
        scorer=scorer,
        ref_scorer=ref_scorer,
        values=values,
        critic=critic,
        ref_params=ref_params,
        checkpoints=checkpoints,
        logger=logger,
        progress=ready.progress,
        watch=ready.watch,
        stop=ready.stop,
        state=state,
        coefs=Coefficients(**host["coefs"]) if host else first_coefficients(cfg),
        reward_scale=RewardScale(**host.get("reward_scale", {})),
        step=step,
        position=iterator.state(),
        first_step=step,
        validated_at=host.get("validated_at", -1),
        val_metrics=host.get("val_metrics", {}),
        saved_at=step if host else -1,
    )


def reward_model_of(cfg: RunConfig, ready: Ready) -> RewardModel | None:
    if ready.reward_folder is None:
        return None
    with ready.progress.waiting(f"loading the reward model {cfg.reward_model.path}"):
        return open_reward_model(cfg, ready.reward_folder, ready.dtype)


def reward_pool(cfg: RunConfig, renderer: ChatRenderer) -> RewardPool:
    return RewardPool(cfg.reward, functools.partial(renderer.decode, skip_special=False))


def keep_programs(cfg: RunConfig) -> None:
    """Where compiled programs are kept between runs; it must stand before the first one compiles."""
    cache = Path(cfg.compilation_cache or "~/.cache/jaxrl/xla").expanduser()
    jax.config.update("jax_compilation_cache_dir", str(cache))


def start_devices(
    cfg: RunConfig, decoder: DecoderConfig, progress: Progress
) -> tuple[jnp.dtype, DecoderConfig]:
    """Opens the backend; what 'auto' means for it: (dtype, layers as a list or stacked)."""
    check_all_joined()
    check_devices(cfg, jax.device_count())
    if cfg.learner.offload:
        check_host_memory()
    backend = jax.default_backend()
    if backend == "cpu":
        keep_freed_memory()
    dtype, decoder = for_platform(cfg, decoder, backend)
    if cfg.learner.router_aux_coef and not decoder.E:
        raise ValueError(
            f"config.learner.router_aux_coef = {cfg.learner.router_aux_coef} balances experts, but this "
            f"{decoder.family} model has none; set it to 0"
        )
    n_params = count_params(decoder_specs(decoder))
    progress.status(
        f"model {cfg.model.path}: {decoder.family}, {n_params / 1e6:.1f} M parameters, {dtype}"
    )
    return dtype, decoder


def first_state(
    cfg: RunConfig,
    rules: Rules,
    ready: Ready,
    optimizer: Optimizer,
    critic: Critic | None,
    checkpoints: Checkpointer,
    of_ref: Layout,
) -> tuple[TrainState, dict]:
    """The state of the newest checkpoint and what was saved beside it, else that of the model folder; the
    critic gets its own."""
    step, offload = hosts.broadcast(checkpoints.latest_step()), "optimizer" in cfg.learner.offload
    if step is None:
        if cfg.resume:
            raise ValueError(
                f"there is no checkpoint in {cfg.run_path}/checkpoints to resume from; "
                "set config.run_dir to the folder of the run, or leave out config.resume"
            )
        params = load_params(ready.model_folder, rules, ready.decoder, ready.dtype)
        if critic is not None:
            critic.load(offload=offload)
        return init_state(params, optimizer, offload=offload), {}
    ready.progress.status(f"resuming after step {step}")
    specs, mesh = decoder_specs(ready.decoder), jax.sharding.get_mesh()
    abstract = abstract_state(specs, ready.dtype, optimizer, rules, mesh, offload=offload)
    if cfg.algorithm.ref_refresh_every:
        ref = of_ref.abstract_weights(ready.decoder, mesh)
        away = "reference" in cfg.learner.offload
        abstract = dataclasses.replace(abstract, ref=to_host(ref) if away else ref)
    if critic is None:
        return checkpoints.restore(abstract, step)
    saved, host = checkpoints.restore(dataclasses.replace(abstract, critic=critic.state), step)
    critic.state = saved.critic
    return dataclasses.replace(saved, critic=None), host


def reference(
    cfg: RunConfig,
    layout: Layout,
    state: TrainState,
    step: int,
    ready: Ready,
    decoder: DecoderConfig,
) -> Decoder:
    """The frozen model that the policy is compared with: the model of step 0, or a teacher."""
    if step == 0 and layout.resharding is None and not cfg.algorithm.teacher:
        ref = layout.copy(state.params)
    else:
        with layout.on_mesh():
            ref = load_params(ready.ref_folder, layout.rules, decoder, layout.dtype)
    return to_host(ref) if "reference" in cfg.learner.offload else ref


def open_environments(cfg: RunConfig, stack: contextlib.ExitStack) -> EnvironmentPool | None:
    return stack.enter_context(EnvironmentPool(cfg.env)) if cfg.env.name else None


def make_engines(
    cfg: RunConfig,
    rollout: RolloutConfig,
    ready: Ready,
    environments: EnvironmentPool | None,
) -> Engines:
    """The engines of the run, with the sizes of `rollout`."""
    layout = rollout_layout(cfg, ready.decoder, ready.dtype)
    if environments is not None:
        check_not_in_step(cfg, layout)
    return Engines(
        layout=layout,
        engine=make_engine(cfg, rollout, layout, ready.decoder, ready.model_folder, ready.renderer),
        renderer=ready.renderer,
        limits=Limits(cfg.data.max_prompt_len, cfg.data.max_response_len, cfg.env.max_turns),
        environments=environments,
        progress=ready.progress,
        stop=ready.stop,
    )


def check_not_in_step(cfg: RunConfig, layout: Layout) -> None:
    """Raises AgreedError where an engine over several processes is to answer to environments."""
    if hosts.n_processes() > 1 and not layout.per_process:
        raise hosts.AgreedError(
            f"config.env.name={cfg.env.name!r}: environments answer the processes at different times, but one engine "
            "over all of them decodes in lock-step; set config.rollout.engines='process' and a mesh that allows it"
        )


def make_engine(
    cfg: RunConfig,
    rollout: RolloutConfig,
    layout: Layout,
    decoder: DecoderConfig,
    model_folder: Path,
    renderer: ChatRenderer,
) -> PagedEngine:
    name = cfg.model.paged_attention
    return PagedEngine(
        decoder,
        rollout,
        rules=layout.rules,
        dtype=layout.dtype,
        max_len=cfg.data.max_len,
        eos_ids=stop_ids(model_folder, renderer.tokenizer),
        implementation=None if name == "auto" else name,
    )
