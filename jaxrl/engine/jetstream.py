"""The engine behind the verbs of JetStream 0.2.2, for programs written for its orchestrator.

JetStream (https://github.com/AI-Hypercomputer/JetStream, archived in February 2026) prefills on one thread and
generates on another; slots are numbered by the caller, sequences have no length of their own, and what
`generate` returns is one array. The package itself is not needed here: its class of results is passed in.
"""

import dataclasses
import threading
from collections.abc import Callable
from typing import Any

import jax
import numpy as np
from jax.sharding import Mesh

from jaxrl.config.keys import SamplingConfig
from jaxrl.engine.api import Prefix, Request
from jaxrl.engine.engine import PagedEngine
from jaxrl.types import Tree


@dataclasses.dataclass(frozen=True)
class SlotResult:
    """The part of a result that belongs to a slot."""

    tokens: np.ndarray  # int32 [1, n_new]
    valid: np.ndarray  # int32 [1, n_new], 0 behind the end of the sequence
    lengths: np.ndarray  # int32 [1], tokens made so far


@dataclasses.dataclass(frozen=True)
class Result:
    """What `generate` made for all slots, in the layout of JetStream's ResultTokens: the columns of
    `data` (int32 [n_slots, 2 * n_new + 1]) are tokens, their validity, and the length so far."""

    data: np.ndarray
    tokens_idx: tuple[int, int]
    valid_idx: tuple[int, int]
    length_idx: tuple[int, int]
    samples_per_slot: int

    def copy_to_host_async(self) -> None:
        """It lies on the host."""

    def convert_to_numpy(self) -> "Result":
        return self

    def get_result_at_slot(self, slot: int) -> SlotResult:
        row = self.data[slot : slot + 1]
        tokens, valid, length = (
            slice(*i) for i in (self.tokens_idx, self.valid_idx, self.length_idx)
        )
        return SlotResult(row[:, tokens], row[:, valid], row[:, length][:, 0])


@dataclasses.dataclass
class Slot:
    """A sequence under way."""

    engine_slot: int
    made: list[int] = dataclasses.field(default_factory=list)  # tokens not returned yet
    n_returned: int = 0
    ended: bool = False  # at the end of the engine's context


class JetStreamEngine:
    """JetStream's `Engine`, over a paged engine.

    `tokenizer` is what the orchestrator gets from `build_tokenizer`; `result` is the class to return
    results in, jetstream.engine.engine_api.ResultTokens for the orchestrator of the package. Sampling
    and seed hold for all sequences; the n-th to be inserted draws as prompt n.

    A sequence ends where the caller frees or refills its slot; until then it costs decode steps. Stop
    tokens are the caller's affair, and tokens behind them are made in vain: a dispatch is
    `rollout.steps_per_dispatch` steps.
    """

    def __init__(
        self,
        engine: PagedEngine,
        params: Tree,
        mesh: Mesh,
        *,
        tokenizer: Any = None,
        sampling: SamplingConfig | None = None,
        seed: int = 0,
        result: Callable[..., Any] = Result,
    ):
        self._engine, self._params, self._mesh = engine, params, mesh
        self._tokenizer, self._result = tokenizer, result
        self._sampling, self._seed = sampling or SamplingConfig(), seed
        self._slots: dict[int, Slot] = {}
        self._n_inserted = 0
        self._lock = threading.Lock()  # prefill and generate are called by different threads

    # The verbs

    def load_params(self) -> Tree:
        """The parameters that the engine was made with; any others may be passed to the other verbs."""
        return self._params

    def init_decode_state(self) -> None:
        """What lies on the device is the engine's; there is no state to pass along."""

    def prefill(
        self,
        *,
        params: Tree,
        padded_tokens: Any,
        true_length: int,
        existing_prefix: Prefix | None = None,
    ) -> Prefix:
        """A handle on the prompt's pages. It is to be inserted once."""
        if existing_prefix is not None:
            raise NotImplementedError(
                "a prefix cannot be continued; pass the whole prompt, what it shares with others is found"
            )
        tokens = np.asarray(padded_tokens, np.int32)[:true_length]
        with self._lock, jax.set_mesh(self._mesh):
            return self._engine.prefill(params, tokens)

    def insert(self, prefix: Prefix, decode_state: None, slot: int) -> None:
        """Starts a sequence in a slot; one that is still there ends."""
        if not 0 <= slot < self.max_concurrent_decodes:
            raise ValueError(f"slot {slot} is none of the {self.max_concurrent_decodes}")
        request = Request(
            tokens=prefix.tokens,
            max_tokens=self._engine.max_len - len(prefix.tokens),
            sampling=self._sampling,
            prompt_id=self._n_inserted,
            seed=self._seed,
            ignore_stop=True,
        )
        with self._lock, jax.set_mesh(self._mesh):
            self._free(slot)
            self._slots[slot] = Slot(self._engine.insert(prefix, request))
            self._engine.release_prefix(prefix)
            self._n_inserted += 1

    def generate(self, params: Tree, decode_state: None) -> tuple[None, Any]:
        """The next tokens of all slots: as many as there are of every sequence, one at least."""
        with self._lock, jax.set_mesh(self._mesh):
            while any(not (slot.made or slot.ended) for slot in self._slots.values()):
                self._take(params)
            return None, self._next()

    def free_resource(self, slot: int) -> None:
        """Ends the sequence of a slot, where it has one."""
        with self._lock:
            self._free(slot)

    # What the orchestrator asks

    @property
    def max_concurrent_decodes(self) -> int:
        return self._engine.rollout.max_num_seqs

    @property
    def samples_per_slot(self) -> int:
        return 1

    @property
    def max_prefill_length(self) -> int:
        """A power of two, as the package pads prompts to one."""
        return 1 << (self._engine.max_len - 1).bit_length() - 1

    @property
    def mesh(self) -> Mesh:
        return self._mesh

    @property
    def colocated_cpus(self) -> None:
        return None

    def get_prefix_destination_sharding(self) -> None:
        """A prefix is a handle on the host."""

    def get_tokenizer(self) -> None:
        """The tokenizer is not made from a description."""

    def build_tokenizer(self, metadata: Any) -> Any:
        return self._tokenizer

    # Inside

    def _free(self, slot: int) -> None:
        old = self._slots.pop(slot, None)
        if old is not None and not old.ended:
            self._engine.free(old.engine_slot)

    def _take(self, params: Tree) -> None:
        """One dispatch of the engine. A sequence that it sent back to its queue gets nothing."""
        owners = {slot.engine_slot: slot for slot in self._slots.values()}
        for made in self._engine.generate(params):
            slot = owners[made.slot]
            slot.made += made.tokens.tolist()
            slot.ended = bool(made.finish)

    def _next(self) -> Any:
        n_new = min((len(s.made) for s in self._slots.values() if s.made), default=1)
        data = np.zeros((self.max_concurrent_decodes, 2 * n_new + 1), np.int32)
        for row, slot in self._slots.items():
            tokens, slot.made = slot.made[:n_new], slot.made[n_new:]
            slot.n_returned += len(tokens)
            data[row, : len(tokens)] = tokens
            data[row, n_new : n_new + len(tokens)] = 1
            data[row, -1] = slot.n_returned
        columns = (0, n_new), (n_new, 2 * n_new), (2 * n_new, 2 * n_new + 1)
        return self._result(data, *columns, self.samples_per_slot)
