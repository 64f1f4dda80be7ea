"""The same numbers on every mesh, in both layer layouts, packed or paged, with any remat policy.

Tests of jaxrl/models/decoder.py, paged.py, kv_cache.py and layers/moe.py.
"""

import dataclasses
import functools
import itertools
from collections.abc import Mapping
from pathlib import Path

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx

from jaxrl.models.decoder import Decoder
from jaxrl.models.files.hf_load import load_model, model_config
from jaxrl.models.kv_cache import init_cache
from jaxrl.models.packed import forward_packed
from jaxrl.models.paged import forward_paged
from jaxrl.types import Tree
from sharding import DECODE, TENSOR, TRAIN, make_mesh
from tests.marks import graded
from tests.models.smooth import smooth

GOLDEN = Path(__file__).parent / "golden"
EXPERTS = ["qwen3_moe", "mixtral", "glm4_moe", "gpt_oss"]
FAMILIES = ["llama", "qwen2", "qwen3", "mistral", "gemma2", "gemma3", *EXPERTS]
# Head sizes by layer; experts next to an MLP; keys of earlier layers and inputs of each layer.
GEMMA4 = ["gemma4", "gemma4_moe", "gemma4_shared"]
# Joint norms, fused projections, a plain MLP, short convolutions.
OTHER_LAYERS = ["olmo2", "phi3", "starcoder2", "lfm2"]
MESHES = {
    "fsdp": dict(fsdp=8),
    "tensor": dict(tensor=2),
    "fsdp_tensor": dict(fsdp=4, tensor=2),
    "hsdp": dict(replica=2, fsdp=4),
    "hsdp_tensor": dict(replica=2, fsdp=2, tensor=2),
}
EXPERT_MESHES = {
    "expert2": dict(expert=2),
    "expert4": dict(expert=4),
    "fsdp_expert": dict(fsdp=2, expert=2),
    "fsdp_expert_tensor": dict(fsdp=2, expert=2, tensor=2),
    "replica_expert": dict(replica=2, expert=4),
}
ROWS, LENGTH = 8, 32
STACKED = ("qwen2", "gemma3", "glm4_moe_lite", "gemma4", "gemma4_shared")  # in the test of pages
QUICK = graded(
    [
        *((f, "hsdp_tensor") for f in FAMILIES if f not in EXPERTS),
        ("llama", "fsdp"),
        ("qwen2", "fsdp_tensor"),
        ("mixtral", "fsdp_expert_tensor"),
        ("qwen3_moe", "replica_expert"),
        *((family, "hsdp_tensor") for family in OTHER_LAYERS),
        ("glm4_moe", "fsdp_expert_tensor"),
        ("glm4_moe", "replica_expert"),
        ("gpt_oss", "fsdp_expert_tensor"),
        ("glm4_moe_lite", "hsdp_tensor"),
        ("deepseek_v3", "fsdp_expert_tensor"),
        ("gemma4", "hsdp"),
        ("gemma4_moe", "fsdp_expert"),
        ("gemma4_shared", "fsdp_tensor"),
    ],
    default=[("llama", "hsdp_tensor")],
    thorough=[
        ("gemma2", "hsdp_tensor"), ("qwen2", "fsdp_tensor"), ("mixtral", "fsdp_expert_tensor"),
        ("olmo2", "hsdp_tensor"), ("phi3", "hsdp_tensor"), ("starcoder2", "hsdp_tensor"),
        ("lfm2", "hsdp_tensor"),
        ("glm4_moe", "fsdp_expert_tensor"), ("gpt_oss", "fsdp_expert_tensor"),
        ("glm4_moe_lite", "hsdp_tensor"), ("deepseek_v3", "fsdp_expert_tensor"),
        ("gemma4", "hsdp"), ("gemma4_moe", "fsdp_expert"), ("gemma4_shared", "fsdp_tensor"),
    ],
)  # fmt: skip


def rows(vocab_size: int = 256) -> tuple[np.ndarray, ...]:
    """(tokens, targets, segments, positions, mask), each [B, T]; two segments, then padding."""
    tokens = np.random.default_rng(0).integers(3, vocab_size, (ROWS, LENGTH)).astype(np.int32)
    lengths = (13, 14)
    segments = np.array([1] * 13 + [2] * 14 + [0] * 5, np.int32)
    positions = np.concatenate([np.arange(n) for n in (*lengths, 5)]).astype(np.int32)
    tile = functools.partial(np.tile, reps=(ROWS, 1))
    return tokens, np.roll(tokens, -1, 1), tile(segments), tile(positions), tile(segments > 0)


