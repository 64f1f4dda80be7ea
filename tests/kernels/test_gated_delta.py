"""Gated DeltaNet (jaxrl/kernels/gated_delta): chunks, convolution and sharded rows, against tokens
one by one."""

import dataclasses
import functools
import re
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from jaxrl.kernels.gated_delta import causal_conv, gated_delta, gated_delta_step
from jaxrl.kernels.gated_delta.chunk_states import product
from jaxrl.kernels.gated_delta.rows import from_whole_rows, to_whole_rows, whole_row_rules
from jaxrl.kernels.gated_delta.unit_lower import unit_lower_inverse
from jaxrl.kernels.visibility import Visibility
from sharding import DECODE, RING, TRAIN, ULYSSES, make_mesh, mesh_order, row_order, unshuffle

K, N, D, V = 1, 2, 8, 4  # key heads, value heads, widths
# Lengths of the segments of a row, negative ones of padding: whole chunks, segments of one token,
# segments that cross chunks and end with them, padding first, between and last.
ROWS = [[150], [-3, 1, 1, 61, -2, 70, -12], [64, 64, 1, 20], [-70, 80]]
T = 150


def segments_of(rows, T=T):
    segments = np.zeros((len(rows), T), np.int32)
    for row, lengths in zip(segments, rows, strict=True):
        place = 0
        for number, length in enumerate(lengths, 1):
            row[place : place + abs(length)] = number if length > 0 else 0
            place += abs(length)
    return segments


def problem(B, T, *, heads=(K, N), dtype: Any = np.float32, decay=0.3, seed=0):
    """q, k, v, g, beta, and a state, on the host."""
    random = np.random.default_rng(seed)
    K, N = heads
    q, k, v, g, beta, state = (
        random.standard_normal(shape)
        for shape in [
            (B, T, K, D),
            (B, T, K, D),
            (B, T, N, V),
            (B, T, N),
            (B, T, N),
            (B, N, D, V),
        ]
    )
    q, k = (a / np.linalg.norm(a, axis=-1, keepdims=True) for a in (q, k))
    g, beta = -decay * np.abs(g), 1 / (1 + np.exp(-beta))
    return [a.astype(dtype) for a in (q, k, v, g, beta, state)]


def values_and_gradients(implementation, arrays, segments, visibility=None, **options):
    """Outputs, final states, and the gradients of a weighted sum of both."""

    def loss(q, k, v, g, beta, state):
        out, final = gated_delta(
            q,
            k,
            v,
            g,
            beta,
            state=state,
            segments=jnp.asarray(segments),
            visibility=visibility,
            rules=TRAIN,
            implementation=implementation,
            **options,
        )
        weighted = sum(
            jnp.sum(a * jnp.sin(jnp.arange(a.size)).reshape(a.shape)) for a in (out, final)
        )
        return weighted, (out, final)

    numbers = tuple(range(6))
    with jax.set_mesh(make_mesh()):
        grad = jax.jit(jax.value_and_grad(loss, numbers, has_aux=True))
        (_, values), gradients = grad(*(jnp.asarray(a) for a in arrays))
    return *values, *gradients


def assert_close(got, want, tol=1e-5):
    for a, b in zip(got, want, strict=True):
        np.testing.assert_allclose(a, b, rtol=tol, atol=tol * max(1.0, np.abs(b).max()))


def recurrence(state, q, k, v, g, beta):
    """(outputs [T, V], final state [D, V]) of one head, in numpy: the equation as it is written."""
    outputs = []
    for t in range(len(q)):
        state = np.exp(g[t]) * (state - beta[t] * np.outer(k[t], k[t] @ state))
        state = state + beta[t] * np.outer(k[t], v[t])
        outputs.append(state.T @ q[t] * len(q[t]) ** -0.5)
    return np.array(outputs), state


