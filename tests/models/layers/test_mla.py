"""Multi-head latent attention: both forms, its cache, its costs, and what is refused.

Tests of jaxrl/models/layers/mla.py, jaxrl/models/mla_config.py and families/latent.py. The logits
are tested in tests/models/test_parity.py, meshes and pages in tests/models/test_layouts.py.
"""

import dataclasses
import functools
import json
import math

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from jaxrl.models.config import LoRA
from jaxrl.models.decoder import decoder_specs
from jaxrl.models.files.hf_config import config_from_hf, config_to_hf
from jaxrl.models.flops import forward_flops
from jaxrl.models.kv_cache import init_cache, page_bytes
from jaxrl.models.layers.mla import LatentHeads
from jaxrl.models.layers.stored import dense
from jaxrl.models.lora import linear_layers
from jaxrl.models.quantize import quantize_matrix
from jaxrl.models.spec import init_params
from jaxrl.types import Tree
from sharding import DECODE, TRAIN, Rules
from tests.models.test_parity import GOLDEN

JSON = {
    name: json.loads((GOLDEN / name / "config.json").read_text())
    for name in ("glm4_moe_lite", "deepseek_v3")
}
CFG = config_from_hf(JSON["glm4_moe_lite"])
MIXER = CFG.layers[0].mixer
ALONE = Rules(batch=None, heads=None, kv_heads=None)  # nothing is sharded
TARGETS = ("q_a_proj", "q_b_proj", "kv_a_proj_with_mqa", "kv_b_proj", "o_proj")
ADAPTERS = {
    "none": None,
    "lora": LoRA(4, 8.0, targets=TARGETS),
    "dora": LoRA(4, 8.0, dora=True, targets=TARGETS),
    "pissa": LoRA(4, 8.0, pissa=True, targets=TARGETS),
}


def random_tree(tree: Tree) -> Tree:
    """The same shapes with random numbers in all of them."""
    leaves, layout = jax.tree.flatten(tree)
    keys = jax.random.split(jax.random.key(3), len(leaves))
    drawn = [jax.random.normal(k, x.shape) for k, x in zip(keys, leaves, strict=True)]
    return jax.tree.unflatten(layout, drawn)


def heads(lora: LoRA | None) -> LatentHeads:
    """The keys and values of a layer with random weights and a random adapter."""
    specs = decoder_specs(dataclasses.replace(CFG, lora=lora)).layers[0].attn.kv_b
    linear = random_tree(init_params(jax.random.key(0), specs, ALONE, jnp.float32))
    return LatentHeads(linear, MIXER, ALONE)


@functools.partial(jax.jit, static_argnums=(3, 4))
def both_forms(linear, q, latent, mixer, rules) -> tuple[jax.Array, jax.Array]:
    """Attention of every token to all, by expanded keys and values, and by the latents."""
    one = LatentHeads(linear, mixer, rules)
    k, v = one.expand(latent)
    weights = jax.nn.softmax(jnp.einsum("BTNH,BSNH->BNTS", q, k))
    expanded = jnp.einsum("BNTS,BSNV->BTNV", weights, v)
    weights = jax.nn.softmax(jnp.einsum("BTNC,BSC->BNTS", one.absorb(q), latent[:, :, 0]))
    mean = jnp.einsum("BNTS,BSC->BTNC", weights, latent[:, :, 0])
    return expanded, one.values(mean[..., : mixer.latent])


def inputs(n_rows: int = 2) -> tuple[jax.Array, jax.Array]:
    """Small queries, so that attention has more than one key, and latents."""
    q, latent = jax.random.split(jax.random.key(1))
    return (
        0.1 * jax.random.normal(q, (n_rows, 5, MIXER.N, MIXER.H)),
        jax.random.normal(latent, (n_rows, 5, 1, MIXER.page_features)),
    )


@pytest.mark.parametrize("name", ADAPTERS)
def test_absorbed_attention_equals_that_of_expanded_keys_and_values(name, one_device):
    one = heads(ADAPTERS[name])
    expanded, absorbed = both_forms(one.kv_b, *inputs(), MIXER, ALONE)
    np.testing.assert_allclose(absorbed, expanded, rtol=1e-5, atol=1e-5 * np.abs(expanded).max())
    if name != "none":  # the adapter changes the numbers
        plain, _ = both_forms(heads(None).kv_b, *inputs(), MIXER, ALONE)
        assert np.abs(plain - expanded).max() > 0.1


@pytest.mark.parametrize("dora", [False, True])
def test_every_token_uses_its_own_adapter_in_the_absorbed_form(dora, one_device):
    lora = LoRA(2, 8.0, dora=dora, targets=TARGETS, n_stacked=2)
    linear = heads(lora).kv_b
    # Rows of the base, of the first and of the second adapter: a sequence has one.
    linear.lora.ids = jnp.broadcast_to(jnp.arange(3)[:, None], (3, 5))
    expanded, absorbed = both_forms(linear, *inputs(3), MIXER, ALONE)
    np.testing.assert_allclose(absorbed, expanded, rtol=1e-5, atol=1e-5 * np.abs(expanded).max())


