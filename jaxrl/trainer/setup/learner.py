"""The learner of a run: its optimizer and jitted programs, and the weights that they change."""

import dataclasses

import jax

from jaxrl.checkpoint.checkpointer import Checkpointer
from jaxrl.config.keys import RunConfig
from jaxrl.layout import role_layout, training_rules
from jaxrl.learner.critic import Critic, ValueScorer, make_critic, policy_steps, shared_value_scorer
from jaxrl.learner.optimizer import Optimizer, check_opt_state, make_optimizer
from jaxrl.learner.requirements import shares_base
from jaxrl.learner.state import abstract_state, checkpoint_state, init_state
from jaxrl.learner.step import Scorer, Update, make_update, make_value_update
from jaxrl.models.config import DecoderConfig, for_platform
from jaxrl.models.decoder import Decoder, decoder_specs
from jaxrl.models.files.adapter import load_with_adapters
from jaxrl.models.files.hf_load import load_params, model_config
from jaxrl.models.lora import split, with_base
from jaxrl.trainer.setup.devices import Policy
from jaxrl.trainer.setup.host import HostSide
from jaxrl.trainer.setup.models import Models
from jaxrl.types import TrainState
from sharding import Rules, hosts, to_host


@dataclasses.dataclass(frozen=True)
class Learner:
    """The programs that update and score the policy."""

    rules: Rules
    n_ranks: int  # data-parallel ranks
    total_steps: int
    optimizer: Optimizer
    update: Update
    scorer: Scorer  # computes the policy's logprobs
    ref_scorer: Scorer  # computes the reference model's logprobs
    ref_decoder: DecoderConfig  # config of the reference model
    value_scorer: ValueScorer | None  # None if the algorithm needs no values
    critic: Critic | None  # separate critic; None if the value head shares the policy's backbone
    abstract: TrainState  # shapes, dtypes and shardings of the policy's state


def build_learner(host: HostSide, policy: Policy) -> Learner:
    """The learner on training's mesh, which is the current one.

    Raises ValueError if the state or a layout is invalid.
    """
    cfg, models, iterator = host.session.cfg, host.models, host.iterator
    assert iterator is not None
    total_steps = cfg.total_steps or iterator.steps_per_epoch * cfg.total_epochs
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
        n_ranks=rules.n_shards("batch"),
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
        base = load_params(models.folders.policy, rules, policy.decoder, policy.dtype)
        params = with_base(params, base)
    return dataclasses.replace(saved, params=params, critic=None), values


def load_reference(host: HostSide, learner: Learner, state: TrainState, step: int) -> Decoder:
    """The frozen reference model: the policy of step 0, or a teacher."""
    cfg, folder = host.session.cfg, host.models.folders.reference
    layout = learner.ref_scorer.layout
    if step == 0 and layout.resharding is None and not cfg.algorithm.teacher:
        ref = layout.copy(state.params)
    else:
        with layout.on_mesh():
            ref = load_params(folder, layout.rules, learner.ref_decoder, layout.dtype)
    return to_host(ref) if "reference" in cfg.learner.offload else ref
