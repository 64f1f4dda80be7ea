"""Opens a run from its config: RL, offline training, or evaluation.

Cheap checks run before the devices are opened: run folder, tokenizer, data and rewards.
"""

import contextlib
import dataclasses
from collections.abc import Iterator

import numpy as np

from jaxrl.algorithms.user_rows import check_user_rows
from jaxrl.config.keys import RunConfig
from jaxrl.data.tokenizer import stop_ids
from jaxrl.learner.requirements import needs_ref
from jaxrl.models.files.hf_load import load_params
from jaxrl.runtime.compile_threads import CompileThreads
from jaxrl.runtime.multihost import check_same_data, check_same_order
from jaxrl.runtime.start import end_loading
from jaxrl.trainer.loop import run_to_end
from jaxrl.trainer.memory import explain_out_of_memory
from jaxrl.trainer.offline.objective import (
    OfflineObjective,
    OfflineRun,
    check_context,
    train_step,
    validate,
    with_objective,
)
from jaxrl.trainer.phases.reward_errors import RewardErrors
from jaxrl.trainer.run import Evaluation, Run
from jaxrl.trainer.setup.core import build_core
from jaxrl.trainer.setup.data import (
    load_val,
    make_iterator,
    make_prompt_maker,
    report_data,
)
from jaxrl.trainer.setup.devices import (
    checked_plan,
    memory_report,
    open_devices,
    open_session,
    report_cpu_time,
)
from jaxrl.trainer.setup.engines import (
    check_rollout_layout,
    load_reward_model,
    local_engine,
    make_engines,
    open_environments,
    reward_pool,
    with_idle_policy,
)
from jaxrl.trainer.setup.folder import open_folder
from jaxrl.trainer.setup.learner import build_learner, n_steps
from jaxrl.trainer.setup.models import open_models
from jaxrl.trainer.setup.source import check_processes, make_source
from jaxrl.trainer.setup.truths import report_truths
from jaxrl.trainer.setup.warmup import lowered_before_loading, warm_up, warm_up_offline
from jaxrl.trainer.setup.workers import connect_to_workers, make_workers
from sharding import hosts


@contextlib.contextmanager
def open_run(cfg: RunConfig) -> Iterator[Run]:
    """Opens an RL run, resumed from the newest checkpoint in its folder.

    Raises ValueError or OSError if the config, the models, the data or the folder is invalid.
    """
    with contextlib.ExitStack() as stack:
        session = open_session(cfg, stack)
        check_processes(cfg)
        check_user_rows(cfg)
        with hosts.raise_together():
            ray = connect_to_workers(cfg)
        with hosts.main_process_first():
            cfg = open_folder(cfg)
        models = open_models(cfg, session.progress)
        with hosts.raise_together():
            maker = make_prompt_maker(cfg, models.renderer)
            iterator, val = make_iterator(cfg, maker), load_val(cfg, maker)
            rewards = stack.enter_context(reward_pool(cfg, models.renderer))
            rewards.check_columns(iterator.items)
            report_truths(cfg, rewards, [*iterator.items, *val], session.progress)
            environments = open_environments(cfg, stack)
        report_data(cfg, session.progress, iterator, val)
        check_same_data(iterator.items, val)
        check_same_order(iterator.state())
        policy = open_devices(cfg, models, session, stack)
        check_rollout_layout(cfg, policy)
        role_decoders = models.folders.other_configs()
        plan = checked_plan(cfg, policy.decoder, session.progress, role_decoders=role_decoders)
        stack.enter_context(memory_report(cfg, policy.decoder, plan, role_decoders=role_decoders))
        prompt_len = float(np.mean([len(prompt.tokens) for prompt in iterator.items]))
        report_cpu_time(
            cfg, policy.decoder, session.progress, prompt_len, role_decoders=role_decoders
        )
        reward_model = load_reward_model(cfg, models, policy, session)
        rollout = dataclasses.replace(cfg.rollout, n_pages=plan.kv_pages) if plan else cfg.rollout
        learner = build_learner(cfg, models, policy, n_steps(cfg, iterator))
        layout, engine = (
            local_engine(cfg, rollout, models, policy)
            if ray is None
            else make_workers(cfg, ray, models, policy, session, stack)
        )
        threads = stack.enter_context(CompileThreads())
        threads.lower(lowered_before_loading(cfg, learner, layout, engine))
        core = build_core(
            cfg,
            models,
            policy,
            session,
            stack,
            learner,
            iterator=iterator,
            val=val,
            has_reference=needs_ref(cfg),
        )
        layout = with_idle_policy(layout, engine, core)
        engines = make_engines(cfg, layout, engine, models, session, environments)
        run = Run(
            core=core,
            rewards=rewards,
            reward_errors=RewardErrors(
                cfg.reward.max_error_fraction, in_file="jsonl" in cfg.log.loggers
            ),
            reward_model=reward_model,
            engines=engines,
            source=make_source(core, engines, rewards, stack),
        )
        if not core.done:
            warm_up(run, threads)
        yield run