@pytest.mark.parametrize("kind", ["int8", "nf4"])
def test_absorbed_attention_reads_quantized_weights(kind, one_device):
    linear = heads(None).kv_b
    linear.w = quantize_matrix(linear.w, 1, kind, jnp.float32)
    expanded, absorbed = both_forms(linear, *inputs(), MIXER, ALONE)
    np.testing.assert_allclose(absorbed, expanded, rtol=1e-4, atol=1e-5 * np.abs(expanded).max())
    exact = heads(None).kv_b
    assert np.abs(dense(linear.w, jnp.float32) - exact.w).max() > 1e-3


@pytest.mark.parametrize("stacked", [False, True])
def test_a_token_in_the_cache_is_its_latent_and_its_rotated_key(stacked, one_device):
    cfg = dataclasses.replace(CFG, stacked=stacked)
    cache = init_cache(cfg, 8, 4, jnp.float32, DECODE)
    # 3 layers of 8 pages of 4 tokens of 16 + 8 features of 4 bytes
    assert sum(pool.nbytes for pool in jax.tree.leaves(cache)) == 3 * 8 * 4 * (16 + 8) * 4
    assert page_bytes(cfg, 4, jnp.float32) == {0: 3 * 4 * (16 + 8) * 4}
    assert page_bytes(cfg, 4, jnp.int8) == {0: 3 * 4 * (16 + 8 + 4)}  # a scale per token


def test_flops_count_expanded_keys_and_values():
    """One token: two per weight of each layer's products, and two per feature of q k and p v."""
    D, N, H, V, q_rank, latent, rotated = 32, 4, 20, 16, 24, 16, 8
    mixer = D * (q_rank + latent + rotated + N * V) + N * H * q_rank + N * (12 + V) * latent
    mlp, experts = 3 * D * 48, 3 * D * (2 + 1) * 20 + 6 * D  # two of 6 experts, a shared one
    weights = 3 * mixer + mlp + 2 * experts + 64 * D
    assert forward_flops(CFG, np.array([1])) == 2 * weights + 3 * 2 * N * (H + V)


def test_mscale_all_dim_scales_the_scores_of_all_features():
    mixer = config_from_hf(JSON["deepseek_v3"]).layers[0].mixer
    amplitude = 0.1 * 2.0 * math.log(4.0) + 1  # mscale_all_dim 2, factor 4
    assert mixer.spec(TRAIN).scale == pytest.approx(20**-0.5 * amplitude**2)


@pytest.mark.parametrize("name", JSON)
def test_the_projections_are_linear_layers_of_adapters(name):
    layers = linear_layers(config_from_hf(JSON[name]))
    q = ["q_a_proj", "q_b_proj"] if name == "glm4_moe_lite" else ["q_proj"]
    names = {f"self_attn.{part}" for part in (*q, "kv_a_proj_with_mqa", "kv_b_proj", "o_proj")}
    assert {layer for layer in layers if "self_attn" in layer} == names


@pytest.mark.parametrize("name", JSON)
def test_the_config_survives_export(name):
    cfg = config_from_hf(JSON[name])
    assert config_from_hf(config_to_hf(cfg)) == cfg


PUBLISHED = dict(
    auto_map=dict(AutoModelForCausalLM="modeling_deepseek.DeepseekV3ForCausalLM"),
    scoring_func="sigmoid",
    topk_method="noaux_tc",
    moe_layer_freq=1,
    ep_size=1,
    seq_aux=True,
    aux_loss_alpha=0.001,
    model_type="kimi_k2",
)


def test_entries_of_published_files_change_nothing():
    assert config_from_hf(JSON["deepseek_v3"] | PUBLISHED) == config_from_hf(JSON["deepseek_v3"])


@pytest.mark.parametrize(
    ("name", "change", "message"),
    [
        ("deepseek_v3", dict(scoring_func="softmax"), "scoring_func is 'softmax'"),
        ("deepseek_v3", dict(num_key_value_heads=2), "num_key_value_heads is 2"),
        ("deepseek_v3", dict(head_dim=16), "head_dim is 16"),
        ("deepseek_v3", dict(qk_head_dim=16), "qk_head_dim is 16"),
        ("deepseek_v3", dict(index_topk=4), "index_topk is 4"),
        ("deepseek_v3", dict(auto_map=dict(AutoModel="modeling_x.Model")), "auto_map names code"),
        ("glm4_moe_lite", dict(first_k_dense_replace=2), "first_k_dense_replace=2 is ignored"),
        ("glm4_moe_lite", dict(mlp_layer_types=["dense"] * 2), "mlp_layer_types has 2 entries"),
        ("glm4_moe_lite", dict(mlp_layer_types=["dense"] * 3), "layer with experts"),
        ("glm4_moe_lite", dict(qk_rope_head_dim=7, head_dim=7, qk_head_dim=19), "7 rotated"),
    ],
)
def test_fields_that_contradict_the_heads_or_are_not_read_are_refused(name, change, message):
    with pytest.raises(ValueError, match=message):
        config_from_hf(JSON[name] | change)