def loss(model: Decoder, batch: tuple, *, remat: str = "none") -> tuple[jax.Array, jax.Array]:
    """(mean negative logp of the targets, logp [B, T]); a tensor axis shards the residual."""
    tokens, targets, segments, positions, mask = batch
    rules = TENSOR if jax.sharding.get_abstract_mesh().shape["tensor"] > 1 else TRAIN
    hidden = forward_packed(model, tokens, segments, positions, rules=rules, remat=remat)
    logits = model.logits(hidden, TRAIN)
    one_hot = jax.nn.one_hot(targets, logits.shape[-1], out_sharding=jax.typeof(logits).sharding)
    logp = (one_hot * logits).sum(-1) - jax.nn.logsumexp(logits, axis=-1)
    return -(logp * mask).sum() / mask.sum(), logp


@functools.partial(jax.jit, static_argnames="remat")
def value_and_grad(model: Decoder, batch: tuple, remat: str = "none"):
    return jax.value_and_grad(functools.partial(loss, remat=remat), has_aux=True)(model, batch)


def on_mesh(
    family: str, mesh: Mapping[str, int], *, stacked: bool = False
) -> tuple[float, np.ndarray, Tree]:
    """Loss, logp and gradients, computed on a mesh of these sizes."""
    with jax.set_mesh(make_mesh(None, **mesh)):
        cfg, model = load_model(GOLDEN / family, rules=TRAIN, stacked=stacked)
        model = smooth(model) if family in GEMMA4 else model
        batch = tuple(jax.device_put(x, TRAIN.spec("batch", "time")) for x in rows(cfg.V))
        (value, logp), grads = value_and_grad(model, batch)
        for weight, grad in zip(jax.tree.leaves(model), jax.tree.leaves(grads), strict=True):
            assert grad.sharding == weight.sharding
        return float(value), np.asarray(logp), jax.device_get(grads)


@functools.cache
def alone(family: str, *, stacked: bool = False) -> tuple[float, np.ndarray, Tree]:
    """The same on one device."""
    return on_mesh(family, {}, stacked=stacked)


def assert_same(a: tuple, b: tuple) -> None:
    np.testing.assert_allclose(a[0], b[0], rtol=1e-6)
    np.testing.assert_allclose(a[1], b[1], rtol=1e-5, atol=1e-4)
    assert_close_trees(a[2], b[2])


def assert_close_trees(a: Tree, b: Tree) -> None:
    """Equal to 1e-5 of each leaf's largest value: sums over rows have another order."""
    for x, y in zip(jax.tree.leaves(a), jax.tree.leaves(b), strict=True):
        np.testing.assert_allclose(x, y, rtol=1e-5, atol=1e-5 * np.abs(y).max())


@pytest.mark.parametrize(("family", "mesh"), QUICK)
def test_a_mesh_gives_the_numbers_of_one_device(family, mesh):
    stacked = family.startswith("gemma")  # its many layers compile faster when stacked
    sizes = (MESHES | EXPERT_MESHES)[mesh]
    assert_same(on_mesh(family, sizes, stacked=stacked), alone(family, stacked=stacked))


EVERY = [(family, mesh) for family in FAMILIES for mesh in MESHES]
EVERY += [(family, mesh) for family in EXPERTS for mesh in EXPERT_MESHES]


@pytest.mark.slow
@pytest.mark.parametrize(("family", "mesh"), EVERY)
def test_every_mesh_gives_the_numbers_of_one_device_in_both_layouts(family, mesh):
    for stacked in (False, True):
        here = on_mesh(family, (MESHES | EXPERT_MESHES)[mesh], stacked=stacked)
        assert_same(here, alone(family, stacked=stacked))