def test_the_reference_is_the_equation_of_each_segment():
    q, k, v, g, beta, state = problem(1, 7, dtype=np.float64)
    segments = segments_of([[3, -1, 2, -1]], 7)
    with jax.set_mesh(make_mesh()):
        arrays = [jnp.asarray(a, jnp.float32) for a in (q, k, v, g, beta)]
        how = dict(rules=TRAIN, implementation="reference")
        out, final = jax.jit(functools.partial(gated_delta, **how))(
            *arrays, segments=jnp.asarray(segments), state=jnp.asarray(state, jnp.float32)
        )
    for n in range(N):
        head = q[0, :, 0], k[0, :, 0], v[0, :, n], g[0, :, n], beta[0, :, n]
        first, _ = recurrence(state[0, n], *(a[:3] for a in head))
        second, end = recurrence(np.zeros((D, V)), *(a[4:6] for a in head))
        zero = np.zeros((1, V))
        want = np.concatenate([first, zero, second, zero])
        np.testing.assert_allclose(out[0, :, n], want, atol=1e-6)
        np.testing.assert_allclose(final[0, n], end, atol=1e-6)


def test_chunks_give_the_values_and_gradients_of_single_tokens():
    arrays, segments = problem(len(ROWS), T), segments_of(ROWS)
    want = values_and_gradients("reference", arrays, segments)
    assert_close(values_and_gradients("chunked", arrays, segments), want)


