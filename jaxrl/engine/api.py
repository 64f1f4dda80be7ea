"""The interface of a rollout engine: JetStream's verbs, with the parameters passed on every call.

JetStream (https://github.com/AI-Hypercomputer/JetStream) names the steps of a generation engine
prefill, insert, generate and free. Here a Prefix is a host-side handle, a slot identifies a
sequence, and one `generate` call makes several tokens for every running slot.
"""

import dataclasses
from collections.abc import Sequence
from typing import Protocol, runtime_checkable

import numpy as np

from jaxrl.config.keys import SamplingConfig
from jaxrl.types import Grid, TokenSets, Tree


class GrammarError(ValueError):
    """A grammar that cannot be followed, for example because it is too complex."""


@runtime_checkable
class TokenMatcher(Protocol):
    """Follows a grammar through one response."""

    def allowed(self) -> np.ndarray:
        """The tokens that may come next, uint32 [W]: bit i of word w is token 32 w + i.

        At least one; the end-of-sequence tokens if the response may end. Raises GrammarError.
        """
        ...

    def accept(self, tokens: Sequence[int]) -> None:
        """Advances by sampled tokens. Raises GrammarError if they are not allowed."""
        ...


@runtime_checkable
class Grammar(Protocol):
    """The responses that a request allows."""

    def matcher(self) -> TokenMatcher:
        """A matcher at the start of a response. Raises GrammarError."""
        ...


@dataclasses.dataclass(frozen=True)
class LogitAdjustments:
    """Changes of the logits of one request before temperature and filters.

    In this order, with c(v) the count of token v in the response so far: the logit of a token of
    prompt or response is divided by `repetition_penalty` if positive and multiplied otherwise
    (https://arxiv.org/abs/1909.05858); minus frequency_penalty c(v) and minus presence_penalty if
    c(v) > 0; plus `bias`; then -inf for stop tokens before `min_tokens` tokens, and for tokens that
    the grammar does not allow.
    """

    repetition_penalty: float = 1.0
    frequency_penalty: float = 0.0
    presence_penalty: float = 0.0
    bias: tuple[tuple[int, float], ...] = ()  # distinct (token id, value), at most MAX_BIAS
    min_tokens: int = 0  # no stop token id is sampled before this many tokens
    grammar: Grammar | None = None


@dataclasses.dataclass(frozen=True)
class RequestImage:
    """The features of an image in a request, which has a placeholder token for each of them."""

    start: int  # index of the first placeholder
    grid: Grid
    digest: str  # of its content: images with the same one share KV
    rows: np.ndarray  # [n_tokens, D], in place of the embeddings
    deep: np.ndarray | None = None  # [n_tokens, n, D], added after each of the first n layers


@dataclasses.dataclass(frozen=True)
class Request:
    """One response to sample; only (seed, prompt_id, sample, position) set its random numbers."""

    tokens: np.ndarray  # int32 [prompt_len], at least one
    max_tokens: int  # response length limit
    sampling: SamplingConfig = dataclasses.field(default_factory=SamplingConfig)
    prompt_id: int = 0
    sample: int = 0
    seed: int = 0
    ignore_stop: bool = False  # sample exactly max_tokens tokens: forced lengths in benchmarks
    adjustments: LogitAdjustments | None = None
    top_logprobs: bool = False  # also return the most likely tokens at each position
    adapter: int = 0  # 0 = the base model, i = the i-th of the adapters that the engine has
    images: tuple[RequestImage, ...] = ()  # in the order of their places


@dataclasses.dataclass(frozen=True)
class Prefix:
    """A prefilled prompt: the pages with the KV of all its tokens except the last."""

    tokens: np.ndarray  # int32 [prompt_len]
    pages: tuple[int, ...]
    version: int = 0  # policy version that computed the KV
    replica: int = 0  # replica whose pool holds the pages
    adapter: int = 0  # with which the KV was computed; 0 = the base model
    state: int = 0  # slot of the state after these tokens, for models with one
    first: tuple[int, ...] = ()  # by window, index of the first page that the next token sees


@dataclasses.dataclass(frozen=True)
class TopTokens:
    """The most likely tokens at each of n positions, most likely first."""

    ids: np.ndarray  # int32 [n, N_TOP]
    logp: np.ndarray  # float32 [n, N_TOP], of softmax(logits / temperature), as Generated.logp


@dataclasses.dataclass(slots=True)
class Generated:
    """New tokens of one slot from one dispatch. Arrays may be views of all that it sampled."""

    # Not frozen, which makes objects three times slower: every sequence gets one per dispatch.

    slot: int
    tokens: np.ndarray  # int32 [n_new], the stop token included
    # float32 [n_new], of softmax(logits / temperature), without adjustments and filters
    logp: np.ndarray
    # float32 [n_new], of the distribution that sampled the tokens, see engine/device/sampling.py
    behavior_logp: np.ndarray
    finish: str  # "stop" | "length" | "error" (of the grammar) | "" while unfinished
    support: TokenSets | None = None  # the tokens that the filters kept; None if not recorded
    # [n_new, L, k] of the L layers with experts, in the passes that sampled; None if not recorded
    experts: np.ndarray | None = None
    top: TopTokens | None = None  # if the request wants them
    error: str = ""  # of the grammar
    version: int = 0  # policy version that sampled the tokens


@dataclasses.dataclass
class EngineStats:
    """Counters since the last `take_stats`: sums over decode steps, unless stated otherwise."""

    n_steps: int = 0  # decode steps
    n_tokens: int = 0  # sampled tokens
    n_batch_slots: int = 0  # decode batch size, padding included
    n_draft_tokens: int = 0  # draft tokens verified (speculative decoding)
    n_accepted_tokens: int = 0  # draft tokens accepted
    n_prefill_tokens: int = 0  # prompt tokens run through the model
    n_cached_tokens: int = 0  # prompt tokens found in the prefix cache
    n_preempted: int = 0  # preemptions
    running: float = 0.0
    waiting: float = 0.0
    cache_used: float = 0.0  # fraction of pages in use
    cache_used_max: float = 0.0  # maximum, not a sum
    device_s: float = 0.0  # wall time of compiled programs, fetching their results included
    host_s: float = 0.0  # remaining wall time of `generate`


@runtime_checkable
class RequestEngine(Protocol):
    """Generates the responses of queued requests, on local devices or through remote workers."""

    def set_version(self, version: int) -> None:
        """Sets the policy version of the next calls. A change invalidates the prefix cache."""
        ...

    def submit(self, request: Request) -> int:
        """Queues a request; `generate` prefills it once there is capacity. Returns its slot."""
        ...

    def generate(self, params: Tree) -> list[Generated]:
        """Runs one dispatch: up to `steps_per_dispatch` tokens for every running slot.

        A slot with `finish` set has ended and is freed.
        """
        ...

    def free(self, slot: int) -> None:
        """Cancels a waiting or running slot."""
        ...

    @property
    def n_unfinished(self) -> int:
        """Number of waiting and running slots."""
        ...

    def take_stats(self) -> EngineStats:
        """Returns the counters since the last call and resets them."""
        ...
