"""Builds a run from its config. The cheap checks come first: folder, data, tokenizer, rewards; then devices."""

import contextlib
import dataclasses
from collections.abc import Iterator
from pathlib import Path

import jax
import jax.numpy as jnp

from jaxrl.config import RolloutConfig, RunConfig, check_devices
from jaxrl.data.chat import ChatRenderer, check_tokenizer, load_tokenizer, stop_ids
from jaxrl.data.iterator import PromptIterator
from jaxrl.data.prompts import load_prompts
from jaxrl.host_memory import keep_freed_memory
from jaxrl.io.checkpoint import Checkpointer
from jaxrl.io.loggers import make_loggers
from jaxrl.io.progress import Progress
from jaxrl.learner.layout import Layout, role_layout, rollout_layout, training_rules
from jaxrl.learner.needs import needs_ref
from jaxrl.learner.optimizer import Optimizer, make_optimizer
from jaxrl.learner.state import abstract_state, frozen_copy, init_state
from jaxrl.learner.step import Scorer, make_update
from jaxrl.models.auto import for_platform
from jaxrl.models.config import DecoderConfig
from jaxrl.models.decoder import Decoder, decoder_specs
from jaxrl.models.hf_load import load_model, model_config
from jaxrl.models.source import resolve_model
from jaxrl.models.spec import count_params
from jaxrl.planner.check import check_plan, device_memory, plan_line
from jaxrl.rewards.pool import RewardPool
from jaxrl.rollout.engine import PagedEngine
from jaxrl.trainer.coefficients import Coefficients, first_coefficients
from jaxrl.trainer.compiles import CompileWatch
from jaxrl.trainer.engines import Engines
from jaxrl.trainer.folder import open_folder
from jaxrl.trainer.interrupt import stop_on_signals
from jaxrl.trainer.processes import check_all_joined, check_same_data, join
from jaxrl.trainer.run import Run
from jaxrl.trainer.warmup import warm_up
from jaxrl.types import Prompt, TrainState
from sharding import check_host_memory, hosts, make_mesh, to_host
from sharding.rules import Rules


@contextlib.contextmanager
def open_run(cfg: RunConfig) -> Iterator[Run]:
    """All parts of a run, from its newest checkpoint where the folder has one; closed at the end.

    Raises ValueError or OSError with one message for whatever the config, the model, the data or the
    folder is not right for.
    """
    with contextlib.ExitStack() as stack:
        keep_programs(cfg)
        join(cfg)
        stop = stack.enter_context(stop_on_signals())
        progress = stack.enter_context(Progress())
        watch = CompileWatch(progress.compiled)
        stack.callback(watch.detach)

        progress.status(f"run folder {cfg.run_path}")
        with hosts.first_goes_ahead():
            open_folder(cfg)
            model_folder = resolve_model(cfg.model.path)
        with hosts.all_or_none():
            decoder = model_config(model_folder)
            renderer = make_renderer(cfg, model_folder, decoder)
            prompts, val_prompts = load_data(cfg, renderer, progress)
            iterator = make_iterator(cfg, prompts)
            rewards = stack.enter_context(RewardPool(cfg.reward))
        check_same_data(prompts, val_prompts)

        dtype, decoder = start_devices(cfg, decoder, progress)
        mesh = make_mesh(**dataclasses.asdict(cfg.mesh))
        stack.enter_context(jax.set_mesh(mesh))
        sizes = " x ".join(f"{axis} {n}" for axis, n in mesh.shape.items() if n > 1) or "1"
        where = f" in {n} processes" if (n := hosts.n_processes()) > 1 else ""
        kind = jax.devices()[0].device_kind
        progress.status(f"mesh {sizes} of {kind} ({jax.default_backend()}){where}")
        rules, layout = training_rules(cfg), rollout_layout(cfg, decoder, dtype)
        memory = device_memory()
        if cfg.plan_check and memory is not None:
            with progress.waiting("planning: compiling all programs"):
                plan = check_plan(cfg, decoder, memory)
            progress.status(plan_line(plan))
            rollout = dataclasses.replace(cfg.rollout, n_pages=plan.kv_pages)
        else:
            rollout = cfg.rollout
        checkpoints = Checkpointer(cfg.run_path / "checkpoints", cfg.checkpoint)
        stack.callback(checkpoints.close)
        steps = cfg.total_steps or iterator.steps_per_epoch * cfg.total_epochs
        optimizer = make_optimizer(
            cfg.learner, steps * cfg.updates_per_step, decoder_specs(decoder)
        )
        state, host = first_state(
            cfg, rules, decoder, dtype, optimizer, model_folder, checkpoints, progress
        )
        step = host.get("step", 0)
        if host:
            iterator.restore(host["iterator"])
        scorer = ref_scorer = Scorer(cfg, role_layout(cfg, "score", decoder, dtype))
        if cfg.ref != cfg.score:
            ref_scorer = Scorer(cfg, role_layout(cfg, "ref", decoder, dtype))
        logger = make_loggers(cfg.log, cfg.run_path, cfg, step if host else None, total_steps=steps)
        stack.callback(logger.close)
        run = Run(
            cfg=cfg,
            folder=cfg.run_path,
            model_folder=model_folder,
            total_steps=steps,
            n_ranks=rules.n_shards("batch"),
            renderer=renderer,
            iterator=iterator,
            val_prompts=val_prompts,
            rewards=rewards,
            engine=make_engine(cfg, rollout, layout, decoder, model_folder, renderer),
            engines=Engines(layout),
            optimizer=optimizer,
            update=make_update(cfg, optimizer, rules),
            scorer=scorer,
            ref_scorer=ref_scorer,
            ref_params=reference(cfg, ref_scorer.layout, state, step, model_folder, decoder),
            checkpoints=checkpoints,
            logger=logger,
            progress=progress,
            watch=watch,
            stop=stop,
            state=state,
            coefs=Coefficients(**host["coefs"]) if host else first_coefficients(cfg),
            step=step,
            position=iterator.state(),
            first_step=step,
            validated_at=host.get("validated_at", -1),
            val_metrics=host.get("val_metrics", {}),
            saved_at=step if host else -1,
        )
        del state
        if not run.done:
            warm_up(run)
        yield run


