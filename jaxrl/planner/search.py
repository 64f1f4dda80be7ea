"""Searches for the fastest settings that fit.

Formulas rank the candidates; compiled plans decide among the first of them.
"""

import collections
import contextlib
import dataclasses
import functools
import itertools
import math
from collections.abc import Callable, Iterator

import jax
import jax.numpy as jnp

from jaxrl.config.choices import REMATS
from jaxrl.config.keys import LearnerConfig, MeshConfig, RunConfig
from jaxrl.layout import training_rules
from jaxrl.learner.optimizer import check_moments, make_optimizer
from jaxrl.learner.requirements import full_kl_in_loss, needs_old_logp, needs_ref, needs_ref_logp
from jaxrl.learner.state import init_opt_state
from jaxrl.models.config import DecoderConfig, for_platform
from jaxrl.models.decoder import decoder_specs
from jaxrl.models.lora import split, with_adapters
from jaxrl.models.mesh_check import check_mesh
from jaxrl.models.spec import count_params, map_specs
from jaxrl.planner.compilation import ProgramTooLarge
from jaxrl.planner.plan import Plan, make_plan
from jaxrl.planner.programs import Lengths, shares_base
from jaxrl.planner.topology import Chip, Topology
from sharding import abstract_mesh, bytes_per_device

BUDGET_ROWS = (1, 2, 4, 8)  # maximum-length rows per micro-batch and data-parallel rank
# of the forward pass, in backward
RECOMPUTED_FRACTION = {"full": 1.0, "mlp": 0.15, "dots": 0.02, "none": 0.0}
MIN_SHARD_LEN = 2048  # tokens of a row per device of the sequence axis
HEAD_CHUNK = 1024  # tokens whose logits exist at one time


@dataclasses.dataclass(frozen=True)
class Candidate:
    """Settings with their estimated memory and step time."""

    mesh: dict[str, int]  # axis -> size, without axes of size 1
    token_budget: int
    remat: str
    offload: tuple[str, ...]
    bytes: float  # peak per device, without KV pages
    step_s: float

    @property
    def overrides(self) -> str:
        """The settings as command-line options."""
        sizes = {"fsdp": 1} | self.mesh
        keys = {f"mesh.{axis}": size for axis, size in sizes.items()} | {
            "learner.token_budget": self.token_budget,
            "learner.remat": self.remat,
        }
        if self.offload:
            keys["learner.offload"] = ",".join(self.offload)
        return " ".join(f"--config.{key}={value}" for key, value in keys.items())

    def apply(self, cfg: RunConfig) -> RunConfig:
        """The config with these settings."""
        learner = dataclasses.replace(
            cfg.learner,
            token_budget=self.token_budget,
            buckets=(max(cfg.learner.row_lens),),
            remat=self.remat,
            offload=self.offload,
        )
        mesh = MeshConfig(**{"fsdp": 1} | self.mesh)
        return dataclasses.replace(cfg, mesh=mesh, learner=learner)


def search(
    cfg: RunConfig,
    decoder: DecoderConfig,
    machine: Topology,
    *,
    lengths: Lengths,
    finalists: int = 3,
    on_start: Callable[[str], None] = lambda line: None,
) -> list[tuple[Candidate, Plan | None]]:
    """The compiled candidates with their plans: first those that fit, by step time.

    Compiles candidates in the order of their estimated step time until `finalists` of them fit, and
    skips those whose estimated memory exceeds that of the device. A plan is None if a program is
    too large to compile. Raises ValueError if no candidate is left.
    """
    if cfg.has_critic or cfg.algorithm.teacher or cfg.reward_model.path:
        raise ValueError(
            "--search has no formulas for a critic (algorithm.advantage='gae'), algorithm.teacher "
            "or reward_model.path; search without them, then plan the result with them"
        )
    cfg = dataclasses.replace(cfg, learner=dataclasses.replace(cfg.learner, halvings=0))
    ranked = sorted(
        candidates(cfg, decoder, machine, lengths), key=lambda c: (round(c.step_s, 6), c.bytes)
    )
    fitting = [c for c in ranked if c.bytes < machine.chip.memory_bytes]
    if not fitting:
        least = min(ranked, key=lambda c: c.bytes, default=None)
        needs = f" at least {least.bytes / 2**30:.1f} GiB per device" if least else ""
        raise ValueError(
            f"no mesh of {machine.name} fits this run: it needs{needs} of "
            f"{machine.chip.memory_bytes / 2**30:.1f}; use more devices or shorter rows"
        )
    compiled: list[tuple[Candidate, Plan | None]] = []
    for candidate in fitting:
        on_start(f"compiling {candidate.overrides}")
        try:
            plan = make_plan(candidate.apply(cfg), decoder, machine, lengths=lengths)
        except ProgramTooLarge:
            plan = None
        compiled.append((candidate, plan))
        if sum(plan is not None and plan.fits for _, plan in compiled) == finalists:
            break
    return sorted(compiled, key=_rank)