@pytest.mark.thorough
@pytest.mark.parametrize("n_tokens", [1, 5, 17, 193])
def test_chunks_support_rows_of_any_length(n_tokens):
    arrays = problem(2, n_tokens, heads=(2, 6), seed=n_tokens)
    segments = segments_of([[n_tokens], [n_tokens // 2, n_tokens - n_tokens // 2]], n_tokens)
    want = values_and_gradients("reference", arrays, segments)
    assert_close(values_and_gradients("chunked", arrays, segments), want)


@pytest.mark.thorough
@pytest.mark.parametrize("seed", range(3))
def test_chunks_support_any_segments(seed):
    """Random lengths of segments and padding in four rows."""
    random = np.random.default_rng(seed)
    rows = [
        [int(n) for n in random.choice([1, 2, 63, 64, 65, -1, -5, -64, 17], 3)] for _ in range(4)
    ]
    segments = segments_of(rows, 200)
    arrays = problem(4, 200, seed=seed, decay=random.choice([0.01, 0.3, 5.0]))
    want = values_and_gradients("reference", arrays, segments)
    assert_close(values_and_gradients("chunked", arrays, segments), want)


@pytest.mark.thorough
def test_chunks_agree_with_float64():
    arrays, segments = problem(len(ROWS), T, dtype=np.float64), segments_of(ROWS)
    with jax.enable_x64(True):
        want = values_and_gradients("reference", arrays, segments)
    assert want[0].dtype == np.float64
    narrow = [a.astype(np.float32) for a in arrays]
    assert_close(values_and_gradients("chunked", narrow, segments), want)


@pytest.mark.thorough
def test_groups_of_heads_give_the_values_of_all_heads(monkeypatch):
    arrays, segments = problem(2, 40, heads=(2, 4)), segments_of([[40], [15, 20]], 40)
    want = values_and_gradients("chunked", arrays, segments)
    monkeypatch.setattr("jaxrl.kernels.gated_delta.chunked.MAX_WORK", 2 * 40 * 2)
    for a, b in zip(values_and_gradients("chunked", arrays, segments), want, strict=True):
        np.testing.assert_allclose(a, b, rtol=1e-6, atol=1e-6)


@pytest.mark.thorough
def test_backward_stores_no_state_per_token(one_device):
    n_tokens, N, width = 1024, 2, 64
    q = jax.ShapeDtypeStruct((1, n_tokens, N, width), jnp.float32)
    g = jax.ShapeDtypeStruct((1, n_tokens, N), jnp.float32)
    segments = jax.ShapeDtypeStruct((1, n_tokens), jnp.int32)

    def loss(q, k, v, g, beta, segments):
        return jnp.sum(gated_delta(q, k, v, g, beta, segments=segments, rules=TRAIN)[0] ** 2)

    grad = jax.jit(jax.grad(loss, (0, 1, 2, 3, 4)))
    memory = grad.lower(q, q, q, g, g, segments).compile().memory_analysis()
    assert memory and memory.temp_size_in_bytes < 4 * n_tokens * N * width * width / 2


@pytest.mark.thorough
@pytest.mark.parametrize("decay", [100.0, np.inf])
def test_tokens_that_forget_everything_give_finite_gradients(decay):
    """Every third token has the decay exp(-decay): 0 in float32."""
    arrays, segments = problem(1, 130), segments_of([[130]], 130)
    arrays[3][:, ::3] = -decay
    want = values_and_gradients("reference", arrays, segments)
    got = values_and_gradients("chunked", arrays, segments)
    assert all(np.isfinite(a).all() for a in got)
    assert_close(got, want, tol=1e-4)


@pytest.mark.thorough
def test_equal_keys_do_not_overflow():
    """A power series of the triangular matrix would have terms of 2^60."""
    arrays, segments = problem(1, 128, decay=1e-3), segments_of([[128]], 128)
    arrays[1][:] = arrays[1][:, :1]
    arrays[4][:] = 0.99
    want = values_and_gradients("reference", arrays, segments)
    assert_close(values_and_gradients("chunked", arrays, segments), want)


@pytest.mark.thorough
def test_bfloat16_is_close_to_float32():
    arrays, segments = problem(len(ROWS), T), segments_of(ROWS)
    narrow = [jnp.asarray(a, jnp.bfloat16) for a in arrays[:3]]
    wide = [np.asarray(a, np.float32) for a in narrow]
    got = values_and_gradients("chunked", [*narrow, *arrays[3:]], segments)
    assert got[0].dtype == jnp.bfloat16 and got[1].dtype == jnp.float32
    want = values_and_gradients("reference", [*wide, *arrays[3:]], segments)
    for a, b in zip(got, want, strict=True):
        error = np.linalg.norm(np.asarray(a, np.float32) - b) / np.linalg.norm(b)
        assert error < 1.5e-2


def test_gradients_of_products_have_operands_of_their_dtype():
    def loss(a, b):
        return jnp.sum(product("IJ,JK->IK", a, b, jnp.bfloat16) ** 2)

    a = jax.ShapeDtypeStruct((2, 3), jnp.float32)
    b = jax.ShapeDtypeStruct((3, 4), jnp.bfloat16)
    lowered = jax.jit(jax.grad(loss, (0, 1))).lower(a, b)
    assert [out.dtype for out in lowered.out_info] == [jnp.float32, jnp.bfloat16]
    types = re.findall(r"dot_general .*: \(tensor<.*x(.*)>, tensor<.*x(.*)>\)", lowered.as_text())
    assert types == [("bf16", "bf16")] * 3


@pytest.mark.parametrize("C", [1, 5, pytest.param(64, marks=pytest.mark.thorough)])
def test_the_inverse_of_a_unit_lower_matrix(C):
    random = np.random.default_rng(C)
    lower = np.tril(random.uniform(-1, 1, (3, C, C)), -1) * min(1.0, 4 / C)
    got = jax.jit(unit_lower_inverse)(jnp.asarray(lower, jnp.float32))
    want = np.linalg.inv(np.eye(C) + lower)
    np.testing.assert_allclose(got, want, rtol=1e-4, atol=1e-4 * np.abs(want).max())


@pytest.mark.parametrize("n_tokens", [1, pytest.param(5, marks=pytest.mark.thorough)])
def test_steps_continue_the_state(n_tokens):
    """Sequences with none, some and all of the tokens."""
    *arrays, state = problem(3, n_tokens, heads=(1, 2))
    live = np.arange(n_tokens) < np.array([[n_tokens], [n_tokens // 2], [0]])
    segments = jnp.asarray(live, jnp.int32)
    with jax.set_mesh(make_mesh()):
        arrays, state, live = jax.tree.map(jnp.asarray, (arrays, state, live))
        step = jax.jit(functools.partial(gated_delta_step, rules=DECODE))
        pool, slots = jnp.zeros((6, *state.shape[1:])), jnp.array([4, 1, 2])
        out, pool = step(*arrays, pool.at[slots].set(state), slots=slots, live=live)
        how = dict(rules=TRAIN, implementation="reference")
        reference = jax.jit(functools.partial(gated_delta, **how))
        want = reference(*arrays, segments=segments, state=state)
    assert_close((out, pool[slots]), want)


# Rows with shared prefixes. The path of a segment: (its parent, tokens that it takes from the path
# of the parent), and the number of its tokens, for chunks of 16 tokens.
TREE = [(None, 0, 40), (0, 32, 20), (0, 16, 16), (2, 32, 5), (None, 0, 9)]
ALIGN = 16


def tree_row():
    """(segments, visibility, places of the tokens of every path) of a row of TREE."""
    begins, n_tokens = [], 0
    for _, _, n in TREE:
        begins.append(n_tokens)
        n_tokens += -(-n // ALIGN) * ALIGN
    segments, positions = (np.zeros((1, n_tokens), np.int32) for _ in range(2))
    until, paths = np.full((1, n_tokens), -1, np.int32), []
    for i, ((parent, shared, n), begin) in enumerate(zip(TREE, begins, strict=True)):
        own = np.arange(begin, begin + n)
        path = own if not shared else np.concatenate([paths[parent][:shared], own])
        segments[0, own], positions[0, own] = i + 1, shared + np.arange(n)
        until[0, path] = begin + n - 1
        paths.append(path)
    return segments, Visibility(jnp.asarray(until), jnp.asarray(positions)), paths


@pytest.mark.parametrize(
    "implementation", ["chunked", pytest.param("reference", marks=pytest.mark.thorough)]
)
def test_segments_continue_the_state_of_their_shared_prefix(implementation):
    segments, visibility, paths = tree_row()
    n_tokens = segments.shape[1]
    arrays = problem(1, n_tokens)[:-1]
    owner, offset = np.maximum(segments[0] - 1, 0), np.asarray(visibility.positions[0])
    weight = np.sin(np.arange(n_tokens * N * V)).reshape(1, n_tokens, N, V)

    def shared(*arrays):
        out, _ = gated_delta(
            *arrays,
            segments=jnp.asarray(segments),
            visibility=visibility,
            align=ALIGN,
            rules=TRAIN,
            implementation=implementation,
        )
        return jnp.sum(out * weight), out

    def by_path(*arrays):
        """Each path as a row, padded to one length; a token's output is that of its path."""
        longest = max(len(path) for path in paths)
        rows = np.stack([np.pad(path, (0, longest - len(path))) for path in paths])
        live = np.stack([np.arange(longest) < len(path) for path in paths])
        out, _ = gated_delta(
            *(a[0][rows] for a in arrays),
            segments=jnp.asarray(live, jnp.int32),
            rules=TRAIN,
            implementation="reference",
        )
        own = jax.reshard(out, jax.P())[owner, offset][None] * (segments > 0)[..., None, None]
        return jnp.sum(own * weight), own

    assert_close(tree_values(shared, arrays), tree_values(by_path, arrays))


def tree_values(loss, arrays):
    """Outputs and gradients of a loss with outputs, on one device."""
    with jax.set_mesh(make_mesh()):
        grad = jax.jit(jax.value_and_grad(loss, tuple(range(len(arrays))), has_aux=True))
        (_, out), gradients = grad(*(jnp.asarray(a) for a in arrays))
    return out, *gradients


W = 4


def convolved(x, w, tail=None):
    """silu of the convolution of one sequence [T, N, H], in numpy."""
    before = np.zeros((W - 1, *x.shape[1:])) if tail is None else tail
    x = np.concatenate([before, x])
    y = sum(w[..., W - 1 - s] * x[W - 1 - s : len(x) - s] for s in range(W))
    return y / (1 + np.exp(-y))


def convolution_problem(B, T):
    random = np.random.default_rng(T)
    shapes = (B, T, 2, 3), (2, 3, W), (B, W - 1, 2, 3)
    return [random.standard_normal(shape).astype(np.float32) for shape in shapes]


@pytest.mark.parametrize("with_tail", [False, True])
def test_the_convolution_stays_in_its_segment(one_device, with_tail):
    """A tail continues the first segment; the new tail is the end of the last one."""
    segments = segments_of([[5, 1, 2, -2], [2, -8], [-10], [10]], 10)
    x, w, tail = convolution_problem(4, 10)
    conv = jax.jit(functools.partial(causal_conv, rules=TRAIN))
    out, new = conv(
        jnp.asarray(x),
        jnp.asarray(w),
        segments=jnp.asarray(segments),
        tail=jnp.asarray(tail) if with_tail else None,
    )
    first = tail if with_tail else np.zeros_like(tail)
    want = np.zeros_like(x)
    for row, (begin, end) in [(0, (0, 5)), (0, (5, 6)), (0, (6, 8)), (1, (0, 2)), (3, (0, 10))]:
        want[row, begin:end] = convolved(x[row, begin:end], w, first[row] if begin == 0 else None)
    np.testing.assert_allclose(out, want, rtol=1e-5, atol=1e-5)
    ends = [
        np.concatenate([np.zeros((1, 2, 3)), x[0, 6:8]]),
        np.concatenate([first[1, 2:], x[1, :2]]),
        first[2],
        x[3, 7:],
    ]
    np.testing.assert_array_equal(new, np.asarray(ends, np.float32))


@pytest.mark.thorough
def test_a_convolution_in_pieces_is_that_of_the_whole_sequence(one_device):
    x, w, tail = (jnp.asarray(a) for a in convolution_problem(1, 9))
    conv = jax.jit(functools.partial(causal_conv, w=w, rules=TRAIN))
    want, want_tail = conv(x, segments=jnp.ones((1, 9), jnp.int32), tail=tail)
    outputs, at = [], 0
    for n in (1, 4, 2, 1, 1):
        padding = (0, 0), (0, 5 - n), (0, 0), (0, 0)
        piece = jnp.pad(x[:, at : at + n], padding, constant_values=9)
        segments = jnp.asarray(segments_of([[n, n - 5]], 5))
        out, tail = conv(piece, segments=segments, tail=tail)
        outputs.append(out[:, :n])
        at += n
    np.testing.assert_allclose(jnp.concatenate(outputs, axis=1), want, rtol=1e-6, atol=1e-6)
    np.testing.assert_array_equal(tail, want_tail)


@pytest.mark.thorough
def test_the_convolution_continues_shared_prefixes():
    segments, visibility, paths = tree_row()
    x, w, _ = convolution_problem(1, segments.shape[1])
    weight = np.sin(np.arange(x.size)).reshape(x.shape)

    def shared(x, w):
        rows = jnp.asarray(segments)
        how: Any = dict(visibility=visibility, align=ALIGN, rules=TRAIN)
        out, _ = causal_conv(x, w, segments=rows, **how)
        return jnp.sum(out * weight), out

    def by_path(x, w):
        out = jnp.zeros_like(x)
        for path, (_, skipped, _) in zip(paths, TREE, strict=True):
            y = sum(
                w[..., W - 1 - s] * jnp.pad(x[0, path], ((s, 0), (0, 0), (0, 0)))[: len(path)]
                for s in range(W)
            )
            out = out.at[0, path[skipped:]].set(jax.nn.silu(y)[skipped:])
        return jnp.sum(out * weight), out

    assert_close(tree_values(shared, (x, w)), tree_values(by_path, (x, w)))


def test_prefixes_shorter_than_the_convolution_are_rejected(one_device):
    segments, visibility, _ = tree_row()
    x, w, _ = (jnp.asarray(a) for a in convolution_problem(1, segments.shape[1]))
    with pytest.raises(ValueError, match="shorter than the convolution"):
        causal_conv(
            x, w, segments=jnp.asarray(segments), visibility=visibility, align=2, rules=TRAIN
        )


def layer(arrays, w, segments, visibility, rules):
    """Convolution of v, then the delta rule, on rows that are sharded by `rules`."""
    inside = whole_row_rules(rules)
    q, k, v, g, beta = (to_whole_rows(a, rules) for a in arrays)
    rows = jax.tree.map(lambda a: unshuffle(a, rules), (segments, visibility))
    how: Any = dict(segments=rows[0], visibility=rows[1], align=ALIGN, rules=inside)
    v, _ = causal_conv(v, w, **how)
    out, _ = gated_delta(q, k, v, g, beta, **how)
    return from_whole_rows(out, rules)


def sharded_values(rules, mesh, arrays, w, segments, visibility):
    """Outputs and gradients of `layer` on a mesh, in the original token order."""

    def ordered(order, a):
        flat = np.asarray(a).reshape(*a.shape[:2], -1)
        return np.stack([order(x, rules) for x in np.moveaxis(flat, 2, 0)], 2).reshape(a.shape)

    def loss(arrays, w, weight, segments, visibility):
        out = layer(arrays, w, segments, visibility, rules)
        return jnp.sum(out * weight), out

    weight = np.sin(np.arange(arrays[2].size)).reshape(arrays[2].shape).astype(np.float32)
    with jax.set_mesh(make_mesh(**mesh)):
        put = functools.partial(jax.tree.map, lambda a: jax.device_put(ordered(mesh_order, a), at))
        at = rules.spec("batch", "time", "heads")
        arrays, weight = put((arrays, weight))
        at = rules.spec("batch", "time")
        segments, visibility = put((segments, visibility))
        w = jax.device_put(w, rules.spec("heads"))
        grad = jax.jit(jax.value_and_grad(loss, (0, 1), has_aux=True))
        (_, out), (gradients, d_w) = grad(arrays, w, weight, segments, visibility)
        return [ordered(row_order, a) for a in (out, *gradients)] + [np.asarray(d_w)]


@pytest.mark.parametrize("ulysses", [1, 2])
def test_whole_rows_have_the_order_of_the_row(ulysses):
    """Heads are repeated as often as four devices need."""
    rules, rows = dataclasses.replace(RING, ulysses=ulysses), np.arange(32).reshape(1, 32)
    with jax.set_mesh(make_mesh(sequence=4)):
        at = rules.spec("batch", "time", "heads")
        x = jax.device_put(mesh_order(rows, rules)[..., None] * np.array([1, 100]), at)
        whole = to_whole_rows(x, rules)
        np.testing.assert_array_equal(whole, rows[..., None] * np.array([1, 1, 100, 100]))
        back = from_whole_rows(whole, rules)
        np.testing.assert_array_equal(np.asarray(back)[..., ::2], x)


@pytest.mark.thorough
@pytest.mark.parametrize(
    ("rules", "mesh"),
    [
        (RING, dict(sequence=4)),
        (ULYSSES, dict(tensor=2, sequence=2)),
        (dataclasses.replace(RING, ulysses=2), dict(sequence=4)),
        (TRAIN, dict(fsdp=2, tensor=2)),
    ],
    ids=["ring", "ulysses", "both", "tensor"],
)
def test_sharded_rows_give_the_values_and_gradients_of_one_device(rules, mesh):
    segments, visibility, _ = tree_row()
    segments, visibility = jax.tree.map(lambda a: np.repeat(a, 2, 0), (segments, visibility))
    *arrays, _ = problem(2, segments.shape[1], heads=(2, 4))
    w = np.random.default_rng(0).standard_normal((4, V, W)).astype(np.float32)
    want = sharded_values(TRAIN, {}, arrays, w, segments, visibility)
    assert_close(sharded_values(rules, mesh, arrays, w, segments, visibility), want)


def test_heads_that_devices_cannot_share_are_rejected():
    rows = jnp.zeros((1, 8), jnp.int32)
    arrays = [jnp.asarray(a) for a in problem(1, 8, heads=(3, 3))[:-1]]
    with jax.set_mesh(make_mesh(tensor=2)), pytest.raises(ValueError, match="3 value heads"):
        gated_delta(*arrays, segments=rows, rules=TRAIN)
