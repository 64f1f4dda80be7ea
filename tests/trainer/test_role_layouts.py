"""Tests of jaxrl/layout.py in runs: a separate mesh per role (rollout, scoring, reference) gives
the run of one mesh, and rollout copies of the weights are freed."""

import json
from pathlib import Path

import jax
import numpy as np
import pytest

from jaxrl.config.resolve import resolve, resolve_evaluation
from jaxrl.evaluate import evaluate
from jaxrl.kernels.quantized import dequantize
from jaxrl.layout import check_idle_policy, rollout_layout
from jaxrl.models.config import uniform_decoder
from jaxrl.models.decoder import init_model
from jaxrl.models.lora import add_adapters, combine, split, with_adapters
from jaxrl.train import train
from sharding import bytes_per_device, make_mesh
from sharding.rules import TRAIN

NUMBERS = ("reward/mean", "loss/total", "optim/grad_norm", "mismatch/logp_diff_max")
MODEL = uniform_decoder("llama", L=2, D=32, N=4, K=2, H=8, F=64, V=64, max_len=256)


def steps(config) -> list[dict]:
    """Training metrics of a run of two steps."""
    config.total_steps, config.data.val = 2, ()
    config.rollout.max_num_seqs, config.checkpoint.export_hf = 8, False
    assert train(resolve(config))
    lines = (Path(config.run_dir) / "metrics.jsonl").read_text().splitlines()
    return [line for line in map(json.loads, lines) if "reward/mean" in line]


def assert_same_steps(ours: list[dict], theirs: list[dict]):
    assert len(ours) == len(theirs) == 2
    for one, other in zip(ours, theirs, strict=True):
        for name in NUMBERS:
            np.testing.assert_allclose(one[name], other[name], rtol=1e-4, atol=1e-5, err_msg=name)


@pytest.mark.thorough
def test_rollout_replicas_do_not_change_the_run(tiny_config, tmp_path):
    tiny_config.mesh.fsdp = 2
    tiny_config.rollout.layout = "training"
    theirs = steps(tiny_config)
    tiny_config.run_dir, tiny_config.rollout.layout = str(tmp_path / "own"), "replicas"
    ours = steps(tiny_config)
    assert_same_steps(ours, theirs)
    assert all(line["time/reshard_s"] > 0 for line in ours)
    assert not any("time/reshard_s" in line for line in theirs)


def test_resharded_weights_are_freed_after_the_rollout_and_shared_ones_kept(tiny_config):
    tiny_config.mesh.fsdp, tiny_config.mesh.tensor = 4, 2
    with jax.set_mesh(make_mesh(fsdp=4, tensor=2)):
        params = init_model(MODEL, seed=0, rules=TRAIN)
        layout = rollout_layout(resolve(tiny_config), MODEL, params.embed.dtype)
        with layout.weights(params) as there:
            assert jax.sharding.get_mesh().shape["replica"] == 4
            assert there.embed.sharding.spec[0] == "tensor"
            np.testing.assert_array_equal(there.embed, params.embed)
        assert there.embed.is_deleted() and not params.embed.is_deleted()
        assert not there.norm.w.is_deleted()
        np.testing.assert_array_equal(there.norm.w, params.norm.w)
        copied = sum(leaf.is_deleted() for leaf in jax.tree.leaves(there))
        assert layout.weight_bytes(params)[0] > 0 and copied == 2 + 7 * MODEL.L


def merging(tiny_config, **sizes):
    """(layout of a rollout that merges, params with adapters), on the current mesh."""
    tiny_config.mesh.update({"tensor": 1, "fsdp": 1} | sizes)
    tiny_config.lora.update(dict(rank=2, alpha=3.0, exclude_modules=("o_proj",), merge=True))
    cfg = resolve(tiny_config)
    base = init_model(MODEL, seed=0, rules=TRAIN)
    params = add_adapters(
        base, with_adapters(cfg.lora, MODEL).lora, seed=1, rules=TRAIN, dtype=base.embed.dtype
    )
    trained, frozen = split(params)
    params = combine(jax.tree.map(lambda leaf: leaf + 0.5, trained), frozen)
    return rollout_layout(cfg, params.cfg, params.embed.dtype), params