@pytest.mark.thorough
@pytest.mark.parametrize(
    "family",
    ["qwen2", "gemma2", "qwen3_moe", "gemma4_moe", "gemma4_shared"],
)
def test_stacked_layers_give_the_numbers_of_a_list(family):
    value, logp, grads = alone(family)
    value_s, logp_s, grads_s = alone(family, stacked=True)
    np.testing.assert_allclose(value_s, value, rtol=1e-6)
    np.testing.assert_allclose(logp_s, logp, rtol=1e-5, atol=1e-4)
    cfg = model_config(GOLDEN / family)
    stacks = grads_s.layers if isinstance(grads_s.layers, nnx.List) else [grads_s.layers]
    for stack, layers in zip(stacks, itertools.chain(*cfg.runs), strict=True):
        for i, layer in enumerate(layers):
            one = jax.tree.map(lambda x, i=i: x[i], stack)
            assert_close_trees(one, grads.layers[layer])


@pytest.mark.thorough
@pytest.mark.parametrize(
    "stacked",
    [pytest.param(False, id="list", marks=pytest.mark.slow), pytest.param(True, id="stacked")],
)
def test_remat_does_not_change_gradients(stacked, one_device):
    _, model = load_model(GOLDEN / "llama", rules=TRAIN, stacked=stacked)
    batch = tuple(jax.device_put(x, TRAIN.spec("batch", "time")) for x in rows())
    (value, _), grads = value_and_grad(model, batch)
    for remat in ("mlp", "dots", "full"):
        (value_r, _), grads_r = value_and_grad(model, batch, remat=remat)
        np.testing.assert_allclose(float(value_r), float(value), rtol=1e-6)
        assert_close_trees(jax.device_get(grads_r), jax.device_get(grads))


@pytest.mark.parametrize(
    ("family", "mesh"),
    graded(
        [
            ("llama", dict(fsdp=2, tensor=2)),
            *((f, {}) for f in FAMILIES if f != "mixtral"),
            ("mixtral", dict(expert=2, tensor=2)),
            ("glm4_moe_lite", {}),
            ("deepseek_v3", dict(fsdp=2, tensor=2)),
            *((f, {}) for f in GEMMA4),
            ("gemma4_shared", dict(fsdp=2, tensor=2)),
        ],
        default=[("llama", dict(fsdp=2, tensor=2))],
        thorough=[
            ("gemma3", {}),
            ("qwen3_moe", {}),
            ("mixtral", dict(expert=2, tensor=2)),
            ("glm4_moe_lite", {}),
            ("deepseek_v3", dict(fsdp=2, tensor=2)),
            *((f, {}) for f in GEMMA4),
            ("gemma4_shared", dict(fsdp=2, tensor=2)),
        ],
    ),
)
def test_paged_tokens_give_the_hidden_states_of_a_packed_row(family, mesh):
    """Two rows: 10 tokens of prefill (one row padded), then decode, in scattered pages."""
    tokens, page_len, n_pages = rows(64)[0][:2, :16], 4, 16
    table = jnp.array([[3, 9, 1, 14], [7, 2, 12, 5]], jnp.int32)
    with jax.set_mesh(make_mesh(None, **mesh)):
        cfg, model = load_model(GOLDEN / family, rules=TRAIN, stacked=family in STACKED)
        places = jnp.broadcast_to(jnp.arange(16), tokens.shape)
        rules = dataclasses.replace(TRAIN, batch=None)
        packed = jax.jit(functools.partial(forward_packed, rules=rules))
        expected = np.asarray(packed(model, jnp.asarray(tokens), jnp.ones_like(tokens), places))
        cache = init_cache(cfg, n_pages, page_len, jnp.float32, DECODE)
        paged = jax.jit(functools.partial(forward_paged, rules=DECODE, implementation="reference"))
        start = np.array([10, 7])  # prompt lengths
        positions = np.where(np.arange(10) < start[:, None], np.arange(10), -1).astype(np.int32)
        hidden, cache = paged(model, jnp.asarray(tokens[:, :10]), positions, cache, {0: table})
        close = functools.partial(np.testing.assert_allclose, rtol=1e-4, atol=1e-5)
        for row in range(2):
            close(np.asarray(hidden)[row, : start[row]], expected[row, : start[row]])
        for step in range(6):
            at = (start + step)[:, None].astype(np.int32)
            hidden, cache = paged(model, np.take_along_axis(tokens, at, 1), at, cache, {0: table})
            close(np.asarray(hidden)[:, 0], np.take_along_axis(expected, at[..., None], 1)[:, 0])
