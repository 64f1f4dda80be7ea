"""Which layers have adapters, what training changes, and that a mesh changes no number."""

import dataclasses

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest

from jaxrl.config.keys import LoRAConfig
from jaxrl.models.config import LoRA, uniform_decoder
from jaxrl.models.decoder import decoder_specs, init_model
from jaxrl.models.files.hf_load import model_config
from jaxrl.models.files.peft_config import peft_config, read_peft_config
from jaxrl.models.layers.mlp import SHARED_GATE
from jaxrl.models.lora import (
    adapters,
    add_adapters,
    check_frozen_parts,
    combine,
    split,
    with_base,
    without_adapters,
)
from jaxrl.models.spec import is_spec
from sharding.rules import TRAIN
from tests.models.resized import resized
from tests.models.test_parity import GOLDEN

TINY = uniform_decoder("llama", L=2, D=16, N=4, K=2, H=8, F=24, V=32)
MIXTURE = resized(TINY, family="qwen3_moe", E=4, top_k=2, F_expert=24)
LINEAR = ("q_proj", "k_proj", "v_proj", "o_proj", "gate_proj", "up_proj", "down_proj")


@pytest.mark.parametrize(
    ("targets", "excluded", "want"),
    [
        (("all-linear",), (), LINEAR),
        (("q_proj", "v_proj"), (), ("q_proj", "v_proj")),
        ((r"self_attn\..*",), (), LINEAR[:4]),
        (("[qkv]_proj", "mlp.up_proj"), ("v_proj",), ("q_proj", "k_proj", "up_proj")),
        (("all-linear",), (r"mlp\..*", "o_proj"), LINEAR[:3]),
    ],
)
def test_target_modules_are_names_and_regular_expressions(targets, excluded, want):
    cfg = LoRAConfig(rank=2, alpha=3.0, target_modules=targets, exclude_modules=excluded)
    lora = adapters(cfg, TINY)
    assert lora is not None and sorted(lora.targets) == sorted(want)
    specs = decoder_specs(dataclasses.replace(TINY, lora=lora))
    names = {spec.hf for spec in jax.tree.leaves(specs, is_leaf=is_spec) if "lora" in spec.hf}
    assert {name.split(".")[-3] for name in names} == set(want) and len(names) == 4 * len(want)


@pytest.mark.parametrize(
    ("changes", "words"),
    [
        (dict(target_modules=("q_prj",)), r"'q_prj' matches no linear layer.*mean 'q_proj'"),
        (dict(exclude_modules=("lm_hed",)), "exclude_modules: 'lm_hed' .*mean 'lm_head'"),
        (dict(target_modules=("(",)), "no regular expression"),
        (dict(target_modules=("q_proj",), exclude_modules=(".*",)), "exclude fewer"),
        (dict(rank=17), r"rank=17 is above.*k_proj \[16, 16\]; set at most 16"),
    ],
)
def test_adapters_that_cannot_be_are_refused(changes, words):
    with pytest.raises(ValueError, match=words):
        adapters(LoRAConfig(**dict(rank=2) | changes), TINY)


def test_all_linear_leaves_out_the_tables_and_their_names_choose_them():
    cfg = LoRAConfig(rank=2, target_modules=("q_proj", "embed_tokens", "lm_head"))
    lora = adapters(cfg, TINY)
    assert lora is not None and lora.targets == ("q_proj", "embed_tokens", "lm_head")
    trained = split(decoder_specs(dataclasses.replace(TINY, lora=lora)))[0]
    specs = {spec.hf: spec.shape for spec in jax.tree.leaves(trained, is_leaf=is_spec)}
    tables = {name: shape for name, shape in specs.items() if "q_proj" not in name}
    assert tables == {
        "model.embed_tokens.lora_embedding_A": (2, 32),
        "model.embed_tokens.lora_embedding_B": (16, 2),
        "lm_head.lora_A.weight": (2, 16),
        "lm_head.lora_B.weight": (32, 2),
    }
    critic = split(decoder_specs(dataclasses.replace(TINY, lora=lora, heads=("score",))))[0]
    names = {spec.hf for spec in jax.tree.leaves(critic, is_leaf=is_spec)}
    assert "score.weight" in names and "lm_head.lora_A.weight" not in names


@pytest.mark.parametrize(
    ("decoder", "settings", "words"),
    [
        (dict(tied=True), {}, "lm_head: this llama model ties .* leave lm_head out"),
        ({}, dict(dora=True), "no magnitudes.*lora.dora=False"),
        ({}, dict(init="pissa"), r"no principal start.*lora.init='default'"),
    ],
)
def test_tables_that_cannot_have_adapters_are_refused(decoder, settings, words):
    base = dataclasses.replace(TINY, **decoder)
    lora = adapters(LoRAConfig(rank=2, target_modules=("lm_head",), **settings), base)
    with pytest.raises(ValueError, match=words):
        decoder_specs(dataclasses.replace(base, lora=lora))


def test_the_scale_is_that_of_lora_and_of_rank_stabilized_lora():
    assert LoRA(rank=16, alpha=8.0).scale == 0.5
    assert LoRA(rank=16, alpha=8.0, rslora=True).scale == 2.0


