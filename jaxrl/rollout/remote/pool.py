"""The workers of a run as one engine: they join, fail and come back while it generates.

    submit -> | queue | -> | worker 0: dispatch, dispatch, ... | -> tokens of every dispatch
                  ^   \\--> | worker 1: dispatch, lost          | -> tokens until then
                  |________________________| requests continue after their last token

The pool has every token that a worker sent, so a request of a lost worker continues on another.
A token's random number depends on seed, prompt, sample and position, so it gets the same samples.
"""

import collections
import dataclasses
import time
from collections.abc import Callable
from typing import Any

from jaxrl.engine.api import EngineStats, Generated, Request
from jaxrl.rollout.remote.actors import Actors, WorkerLost
from jaxrl.rollout.remote.images import SentImages
from jaxrl.rollout.remote.weights import Version
from jaxrl.rollout.remote.work import Location, Registration, Work, WorkDone
from jaxrl.rollout.turns import continued

POLL_S = 0.1  # longest wait for news, so that signals are seen
MAX_ERRORS = 3  # of workers, one after the other, before the run fails
FIRST_DELAY_S = 1.0  # before a worker that failed at its start is started again ...
LONGEST_DELAY_S = 60.0  # ... which doubles until here


class NoWorkers(ValueError):
    """No rollout worker is left."""


@dataclasses.dataclass(eq=False)
class Member:
    """One worker: it waits for a host, then builds its engine, then loads weights."""

    worker: Any  # its handle
    call: Any  # the one that it is working on; None: it waits for work
    called_at: float
    location: Location | None = None  # None until its process runs
    capacity: int = 0  # sequences at a time; 0 until it is registered
    loaded: int | None = None  # the weights that it has
    loading: int | None = None  # those that it has after the call
    requests: set[int] = dataclasses.field(default_factory=set)  # that it generates
    submit: list[int] = dataclasses.field(default_factory=list)  # of these, not yet sent to it
    free: list[int] = dataclasses.field(default_factory=list)  # to cancel
    images: SentImages = dataclasses.field(default_factory=SentImages)

    @property
    def ready(self) -> bool:
        return self.loaded is not None


@dataclasses.dataclass
class Entry:
    """A request that has not ended."""

    request: Request
    tokens: list[int] = dataclasses.field(default_factory=list)  # sampled so far
    member: Member | None = None  # None: it is in the queue


