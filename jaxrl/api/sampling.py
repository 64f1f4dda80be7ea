"""Sampling from saved adapters: places in the engine, and the responses of a request."""

import asyncio
import collections
import contextlib
import dataclasses
import secrets
from collections.abc import AsyncIterator, Awaitable, Callable
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import numpy as np

from jaxrl.api.fields import SampleRequest
from jaxrl.api.messages import NO_LOGPROB, SampledTokens, TopMatrix, sample_output
from jaxrl.learner.image_encoder import ImageEncoder
from jaxrl.models.config import DecoderConfig
from jaxrl.models.files.adapted_tower import load_adapted_tower
from jaxrl.models.files.adapter_stack import put_adapter
from jaxrl.models.files.hf_load import load_params
from jaxrl.serve.choice import Choice, TopLogprobs
from jaxrl.serve.engine_thread import ServingThread
from jaxrl.serve.metrics import ServerMetrics
from jaxrl.serve.model import Model
from jaxrl.serve.requests.request import GenerationRequest
from jaxrl.serve.response import ActiveResponse
from jaxrl.serve.score import Scores, score
from jaxrl.types import Tree
from sharding.rules import DECODE

MAX_SEED = 2**31 - 1


@dataclasses.dataclass(frozen=True)
class Place:
    """A place of the engine with an adapter."""

    slot: int  # 0: the base model
    # Of the adapter, which may change the tower; None: that of the base model
    encoder: ImageEncoder | None = None


class AdapterSlots:
    """The places of adapters in the engine: which folder each has, and who uses it.

    Used on the event loop only. A place stays while requests use it; of the others the least
    recently used one is overwritten. KV that was cached with its old weights is then dropped.
    """

    def __init__(self, n: int, load: Callable[[int, Path, bool], Awaitable[ImageEncoder | None]]):
        """`load(slot, folder, drop_cache)` puts an adapter into a place, from 1.

        Its result is the encoder of the place.
        """
        self._load = load
        self._folders: dict[int, Path] = {}
        self._encoders: dict[int, ImageEncoder | None] = {}
        self._users: collections.Counter[int] = collections.Counter()
        self._order = list(range(1, n + 1))  # the least recently used first
        self._cached: set[int] = set()  # used since the cache was last dropped
        self._changed = asyncio.Condition()
        self._loading = asyncio.Lock()

    @contextlib.asynccontextmanager
    async def place(self, folder: Path | None) -> AsyncIterator[Place]:
        """The place of the adapter in `folder` during the block; without one, the base model."""
        if folder is None:
            yield Place(0)
            return
        slot = await self._acquire(folder)
        try:
            yield Place(slot, self._encoders[slot])
        finally:
            self._users[slot] -= 1
            async with self._changed:
                self._changed.notify_all()

    async def _acquire(self, folder: Path) -> int:
        async with self._loading:  # in the order of the requests
            found = self._find(folder)
            while found is None:
                async with self._changed:
                    await self._changed.wait_for(lambda: self._find(None) is not None)
                found = self._find(None)
            slot = found
            self._users[slot] += 1
            self._order.remove(slot)
            self._order.append(slot)
            if self._folders.get(slot) != folder:
                await self._put(slot, folder)
            self._cached.add(slot)
        return slot

    def _find(self, folder: Path | None) -> int | None:
        """The place of the folder, else the least recently used one that is free, or None."""
        for slot, loaded in self._folders.items():
            if folder is not None and loaded == folder:
                return slot
        return next((slot for slot in self._order if not self._users[slot]), None)

    async def _put(self, slot: int, folder: Path) -> None:
        self._folders.pop(slot, None)
        drop = slot in self._cached
        try:
            self._encoders[slot] = await self._load(slot, folder, drop)
        except BaseException:
            self._users[slot] -= 1
            raise
        if drop:
            self._cached = {slot for slot, n in self._users.items() if n}
        self._folders[slot] = folder


