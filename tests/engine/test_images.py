"""Requests with images in the engine: their logprobs, shared prefixes, chunks and refusals.

Tests of jaxrl/engine/images.py, and of the images in batches.py, prefill.py and sampling.py.
"""

import dataclasses
import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from jaxrl.config.keys import SamplingConfig
from jaxrl.data.images.mrope import continue_text, mrope_positions
from jaxrl.engine.api import Request, RequestImage
from jaxrl.engine.device.prefill_rows import prefill_calls, split_rows
from jaxrl.engine.device.sampling import SamplingParams, sample
from jaxrl.engine.engine import PagedEngine
from jaxrl.engine.images import ImageSettings, ImageTable
from jaxrl.engine.prefill import PrefillChunk
from jaxrl.kernels.logprob import token_scores
from jaxrl.models.image_features import ImageFeatures
from jaxrl.models.packed import forward_packed
from sharding import DECODE, TRAIN
from tests.engine.engine_cases import SMALL, limit_pages, run
from tests.marks import graded
from tests.models.test_image_features import IMAGE, WHOLE, load

GRIDS = [(1, 4, 6), (1, 2, 4), (1, 6, 6)]  # 6, 2 and 9 tokens
LARGE = (1, 16, 20)  # 80 tokens, more than a row of prefill
N_DEEP = {"qwen3_vl": 2, "qwen2_5_vl": 0, "gemma3": 0, "gemma4": 0, "gemma4_shared": 0}


def settings(name: str, D: int) -> ImageSettings:
    whole, dtype = name in WHOLE, np.dtype(np.float32)
    return ImageSettings(IMAGE, D, N_DEEP[name], merge=0 if whole else 2, dtype=dtype, whole=whole)


def image(i: int, start: int, D: int, n_deep: int) -> RequestImage:
    grid = GRIDS[i % len(GRIDS)] if i < 9 else LARGE
    n, draw = grid[1] * grid[2] // 4, np.random.default_rng(i)
    rows = draw.standard_normal((n, D)).astype(np.float32)
    deep = draw.standard_normal((n, n_deep, D)).astype(np.float32) if n_deep else None
    return RequestImage(start, grid, str(i), rows, deep)


def request(parts, D: int, n_deep: int, *, sample: int = 0, max_tokens: int = 8, **options):
    """A request of texts, given by their lengths, and images, given as strings of their numbers."""
    draw, tokens, images = np.random.default_rng(len(parts)), [], []
    for part in parts:
        if isinstance(part, str):
            images.append(image(int(part), len(tokens), D, n_deep))
            tokens += [IMAGE] * len(images[-1].rows)
        else:
            tokens += draw.integers(3, IMAGE, part).tolist()
    return Request(
        np.array(tokens, np.int32),
        max_tokens,
        sample=sample,
        images=tuple(images),
        **options,
    )


def make_engine(name: str, cfg, **changes) -> PagedEngine:
    return PagedEngine(
        dataclasses.replace(cfg, max_len=256),
        dataclasses.replace(SMALL, **changes),
        rules=DECODE,
        dtype=jnp.float32,
        max_len=256,
        eos_ids=(1,),
        images=settings(name, cfg.D),
    )


@functools.partial(jax.jit, static_argnames="chunk")
def score(params, tokens, targets, segments, positions, features, axes, chunk=64):
    hidden = forward_packed(
        params, tokens, segments, positions, features=features, axis_positions=axes, rules=TRAIN
    )
    how = dict(temperature=1.0, logit_softcap=params.cfg.logit_softcap, chunk=chunk, rules=TRAIN)
    return token_scores(hidden, params.unembed, targets, **how)[0]


def trainer_logps(cfg, params, requests, results) -> list[np.ndarray]:
    """The trainer's logprobs of the sampled tokens, of one sequence per packed row."""
    deep_rows, T = requests[0].images[0].deep, 256
    n_deep = 0 if deep_rows is None else deep_rows.shape[1]
    shape = len(requests), T
    tokens, targets, segments = (np.zeros(shape, np.int32) for _ in range(3))
    rows, deep = (
        np.zeros((*shape, cfg.D), np.float32),
        np.zeros((*shape, n_deep, cfg.D), np.float32),
    )
    axes = np.zeros((*shape, 3), np.int32) if cfg.layers[0].mixer.rope.mrope_section else None
    for b, (one, (made, _, _)) in enumerate(zip(requests, results, strict=True)):
        row = np.concatenate([one.tokens, made])
        n = len(row) - 1
        tokens[b, :n], targets[b, :n], segments[b, :n] = row[:-1], row[1:], 1
        grids = [found.grid for found in one.images]
        if axes is not None:
            prompt_axes, _ = mrope_positions(one.tokens, grids, image_token=IMAGE, merge=2)
            axes[b, :n] = continue_text(prompt_axes, len(made)).T[:-1]
        for found in one.images:
            at = slice(found.start, found.start + len(found.rows))
            rows[b, at] = found.rows
            if found.deep is not None:
                deep[b, at] = found.deep
    features = ImageFeatures(rows, tokens == IMAGE, deep if n_deep else None)
    positions = np.tile(np.arange(T, dtype=np.int32), (len(requests), 1))
    batch = (tokens, targets, segments, positions, features, axes)
    batch = jax.tree.map(lambda a: jax.device_put(a, TRAIN.spec("batch", "time")), batch)
    logp = np.asarray(score(params, *batch))
    starts = [len(one.tokens) - 1 for one in requests]
    return [
        logp[b, s : s + len(out[0])] for b, (s, out) in enumerate(zip(starts, results, strict=True))
    ]