def make_renderer(cfg: RunConfig, folder: Path, decoder: DecoderConfig) -> ChatRenderer:
    tokenizer = load_tokenizer(folder)
    check_tokenizer(tokenizer, decoder.V)
    data = cfg.data
    return ChatRenderer(tokenizer, template=data.chat_template, system_prompt=data.system_prompt)


def load_data(
    cfg: RunConfig, renderer: ChatRenderer, progress: Progress
) -> tuple[list[Prompt], list[Prompt]]:
    """(training prompts, validation prompts)."""
    data = cfg.data
    prompts = load_prompts(data.train, renderer=renderer, data=data)
    val_prompts = []
    if data.val:
        val_prompts = load_prompts(data.val, renderer=renderer, data=data, limit=data.val_prompts)
    progress.status(f"data: {len(prompts)} training prompts, {len(val_prompts)} for validation")
    return prompts, val_prompts


def make_iterator(cfg: RunConfig, prompts: list[Prompt]) -> PromptIterator:
    data = cfg.data
    return PromptIterator(
        prompts,
        prompts_per_step=data.prompts_per_step,
        shuffle=data.shuffle,
        seed=cfg.seed,
        skip_solved=data.skip_solved > 0,
    )


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
    decoder: DecoderConfig,
    dtype: jnp.dtype,
    optimizer: Optimizer,
    model_folder: Path,
    checkpoints: Checkpointer,
    progress: Progress,
) -> tuple[TrainState, dict]:
    """The state of the newest checkpoint and what was saved beside it, else that of the model folder."""
    step, offload = hosts.from_first(checkpoints.latest_step()), "optimizer" in cfg.learner.offload
    if step is None:
        if cfg.resume:
            raise ValueError(
                f"there is no checkpoint in {cfg.run_path}/checkpoints to resume from; "
                "set config.run_dir to the folder of the run, or leave out config.resume"
            )
        params = load_params(model_folder, rules, decoder, dtype)
        return init_state(params, optimizer, offload=offload), {}
    progress.status(f"resuming after step {step}")
    abstract = abstract_state(
        decoder_specs(decoder), dtype, optimizer, rules, jax.sharding.get_mesh(), offload=offload
    )
    return checkpoints.restore(abstract, step)


def reference(
    cfg: RunConfig,
    layout: Layout,
    state: TrainState,
    step: int,
    model_folder: Path,
    decoder: DecoderConfig,
) -> Decoder | None:
    """The frozen model that the KL term compares with, where there is one: the model of step 0."""
    if not needs_ref(cfg):
        return None
    if step == 0 and layout.way is None:
        ref = frozen_copy(state.params)
    else:
        with layout.on_mesh():
            ref = load_params(model_folder, layout.rules, decoder, layout.dtype)
    return to_host(ref) if "reference" in cfg.learner.offload else ref


def load_params(folder: Path, rules: Rules, decoder: DecoderConfig, dtype: jnp.dtype) -> Decoder:
    return load_model(
        folder,
        rules=rules,
        dtype=dtype,
        stacked=decoder.stacked,
        grouped_matmul=decoder.grouped_matmul,
    )[1]


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
