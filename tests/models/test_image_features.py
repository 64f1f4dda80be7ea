"""Features of images in packed rows: parity with transformers, layouts, meshes, gradients.

Tests of jaxrl/models/image_features.py, jaxrl/models/layer_loop.py and the M-RoPE of
jaxrl/models/layers/rope.py, on the files of scripts/make_golden_images.py.
"""

import dataclasses
import functools
from pathlib import Path

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from jaxrl.data.images.mrope import mrope_positions
from jaxrl.data.packing import Packed, gather, pack
from jaxrl.models.config import AttentionConfig, DecoderConfig
from jaxrl.models.decoder import restrict
from jaxrl.models.files.hf_load import load_model
from jaxrl.models.image_features import ImageFeatures
from jaxrl.models.kv_cache import init_cache
from jaxrl.models.packed import forward_packed, forward_routed, pipelined_gradients
from jaxrl.models.paged import forward_mixed, forward_paged
from jaxrl.types import ImageInput, PlacedImage, TrainingSample
from sharding import DECODE, TRAIN, make_mesh, mesh_order, row_order
from sharding.rules import PIPELINE, RING, TENSOR, ULYSSES
from tests.marks import graded
from tests.models.smooth import smooth

FOLDER = Path(__file__).parent
FAMILIES = sorted(path.stem for path in (FOLDER / "golden_images").glob("*.npz"))
IMAGE = 60  # the placeholder
WHOLE = ("gemma3", "gemma4", "gemma4_shared")  # the tokens of an image see each other


@functools.cache
def golden(name: str) -> dict[str, np.ndarray]:
    return dict(np.load(FOLDER / "golden_images" / f"{name}.npz"))


def inputs(name: str) -> tuple:
    """(tokens, segments, positions, features, axis_positions) of the two rows of a golden file."""
    saved = golden(name)
    tokens, image = saved["tokens"], saved["tokens"] == IMAGE
    index = np.maximum(np.cumsum(image).reshape(tokens.shape) - 1, 0)
    deep = np.moveaxis(saved["deep"], 0, 1)[index] if len(saved["deep"]) else None
    features = ImageFeatures(saved["rows"][index], image, deep)
    axes = None if name in WHOLE else np.moveaxis(saved["positions"], 0, 2)
    places = np.broadcast_to(np.arange(tokens.shape[1], dtype=np.int32), tokens.shape)
    return tokens, np.ones_like(tokens), places, features, axes


def load(name: str, *, rules=TRAIN, stacked: bool = False):
    cfg, model = load_model(FOLDER / "golden" / name, rules=rules, stacked=stacked)
    return model if name not in WHOLE else restrict(model, with_whole_images(cfg))


def with_whole_images(cfg: DecoderConfig) -> DecoderConfig:
    """The model with use_bidirectional_attention="vision", which files of text models omit.

    In Gemma 4 it is a rule of the layers with a window only.
    """

    def of_layer(layer):
        mixer = layer.mixer
        assert isinstance(mixer, AttentionConfig)
        whole = cfg.family == "gemma3" or mixer.window > 0
        return dataclasses.replace(layer, mixer=dataclasses.replace(mixer, whole_images=whole))

    return dataclasses.replace(cfg, layers=tuple(map(of_layer, cfg.layers)))


@functools.partial(jax.jit, static_argnames="rules")
def logits(model, tokens, segments, positions, features, axes, rules=TRAIN):
    hidden = forward_packed(
        model, tokens, segments, positions, features=features, axis_positions=axes, rules=rules
    )
    return model.logits(hidden, rules)


@pytest.mark.parametrize(
    ("name", "stacked"),
    graded(
        [(name, stacked) for name in FAMILIES for stacked in (False, True)],
        default=[("qwen3_vl", True)],
        thorough=[
            *(("qwen2_5_vl", False), ("gemma3", True), ("qwen3_5", False), ("qwen3_vl", False)),
            *(("gemma4", True), ("gemma4_shared", False), ("gemma4_shared", True)),
        ],
    ),
)
def test_logits_equal_those_of_transformers(name, stacked, one_device):
    found = logits(load(name, stacked=stacked), *inputs(name))
    np.testing.assert_allclose(found[..., ::8], golden(name)["logits"], atol=1e-4, rtol=1e-4)


