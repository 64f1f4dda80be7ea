"""Searches for the fastest settings that fit.

Formulas rank the candidates; compiled plans decide among the first of them.
"""

import contextlib
import dataclasses
import itertools
import math
from collections.abc import Callable, Iterator

import jax

from jaxrl.config.choices import REMATS
from jaxrl.config.keys import MeshConfig, RunConfig
from jaxrl.layout import training_rules
from jaxrl.learner.optimizer import check_moments
from jaxrl.models.decoder import decoder_specs
from jaxrl.models.lora import split
from jaxrl.models.mesh_check import check_mesh
from jaxrl.planner.compilation import ProgramTooLarge
from jaxrl.planner.estimate import Job, Settings, memory_bytes, step_seconds
from jaxrl.planner.plan import Plan, make_plan
from sharding import abstract_mesh

BUDGET_ROWS = (1, 2, 4, 8)  # maximum-length rows per micro-batch and data-parallel rank
MIN_SHARD_LEN = 2048  # tokens of a row per device of the sequence axis


@dataclasses.dataclass(frozen=True)
class Candidate:
    """Settings with their estimated memory and step time."""

    mesh: dict[str, int]  # axis -> size, without axes of size 1
    token_budget: int
    remat: str
    offload: tuple[str, ...]
    bytes: float  # peak per device, without KV pages
    step_s: float
    # Estimated step time relative to the fastest settings of any memory, minus 1; set by `search`.
    slowdown: float = 0.0

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
    job: Job,
    *,
    finalists: int = 3,
    on_start: Callable[[str], None] = lambda line: None,
) -> list[tuple[Candidate, Plan | None]]:
    """The compiled candidates with their plans: first those that fit, by step time.

    Compiles candidates in the order of their estimated step time until `finalists` of them fit, and
    skips those whose estimated memory exceeds that of the device. A plan is None if a program is
    too large to compile. Raises ValueError if no candidate is left.
    """
    cfg, machine = job.cfg, job.machine
    cfg = dataclasses.replace(cfg, learner=dataclasses.replace(cfg.learner, halvings=0))
    job = dataclasses.replace(job, cfg=cfg)
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
    for candidate in fitting:
        on_start(f"compiling {candidate.overrides}")
        compiled.append((candidate, _compiled(job, candidate)))
        if sum(plan is not None and plan.fits for _, plan in compiled) == finalists:
            break
    return sorted(compiled, key=_rank)


def _compiled(job: Job, candidate: Candidate) -> Plan | None:
    try:
        return make_plan(
            candidate.apply(job.cfg),
            job.decoder,
            job.machine,
            role_decoders=job.role_decoders,
            workload=job.workload,
            lengths=job.lengths,
        )
    except ProgramTooLarge:
        return None


def candidates(job: Job) -> Iterator[Candidate]:
    """All meshes that divide the models, token budgets, remat policies and offload options."""
    row = max(job.cfg.learner.row_lens)
    offloads: list[tuple[str, ...]] = [(), ("optimizer",)]
    if job.idle_roles:
        offloads.append(("optimizer", *job.idle_roles))
    for mesh in meshes(job):
        for rows in BUDGET_ROWS:
            for remat in REMATS:
                for offload in offloads:
                    tokens = rows * row * mesh["sequence"]
                    yield estimate(job, Settings(mesh, tokens, remat, offload))


def meshes(job: Job) -> Iterator[dict[str, int]]:
    """All meshes worth trying; fsdp has the remaining devices.

    tensor: within a node. sequence: for long rows. expert: for MoE models. replica: one node or
    more each, if the network between nodes is slow.
    """
    cfg, decoder, machine = job.cfg, job.decoder, job.machine
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
            for model in job.models:
                check_mesh(model, sizes, rules)
            with jax.sharding.use_abstract_mesh(abstract_mesh(n, **sizes)):
                check_moments(cfg.learner, split(decoder_specs(decoder))[0], rules)
            yield sizes


def estimate(job: Job, settings: Settings) -> Candidate:
    """Memory and step time by formula (jaxrl/planner/estimate.py)."""
    mesh = {axis: n for axis, n in settings.mesh.items() if n > 1}
    memory, step_s = memory_bytes(job, settings), step_seconds(job, settings)
    return Candidate(mesh, settings.tokens, settings.remat, settings.offload, memory, step_s)


def _rank(entry: tuple[Candidate, Plan | None]) -> tuple[bool, float]:
    plan = entry[1]
    return (plan is None or not plan.fits, math.inf if plan is None else plan.expected_step_s)
