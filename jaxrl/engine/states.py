"""Host-side bookkeeping of state slots: one per sequence, and snapshots at prefixes of tokens."""

from collections.abc import Collection

from jaxrl.engine.pages import OutOfPages

ZERO = 0  # the slot that new sequences start from


class StateSlots:
    """Slots 1..n-1 of recurrent state; each is free, or a sequence's, or a snapshot.

    A snapshot is the state after a prefix: the tokens of `parent`, a page of the prefix tree or the
    root, and of the pages before it, and then `tokens`, fewer than a page. It stays until its slot
    is needed, in LRU order, or its parent leaves the tree.
    """

    def __init__(self, n_slots: int):
        self.n_slots = n_slots
        self._free = list(range(n_slots - 1, ZERO, -1))
        self._snapshots: dict[int, tuple[int, bytes]] = {}  # slot -> prefix, in LRU order
        self._by_parent: dict[int, dict[bytes, int]] = {}  # parent -> tokens -> slot

    @property
    def n_used(self) -> int:
        """Slots of sequences and prefixes."""
        return self.n_slots - 1 - len(self._free) - len(self._snapshots)

    def allocate(self, pinned: Collection[int] = ()) -> int:
        """A slot for a sequence; evicts the least recently used snapshot that is not `pinned`.

        Raises OutOfPages if there is none.
        """
        if not self._free:
            evicted = next((slot for slot in self._snapshots if slot not in pinned), None)
            if evicted is None:
                raise OutOfPages(
                    f"all {self.n_slots - 1} slots of state are in use; release prefixes or raise "
                    "config.rollout.state_snapshots"
                )
            self._drop(evicted)
        return self._free.pop()

    def free(self, slot: int) -> None:
        """Returns the slot of a sequence."""
        self._free.append(slot)

    def keep(self, slot: int, parent: int, tokens: bytes) -> None:
        """Makes the slot of a sequence the snapshot of this prefix.

        An older one of the same prefix is not found any more. Nothing is freed before it is
        evicted, because device work that is planned may still read it.
        """
        self._by_parent.setdefault(parent, {})[tokens] = slot
        self._snapshots[slot] = parent, tokens

    def longest(
        self, parent: int, tokens: bytes, excluded: Collection[int]
    ) -> tuple[bytes, int] | None:
        """The longest snapshot (tokens, slot) that `tokens` starts with after `parent`."""
        found = [
            (known, slot)
            for known, slot in self._by_parent.get(parent, {}).items()
            if tokens.startswith(known) and slot not in excluded
        ]
        return max(found, key=lambda item: len(item[0]), default=None)

    def use(self, slot: int) -> None:
        """Marks a snapshot as the most recently used one."""
        self._snapshots[slot] = self._snapshots.pop(slot)

    def forget(self, parent: int) -> None:
        """Frees the snapshots after a page that leaves the prefix tree."""
        for slot in list(self._by_parent.get(parent, {}).values()):
            self._drop(slot)

    def reset(self) -> None:
        """Frees all snapshots."""
        for slot in list(self._snapshots):
            self._drop(slot)

    def _drop(self, slot: int) -> None:
        parent, tokens = self._snapshots.pop(slot)
        known = self._by_parent.get(parent, {})
        if known.get(tokens) == slot:
            del known[tokens]
            if not known:
                del self._by_parent[parent]
        self.free(slot)
