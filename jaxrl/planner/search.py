"""The fastest settings that fit: formulas order the candidates, compiled plans decide among the first."""

import collections
import contextlib
import dataclasses
import functools
import itertools
import math
from collections.abc import Callable, Iterator

from jaxrl.config.choices import REMATS
from jaxrl.config.keys import MeshConfig, RunConfig
from jaxrl.layout import training_rules
from jaxrl.learner.requirements import full_kl_in_loss, needs_old_logp, needs_ref, needs_ref_logp
from jaxrl.models.config import DecoderConfig, for_platform
from jaxrl.models.decoder import decoder_specs
from jaxrl.models.mesh_check import check_mesh
from jaxrl.models.spec import count_params
from jaxrl.planner.plan import Plan, make_plan
from jaxrl.planner.programs import Lengths, TooLarge
from jaxrl.planner.topology import Topology

BUDGET_ROWS = (1, 2, 4, 8)  # micro-batches of so many longest rows per data-parallel rank
RECOMPUTED = {"full": 1.0, "dots": 0.1, "none": 0.0}  # of a forward pass, in backward
LONG = 2048  # tokens of a row that each device of the sequence axis has at least
HEAD_CHUNK = 1024  # tokens whose logits exist at one time


@dataclasses.dataclass(frozen=True)
class Candidate:
    """Settings, and what formulas say of them."""

    mesh: dict[str, int]  # axis -> size, where it is not 1
    token_budget: int
    remat: str
    offload: tuple[str, ...]
    bytes: float  # per device at the fullest, without KV pages
    step_s: float

    @property
    def overrides(self) -> str:
        sizes = {"fsdp": 1} | self.mesh
        keys = {f"mesh.{axis}": size for axis, size in sizes.items()} | {
            "learner.token_budget": self.token_budget,
            "learner.remat": self.remat,
        }
        if self.offload:
            keys["learner.offload"] = ",".join(self.offload)
        return " ".join(f"--config.{key}={value}" for key, value in keys.items())

    def of(self, cfg: RunConfig) -> RunConfig:
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
    """The candidates that were compiled, the best first: those that fit, by time. A plan is None where a
    program is too large to compile.

    Candidates come in the order of the formulas' step time; those that the formulas put at more than the
    whole memory are left out. Raises ValueError where nothing is left.
    """
    if cfg.has_critic or cfg.algorithm.teacher or cfg.reward_model.path:
        raise ValueError(
            "--search has no formulas for a critic (algorithm.advantage='gae'), algorithm.teacher or "
            "reward_model.path; search without, and plan what it finds with them"
        )
    cfg = dataclasses.replace(cfg, learner=dataclasses.replace(cfg.learner, halvings=0))
    found = sorted(
        candidates(cfg, decoder, machine, lengths), key=lambda c: (round(c.step_s, 6), c.bytes)
    )
    fitting = [c for c in found if c.bytes < machine.chip.memory_bytes]
    if not fitting:
        least = min(found, key=lambda c: c.bytes, default=None)
        needs = f" at least {least.bytes / 2**30:.1f} GiB a device" if least else ""
        raise ValueError(
            f"no mesh of {machine.name} holds this run: it needs{needs} of "
            f"{machine.chip.memory_bytes / 2**30:.1f}; take more devices or shorter rows"
        )
    done: list[tuple[Candidate, Plan | None]] = []
    for candidate in fitting:
        on_start(f"compiling {candidate.overrides}")
        try:
            plan = make_plan(candidate.of(cfg), decoder, machine, lengths=lengths)
        except TooLarge:
            plan = None
        done.append((candidate, plan))
        if sum(plan is not None and plan.fits for _, plan in done) == finalists:
            break
    return sorted(done, key=_rank)


def candidates(
    cfg: RunConfig, decoder: DecoderConfig, machine: Topology, lengths: Lengths
) -> Iterator[Candidate]:
    """All meshes that divide the model, token budgets, remat policies, and what may wait with the host."""
    row = max(cfg.learner.row_lens)
    waiting = ("optimizer", "reference") if needs_ref(cfg) else ("optimizer",)
    for mesh in meshes(cfg, decoder, machine):
        for rows in BUDGET_ROWS:
            for remat in REMATS:
                for offload in ((), waiting):
                    tokens = rows * row * mesh["sequence"]
                    yield estimate(cfg, decoder, machine, lengths, mesh, tokens, remat, offload)