@pytest.mark.bitwise
@pytest.mark.parametrize("name", graded(["qwen3_5", "qwen2_5_vl"], default=["qwen2_5_vl"]))
def test_three_equal_positions_are_one_position(name, one_device):
    tokens, segments, positions, _, _ = inputs(name)
    model, axes = load(name), np.repeat(positions[..., None], 3, axis=-1)
    plain = logits(model, tokens, segments, positions, None, None)
    np.testing.assert_array_equal(logits(model, tokens, segments, positions, None, axes), plain)


def test_features_that_are_gathered_are_those_at_the_tokens(one_device):
    tokens, *_, features, _ = inputs("qwen3_vl")
    saved, image = golden("qwen3_vl"), tokens == IMAGE
    index = np.where(image, np.cumsum(image).reshape(tokens.shape) - 1, -1).astype(np.int32)
    deep = jnp.moveaxis(jnp.asarray(saved["deep"]), 0, 1)
    found = ImageFeatures.gathered(jnp.asarray(saved["rows"]), jnp.asarray(index), deep, TRAIN)
    x = jnp.zeros((*tokens.shape, 32))
    dense = jax.tree.map(jnp.asarray, features)
    np.testing.assert_array_equal(found.insert(x, TRAIN), dense.insert(x, TRAIN))
    sums = [one.deep_sums(jnp.float32, TRAIN) for one in (found, dense)]
    np.testing.assert_array_equal(sums[0], sums[1])


def loss(model, batch, rules):
    """Weighted sum of logits, and gradients of the model, of the features and the deep sums."""
    tokens, segments, positions, features, axes = batch

    def total(model, rows, deep):
        given = dataclasses.replace(features, rows=rows, deep=deep)
        out = logits(model, tokens, segments, positions, given, axes, rules=rules)
        return jnp.sum(out * jnp.cos(jnp.arange(out.shape[-1])))

    return jax.value_and_grad(total, argnums=(0, 1, 2))(model, features.rows, features.deep)


def on_mesh(name: str, sizes: dict, *, rules=TRAIN, stacked=False):
    """`loss` on a mesh, on the host."""
    *per_token, features, axes = inputs(name)
    order = functools.partial(mesh_order, rules=rules)
    with jax.set_mesh(make_mesh(**sizes)):
        features = jax.tree.map(order, features)
        batch = (*map(order, per_token), features, None if axes is None else order(axes))
        batch = jax.tree.map(lambda a: jax.device_put(a, jax.P()), batch)
        model = smooth(load(name, rules=rules, stacked=stacked))
        found = jax.device_get(jax.jit(loss, static_argnames="rules")(model, batch, rules))
        value, (weights, *of_tokens) = found
        order = functools.partial(row_order, rules=rules)
        return value, (weights, *jax.tree.map(order, of_tokens))


@functools.cache
def alone(name: str, stacked: bool):
    return on_mesh(name, {}, stacked=stacked)