@pytest.mark.parametrize("stacked", [False, True])
def test_new_magnitudes_are_the_norms_of_the_weights(stacked, one_device):
    base = init_model(dataclasses.replace(TINY, stacked=stacked), seed=0, rules=TRAIN)
    lora = adapters(LoRAConfig(rank=2, dora=True, target_modules=("q_proj", "o_proj")), TINY)
    model = add_adapters(base, lora, seed=1, rules=TRAIN, dtype=jnp.float32)
    attention = model.layers.attn if stacked else model.layers[0].attn
    q, o = attention.q, attention.o  # q [N, H, D], o [D, N, H], with the layers first if stacked
    np.testing.assert_allclose(q.lora.m, np.linalg.norm(q.w, axis=-1), rtol=1e-6)
    flat = np.reshape(o.w, (*o.w.shape[:-2], -1))
    np.testing.assert_allclose(o.lora.m, np.linalg.norm(flat, axis=-1), rtol=1e-6)
    trained = jax.tree.leaves(split(model)[0])
    assert len(trained) == (1 if stacked else TINY.L) * 2 * 3  # A, B and m of two projections


@pytest.mark.parametrize("stacked", [pytest.param(False, marks=pytest.mark.thorough), True])
def test_new_adapters_share_the_base_and_start_at_zero_change(stacked, one_device):
    base = init_model(dataclasses.replace(TINY, stacked=stacked), seed=0, rules=TRAIN)
    lora = adapters(LoRAConfig(rank=2), TINY)
    model = add_adapters(base, lora, seed=1, rules=TRAIN, dtype=jnp.float32)
    again = without_adapters(model)
    assert jax.tree.structure(again) == jax.tree.structure(base)
    assert all(a is b for a, b in zip(*map(jax.tree.leaves, (again, base)), strict=True))

    trained, frozen = split(model)
    specs = split(decoder_specs(model.cfg))[0]
    kinds = {
        spec.hf: leaf for spec, leaf in zip(*map(jax.tree.leaves, (specs, trained)), strict=True)
    }
    bound = 16**-0.5  # 1 / sqrt(in) of q_proj
    for name, values in kinds.items():
        if name.endswith("lora_B.weight"):
            assert not np.any(values)
        elif name.endswith("q_proj.lora_A.weight"):
            assert 0.5 * bound < np.abs(values).max() <= bound
    assert len(jax.tree.leaves(trained)) + len(jax.tree.leaves(frozen)) == len(
        jax.tree.leaves(model)
    )
    for whole in (combine(trained, frozen), with_base(trained, base)):
        assert jax.tree.structure(whole) == jax.tree.structure(model)
        assert all(a is b for a, b in zip(*map(jax.tree.leaves, (whole, model)), strict=True))


def test_stacked_and_listed_layers_start_with_the_same_adapters(one_device):
    found = []
    for stacked in (False, True):
        base = init_model(dataclasses.replace(TINY, stacked=stacked), seed=0, rules=TRAIN)
        lora = adapters(LoRAConfig(rank=2), TINY)
        found.append(add_adapters(base, lora, seed=1, rules=TRAIN, dtype=jnp.float32))
    listed, stacked = found
    for i in range(TINY.L):
        one, many = listed.layers[i].mlp.down.lora.a, stacked.layers.mlp.down.lora.a[i]
        np.testing.assert_array_equal(one, many)
    assert np.any(listed.layers[0].mlp.down.lora.a != listed.layers[1].mlp.down.lora.a)


def test_a_value_head_is_trained_with_the_adapters():
    lora = adapters(LoRAConfig(rank=2), TINY)
    specs = decoder_specs(dataclasses.replace(TINY, lora=lora, heads=("score",)))
    trained, frozen = split(specs)
    assert is_spec(trained.score) and isinstance(frozen.score, optax.MaskedNode)
    assert is_spec(frozen.embed) and isinstance(trained.embed, optax.MaskedNode)


def test_without_adapters_everything_is_trained():
    trained, frozen = split(decoder_specs(TINY))
    assert not jax.tree.leaves(frozen) and trained.cfg == TINY
    assert len(jax.tree.leaves(trained, is_leaf=is_spec)) == len(
        jax.tree.leaves(decoder_specs(TINY), is_leaf=is_spec)
    )


def layers_with_adapters(lora, decoder):
    """Names of the adapters' layers of the first layer, with one expert."""
    specs = decoder_specs(dataclasses.replace(decoder, lora=lora))
    names = [spec.hf for spec in jax.tree.leaves(specs, is_leaf=is_spec)]
    first = [n.removeprefix("model.layers.0.") for n in names if n.endswith("lora_A.weight")]
    return sorted(n.removesuffix(".lora_A.weight") for n in first if not n.startswith("model."))


SHARED = [f"mlp.shared_expert.{name}" for name in ("down_proj", "gate_proj", "up_proj")]


