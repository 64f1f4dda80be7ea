"""The compiled programs of a run, lowered from abstract values: the very functions that it calls."""

import contextlib
import dataclasses
import functools
import math
import time
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path

import jax
import jax.numpy as jnp
import numpy as np

from jaxrl.config.keys import RunConfig
from jaxrl.data.packing import empty_batch
from jaxrl.engine.engine import PagedEngine
from jaxrl.kernels.attention.blocks import BLOCK
from jaxrl.layout import Layout, role_layout, rollout_layout, training_rules
from jaxrl.learner.critic import Critic, Values, make_critic, reward_values, shared_values
from jaxrl.learner.loss import logprob_chunk
from jaxrl.learner.optimizer import make_optimizer
from jaxrl.learner.requirements import full_kl_in_loss, needs_old_logp, needs_ref, needs_ref_logp
from jaxrl.learner.state import abstract_state
from jaxrl.learner.step import joined_batches, make_score, make_update, make_value_update
from jaxrl.models.config import DecoderConfig, for_platform
from jaxrl.models.decoder import decoder_specs
from jaxrl.models.paged import DECODE_SCOPE
from jaxrl.models.spec import abstract_params
from jaxrl.planner.cost import Cost, program_cost
from jaxrl.planner.hlo import Shape
from jaxrl.planner.kernels import Kernels, Work, attention_work, cudnn_work, paged_work
from jaxrl.types import Batch, TrainState, Tree
from sharding import Rules, bytes_per_device, target_platform

CRITIC_PROGRAMS = ("values", "critic_accumulate", "critic_apply")


@dataclasses.dataclass(frozen=True)
class Lengths:
    """Tokens of a sequence that times are worked out for."""

    prompt: int
    response: int


@dataclasses.dataclass(frozen=True)
class OfflineWorkload:
    """Shape of an offline training step (SFT, DPO, reward modelling), which samples nothing."""

    responses_per_example: int  # 1 for SFT, 2 (chosen, rejected) for preference pairs
    # Whether training scores the policy's logprobs. Validation alone needs less memory than an update.
    scores_policy: bool
    has_reference: bool
    heads: tuple[str, ...] = ("vocab",)  # of the trained model


@dataclasses.dataclass(frozen=True)
class Program:
    """One compiled program on one device."""

    argument_bytes: int
    temp_bytes: int
    output_bytes: int
    alias_bytes: int  # of the output, in buffers of the arguments
    code_bytes: int
    cost: Cost
    compile_s: float
    holds: tuple[str, ...]  # what of the run's state is among its arguments, or waits with the host

    @property
    def own_bytes(self) -> int:
        """Memory while it runs, of what it is given and what it makes."""
        new = max(self.output_bytes - self.alias_bytes, 0)
        return self.argument_bytes + self.temp_bytes + new + self.code_bytes


@dataclasses.dataclass(frozen=True)
class Parts:
    """A run's programs before they are compiled, and the state that stays on the devices."""

    cfg: RunConfig
    decoder: DecoderConfig
    engine: (
        PagedEngine | None
    )  # None where nothing is sampled, as the three lines at the end are then 0
    lower: dict[str, Callable[[], jax.stages.Lowered]]
    holds: dict[str, tuple[str, ...]]
    resident: dict[
        str, int
    ]  # bytes per device: params, opt_state, ref, of a critic, of a reward model
    shares: dict[str, int]  # of params: what a role copies, and what it uses as it is
    joined: dict[str, int]  # micro-batches of an update that one call scores
    values: dict[str, Values]  # programs of a critic and a reward model -> whose they are
    n_ranks: int
    n_sequences: int  # of a step
    page_bytes: int = 0  # per device
    n_replicas: int = 0  # of all engines
    n_pages: int = 0  # of the pool that the engine's programs are lowered for


