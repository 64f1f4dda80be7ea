"""Short convolutions in a model: chunks of prefill, decode and packed rows give the same.

Tests of jaxrl/models/layers/short_conv.py. The logits are tested in tests/models/test_parity.py,
the engine in tests/engine/test_short_conv.py.
"""

import json

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from jaxrl.models.config import DecoderConfig, LayerConfig, MLPConfig
from jaxrl.models.files.hf_config import config_from_hf
from jaxrl.models.flops import forward_flops
from jaxrl.models.kv_cache import init_cache, slot_bytes
from jaxrl.models.layers.linear import make_spec
from jaxrl.models.layers.row_ops import LayerPlace
from jaxrl.models.layers.short_conv import ShortConv
from jaxrl.models.packed import PackedRows
from jaxrl.models.paged import PagedRows, PrefillSlots, TokenGroup
from jaxrl.models.spec import init_params
from jaxrl.models.state_mixers import ShortConvConfig
from sharding import DECODE, TRAIN
from tests.models.test_parity import GOLDEN

FOLDER = GOLDEN / "lfm2"
CONFIG = json.loads((FOLDER / "config.json").read_text())


@pytest.mark.thorough
def test_chunks_and_snapshots_give_the_outputs_of_packed_segments(one_device):
    """The second of two segments, in a slot in two chunks with padding, then one token.

    Slot 1 is the snapshot after the first chunk, from which slots 2 and 3 continue.
    """
    mixer = ShortConvConfig(N=2, H=4, bias=True)
    cfg = DecoderConfig("lfm2", D=8, V=8, layers=(LayerConfig(mixer, MLPConfig(8)),))
    specs = ShortConv(make_spec(""), cfg, mixer)
    layer = jax.tree.map(lambda w: 50 * w, init_params(jax.random.key(0), specs, TRAIN, "float32"))
    x = jax.random.normal(jax.random.key(1), (1, 24, 8))
    place = LayerPlace(rotation=None, window=None, index=None, cache=None)

    def run(rows, x, state):
        return jax.jit(lambda x, state: layer(x, None, place, 0, rows, state, rows.rules))(x, state)

    segments = jnp.repeat(jnp.array([[1, 2]]), 12, axis=1)
    packed, _ = run(PackedRows(segments, None, TRAIN, None), x, None)
    want, x = np.asarray(packed[0, 12:]), x[:, 12:]
    assert np.abs(want).max() > 0.1

    cache = init_cache(cfg, 1, 1, jnp.float32, DECODE, n_slots=4)
    n_bytes = sum(a.nbytes for a in jax.tree.leaves(cache.states))
    assert n_bytes == 4 * slot_bytes(cfg, jnp.float32) == 4 * (3 - 1) * 8 * 4
    for start, source, target in ((0, 0, 1), (5, 1, 2), (5, 1, 3)):
        n = 5 if start == 0 else 6
        part = jnp.pad(x[:, start : start + n], ((0, 0), (0, 7 - n), (0, 0)))
        places = jnp.where(jnp.arange(7) < n, start + jnp.arange(7), -1)[None]
        slots = PrefillSlots(jnp.array([source]), jnp.array([target]))
        group = TokenGroup({}, {}, places, slots)
        out, cache = run(PagedRows([group], DECODE, None, "auto"), part, cache)
        np.testing.assert_allclose(out[0, :n], want[start : start + n], atol=1e-5)
    group = TokenGroup({}, {}, jnp.array([[11]]), jnp.array([3]))
    out, _ = run(PagedRows([group], DECODE, None, "auto"), x[:, 11:], cache)
    np.testing.assert_allclose(out[0], want[11:], atol=1e-5)


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (dict(layer_types=["conv"] * 3), "has no full_attention"),
        (dict(conv_L_cache=1), "conv_L_cache is 1, expected an integer from 2"),
        (dict(hidden_act="gelu"), "hidden_act is 'gelu', which is not known for lfm2"),
        (dict(block_use_swiglu=False), "block_use_swiglu is False"),
    ],
    ids=str,
)
def test_bad_configs_are_named(change, message):
    with pytest.raises(ValueError, match=message):
        config_from_hf(CONFIG | change)


def test_older_files_have_other_entries():
    """LFM2-1.2B: the width of the MLPs is 2 / 3 of 12,288."""
    older = {name: CONFIG[name] for name in CONFIG.keys() - {"layer_types", "intermediate_size"}}
    older |= dict(full_attn_idxs=[1], block_ff_dim=12288, block_ffn_dim_multiplier=1.0)
    older |= dict(block_multiple_of=256, tie_embedding=False, conv_dim=32, theta=1e6)
    cfg = config_from_hf(older)
    assert cfg.layers[0].mixer != cfg.layers[1].mixer == cfg.attention_layers[0]
    assert cfg.layers[0].ffn.active_features == 8192 and not cfg.tied


def test_flops_are_those_of_the_products_and_of_the_taps():
    """By hand, 4 tokens of a model with a convolution alone, 32 wide, with 48 hidden features."""
    cfg = config_from_hf(CONFIG)
    n = forward_flops(cfg, np.array([4]))
    attention = 32 * (2 * (4 + 2) * 8) + 3 * 32 * 48  # weights; the MLP is 48 wide
    convolution = 32 * 4 * 32 + 3 * 32 * 48
    products = 4 * 32 * (4 * 5 / 2) + 2 * 2 * 3 * 32 * 4
    assert n == 2 * 4 * (attention + 2 * convolution + 64 * 32) + products
