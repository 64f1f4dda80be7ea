"""The compiled programs of a run: the run's own jitted functions, lowered from abstract values."""

import dataclasses
import functools
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp

from jaxrl.config.keys import RunConfig
from jaxrl.engine.engine import PagedEngine
from jaxrl.layout import (
    Layout,
    check_idle_policy,
    role_layout,
    rollout_layout,
    training_rules,
    worker_layout,
    worker_mesh,
)
from jaxrl.learner.critic import (
    Critic,
    ValueScorer,
    make_critic,
    reward_model_scorer,
    shared_value_scorer,
)
from jaxrl.learner.optimizer import check_opt_state, make_optimizer
from jaxrl.learner.requirements import (
    full_kl_in_loss,
    needs_old_logp,
    needs_ref,
    needs_ref_logp,
    shares_base,
)
from jaxrl.learner.state import abstract_state
from jaxrl.learner.step import make_score, make_update, make_value_update, micro_batches_per_call
from jaxrl.models.config import DecoderConfig, for_platform
from jaxrl.models.decoder import Decoder, decoder_specs
from jaxrl.models.lora import split, with_adapters, without_adapters
from jaxrl.models.spec import abstract_params
from jaxrl.planner.batch import abstract_batch
from jaxrl.planner.offload import (
    CRITIC_PROGRAMS,
    IDLE_STATE,
    add_host_state,
    host_state,
    uses_weights,
)
from jaxrl.planner.rollout_devices import n_copies
from jaxrl.types import TrainState, Tree
from sharding import bytes_per_device, target_platform

Lower = Callable[[], jax.stages.Lowered]


@dataclasses.dataclass(frozen=True)
class Lengths:
    """Tokens of an average sequence, for time estimates."""

    prompt: int
    response: int


@dataclasses.dataclass(frozen=True)
class OfflineWorkload:
    """Shape of an offline training step (SFT, DPO, reward modelling), which samples nothing."""

    responses_per_example: int  # 1 for SFT, 2 (chosen, rejected) for preference pairs
    # Whether training scores the policy's logprobs. Validation alone needs less memory than an
    # update.
    scores_policy: bool
    has_reference: bool
    heads: tuple[str, ...] = ("vocab",)  # of the trained model


@dataclasses.dataclass
class ProgramTable:
    """Programs that can be lowered, in the order in which they are compiled."""

    lower: dict[str, Lower] = dataclasses.field(default_factory=dict)
    # Run state that needs no extra memory while a program runs: it is among the program's
    # arguments, or offloaded to host memory at that time.
    counted_state: dict[str, tuple[str, ...]] = dataclasses.field(default_factory=dict)

    def add(self, name: str, lower: Lower, *counted_state: str) -> None:
        self.lower[name] = lower
        self.counted_state[name] = counted_state


@dataclasses.dataclass(frozen=True)
class RunPrograms:
    """A run's programs before compilation, and the bytes of its state. Bytes are per device."""

    cfg: RunConfig
    decoder: DecoderConfig
    table: ProgramTable
    # State on the devices throughout: params, base (frozen weights below adapters), opt_state,
    # ref, critic, critic_base, critic_opt_state, reward_model.
    resident: dict[str, int]
    # State in host memory: opt_state, ref, critic, critic_base, critic_opt_state, reward_model, and
    # the larger of the sums of gradients that the updates of policy and critic have in turn.
    host_resident: dict[str, int]
    # Weights of the roles "score" and "rollout", and "ref" if it is training's base: ROLE_aliased
    # are training's own buffers, ROLE_copied are those that are copied, and rollout_made the copy,
    # merged or quantized. With separate devices of the rollout, rollout_aliased are the weights
    # there and rollout_copied what training reshards to send them.
    role_weights: dict[str, int]
    micro_batches_per_call: dict[str, int]  # of "score" and "reference"
    value_scorers: dict[str, ValueScorer]  # by program: the critic and the reward model
    n_ranks: int  # data-parallel ranks of training
    n_sequences: int  # per step
    # Of the rollout; None and 0 in offline training.
    engine: PagedEngine | None = None
    page_bytes: int = 0
    n_replicas: int = 0  # of all engines
    n_pages: int = 0  # of the pool that the engine's programs are lowered for
    n_rollout_devices: int = 0  # separate from those of training; 0: the same
    n_workers: int = 0  # that these devices belong to