def run_parts(
    cfg: RunConfig,
    decoder: DecoderConfig,
    memory_bytes: int | float,
    others: Mapping[str, DecoderConfig] | None = None,
    workload: OfflineWorkload | None = None,
) -> Parts:
    """The programs of a run at their largest declared shapes, on the mesh that is set. `others` are the
    shapes of "critic", the backbone of one of its own, "teacher" and "reward_model"; what is not there has the
    policy's. `workload` plans offline training instead of RL.

    The KV pool has all pages that the run could fill, if half of what the state leaves of the memory
    holds them: then a run that fits calls the very programs that its plan compiled.
    """
    mesh = jax.sharding.get_mesh()
    others = {name: decoder for name in ("critic", "teacher", "reward_model")} | dict(others or {})
    ref_decoder = for_platform(cfg, others["teacher"], target_platform())[1]
    dtype, decoder = for_platform(cfg, decoder, target_platform())
    if workload is not None:
        decoder = dataclasses.replace(decoder, heads=workload.heads)
    specs = decoder_specs(decoder)
    optimizer = make_optimizer(cfg.learner, cfg.total_steps * cfg.updates_per_step or 10**6, specs)
    rules = training_rules(cfg)
    state = abstract_state(
        specs, dtype, optimizer, rules, mesh, offload="optimizer" in cfg.learner.offload
    )
    n_ranks = rules.n_shards("batch")
    ref = abstract_params(decoder_specs(ref_decoder), rules, dtype, mesh)
    batch = abstract_batch(cfg, rules, mesh)
    lower, holds = _update_programs(cfg, rules, state, ref, optimizer, batch)
    resident = {
        "params": bytes_per_device(state.params),
        "opt_state": bytes_per_device(state.opt_state),
    }
    values: dict[str, Values] = {}
    if "score" in decoder.heads:
        values["values"] = shared_values(cfg, dtype)
        lower["values"] = functools.partial(_lower_values, values["values"], state.params)
        holds["values"] = ("params",)
    elif cfg.has_critic:
        own = make_critic(cfg, Path(), others["critic"], dtype, cfg.total_steps or 10**6)
        values |= dict.fromkeys(CRITIC_PROGRAMS, own.values)
        resident["critic"] = bytes_per_device(own.state.params)
        resident["critic_opt_state"] = bytes_per_device(own.state.opt_state)
        its_lower, its_holds = _critic_programs(own)
        lower, holds = lower | its_lower, holds | its_holds
    if cfg.reward_model.path:
        judge, its_decoder = reward_values(cfg, others["reward_model"], dtype)
        weights = judge.layout.abstract_weights(its_decoder, mesh)
        values["reward_model"] = judge
        resident["reward_model"] = bytes_per_device(weights)
        lower["reward_model"] = functools.partial(_lower_values, judge, weights)
        holds["reward_model"] = ("reward_model",)
    scoring = {
        "score": role_layout(cfg, "score", decoder, dtype),
        "reference": role_layout(cfg, "ref", ref_decoder, dtype),
    }
    shapes = {"score": decoder, "reference": ref_decoder}
    needed = {"score": needs_old_logp(cfg), "reference": needs_ref_logp(cfg)}
    if workload is not None:
        needed = {"score": workload.scores_policy, "reference": workload.has_reference}
    if needed["reference"] or needs_ref(cfg):
        weights = scoring["reference"].abstract_weights(ref_decoder, mesh)
        resident["ref"] = bytes_per_device(weights)
    for name, held in {"score": "score_aliased", "reference": "ref"}.items():
        if needed[name]:
            lower[name] = functools.partial(_lower_score, cfg, shapes[name], scoring[name], mesh)
            holds[name] = (held,)
    aliased, copied = scoring["score"].weight_bytes(state.params)
    parts = Parts(
        cfg=cfg,
        decoder=decoder,
        engine=None,
        lower=lower,
        holds=holds,
        resident=resident,
        shares={"score_aliased": aliased, "score_copied": copied},
        values=values,
        joined={name: joined_batches(cfg, its) for name, its in scoring.items()},
        n_ranks=n_ranks,
        n_sequences=cfg.data.prompts_per_step
        * (workload.responses_per_example if workload else cfg.rollout.n),
    )
    if copied and needed["score"]:
        lower["reshard_score"] = functools.partial(scoring["score"].lower, state.params)
        holds["reshard_score"] = ("score_copied",)
    if workload is None:
        parts = _with_engine(parts, state.params, dtype, memory_bytes)
    if "reference" in cfg.learner.offload:
        holds = {
            name: held if uses_ref(cfg, name) else (*held, "ref")
            for name, held in parts.holds.items()
        }
        parts = dataclasses.replace(parts, holds=holds)
    return parts


