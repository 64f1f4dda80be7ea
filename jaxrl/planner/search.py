"""Searches for the fastest settings that fit.

Formulas rank the candidates; compiled plans decide among the first of them. Plans are compared by
the time with kernels one after the other. The ideal time counts every collective as covered, which
the compilers of most chips do not schedule so.
"""

import contextlib
import dataclasses
import itertools
import math
from collections.abc import Callable, Iterator, Sequence

import jax

from jaxrl.config.choices import REMATS, REMATS_OF_1F1B
from jaxrl.config.keys import MeshConfig, RunConfig
from jaxrl.layout import training_rules
from jaxrl.learner.optimizer import check_opt_state
from jaxrl.models.decoder import decoder_specs
from jaxrl.models.lora import split
from jaxrl.models.mesh_check import check_mesh
from jaxrl.planner.compilation import ProgramTooLarge
from jaxrl.planner.estimate import (
    MemoryEstimate,
    estimate_memory,
    free_bytes,
    rollout_seconds,
    step_seconds,
)
from jaxrl.planner.plan import Plan, make_plan
from jaxrl.planner.sizes import CandidateSettings, Job, model_sizes
from sharding import REPLICAS, abstract_mesh

BUDGET_ROWS = (1, 2, 4, 8)  # maximum-length rows per micro-batch and data-parallel rank
STAGE_ROWS = (2, 4, 8)  # the same for each stage of a pipeline
MIN_SHARD_LEN = 2048  # tokens of a row per device of the sequence axis
LEAST_REPLICA = 8  # devices of a replica where all devices have one network
CLOSE = 0.1  # difference of estimates that compiled plans may turn round
FINALISTS = 4  # compiled candidates that fit, unless a number is given
MLP_CHUNK = 4096  # learner.mlp_chunk that is tried for devices with more tokens


@dataclasses.dataclass(frozen=True)
class Candidate:
    """Settings with their estimated memory and step time."""

    mesh: dict[str, int]  # axis -> size, without axes of size 1
    token_budget: int
    remat: str
    offload: tuple[str, ...]
    zero: int
    mlp_chunk: int
    pipeline_schedule: str
    rollout_tensor: int  # 0 = the config's
    release_kv: bool
    bytes: float  # peak per device, without KV pages
    step_s: float
    xla: tuple[str, ...] | None = None  # learner.xla; None = the config's
    # Estimated step time relative to the fastest settings of any memory, minus 1; set by `search`.
    slowdown: float = 0.0

    def overrides(self, cfg: RunConfig) -> str:
        """Command-line options that give `cfg` these settings.

        The mesh's fsdp axis, the token budget and the remat policy, and what else differs.
        """
        new = self.apply(cfg)
        keys = {
            f"mesh.{axis}": size
            for axis, size in dataclasses.asdict(new.mesh).items()
            if axis == "fsdp" or size != getattr(cfg.mesh, axis)
        }
        always = ("token_budget", "remat")
        others = "offload", "zero", "mlp_chunk", "pipeline_schedule", "xla"
        for name in (*always, *others):
            value = getattr(new.learner, name)
            if name in always or value != getattr(cfg.learner, name):
                keys[f"learner.{name}"] = _text(value) if isinstance(value, tuple) else value
        if self.rollout_tensor and self.rollout_tensor != (
            cfg.rollout.tensor or self.mesh.get("tensor", 1)
        ):
            keys["rollout.tensor"] = self.rollout_tensor
        if new.rollout.release_kv != cfg.rollout.release_kv:
            keys["rollout.release_kv"] = new.rollout.release_kv
        return " ".join(f"--config.{key}={value}" for key, value in keys.items())

    def apply(self, cfg: RunConfig) -> RunConfig:
        """The config with these settings."""
        learner = dataclasses.replace(
            cfg.learner,
            token_budget=self.token_budget,
            buckets=(max(cfg.learner.row_lens),),
            remat=self.remat,
            offload=self.offload,
            zero=self.zero,
            mlp_chunk=self.mlp_chunk,
            pipeline_schedule=self.pipeline_schedule,
            xla=cfg.learner.xla if self.xla is None else self.xla,
        )
        mesh = MeshConfig(**{"fsdp": 1} | self.mesh)
        tensor = self.rollout_tensor or cfg.rollout.tensor
        release_kv = cfg.rollout.release_kv or self.release_kv
        rollout = dataclasses.replace(cfg.rollout, tensor=tensor, release_kv=release_kv)
        return dataclasses.replace(cfg, mesh=mesh, learner=learner, rollout=rollout)


