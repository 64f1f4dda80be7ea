"""Attention over rows whose segments share prefixes equals attention over separate sequences.

Tests of jaxrl/kernels/visibility.py and of its use in every attention kernel.
"""

import dataclasses
import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from jaxrl.kernels.attention import attention
from jaxrl.kernels.attention.blockwise import attention_blockwise
from jaxrl.kernels.attention.splash import attention_splash
from jaxrl.kernels.attention.triton import attention_triton
from jaxrl.kernels.attention_spec import AttentionSpec
from jaxrl.kernels.key_ranges import KeyRanges
from jaxrl.kernels.ring_attention import ring_attention
from jaxrl.kernels.ring_attention.splash import ring_splash
from jaxrl.kernels.ring_attention.triton import ring_triton
from jaxrl.kernels.visibility import (
    Queries,
    Visibility,
    oldest_position,
    seen_blocks,
    separate_segments,
    visible_pairs,
    visits,
)
from sharding import RING, ULYSSES, make_mesh, mesh_order, row_order

# (tokens, first place in the row) of every part of a sequence, as a path in the tree of row 0: a
# prefix of 70 tokens, a turn of 30 after it that two branches share, a branch after 20 tokens of
# the second one, and a branch after the prefix.
PATHS = [
    [(70, 0), (30, 70), (40, 100)],
    [(70, 0), (30, 70), (64, 140)],
    [(70, 0), (30, 70), (20, 140), (50, 204)],  # three ranges of places
    [(70, 0), (90, 254)],
    [(100, 350)],  # another sequence
]
T = 576  # five blocks of splash, of 128 tokens


def tree_row():
    """(segments, visibility) of the row with PATHS, which has two more tokens of padding runs."""
    segments, until = np.zeros((1, T), np.int32), np.full((1, T), -1, np.int32)
    positions = np.zeros((1, T), np.int32)
    for number, path in enumerate(PATHS, 1):
        at = np.concatenate([first + np.arange(n) for n, first in path])
        positions[0, at] = np.arange(len(at))
        new = at[segments[0, at] == 0]
        segments[0, new] = number
        until[0, at] = at[-1]  # later paths overwrite shared places
    return segments, Visibility(until, positions)


def problem(N=4, K=2, H=16):
    keys = jax.random.split(jax.random.key(0), 4)
    shapes = [(1, T, heads, H) for heads in (N, K, K, N)]
    arrays = [np.asarray(jax.random.normal(key, s)) for key, s in zip(keys, shapes, strict=True)]
    return arrays, *tree_row()


def value_and_grad(attend, arrays, segments, visibility, rules=None, **options):
    """Output and the gradients of its weighted sum into q, k, v; only live tokens count."""
    spec = AttentionSpec(0.25, options.pop("softcap", None), **({"rules": rules} if rules else {}))

    def loss(q, k, v, weight, segments, visibility):
        shared = {} if visibility is None else {"visibility": visibility}
        out = attend(q, k, v, spec=spec, segments=segments, **shared, **options)
        return jnp.sum((out * weight).astype(jnp.float32)), out

    grad = jax.jit(jax.value_and_grad(loss, argnums=(0, 1, 2), has_aux=True))
    (_, out), grads = grad(*arrays, segments, visibility)
    return out, *grads


@functools.cache
def alone(window=0, softcap=None):
    """Output and gradients of every path as a separate row of the reference, summed by place."""
    arrays = problem()[0]
    reference = functools.partial(attention, implementation="reference")
    total, seen = None, np.zeros(T, bool)
    for path in PATHS:
        at = np.concatenate([first + np.arange(n) for n, first in path])
        n, padding = len(at), ((0, 0), (0, 204 - len(at)), (0, 0), (0, 0))
        q, k, v, weight = (np.pad(a[:, at], padding) for a in arrays)
        weight[:, :n] *= ~seen[at][:, None, None]  # a shared query counts once
        ones = np.pad(np.ones((1, n), np.int32), padding[:2])
        options = dict(window=window, softcap=softcap)
        with jax.set_mesh(make_mesh()):
            found = value_and_grad(reference, [q, k, v, weight], ones, None, **options)
        found = [np.asarray(x)[:, :n] for x in found]
        if total is None:
            total = [np.zeros_like(a) for a in (arrays[0], *arrays[:3])]
        new = at[~seen[at]]
        total[0][:, new] = found[0][:, ~seen[at]]
        for sums, one in zip(total[1:], found[1:], strict=True):
            sums[:, at] += one
        seen[at] = True
    return total


