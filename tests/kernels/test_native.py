"""The C kernels of decoding: bit for bit what XLA's products of many rows give, and used where they should be."""

import logging
import shutil

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from jaxrl.kernels import native
from jaxrl.kernels.few_rows import product
from sharding import make_mesh


@pytest.fixture
def kernels(one_device):
    """They must be there where a compiler is; without one there is nothing to test."""
    if shutil.which("cc") is None:
        pytest.skip("no C compiler")
    assert native.ready()


def normal(*shape: int) -> np.ndarray:
    return np.random.default_rng(sum(shape)).standard_normal(shape, np.float32)


@pytest.mark.parametrize(("n_in", "n_out"), [(576, 1536), (1536, 576), (700, 200), (65, 513)])
def test_few_rows_give_the_bits_of_many(kernels, n_in, n_out):
    x, w = normal(256, n_in), normal(n_out, n_in)
    many = jax.jit(lambda x, w: jnp.einsum("BI,OI->BO", x, w))(x, w)
    for n_rows in (1, 2, 8, 17, 40, 64):
        few = jax.jit(native.few_rows)(x[:n_rows], w)
        np.testing.assert_array_equal(few, many[:n_rows])


@pytest.mark.parametrize(("M", "H"), [(3, 64), (2, 16), (5, 80), (40, 128)])
def test_pages_are_read_in_place_and_give_the_bits_of_products(kernels, M, H):
    B, K, page_len, offset = 4, 2, 128, 64
    q, weights = normal(B, K, M, H), normal(B, K, M, 64)
    k_pages, v_pages = normal(7, K, page_len, H), normal(8, K, page_len, H)[:7]
    pages = np.array([5, -1, 0, 6], np.int32)
    k, v = (p[np.maximum(pages, 0), :, offset : offset + 64] for p in (k_pages, v_pages))
    live = (pages >= 0)[:, None, None, None]

    @jax.jit
    def products(q, k, weights, v):
        wide = jnp.pad(v, ((0, 0),) * 3 + ((0, -H % 64),))  # as attention/blocks.py asks for
        scores = jnp.einsum("BKMH,BKSH->BKMS", q, k)
        return scores, jnp.einsum("BKMS,BKSH->BKMH", weights, wide)[..., :H]

    scores, mixed = products(q, k, weights, v)
    got = jax.jit(native.page_scores)(q, k_pages, pages, np.int32(offset))
    np.testing.assert_array_equal(got, np.where(live, scores, 0))
    got = jax.jit(native.page_mix)(weights, v_pages, pages, np.int32(offset))
    np.testing.assert_array_equal(got, np.where(live, mixed, 0))


def test_where_xla_adds_up_otherwise_it_keeps_the_product(kernels):
    """XLA cuts the sums of some narrow products elsewhere; which ones is its own affair."""
    x, w = normal(64, 1, 576), normal(96, 576)
    f = jax.jit(lambda x, w: product(x, w, out_sharding=jax.P()))
    np.testing.assert_array_equal(f(x[:8], w)[:, 0], f(x.swapaxes(0, 1), w)[0, :8])


def compiled(x, w) -> str:
    f = jax.jit(lambda x, w: product(x, w, out_sharding=jax.P()))
    return f.lower(x, w).compile().as_text()


def test_one_token_a_row_takes_the_kernel_and_all_else_xla(kernels):
    w = normal(128, 64)
    assert "jaxrl_few_rows" in compiled(normal(8, 1, 64), w)
    for x, weight in (
        (normal(8, 2, 64), w),  # a chunk of prefill, or training
        (normal(65, 1, 64), w),
        (normal(8, 1, 64).astype(jnp.bfloat16), w.astype(jnp.bfloat16)),
    ):
        assert "jaxrl_few_rows" not in compiled(x, weight)
    with jax.set_mesh(make_mesh(tensor=2)):
        assert "jaxrl_few_rows" not in compiled(normal(8, 1, 64), w)


def test_without_a_compiler_xla_does_the_products_and_the_log_says_why(
    one_device, monkeypatch, tmp_path, caplog
):
    monkeypatch.setenv("CC", "no-such-compiler")
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    with caplog.at_level(logging.INFO):
        assert not native.ready.__wrapped__()
    assert "no-such-compiler" in caplog.text
