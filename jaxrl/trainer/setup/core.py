"""Builds the state shared by all training programs."""

import contextlib
import dataclasses
from collections.abc import Sequence
from typing import Any

import jax

from jaxrl.config.keys import RunConfig
from jaxrl.data.content import check_content, content
from jaxrl.data.iterator import Batches
from jaxrl.io.checkpoint.checkpointer import Checkpointer
from jaxrl.io.tracking.loggers import make_loggers
from jaxrl.layout import role_layout, training_rules
from jaxrl.learner.coefficients import Coefficients, initial_coefficients
from jaxrl.learner.critic import Critic, ValueScorer, make_critic, policy_steps, shared_value_scorer
from jaxrl.learner.optimizer import check_opt_state, make_optimizer
from jaxrl.learner.requirements import shares_base
from jaxrl.learner.step import Scorer, make_update, make_value_update
from jaxrl.models.config import DecoderConfig, for_platform
from jaxrl.models.decoder import decoder_specs
from jaxrl.models.files.hf_load import model_config
from jaxrl.models.lora import split
from jaxrl.trainer.phases.shaping import RewardScale
from jaxrl.trainer.run import Core
from jaxrl.trainer.setup.devices import Policy, Session
from jaxrl.trainer.setup.folder import record_start
from jaxrl.trainer.setup.models import Models
from jaxrl.trainer.setup.state import load_reference, load_state


def build_core(
    cfg: RunConfig,
    models: Models,
    policy: Policy,
    session: Session,
    stack: contextlib.ExitStack,
    *,
    iterator: Batches,
    val: Sequence[Any],
    has_reference: bool,
) -> Core:
    """Loads weights and builds optimizer, jitted programs, checkpoints and loggers.

    Restores the state from the newest checkpoint if there is one.
    """
    rules = training_rules(cfg)
    checkpoints = Checkpointer(cfg.run_path / "checkpoints", cfg.checkpoint)
    stack.callback(checkpoints.close)
    steps = cfg.total_steps or iterator.steps_per_epoch * cfg.total_epochs
    specs = split(decoder_specs(policy.decoder))[0]
    check_opt_state(cfg.learner, specs, rules)
    n_updates = policy_steps(cfg, steps) * cfg.updates_per_step
    optimizer = make_optimizer(cfg.learner, n_updates, specs, rules)
    critic, value_scorer = make_critic_and_scorer(cfg, models, policy, steps)
    scorer, ref_scorer, ref_decoder = make_scorers(cfg, models, policy)
    ref_layout = ref_scorer.layout
    state, host = load_state(
        cfg, rules, models, policy, session.progress, optimizer, critic, checkpoints, ref_layout
    )
    step = host.get("step", 0)
    contents = {"data.train": content(iterator.items), "data.val": content(val)}
    if host:
        iterator.restore(host["iterator"])
        check_content(host.get("contents", {}), contents)
    state, reference = dataclasses.replace(state, ref=None), state.ref
    if has_reference and reference is None and not shares_base(cfg):
        reference = load_reference(cfg, ref_layout, state, step, models, ref_decoder)
    make = make_update if "vocab" in policy.decoder.heads else make_value_update
    record_start(cfg.run_path, step if host else None)
    logger = make_loggers(cfg.log, cfg.run_path, cfg, step if host else None, total_steps=steps)
    stack.callback(logger.close)
    return Core(
        cfg=cfg,
        folder=cfg.run_path,
        model_folder=models.folders.policy,
        total_steps=steps,
        n_ranks=rules.n_shards("batch"),
        renderer=models.renderer,
        iterator=iterator,
        val=val,
        contents=contents,
        optimizer=optimizer,
        update=make(cfg, optimizer, rules),
        scorer=scorer,
        ref_scorer=ref_scorer,
        value_scorer=value_scorer,
        critic=critic,
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


def make_critic_and_scorer(
    cfg: RunConfig, models: Models, policy: Policy, steps: int
) -> tuple[Critic | None, ValueScorer | None]:
    """(separate critic, value scorer). A value head on the policy needs no separate critic."""
    if "score" in policy.decoder.heads:
        return None, shared_value_scorer(cfg, policy.dtype)
    if not cfg.has_critic:
        return None, None
    critic = make_critic(cfg, models.folders.critic, None, policy.dtype, steps)
    return critic, critic.scorer


def make_scorers(
    cfg: RunConfig, models: Models, policy: Policy
) -> tuple[Scorer, Scorer, DecoderConfig]:
    """(policy scorer, reference scorer, config of the reference model)."""
    restricted = cfg.algorithm.keep_sampling_mask
    layout = role_layout(cfg, "score", policy.decoder, policy.dtype)
    scorer = ref_scorer = Scorer(cfg, layout, cfg.score, restricted=restricted)
    ref_decoder = dataclasses.replace(policy.decoder, lora=None)
    if cfg.algorithm.teacher:
        teacher = model_config(models.folders.reference)
        ref_decoder = for_platform(cfg, teacher, jax.default_backend())[1]
    if cfg.ref != cfg.score or ref_decoder != policy.decoder or restricted:
        ref_layout = role_layout(cfg, "ref", ref_decoder, policy.dtype)
        ref_scorer = Scorer(cfg, ref_layout, cfg.ref, of_training=shares_base(cfg))
    return scorer, ref_scorer, ref_decoder
