"""The schedulers of an engine's replicas, on the host: which of them a request goes to, and their plans.

A replica has slots and pages of its own, so each has a scheduler that knows nothing of the others.
"""

import dataclasses
from collections.abc import Callable

import numpy as np

from jaxrl.engine.api import Prefix, Request
from jaxrl.engine.scheduler import Plan, Scheduler, Sequence


class Replicas:
    """Scheduler's verbs over several of them.

    Requests wait until the next plan, which shares out all that came in so that the replicas have equally
    many sequences; those of one prompt stay side by side, for they share its pages.
    """

    def __init__(self, make: Callable[[], Scheduler], n: int):
        self.schedulers = [make() for _ in range(n)]
        self.pool = self.schedulers[0].pool  # all have as many pages
        self._new: dict[int, Request] = {}
        self._slots: dict[tuple[int, int], int] = {}  # (replica, its slot) -> slot
        self._next_slot = 0

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
        """Of all pools."""
        return sum(s.pool.n_pages for s in self.schedulers)

    @property
    def n_pages_used(self) -> int:
        return sum(s.pool.n_used for s in self.schedulers)

    def submit(self, request: Request) -> int:
        self.schedulers[0].check(request)
        self._next_slot += 1
        self._new[self._next_slot - 1] = request
        return self._next_slot - 1

    def set_version(self, version: int) -> None:
        for scheduler in self.schedulers:
            scheduler.set_version(version)

    def prefill(self, tokens: np.ndarray) -> tuple[Prefix, list[Plan]]:
        """As the scheduler's, on the replica with the most free pages; a plan for each."""
        r = max(range(len(self.schedulers)), key=lambda r: self.schedulers[r].pool.n_free)
        prefix, plan = self.schedulers[r].prefill(tokens)
        return dataclasses.replace(prefix, replica=r), self._only(r, plan)

    def insert(self, prefix: Prefix, request: Request) -> tuple[int, list[Plan]]:
        local, plan = self.schedulers[prefix.replica].insert(prefix, request)
        return self._named(prefix.replica, local), self._only(prefix.replica, plan)

    def release_prefix(self, prefix: Prefix) -> None:
        self.schedulers[prefix.replica].release_prefix(prefix)

    def plan(self) -> list[Plan]:
        """What each replica does next; all of them make the fewest `n_steps` of these, and one step where the plan of
        one is full."""
        self._share_out()
        others_wait = any(s.running for s in self.schedulers)
        return [s.plan(others_wait=others_wait) for s in self.schedulers]

    def advance(self, replica: int, seq: Sequence, tokens: list[int], finish: str) -> int:
        """Takes in what a dispatch made for a sequence. Returns its slot."""
        self.schedulers[replica].advance(seq, tokens, finish)
        name = (replica, seq.slot)
        return self._slots.pop(name) if finish else self._slots[name]

    def free(self, slot: int) -> None:
        """Ends a waiting or running sequence. Raises KeyError if there is none."""
        if self._new.pop(slot, None) is not None:
            return
        names = [name for name, known in self._slots.items() if known == slot]
        if not names:
            raise KeyError(f"slot {slot} is neither waiting nor running")
        replica, local = names[0]
        del self._slots[replica, local]
        self.schedulers[replica].free(local)

    def take(self, counter: str) -> int:
        """The sum of a counter of the schedulers, which start anew."""
        total = sum(getattr(s, counter) for s in self.schedulers)
        for s in self.schedulers:
            setattr(s, counter, 0)
        return total

    def _share_out(self) -> None:
        most = -(-self.n_unfinished // len(self.schedulers))
        loads = [s.n_unfinished for s in self.schedulers]
        r = int(np.argmin(loads))
        for slot, request in self._new.items():
            if loads[r] >= most:
                r = int(np.argmin(loads))
            loads[r] += 1
            self._slots[r, self.schedulers[r].submit(request)] = slot
        self._new.clear()

    def _named(self, replica: int, local: int) -> int:
        self._next_slot += 1
        self._slots[replica, local] = self._next_slot - 1
        return self._next_slot - 1

    def _only(self, replica: int, plan: Plan) -> list[Plan]:
        return [plan if r == replica else Plan() for r in range(len(self.schedulers))]