@contextlib.contextmanager
def open_evaluation(cfg: RunConfig) -> Iterator[Evaluation]:
    """Opens a model with its compiled engine, the validation prompts and the rewards.

    Raises the errors of `open_run`.
    """
    with contextlib.ExitStack() as stack:
        session = open_session(cfg, stack)
        with hosts.main_process_first():
            cfg = open_folder(cfg)
        models = open_models(cfg, session.progress)
        with hosts.raise_together():
            prompts = load_val(cfg, make_prompt_maker(cfg, models.renderer))
            rewards = stack.enter_context(reward_pool(cfg, models.renderer))
            rewards.check_columns(prompts)
            report_truths(cfg, rewards, prompts, session.progress)
            environments = open_environments(cfg, stack)
        stack.enter_context(explain_out_of_memory(cfg.run_path, None))
        session.progress.status(f"data: {len(prompts)} prompts")
        check_same_data([], prompts)
        policy = open_devices(cfg, models, session, stack)
        reward_model = load_reward_model(cfg, models, policy, session)
        layout, engine = local_engine(cfg, cfg.rollout, models, policy)
        engines = make_engines(cfg, layout, engine, models, session, environments)
        stack.enter_context(layout.on_mesh())
        with session.progress.waiting("loading weights, compiling prefill and decode"):
            folder = models.folders.policy
            params = load_params(folder, layout.rules, policy.decoder, layout.dtype)
            params = layout.prepare(params)
            engine.warmup(params)
        yield Evaluation(prompts, rewards, reward_model, engines, params)


@contextlib.contextmanager
def open_offline(cfg: RunConfig, objective: OfflineObjective) -> Iterator[OfflineRun]:
    """Opens an offline training run (SFT, DPO, reward modelling).

    Raises the errors of `open_run`.
    """
    with contextlib.ExitStack() as stack:
        session = open_session(cfg, stack)
        with hosts.main_process_first():
            cfg = open_folder(cfg)
        models = open_models(cfg, session.progress)
        with hosts.raise_together():
            check_context(cfg, models.decoder)
            stop = stop_ids(models.folders.policy, models.renderer.tokenizer)
            maker = objective.maker(models.renderer, cfg, stop=stop)
            iterator, val = make_iterator(cfg, maker), load_val(cfg, maker)
        report_data(cfg, session.progress, iterator, val)
        check_same_data(iterator.items, val)
        check_same_order(iterator.state())
        policy = open_devices(cfg, models, session, stack)
        workload = objective.workload
        decoder = dataclasses.replace(policy.decoder, heads=workload.heads)
        policy = dataclasses.replace(policy, decoder=decoder)
        plan = checked_plan(cfg, policy.decoder, session.progress, workload=workload)
        stack.enter_context(memory_report(cfg, policy.decoder, plan, workload=workload))
        learner = build_learner(cfg, models, policy, n_steps(cfg, iterator))
        threads = stack.enter_context(CompileThreads())
        threads.lower(lowered_before_loading(cfg, learner))
        core = build_core(
            cfg,
            models,
            policy,
            session,
            stack,
            learner,
            iterator=iterator,
            val=val,
            has_reference=workload.has_reference,
        )
        if not core.done:
            has_logits = "vocab" in workload.heads
            warm_up_offline(core, threads, policy=has_logits, reference=workload.has_reference)
        yield OfflineRun(core, objective)


def train_offline(cfg: RunConfig, objective: OfflineObjective) -> bool:
    """Trains to the last step. Returns False if the run was interrupted and its state saved."""
    with open_offline(with_objective(cfg, objective), objective) as run:
        end_loading()
        return run_to_end(run, train_step, validate)