def run_programs(
    cfg: RunConfig,
    decoder: DecoderConfig,
    memory_bytes: int | float,
    role_decoders: Mapping[str, DecoderConfig] | None = None,
    workload: OfflineWorkload | None = None,
    rollout_devices: Sequence[Any] = (),
) -> RunPrograms:
    """The programs of a run at their largest declared shapes, on the current mesh.

    Those of the rollout are on `rollout_devices` if there are some, which are those of one process
    or rollout worker; those of a run with workers may be left out. `role_decoders` has the shapes
    of "critic" (a separate backbone), "teacher" and "reward_model"; the default is the policy's.
    With `workload` the run is offline training instead of RL.

    The KV pool has all pages that the run could fill if they fit in half of the memory that the
    state leaves free. A run that fits then uses exactly the programs that its plan compiled.
    """
    roles = {name: decoder for name in ("critic", "teacher", "reward_model")}
    roles |= dict(role_decoders or {})
    dtype, decoder = for_platform(cfg, decoder, target_platform())
    decoder = with_adapters(cfg.lora, decoder)
    ref_decoder = for_platform(cfg, roles["teacher"], target_platform())[1]
    if not cfg.algorithm.teacher:  # the policy without adapters
        ref_decoder = dataclasses.replace(ref_decoder, base_dtype=decoder.base_dtype)
    if workload is not None:
        decoder = dataclasses.replace(decoder, heads=workload.heads)
    rules, table, host = training_rules(cfg), ProgramTable(), dict[str, int]()
    state = _add_update(table, host, cfg, decoder, ref_decoder, dtype)
    trained, frozen = split(state.params)
    resident = {
        "params": bytes_per_device(trained),
        "opt_state": bytes_per_device(state.opt_state),
    }
    if decoder.lora is not None:
        resident["base"] = bytes_per_device(frozen)
    value_scorers = _add_critic(table, resident, host, cfg, decoder, state, roles["critic"], dtype)
    if cfg.reward_model.path:
        reward_scorer = _add_reward_model(table, resident, cfg, roles["reward_model"], dtype)
        value_scorers["reward_model"] = reward_scorer
    layouts = {
        "score": role_layout(cfg, "score", decoder, dtype),
        "reference": role_layout(cfg, "ref", ref_decoder, dtype),
    }
    scoring = {"score": cfg.score, "reference": cfg.ref}
    decoders = {"score": decoder, "reference": ref_decoder}
    _add_scoring(table, resident, cfg, decoders, layouts, workload)
    role_weights = _add_resharding(table, cfg, layouts, state.params)
    responses = cfg.rollout.n if workload is None else workload.responses_per_example
    programs = RunPrograms(
        cfg=cfg,
        decoder=decoder,
        table=table,
        resident=resident,
        host_resident=host_state(cfg, resident, host),
        role_weights=role_weights,
        micro_batches_per_call={
            name: micro_batches_per_call(cfg, layout, scoring[name].token_budget)
            for name, layout in layouts.items()
        },
        value_scorers=value_scorers,
        n_ranks=rules.n_shards("batch"),
        n_sequences=cfg.data.prompts_per_step * responses,
    )
    if workload is None and (rollout_devices or not cfg.schedule.rollout_workers):
        programs = _with_engine(programs, state.params, dtype, memory_bytes, rollout_devices)
    for role in cfg.learner.offload:
        idle = [name for name in IDLE_STATE.get(role, ()) if name in resident]
        for name, counted in table.counted_state.items():
            if not uses_weights(cfg, name, role):
                table.counted_state[name] = (*counted, *idle)
    return programs


def policy_weights(decoder: DecoderConfig) -> tuple[str, ...]:
    """The entries of `RunPrograms.resident` that are the policy's weights."""
    return ("params",) if decoder.lora is None else ("params", "base")


def _add_update(
    table: ProgramTable,
    host: dict[str, int],
    cfg: RunConfig,
    decoder: DecoderConfig,
    ref_decoder: DecoderConfig,
    dtype: jnp.dtype,
) -> TrainState:
    """Adds the policy update; returns the abstract state."""
    mesh, rules, specs = jax.sharding.get_mesh(), training_rules(cfg), decoder_specs(decoder)
    trained, n_updates = split(specs)[0], cfg.total_steps * cfg.updates_per_step or 10**6
    check_opt_state(cfg.learner, trained, rules)
    optimizer = make_optimizer(cfg.learner, n_updates, trained, rules)
    offload = "optimizer" in cfg.learner.offload
    state = abstract_state(specs, dtype, optimizer, rules, mesh, offload=offload)
    ref = None
    if full_kl_in_loss(cfg):
        ref = abstract_params(decoder_specs(ref_decoder), rules, dtype, mesh)
    policy = policy_weights(decoder)
    make = make_update if "vocab" in state.params.cfg.heads else make_value_update
    n_vocab = decoder.V if cfg.algorithm.keep_sampling_mask else 0
    update, batch = make(cfg, optimizer, rules), abstract_batch(cfg, rules, mesh, n_vocab=n_vocab)
    lowered = functools.cache(lambda: update.lower(state, batch, ref))
    if cfg.learner.router_aux_coef:  # counts the tokens per expert
        table.add("count", lambda: lowered()["count"], *policy)
    ref_names = () if ref is None or shares_base(cfg) else ("ref",)
    table.add("accumulate", lambda: lowered()["accumulate"], *policy, *ref_names)
    table.add("apply", lambda: lowered()["apply"], "params", "opt_state")
    add_host_state(host, "opt_state", state, update)
    return state