def _text(values: tuple[str, ...]) -> str:
    """The value of an option of the command line."""
    return ",".join(values) or "()"


def search(
    job: Job,
    *,
    finalists: int = FINALISTS,
    on_start: Callable[[str], None] = lambda line: None,
) -> list[tuple[Candidate, Plan | None]]:
    """The compiled candidates with their plans: first those that fit, by `rank`.

    Compiles candidates in the order of `varied_first` until `finalists` of them fit, and skips
    those whose estimated memory exceeds that of the device. A plan is None if a program is too
    large to compile. Raises ValueError if no candidate is left.
    """
    cfg, machine = job.cfg, job.machine
    job = _with_one_shape(job)
    ranked = sorted(candidates(job), key=lambda c: (round(c.step_s, 6), c.bytes))
    ranked = [dataclasses.replace(c, slowdown=c.step_s / ranked[0].step_s - 1) for c in ranked]
    fitting = [c for c in ranked if c.bytes < machine.chip.memory_bytes]
    if not fitting:
        least = min(ranked, key=lambda c: c.bytes, default=None)
        needs = f" at least {least.bytes / 2**30:.1f} GiB per device" if least else ""
        raise ValueError(
            f"no mesh of {machine.name} fits this run: it needs{needs} of "
            f"{machine.chip.memory_bytes / 2**30:.1f}; use more devices or shorter rows"
        )
    compiled: list[tuple[Candidate, Plan | None]] = []
    for candidate in varied_first(fitting):
        on_start(f"compiling {candidate.overrides(cfg)}")
        compiled.append((candidate, _compiled(job, candidate)))
        if sum(plan is not None and plan.fits for _, plan in compiled) == finalists:
            break
    return sorted(compiled, key=rank)


def varied_first(ranked: Sequence[Candidate]) -> list[Candidate]:
    """Candidates in the order in which they are compiled.

    Of those at most CLOSE slower than the first: the best of every mesh, then the best of every
    token budget and remat policy of a mesh. The settings of one mesh have similar plans, those
    that differ in offload even more so, while the formulas of two meshes leave out different
    costs.
    """
    of_mesh, of_update, rest, seen = [], [], [], set()
    for candidate in ranked:
        close = candidate.step_s <= (1 + CLOSE) * ranked[0].step_s
        mesh = tuple(candidate.mesh.items())
        update = mesh, candidate.token_budget, candidate.remat
        tier = rest if not close else of_mesh if mesh not in seen else of_update
        (rest if update in seen else tier).append(candidate)
        seen |= {mesh, update}
    return of_mesh + of_update + rest


def _compiled(job: Job, candidate: Candidate) -> Plan | None:
    try:
        return plan_candidate(job, candidate)
    except ProgramTooLarge:
        return None


def plan_candidate(job: Job, candidate: Candidate, like: Plan | None = None) -> Plan:
    """The compiled plan of a candidate; `like` is one of the same settings with other `xla`.

    Raises ProgramTooLarge.
    """
    return make_plan(
        candidate.apply(_with_one_shape(job).cfg),
        job.decoder,
        job.machine,
        role_decoders=job.role_decoders,
        workload=job.workload,
        tower=job.tower,
        lengths=job.lengths,
        like=like,
    )


def _with_one_shape(job: Job) -> Job:
    """The job with micro-batches of the whole token budget only."""
    learner = dataclasses.replace(job.cfg.learner, halvings=0)
    return dataclasses.replace(job, cfg=dataclasses.replace(job.cfg, learner=learner))