@pytest.mark.parametrize(
    ("targets", "want"),
    [
        (("all-linear",), SHARED),
        (("q_proj", "shared_expert.up_proj", "shared_expert_gate"), [SHARED[2], SHARED_GATE]),
        (("q_proj", "mlp.experts.up_proj"), ["mlp.experts.{expert}.up_proj"]),
        (("q_proj", "up_proj"), ["mlp.experts.{expert}.up_proj", SHARED[2]]),
    ],
)
def test_experts_and_a_shared_expert_are_different_targets(targets, want):
    decoder = resized(MIXTURE, family="qwen3_next", shared_F=8)
    lora = adapters(LoRAConfig(rank=2, target_modules=targets), decoder)
    found = layers_with_adapters(lora, decoder)
    assert [name for name in found if name.startswith("mlp")] == sorted(want)
    again = read_peft_config(peft_config(lora, ("vocab",), "base"), found)
    assert again.targets == tuple(sorted(lora.targets))


def test_a_list_of_peft_means_the_layers_that_have_tensors():
    config = peft_config(LoRA(2, 2.0, targets=("gate_proj",)), ("vocab",), "base")
    for module in ("mlp.gate_proj", "mlp.experts.0.gate_proj", "mlp.shared_expert.gate_proj"):
        targets = read_peft_config(config, {f"model.layers.0.{module}"}).targets
        assert targets == (("shared_expert." if "shared" in module else "") + "gate_proj",)


def test_targets_that_adapter_files_cannot_tell_apart_are_refused():
    mlp = dataclasses.replace(MIXTURE.layers[0], ffn=TINY.layers[0].ffn)
    decoder = dataclasses.replace(MIXTURE, layers=(mlp, MIXTURE.layers[1]))
    with pytest.raises(ValueError, match=r"mlp.gate_proj and mlp.experts.gate_proj are both gate_"):
        adapters(LoRAConfig(rank=2), decoder)
    adapters(LoRAConfig(rank=2, exclude_modules=(r"mlp\..*",)), decoder)


def test_adapters_of_experts_that_peft_does_not_read_are_refused():
    decoder = resized(MIXTURE, family="qwen3_5_moe", shared_F=8)
    lora = adapters(LoRAConfig(rank=2, target_modules=("up_proj",)), decoder)
    with pytest.raises(ValueError, match=r"PEFT reads none of qwen3_5_moe.*shared_expert.up_proj"):
        decoder_specs(dataclasses.replace(decoder, lora=lora))
    decoder = resized(MIXTURE, family="gpt_oss")
    with pytest.raises(ValueError, match=r"PEFT reads none of gpt_oss.*target_modules$"):
        decoder_specs(dataclasses.replace(decoder, lora=lora))


def test_all_linear_leaves_out_experts_next_to_an_mlp():
    decoder = model_config(GOLDEN / "gemma4_moe")
    found = layers_with_adapters(adapters(LoRAConfig(rank=2), decoder), decoder)
    assert sorted(name.partition(".")[2] for name in found) == sorted(LINEAR)


def test_experts_have_adapters_if_they_are_named():
    cfg = LoRAConfig(rank=2)
    assert sorted(adapters(cfg, MIXTURE).targets) == sorted(LINEAR[:4])
    cfg = LoRAConfig(rank=2, target_modules=("all-linear", "gate_proj", r"mlp\.experts\.down.*"))
    lora = adapters(cfg, MIXTURE)
    assert sorted(lora.targets) == sorted((*LINEAR[:4], "gate_proj", "down_proj"))
    trained = split(decoder_specs(dataclasses.replace(MIXTURE, lora=lora, stacked=True)))[0]
    specs = {spec.hf: spec for spec in jax.tree.leaves(trained, is_leaf=is_spec)}
    one = specs["model.layers.{layer}.mlp.experts.{expert}.down_proj.lora_B.weight"]
    assert (one.shape, one.hf_shape) == ((2, 4, 16, 2), (16, 2)) and len(specs) == 6 * 2
    assert one.axes == ("layers", "experts", "w_embed", None)
    with pytest.raises(ValueError, match=r"no magnitudes.*lora\.dora=False"):
        decoder_specs(dataclasses.replace(MIXTURE, lora=dataclasses.replace(lora, dora=True)))


TOWER = ["model.visual.blocks.0.attn.qkv.weight", "model.visual.merger.linear_fc1.weight"]


@pytest.mark.parametrize("pattern", ["model.visual.*", r"visual\.merger.*", r"(q_proj|.*\.qkv)"])
def test_target_modules_of_a_tower_are_refused(pattern):
    with pytest.raises(ValueError, match=r"matches model\.visual\..* is frozen; name layers"):
        check_frozen_parts((pattern,), TOWER)


def test_target_modules_of_the_language_model_may_have_the_names_of_the_whole_model():
    check_frozen_parts(("all-linear", "q_proj", "self_attn.*", "("), TOWER)
    whole = adapters(LoRAConfig(rank=2, target_modules=(r".*language_model.*\.[qv]_proj",)), TINY)
    assert whole == adapters(LoRAConfig(rank=2, target_modules=("q_proj", "v_proj")), TINY)