@pytest.mark.parametrize(
    ("name", "sizes", "rules", "stacked"),
    graded(
        [
            ("qwen3_vl", dict(fsdp=2, tensor=2), TENSOR, False),
            ("qwen3_vl", dict(fsdp=2, sequence=2), ULYSSES, False),
            ("qwen3_vl", dict(fsdp=2, tensor=2), TENSOR, True),
            ("gemma3", dict(fsdp=2, sequence=2), ULYSSES, True),
            ("gemma3", dict(fsdp=2, sequence=2), RING, True),
            ("gemma4_shared", dict(fsdp=2, sequence=2), ULYSSES, True),
            ("gemma4_shared", dict(fsdp=2, sequence=2), RING, True),
            ("gemma4_shared", dict(fsdp=2, tensor=2), TENSOR, True),
            ("gemma4", dict(fsdp=2, sequence=2), RING, False),
            ("qwen3_5", dict(fsdp=2, tensor=2), TENSOR, False),
            ("qwen2_5_vl", dict(stage=2), PIPELINE, True),
        ],
        thorough=[
            ("qwen3_vl", dict(fsdp=2, sequence=2), ULYSSES, False),
            ("qwen3_vl", dict(fsdp=2, tensor=2), TENSOR, False),
            ("gemma3", dict(fsdp=2, sequence=2), RING, True),
            ("gemma4_shared", dict(fsdp=2, sequence=2), RING, True),
            ("qwen2_5_vl", dict(stage=2), PIPELINE, True),
        ],
    ),
)
def test_a_mesh_gives_the_numbers_of_one_device(name, sizes, rules, stacked):
    """With sequence parallelism an image begins on one device and ends on another."""
    found, want = on_mesh(name, sizes, rules=rules, stacked=stacked), alone(name, stacked)
    np.testing.assert_allclose(found[0], want[0], rtol=1e-5)
    for a, b in zip(jax.tree.leaves(found[1]), jax.tree.leaves(want[1]), strict=True):
        np.testing.assert_allclose(a, b, rtol=1e-5, atol=1e-5 * np.abs(b).max())


@pytest.mark.parametrize("name", graded(["qwen2_5_vl", "gemma4"], thorough=["qwen2_5_vl"]))
def test_both_orders_of_a_pipeline_give_the_gradients_of_one_device(name):
    """With deepstack features after the first layer, and images whose tokens see each other."""
    tokens, segments, positions, features, axes = inputs(name)
    if name not in WHOLE:
        deep = np.random.default_rng(0).normal(size=(*tokens.shape, 1, 32)).astype(np.float32)
        features = dataclasses.replace(features, deep=deep)
    batch = tokens, segments, positions, features, axes

    def objective(model, hidden, rules):
        out = model.logits(hidden, rules)
        return jnp.sum(out * jnp.cos(jnp.arange(out.shape[-1])))

    def derived(model, tokens, segments, positions, features, axes, rules):
        def total(model):
            hidden = forward_packed(
                *(model, tokens, segments, positions),
                features=features,
                axis_positions=axes,
                rules=rules,
            )
            return objective(model, hidden, rules)

        return jax.value_and_grad(total)(model)

    def by_1f1b(model, tokens, segments, positions, features, axes, rules):
        def of_row(model, hidden, _):
            return (objective(model, hidden, rules),) * 2

        grads, value, _ = pipelined_gradients(
            *(model, of_row, tokens, segments, positions, tokens),
            features=features,
            axis_positions=axes,
            zero_sums=jnp.zeros(()),
            load_gradient=None,
            rules=rules,
            remat="full",
        )
        return value, grads

    def run(gradients, rules, **sizes):
        with jax.set_mesh(make_mesh(**sizes)):
            given = jax.tree.map(lambda a: jax.device_put(a, jax.P()), batch)
            model = load(name, rules=rules, stacked=True)
            found = jax.jit(functools.partial(gradients, rules=rules))(model, *given)
            value, grads = jax.device_get(found)
            return value, {k: g for k, g in jax.tree.leaves_with_path(grads)}

    value, want = run(derived, TRAIN)
    for gradients in (derived, by_1f1b):
        found, grads = run(gradients, PIPELINE, stage=2)
        np.testing.assert_allclose(found, value, rtol=1e-5)
        assert len(grads) > 8
        for path, g in grads.items():
            bound = 1e-5 * np.abs(want[path]).max()
            np.testing.assert_allclose(g, want[path], rtol=1e-5, atol=bound)


def test_deepstack_features_of_a_later_stage_are_refused():
    tokens, segments, positions, features, axes = inputs("qwen2_5_vl")
    features = dataclasses.replace(features, deep=np.zeros((*tokens.shape, 2, 32), np.float32))
    with jax.set_mesh(make_mesh(stage=2)):
        model = load("qwen2_5_vl", rules=PIPELINE, stacked=True)
        batch = (tokens, segments, positions, features, axes)
        batch = jax.tree.map(lambda a: jax.device_put(a, jax.P()), batch)
        with pytest.raises(NotImplementedError, match=r"set config\.mesh\.stage to at most 1"):
            logits(model, *batch, rules=PIPELINE)