def candidates(job: Job, limit: int | float = math.inf) -> Iterator[Candidate]:
    """All meshes that divide the models, and the settings of an update that memory depends on.

    These are token budgets, remat policies, offload, ZeRO and chunks of MLPs. The rollout of a mesh
    has the fastest tensor axis, unless the config sets one. Settings that exceed `limit` bytes are
    not tried with larger token budgets.
    """
    row, tensors = max(job.cfg.learner.row_lens), rollout_tensors(job)
    for mesh in meshes(job):
        tensor = best_rollout_tensor(job, mesh, tensors)
        offloads = offload_sets(job, mesh, tensor)
        levels, stages = zero_levels(job, mesh), mesh["stage"]
        orders = ("gpipe",) if stages == 1 else ("gpipe", "1f1b")
        too_large = set()
        for rows in BUDGET_ROWS if stages == 1 else [n * stages for n in STAGE_ROWS]:
            tokens, chunks = rows * row * mesh["sequence"], [job.cfg.learner.mlp_chunk]
            if not chunks[0] and (rows if stages == 1 else 1) * row > MLP_CHUNK:
                chunks.append(MLP_CHUNK)
            every = itertools.product(REMATS, offloads, levels, chunks, orders)
            for chosen in every:
                remat, *_, schedule = chosen
                if (schedule == "1f1b" and remat not in REMATS_OF_1F1B) or chosen in too_large:
                    continue
                settings = CandidateSettings(mesh, tokens, *chosen, rollout_tensor=tensor)
                found = estimate(job, settings)
                if found.bytes > limit:
                    too_large.add(chosen)
                yield found


