"""The C decode kernels give the bits of XLA's products of many rows and run when they should.

Tests of jaxrl/kernels/cpu/native.py and ops.py.
"""

import ctypes
import logging
import pathlib
import shutil
import subprocess

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from jaxrl.kernels.attention import online_softmax
from jaxrl.kernels.attention_spec import AttentionSpec
from jaxrl.kernels.cpu import native, ops


def thorough(*cases: tuple) -> list:
    return [pytest.param(*case, marks=pytest.mark.thorough) for case in cases]


@pytest.fixture
def kernels(one_device):
    """Requires the kernels if there is a compiler; skips the test otherwise."""
    if shutil.which("cc") is None:
        pytest.skip("no C compiler")
    assert native.is_available()


def normal(*shape: int) -> np.ndarray:
    return np.random.default_rng(sum(shape)).standard_normal(shape, np.float32)


@pytest.mark.bitwise
@pytest.mark.parametrize(
    ("n_in", "n_out"), [(576, 1536), *thorough((1536, 576), (700, 200), (65, 513))]
)
def test_skinny_matmul_gives_the_bits_of_many(kernels, n_in, n_out):
    if not ops.matmul_bits_match(n_out, n_in):
        pytest.skip("on this processor XLA sums in another order, and the kernel is not used")
    x, w = normal(256, n_in), normal(n_out, n_in)
    many = jax.jit(lambda x, w: jnp.einsum("BI,OI->BO", x, w))(x, w)
    for n_rows in (1, 2, 8, 17, 40, 64):
        (few,) = jax.jit(ops.skinny_matmul)(x[:n_rows], w)
        np.testing.assert_array_equal(few, many[:n_rows])


PRODUCT = """
#include "product.h"
void run(const float *x, const float *w, float *y, long n_rows, long n_in, long n_out, float *own) {
  interleave_rows(x, n_rows, n_in, own);
  product(own, w, n_in, n_out, NULL, y, n_rows, n_out);
}"""


def built(folder: pathlib.Path, *flags: str) -> ctypes.CDLL:
    """`product` compiled for another processor."""
    source, library = folder / "product.c", folder / "product.so"
    source.write_text(PRODUCT)
    places = ("-I", str(native.SOURCE.parent), str(source), "-o", str(library))
    subprocess.run(["cc", *native.FLAGS, *flags, *places], check=True)
    return ctypes.CDLL(str(library))


@pytest.mark.bitwise
@pytest.mark.thorough
@pytest.mark.parametrize(
    ("needs", "flags"),
    [
        ("fma", ["-mno-avx512f", "-Wno-psabi"]),
        *thorough(("avx512f", ["-DWIDE"]), ("avx512f", ["-mtune=generic"])),
    ],
)
def test_products_for_other_processors_have_the_same_bits(kernels, tmp_path, needs, flags):
    if needs not in native._processor().get("flags", "").split():
        pytest.skip(f"no {needs}")
    run = built(tmp_path, *flags).run
    run.argtypes = [ctypes.c_void_p] * 3 + [ctypes.c_long] * 3 + [ctypes.c_void_p]
    for n_in, n_out in ((576, 96), (1536, 31), (65, 40)):
        x, w = normal(64, n_in), normal(n_out, n_in)
        for n_rows in (1, 4, 5, 8, 16, 40):
            (want,) = jax.jit(ops.skinny_matmul)(x[:n_rows], w)
            y, own = np.zeros((n_rows, n_out), np.float32), np.zeros((n_in + 1, 64), np.float32)
            run(*(a.ctypes.data for a in (x, w, y)), n_rows, n_in, n_out, own.ctypes.data)
            np.testing.assert_array_equal(y, want)


@pytest.mark.parametrize(
    ("processor", "wide"),
    [
        ({"flags": "fma avx512f", "vendor_id": "AuthenticAMD", "cpu family": "26"}, True),
        ({"flags": "fma avx512f", "vendor_id": "GenuineIntel", "cpu family": "6"}, True),
        ({"flags": "fma avx512f", "vendor_id": "AuthenticAMD", "cpu family": "25"}, False),
        ({"flags": "fma avx2", "vendor_id": "GenuineIntel", "cpu family": "6"}, False),
        ({"Features": "asimd sve"}, False),
        ({"machine": "arm64"}, False),
    ],
)
def test_which_processors_execute_whole_avx512_vectors(processor, wide):
    assert native._is_wide(processor) == wide


