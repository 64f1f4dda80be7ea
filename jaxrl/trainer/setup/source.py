"""Builds the source of scored rollouts that the schedule of a run names."""

import contextlib

from jaxrl.config.keys import RunConfig
from jaxrl.data.shared_batches import SharedBatches
from jaxrl.rewards.pool import RewardPool
from jaxrl.rollout.engines import Engines
from jaxrl.trainer.run import Core, Source
from jaxrl.trainer.schedule.engine_thread import EngineThread
from jaxrl.trainer.schedule.generator import GroupGenerator
from jaxrl.trainer.schedule.source import AsyncSource, PartialSource, SyncSource
from sharding import hosts


def check_processes(cfg: RunConfig) -> None:
    """Raises AgreedError if the schedule does not support the processes of the run."""
    if cfg.schedule.mode != "sync" and hosts.n_processes() > 1:
        raise hosts.AgreedError(
            f"config.schedule.mode={cfg.schedule.mode!r} runs in one process, but there are "
            f"{hosts.n_processes()}; set config.schedule.mode='sync'"
        )


def make_source(
    core: Core, engines: Engines, rewards: RewardPool, stack: contextlib.ExitStack
) -> Source:
    """The source of `schedule.mode`, with what was in flight at the checkpoint.

    `stack` stops its thread, if it has one.
    """
    cfg = core.cfg
    if cfg.schedule.mode == "sync":
        return SyncSource()
    if cfg.schedule.mode == "async":
        core.iterator = SharedBatches(core.iterator)
    generator = GroupGenerator(
        cfg, engines.engine, rewards, core.iterator, decode=engines.renderer.decode
    )
    if core.in_flight is not None:
        generator.restore(core.in_flight())
    if cfg.schedule.mode == "partial":
        return PartialSource(generator)
    thread = EngineThread(generator, cfg.schedule.lag, engines.layout.on_mesh)
    stack.callback(thread.close)
    return AsyncSource(thread, core.stop)
