"""The roles of training: the policy, the scorers of logprobs and values, and a separate critic."""

import dataclasses
import functools
from collections.abc import Mapping
from pathlib import Path

import jax
import jax.numpy as jnp

from jaxrl.config.keys import RunConfig
from jaxrl.config.teachers import model_teachers
from jaxrl.layout import role_layout, training_rules
from jaxrl.learner.critic import Critic, ValueScorer, make_critic, shared_value_scorer
from jaxrl.learner.image_encoder import ImageEncoder
from jaxrl.learner.image_patches import TowerInputs
from jaxrl.learner.optimizer import Optimizer, check_opt_state, make_optimizer
from jaxrl.learner.requirements import compares_student_ids, shares_base, teacher_top_k
from jaxrl.learner.scorer import Scorer
from jaxrl.learner.state import abstract_state
from jaxrl.learner.step import Update, make_update, make_value_update
from jaxrl.models.config import DecoderConfig, for_platform
from jaxrl.models.decoder import decoder_specs
from jaxrl.models.lora import split
from jaxrl.types import TrainState
from sharding import Rules, target_platform


@dataclasses.dataclass(frozen=True)
class TeacherModel:
    """A further teacher on the devices, of algorithm.more_teachers."""

    role: str  # "teacher_2", "teacher_3", ...
    scorer: Scorer
    decoder: DecoderConfig

    @property
    def state(self) -> str:
        """The name of its weights in a plan."""
        return self.role.replace("teacher", "ref")


@dataclasses.dataclass(frozen=True)
class Learner:
    """The programs that update and score the policy."""

    rules: Rules
    n_ranks: int  # data-parallel ranks
    total_steps: int
    optimizer: Optimizer
    update: Update
    scorer: Scorer  # computes the policy's logprobs
    student_scorer: Scorer | None  # computes the policy's most likely ids, which teachers score
    ref_scorer: Scorer  # computes the reference model's logprobs
    ref_decoder: DecoderConfig  # config of the reference model
    teachers: tuple[TeacherModel, ...]  # in addition to it
    value_scorer: ValueScorer | None  # None if the algorithm needs no values
    critic: Critic | None  # separate critic; None if the value head shares the policy's backbone
    encoder: ImageEncoder | None  # None for a run without images
    abstract: TrainState  # shapes, dtypes and shardings of the policy's state


def make_learner(
    cfg: RunConfig,
    decoder: DecoderConfig,
    dtype: jnp.dtype,
    *,
    total_steps: int,
    backbones: Mapping[str, DecoderConfig],
    critic_folder: Path = Path(),
    encoder: ImageEncoder | None = None,
) -> Learner:
    """The learner of a policy, for a run or its plan; training's mesh is the current one.

    `backbones` has the shapes of "critic" and of the teachers on the devices ("teacher",
    "teacher_2", ...), if the run has them. Only loading the critic reads its folder. `encoder`
    computes the features of images, if the run has any. Raises ValueError if the state or a layout
    is invalid.
    """
    rules, mesh, specs = training_rules(cfg), jax.sharding.get_mesh(), decoder_specs(decoder)
    trained = split(specs)[0]
    check_opt_state(cfg.learner, trained, rules)
    n_updates = policy_steps(cfg, total_steps) * cfg.updates_per_step
    optimizer = make_optimizer(cfg.learner, n_updates, trained, rules)
    critic = value_scorer = None
    if "score" in decoder.heads:
        value_scorer = shared_value_scorer(cfg, dtype, encoder)
    elif cfg.has_critic:
        critic = make_critic(cfg, critic_folder, backbones["critic"], dtype, total_steps, encoder)
        value_scorer = critic.scorer
    scorer, ref_scorer, ref_decoder = make_scorers(cfg, decoder, dtype, backbones, encoder)
    roles = [role for role in model_teachers(cfg.algorithm) if role != "teacher"]
    make = make_update if "vocab" in decoder.heads else make_value_update
    offload = "optimizer" in cfg.learner.offload
    inputs = encoder
    if encoder is not None and decoder.tower is not None:
        inputs = TowerInputs(encoder)
    return Learner(
        rules=rules,
        n_ranks=rules.n_shards("batch"),
        total_steps=total_steps,
        optimizer=optimizer,
        update=make(cfg, optimizer, rules, inputs),
        scorer=scorer,
        student_scorer=make_student_scorer(cfg, scorer) if compares_student_ids(cfg) else None,
        ref_scorer=ref_scorer,
        ref_decoder=ref_decoder,
        teachers=tuple(
            make_teacher(cfg, role, decoder, backbones[role], dtype, encoder) for role in roles
        ),
        value_scorer=value_scorer,
        critic=critic,
        encoder=encoder,
        abstract=abstract_state(specs, dtype, optimizer, rules, mesh, offload=offload),
    )


