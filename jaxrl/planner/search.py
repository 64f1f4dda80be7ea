"""The fastest settings that fit: formulas order the candidates, compiled plans decide among the first."""

import dataclasses
import math
from collections.abc import Callable, Iterator

from jaxrl.config import RunConfig
from jaxrl.keys import REMATS
from jaxrl.learner.needs import needs_old_logp, needs_ref, needs_ref_logp
from jaxrl.models.auto import for_platform
from jaxrl.models.config import DecoderConfig
from jaxrl.models.decoder import decoder_specs
from jaxrl.models.mesh_check import check_mesh
from jaxrl.models.spec import count_params
from jaxrl.planner.plan import Plan, make_plan
from jaxrl.planner.programs import Lengths, TooLarge
from jaxrl.planner.topology import Topology

BUDGET_ROWS = (1, 2, 4, 8)  # micro-batches of so many longest rows per data-parallel rank
RECOMPUTED = {"full": 1.0, "dots": 0.1, "none": 0.0}  # of a forward pass, in backward
HEAD_CHUNK = 1024  # tokens whose logits exist at one time


@dataclasses.dataclass(frozen=True)
class Candidate:
    """Settings, and what formulas say of them."""

    fsdp: int
    tensor: int
    token_budget: int
    remat: str
    bytes: float  # per device at the fullest, without KV pages
    step_s: float

    @property
    def overrides(self) -> str:
        return (
            f"--config.mesh.fsdp={self.fsdp} --config.mesh.tensor={self.tensor} "
            f"--config.learner.token_budget={self.token_budget} --config.learner.remat={self.remat}"
        )

    def of(self, cfg: RunConfig) -> RunConfig:
        mesh = dataclasses.replace(cfg.mesh, fsdp=self.fsdp, tensor=self.tensor, replica=1)
        learner = dataclasses.replace(
            cfg.learner,
            token_budget=self.token_budget,
            buckets=(max(cfg.learner.row_lens),),
            remat=self.remat,
        )
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
    """All meshes of fsdp x tensor that divide the model, token budgets and remat policies."""
    n, row = len(machine.devices), max(cfg.learner.row_lens)
    for tensor in (size for size in range(1, n + 1) if n % size == 0):
        sizes = {"fsdp": n // tensor, "tensor": tensor}
        try:
            check_mesh(decoder, sizes)
        except ValueError:
            continue
        for rows in BUDGET_ROWS:
            for remat in REMATS:
                yield estimate(cfg, decoder, machine, lengths, sizes, rows * row, remat)


def estimate(
    cfg: RunConfig,
    decoder: DecoderConfig,
    machine: Topology,
    lengths: Lengths,
    sizes: dict[str, int],
    tokens: int,
    remat: str,
) -> Candidate:
    """Memory and step time by formula; `tokens` is the budget of a data-parallel rank.

    Memory: weights, float32 moments, master and gradients, all sharded; what backward keeps of each
    layer; one gathered layer and its gradient; a chunk of logits and the head's gradient.
    Time: each pass over the weights in operations or, if that is longer, in gathered weights; activations
    summed over tensor shards; decode gathers the weights at every step.
    """
    chip, d = machine.chip, decoder
    dtype, _ = for_platform(cfg, decoder, machine.platform)
    wide = dtype.itemsize
    f, tp = sizes["fsdp"], sizes["tensor"]
    params = count_params(decoder_specs(dataclasses.replace(decoder, stacked=True)))
    head = d.V * d.D
    layer = (params - head * (1 if d.tied else 2)) / d.L
    master = 4 if wide < 4 else 0
    state = params * (wide * (1 + needs_ref(cfg)) + 8 + master + 4) / (f * tp)
    dots = 2 * d.D + (2 * (d.N + d.K) * d.H + 3 * d.F) / tp
    kept = {"full": d.D, "dots": d.D + dots, "none": d.D + 3 * dots}[remat]
    work = 3 * layer * wide / tp + 3 * 4 * min(HEAD_CHUNK, tokens) * d.V / tp + 2 * 4 * head / tp
    memory = state + tokens * wide * (d.L * kept + 4 * dots) + work

    total = cfg.sequences_per_step * (lengths.prompt + lengths.response)
    micro = math.ceil(total / (f * tokens))
    attention = 2 * 2 * d.L * d.N * d.H * (lengths.prompt + lengths.response) / 2
    flops = tokens * (2 * (d.L * layer + head) + attention) / tp  # of a forward pass
    compute = flops / chip.rate("f32" if wide == 4 else "bf16")
    gathered = params * wide / tp * (f - 1) / f / chip.link_bytes_per_s
    sums = 2 * d.L * 2 * tokens * d.D * wide * (tp - 1) / tp / chip.link_bytes_per_s
    forward = max(compute, gathered) + sums
    again = RECOMPUTED[remat] * compute + (sums if remat == "full" else 0.0)
    backward = max(2 * compute + again, (1 if f > 1 else 0) * 2 * gathered) + sums
    scored = needs_old_logp(cfg) + needs_ref_logp(cfg)
    step = micro * (cfg.learner.epochs * (forward + backward) + scored * forward)
    steps = math.ceil(cfg.sequences_per_step / cfg.rollout.max_num_seqs) * lengths.response
    read = params * wide / tp / chip.memory_bytes_per_s
    step += steps * max(read, gathered)
    return Candidate(f, tp, tokens, remat, memory, step)


def _rank(entry: tuple[Candidate, Plan | None]) -> tuple[bool, float]:
    plan = entry[1]
    return (plan is None or not plan.fits, math.inf if plan is None else plan.expected_step_s)