PROMPTS = [
    (5, "0", 3, "1", 4),
    (5, "0", 3, "4", 4),  # other content in the second image
    (70, "2", 60, "0", "1", 20),
    (3, "1", 2),
    (12,),
]


APART = [  # images that have text between them
    (5, "0", 3, "1", 4),
    (5, "0", 3, "4", 4),
    (70, "2", 60, "0", 1, "1", 20),
    (58, "9", 3),  # divided by a page
    (58, "9", 30, "2", 5),
    (12,),
]


def requests_of(cfg, n_deep: int, n: int = 2, prompts=PROMPTS, **options) -> list[Request]:
    sampling = SamplingConfig(temperature=1.0)
    return [
        request(parts, cfg.D, n_deep, sample=i, prompt_id=p, sampling=sampling, **options)
        for p, parts in enumerate(prompts)
        for i in range(n)
    ]


@pytest.mark.thorough
@pytest.mark.parametrize("name", ["qwen3_vl", "qwen2_5_vl"])
def test_logprobs_are_the_trainers(one_device, name):
    params = load(name)
    cfg = params.cfg
    requests = requests_of(cfg, N_DEEP[name])
    engine = make_engine(name, cfg)
    results = run(engine, params, requests)
    assert all(IMAGE not in made for made, *_ in results)
    for expected, (_, logp, _) in zip(
        trainer_logps(cfg, params, requests, results), results, strict=True
    ):
        np.testing.assert_allclose(logp, expected, atol=2e-5)
    assert engine.images is not None and not any(e.features for e in engine.images._in_order)


def test_chunks_prefixes_and_preemption_change_no_token(one_device):
    params = load("qwen3_vl")
    cfg = params.cfg
    requests = requests_of(cfg, 2, max_tokens=60)
    plain = run(make_engine("qwen3_vl", cfg, prefix_cache=False), params, requests)
    small = make_engine("qwen3_vl", cfg, max_num_batched_tokens=128)
    small.allocate()
    limit_pages(small, 6)
    found = run(small, params, requests)
    assert [made for made, *_ in found] == [made for made, *_ in plain]
    for a, b in zip(found, plain, strict=True):
        np.testing.assert_allclose(a[1], b[1], atol=2e-5)
    stats = small.take_stats()
    assert stats.n_preempted and stats.n_cached_tokens


@pytest.mark.parametrize(
    ("name", "stacked"),
    graded(
        [(name, stacked) for name in WHOLE for stacked in (False, True)],
        thorough=[("gemma3", False), ("gemma3", True), ("gemma4", True), ("gemma4_shared", False)],
    ),
)
def test_tokens_of_an_image_see_each_other(one_device, name, stacked):
    """Also of images in several rows, after cached prefixes, and after preemption.

    gemma4_shared has layers that read the KV of others, and inputs of each layer by token.
    """
    params = load(name, stacked=stacked)
    cfg = params.cfg
    requests = requests_of(cfg, 0, prompts=APART, max_tokens=60, ignore_stop=True)
    small = make_engine(name, cfg, max_num_batched_tokens=128)
    small.allocate()
    limit_pages(small, 6)
    results = run(small, params, requests)
    for expected, (_, logp, _) in zip(
        trainer_logps(cfg, params, requests, results), results, strict=True
    ):
        np.testing.assert_allclose(logp, expected, atol=1e-4)
    stats = small.take_stats()
    assert stats.n_preempted and stats.n_cached_tokens


def test_calls_of_prefill_divide_no_image():
    """Rows of a text of 70 tokens, an image of 80, text, an image of 6, text; buckets of 2 rows."""
    table, tokens = ImageTable(settings("gemma3", 32)), []
    one = request((70, "9", 3, "0", 50), 32, 0)
    table.submit(one, lambda numbered: tokens.append(numbered.tokens) or 0)
    chunk = PrefillChunk(tokens[0], 0, {}, ahead=table.ahead(tokens[0]))
    rows = split_rows([chunk], 64)
    assert [len(row.tokens) for row in rows] == [64, 6, 64, 19, 50 + 6]
    calls = [(len(own), bucket) for (own,), bucket in prefill_calls([rows], [2, 8])]
    assert calls == [(2, 2), (2, 2), (1, 2)]
    calls = [(len(own), bucket) for (own,), bucket in prefill_calls([rows[1:]], [2])]
    assert calls == [(1, 2), (2, 2), (1, 2)]
    calls = [(len(own), bucket) for (own,), bucket in prefill_calls([rows[2:4]], [1, 8])]
    assert calls == [(2, 8)]


