"""Settings that make a run that does not fit smaller, in the order of the memory that they free."""

import dataclasses
from collections.abc import Iterator

from jaxrl.planner.estimate import estimate_memory
from jaxrl.planner.search import MLP_CHUNK
from jaxrl.planner.sizes import CandidateSettings, Job, settings_of

MAX_SHOWN = 8
LEAST_BYTES = 2**-10  # of the memory of a device: changes that free less are left out


def remedies_text(job: Job) -> str:
    """The settings that free memory, a line each, and the effect of all of them together."""
    current = settings_of(job)
    before = estimate_memory(job, current).peak
    capacity = job.machine.chip.memory_bytes
    freed = {
        option: (before - estimate_memory(job, settings).peak, settings)
        for option, settings in smaller(job, current)
    }
    useful = sorted(
        (item for item in freed.items() if item[1][0] > LEAST_BYTES * capacity),
        key=lambda item: -item[1][0],
    )[:MAX_SHOWN]
    lines = [
        "to make it fit, by what each setting alone frees per device (estimates; now "
        f"training needs about {gib(before)} of {gib(capacity)}, without KV pages):"
    ]
    lines += [f"  {gib(n_bytes):>10}  {option}" for option, (n_bytes, _) in useful]
    if rollout_keys := () if job.workload else ("rollout.max_num_seqs", "rollout.n_pages"):
        lines.append(f"  for the rollout lower {' and '.join(rollout_keys)}, or the lengths")
    lines.append("--search of python -m jaxrl.plan tries them together and compiles the best")
    return "\n".join(lines)


def smaller(job: Job, current: CandidateSettings) -> Iterator[tuple[str, CandidateSettings]]:
    """(command-line options, settings) that differ from the current ones in one respect."""
    row, mesh = max(job.cfg.learner.row_lens), dict(current.mesh)
    least = row * mesh.get("sequence", 1) * mesh.get("stage", 1)
    if current.tokens > least:
        yield f"--config.learner.token_budget={least}", dataclasses.replace(current, tokens=least)
    if current.remat != "full":
        yield "--config.learner.remat=full", dataclasses.replace(current, remat="full")
    if not current.mlp_chunk and current.tokens > MLP_CHUNK:
        chunked = dataclasses.replace(current, mlp_chunk=MLP_CHUNK)
        yield f"--config.learner.mlp_chunk={MLP_CHUNK}", chunked
    for role in ("optimizer", "gradients", *job.idle_roles):
        if role not in current.offload and (role != "gradients" or "optimizer" in current.offload):
            offload = (*current.offload, role)
            option = f"--config.learner.offload={','.join(offload)}"
            yield option, dataclasses.replace(current, offload=offload)
    replicas = mesh.get("replica", 1)
    if replicas > 1:
        sharded = mesh | {"replica": 1, "fsdp": mesh.get("fsdp", 1) * replicas}
        option = f"--config.mesh.replica=1 --config.mesh.fsdp={sharded['fsdp']}"
        yield option, dataclasses.replace(current, mesh=sharded)
        if not current.zero:
            yield "--config.learner.zero=1", dataclasses.replace(current, zero=1)
    doubled = mesh | {"fsdp": 2 * mesh.get("fsdp", 1)}
    option = f"twice as many devices, --config.mesh.fsdp={doubled['fsdp']}"
    yield option, dataclasses.replace(current, mesh=doubled)


def gib(n_bytes: float) -> str:
    return f"{n_bytes / 2**30:.1f} GiB"