@pytest.mark.parametrize(
    "sizes",
    [
        dict(fsdp=1),
        pytest.param(dict(fsdp=2, tensor=2), marks=pytest.mark.thorough),
        pytest.param(dict(replica=2, tensor=2), marks=pytest.mark.thorough),
    ],
    ids=str,
)
def test_merged_weights_are_made_on_device_and_freed_after_the_rollout(tiny_config, sizes):
    with jax.set_mesh(make_mesh(**sizes)):
        layout, params = merging(tiny_config, **sizes)
        with layout.weights(params):  # compiles
            pass
        with jax.transfer_guard("disallow"), layout.weights(params) as there:
            pass
        assert there.cfg == MODEL
        with layout.weights(params) as there:
            for kept, read in ((params.layers[1].mlp.up, there.layers[1].mlp.up),
                               (params.layers[0].attn.q, there.layers[0].attn.q)):  # fmt: skip
                a, b = (np.asarray(kept.lora.a), np.asarray(kept.lora.b))
                want = np.asarray(kept.w) + 1.5 * np.tensordot(b, a, 1)
                np.testing.assert_allclose(read.w, want, atol=1e-6)
                assert read.w.sharding.spec[0] == "tensor" or "tensor" not in sizes
            same, o = there.layers[1].attn_norm.w, there.layers[0].attn.o.w
            np.testing.assert_array_equal(o, params.layers[0].attn.o.w)
        assert read.w.is_deleted() and not kept.w.is_deleted() and not same.is_deleted()
        assert o.is_deleted() == ("fsdp" in sizes and sizes["fsdp"] > 1)
        if layout.resharding is None:
            # float32, 2 layers, not o_proj; all of them are sharded over tensor
            merged = 4 * 2 * (3 * 64 * 32 + 32 * 32 + 2 * 16 * 32) // sizes.get("tensor", 1)
            base = bytes_per_device(init_model(MODEL, seed=0, rules=TRAIN))
            assert layout.weight_bytes(params) == (base - merged, 0)


@pytest.mark.thorough
def test_merged_weights_are_quantized_for_an_int8_rollout(tiny_config):
    tiny_config.rollout.dtype, tiny_config.algorithm.correction = "int8", "token_tis"
    with jax.set_mesh(make_mesh()):
        layout, params = merging(tiny_config)
        with layout.weights(params) as there:
            up, kept = there.layers[0].mlp.up, params.layers[0].mlp.up
            want = kept.w + 1.5 * np.asarray(kept.lora.b) @ np.asarray(kept.lora.a)
            assert up.lora is None and up.w.values.dtype == jax.numpy.int8
            np.testing.assert_allclose(dequantize(up.w), want, atol=np.abs(want).max() / 127)
        assert up.w.values.is_deleted() and not kept.w.is_deleted()


def test_one_device_and_pure_tensor_parallelism_need_no_resharding(tiny_config):
    for sizes in ({"fsdp": 1}, {"tensor": 2}):
        with jax.set_mesh(make_mesh(**sizes)):
            tiny_config.mesh.update({"fsdp": 1} | sizes)
            layout = rollout_layout(resolve(tiny_config), MODEL, jax.numpy.float32.dtype)
        assert layout.resharding is None


def test_a_policy_that_the_rollout_reads_cannot_be_offloaded(tiny_config):
    tiny_config.learner.offload, tiny_config.rollout.release_kv = ("policy",), True
    cfg, dtype = resolve(tiny_config), jax.numpy.float32.dtype
    with jax.set_mesh(make_mesh()):
        layout = rollout_layout(cfg, MODEL, dtype)
        with pytest.raises(ValueError, match=r"offload=.*never idle; leave out 'policy', or"):
            check_idle_policy(cfg, layout)
        tiny_config.lora.rank, tiny_config.lora.merge = 2, True
        cfg = resolve(tiny_config)
        check_idle_policy(cfg, rollout_layout(cfg, with_adapters(cfg.lora, MODEL), dtype))


@pytest.mark.parametrize(
    ("keys", "words"),
    [
        ({"tensor": 3}, "8 devices cannot be divided into replicas of 3 x 1 devices"),
        ({"tensor": 4}, "2 kv heads over tensor=4.*Set config.rollout.tensor"),
        (
            {"tensor": 2, "layout": "training"},
            "rollout.tensor=2 sets the size of a replica.*layout='training' has none",
        ),
    ],
)
def test_an_invalid_rollout_layout_is_rejected_with_the_keys_to_set(tiny_config, keys, words):
    tiny_config.rollout.update(keys)
    tiny_config.mesh.fsdp = 8
    with jax.set_mesh(make_mesh(fsdp=8)), pytest.raises(ValueError, match=words):
        rollout_layout(resolve(tiny_config), MODEL, jax.numpy.float32.dtype)


@pytest.mark.slow
def test_a_separate_mesh_per_role_does_not_change_the_run(tiny_config, tmp_path):
    """The update uses Ulysses (fsdp 2, sequence 2); scoring of old logprobs has no sequence axis.

    The reference has a tensor axis and is refreshed from the policy after every step.
    """
    tiny_config.mesh.fsdp, tiny_config.mesh.sequence = 2, 2
    tiny_config.learner.mini_batch_prompts = 2
    tiny_config.algorithm.kl_coef, tiny_config.algorithm.ref_refresh_every = 0.1, 1
    theirs = steps(tiny_config)
    tiny_config.run_dir = str(tmp_path / "own")
    tiny_config.score.sequence, tiny_config.ref.sequence, tiny_config.ref.tensor = 1, 1, 2
    ours = steps(tiny_config)
    assert_same_steps(ours, theirs)
    for one, other in zip(ours, theirs, strict=True):
        np.testing.assert_allclose(one["loss/kl"], other["loss/kl"], rtol=1e-3, atol=1e-6)


