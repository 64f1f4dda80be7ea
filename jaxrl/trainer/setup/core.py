"""Builds the state shared by all training programs."""

import contextlib
import dataclasses
from collections.abc import Sequence
from typing import Any

from jaxrl.checkpoint.checkpointer import Checkpointer
from jaxrl.config.keys import RunConfig
from jaxrl.data.content import check_content, content
from jaxrl.data.iterator import Batches
from jaxrl.learner.coefficients import Coefficients, initial_coefficients
from jaxrl.learner.requirements import shares_base
from jaxrl.tracking.loggers import make_loggers
from jaxrl.trainer.checkpointing import check_disk
from jaxrl.trainer.phases.shaping import RewardScale
from jaxrl.trainer.run import Core
from jaxrl.trainer.setup.devices import Policy, Session
from jaxrl.trainer.setup.folder import record_start
from jaxrl.trainer.setup.learner import Learner
from jaxrl.trainer.setup.models import Models
from jaxrl.trainer.setup.state import load_reference, load_state


def build_core(
    cfg: RunConfig,
    models: Models,
    policy: Policy,
    session: Session,
    stack: contextlib.ExitStack,
    learner: Learner,
    *,
    iterator: Batches,
    val: Sequence[Any],
    has_reference: bool,
) -> Core:
    """Loads weights; opens checkpoints and loggers.

    Restores the state from the newest checkpoint if there is one.
    """
    checkpoints = Checkpointer(cfg.run_path / "checkpoints", cfg.checkpoint)
    stack.callback(checkpoints.close)
    steps, ref_layout = learner.total_steps, learner.ref_scorer.layout
    state, host = load_state(cfg, models, policy, session.progress, learner, checkpoints)
    step = host.get("step", 0)
    contents = {"data.train": content(iterator.items), "data.val": content(val)}
    if host:
        iterator.restore(host["iterator"])
        check_content(host.get("contents", {}), contents)
    state, reference = dataclasses.replace(state, ref=None), state.ref
    if has_reference and reference is None and not shares_base(cfg):
        reference = load_reference(cfg, ref_layout, state, step, models, learner.ref_decoder)
    record_start(cfg.run_path, step if host else None)
    logger = make_loggers(cfg.log, cfg.run_path, cfg, step if host else None, total_steps=steps)
    stack.callback(logger.close)
    core = Core(
        cfg=cfg,
        folder=cfg.run_path,
        model_folder=models.folders.policy,
        total_steps=steps,
        n_ranks=learner.rules.n_shards("batch"),
        renderer=models.renderer,
        iterator=iterator,
        val=val,
        contents=contents,
        optimizer=learner.optimizer,
        update=learner.update,
        scorer=learner.scorer,
        ref_scorer=learner.ref_scorer,
        value_scorer=learner.value_scorer,
        critic=learner.critic,
        reference=reference,
        checkpoints=checkpoints,
        logger=logger,
        progress=session.progress,
        watch=session.watch,
        stop=session.stop,
        lock=session.lock,
        state=state,
        coefs=Coefficients(**host["coefs"]) if host else initial_coefficients(cfg),
        reward_scale=RewardScale(**host.get("reward_scale", {})),
        step=step,
        position=iterator.state(),
        in_flight=(lambda: host["in_flight"]) if "in_flight" in host else None,
        first_step=step,
        validated_at=host.get("validated_at", -1),
        val_metrics=host.get("val_metrics", {}),
        saved_at=step if host else -1,
    )
    check_disk(core)
    return core