def samples(name: str) -> list[TrainingSample]:
    """Two samples of a prompt with an image, and one of the same text with another image."""
    draw = np.random.default_rng(0)
    text = draw.integers(3, IMAGE, 11)
    prompt = np.concatenate([text[:5], [IMAGE] * 6, text[5:]]).astype(np.int32)
    found = []
    for digest, n in (("a", 5), ("a", 4), ("b", 6)):
        response = draw.integers(3, IMAGE, n).astype(np.int32)
        tokens = np.concatenate([prompt, response])
        axes, _ = mrope_positions(tokens, [(1, 4, 6)], image_token=IMAGE, merge=2)
        image = ImageInput((1, 4, 6), 6, digest, load=lambda: np.zeros(0))
        found.append(
            TrainingSample(
                prompt_tokens=prompt,
                tokens=response,
                loss_mask=np.ones(n, bool),
                images=(PlacedImage(5, image),),
                axis_positions=None if name in WHOLE else axes,
            )
        )
    return found


@functools.partial(jax.jit, static_argnames="digests")
def scores(model, table, deep, batch, digests):
    """(score [B, T] of each target, gradient of their sum in the loss by model, table and deep)"""

    def total(model, table, deep):
        rows = jnp.concatenate([table[digest] for digest in digests])
        extra = None if deep is None else jnp.concatenate([deep[d] for d in digests])
        hidden, _ = forward_routed(
            model,
            batch.tokens,
            batch.segments,
            batch.positions,
            until=batch.until,
            features=ImageFeatures.gathered(rows, batch.images, extra, TRAIN),
            axis_positions=batch.axis_positions,
            rules=TRAIN,
            segment_align=4,
        )
        out = model.logits(hidden, TRAIN)
        chosen = jax.nn.one_hot(batch.targets, out.shape[-1], dtype=bool)
        found = jnp.sum(jax.nn.log_softmax(out), axis=-1, where=chosen)
        return jnp.sum(found * batch.mask), found

    grads, found = jax.grad(total, argnums=(0, 1, 2), has_aux=True)(model, table, deep)
    return found, grads


def summed(model, table, deep, packed: list[Packed]):
    """(scores of each sample, sums of gradients over the micro-batches)"""
    found, total = [], None
    for micro in packed:
        images = micro.batch.images
        batch = dataclasses.replace(micro.batch, images=images.index)
        digests = tuple(images.first_rows)
        score, grads = jax.device_get(scores(model, table, deep, batch, digests))
        found.append(score)
        total = grads if total is None else jax.tree.map(np.add, total, grads)
    return gather(found, packed), jax.tree.leaves(total)


@pytest.mark.parametrize("name", graded(FAMILIES, thorough=["qwen3_vl", "gemma3", "gemma4_shared"]))
def test_packed_samples_give_the_numbers_of_separate_rows(name, one_device):
    """One row with a shared prefix and several micro-batches give the same scores and gradients."""
    model, draw = smooth(load(name, stacked=name in WHOLE)), np.random.default_rng(1)
    table = {d: draw.normal(size=(6, 32)).astype(np.float32) for d in "ab"}
    deep = {d: draw.normal(size=(6, 2, 32)).astype(np.float32) for d in "ab"}
    deep = deep if name == "qwen3_vl" else None
    one = functools.partial(pack, samples(name), align=4, n_ranks=1)
    shared = one(shapes=((1, 64),), share_prefixes=True)
    assert len(shared) == 1 and np.bincount(shared[0].batch.copies[0])[2:].tolist() == [12, 4]
    want, want_grads = summed(model, table, deep, one(shapes=((1, 24),)))
    found, grads = summed(model, table, deep, shared)
    for a, b in zip(found, want, strict=True):
        np.testing.assert_allclose(a, b, rtol=1e-5, atol=1e-5)
    for a, b in zip(grads, want_grads, strict=True):
        np.testing.assert_allclose(a, b, rtol=1e-5, atol=1e-5 * np.abs(b).max())