class WorkerPool:
    """Implements `engine.api.RequestEngine`; its `params` are a published Version.

    At most `max_workers` are started. As many of them run as the cluster has room for, from the
    moment that it has. A worker that ends is started again.
    """

    def __init__(
        self,
        actors: Actors,
        *,
        n_workers: int,
        max_workers: int,
        timeout_s: float,
        report: Callable[[str], None] = lambda line: None,
        check: Callable[[], None] = lambda: None,
    ):
        """`n_workers` are waited for at the start. `report` gets a line for each one that joins
        or is lost; `check` raises to end that wait.
        """
        self._actors, self._n_workers, self._max_workers = actors, n_workers, max_workers
        self._timeout_s, self._report, self._check = timeout_s, report, check
        self._members: list[Member] = []
        self._entries: dict[int, Entry] = {}
        self._queue: collections.deque[int] = collections.deque()
        self._next_number = 0
        self._version = 0
        self._stats = EngineStats()
        self._n_lost = self._n_moved = 0
        self._n_errors = 0  # one after the other
        self._start_at, self._delay_s = 0.0, FIRST_DELAY_S  # of further workers
        self._lacking_since: float | None = None  # with too few workers, since when
        self._last_loss = "no host of the Ray cluster was free"

    # api.RequestEngine

    def set_version(self, version: int) -> None:
        self._version = version

    def submit(self, request: Request) -> int:
        number, self._next_number = self._next_number, self._next_number + 1
        self._entries[number] = Entry(request)
        self._queue.append(number)
        return number

    def free(self, slot: int) -> None:
        member = self._entries.pop(slot).member
        if member is None:
            self._queue.remove(slot)
            return
        member.requests.remove(slot)
        if slot in member.submit:
            member.submit.remove(slot)
        else:
            member.free.append(slot)

    def generate(self, params: Version) -> list[Generated]:
        """Gives work to all workers that wait for some, and returns the tokens that arrived.

        There may be none. Raises NoWorkers, or the error of a worker that fails repeatedly.
        """
        return self._poll(params, needed=1)

    @property
    def n_unfinished(self) -> int:
        return len(self._entries)

    def take_stats(self) -> EngineStats:
        stats, self._stats = self._stats, EngineStats()
        return stats

    # Life

    @property
    def n_ready(self) -> int:
        """Workers that have weights."""
        return sum(member.ready for member in self._members)

    def warmup(self, params: Version, threads: object = None) -> int:
        """Waits until the run's workers have compiled their programs. Returns their number."""
        while self.n_ready < self._n_workers:
            self._check()
            self._poll(params, self._n_workers)
        return self.n_ready

    def take_metrics(self) -> dict[str, float]:
        """workers/*: how many there are, and losses since the last call."""
        lost, moved, self._n_lost, self._n_moved = self._n_lost, self._n_moved, 0, 0
        return {
            "workers/ready": float(self.n_ready),
            "workers/lost": float(lost),
            "workers/moved_requests": float(moved),
        }

    def close(self) -> None:
        """Ends all workers."""
        for member in self._members:
            self._actors.kill(member.worker)
        self._members.clear()

    def _poll(self, params: Version, needed: int) -> list[Generated]:
        """One round of `generate`. Fails if fewer than `needed` workers are ready for too long."""
        self._start_missing()
        self._give_work(params)
        calls = [member.call for member in self._members if member.call is not None]
        if not calls:
            time.sleep(POLL_S)
        generated = []
        for call in self._actors.finished(calls, POLL_S) if calls else ():
            [member] = [one for one in self._members if one.call is call]
            generated += self._receive(member)
        self._end_silent()
        self._check_number(needed)
        return generated

    def _start_missing(self) -> None:
        now = time.monotonic()
        while len(self._members) < self._max_workers and now >= self._start_at:
            worker = self._actors.start()
            self._members.append(Member(worker, self._actors.locate(worker), now))

    def _give_work(self, params: Version) -> None:
        """Distributes queued requests equally, at most as many as a worker decodes at a time."""
        share = -(-len(self._entries) // max(self.n_ready, 1))
        for member in self._members:
            if member.call is not None:
                continue
            if member.ready:
                for _ in range(min(share, member.capacity) - len(member.requests)):
                    self._assign(member)
            update = None if member.loaded == params.number else params.update(member.loaded)
            if update is None and not member.requests and not member.free:
                continue
            entries = [self._entries[number] for number in member.submit]
            requests = [continued(entry.request, entry.tokens) for entry in entries]
            requests, images = member.images.send(requests)
            submit = tuple(zip(member.submit, requests, strict=True))
            work = Work(tuple(member.free), update, self._version, submit, images)
            member.submit, member.free = [], []
            member.loading = params.number
            member.call = self._actors.dispatch(member.worker, work)
            member.called_at = time.monotonic()

    def _assign(self, member: Member) -> None:
        if self._queue:
            number = self._queue.popleft()
            self._entries[number].member = member
            member.requests.add(number)
            member.submit.append(number)

    def _receive(self, member: Member) -> list[Generated]:
        """The tokens of a member's call that has ended."""
        call, member.call = member.call, None
        try:
            result = self._actors.result(call)
        except WorkerLost as error:
            self._lose(member, str(error))
            return []
        except Exception as error:
            self._n_errors += 1
            if self._n_errors >= MAX_ERRORS or isinstance(error, ValueError):
                raise
            self._lose(member, f"{type(error).__name__}: {error}")
            return []
        if isinstance(result, Location):
            member.location, member.called_at = result, time.monotonic()
            member.call = self._actors.register(member.worker)
            return []
        if isinstance(result, Registration):
            self._register(member, result)
            return []
        self._n_errors, self._delay_s = 0, FIRST_DELAY_S
        return self._take(member, result)

    def _register(self, member: Member, found: Registration) -> None:
        if found.refused:
            self._members.remove(member)
            self._actors.kill(member.worker)
            self._max_workers -= 1  # a restart on the same host would be refused again
            self._last_loss = f"a worker was refused: {found.refused}"
            self._report(self._last_loss)
            if not self._members:
                raise NoWorkers(f"{self._last_loss}; install the trainer's version on that host")
            return
        member.capacity = found.capacity

    def _take(self, member: Member, done: WorkDone) -> list[Generated]:
        if not member.ready:
            self._report(f"rollout worker on {member.location} joined")
        member.loaded = member.loading
        self._add_stats(done.stats)
        taken = []
        for number, one in done.generated:
            entry = self._entries.get(number)
            if entry is None or entry.member is not member:
                continue  # it was freed during the dispatch
            taken.append(dataclasses.replace(one, slot=number))
            entry.tokens += one.tokens.tolist()
            if one.finish:
                member.requests.remove(number)
                del self._entries[number]
        return taken

    def _lose(self, member: Member, reason: str) -> None:
        """Returns the requests of a member to the queue, and ends it."""
        self._members.remove(member)
        self._actors.kill(member.worker)
        for number in sorted(member.requests, reverse=True):
            self._entries[number].member = None
            self._queue.appendleft(number)
        self._n_lost += 1
        self._n_moved += len(member.requests)
        self._last_loss = f"a rollout worker on {member.location or 'a host'} was lost: {reason}"
        self._report(
            f"{self._last_loss}; {len(member.requests)} requests continue on others, "
            f"{self.n_ready} workers are ready"
        )
        if not member.ready:  # it would perhaps fail again
            self._start_at = time.monotonic() + self._delay_s
            self._delay_s = min(2 * self._delay_s, LONGEST_DELAY_S)

    def _end_silent(self) -> None:
        """Ends the workers that do not answer, except those that no host is free for."""
        now = time.monotonic()
        for member in list(self._members):
            runs, silent = member.location is not None, member.call is not None
            if runs and silent and now - member.called_at > self._timeout_s:
                self._lose(member, f"it did not answer for {self._timeout_s:g} s")

    def _check_number(self, needed: int) -> None:
        """Raises NoWorkers if fewer than `needed` workers have been ready for too long."""
        if self.n_ready >= needed:
            self._lacking_since = None
        elif self._lacking_since is None:
            self._lacking_since = time.monotonic()
        elif time.monotonic() - self._lacking_since > self._timeout_s:
            raise NoWorkers(
                f"{self.n_ready} of {needed} rollout workers are ready after "
                f"schedule.worker_timeout_s={self._timeout_s:g}; {self._last_loss}. Add hosts with "
                "`ray start`, or lower schedule.rollout_workers or schedule.worker_accelerator; "
                "the run resumes from its checkpoint"
            )

    def _add_stats(self, stats: EngineStats) -> None:
        added = dataclasses.asdict(stats)
        for name, value in dataclasses.asdict(self._stats).items():
            largest = name == "cache_used_max"
            setattr(self._stats, name, max(value, added[name]) if largest else value + added[name])