@pytest.mark.thorough
def test_a_reference_on_another_mesh_shares_the_base_of_the_adapters(
    tiny_config, tmp_path, monkeypatch
):
    tiny_config.mesh.fsdp, tiny_config.mesh.sequence = 2, 2
    tiny_config.lora.rank, tiny_config.learner.lr = 4, 0.05
    tiny_config.algorithm.kl_coef, tiny_config.algorithm.kl_in = 0.1, "loss"
    monkeypatch.setattr(
        "jaxrl.trainer.setup.opening.load_params", lambda *_: pytest.fail("loaded a second base")
    )
    theirs = steps(tiny_config)
    tiny_config.run_dir = str(tmp_path / "own")
    tiny_config.ref.sequence, tiny_config.ref.tensor = 1, 2
    ours = steps(tiny_config)
    assert_same_steps(ours, theirs)
    assert abs(ours[0]["loss/kl"]) < 1e-6 < ours[1]["loss/kl"]
    np.testing.assert_allclose(ours[1]["loss/kl"], theirs[1]["loss/kl"], rtol=1e-3)


@pytest.mark.thorough
@pytest.mark.parametrize("sizes", [dict(fsdp=1), dict(fsdp=2, tensor=2)])
def test_an_int8_copy_is_made_on_device_and_freed_after_the_rollout(tiny_config, sizes):
    tiny_config.mesh.update({"tensor": 1} | sizes)
    tiny_config.rollout.dtype, tiny_config.algorithm.correction = "int8", "token_tis"
    with jax.set_mesh(make_mesh(**sizes)):
        params = init_model(MODEL, seed=0, rules=TRAIN)
        before = [np.array(leaf) for leaf in jax.tree.leaves(params)]
        layout = rollout_layout(resolve(tiny_config), MODEL, params.embed.dtype)
        with layout.weights(params) as there:  # compiles
            pass
        with jax.transfer_guard("disallow"), layout.weights(params) as there:
            w = there.layers[0].mlp.up.w
            assert w.values.dtype == jax.numpy.int8 and w.values.sharding.spec[0] == "tensor"
            assert w.scale.sharding.spec[0] == "tensor"
        assert w.values.is_deleted() and w.scale.is_deleted()
        assert there.embed.is_deleted() == (
            "tensor" in sizes
        )  # without a tensor axis it is shared with training
        assert not there.norm.w.is_deleted()
        for leaf, old in zip(jax.tree.leaves(params), before, strict=True):
            np.testing.assert_array_equal(leaf, old)


@pytest.mark.thorough
def test_an_int8_rollout_with_speculation_is_measured_corrected_and_evaluated(
    tiny_config, tmp_path
):
    val = tiny_config.data.val
    tiny_config.rollout.dtype = tiny_config.rollout.kv_dtype = "int8"
    tiny_config.rollout.spec_tokens = 2
    tiny_config.algorithm.correction = "token_tis"
    for line in steps(tiny_config):
        assert 1e-6 < line["mismatch/logp_diff_max"] < 0.5
        assert line["time/reshard_s"] > 0
        assert 0 <= line["rollout/draft_acceptance"] < 1
    tiny_config.data.val, tiny_config.run_dir = val, str(tmp_path / "evaluation")
    assert evaluate(resolve_evaluation(tiny_config))
    summary = json.loads((tmp_path / "evaluation" / "summary.json").read_text())
    assert summary["results"]["all"]["response_len"] > 0


@pytest.mark.thorough
@pytest.mark.parametrize("mode", ["sync", "partial"])
def test_released_kv_pages_and_larger_scoring_calls_do_not_change_the_run(
    tiny_config, tmp_path, mode
):
    tiny_config.schedule.mode = mode
    tiny_config.algorithm.kl_coef, tiny_config.algorithm.old_logp = 0.01, "recompute"
    theirs = steps(tiny_config)
    tiny_config.run_dir, tiny_config.rollout.release_kv = str(tmp_path / "own"), True
    budget = 2 * tiny_config.learner.token_budget
    tiny_config.score.token_budget = tiny_config.ref.token_budget = budget
    ours = steps(tiny_config)
    assert_same_steps(ours, theirs)
    # A partial rollout allocates the pages when it starts, as part of time/gen_s.
    assert all(line["time/kv_s"] > 0 for line in ours)
    assert not any("time/kv_s" in line for line in theirs)