def candidates(
    cfg: RunConfig, decoder: DecoderConfig, machine: Topology, lengths: Lengths
) -> Iterator[Candidate]:
    """All meshes that divide the model, token budgets, remat policies and offload options."""
    row = max(cfg.learner.row_lens)
    has_copy = needs_ref(cfg) and not shares_base(cfg)
    all_offload = ("optimizer", "reference") if has_copy else ("optimizer",)
    for mesh in meshes(cfg, decoder, machine):
        for rows in BUDGET_ROWS:
            for remat in REMATS:
                for offload in ((), all_offload):
                    tokens = rows * row * mesh["sequence"]
                    yield estimate(cfg, decoder, machine, lengths, mesh, tokens, remat, offload)


def meshes(cfg: RunConfig, decoder: DecoderConfig, machine: Topology) -> Iterator[dict[str, int]]:
    """All meshes worth trying; fsdp has the remaining devices.

    tensor: within a node. sequence: for long rows. expert: for MoE models. replica: one node or
    more each, if the network between nodes is slow.
    """
    n, node = len(machine.devices), machine.chip.node or len(machine.devices)
    row, rules = max(cfg.learner.row_lens), training_rules(cfg)
    divisors = [size for size in range(1, n + 1) if n % size == 0]
    for tensor, sequence, expert, replica in itertools.product(divisors, repeat=4):
        inner = tensor * sequence * expert * replica
        if n % inner or tensor > node or (sequence > 1 and row < MIN_SHARD_LEN * sequence):
            continue
        if (expert > 1 and not decoder.E) or (replica > 1 and n // replica < node):
            continue
        if replica > 1 and not machine.chip.node:
            continue
        sizes = dict(
            fsdp=n // inner, tensor=tensor, sequence=sequence, expert=expert, replica=replica
        )
        rules = training_rules(dataclasses.replace(cfg, mesh=MeshConfig(**sizes)))
        with contextlib.suppress(ValueError):
            check_mesh(decoder, sizes, rules)
            with jax.sharding.use_abstract_mesh(abstract_mesh(n, **sizes)):
                check_moments(cfg.learner, split(decoder_specs(decoder))[0], rules)
            yield sizes


def estimate(
    cfg: RunConfig,
    decoder: DecoderConfig,
    machine: Topology,
    lengths: Lengths,
    mesh: dict[str, int],
    tokens: int,
    remat: str,
    offload: tuple[str, ...] = (),
) -> Candidate:
    """Memory and step time by formula; `tokens` is the token budget of a data-parallel rank.

    Memory: weights, optimizer state, master weights and gradients, all sharded; activations that
    backward keeps of each layer; one gathered layer and its gradient; a chunk of logits and the
    head's gradient.
    Time: compute of each pass over the weights, or all-gathers of the weights if these take
    longer; activations all-reduced over tensor, exchanged over sequence, and sent to experts;
    gradients reduced over replicas; offloaded state moved to the device and back. Decode reads
    the weights at every step, either its own copy or gathered ones.
    """
    sizes = _sizes(cfg, decoder, machine, mesh, tokens)
    memory = _memory_bytes(cfg, decoder, sizes, remat, offload)
    step_s = _step_seconds(cfg, decoder, machine, lengths, sizes, remat, offload)
    mesh = {axis: n for axis, n in mesh.items() if n > 1}
    return Candidate(mesh, tokens, remat, offload, memory, step_s)


@dataclasses.dataclass(frozen=True)
class _Sizes:
    """Mesh sizes, and parameters per device. Parameters are counts, not bytes."""

    tensor: int
    sequence: int
    expert: int
    replica: int
    fsdp: int  # devices that shard the weights by FSDP: fsdp x sequence
    ranks: int  # data-parallel ranks
    tokens: int  # token budget of a rank
    item_bytes: int  # of a weight
    optimizer_bytes: float  # of the optimizer state, per device
    params: int
    active_params: int | float  # used by one token
    head: int  # parameters of the unembedding
    gathered: float  # per device with all FSDP shards
    held: float  # per device, sharded
    trained: float  # of these, what an update changes
    layer: float  # of one gathered layer
    rollout_copy: float  # per device
    n_replicas: int  # of the rollout engine; 1 if it uses the training layout

    @property
    def local_tokens(self) -> float:
        return self.tokens / self.sequence


def _sizes(
    cfg: RunConfig,
    d: DecoderConfig,
    machine: Topology,
    mesh: dict[str, int],
    tokens: int,
) -> _Sizes:
    size = collections.defaultdict(lambda: 1, mesh)
    tp, s, e = size["tensor"], size["sequence"], size["expert"]
    params, head = n_params(dataclasses.replace(d, stacked=True)), d.V * d.D
    experts = 3 * d.L * d.E * d.F_expert * d.D
    gathered = ((params - experts) + experts / e) / tp
    n_replicas, rollout_copy = 1, gathered
    if cfg.rollout.layout == "replicas":
        group = cfg.rollout.tensor or tp, cfg.rollout.expert or e
        n_replicas = max(len(machine.devices) // math.prod(group), 1)
        rollout_copy = ((params - experts) + experts / group[1]) / group[0]
    dtype, held = for_platform(cfg, d, machine.platform)[0], gathered / (size["fsdp"] * s)
    adapted = with_adapters(cfg.lora, d)
    return _Sizes(
        tensor=tp,
        sequence=s,
        expert=e,
        replica=size["replica"],
        fsdp=size["fsdp"] * s,
        ranks=size["replica"] * size["fsdp"] * e,
        tokens=tokens,
        item_bytes=dtype.itemsize,
        optimizer_bytes=held * optimizer_bytes_per_param(cfg.learner, adapted, dtype),
        params=params,
        active_params=params - experts * (1 - d.top_k / d.E if d.E else 0),
        head=head,
        gathered=gathered,
        held=held,
        trained=held * trained_fraction(adapted),
        layer=(gathered - head * (1 if d.tied else 2) / tp) / d.L,
        rollout_copy=rollout_copy,
        n_replicas=n_replicas,
    )


def _memory_bytes(
    cfg: RunConfig, d: DecoderConfig, sizes: _Sizes, remat: str, offload: tuple[str, ...]
) -> float:
    """Peak per device, without KV pages."""
    tp, e, local, wide = sizes.tensor, sizes.expert, sizes.local_tokens, sizes.item_bytes
    reference = needs_ref(cfg) and ("reference" not in offload or full_kl_in_loss(cfg))
    reference = reference and not shares_base(cfg)
    state = sizes.held * wide * (1 + reference) + sizes.trained * 4
    ffw = e * d.top_k * (d.F_expert + d.D) if d.E else d.F
    dots = 2 * d.D + (2 * (d.N + d.K) * d.H + 3 * ffw) / tp
    mlp = (2 * ffw + d.N * d.H) / tp
    kept = {"full": d.D, "mlp": d.D + mlp, "dots": d.D + dots, "none": d.D + 3 * dots}[remat]
    chunk = 3 * 4 * min(HEAD_CHUNK, local) * d.V / tp
    work = local * wide * (d.L * kept + 4 * dots) + 3 * sizes.layer * wide + chunk
    work += 2 * 4 * sizes.head / tp
    copies = sizes.fsdp > 1 and cfg.rollout.layout == "replicas"
    if copies or cfg.lora.merge:
        work = max(work, sizes.rollout_copy * wide)
    optimizer = sizes.optimizer_bytes
    return state + (max(work, optimizer) if "optimizer" in offload else optimizer + work)


def _step_seconds(
    cfg: RunConfig,
    d: DecoderConfig,
    machine: Topology,
    lengths: Lengths,
    sizes: _Sizes,
    remat: str,
    offload: tuple[str, ...],
) -> float:
    chip, rollout = machine.chip, cfg.rollout
    tp, s, e, wide = sizes.tensor, sizes.sequence, sizes.expert, sizes.item_bytes
    fsdp, local = sizes.fsdp, sizes.local_tokens
    seq_len = lengths.prompt + lengths.response
    attention = 2 * 2 * d.L * d.N * d.H * seq_len / 2
    # of a forward pass
    flops = local * (2 * (sizes.active_params - sizes.head * (not d.tied)) + attention) / tp
    compute = flops / chip.rate("f32" if wide == 4 else "bf16")
    gather = _collective_seconds(chip, sizes.gathered * wide, fsdp, fsdp * e * tp)
    activations = (
        d.L
        * local
        * wide
        * (
            _collective_seconds(chip, 2 * 2 * d.D, tp, tp)
            + _collective_seconds(chip, 2 * (d.N + d.K) * d.H / tp, s, s * tp)
            + _collective_seconds(chip, 2 * e * d.D, e, e * s * tp)
        )
    )
    forward = max(compute, gather) + activations
    recompute = RECOMPUTED_FRACTION[remat] * compute + (activations if remat == "full" else 0.0)
    # Frozen weights have no gradient: backward computes and sends about half as much.
    passes = 1 if cfg.lora.rank else 2
    backward = max(passes * compute + recompute, (fsdp > 1) * passes * gather) + activations
    gradients = 2 * 4 * sizes.trained
    backward += _collective_seconds(chip, gradients, sizes.replica, len(machine.devices))
    n_scored = needs_old_logp(cfg) + needs_ref_logp(cfg)
    micro_batches = math.ceil(cfg.sequences_per_step * seq_len / (sizes.ranks * sizes.tokens))
    step = micro_batches * (cfg.learner.epochs * (forward + backward) + n_scored * forward)
    slots = rollout.max_num_seqs * sizes.n_replicas
    decode_steps = math.ceil(cfg.sequences_per_step / slots) * lengths.response
    read = sizes.rollout_copy * wide / chip.memory_bytes_per_s
    step += decode_steps * (read if sizes.n_replicas > 1 else max(read, gather))
    moved = 0.0
    if "optimizer" in offload:
        moved += 2 * sizes.optimizer_bytes * cfg.updates_per_step
    if "reference" in offload:
        moved += sizes.held * wide
    return step + moved / chip.host_bytes_per_s


def _collective_seconds(chip: Chip, n_bytes: int | float, n: int, spread: int) -> float:
    """Time for n devices to exchange so many bytes; `spread` is from the first to the last."""
    slow = chip.node and spread > chip.node
    rate = chip.network_bytes_per_s if slow else chip.link_bytes_per_s
    return n_bytes * (n - 1) / n / rate


@functools.cache
def optimizer_bytes_per_param(
    learner: LearnerConfig, decoder: DecoderConfig, dtype: jnp.dtype
) -> float:
    """Mean bytes of moments, master weights and moving average per parameter of the model."""
    specs = decoder_specs(dataclasses.replace(decoder, stacked=True))
    learner = dataclasses.replace(learner, lr_schedule="constant")
    optimizer = make_optimizer(learner, 0, split(specs)[0])
    params = map_specs(lambda spec: jax.ShapeDtypeStruct(spec.shape, dtype), specs)
    state = jax.eval_shape(lambda params: init_opt_state(params, optimizer), params)
    return bytes_per_device(state) / count_params(specs)


@functools.cache
def trained_fraction(decoder: DecoderConfig) -> float:
    """Share of the parameters that an update changes."""
    specs = decoder_specs(dataclasses.replace(decoder, stacked=True))
    return count_params(split(specs)[0]) / count_params(specs)


@functools.cache
def n_params(decoder: DecoderConfig) -> int:
    return count_params(decoder_specs(decoder))


def _rank(entry: tuple[Candidate, Plan | None]) -> tuple[bool, float]:
    plan = entry[1]
    return (plan is None or not plan.fits, math.inf if plan is None else plan.expected_step_s)