def policy_steps(cfg: RunConfig, total_steps: int) -> int:
    """Number of steps that update the policy. Raises ValueError if critic warm-up leaves none."""
    warmup_steps = cfg.critic.warmup_steps
    if 0 < total_steps <= warmup_steps:
        raise ValueError(
            f"config.critic.warmup_steps={warmup_steps} leaves none of the {total_steps} steps to "
            "the policy; set fewer"
        )
    return total_steps - warmup_steps


def make_scorers(
    cfg: RunConfig,
    decoder: DecoderConfig,
    dtype: jnp.dtype,
    backbones: Mapping[str, DecoderConfig],
    encoder: ImageEncoder | None,
) -> tuple[Scorer, Scorer, DecoderConfig]:
    """(policy scorer, reference scorer, config of the reference model)."""
    restricted = cfg.algorithm.keep_sampling_mask
    layout = role_layout(cfg, "score", decoder, dtype)
    replay = cfg.learner.router_replay
    make = functools.partial(Scorer, cfg)
    scorer = ref_scorer = make(
        layout, cfg.score, restricted=restricted, replay=replay, encoder=encoder
    )
    ref_decoder = dataclasses.replace(decoder, lora=None)
    if model_teachers(cfg.algorithm):
        ref_decoder = for_platform(cfg, backbones["teacher"], target_platform())[1]
    differs = cfg.ref != cfg.score or ref_decoder != decoder or decoder.tower is not None
    most_likely = bool(teacher_top_k(cfg))
    if differs or restricted or cfg.learner.replays or most_likely:
        ref_layout = role_layout(cfg, "ref", ref_decoder, dtype)
        if encoder is not None and (decoder.tower or ref_decoder.tower) is not None:
            encoder = encoder.another(ref_decoder, None if shares_base(cfg) else ref_layout)
        ref_scorer = make(
            ref_layout,
            cfg.ref,
            of_training=shares_base(cfg),
            encoder=encoder,
            most_likely=most_likely,
            n_given=n_given_ids(cfg),
        )
    return scorer, ref_scorer, ref_decoder


def make_student_scorer(cfg: RunConfig, scorer: Scorer) -> Scorer:
    """The policy's scorer of its most likely ids, in the layout of the one of its logprobs."""
    return Scorer(cfg, scorer.layout, cfg.score, encoder=scorer.encoder, most_likely=True)


def n_given_ids(cfg: RunConfig) -> int:
    """Number of ids of the policy that a teacher scores at each token."""
    return teacher_top_k(cfg) if compares_student_ids(cfg) else 0


def make_teacher(
    cfg: RunConfig,
    role: str,
    policy: DecoderConfig,
    decoder: DecoderConfig,
    dtype: jnp.dtype,
    encoder: ImageEncoder | None,
) -> TeacherModel:
    """A further teacher, which scores in the layout of the reference (config.ref).

    It reads the features of `encoder`, the policy's, unless one of both has a separate tower.
    """
    decoder = for_platform(cfg, decoder, target_platform())[1]
    layout = role_layout(cfg, "ref", decoder, dtype)
    if encoder is not None and (policy.tower or decoder.tower) is not None:
        encoder = encoder.another(decoder, layout)
    scorer = Scorer(
        cfg,
        layout,
        cfg.ref,
        encoder=encoder,
        most_likely=bool(teacher_top_k(cfg)),
        n_given=n_given_ids(cfg),
    )
    return TeacherModel(role, scorer, decoder)
