"""Builds the learner of a run: its optimizer and jitted programs, before weights are loaded."""

import dataclasses

import jax

from jaxrl.config.keys import RunConfig
from jaxrl.data.iterator import Batches
from jaxrl.layout import role_layout, training_rules
from jaxrl.learner.critic import Critic, ValueScorer, make_critic, policy_steps, shared_value_scorer
from jaxrl.learner.optimizer import Optimizer, check_opt_state, make_optimizer
from jaxrl.learner.requirements import shares_base
from jaxrl.learner.state import abstract_state
from jaxrl.learner.step import Scorer, Update, make_update, make_value_update
from jaxrl.models.config import DecoderConfig, for_platform
from jaxrl.models.decoder import decoder_specs
from jaxrl.models.files.hf_load import model_config
from jaxrl.models.lora import split
from jaxrl.trainer.setup.devices import Policy
from jaxrl.trainer.setup.models import Models
from jaxrl.types import TrainState
from sharding import Rules


@dataclasses.dataclass(frozen=True)
class Learner:
    """What updates and scores the policy. Fields are those of `Core`."""

    rules: Rules
    total_steps: int
    optimizer: Optimizer
    update: Update
    scorer: Scorer
    ref_scorer: Scorer
    ref_decoder: DecoderConfig  # config of the reference model
    value_scorer: ValueScorer | None
    critic: Critic | None
    abstract: TrainState  # shapes, dtypes and shardings of the policy's state


def build_learner(cfg: RunConfig, models: Models, policy: Policy, total_steps: int) -> Learner:
    """The learner on training's mesh, which is the current one.

    Raises ValueError if the state or a layout is invalid.
    """
    rules, mesh = training_rules(cfg), jax.sharding.get_mesh()
    every = decoder_specs(policy.decoder)
    specs = split(every)[0]
    check_opt_state(cfg.learner, specs, rules)
    n_updates = policy_steps(cfg, total_steps) * cfg.updates_per_step
    optimizer = make_optimizer(cfg.learner, n_updates, specs, rules)
    critic, value_scorer = make_critic_and_scorer(cfg, models, policy, total_steps)
    scorer, ref_scorer, ref_decoder = make_scorers(cfg, models, policy)
    make = make_update if "vocab" in policy.decoder.heads else make_value_update
    offload = "optimizer" in cfg.learner.offload
    return Learner(
        rules=rules,
        total_steps=total_steps,
        optimizer=optimizer,
        update=make(cfg, optimizer, rules),
        scorer=scorer,
        ref_scorer=ref_scorer,
        ref_decoder=ref_decoder,
        value_scorer=value_scorer,
        critic=critic,
        abstract=abstract_state(every, policy.dtype, optimizer, rules, mesh, offload=offload),
    )


def n_steps(cfg: RunConfig, iterator: Batches) -> int:
    """Steps of the run."""
    return cfg.total_steps or iterator.steps_per_epoch * cfg.total_epochs


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
