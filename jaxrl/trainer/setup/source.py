"""Builds the source of scored rollouts that the schedule of a run names."""

import contextlib

from jaxrl.config.keys import RunConfig
from jaxrl.data.shared_batches import SharedBatches
from jaxrl.rewards.pool import RewardPool
from jaxrl.rollout.engines import Engines
from jaxrl.rollout.loop import RolloutLoop
from jaxrl.trainer.run import Core, Source
from jaxrl.trainer.schedule.engine_thread import EngineThread
from jaxrl.trainer.schedule.generator import GroupGenerator
from jaxrl.trainer.schedule.source import AsyncSource, PartialSource, SyncSource
from jaxrl.trainer.setup.engines import open_environments
from sharding import hosts


def check_processes(cfg: RunConfig) -> None:
    """Raises AgreedError if the schedule does not support the processes of the run."""
    n = hosts.n_processes()
    if cfg.schedule.mode != "sync" and n > 1 and (errors := _process_errors(cfg, n)):
        raise hosts.AgreedError("\n".join(errors))


def _process_errors(cfg: RunConfig, n: int) -> list[str]:
    """What of a schedule other than sync does not work in `n` processes."""
    schedule, n_prompts = cfg.schedule, cfg.data.prompts_per_step
    refused = [
        (schedule.order == "arrival", "schedule.order='arrival'", "schedule.order='prompt'"),
        (cfg.rollout.engines == "mesh", "rollout.engines='mesh'", "rollout.engines='process'"),
    ]
    errors = [
        f"config.{key} runs in one process, but there are {n}; set config.{remedy}"
        for found, key, remedy in refused
        if found
    ]
    if n_prompts < n and not schedule.rollout_workers:
        errors.append(
            f"config.data.prompts_per_step={n_prompts} is less than the {n} processes, each of "
            f"which generates for config.schedule.mode={schedule.mode!r}; set {n} or more"
        )
    return errors


def make_source(
    core: Core, engines: Engines, rewards: RewardPool, stack: contextlib.ExitStack
) -> Source:
    """The source of `schedule.mode`, with what was in flight at the checkpoint.

    `stack` stops its thread and the processes of its environments, if it has any.
    """
    cfg = core.cfg
    if cfg.schedule.mode == "sync":
        return SyncSource()
    saved = None if core.in_flight is None else core.in_flight()
    loop = make_loop(cfg, engines, stack)
    if cfg.schedule.mode == "async":
        core.iterator = SharedBatches(core.iterator)
    generator = GroupGenerator(cfg, loop, rewards, core.iterator)
    if saved is not None:
        generator.restore(saved.get("processes", [saved]))
    if cfg.schedule.mode == "partial":
        return PartialSource(generator)
    thread = EngineThread(generator, cfg.schedule.lag, engines.layout.on_mesh)
    stack.callback(thread.close)
    return AsyncSource(thread, core.stop, (saved or {}).get("solved", ()))


def make_loop(cfg: RunConfig, engines: Engines, stack: contextlib.ExitStack) -> RolloutLoop:
    """Responses of a single turn, or episodes in separate processes.

    The processes in `engines` stay free for validation and baselines, while episodes of later steps
    are in flight.
    """
    runner = engines.runner(open_environments(cfg, stack), cfg.rollout.sampling)
    return RolloutLoop(runner, n=cfg.rollout.n, keep_kv=cfg.schedule.keep_kv)