def meshes(job: Job) -> Iterator[dict[str, int]]:
    """All meshes worth trying; fsdp has the remaining devices.

    tensor: within a node. sequence: for long rows. expert: for MoE models. replica: a node or more
    each, or LEAST_REPLICA devices where all have one network. stage: a node or more each, if the
    network between nodes is slow.
    """
    cfg, decoder, machine = job.cfg, job.decoder, job.machine
    n, node = len(machine.devices), machine.chip.node or len(machine.devices)
    row, rules = max(cfg.learner.row_lens), training_rules(cfg)
    divisors = [size for size in range(1, n + 1) if n % size == 0]
    stages = [size for size in divisors if decoder.n_periods % size == 0 and row % size == 0]
    if cfg.model.layers == "list":
        stages = [1]
    if job.tower is not None:  # the first stage has all layers with deepstack features
        n_deep = len(job.tower.deepstack)
        stages = [size for size in stages if size == 1 or n_deep <= decoder.L // size]
    axes = divisors, divisors, divisors, divisors, stages
    for tensor, sequence, expert, replica, stage in itertools.product(*axes):
        inner, outer = tensor * sequence * expert * replica * stage, replica * stage
        if n % inner or tensor > node or (sequence > 1 and row < MIN_SHARD_LEN * sequence):
            continue
        least = machine.chip.node or LEAST_REPLICA
        if (expert > 1 and not decoder.expert_layers) or (outer > 1 and n // outer < least):
            continue
        if stage > 1 and not machine.chip.node:
            continue
        sizes = dict(
            stage=stage,
            replica=replica,
            fsdp=n // inner,
            expert=expert,
            sequence=sequence,
            tensor=tensor,
        )
        rules = training_rules(dataclasses.replace(cfg, mesh=MeshConfig(**sizes)))
        with contextlib.suppress(ValueError):
            for model in job.models:
                check_mesh(dataclasses.replace(model, stacked=True), sizes, rules)
            _check_opt_state(job, sizes, 0)
            yield sizes


def rollout_tensors(job: Job) -> tuple[int, ...]:
    """Tensor axes that an engine replica can have in a node; none without replicas."""
    cfg, node = job.cfg.rollout, job.machine.chip.node or len(job.machine.devices)
    if job.workload or cfg.layout != "replicas":
        return ()
    found = []
    for tensor in [cfg.tensor] if cfg.tensor else range(1, node + 1):
        if node % tensor == 0:
            with contextlib.suppress(ValueError):
                stacked = dataclasses.replace(job.decoder, stacked=True)
                check_mesh(stacked, {"tensor": tensor}, REPLICAS)
                found.append(tensor)
    return tuple(found)


def best_rollout_tensor(job: Job, mesh: dict[str, int], tensors: tuple[int, ...]) -> int:
    """The value of `tensors` with the fastest rollout; 0 (the config's) if there is none.

    Of equally fast ones the smallest. The memory for KV pages is what an update with remat=full of
    one row leaves, with the state in host memory where it does not fit.
    """
    expert = job.cfg.rollout.expert or mesh["expert"]
    n, row = len(job.machine.devices), max(job.cfg.learner.row_lens)

    def cost(tensor: int) -> tuple[float, int]:
        settings = CandidateSettings(mesh, row, "full", rollout_tensor=tensor)
        free = free_bytes(job, settings, estimate_memory(job, settings))
        if free < 0:
            offload = ("optimizer", "gradients", *job.idle_roles)
            settings = dataclasses.replace(settings, offload=offload)
            free = free_bytes(job, settings, estimate_memory(job, settings))
        return rollout_seconds(job, model_sizes(job, "policy", settings), free), tensor

    return min((t for t in tensors if n % (t * expert) == 0), key=cost, default=0)


def offload_sets(job: Job, mesh: dict[str, int], rollout_tensor: int) -> list[tuple[str, ...]]:
    """Values of learner.offload that are tried for a mesh.

    The policy is among them if it is idle in rollouts: synchronous ones that read a copy.
    """
    idle = job.idle_roles
    found = [(), ("optimizer",), ("optimizer", *idle), ("optimizer", "gradients", *idle)]
    if job.cfg.schedule.mode == "sync" and job.rollout_copies(mesh, rollout_tensor):
        found += [("policy",), *((*roles, "policy") for roles in found[2:])]
    return list(dict.fromkeys(found))


def zero_levels(job: Job, mesh: dict[str, int]) -> tuple[int, ...]:
    """Values of learner.zero for a mesh: with replicas that divide the model, all of them."""
    if mesh["replica"] > 1:
        with contextlib.suppress(ValueError):
            _check_opt_state(job, mesh, 1)
            return (0, 1, 2)
    return (0,)


def _check_opt_state(job: Job, mesh: dict[str, int], zero: int) -> None:
    """Raises ValueError if the optimizer state cannot be sharded over the mesh."""
    cfg = dataclasses.replace(job.cfg, mesh=MeshConfig(**mesh))
    learner = dataclasses.replace(cfg.learner, zero=zero)
    specs = decoder_specs(dataclasses.replace(job.decoder, stacked=True))  # few, same sizes
    with jax.sharding.use_abstract_mesh(abstract_mesh(len(job.machine.devices), **mesh)):
        check_opt_state(learner, split(specs)[0], training_rules(cfg))


def estimate(job: Job, settings: CandidateSettings) -> Candidate:
    """Memory and step time by formula (jaxrl/planner/estimate.py).

    KV pages are released during updates if more sequences then fit, and with an idle policy, whose
    weights they replace.
    """
    memory = estimate_memory(job, settings)
    release = "policy" in settings.offload or _gains_pages(job, settings, memory)
    settings = dataclasses.replace(settings, release_kv=release)
    mesh = {axis: n for axis, n in settings.mesh.items() if n > 1}
    chosen = {
        field.name: getattr(settings, field.name)
        for field in dataclasses.fields(settings)
        if field.name not in ("mesh", "tokens")
    }
    return Candidate(
        mesh=mesh,
        token_budget=settings.tokens,
        bytes=memory.peak,
        step_s=step_seconds(job, settings, memory),
        **chosen,
    )


def _gains_pages(job: Job, settings: CandidateSettings, memory: MemoryEstimate) -> bool:
    """Whether rollouts are faster with the KV pages released during updates."""
    if job.workload or job.cfg.schedule.mode != "sync":
        return False
    sizes = model_sizes(job, "policy", settings)
    kept, released = (
        rollout_seconds(job, sizes, free_bytes(job, one, memory))
        for one in (settings, dataclasses.replace(settings, release_kv=True))
    )
    return released < kept


def rank(entry: tuple[Candidate, Plan | None]) -> tuple[bool, float]:
    """The order of compiled candidates: those that fit, by calibrated time of a step.

    Without one, by serial step time.
    """
    plan = entry[1]
    step_s = math.inf if plan is None else plan.calibrated_step_s or plan.serial_step_s
    return (plan is None or not plan.fits, step_s)