def assert_close(got, want, tol=1e-5):
    for a, b in zip(got, want, strict=True):
        np.testing.assert_allclose(np.asarray(a), b, rtol=tol, atol=tol)


KERNELS = {
    "reference": functools.partial(attention, implementation="reference"),
    "blockwise": functools.partial(attention, implementation="blockwise"),
    "triton": functools.partial(attention_triton, interpret=True),
    "triton in threes": functools.partial(attention_triton, interpret=True, block=192),
    "splash": functools.partial(attention_splash, interpret=True),
}
WINDOW = dict(window=jnp.int32(50), softcap=3.0)


@pytest.mark.parametrize(
    ("kernel", "windowed"),
    [
        ("blockwise", True),
        pytest.param("blockwise", False, marks=pytest.mark.slow),
        ("splash", True),
        pytest.param("splash", False, marks=pytest.mark.thorough),
        pytest.param("reference", True, marks=pytest.mark.thorough),
        pytest.param("triton in threes", True, marks=pytest.mark.thorough),
        *(pytest.param(k, False, marks=pytest.mark.slow) for k in ("reference", "triton")),
    ],
)
def test_a_tree_of_prefixes_gives_the_numbers_of_separate_sequences(one_device, kernel, windowed):
    options = WINDOW if windowed else dict(window=0)
    arrays, segments, visibility = problem()
    arrays = [*arrays[:3], arrays[3] * (segments > 0)[:, :, None, None]]
    got = value_and_grad(KERNELS[kernel], arrays, segments, visibility, **options)
    assert_close(got, alone(50, 3.0) if windowed else alone())


@pytest.mark.parametrize(
    ("attend", "rules", "mesh"),
    [
        pytest.param(ring_attention, RING, dict(sequence=4), marks=pytest.mark.thorough),
        pytest.param(ring_attention, RING, dict(sequence=2, tensor=2), marks=pytest.mark.slow),
        pytest.param(
            functools.partial(ring_splash, interpret=True),
            RING,
            dict(sequence=2),
            marks=pytest.mark.thorough,
        ),
        pytest.param(
            functools.partial(ring_triton, interpret=True),
            dataclasses.replace(RING, ulysses=2),
            dict(sequence=4),
            marks=pytest.mark.thorough,
        ),
        pytest.param(attention, ULYSSES, dict(sequence=2), marks=pytest.mark.slow),
        pytest.param(
            functools.partial(ring_attention, implementation="reference"),
            RING,
            dict(sequence=2),
            marks=pytest.mark.slow,
        ),
    ],
    ids=["ring 4", "ring 2 x tensor 2", "splash", "triton", "ulysses", "reference"],
)
def test_rows_with_a_tree_may_be_sharded_over_devices(attend, rules, mesh):
    arrays, segments, visibility = problem()
    arrays = [*arrays[:3], arrays[3] * (segments > 0)[:, :, None, None]]
    got = on_devices(attend, rules, mesh, arrays, segments, visibility)
    assert_close(got, alone(50, 3.0))


def on_devices(attend, rules, mesh, arrays, segments, visibility):
    """`value_and_grad` with the WINDOW on a mesh, in the order of the row."""
    with jax.set_mesh(make_mesh(**mesh)):
        names = ("heads", "kv_heads", "kv_heads", "heads")
        placed = [
            jax.device_put(in_order(mesh_order, a, rules), rules.spec("batch", "time", name, None))
            for a, name in zip(arrays, names, strict=True)
        ]
        rows = jax.tree.map(
            lambda a: jax.device_put(mesh_order(a, rules), rules.spec("batch", "time")),
            (segments, visibility),
        )
        found = value_and_grad(
            attend, placed, *rows, rules=rules, window=jnp.int32(50), softcap=3.0
        )
        return [in_order(row_order, np.asarray(x), rules) for x in found]


def in_order(order, array, rules):
    """Applies mesh_order or row_order, which take [B, T]."""
    flat = array.reshape(*array.shape[:2], -1)
    return np.stack([order(flat[..., i], rules) for i in range(flat.shape[-1])], -1).reshape(
        array.shape
    )


def test_blocks_that_no_query_sees_are_not_visited():
    # Three segments of a block: a prefix, and two branches that share it.
    segments = jnp.repeat(jnp.array([[1, 2, 3]]), 64, axis=1)
    until = jnp.repeat(jnp.array([[191, 127, 191]], jnp.int32), 64, axis=1)
    positions = jnp.concatenate([jnp.arange(64), *[64 + jnp.arange(64)] * 2])[None]

    for window, want in ((0, [[1, 0, 0], [1, 1, 0], [1, 0, 1]]), (1, np.eye(3))):
        queries = Queries.of(segments, Visibility(until, positions), window)
        blocks = jax.tree.map(lambda a: a.reshape(3, 64), queries)
        seen = seen_blocks(blocks, Visibility(until, positions), block=64)
        np.testing.assert_array_equal(seen[0], np.array(want) > 0)
    order, count = visits(jnp.array([[True, False, True]]))
    assert order[0, : count[0]].tolist() == [0, 2]


