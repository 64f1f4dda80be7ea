"""Data-parallel replicas of the engine: one scheduler each, and the distribution of requests.

A replica has its own slots and page pool, so the schedulers are independent of each other.
"""

import dataclasses

import numpy as np

from jaxrl.engine.api import Prefix, Request
from jaxrl.engine.prefill import PrefillWork
from jaxrl.engine.scheduler import DispatchPlan, Scheduler
from jaxrl.engine.sequence import Sequence


class ReplicaScheduler:
    """Scheduler's interface over the schedulers of all replicas.

    New requests are distributed at the next plan, so that all replicas have equally many sequences.
    Samples of one prompt stay on one replica where they share its pages.
    """

    def __init__(self, schedulers: list[Scheduler]):
        self.schedulers = schedulers
        self.pool = schedulers[0].pool  # all have the same number of pages
        self._new: dict[int, Request] = {}
        self._slots: dict[tuple[int, int], int] = {}  # (replica, its local slot) -> slot
        self._next_slot = 0

    @property
    def version(self) -> int:
        """The policy version of all replicas."""
        return self.schedulers[0].version

    @property
    def n_unfinished(self) -> int:
        return len(self._new) + sum(s.n_unfinished for s in self.schedulers)

    @property
    def n_waiting(self) -> int:
        return len(self._new) + sum(len(s.waiting) for s in self.schedulers)

    @property
    def n_running(self) -> int:
        return sum(len(s.running) for s in self.schedulers)

    @property
    def n_pages(self) -> int:
        """Pages of all pools."""
        return sum(s.pool.n_pages for s in self.schedulers)

    @property
    def n_pages_used(self) -> int:
        return sum(s.pool.n_used for s in self.schedulers)

    @property
    def cache_utilization(self) -> float:
        """Fraction of the pages in use, averaged over the replicas."""
        return sum(s.pool.utilization for s in self.schedulers) / len(self.schedulers)

    def submit(self, request: Request) -> int:
        self.schedulers[0].check(request)
        slot = self._new_slot()
        self._new[slot] = request
        return slot

    def set_version(self, version: int) -> None:
        for scheduler in self.schedulers:
            scheduler.set_version(version)

    def prefill(self, tokens: np.ndarray, adapter: int = 0) -> tuple[Prefix, list[PrefillWork]]:
        """`Scheduler.prefill` on the replica with the most free pages; the work of each replica."""
        r = max(range(len(self.schedulers)), key=lambda r: self.schedulers[r].pool.n_free)
        prefix, work = self.schedulers[r].prefill(tokens, adapter)
        return dataclasses.replace(prefix, replica=r), self._by_replica(r, work)

    def insert(self, prefix: Prefix, request: Request) -> tuple[int, list[PrefillWork]]:
        local, work = self.schedulers[prefix.replica].insert(prefix, request)
        slot = self._new_slot()
        self._slots[prefix.replica, local] = slot
        return slot, self._by_replica(prefix.replica, work)

    def release_prefix(self, prefix: Prefix) -> None:
        self.schedulers[prefix.replica].release_prefix(prefix)

    def plan(self) -> list[DispatchPlan]:
        """The next plan of each replica.

        All replicas run the smallest `n_steps` of them, or one step if any plan is full.
        """
        self._distribute()
        limit_prefill = any(s.running for s in self.schedulers)
        return [s.plan(limit_prefill=limit_prefill) for s in self.schedulers]

    def extend(self, n_steps: int) -> bool:
        """Allocates the pages of steps that follow the last plan, if no plan has more to do.

        See `Scheduler.extension`. Returns False and changes nothing if there must be a new plan.
        """
        found = [pages for s in self.schedulers if (pages := s.extension(n_steps)) is not None]
        if self._new or len(found) < len(self.schedulers):
            return False
        for scheduler, n_pages in zip(self.schedulers, found, strict=True):
            scheduler.extend(n_pages)
        return True

    def advance(self, replica: int, seq: Sequence, tokens: np.ndarray, finish: str) -> int:
        """Appends the tokens that a dispatch sampled for a sequence. Returns its slot."""
        self.schedulers[replica].advance(seq, tokens, finish)
        key = (replica, seq.slot)
        return self._slots.pop(key) if finish else self._slots[key]

    def free(self, slot: int) -> None:
        """Cancels a waiting or running sequence. Raises KeyError if the slot has none."""
        if self._new.pop(slot, None) is not None:
            return
        keys = [key for key, known in self._slots.items() if known == slot]
        if not keys:
            raise KeyError(f"slot {slot} is neither waiting nor running")
        replica, local = keys[0]
        del self._slots[replica, local]
        self.schedulers[replica].free(local)

    def take_counter(self, counter: str) -> int:
        """Returns the sum of a counter over the schedulers and resets it."""
        total = sum(getattr(s, counter) for s in self.schedulers)
        for s in self.schedulers:
            setattr(s, counter, 0)
        return total

    def _distribute(self) -> None:
        """Submits the new requests to the least loaded replicas."""
        limit = -(-self.n_unfinished // len(self.schedulers))
        loads = [s.n_unfinished for s in self.schedulers]
        r = int(np.argmin(loads))
        for slot, request in self._new.items():
            if loads[r] >= limit:
                r = int(np.argmin(loads))
            loads[r] += 1
            self._slots[r, self.schedulers[r].submit(request)] = slot
        self._new.clear()

    def _new_slot(self) -> int:
        self._next_slot += 1
        return self._next_slot - 1

    def _by_replica(self, replica: int, work: PrefillWork) -> list[PrefillWork]:
        """`work` for one replica and none for the others."""
        return [work if r == replica else PrefillWork() for r in range(len(self.schedulers))]
