"""Models with an int8 or nf4 base against the same model with the dequantized weights."""

import dataclasses
import itertools

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from jaxrl.config.keys import LoRAConfig
from jaxrl.models.decoder import decoder_specs
from jaxrl.models.files.hf_load import load_model, load_params, model_config
from jaxrl.models.files.hf_save import param_tensors, save_model
from jaxrl.models.layers.linear import Linear, make_spec
from jaxrl.models.lora import add_adapters, combine, split, with_adapters
from jaxrl.models.packed import forward_packed
from jaxrl.models.spec import init_params, partition_specs
from sharding import TRAIN, make_mesh
from tests.marks import graded
from tests.models.test_parity import GOLDEN, golden


def model_of(name, folder, base_dtype, *, stacked=False):
    """The checkpoint in `folder` with random adapters on all linear layers."""
    shape = dataclasses.replace(model_config(GOLDEN / name), stacked=stacked)
    cfg = with_adapters(LoRAConfig(rank=2, base_dtype=base_dtype), shape)
    base = load_params(folder, TRAIN, cfg, jnp.float32)
    model = add_adapters(base, cfg.lora, seed=0, rules=TRAIN, dtype=jnp.float32)
    return jax.tree.map_with_path(filled, model)


def filled(path, leaf):
    """The leaf; the B of adapters, which starts at zero, with numbers."""
    if "lora" not in jax.tree_util.keystr(path) or np.any(leaf):
        return leaf
    values = 0.1 * jnp.cos(jnp.arange(leaf.size)).reshape(leaf.shape)
    return jax.device_put(values.astype(leaf.dtype), leaf.sharding)


def numbers(model, tokens):
    """(logits, gradient of the adapters)."""
    trained, frozen = split(model)
    positions = jnp.broadcast_to(jnp.arange(tokens.shape[1]), tokens.shape)

    @jax.jit
    def run(trained, frozen):
        def logits(trained):
            whole = combine(trained, frozen)
            ones = jnp.ones_like(tokens)
            hidden = forward_packed(whole, tokens, ones, positions, rules=TRAIN)
            return whole.logits(hidden, TRAIN)

        out, backward = jax.vjp(logits, trained)
        return out, backward(jnp.cos(out))[0]

    return jax.device_get(run(trained, frozen))


THOROUGH = (
    ("llama", "nf4", False),
    ("llama", "int8", False),
    ("qwen2", "int8", True),
    ("mixtral", "nf4", True),
)
EVERY = itertools.product(
    ("llama", "qwen2", "mixtral", "qwen3_moe"), ("int8", "nf4"), (False, True)
)


@pytest.mark.parametrize(("name", "kind", "stacked"), graded(EVERY, thorough=THOROUGH))
def test_a_quantized_base_gives_the_numbers_of_its_dequantized_weights(
    name, kind, stacked, tmp_path, one_device
):
    tokens, _ = golden(name)
    quantized = load_model(GOLDEN / name, rules=TRAIN, base_dtype=kind, stacked=stacked)[1]
    save_model(tmp_path / "dense", quantized)
    got = numbers(model_of(name, GOLDEN / name, kind, stacked=stacked), tokens)
    want = numbers(model_of(name, tmp_path / "dense", "auto", stacked=stacked), tokens)
    for a, b in zip(*map(jax.tree.leaves, (got, want)), strict=True):
        # Scales after the sum round in another way than scales of the weights.
        np.testing.assert_allclose(a, b, rtol=0, atol=2e-4 * max(np.abs(b).max(), 1.0))


def test_backward_keeps_no_copy_of_a_quantized_weight_in_the_dtype_of_activations(one_device):
    # W [64, 128]: 32 KiB in float32, 8 KiB in int8, 4 KiB + scales in nf4
    x = jnp.ones((1, 4, 128))
    for kind, most in (("int8", 8192 + 4 * 64), ("nf4", 4096 + 4 * 2 * 64)):
        shape, axes = (64, 128), ("ffw", "w_embed")
        layer = Linear(make_spec(""), "up", "BTD,FD->BTF", shape, axes, base_dtype=kind)
        layer = init_params(jax.random.key(0), layer, TRAIN, jnp.float32)
        _, backward = jax.vjp(lambda x, layer=layer: layer(x, TRAIN), x)
        kept = sum(leaf.nbytes for leaf in jax.tree.leaves(backward) if hasattr(leaf, "nbytes"))
        assert 0 < kept <= most + 2 * x.nbytes


@pytest.mark.parametrize(
    ("kind", "sizes"), [("int8", dict(fsdp=2, tensor=2)), ("nf4", dict(fsdp=4))]
)
def test_a_mesh_loads_the_quantized_weights_of_one_device(kind, sizes):
    with jax.set_mesh(make_mesh()):
        one = load_model(GOLDEN / "qwen2", rules=TRAIN, base_dtype=kind)[1]
        want = {t.name: t.read() for t in param_tensors(one, None)}
    with jax.set_mesh(make_mesh(**sizes)):
        model = load_model(GOLDEN / "qwen2", rules=TRAIN, base_dtype=kind, stacked=True)[1]
        specs = jax.tree.leaves(partition_specs(decoder_specs(model.cfg), TRAIN))
        for leaf, spec in zip(jax.tree.leaves(model), specs, strict=True):
            assert leaf.sharding.is_equivalent_to(
                jax.NamedSharding(jax.sharding.get_mesh(), spec), leaf.ndim
            )
        found = {t.name: t.read() for t in param_tensors(model, None)}
    with jax.set_mesh(make_mesh()):
        plain = {
            t.name: t.read()
            for t in param_tensors(load_model(GOLDEN / "qwen2", rules=TRAIN)[1], None)
        }
    assert found.keys() == want.keys() == plain.keys()
    for name, values in want.items():
        np.testing.assert_array_equal(found[name], values)
        changed = np.abs(values - plain[name]).max()
        matrix = "_proj.weight" in name
        assert (0 < changed < 0.2 * np.abs(plain[name]).max()) if matrix else changed == 0