@pytest.mark.parametrize("window", [0, 50])
def test_ranges_by_level_are_the_visible_keys(window):
    segments, visibility = jax.tree.map(jnp.asarray, tree_row())
    places = jnp.arange(T)
    oldest = oldest_position(visibility.positions, window)
    want = visible_pairs(places, oldest[0], places, visibility.until[0], visibility.positions[0])
    ranges, levels = KeyRanges.of(segments, window, visibility), []
    while True:
        first, last = (np.asarray(a).T for a in (ranges.first, ranges.last))
        levels.append(np.asarray((first <= places) & (places <= last)))
        if not jnp.any(ranges.tree.deep):
            break
        ranges = ranges.next_level()
    want, live = np.asarray(want), np.asarray(segments[0] > 0)
    assert len(levels) == 3
    np.testing.assert_array_equal(sum(x.astype(int) for x in levels)[live], want[live])
    np.testing.assert_array_equal(levels[0][~live], np.eye(T, dtype=bool)[~live])


def test_ranges_of_three_samples_of_a_prompt_by_hand():
    # A prompt of 3 tokens, responses of 2, 1 and 2; a padding token, and a separate segment.
    segments = jnp.array([[1, 1, 1, 1, 1, 2, 3, 3, 0, 4]])
    until = jnp.array([[7, 7, 7, 4, 4, 5, 7, 7, -1, 9]])
    positions = jnp.array([[0, 1, 2, 3, 4, 3, 3, 4, 0, 0]])
    prompts = KeyRanges.of(segments, 0, Visibility(until, positions))
    np.testing.assert_array_equal(prompts.first, [[0, 0, 0, 0, 0, 0, 0, 0, 8, 9]])
    np.testing.assert_array_equal(prompts.last, [[0, 1, 2, 3, 4, 2, 2, 2, 8, 9]])
    responses = prompts.next_level()
    some = np.asarray(responses.first <= responses.last)[0]
    assert some.nonzero()[0].tolist() == [5, 6, 7]
    assert responses.first[0, some].tolist() == [5, 6, 6]
    assert responses.last[0, some].tolist() == [5, 6, 7]
    assert not jnp.any(responses.tree.deep)


def test_separate_segments_end_where_their_numbers_change():
    segments = jnp.array([[1, 1, 0, 2, 3, 3, 0]])
    np.testing.assert_array_equal(separate_segments(segments).until, [[1, 1, -1, 3, 5, 5, -1]])


@pytest.mark.bitwise
def test_a_shared_prefix_of_whole_blocks_changes_no_bit(one_device):
    """A branch after 64 tokens of another sequence has the bits of the whole sequence alone."""
    arrays, _, _ = problem(6, 2, 32)
    q, k, v = (jnp.asarray(a) for a in arrays[:3])
    attend = jax.jit(functools.partial(attention_blockwise, spec=AttentionSpec(0.2), window=0))
    segments = jnp.repeat(jnp.array([[1, 2]]), 128, axis=1)
    places = jnp.arange(256, dtype=jnp.int32)[None]
    until = jnp.where(places < 64, 255, jnp.where(places < 128, 127, 255))
    positions = jnp.where(places < 128, places, places - 64)
    rows = [x[:, :256] for x in (q, k, v)]
    shared = attend(*rows, segments=segments, visibility=Visibility(until, positions))
    own = [jnp.concatenate([x[:, :64], x[:, 128:]], axis=1) for x in rows]
    separate = attend(*own, segments=jnp.ones((1, 192), jnp.int32))
    np.testing.assert_array_equal(shared[:, 128:], separate[:, 64:])


def test_cudnn_rejects_shared_prefixes(one_device, monkeypatch):
    monkeypatch.setattr("jaxrl.kernels.choice.target_platform", lambda: "gpu")
    q = jnp.zeros((1, 128, 2, 64), jnp.bfloat16)
    rows = jnp.ones((1, 128), jnp.int32)
    with pytest.raises(NotImplementedError, match="'cudnn' does not support shared prefixes"):
        attention(
            q,
            q,
            q,
            spec=AttentionSpec(1.0),
            segments=rows,
            window=0,
            visibility=separate_segments(rows),
            implementation="cudnn",
        )


