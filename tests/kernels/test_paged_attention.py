"""Paged attention (jaxrl/kernels/paged_attention/) against its reference and training attention."""

import functools
import types

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.experimental.pallas import tpu as pltpu

from jaxrl.kernels.attention import attention
from jaxrl.kernels.attention_spec import AttentionSpec
from jaxrl.kernels.paged_attention import paged_attention, ragged, triton, write_pages
from jaxrl.kernels.paged_attention.columns import _block_rows
from jaxrl.kernels.paged_attention.pages import _write_rows
from jaxrl.kernels.paged_attention.ragged import paged_attention_ragged
from jaxrl.kernels.paged_attention.triton import paged_attention_triton
from jaxrl.kernels.quantized import quantize
from sharding import DECODE, make_mesh

SINKS = jnp.linspace(-2.0, 3.0, 6)  # of six heads


def paged_problem(N, K, H, *, B=3, S=192, page_len=64, dtype=jnp.float32):
    """q, k, v [B, S, ...], the pools that hold k and v in scattered pages, and the page table."""
    keys = jax.random.split(jax.random.key(0), 3)
    q, k, v = (
        jax.random.normal(key, (B, S, heads, H), dtype)
        for key, heads in zip(keys, (N, K, K), strict=True)
    )
    C = -(-S // page_len)
    n_pages = B * C + 2
    pages = np.random.default_rng(0).permutation(n_pages)[: B * C].astype(np.int32)
    table = jnp.asarray(pages.reshape(B, C))
    pool = jnp.zeros((n_pages, K, page_len, H), dtype)
    places = jnp.tile(jnp.arange(S), (B, 1))
    write = jax.jit(functools.partial(write_pages, rules=DECODE))
    return (q, k, v), write(pool, pool, k, v, table, places), table


def paged(pools, *, implementation=None, window=0, softcap=None, sinks=None):
    """Jitted attention over the pools: (q, page table, positions) -> out."""

    @jax.jit
    def attend(q, table, positions):
        return paged_attention(
            q,
            *pools,
            spec=AttentionSpec(0.15, softcap, DECODE),
            page_table=table,
            positions=positions,
            window=window,
            sinks=sinks,
            implementation=implementation,
        )

    return lambda q, table, positions: attend(q, table, jnp.asarray(positions, jnp.int32))


@pytest.mark.parametrize(
    ("page_len", "options"),
    [
        (128, dict(window=70, softcap=3.0, sinks=SINKS)),
        pytest.param(64, dict(window=70, softcap=3.0), marks=pytest.mark.thorough),
        *(
            pytest.param(page_len, options, marks=pytest.mark.thorough)
            for page_len in (64, 128)
            for options in (dict(), dict(window=jnp.int32(40), sinks=SINKS))
        ),
    ],
)
def test_columns_equal_the_reference(one_device, page_len, options):
    (q, _, _), pools, table = paged_problem(6, 2, 32, page_len=page_len)
    chunk = np.stack([np.arange(100, 148), np.arange(48), np.full(48, -1)])
    chunk[1, 40:] = -1  # padding
    cases = [(q[:, :48], chunk), (q[:, :1], [[191], [64], [-1]])]
    attends = [paged(pools, implementation=name, **options) for name in ("reference", "columns")]
    for queries, positions in cases:
        want, got = (attend(queries, table, positions) for attend in attends)
        np.testing.assert_allclose(want, got, rtol=1e-5, atol=1e-5)
        assert not np.any(np.asarray(got)[np.asarray(positions) == -1])


@pytest.mark.thorough
@pytest.mark.parametrize(
    "attend",
    [
        functools.partial(paged_attention, implementation="columns"),
        functools.partial(paged_attention_ragged, interpret=True),
        functools.partial(paged_attention_triton, interpret=True),
    ],
    ids=["columns", "ragged", "triton"],
)
@pytest.mark.parametrize("window", [0, 40])
def test_queries_see_the_rest_of_their_image(one_device, attend, window):
    """An image of 70 tokens over two pages, one in the row's window only, and text."""
    (q, _, _), pools, table = paged_problem(6, 2, 128)
    positions = np.stack([np.arange(60, 160), np.arange(100), np.full(100, -1)]).astype(np.int32)
    ahead = positions.copy()
    ahead[0, 10:80], ahead[1, 3:9] = 139, 8
    spec = AttentionSpec(0.15, None, DECODE)

    @functools.partial(jax.jit, static_argnums=0)
    def run(attend, ahead):
        how = dict(page_table=table, positions=jnp.asarray(positions), window=window)
        return attend(q[:, :100], *pools, spec=spec, ahead=ahead, **how)

    reference = functools.partial(paged_attention, implementation="reference")
    want, got = (run(one, jnp.asarray(ahead)) for one in (reference, attend))
    np.testing.assert_allclose(want, got, rtol=1e-5, atol=1e-5)
    assert np.abs(want - run(reference, None)).max() > 0.1


@pytest.mark.parametrize(
    ("heads", "page_len", "options"),
    [
        ((2, 2, 128), 128, dict(window=jnp.int32(70), softcap=3.0)),
        ((6, 2, 128), 64, dict(sinks=SINKS)),
        pytest.param((6, 2, 128), 64, dict(), marks=pytest.mark.thorough),
    ],
)
@pytest.mark.parametrize("kernel", [paged_attention_ragged, paged_attention_triton])
def test_kernels_equal_the_reference(one_device, monkeypatch, kernel, heads, page_len, options):
    """Rows of many lengths, with partial groups of pages and with empty rows in between."""
    monkeypatch.setattr(ragged, "target_cores", lambda: 2)
    monkeypatch.setattr(ragged, "MAX_KEYS", 512)  # rows of two groups
    (q, _, _), pools, table = paged_problem(*heads, B=4, S=640, page_len=page_len)
    chunk = np.stack([np.arange(540, 588), np.arange(48), np.full(48, -1), np.arange(500, 548)])
    chunk[1, 40:] = -1  # padding
    spec, window = AttentionSpec(0.15, options.get("softcap"), DECODE), options.get("window", 0)
    for queries, positions in [(q[:, :48], chunk), (q[:, :1], [[639], [64], [-1], [511]])]:
        how = dict(page_table=table, positions=jnp.asarray(positions, jnp.int32), window=window)
        how["sinks"] = options.get("sinks")
        want, got = (
            jax.jit(functools.partial(attend, spec=spec, **how))(queries, *pools)
            for attend in (
                functools.partial(paged_attention, implementation="reference"),
                functools.partial(kernel, interpret=True),
            )
        )
        np.testing.assert_allclose(want, got, rtol=1e-5, atol=1e-5)
        assert not np.any(np.asarray(got)[np.asarray(positions) == -1])


@pytest.mark.parametrize(
    ("kernel", "width"), [(paged_attention_ragged, 128), (paged_attention_triton, 48)]
)
def test_keys_are_the_values_where_pages_have_no_others(one_device, kernel, width):
    """As latents are (models/layers/mla.py). Triton's products have 32 and 16 of 48 features."""
    (q, _, _), (pool, _), table = paged_problem(6, 1, width, S=128)
    for queries, positions in [
        (q[:, :48], np.arange(3 * 48).reshape(3, 48) % 128),
        (q[:, :1], [[127], [64], [-1]]),
    ]:
        how = dict(page_table=table, positions=jnp.asarray(positions, jnp.int32), window=0)
        want, got, by_columns = (
            jax.jit(functools.partial(attend, spec=AttentionSpec(0.15, rules=DECODE), **how))(
                queries, pool, *values
            )
            for attend, values in (
                (functools.partial(paged_attention, implementation="reference"), [pool]),
                (functools.partial(kernel, interpret=True), [None]),
                (functools.partial(paged_attention, implementation="columns"), [None]),
            )
        )
        np.testing.assert_allclose(got, want, rtol=1e-5, atol=1e-5)
        np.testing.assert_allclose(by_columns, want, rtol=1e-5, atol=1e-5)


def test_enough_rows_read_their_pages_in_one_part(one_device, monkeypatch):
    monkeypatch.setattr(triton, "ENOUGH_PROGRAMS", 3)  # of three rows and one kv head
    (q, _, _), pools, table = paged_problem(2, 1, 32)
    positions = jnp.array([[191], [70], [-1]], jnp.int32)
    how = dict(
        page_table=table, positions=positions, window=0, spec=AttentionSpec(0.15, rules=DECODE)
    )
    attend = functools.partial(paged_attention_triton, interpret=True, **how)
    got = jax.jit(attend)(q[:, :1], *pools)
    want = paged_attention(q[:, :1], *pools, implementation="reference", **how)
    np.testing.assert_allclose(want, got, rtol=1e-5, atol=1e-5)


def on_emulated_tpu(monkeypatch):
    """(`ragged` with a TPU's memories, copies and semaphores, the reference) of three rows.

    Buffers are NaN before they are written, a copy arrives only when it is waited for, and accesses
    that nothing orders raise an error.
    """
    monkeypatch.setattr(ragged, "MAX_KEYS", 32)  # groups of two pages, and rows of two groups
    monkeypatch.setattr(ragged, "MAX_GROUPS", 3)
    monkeypatch.setattr(ragged, "target_cores", lambda: 2)
    q = jax.random.normal(jax.random.key(0), (3, 1, 2, 128))
    pools = jax.random.normal(jax.random.key(1), (2, 11, 1, 16, 128))
    table = jnp.array([[3, 7, 1], [0, 2, 4], [9, 5, 8]])
    positions = jnp.array([[40], [-1], [20]])
    how = dict(page_table=table, positions=positions, window=0)
    params = pltpu.InterpretParams(detect_races=True, num_cores_or_threads=2)
    results = []
    for attend in (
        functools.partial(paged_attention_ragged, interpret=params),
        functools.partial(paged_attention, implementation="reference"),
    ):
        attend = functools.partial(attend, spec=AttentionSpec(0.1, rules=DECODE), **how)
        results.append(np.asarray(jax.jit(attend)(q, *pools)))
    return results


@pytest.mark.parametrize(
    ("work", "limits"),
    [
        ([5, 5, 5, 5], [0, 2, 4]),
        ([1, 1, 1, 9], [0, 3, 4]),  # a core has at least one row
        ([9, 1, 1, 1], [0, 1, 4]),
        ([4, 2, 1, 1, 4, 3], [0, 4, 6]),  # 8 of 15, and 7
        ([3, 3, 3, 3, 3, 3], [0, 2, 4, 6]),
        ([7, 7], [0, 2]),
    ],
)
def test_cores_share_the_pages(work, limits):
    got = ragged._divide_rows(jnp.array(work), len(limits) - 1)
    assert got.tolist() == limits


@pytest.mark.thorough
def test_ragged_waits_for_its_copies(one_device, monkeypatch):
    got, want = on_emulated_tpu(monkeypatch)
    np.testing.assert_allclose(got, want, rtol=1e-5, atol=1e-5)


@pytest.mark.thorough
def test_the_emulated_tpu_shows_a_missing_wait(one_device, monkeypatch):
    copy = pltpu.make_async_copy

    def without_wait(*args):
        return types.SimpleNamespace(start=copy(*args).start, wait=lambda: None)

    monkeypatch.setattr(pltpu, "make_async_copy", without_wait)
    try:
        got, _ = on_emulated_tpu(monkeypatch)
    finally:
        pltpu.reset_tpu_interpret_mode_state()  # copies are left over
    assert np.isnan(got[0]).all()


@pytest.mark.thorough
@pytest.mark.parametrize(
    "kv_dtype", [jnp.int8, pytest.param(jnp.float8_e4m3fn, marks=pytest.mark.thorough)]
)
@pytest.mark.parametrize("kernel", [paged_attention_triton])
def test_kernels_read_quantized_pages(one_device, kernel, kv_dtype):
    (q, _, _), pools, table = paged_problem(6, 2, 128, B=4, S=640, page_len=64)
    # Heads of a token differ twentyfold, so a missing or wrong scale is visible.
    sizes = jnp.exp(3 * jax.random.uniform(jax.random.key(1), pools[0].shape[:3]))[..., None]
    pools = [quantize(pool * sizes, n_shared=1, dtype=kv_dtype) for pool in pools]
    for queries, positions in [
        (q[:, 500:516], np.arange(500, 516)),
        (q[:, :1], [[639], [64], [-1], [511]]),
    ]:
        positions = jnp.broadcast_to(jnp.asarray(positions, jnp.int32), (4, queries.shape[1]))
        how = dict(page_table=table, positions=positions, window=jnp.int32(0))
        want, got = (
            jax.jit(functools.partial(attend, spec=AttentionSpec(0.01, rules=DECODE), **how))(
                queries, *pools
            )
            for attend in (
                functools.partial(paged_attention, implementation="reference"),
                functools.partial(kernel, interpret=True),
            )
        )
        np.testing.assert_allclose(want, got, rtol=1e-4, atol=1e-5 * float(jnp.max(jnp.abs(want))))


@pytest.mark.bitwise
@pytest.mark.parametrize(
    ("heads", "options", "page_len", "n"),
    [
        ((9, 3, 64), dict(), 64, 3),
        # XLA compiles another program for an array of this size
        pytest.param((9, 3, 64), dict(), 64, 8, marks=pytest.mark.thorough),
        pytest.param((9, 3, 64), dict(window=50), 128, 3, marks=pytest.mark.thorough),
        # one query row per kv head, and a padded width
        pytest.param((4, 4, 16), dict(softcap=4.0), 64, 3, marks=pytest.mark.thorough),
        pytest.param((8, 2, 80), dict(), 128, 3, marks=pytest.mark.thorough),
    ],
)
def test_pages_give_the_bits_of_a_packed_row(one_device, heads, options, page_len, n):
    """n sequences packed into one row, against chunked prefill and decode."""
    (q, k, v), pools, table = paged_problem(*heads, B=n, page_len=page_len)
    B, S = q.shape[:2]
    packed = [x.reshape(1, B * S, *x.shape[2:]) for x in (q, k, v)]
    segments = jnp.repeat(jnp.arange(1, B + 1), S)[None]
    spec = AttentionSpec(0.15, options.get("softcap"), DECODE)
    train = jax.jit(functools.partial(attention, spec=spec, window=options.get("window", 0)))
    trained = np.asarray(train(*packed, segments=segments)).reshape(q.shape)
    attend = paged(pools, **options)
    size = 48 if n == 3 else 64
    for t in range(0, S, size):
        places = np.tile(np.arange(t, t + size), (B, 1))
        chunk = attend(q[:, t : t + size], table, places)
        np.testing.assert_array_equal(chunk, trained[:, t : t + size])
    for t in (0, 1, 63, 64, 100, 191):
        token = attend(q[:, t : t + 1], table, np.full((B, 1), t))
        np.testing.assert_array_equal(token, trained[:, t : t + 1])


@pytest.mark.thorough
@pytest.mark.bitwise
def test_bfloat16_pages_give_the_bits_of_a_packed_row(one_device):
    (q, k, v), pools, table = paged_problem(6, 2, 32, dtype=jnp.bfloat16)
    spec = AttentionSpec(0.15, rules=DECODE)
    trained = attention(q, k, v, spec=spec, segments=jnp.ones(q.shape[:2], jnp.int32), window=0)
    token = paged(pools)(q[:, 150:151], table, np.full((3, 1), 150))
    np.testing.assert_array_equal(token[:, 0], trained[:, 150])


def test_a_row_does_not_depend_on_its_batch(one_device):
    (q, _, _), pools, table = paged_problem(6, 2, 32, B=8)
    positions = np.arange(8)[:, None] * 20 + 3
    attend = paged(pools)
    together = attend(q[:, :1], table, positions)
    for rows in ([0], [7, 2], [5, 4, 1]):
        rows = np.array(rows)
        some = attend(q[rows, :1], table[rows], positions[rows])
        np.testing.assert_array_equal(some, together[rows])


@pytest.mark.thorough
@pytest.mark.parametrize(
    "mesh", [dict(fsdp=2, tensor=4), pytest.param(dict(tensor=4), marks=pytest.mark.thorough)]
)
def test_same_numbers_on_every_mesh(mesh):
    results = []
    for sizes in ({}, mesh):
        with jax.set_mesh(make_mesh(**sizes)):
            (q, _, _), pools, table = paged_problem(8, 4, 16)
            results.append(np.asarray(paged(pools)(q[:, :1], table, [[191], [64], [5]])))
    np.testing.assert_allclose(*results, rtol=1e-5, atol=1e-6)


def test_writes_are_in_place_inside_a_loop(one_device):
    """The compiled program has no copy of the pool, neither in its text nor in its memory."""
    B, K, H, N = 4, 2, 64, 4
    pool = jax.ShapeDtypeStruct((256, K, 64, H), jnp.float32)  # 8 MiB
    table = jnp.arange(B * 4, dtype=jnp.int32).reshape(B, 4)

    def steps(k_pages, v_pages, q, n):
        def step(i, carry):
            k_pages, v_pages, q = carry
            places = jnp.full((B, 1), i)
            new = q[:, :, :K]
            k_pages, v_pages = write_pages(k_pages, v_pages, new, new, table, places, rules=DECODE)
            where = dict(page_table=table, positions=places, window=0)
            spec = AttentionSpec(0.1, rules=DECODE)
            q = paged_attention(q, k_pages, v_pages, spec=spec, **where)
            return k_pages, v_pages, q

        return jax.lax.fori_loop(0, n, step, (k_pages, v_pages, q))

    compiled = (
        jax.jit(steps, donate_argnums=(0, 1))
        .lower(pool, pool, jax.ShapeDtypeStruct((B, 1, N, H), jnp.float32), 8)
        .compile()
    )
    copies = [
        line
        for line in compiled.as_text().splitlines()
        if " copy(" in line and "256,2,64,64" in line
    ]
    assert not copies
    assert compiled.memory_analysis().temp_size_in_bytes < 256 * K * 64 * H * 4 / 4


def test_padding_writes_nothing(one_device):
    pool = jnp.zeros((3, 2, 64, 16))
    new = jnp.ones((1, 2, 2, 16))
    table, places = jnp.array([[2, 0]]), jnp.array([[70, -1]])
    k_pages, v_pages = write_pages(pool, pool, new, new, table, places, rules=DECODE)
    assert float(k_pages.sum()) == float(v_pages.sum()) == 2 * 16  # position 70: page 0, offset 6
    assert float(k_pages[0, :, 6].sum()) == 2 * 16


@pytest.mark.parametrize(("name", "platform"), [("ragged", "tpu"), ("triton", "gpu")])
def test_the_error_of_a_kernel_for_another_platform_names_the_remedy(one_device, name, platform):
    (q, _, _), pools, table = paged_problem(4, 2, 16, S=64)
    message = f"config.model.paged_attention='{name}' runs on {platform} and these devices are cpu"
    with pytest.raises(NotImplementedError, match=message):
        paged(pools, implementation=name)(q[:, :1], table, np.zeros((3, 1)))


@pytest.mark.parametrize("kernel", [paged_attention_ragged, paged_attention_triton])
def test_the_error_for_unsupported_pages_names_the_remedy(one_device, kernel):
    (q, _, _), pools, table = paged_problem(4, 2, 128, S=64)
    how = dict(spec=AttentionSpec(0.1, rules=DECODE), window=0, interpret=True)
    how |= dict(page_table=table, positions=jnp.zeros((3, 1), jnp.int32))
    halves = [pool.astype(jnp.float16) for pool in pools]
    with pytest.raises(NotImplementedError, match=r"set config\.rollout\.kv_dtype to 'auto'"):
        kernel(q[:, :1], *halves, **how)
    odd = [pool[:, :, :40] for pool in pools]
    with pytest.raises(
        NotImplementedError, match=r"pages of 40 tokens \(set config\.rollout\.page_len"
    ):
        kernel(q[:, :1], *odd, **how)
    narrow = [pool[..., :24] for pool in pools]
    with pytest.raises(NotImplementedError, match="heads of width 24, no multiple of"):
        kernel(q[:, :1, :, :24], *narrow, **how)


def test_rows_are_written_where_pages_are(one_device):
    """On TPU each head is a separate row; the pool is the same."""
    (_, k, _), pools, table = paged_problem(4, 2, 16, S=128)
    pool = jnp.asarray(np.asarray(pools[0]))
    positions = jnp.array([[3, 64, -1], [-1, 127, 0], [70, 71, 72]])
    new = k[:, :3] + 1
    want, _ = write_pages(pool, pool, new, new, table, positions, rules=DECODE)
    page = jnp.take_along_axis(table, jnp.maximum(positions, 0) // 64, axis=1)
    page = jnp.where(positions >= 0, page, len(pool))
    got = _write_rows(pool, new, page, positions % 64)
    np.testing.assert_array_equal(want, got)
    scales = _write_rows(pool[..., 0], new[..., 0], page, positions % 64)
    np.testing.assert_array_equal(want[..., 0], scales)


@pytest.mark.parametrize("page_len", [64, 128])
def test_blocks_are_read_where_pages_are(one_device, page_len):
    """On TPU each head's block is a separate row. Scales have no head dim."""
    (_, k, _), pools, table = paged_problem(4, 2, 16, page_len=page_len)
    pool = jnp.asarray(np.asarray(pools[0]))
    for at in (0, 64, 128):
        got = _block_rows(pool, table[:, at // page_len], at % page_len)
        np.testing.assert_array_equal(got, k[:, at : at + 64].swapaxes(1, 2))
        scales = _block_rows(pool[..., 0], table[:, at // page_len], at % page_len)
        np.testing.assert_array_equal(scales, got[..., 0])


def test_pages_that_are_no_multiple_of_64_are_refused(one_device):
    (q, _, _), pools, table = paged_problem(4, 2, 16, S=64, page_len=16)
    with pytest.raises(ValueError, match=r"set config\.rollout\.page_len to a multiple of 64"):
        paged(pools)(q[:, :1], table, np.zeros((3, 1)))