def _add_critic(
    table: ProgramTable,
    resident: dict[str, int],
    host: dict[str, int],
    cfg: RunConfig,
    decoder: DecoderConfig,
    state: TrainState,
    critic_decoder: DecoderConfig,
    dtype: jnp.dtype,
) -> dict[str, ValueScorer]:
    """Adds the programs of a value head or a separate critic; returns their model by program."""
    if "score" in decoder.heads:
        scorer = shared_value_scorer(cfg, dtype)
        values = functools.partial(_lower_values, scorer, state.params)
        table.add("values", values, *policy_weights(decoder))
        return {"values": scorer}
    if not cfg.has_critic:
        return {}
    critic = make_critic(cfg, Path(), critic_decoder, dtype, cfg.total_steps or 10**6)
    trained, frozen = split(critic.state.params)
    resident["critic"], base = bytes_per_device(trained), bytes_per_device(frozen)
    if base:
        resident["critic_base"] = base
    model = ("critic", "critic_base") if base else ("critic",)
    resident["critic_opt_state"] = bytes_per_device(critic.state.opt_state)
    with critic.scorer.layout.on_mesh():
        add_host_state(host, "critic_opt_state", critic.state, critic.update)
    lowered = functools.cache(lambda: _lower_critic_update(critic))
    values = functools.partial(_lower_values, critic.scorer, critic.state.params)
    table.add("values", values, *model)
    table.add("critic_accumulate", lambda: lowered()["accumulate"], *model)
    table.add("critic_apply", lambda: lowered()["apply"], "critic", "critic_opt_state")
    return dict.fromkeys(CRITIC_PROGRAMS, critic.scorer)


def _add_reward_model(
    table: ProgramTable,
    resident: dict[str, int],
    cfg: RunConfig,
    reward_decoder: DecoderConfig,
    dtype: jnp.dtype,
) -> ValueScorer:
    scorer, reward_decoder = reward_model_scorer(cfg, reward_decoder, dtype)
    weights = scorer.layout.abstract_weights(reward_decoder, jax.sharding.get_mesh())
    resident["reward_model"] = bytes_per_device(weights)
    lower = functools.partial(_lower_values, scorer, weights)
    table.add("reward_model", lower, "reward_model")
    return scorer


def _add_scoring(
    table: ProgramTable,
    resident: dict[str, int],
    cfg: RunConfig,
    decoders: Mapping[str, DecoderConfig],
    layouts: Mapping[str, Layout],
    workload: OfflineWorkload | None,
) -> None:
    """Adds the scoring of old and reference logprobs, if the run needs them."""
    mesh = jax.sharding.get_mesh()
    budgets = {"score": cfg.score.token_budget, "reference": cfg.ref.token_budget}
    needed = {"score": needs_old_logp(cfg), "reference": needs_ref_logp(cfg)}
    if workload is not None:
        needed = {"score": workload.scores_policy, "reference": workload.has_reference}
    shared = shares_base(cfg)
    if (needed["reference"] or needs_ref(cfg)) and not shared:
        weights = layouts["reference"].abstract_weights(decoders["reference"], mesh)
        resident["ref"] = bytes_per_device(weights)
    ref_name = "ref_aliased" if shared else "ref"
    for name, counted in {"score": "score_aliased", "reference": ref_name}.items():
        if needed[name]:
            restricted = name == "score" and cfg.algorithm.keep_sampling_mask
            n_joined = micro_batches_per_call(cfg, layouts[name], budgets[name])
            lower = functools.partial(
                _lower_score, cfg, decoders[name], layouts[name], mesh, n_joined, restricted
            )
            table.add(name, lower, counted)


def _add_resharding(
    table: ProgramTable, cfg: RunConfig, layouts: Mapping[str, Layout], params: Decoder
) -> dict[str, int]:
    """Adds the resharding of training's weights for scoring; returns the bytes of its roles.

    The reference is scored with training's weights if it is the base of adapters.
    """
    weights = {"score": ("score", params)}
    if shares_base(cfg):
        weights["reference"] = ("ref", without_adapters(params))
    role_weights = {}
    for name, (role, training) in weights.items():
        aliased, copied = layouts[name].weight_bytes(training)
        role_weights |= {f"{role}_aliased": aliased, f"{role}_copied": copied}
        if copied and name in table.lower:
            lower = functools.partial(layouts[name].lower, training)
            table.add(f"reshard_{role}", lower, f"{role}_copied")
    return role_weights


