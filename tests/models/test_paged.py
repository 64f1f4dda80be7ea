"""New tokens against cached ones."""

import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from jaxrl.models import kv_cache
from jaxrl.models.config import uniform_decoder
from jaxrl.models.decoder import decoder_specs
from jaxrl.models.kv_cache import KVCache, init_cache, page_bytes
from jaxrl.models.paged import forward_paged
from jaxrl.models.spec import init_params
from sharding import DECODE, TRAIN
from tests.models.layers.test_mla import CFG as LATENT

HEADS = uniform_decoder("llama", L=2, D=32, N=4, K=2, H=16, F=64, V=64, tied=True)


@pytest.mark.parametrize("cfg", [HEADS, LATENT])
def test_pages_of_whole_tiles_give_the_same_numbers(cfg, one_device, monkeypatch):
    """On TPU, pages are as wide as its tiles of 128 features; those that a head has not are 0."""
    model = init_params(jax.random.key(0), decoder_specs(cfg), TRAIN, jnp.float32)
    tokens = jax.random.randint(jax.random.key(1), (2, 9), 0, cfg.V)
    positions = jnp.broadcast_to(jnp.arange(9), (2, 9))
    step = jax.jit(functools.partial(forward_paged, rules=DECODE, implementation="reference"))

    def run() -> tuple[np.ndarray, KVCache]:
        cache = init_cache(cfg, 6, 4, jnp.float32, DECODE)
        tables = {0: jnp.array([[3, 0, 5], [1, 4, 2]])}
        first, cache = step(model, tokens[:, :8], positions[:, :8], cache, tables)
        last, cache = step(model, tokens[:, 8:], positions[:, 8:], cache, tables)
        return np.concatenate([first, last], axis=1), cache

    want, narrow = run()
    monkeypatch.setattr(kv_cache, "target_platform", lambda: "tpu")
    got, wide = run()
    np.testing.assert_allclose(got, want, rtol=1e-6, atol=1e-6)
    for pool, padded in zip(jax.tree.leaves(narrow), jax.tree.leaves(wide), strict=True):
        width = pool.shape[-1]
        assert padded.shape == (*pool.shape[:-1], 128)
        np.testing.assert_allclose(padded[..., :width], pool, rtol=1e-6, atol=1e-6)
        assert not np.any(padded[..., width:])
    of_page = page_bytes(cfg, 4, jnp.float32)[0]
    assert of_page * 6 == sum(pool.nbytes for pool in jax.tree.leaves(wide))
    assert of_page == page_bytes(cfg, 4, jnp.float32, platform="cpu")[0] * 128 // width
