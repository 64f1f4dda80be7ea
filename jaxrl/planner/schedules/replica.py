"""One engine replica of a simulated run: its sequences, and the time up to which it has decoded."""

import dataclasses
from collections.abc import Sequence


@dataclasses.dataclass(frozen=True)
class ReplicaUsage:
    """Seconds that one decode step of a replica takes of a resource (compute, HBM, links)."""

    fixed_s: int | float = 0.0
    per_sequence_s: int | float = 0.0
    per_key_s: int | float = 0.0  # of each key that a sequence attends to


@dataclasses.dataclass
class Replica:
    """Sequences of one engine replica, and the time up to which it has decoded them."""

    slots: int
    # Heap of (step at which a response ends, its group, version of its first token, last keys).
    ends: list[tuple[int, int, int, int]] = dataclasses.field(default_factory=list)
    time: float = 0.0
    step: int = 0
    keys: int = 0
    prompt: int = -1  # group whose prompt is in the prefix cache
    busy_s: float = 0.0
    stamp: int = 0  # of its newest event; older events are void

    def decode_s(self, n_steps: int, decode: Sequence[ReplicaUsage]) -> float:
        """Time of `n_steps` decode steps of the present sequences."""
        n = len(self.ends)
        keys = self.keys + n * (n_steps - 1) / 2  # mean over the steps
        return n_steps * max(
            [use.fixed_s + use.per_sequence_s * n + use.per_key_s * keys for use in decode]
        )

    def decode_until(self, now: float, decode: Sequence[ReplicaUsage]) -> None:
        """Decodes up to `now`; a step under way is finished."""
        if not self.ends or self.time >= now:
            self.time = max(self.time, now)
            return
        left, spent = now - self.time, self.ends[0][0] - self.step
        if self.decode_s(spent, decode) > left + 1e-9:
            low, high = 0, spent  # fewest steps that take `left`
            while high - low > 1:
                middle = (low + high) // 2
                fits = self.decode_s(middle, decode) < left - 1e-9
                low, high = (middle, high) if fits else (low, middle)
            spent = high
        self.spend(self.decode_s(spent, decode))
        self.step += spent
        self.keys += spent * len(self.ends)

    def spend(self, seconds: float) -> None:
        self.time += seconds
        self.busy_s += seconds