def _with_engine(
    programs: RunPrograms,
    params: Tree,
    dtype: jnp.dtype,
    memory_bytes: int | float,
    devices: Sequence[Any],
) -> RunPrograms:
    """Adds the rollout's programs, on `devices` if given; `params` are the training weights."""
    cfg, table, mesh = programs.cfg, programs.table, jax.sharding.get_mesh()
    n_workers = cfg.schedule.rollout_workers
    n_sides = n_workers or len({device.process_index for device in mesh.devices.flat})
    if n_workers:  # each has an engine over its devices, and loads weights array by array
        mesh = worker_mesh(cfg, devices)
        layout = worker_layout(cfg, programs.decoder, dtype, mesh)
    else:
        layout = rollout_layout(cfg, programs.decoder, dtype, devices)
        check_idle_policy(cfg, layout)
    implementation = cfg.model.paged_attention
    engine = PagedEngine(
        programs.decoder,
        cfg.rollout,
        rules=layout.rules,
        dtype=layout.dtype,
        max_len=cfg.data.max_len,
        implementation=None if implementation == "auto" else implementation,
        keep_support=cfg.algorithm.keep_sampling_mask,
    )
    weights = layout.abstract_weights(programs.decoder, mesh)
    n_bytes = bytes_per_device(weights)
    aliased, copied = (0, 0) if devices else layout.weight_bytes(params)
    used = (
        n_copies(cfg) * n_bytes if devices else sum(programs.resident.values()) + n_bytes - aliased
    )
    half = (cfg.rollout.memory_utilization * memory_bytes - used) / 2
    with jax.set_mesh(layout.mesh(mesh)):
        page_bytes, n_replicas = engine.pool.page_bytes_per_device, engine.pool.n_replicas
    max_pages = max(int(half // page_bytes), engine.shapes.max_pages_per_seq)
    n_pages = cfg.rollout.n_pages or min(
        cfg.rollout.max_num_seqs * engine.shapes.max_pages_per_seq, max_pages
    )

    @functools.cache
    def engine_program(kind: str) -> jax.stages.Lowered:
        with jax.set_mesh(layout.mesh(mesh)):
            return engine.runner.lower_largest(weights, n_pages, kind)

    if devices:
        aliased, copied = n_bytes, 0 if n_workers else layout.sent_bytes(params)
        if copied:
            table.add("send", functools.partial(layout.lower, params), "rollout_copied")
    elif copied:
        table.add("reshard", functools.partial(layout.lower, params), "rollout_copied")
    shared = () if "policy" in cfg.learner.offload else ("rollout_aliased",)
    for name in ("prefill", *("mixed",) * engine.shapes.mixed, "copy_pages", "decode"):
        counted = ("kv",) if name == "copy_pages" else (*shared, "kv")
        table.add(name, functools.partial(engine_program, name), *counted)
    return dataclasses.replace(
        programs,
        engine=engine,
        role_weights=programs.role_weights
        | {
            "rollout_aliased": aliased,
            "rollout_copied": copied,
            "rollout_made": n_bytes - aliased,
        },
        page_bytes=page_bytes,
        n_replicas=n_replicas * (n_sides if devices else mesh.size // layout.mesh(mesh).size),
        n_pages=n_pages,
        n_rollout_devices=len(devices) * n_sides,
        n_workers=n_workers,
    )


def _lower_critic_update(critic: Critic) -> dict[str, jax.stages.Lowered]:
    layout, cfg = critic.scorer.layout, critic.scorer.cfg
    with layout.on_mesh():
        batch = abstract_batch(cfg, layout.rules, jax.sharding.get_mesh())
        return critic.update.lower(critic.state, batch)


def _lower_values(scorer: ValueScorer, params: Tree) -> jax.stages.Lowered:
    with scorer.layout.on_mesh():
        mesh = jax.sharding.get_mesh()
        return scorer.program.lower(params, abstract_batch(scorer.cfg, scorer.layout.rules, mesh))


def _lower_score(
    cfg: RunConfig,
    decoder: DecoderConfig,
    layout: Layout,
    mesh: jax.sharding.Mesh,
    n_joined: int,
    restricted: bool,
) -> jax.stages.Lowered:
    params, score = layout.abstract_weights(decoder, mesh), make_score(cfg, layout.rules)
    n_ranks = training_rules(cfg).n_shards("batch") * n_joined
    with layout.on_mesh():
        role_mesh = jax.sharding.get_mesh()
        n_vocab = decoder.V if restricted else 0
        batch = abstract_batch(cfg, layout.rules, role_mesh, n_ranks, n_vocab=n_vocab)
        return score.lower(params, batch)