@pytest.mark.parametrize(
    ("name", "changes", "message"),
    [
        ("qwen3_vl", dict(axes=None), "have positions by axis"),
        ("gemma3", dict(axes=np.zeros((2, 28, 3), np.int32)), "has no mrope_section"),
    ],
)
def test_what_a_model_does_not_compute_is_refused(name, changes, message, one_device):
    names = ("tokens", "segments", "positions", "features", "axes")
    given = dict(zip(names, inputs(name), strict=True)) | changes
    with pytest.raises((ValueError, NotImplementedError), match=message):
        logits(load(name, stacked=True), **given)


@pytest.mark.thorough
def test_chunks_of_prefill_and_decode_give_the_numbers_of_packed_rows(one_device):
    """A chunk divides an image; decode after images continues from their positions."""
    tokens, segments, positions, features, axes = inputs("qwen3_vl")
    model, n = load("qwen3_vl"), tokens.shape[1]
    packed = jax.jit(functools.partial(forward_packed, rules=TRAIN))
    want = packed(model, tokens, segments, positions, features=features, axis_positions=axes)
    want = np.asarray(want)
    how = dict(rules=DECODE, implementation="reference")
    paged = jax.jit(functools.partial(forward_paged, **how))
    mixed = jax.jit(functools.partial(forward_mixed, **how))
    cache = init_cache(model.cfg, 16, 4, jnp.float32, DECODE)
    tables = [
        {0: jnp.array([pages])} for pages in ([3, 9, 1, 14, 7, 2, 12], [0, 4, 5, 6, 8, 10, 11])
    ]
    delta = int(axes[0, -1, 0]) - (n - 1)
    close = functools.partial(np.testing.assert_allclose, rtol=1e-4, atol=1e-5)

    def prefill(row: int, at: slice, cache):
        given = jax.tree.map(lambda a: a[row : row + 1, at], features)
        rows = (a[row : row + 1, at] for a in (tokens, positions, axes))
        token, position, axis = rows
        hidden, cache = paged(
            model, token, position, cache, tables[row], features=given, rotary=axis
        )
        close(hidden[0], want[row, at])
        return cache

    for start in (0, 8, 16):
        cache = prefill(0, slice(start, start + 8), cache)
    # The second row's first 24 tokens in three rows of 8, with a decode step of the first row.
    pieces = [a[1, :24].reshape(3, 8, *a.shape[2:]) for a in (tokens, positions, axes)]
    given = jax.tree.map(lambda a: a[1, :24].reshape(3, 8, *a.shape[2:]), features)
    hidden, cache, _ = mixed(
        model,
        *pieces[:2],
        {0: jnp.repeat(tables[1][0], 3, axis=0)},
        tokens[0, 24:25],
        positions[0, 24:25],
        tables[0],
        cache,
        features=given,
        prefill_rotary=pieces[2],
        rotary=positions[0, 24:25] + delta,
    )
    close(hidden[0, 0], want[0, 24])
    cache = prefill(1, slice(24, 28), cache)
    for i in range(25, 28):
        at = positions[:1, i : i + 1]
        hidden, cache = paged(model, tokens[:1, i : i + 1], at, cache, tables[0], rotary=at + delta)
        close(hidden[0, 0], want[0, i])


def test_pages_without_the_last_visible_positions_are_refused(one_device):
    tokens, _, positions, features, _ = inputs("gemma3")
    tokens, positions = jnp.asarray(tokens), jnp.asarray(positions)
    model = load("gemma3", stacked=True)
    cache = init_cache(model.cfg, 4, 4, jnp.float32, DECODE)
    with pytest.raises(ValueError, match="see each other; pass the last position"):
        tables = {0: jnp.zeros((2, 1), jnp.int32)}
        forward_paged(model, tokens, positions, cache, tables, features=features, rules=DECODE)