# Images of the row with PATHS (first place, tokens): in the shared prefix, over several blocks of
# every kernel, in two branches, and at the end of a sequence.
IMAGES = [(5, 60), (105, 30), (205, 40), (260, 70), (351, 99)]


def image_row():
    """`tree_row` whose images see each other, and the visible keys of a dense mask."""
    segments, visibility = tree_row()
    places = np.arange(T)
    ahead, image = places.copy(), np.full(T, -1)
    for number, (first, n) in enumerate(IMAGES):
        ahead[first : first + n], image[first : first + n] = first + n - 1, number
    until, positions = visibility.until[0], visibility.positions[0]
    causal = (places <= places[:, None]) & (places[:, None] <= until)
    same = (image == image[:, None]) & (image >= 0)
    return segments, dataclasses.replace(visibility, ahead=ahead[None]), causal | same, positions


@functools.cache
def dense_images():
    """Output and gradients of softmax(cap(q kᵀ / 4)) v over the dense mask, with the WINDOW."""
    segments, _, visible, positions = image_row()
    visible &= positions[:, None] - positions < 50
    visible[segments[0] == 0] = True

    def attend(q, k, v, *, spec, segments, **_):
        k, v = (jnp.repeat(a, q.shape[2] // a.shape[2], axis=2) for a in (k, v))
        scores = 3.0 * jnp.tanh(jnp.einsum("BTNH,BSNH->BNTS", q, k) * spec.scale / 3.0)
        probs = jax.nn.softmax(jnp.where(visible, scores, -1e30))
        return jnp.einsum("BNTS,BSNH->BTNH", probs, v) * (segments > 0)[:, :, None, None]

    with jax.set_mesh(make_mesh()):
        found = value_and_grad(attend, live_problem(), segments, None)
    return [np.asarray(x) for x in found]


def live_problem():
    """The arrays of `problem`; padding has no weight."""
    arrays, segments, _ = problem()
    return [*arrays[:3], arrays[3] * (segments > 0)[:, :, None, None]]


@pytest.mark.parametrize(
    "kernel",
    [
        "blockwise",
        pytest.param("reference", marks=pytest.mark.thorough),
        pytest.param("splash", marks=pytest.mark.thorough),
        pytest.param("triton", marks=pytest.mark.thorough),
        pytest.param("triton in threes", marks=pytest.mark.thorough),
    ],
)
def test_the_tokens_of_an_image_see_each_other(one_device, kernel):
    segments, visibility, *_ = image_row()
    got = value_and_grad(KERNELS[kernel], live_problem(), segments, visibility, **WINDOW)
    assert_close(got, dense_images())


def test_blocks_with_later_keys_of_an_image_are_visited():
    segments, places = jnp.ones((1, 192), jnp.int32), jnp.arange(192, dtype=jnp.int32)[None]
    ahead = jnp.where((places >= 60) & (places < 130), 129, places)
    visibility = dataclasses.replace(separate_segments(segments), ahead=ahead)
    blocks = jax.tree.map(lambda a: a.reshape(3, 64), Queries.of(segments, visibility, 0))
    seen = seen_blocks(blocks, visibility, block=64)
    np.testing.assert_array_equal(seen[0], np.ones((3, 3), bool))


@pytest.mark.thorough
@pytest.mark.parametrize(
    ("attend", "rules", "sizes"),
    [
        (ring_attention, RING, dict(sequence=2)),
        (functools.partial(ring_splash, interpret=True), RING, dict(sequence=2)),
        (functools.partial(ring_triton, interpret=True), RING, dict(sequence=2)),
        (attention, ULYSSES, dict(sequence=2)),
    ],
    ids=["ring", "splash", "triton", "ulysses"],
)
def test_images_may_be_sharded_over_devices(attend, rules, sizes):
    segments, visibility, *_ = image_row()
    found = on_devices(attend, rules, sizes, live_problem(), segments, visibility)
    assert_close(found, dense_images())


def test_cudnn_rejects_images_that_see_each_other(one_device, monkeypatch):
    monkeypatch.setattr("jaxrl.kernels.choice.target_platform", lambda: "gpu")
    q, rows = jnp.zeros((1, 128, 2, 64), jnp.bfloat16), jnp.ones((1, 128), jnp.int32)
    visibility = dataclasses.replace(separate_segments(rows), ahead=rows)
    with pytest.raises(NotImplementedError, match="'cudnn' does not support images whose tokens"):
        attention(
            q,
            q,
            q,
            spec=AttentionSpec(0.125),
            segments=rows,
            window=0,
            visibility=visibility,
            implementation="cudnn",
        )
