"""Division of a device's memory among a run's programs, KV pages and states."""

import dataclasses

from jaxrl.config.keys import RunConfig
from jaxrl.planner.chips import Chip
from jaxrl.planner.compilation import Program
from jaxrl.planner.programs import RunPrograms, state_before_offload
from jaxrl.planner.rollout_devices import n_copies


@dataclasses.dataclass(frozen=True)
class Memory:
    """How a device's memory is divided. Bytes are per device."""

    budget_bytes: int
    live_bytes: dict[str, int]  # by program, without KV pages and states
    kv_pages: int
    min_pages: int  # that the run needs
    sequences: int  # that an engine replica can decode at the same time
    min_pages_bytes: int
    state_bytes: int  # of the slots of state
    with_pages: frozenset[str]  # programs during which pages and slots are allocated

    @property
    def peak_program(self) -> str:
        return max(self.live_bytes, key=self.needed)

    @property
    def fits(self) -> bool:
        return all(self.needed(name) <= self.budget_bytes for name in self.live_bytes)

    def needed(self, program: str) -> int:
        """Bytes while a program runs, with the fewest KV pages that the run needs then."""
        pool = self.state_bytes + self.min_pages_bytes
        return self.live_bytes[program] + pool * (program in self.with_pages)


def divide_memory(run: RunPrograms, programs: dict[str, Program], chip: Chip) -> Memory:
    """Gives the KV pool what the program with the highest peak leaves free.

    The pool stays on the device through all phases, so that program bounds it; with
    rollout.release_kv only programs of the rollout do.
    """
    cfg, engine = run.cfg.rollout, run.engine
    state_bytes = run.state_bytes
    budget = int(chip.usable_bytes(cfg.memory_utilization))
    pool_bytes = run.pool_bytes.of_pages(run.n_pages) + state_bytes
    live = {name: live_bytes(p, run, pool_bytes) for name, p in programs.items()}
    if "policy" in run.cfg.learner.offload:
        state = state_before_offload(run.resident, run.host_resident)
        live["the copy of the rollout"] = state + run.role_weights["rollout_made"]
    pages = min_pages = sequences = 0
    # With release_kv only the rollout, and models of rewards between rollouts, see pages.
    with_pages = frozenset(programs)
    rollout = {name for name in programs if run.table[name].phase == "rollout"}
    if run.n_rollout_devices:
        with_pages = frozenset(rollout)
    elif cfg.release_kv:
        before_pages = {"reshard"} if "policy" in run.cfg.learner.offload else set()
        between = {name for name in programs if run.table[name].with_pages}
        with_pages = frozenset(rollout | between) - before_pages
    if engine is not None:
        wanted = cfg.n_pages or cfg.max_num_seqs * engine.shapes.max_pages_per_seq
        peak = max(n_bytes for name, n_bytes in live.items() if name in with_pages)
        pages = run.pool_bytes.n_pages_in(budget - peak - state_bytes, wanted)
        min_pages = cfg.n_pages or engine.shapes.max_pages_per_seq
        sequences = min(cfg.max_num_seqs, pages // engine.shapes.max_pages_per_seq)
    min_bytes = run.pool_bytes.of_pages(min_pages)
    return Memory(budget, live, pages, min_pages, sequences, min_bytes, state_bytes, with_pages)


def misfit(cfg: RunConfig, memory: Memory, chip: Chip) -> str:
    """Why the run does not fit, with the numbers."""
    name = memory.peak_program
    reason = (
        f"{name} needs {memory.live_bytes[name] / 2**30:.2f} GiB of the "
        f"{memory.budget_bytes / 2**30:.2f} GiB that "
        f"memory_utilization={cfg.rollout.memory_utilization} allows "
        f"of {chip.memory_bytes / 2**30:.2f} GiB"
    )
    if memory.min_pages and name in memory.with_pages:
        source = "rollout.n_pages" if cfg.rollout.n_pages else "one sequence of maximum length"
        pages_gib = memory.min_pages_bytes / 2**30
        reason += f"; the {memory.min_pages} KV pages of {source} take {pages_gib:.2f} GiB more"
    if memory.state_bytes and name in memory.with_pages:
        gib = memory.state_bytes / 2**30
        reason += f"; the states of max_num_seqs={cfg.rollout.max_num_seqs} take {gib:.2f} GiB more"
    return reason


def live_bytes(program: Program, run: RunPrograms, pool_bytes: int) -> int:
    """Memory in use on a device while a program runs, without KV pages and states.

    Its arguments, temporaries and new outputs, and the rest of the run's state. On separate devices
    of the rollout this is its weights, with all copies.
    """
    sizes = run.resident | run.role_weights
    has_pool = "kv" in program.counted_state
    if has_pool and run.n_rollout_devices:
        counted = "rollout_aliased" in program.counted_state
        other_state = (n_copies(run.cfg) - counted) * sizes["rollout_aliased"]
    else:
        counted = sum(sizes[name] for name in program.counted_state if name != "kv")
        other_state = sum(run.resident.values()) - counted
    return other_state + program.footprint_bytes - (pool_bytes if has_pool else 0)