def state_by_xla(q, k_pages, v_pages, table, first, last, scale: float):
    """Softmax state over the blocks of gathered pages, as in training."""
    k, v = (np.concatenate(list(np.swapaxes(p[table], 0, 1)), axis=2) for p in (k_pages, v_pages))
    H = q.shape[3]

    @jax.jit
    def run(q, k, v):
        v = jnp.pad(v, ((0, 0),) * 3 + ((0, -H % online_softmax.BLOCK),))

        def add(j, state):
            k_block, v_block = (jax.lax.dynamic_slice_in_dim(x, j * 64, 64, 2) for x in (k, v))
            key = j * 64 + np.arange(64)
            seen = ((key >= first[..., None]) & (key <= last[..., None]))[:, None]
            return online_softmax.add_block(state, q, k_block, v_block, seen, AttentionSpec(scale))

        state = jax.lax.fori_loop(
            0,
            k.shape[2] // 64,
            add,
            online_softmax.init_softmax(q.shape[:3], H + -H % online_softmax.BLOCK),
        )
        return state.replace(numerator=state.numerator[..., :H])

    return run(q, k, v)


@pytest.mark.bitwise
@pytest.mark.parametrize(("M", "H"), [(3, 64), *thorough((2, 16), (5, 80), (12, 32), (40, 128))])
def test_attention_reads_pages_in_place_and_gives_the_bits_of_training(kernels, M, H):
    B, K, page_len = 5, 2, 128
    q = normal(B, K, M, H)
    k_pages, v_pages = normal(9, K, page_len, H), normal(10, K, page_len, H)[:9]
    table = np.array([[5, 1, 7], [2, 0, 0], [0, 0, 0], [5, 6, 8], [3, 4, 0]], np.int32)
    ends = np.array([383, 64, -1, 200, 130])[:, None]  # one is inactive, two share a page
    last = np.where(ends < 0, -1, ends - np.arange(M)[::-1] % 60).astype(np.int32)
    first = np.array([0, 0, 0, 70, 129])[:, None] * np.ones((1, M), np.int32)  # windows
    first = np.minimum(first, np.maximum(last, 0)).astype(np.int32)
    where = (table, first, last, 0.3)
    got = jax.jit(ops.paged_attention, static_argnums=6)(q, k_pages, v_pages, *where)
    want = state_by_xla(q, k_pages, v_pages, *where)
    live = last >= 0
    for mine, xla in (
        (got.max_score, want.max_score),
        (got.denominator, want.denominator),
        (got.numerator, want.numerator),
    ):
        mine, xla = (np.moveaxis(np.asarray(x), 1, 2) for x in (mine, xla))  # [B, M, K, ...]
        np.testing.assert_array_equal(mine[live], xla[live])
    assert np.all(
        np.asarray(got.max_score).swapaxes(1, 2)[~live] == np.float32(online_softmax.MASKED)
    )
    assert not np.asarray(got.denominator).swapaxes(1, 2)[~live].any()


def test_the_exponential_is_that_of_xla(kernels):
    """Softmax weights of scores from 0 down to -110, where they underflow to 0.

    One-hot values expose each weight.
    """
    B, H = 2048, 64
    keys = np.zeros((B, 1, 64, H), np.float32)
    keys[..., 0] = -np.random.default_rng(0).random((B, 1, 64), np.float32) * np.linspace(
        0.01, 110, B, dtype=np.float32
    ).reshape(B, 1, 1)
    q = np.zeros((B, 1, 1, H), np.float32)
    q[..., 0] = 1
    values = np.broadcast_to(np.eye(64, dtype=np.float32), (B, 1, 64, H))
    table = np.arange(B, dtype=np.int32)[:, None]
    last, first = np.full((B, 1), 63, np.int32), np.zeros((B, 1), np.int32)
    attend = jax.jit(ops.paged_attention, static_argnums=6)
    got = attend(q, keys, values, table, first, last, 1.0).numerator[:, 0, 0]
    scores = keys[:, 0, :, 0]
    want = jax.jit(jnp.exp)(scores - scores.max(axis=-1, keepdims=True))
    np.testing.assert_array_equal(got, want)
    assert 0 < np.sum(want == 0) < want.size / 2


def test_without_a_compiler_xla_does_the_products_and_the_log_says_why(
    one_device, monkeypatch, tmp_path, caplog
):
    monkeypatch.setenv("CC", "no-such-compiler")
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    with caplog.at_level(logging.INFO):
        assert not native.is_available.__wrapped__()
    assert "no-such-compiler" in caplog.text
