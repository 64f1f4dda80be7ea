"""Adapter with the engine interface of JetStream 0.2.2, for programs that use its orchestrator.

JetStream (https://github.com/AI-Hypercomputer/JetStream, archived in February 2026) prefills on one
thread and generates on another. The caller numbers the slots, sequences have no length limit, and
`generate` returns one array. The package itself is not a dependency: its result class is passed in.
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
    """The part of a result for one slot."""

    tokens: np.ndarray  # int32 [1, n_new]
    valid: np.ndarray  # int32 [1, n_new], 0 after the end of the sequence
    lengths: np.ndarray  # int32 [1], tokens generated so far


@dataclasses.dataclass(frozen=True)
class Result:
    """Tokens of all slots from one `generate`, in the layout of JetStream's ResultTokens.

    The columns of `data` (int32 [n_slots, 2 * n_new + 1]) are tokens, their validity, and the
    length so far.
    """

    data: np.ndarray
    tokens_idx: tuple[int, int]
    valid_idx: tuple[int, int]
    length_idx: tuple[int, int]
    samples_per_slot: int

    def copy_to_host_async(self) -> None:
        """Does nothing: the data is on the host."""

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
    """An active sequence."""

    engine_slot: int
    pending: list[int] = dataclasses.field(default_factory=list)  # tokens not returned yet
    n_returned: int = 0
    ended: bool = False  # reached the engine's maximum length


class JetStreamEngine:
    """JetStream's `Engine`, over a paged engine.

    `tokenizer` is what `build_tokenizer` returns to the orchestrator. `result` is the class of the
    results, jetstream.engine.engine_api.ResultTokens for the package's orchestrator. Sampling and
    seed apply to all sequences; the n-th inserted sequence uses prompt id n.

    A sequence ends when the caller frees or refills its slot; until then it uses decode steps. The
    caller handles stop tokens, and discards the tokens after them: a dispatch is up to
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

    # Verbs of JetStream's Engine

    def load_params(self) -> Tree:
        """The parameters given at construction; the other verbs accept any."""
        return self._params

    def init_decode_state(self) -> None:
        """None: the engine owns the state on the device."""

    def prefill(
        self,
        *,
        params: Tree,
        padded_tokens: Any,
        true_length: int,
        existing_prefix: Prefix | None = None,
    ) -> Prefix:
        """Prefills a prompt. The returned handle must be inserted exactly once."""
        if existing_prefix is not None:
            raise NotImplementedError(
                "existing_prefix is unsupported; pass the whole prompt, the prefix cache finds the "
                "shared part"
            )
        tokens = np.asarray(padded_tokens, np.int32)[:true_length]
        with self._lock, jax.set_mesh(self._mesh):
            return self._engine.prefill(params, tokens)

    def insert(self, prefix: Prefix, decode_state: None, slot: int) -> None:
        """Starts a sequence in a slot, and ends the one that was there."""
        if not 0 <= slot < self.max_concurrent_decodes:
            raise ValueError(
                f"slot {slot} is out of range; slots are 0 to {self.max_concurrent_decodes - 1}"
            )
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
        """The next tokens of all slots: as many as every unfinished sequence has, at least one."""
        with self._lock, jax.set_mesh(self._mesh):
            while any(not (slot.pending or slot.ended) for slot in self._slots.values()):
                self._dispatch(params)
            return None, self._next_result()

    def free_resource(self, slot: int) -> None:
        """Ends the sequence of a slot, if it has one."""
        with self._lock:
            self._free(slot)

    # Properties that the orchestrator reads

    @property
    def max_concurrent_decodes(self) -> int:
        return self._engine.rollout.max_num_seqs

    @property
    def samples_per_slot(self) -> int:
        return 1

    @property
    def max_prefill_length(self) -> int:
        """The largest supported power of two: the package pads prompts to powers of two."""
        return 1 << (self._engine.max_len - 1).bit_length() - 1

    @property
    def mesh(self) -> Mesh:
        return self._mesh

    @property
    def colocated_cpus(self) -> None:
        return None

    def get_prefix_destination_sharding(self) -> None:
        """None: a prefix is a host-side handle."""

    def get_tokenizer(self) -> None:
        """None: `build_tokenizer` returns the tokenizer itself."""

    def build_tokenizer(self, metadata: Any) -> Any:
        return self._tokenizer

    def _free(self, slot: int) -> None:
        old = self._slots.pop(slot, None)
        if old is not None and not old.ended:
            self._engine.free(old.engine_slot)

    def _dispatch(self, params: Tree) -> None:
        """Runs one dispatch of the engine. A preempted sequence gets no tokens."""
        owners = {slot.engine_slot: slot for slot in self._slots.values()}
        for new in self._engine.generate(params):
            slot = owners[new.slot]
            slot.pending += new.tokens.tolist()
            slot.ended = bool(new.finish)

    def _next_result(self) -> Any:
        n_new = min((len(s.pending) for s in self._slots.values() if s.pending), default=1)
        data = np.zeros((self.max_concurrent_decodes, 2 * n_new + 1), np.int32)
        for row, slot in self._slots.items():
            tokens, slot.pending = slot.pending[:n_new], slot.pending[n_new:]
            slot.n_returned += len(tokens)
            data[row, : len(tokens)] = tokens
            data[row, n_new : n_new + len(tokens)] = 1
            data[row, -1] = slot.n_returned
        columns = (0, n_new), (n_new, 2 * n_new), (2 * n_new, 2 * n_new + 1)
        return self._result(data, *columns, self.samples_per_slot)