def meshes(cfg: RunConfig, decoder: DecoderConfig, machine: Topology) -> Iterator[dict[str, int]]:
    """Sizes of the axes that share rows and weights: tensor within a node, sequence for long rows, expert for
    a mixture of experts, replicas of a node or more where the network between nodes is slow; fsdp is the rest."""
    n, node = len(machine.devices), machine.chip.node or len(machine.devices)
    row, rules = max(cfg.learner.row_lens), training_rules(cfg)
    whole = [size for size in range(1, n + 1) if n % size == 0]
    for tensor, sequence, expert, replica in itertools.product(whole, whole, whole, whole):
        inner = tensor * sequence * expert * replica
        if n % inner or tensor > node or (sequence > 1 and row < LONG * sequence):
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
    """Memory and step time by formula; `tokens` is the budget of a data-parallel rank.

    Memory: weights, float32 moments, master and gradients, all sharded; what backward keeps of each
    layer; one gathered layer and its gradient; a chunk of logits and the head's gradient.
    Time: each pass over the weights in operations or, if that is longer, in gathered weights; activations
    summed over tensor shards, exchanged for heads, and sent to experts; gradients summed over replicas;
    what waits with the host comes and goes. Decode reads the weights at every step, its copy of them or what it
    gathers.
    """
    chip, d = machine.chip, decoder
    size = collections.defaultdict(lambda: 1, mesh)
    tp, s, e = size["tensor"], size["sequence"], size["expert"]
    f, ranks = size["fsdp"] * s, size["replica"] * size["fsdp"] * e
    dtype, _ = for_platform(cfg, decoder, machine.platform)
    wide = dtype.itemsize
    params, head = n_params(dataclasses.replace(d, stacked=True)), d.V * d.D
    experts = 3 * d.L * d.E * d.F_expert * d.D
    share = ((params - experts) + experts / e) / tp  # of a device that has all shards of fsdp
    layer = (share - head * (1 if d.tied else 2) / tp) / d.L
    used = params - experts * (1 - d.top_k / d.E if d.E else 0)  # by one token

    held, local = share / f, tokens / s
    optimizer = 8 + (4 if wide < 4 else 0)
    reference = needs_ref(cfg) and ("reference" not in offload or full_kl_in_loss(cfg))
    state = held * (wide * (1 + reference) + 4)
    ffw = e * d.top_k * (d.F_expert + d.D) if d.E else d.F
    dots = 2 * d.D + (2 * (d.N + d.K) * d.H + 3 * ffw) / tp
    kept = {"full": d.D, "dots": d.D + dots, "none": d.D + 3 * dots}[remat]
    chunk = 3 * 4 * min(HEAD_CHUNK, local) * d.V / tp
    work = local * wide * (d.L * kept + 4 * dots) + 3 * layer * wide + chunk + 2 * 4 * head / tp
    waits, rollout, replicas, copy = "optimizer" in offload, cfg.rollout, 1, share
    if rollout.layout == "replicas":
        group = rollout.tensor or tp, rollout.expert or e
        replicas = max(len(machine.devices) // math.prod(group), 1)
        copy = ((params - experts) + experts / group[1]) / group[0]
        work = max(work, copy * wide if f > 1 else 0)
    memory = state + (max(work, held * optimizer) if waits else held * optimizer + work)

    def send(n_bytes: int | float, n: int, reach: int) -> float:
        """Seconds of n devices, the first and last of which are `reach` apart, that share so many bytes."""
        slow = chip.node and reach > chip.node
        rate = chip.network_bytes_per_s if slow else chip.link_bytes_per_s
        return n_bytes * (n - 1) / n / rate

    total = cfg.sequences_per_step * (lengths.prompt + lengths.response)
    micro = math.ceil(total / (ranks * tokens))
    attention = 2 * 2 * d.L * d.N * d.H * (lengths.prompt + lengths.response) / 2
    flops = local * (2 * (used - head * (not d.tied)) + attention) / tp  # of a forward pass
    compute = flops / chip.rate("f32" if wide == 4 else "bf16")
    gathered = send(share * wide, f, f * e * tp)
    sums = (
        d.L
        * local
        * wide
        * (
            send(2 * 2 * d.D, tp, tp)
            + send(2 * (d.N + d.K) * d.H / tp, s, s * tp)
            + send(2 * e * d.D, e, e * s * tp)
        )
    )
    forward = max(compute, gathered) + sums
    again = RECOMPUTED[remat] * compute + (sums if remat == "full" else 0.0)
    backward = max(2 * compute + again, (1 if f > 1 else 0) * 2 * gathered) + sums
    backward += send(2 * 4 * held, size["replica"], len(machine.devices))
    scored = needs_old_logp(cfg) + needs_ref_logp(cfg)
    step = micro * (cfg.learner.epochs * (forward + backward) + scored * forward)
    steps = math.ceil(cfg.sequences_per_step / (rollout.max_num_seqs * replicas)) * lengths.response
    read = copy * wide / chip.memory_bytes_per_s
    step += steps * (read if replicas > 1 else max(read, gathered))
    moved = 2 * held * optimizer * cfg.updates_per_step if waits else 0.0
    moved += held * wide if "reference" in offload else 0.0
    step += moved / chip.host_bytes_per_s
    mesh = {axis: n for axis, n in mesh.items() if n > 1}
    return Candidate(mesh, tokens, remat, offload, memory, step)


@functools.cache
def n_params(decoder: DecoderConfig) -> int:
    return count_params(decoder_specs(decoder))


def _rank(entry: tuple[Candidate, Plan | None]) -> tuple[bool, float]:
    plan = entry[1]
    return (plan is None or not plan.fits, math.inf if plan is None else plan.expected_step_s)