def _with_engine(parts: Parts, params: Tree, dtype: jnp.dtype, memory_bytes: int | float) -> Parts:
    """The programs of the rollout beside the others; `params` are training's."""
    cfg, mesh = parts.cfg, jax.sharding.get_mesh()
    layout = rollout_layout(cfg, parts.decoder, dtype)
    name = cfg.model.paged_attention
    engine = PagedEngine(
        parts.decoder,
        cfg.rollout,
        rules=layout.rules,
        dtype=layout.dtype,
        max_len=cfg.data.max_len,
        implementation=None if name == "auto" else name,
    )
    weights = layout.abstract_weights(parts.decoder, mesh)
    aliased, copied = layout.weight_bytes(params)
    copy = bytes_per_device(weights) - aliased
    state = sum(parts.resident.values())
    half = (cfg.rollout.memory_utilization * memory_bytes - state - copy) / 2
    with jax.set_mesh(layout.mesh(mesh)):
        page_bytes, n_replicas = engine.pool.page_bytes_per_device, engine.pool.n_replicas
    room = max(int(half // page_bytes), engine.shapes.max_pages_per_seq)
    n_pages = cfg.rollout.n_pages or min(
        cfg.rollout.max_num_seqs * engine.shapes.max_pages_per_seq, room
    )

    @functools.cache
    def engine_program(kind: str) -> jax.stages.Lowered:
        with jax.set_mesh(layout.mesh(mesh)):
            return engine.runner.lower(weights, n_pages, kind)

    lower, holds = dict(parts.lower), dict(parts.holds)
    if copied:
        lower["reshard"] = functools.partial(layout.lower, params)
        holds["reshard"] = ("rollout_copied",)
    for name in ("prefill", *("mixed",) * engine.shapes.mixed, "copy_pages", "decode"):
        lower[name] = functools.partial(engine_program, name)
        holds[name] = ("kv",) if name == "copy_pages" else ("rollout_aliased", "kv")
    return dataclasses.replace(
        parts,
        engine=engine,
        lower=lower,
        holds=holds,
        shares=parts.shares | {"rollout_aliased": aliased, "rollout_copied": copied},
        page_bytes=page_bytes,
        n_replicas=n_replicas * (mesh.size // layout.mesh(mesh).size),
        n_pages=n_pages,
    )


def uses_ref(cfg: RunConfig, program: str) -> bool:
    """Whether the reference model is on the devices while a program runs: in its scoring, or in updates."""
    if program in ("count", "accumulate", "apply"):
        return full_kl_in_loss(cfg)
    return program == "reference"


def _update_programs(
    cfg: RunConfig, rules: Rules, state: TrainState, ref: Tree, optimizer, batch: Batch
):
    make = make_update if "vocab" in state.params.cfg.heads else make_value_update
    update = make(cfg, optimizer, rules)
    ref = ref if full_kl_in_loss(cfg) else None
    counting = ("count",) if cfg.learner.router_aux_coef else ()  # what each expert is sent
    update_programs = functools.cache(lambda: update.lower(state, batch, ref))
    lower: dict[str, Callable[[], jax.stages.Lowered]] = {
        name: (lambda name=name: update_programs()[name])
        for name in (*counting, "accumulate", "apply")
    }
    holds: dict[str, tuple[str, ...]] = {
        "accumulate": ("params",) + (("ref",) if ref is not None else ()),
        "apply": ("params", "opt_state"),
        "count": ("params",),
    }
    return lower, holds


def _critic_programs(critic: Critic):
    """Values and updates of a critic of its own."""
    layout, cfg = critic.values.layout, critic.values.cfg

    @functools.cache
    def update_programs() -> dict[str, jax.stages.Lowered]:
        with layout.on_mesh():
            batch = abstract_batch(cfg, layout.rules, jax.sharding.get_mesh())
            return critic.update.lower(critic.state, batch)

    lower: dict[str, Callable[[], jax.stages.Lowered]] = {
        "values": functools.partial(_lower_values, critic.values, critic.state.params),
        "critic_accumulate": lambda: update_programs()["accumulate"],
        "critic_apply": lambda: update_programs()["apply"],
    }
    holds: dict[str, tuple[str, ...]] = {
        "values": ("critic",),
        "critic_accumulate": ("critic",),
        "critic_apply": ("critic", "critic_opt_state"),
    }
    return lower, holds


def _lower_values(values: Values, params: Tree) -> jax.stages.Lowered:
    with values.layout.on_mesh():
        mesh = jax.sharding.get_mesh()
        return values.program.lower(params, abstract_batch(values.cfg, values.layout.rules, mesh))


def _lower_score(
    cfg: RunConfig, decoder: DecoderConfig, layout: Layout, mesh: jax.sharding.Mesh
) -> jax.stages.Lowered:
    params, score = layout.abstract_weights(decoder, mesh), make_score(cfg, layout.rules)
    n_ranks = training_rules(cfg).n_shards("batch") * joined_batches(cfg, layout)
    with layout.on_mesh():
        here = jax.sharding.get_mesh()
        return score.lower(params, abstract_batch(cfg, layout.rules, here, n_ranks))


def abstract_batch(
    cfg: RunConfig, rules: Rules, mesh: jax.sharding.Mesh, n_ranks: int | None = None
) -> Batch:
    """The largest micro-batch that the run declares, of as many data-parallel ranks (default: those of
    the mesh)."""
    rows, row_len = cfg.learner.shapes[-1]
    n_ranks = n_ranks or math.prod(mesh.shape[axis] for axis in rules.mesh_axes("batch"))
    sharding = jax.sharding.NamedSharding(mesh, rules.spec("batch", "time"))

    def abstract(a: np.ndarray) -> jax.ShapeDtypeStruct:
        return jax.ShapeDtypeStruct((rows * n_ranks, row_len), a.dtype, sharding=sharding)

    return jax.tree.map(abstract, empty_batch(1, row_len))


def compile_programs(
    parts: Parts, lengths: Lengths, on_start: Callable[[str], None] = lambda name: None
) -> dict[str, Program]:
    """Compiles them one after the other; `reference` is `score` again where both are there and alike."""
    done: dict[str, Program] = {}
    for name, lower in parts.lower.items():
        as_score = parts.cfg.ref == parts.cfg.score and not parts.cfg.algorithm.teacher
        if name == "reference" and "score" in done and as_score:
            done[name] = dataclasses.replace(
                done["score"], compile_s=0.0, holds=parts.holds["reference"]
            )
            continue
        on_start(f"compiling {name}")
        start = time.perf_counter()
        compiled = _compile(name, lower)
        seconds = time.perf_counter() - start
        memory, text = compiled.memory_analysis(), compiled.as_text()
        assert memory is not None and text is not None, "every backend of ours has both"
        done[name] = Program(
            argument_bytes=memory.argument_size_in_bytes,
            temp_bytes=memory.temp_size_in_bytes,
            output_bytes=memory.output_size_in_bytes,
            alias_bytes=memory.alias_size_in_bytes,
            code_bytes=memory.generated_code_size_in_bytes,
            cost=program_cost(
                text, loop_trips(name, parts, lengths), kernels(name, parts, lengths)
            ),
            compile_s=seconds,
            holds=parts.holds[name],
        )
    return done


class TooLarge(ValueError):
    """A program needs more memory by itself than the device has, and so has no plan."""


def _compile(name: str, lower: Callable[[], jax.stages.Lowered]) -> jax.stages.Compiled:
    try:
        return lower().compile()
    except jax.errors.JaxRuntimeError as problem:
        if "RESOURCE_EXHAUSTED" not in str(problem):
            raise
        said = str(problem).partition("Ran out of memory ")[2].partition(". HLO")[0]
        raise TooLarge(
            f"does not fit: the compiler cannot place {name} on the device ({said or problem}); "
            "lower learner.token_budget or rollout.max_num_batched_tokens, or shard over more devices"
        ) from problem


def loop_trips(program: str, parts: Parts, lengths: Lengths) -> Callable[[str], float | None]:
    """How often the loops run whose bounds are data, for sequences of `lengths`.

    Training attention: a query sees on average half of its segment and its own block of keys, in a ring in as
    many parts as there are chunks. Decode: the keys of half the response, and one step. Prefill: half the prompt. Logprobs: all tokens.
    """
    cfg, rules = parts.cfg, training_rules(parts.cfg)
    on_mesh = contextlib.nullcontext()
    if values := parts.values.get(program):
        cfg, rules = values.cfg, values.layout.rules
        on_mesh = values.layout.on_mesh()
    rows, row_len = cfg.learner.shapes[-1]
    segment = _segment(program, parts, lengths)
    chunk = logprob_chunk(cfg)
    with on_mesh:
        n_time = rules.n_shards("time")

    def trips(op_name: str) -> float | None:
        if "paged_attention" in op_name:
            return float(math.ceil(_paged_keys(program, op_name, lengths) / BLOCK))
        if "ring_attention" in op_name:  # a chunk of keys at a time, of two on each device
            return segment / 2 / BLOCK / (2 * n_time) + 0.5
        if "cudnn_attention" in op_name:  # the call before the loop is counted with all segments
            return 0.0
        if "attention" in op_name:
            return segment / 2 / BLOCK + 1
        if "logprob" in op_name:
            chunks = rows * row_len / chunk
            return float(math.ceil(chunks / 4 if "transpose" in op_name else chunks))
        if program == "decode":
            return 1.0
        return None

    return trips


def kernels(program: str, parts: Parts, lengths: Lengths) -> Kernels:
    """What kernels do for sequences of `lengths`: in training a query sees half of its segment."""

    def work(op_name: str, operands: Sequence[Shape], results: Sequence[Shape]) -> Work | None:
        paged = paged_work(op_name, operands, results, keys=_paged_keys(program, op_name, lengths))
        keys = _segment(program, parts, lengths) / 2
        packed = attention_work(op_name, operands, results, keys=keys)
        return paged or packed or cudnn_work(op_name, operands, results, keys=keys)

    return work


def _paged_keys(program: str, op_name: str, lengths: Lengths) -> float:
    """Keys that a row sees in its pages: those of half the response where it decodes, of half the prompt elsewhere."""
    decodes = program == "decode" or DECODE_SCOPE in op_name  # drafts are tokens of one row
    return lengths.prompt + lengths.response / 2 if decodes else lengths.prompt / 2


def _segment(program: str, parts: Parts, lengths: Lengths) -> int:
    """Tokens of an average segment of a packed row."""
    values = parts.values.get(program)
    cfg = parts.cfg if values is None else values.cfg
    return min(lengths.prompt + lengths.response, cfg.learner.shapes[-1][1])