@dataclasses.dataclass(frozen=True)
class Sampler:
    """Samples the responses of requests on the engine's thread."""

    model: Model
    engine: ServingThread
    metrics: ServerMetrics
    workers: ThreadPoolExecutor
    slots: AdapterSlots
    timeout_s: float
    trains_all: bool = False  # the engine has the weights of one folder at a time, and no adapters

    async def sample(self, request: SampleRequest, folder: Path | None) -> bytes:
        """The encoded responses. Raises RequestError as ActiveResponse does."""
        if self.trains_all:
            folder = folder or self.model.folder
        async with self.slots.place(folder) as place:
            place = Place(0) if self.trains_all else place
            prompt = top = None
            if request.prompt_logprobs or request.n_top_prompt:
                prompt, top = await self._prompt(request, place.slot)
            with contextlib.closing(self._start(request, place)) as response:
                await response.finish()
            samples = [_sample(choice, request.n_top) for choice in response.choices]
        return sample_output(samples, prompt if request.prompt_logprobs else None, top)

    def _start(self, request: SampleRequest, place: Place) -> ActiveResponse:
        seed = secrets.randbelow(MAX_SEED) if request.seed is None else request.seed & MAX_SEED
        generation = GenerationRequest(
            endpoint="completions",
            model="",
            adapter=place.slot,
            prompts=(request.tokens,),
            max_tokens=(request.max_tokens,),
            sampling=request.sampling,
            adjustments=None,
            seed=seed,
            n=request.n,
            logprobs=request.n_top > 0,
            n_top=request.n_top,
            echo=False,
            stream=False,
            include_usage=False,
            ignore_stop=request.ignore_stop,
            return_token_ids=False,
            images=request.images,
        )
        return ActiveResponse(
            generation,
            self.model.renderer,
            self.engine,
            self.metrics,
            workers=self.workers,
            timeout_s=self.timeout_s,
            encoder=place.encoder or next(iter(self.model.encoders), None),
        )

    async def _prompt(
        self, request: SampleRequest, slot: int
    ) -> tuple[np.ndarray, TopMatrix | None]:
        """(logprobs of the prompt's tokens, NaN where not scored; the most likely tokens)."""
        tokens = request.tokens

        def work(params: Tree) -> tuple[Tree, Scores]:
            return params, score(params, tokens, temperature=1.0, adapter=slot, rules=DECODE)

        n, k = len(tokens), request.n_top_prompt
        logp = np.full(n, np.nan, np.float32)
        if n == 1:
            scores = Scores(*(np.zeros((0, k), np.float32),) * 3)
        else:
            scores = await asyncio.wrap_future(self.engine.run(work))
            logp[1:] = scores.logp
        logp[: n - request.n_scored] = np.nan
        if not k:
            return logp, None
        ids, tops = np.zeros((n, k), np.int32), np.full((n, k), NO_LOGPROB, np.float32)
        ids[1:], tops[1:] = scores.top[:, :k], scores.top_logp[:, :k]
        ids[: n - request.n_scored], tops[: n - request.n_scored] = 0, NO_LOGPROB
        return logp, TopMatrix(ids, tops)


def loader(
    model: Model, engine: ServingThread, *, trains_all: bool
) -> Callable[[int, Path, bool], Awaitable[ImageEncoder | None]]:
    """The `load` of AdapterSlots for an engine; with `trains_all` a folder has a whole model."""
    versions, layout = iter(range(1, 2**62)), model.layout

    def load(slot: int, folder: Path, drop_cache: bool) -> Awaitable[ImageEncoder | None]:
        def work(params: Tree) -> tuple[Tree, ImageEncoder | None]:
            encoder = None
            if trains_all:
                read = load_params(folder, layout.rules, params.cfg, layout.dtype)
                new = layout.prepare(read)
            else:
                how: Any = dict(rules=layout.rules, dtype=layout.dtype)
                source = model.folder if model.encoders else None
                new = put_adapter(params, slot, folder, **how, source=source)
                if model.encoders:
                    encoder = adapted_encoder(folder, model, params.cfg)
            if drop_cache:
                model.engine.set_version(next(versions))
            return new, encoder

        return asyncio.wrap_future(engine.run(work))

    return load


def adapted_encoder(adapter: Path, model: Model, decoder: DecoderConfig) -> ImageEncoder | None:
    """The encoder of an adapter that changes the tower; None: that of the base model."""
    base = model.encoders[0]
    how: Any = dict(rules=model.layout.rules, dtype=base.dtype)
    tower = load_adapted_tower(adapter, model.folder, decoder, **how)
    if tower is None:
        return None
    found = base.another(decoder)
    found.load(tower)
    return found


def _sample(choice: Choice, n_top: int) -> SampledTokens:
    tokens, logp = np.asarray(choice.tokens, np.int32), np.asarray(choice.logp, np.float32)
    top = _top(choice.top[: len(tokens)], n_top) if n_top else None
    return SampledTokens(tokens, logp, choice.finish_reason, top)


def _top(pairs: list[TopLogprobs], k: int) -> TopMatrix:
    rows = [row[:k] for row in pairs]
    ids = [[token for token, _ in row] for row in rows]
    logps = [[logp for _, logp in row] for row in rows]
    shape = len(rows), k
    return TopMatrix(
        np.asarray(ids, np.int32).reshape(shape), np.asarray(logps, np.float32).reshape(shape)
    )