@pytest.mark.parametrize(
    ("parts", "message"),
    [((5, "0", "1", 8), "no token between"), ((5, "9", 8), "has at most 64")],
)
def test_images_that_see_too_much_are_refused(parts, message):
    table = ImageTable(settings("gemma3", 32), 64)
    with pytest.raises(ValueError, match=message):
        table.submit(request(parts, 32, 0), lambda _: 0)


def test_images_share_pages_where_their_content_is_the_same(one_device):
    params = load("qwen3_vl")
    engine = make_engine("qwen3_vl", params.cfg)
    first, other = (request((20, i, 160), params.cfg.D, 2, max_tokens=1) for i in ("0", "3"))
    assert len(first.images[0].rows) == len(other.images[0].rows)
    cached = []
    for one in (first, first, other):
        run(engine, params, [one])
        cached.append(engine.take_stats().n_cached_tokens)
    assert cached == [0, 185, 20]


def test_the_placeholder_is_never_sampled_and_counts_in_logprobs(one_device):
    logits = np.random.default_rng(0).standard_normal((64, 40)).astype(np.float32)
    logits[:, 7] += 5
    uniform = jnp.linspace(0, 0.999, 64)
    temperature = np.where(np.arange(64) % 4, 1.0, 0.0).astype(np.float32)
    drawn = sample(jnp.asarray(logits), uniform, SamplingParams(temperature), never=7)
    assert 7 not in np.asarray(drawn.token)
    every = jax.nn.log_softmax(logits)
    rest = jax.nn.log_softmax(np.where(np.arange(40) == 7, -np.inf, logits))
    index = np.asarray(drawn.token)[:, None]
    for found, logp in ((drawn.logp, every), (drawn.behavior_logp, rest)):
        np.testing.assert_allclose(found, np.take_along_axis(logp, index, 1)[:, 0], atol=1e-5)


def test_positions_of_cut_sequences_are_the_first_ones(one_device):
    table = ImageTable(settings("qwen3_vl", 32))
    one = request((5, "0", 3, "1", "2", 4), 32, 2)
    tokens: list[np.ndarray] = []
    table.submit(one, lambda numbered: tokens.append(numbered.tokens) or 0)
    grids = [found.grid for found in one.images]
    every, delta = mrope_positions(one.tokens, grids, image_token=IMAGE, merge=2)
    assert table.settings.delta(one.images) == delta
    for n in range(1, len(one.tokens) + 1):
        found = table.axis_positions(tokens[0][:n])
        expected = every.T[:n]
        if found is None:
            assert n <= 5 and np.array_equal(expected, np.repeat(np.arange(n)[:, None], 3, 1))
        else:
            np.testing.assert_array_equal(found, expected)


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (lambda r: dataclasses.replace(r, images=()), "expand each image"),
        (lambda r: dataclasses.replace(r, tokens=r.tokens[:-9]), "expand each image"),
        (lambda r: dataclasses.replace(r, tokens=r.tokens[: 5 + 6]), "ends with an image"),
        (lambda r: dataclasses.replace(r, images=(image(0, 5, 16, 2),)), "16 features per token"),
    ],
)
def test_contradictions_are_refused(one_device, change, message):
    table, one = ImageTable(settings("qwen3_vl", 32)), request((5, "0", 8), 32, 2)
    with pytest.raises(ValueError, match=message):
        table.submit(change(one), lambda _: 0)


def test_rows_begin_again_once_no_sequence_has_an_image(monkeypatch):
    table, tokens = ImageTable(settings("qwen3_vl", 32)), []

    def submit(part, slot):
        table.submit(
            request((5, part, 8), 32, 2), lambda numbered: tokens.append(numbered.tokens) or slot
        )

    submit("0", 0)  # 6 tokens
    table.forget()
    submit("1", 1)
    assert tokens[1].min() == -8  # the rows 6 and 7: slot 0 has the others
    table.remove(0)
    table.remove(1)
    table.forget()
    submit("1", 0)
    assert tokens[2].min() == -2
    monkeypatch.setattr("jaxrl.engine.images.MAX_ROWS", 7)
    with pytest.raises(ValueError, match="no numbers for the tokens of more"):
        submit("0", 1)


def test_an_engine_without_images_refuses_them(llama):
    cfg, _ = llama
    engine = PagedEngine(cfg, SMALL, rules=DECODE, dtype=jnp.float32, max_len=256)
    with pytest.raises(ValueError, match="built without"):
        engine.submit(request((5, "0", 8), cfg.D, 0))
