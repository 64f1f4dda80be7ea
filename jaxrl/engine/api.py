"""What a rollout engine offers: JetStream's verbs, with the parameters passed in on every call.

JetStream (https://github.com/AI-Hypercomputer/JetStream) names the steps of a generation engine
prefill, insert, generate, free. Here a Prefix is a handle on the host, a slot is the handle of a
sequence, and one `generate` makes several tokens for every slot.
"""

import dataclasses
from typing import Protocol, runtime_checkable

import numpy as np

from jaxrl.config.keys import SamplingConfig
from jaxrl.types import Tree


@dataclasses.dataclass(frozen=True)
class Request:
    """One response to sample. (seed, prompt_id, sample, position) alone decide its random numbers."""

    tokens: np.ndarray  # int32 [prompt_len], at least one
    max_tokens: int  # of the response
    sampling: SamplingConfig = dataclasses.field(default_factory=SamplingConfig)
    prompt_id: int = 0
    sample: int = 0
    seed: int = 0
    ignore_stop: bool = (
        False  # go on to max_tokens whatever is sampled: forced lengths of benchmarks
    )


@dataclasses.dataclass(frozen=True)
class Prefix:
    """A prompt whose keys and values (of all tokens but the last) lie in the engine's pages."""

    tokens: np.ndarray  # int32 [prompt_len]
    pages: tuple[int, ...]
    version: int = 0  # of the weights that computed them
    replica: int = 0  # of the engine, whose pages they are


@dataclasses.dataclass(frozen=True)
class Generated:
    """What one dispatch made for one slot."""

    slot: int
    tokens: np.ndarray  # int32 [n_new], the stop token included
    logp: np.ndarray  # float32 [n_new], of softmax(logits / temperature), see engine/sampling.py
    finish: str  # "stop" | "length" | "" while it goes on


@dataclasses.dataclass
class EngineStats:
    """Counted since the engine's last `take_stats`. Sums over decode steps, unless said otherwise."""

    n_dispatches: int = 0
    n_steps: int = 0  # decode steps
    n_tokens: int = 0  # sampled
    n_rows: int = 0  # sequences in them, padding included
    n_drafted: int = 0  # tokens drafted and checked (speculative decoding)
    n_accepted: int = 0  # of them, those that were sampled
    n_prefill_tokens: int = 0  # prompt tokens run through the model
    n_shared_tokens: int = 0  # prompt tokens whose keys lay in the cache already
    n_preempted: int = 0  # sequences sent back to the queue
    running: float = 0.0
    waiting: float = 0.0
    cache_used: float = 0.0  # fraction of pages in use
    cache_used_max: float = 0.0  # the largest, no sum
    device_s: float = 0.0  # wall time of calls of compiled programs, their results included
    host_s: float = 0.0  # wall time of `generate` beside that


@runtime_checkable
class Engine(Protocol):
    """A generation engine. It never keeps `params`, so it always samples from the weights of now."""

    def set_version(self, version: int) -> None:
        """Says which weights the next calls bring. Keys of other versions are not used for new requests."""
        ...

    def prefill(self, params: Tree, tokens: np.ndarray) -> Prefix:
        """Computes the keys of a prompt. The handle holds its pages until `release_prefix`."""
        ...

    def release_prefix(self, prefix: Prefix) -> None: ...

    def insert(self, prefix: Prefix, request: Request) -> int:
        """Starts one sequence behind a prefix; several may start behind the same. Returns its slot."""
        ...

    def submit(self, request: Request) -> int:
        """Queues a request: `generate` prefills and inserts it as soon as it fits. Returns its slot."""
        ...

    def generate(self, params: Tree) -> list[Generated]:
        """One dispatch: up to `steps_per_dispatch` tokens for every running slot. A slot whose
        `finish` is set has ended and is freed."""
        ...

    def free(self, slot: int) -> None:
        """Ends a slot before its time."""
        ...

    @property
    def n_unfinished(self) -> int:
        """Slots that wait or run."""
        ...

    def take_stats(self) -> EngineStats:
        """The counters since the last call."""
        ...
