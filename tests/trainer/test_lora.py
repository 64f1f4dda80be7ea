"""Training with low-rank adapters: the base stays, the adapters learn, exports and resume."""

import contextlib
import json
import shutil
from pathlib import Path

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from safetensors.numpy import load_file, save_file

from jaxrl import convert
from jaxrl.checkpoint.saved_arrays import SavedArrays
from jaxrl.config.resolve import resolve
from jaxrl.evaluate import evaluate, read
from jaxrl.models.files.adapter import load_with_adapters, save_adapter
from jaxrl.models.files.hf_load import model_config
from jaxrl.models.lora import with_adapters
from jaxrl.train import train
from jaxrl.trainer.phases.sampling import policy_on_host
from sharding import TRAIN, make_mesh
from tests.marks import graded
from tests.trainer.test_train import metrics


@pytest.fixture
def lora_config(tiny_config):
    """2 steps with a KL loss against the base."""
    tiny_config.total_steps = 2
    tiny_config.lora.rank, tiny_config.lora.alpha = 4, 8.0
    tiny_config.lora.exclude_modules = ("o_proj",)
    tiny_config.learner.lr = 0.05
    tiny_config.algorithm.kl_coef, tiny_config.algorithm.kl_in = 0.1, "loss"
    return tiny_config


@pytest.fixture
def tables_config(lora_config, untied):
    """The same with adapters of the embedding table and the unembedding too."""
    lora_config.model.path = str(untied)
    lora_config.lora.target_modules = ("all-linear", "embed_tokens", "lm_head")
    return lora_config


@pytest.mark.thorough
def test_a_run_trains_adapters_and_exports_them_and_the_merged_model(lora_config):
    assert train(resolve(lora_config))
    first, second = [m for m in metrics(lora_config.run_dir) if "loss/total" in m]
    assert abs(first["loss/kl"]) < 1e-6 < second["loss/kl"]
    assert first["mismatch/logp_diff_max"] < 1e-5 and second["mismatch/logp_diff_max"] < 1e-5

    folder = Path(lora_config.run_dir)
    base = load_file(Path(lora_config.model.path) / "model.safetensors")
    merged = load_file(folder / "hf" / "model.safetensors")
    adapter = load_file(folder / "adapter" / "adapter_model.safetensors")
    config = json.loads((folder / "adapter" / "adapter_config.json").read_text())
    assert config["r"] == 4 and "o_proj" not in config["target_modules"]
    prefix = "base_model.model."
    for name, weight in base.items():
        change = np.zeros_like(weight)
        module = prefix + name.removesuffix("weight")
        if module + "lora_A.weight" in adapter:
            a, b = adapter.pop(module + "lora_A.weight"), adapter.pop(module + "lora_B.weight")
            assert np.abs(b).max() > 0.01
            change = 2.0 * b @ a
        np.testing.assert_allclose(merged[name], weight + change, atol=1e-6)
    assert not adapter and merged.keys() == base.keys()


def weights(config):
    return load_file(Path(config.run_dir) / "adapter" / "adapter_model.safetensors")


def write_adapter(config, folder):
    """Writes new adapters of the config's model."""
    cfg = with_adapters(resolve(config).lora, model_config(config.model.path))
    with jax.set_mesh(make_mesh()):
        model = load_with_adapters(Path(config.model.path), TRAIN, cfg, jnp.float32, seed=7)
        save_adapter(folder, model, base=config.model.path)


def remove(name):
    return lambda folder: (folder / name).unlink()


def more_tensors(folder):
    path = folder / "adapter_model.safetensors"
    name = "base_model.model.model.layers.7.self_attn.q_proj.lora_A.weight"
    save_file(load_file(path) | {name: np.zeros((4, 32), np.float32)}, path)


@pytest.mark.parametrize(
    ("changes", "change", "words"),
    [
        (dict(target_modules=("q_prj",)), None, "'q_prj' matches no .*did you mean 'q_proj'"),
        (dict(rank=33), None, r"rank=33 is above the rank of self_attn\.k_proj.*set at most 16"),
        (dict(rank=5), lambda folder: None, r"rank 4, not 5; set config\.lora\.rank"),
        (dict(), remove("adapter_config.json"), r"there is no adapter_config\.json"),
        (dict(), remove("adapter_model.safetensors"), r"there is no adapter_model\.safetensors"),
        (dict(), more_tensors, r"1 tensors are unknown: .*layers\.7\.self_attn\.q_proj\.lora_A"),
    ],
)
def test_bad_adapters_are_refused_before_devices_open(
    changes, change, words, lora_config, tmp_path, monkeypatch
):
    if change is not None:
        write_adapter(lora_config, tmp_path / "adapter")
        change(tmp_path / "adapter")
        lora_config.lora.path = str(tmp_path / "adapter")
    lora_config.lora.update(changes)
    monkeypatch.setattr("jaxrl.trainer.setup.opening.open_policy", lambda *_: pytest.fail("opened"))
    with pytest.raises(ValueError, match=words):
        train(resolve(lora_config))


@pytest.mark.thorough
def test_a_resumed_run_is_bitwise_equal_and_saves_adapters_only(tables_config, tmp_path):
    tables_config.checkpoint.every = 1
    write_adapter(tables_config, tmp_path / "adapter")
    tables_config.lora.path = str(tmp_path / "adapter")
    assert train(resolve(tables_config))
    shutil.rmtree(tmp_path / "adapter")  # a resumed run has its adapters from the checkpoint
    want = weights(tables_config)
    run_dir = Path(tables_config.run_dir)
    shapes = SavedArrays(run_dir / "checkpoints", 1).shapes
    saved = [name for name in shapes if name.startswith("params/")]
    assert saved and all("/lora/" in name for name in saved)
    exported = tmp_path / "exported"
    for part, folder, name in (
        ("policy", "hf", "model.safetensors"),
        ("adapter", "adapter", "adapter_model.safetensors"),
    ):
        convert.main(
            convert.read([str(run_dir), "--step=2", f"--output={exported}", f"--part={part}"])
        )
        for file in (run_dir / folder).glob("*.json"):
            assert (exported / file.name).read_text() == file.read_text()
        ours, theirs = load_file(exported / name), load_file(run_dir / folder / name)
        assert ours.keys() == theirs.keys()
        assert all(np.array_equal(ours[tensor], theirs[tensor]) for tensor in theirs)
        shutil.rmtree(exported)
    assert_resumes_bitwise(tables_config, run_dir, tmp_path / "resumed", want)


@pytest.mark.thorough
def test_merging_for_the_rollout_changes_a_run_by_rounding_only(lora_config, tmp_path):
    assert train(resolve(lora_config))
    want = weights(lora_config)
    lora_config.run_dir, lora_config.lora.merge = str(tmp_path / "merged"), True
    assert train(resolve(lora_config))
    lines = [m for m in metrics(lora_config.run_dir) if "loss/total" in m]
    assert 0 < lines[1]["mismatch/logp_diff_max"] < 1e-4  # the adapters are not zero any more
    found = weights(lora_config)
    for name in want:
        np.testing.assert_allclose(found[name], want[name], atol=2e-3, err_msg=name)


@pytest.mark.thorough
def test_an_idle_policy_in_host_memory_does_not_change_the_run(lora_config, tmp_path, monkeypatch):
    """Rollouts read merged adapters; the base, which the KL reads too, leaves the device."""
    lora_config.lora.merge, lora_config.rollout.release_kv = True, True
    assert train(resolve(lora_config))
    theirs, want, kinds = metrics(lora_config.run_dir), weights(lora_config), set()

    @contextlib.contextmanager
    def spying(core, engine):
        with policy_on_host(core, engine):
            kinds.update(leaf.sharding.memory_kind for leaf in jax.tree.leaves(core.state.params))
            yield

    monkeypatch.setattr("jaxrl.trainer.setup.engines.policy_on_host", spying)
    lora_config.run_dir, lora_config.learner.offload = str(tmp_path / "own"), ("policy",)
    assert train(resolve(lora_config))
    assert kinds == {"pinned_host"}
    assert metrics(lora_config.run_dir) == theirs
    found = weights(lora_config)
    assert all(np.array_equal(found[name], want[name]) for name in want)


@pytest.mark.thorough
def test_a_run_is_evaluated_merged_and_its_adapter_can_be_continued_from(lora_config, tmp_path):
    lora_config.total_steps, lora_config.learner.ema = 1, 0.5
    assert train(resolve(lora_config))
    run_dir = Path(lora_config.run_dir)
    assert evaluate(read([f"--model={run_dir}"]))
    assert (run_dir / "evaluation" / "summary.json").is_file()
    final, average = (load_file(run_dir / f / "model.safetensors") for f in ("hf", "hf_ema"))
    name = "model.layers.0.mlp.up_proj.weight"
    assert np.abs(final[name] - average[name]).max() > 1e-4
    np.testing.assert_array_equal(final["model.norm.weight"], average["model.norm.weight"])
    lora_config.lora.path = str(Path(lora_config.run_dir) / "adapter")
    lora_config.run_dir = str(tmp_path / "next")
    lora_config.learner.lr, lora_config.learner.ema = 0.0, 0.0
    first = weights_of(lora_config.lora.path)
    assert train(resolve(lora_config))
    found = weights(lora_config)
    assert all(np.array_equal(found[name], first[name]) for name in first)


def assert_resumes_bitwise(config, run_dir, resumed, want):
    """A copy of the run that continues from its checkpoint of step 1 ends with these adapters."""
    config.run_dir = str(resumed)
    shutil.copytree(run_dir / "checkpoints" / "1", resumed / "checkpoints" / "1")
    shutil.copy(run_dir / "config.json", resumed / "config.json")
    config.resume = True
    assert train(resolve(config))
    found = weights(config)
    assert all(np.array_equal(found[name], want[name]) for name in want)


def weights_of(folder):
    return load_file(Path(folder) / "adapter_model.safetensors")


@pytest.mark.parametrize(
    "sizes",
    graded(
        [
            dict(fsdp=2, tensor=2),
            dict(fsdp=2, sequence=2),
            dict(stage=2),
            dict(replica=2, fsdp=2),
            dict(fsdp=2, sequence=2, tensor=2),
            dict(sequence=2, ring=True),
            dict(sequence=4, tensor=2, ring=True),
        ],
        thorough=[dict(fsdp=2, tensor=2)],
    ),
    ids=str,
)
def test_every_mesh_gives_the_adapters_of_one_device(sizes, tables_config, tmp_path):
    tables_config.eval.every = 0
    # The first step has no advantages from another sampling order: responses are the same.
    tables_config.total_steps = 1
    assert train(resolve(tables_config))
    want = weights(tables_config)
    tables_config.run_dir, sizes = str(tmp_path / "mesh"), dict(sizes)
    if sizes.pop("ring", False):
        tables_config.learner.sequence_parallel = "ring"
        tables_config.learner.token_budget = 512  # four devices share rows of 8 blocks of 64
        tables_config.learner.buckets = (512,)
    for axis, size in sizes.items():
        setattr(tables_config.mesh, axis, size)
    assert train(resolve(tables_config))
    found = weights(tables_config)
    for name in want:
        np.testing.assert_allclose(found[name], want[name], atol=2e-4, err_msg=name)


@pytest.mark.slow
def test_dora_trains_magnitudes_in_engine_and_trainer_alike_on_a_mesh(lora_config, tmp_path):
    lora_config.lora.dora, lora_config.total_steps = True, 1
    assert train(resolve(lora_config))
    (line,) = [m for m in metrics(lora_config.run_dir) if "loss/total" in m]
    assert line["mismatch/logp_diff_max"] < 1e-5
    want = weights(lora_config)
    name = "base_model.model.model.layers.0.mlp.up_proj.lora_magnitude_vector"
    base = load_file(Path(lora_config.model.path) / "model.safetensors")
    norms = np.linalg.norm(base["model.layers.0.mlp.up_proj.weight"], axis=1)
    assert 0.01 < np.abs(want[name] - norms).max() < 0.1  # lr 0.05
    lora_config.run_dir = str(tmp_path / "mesh")
    lora_config.mesh.fsdp, lora_config.mesh.tensor = 2, 2
    assert train(resolve(lora_config))
    found = weights(lora_config)
    for name in want:
        np.testing.assert_allclose(found[name], want[name], atol=2e-4, err_msg=name)


@pytest.mark.slow
def test_pissa_starts_at_the_base_resumes_and_is_exported(lora_config, tmp_path):
    lora_config.lora.init, lora_config.checkpoint.every = "pissa", 1
    lora_config.learner.ema = 0.5
    lora_config.mesh.fsdp = 2
    assert train(resolve(lora_config))
    first, second = [m for m in metrics(lora_config.run_dir) if "loss/total" in m]
    assert abs(first["loss/kl"]) < 1e-6 < second["loss/kl"]  # the reference is the base
    assert first["mismatch/logp_diff_max"] < 1e-5 and second["mismatch/logp_diff_max"] < 1e-5
    want, run_dir = weights(lora_config), Path(lora_config.run_dir)
    base = load_file(Path(lora_config.model.path) / "model.safetensors")
    merged = load_file(run_dir / "hf" / "model.safetensors")
    name = "model.layers.0.mlp.up_proj."
    a, b = (want[f"base_model.model.{name}lora_{part}.weight"] for part in "AB")
    assert a.shape[0] == 8 and np.abs(b @ a).max() > 1e-3
    np.testing.assert_allclose(
        merged[f"{name}weight"], base[f"{name}weight"] + 2 * b @ a, atol=1e-6
    )
    for part, folder in (("policy", "hf"), ("adapter", "adapter"), ("ema", "hf_ema")):
        target = tmp_path / part
        convert.main(
            convert.read([str(run_dir), "--step=2", f"--output={target}", f"--part={part}"])
        )
        (ours,) = map(load_file, target.glob("*.safetensors"))
        (theirs,) = map(load_file, (run_dir / folder).glob("*.safetensors"))
        assert ours.keys() == theirs.keys()
        assert all(np.array_equal(ours[tensor], theirs[tensor]) for tensor in theirs)
    assert_resumes_bitwise(lora_config, run_dir, tmp_path / "resumed", want)


@pytest.mark.parametrize("kind", graded(["int8", "nf4"], thorough=["nf4"]))
def test_a_quantized_base_trains_adapters_resumes_and_is_exported(kind, lora_config, tmp_path):
    lora_config.lora.base_dtype = kind
    lora_config.checkpoint.every = 1
    lora_config.mesh.fsdp = 2 if kind == "nf4" else 1
    assert train(resolve(lora_config))
    lines = [m for m in metrics(lora_config.run_dir) if "loss/total" in m]
    assert all(line["mismatch/logp_diff_max"] < 1e-5 for line in lines)
    assert abs(lines[0]["loss/kl"]) < 1e-6 < lines[1]["loss/kl"]  # the reference is the base
    want, run_dir = weights(lora_config), Path(lora_config.run_dir)
    merged = load_file(run_dir / "hf" / "model.safetensors")
    name = "model.layers.0.mlp.up_proj."
    a, b = (want[f"base_model.model.{name}lora_{part}.weight"] for part in "AB")
    base = merged[f"{name}weight"] - 2.0 * b @ a
    original = load_file(Path(lora_config.model.path) / "model.safetensors")[f"{name}weight"]
    error = np.abs(base - original).max() / np.abs(original).max()
    assert 1e-4 < error < (0.02 if kind == "int8" else 0.2)
    assert_resumes_bitwise(lora_config, run_dir, tmp_path / "resumed", want)


@pytest.mark.thorough
def test_ppo_trains_adapters_of_actor_and_critic(lora_config):
    lora_config.algorithm.advantage = "gae"
    lora_config.critic.lr = 0.01
    assert train(resolve(lora_config))
    lines = [
        m for m in metrics(lora_config.run_dir) if "critic/loss" in m or "critic/grad_norm" in m
    ]
    assert len(lines) == 2 and all(line["critic/grad_norm"] > 0 for line in lines)
    base = load_file(Path(lora_config.model.path) / "model.safetensors")
    critic = load_file(Path(lora_config.run_dir) / "hf_critic" / "model.safetensors")
    changed = {name for name in critic if name in base and np.any(critic[name] != base[name])}
    assert changed and all("_proj" in name for name in changed) and np.any(critic["score.weight"])


def weights_on_meshes(config, folder, *meshes):
    """The adapters after a run on each mesh, which must agree; returns those of the first."""
    found = []
    for i, sizes in enumerate(meshes):
        config.run_dir = str(folder / f"mesh{i}")
        config.mesh.update(dict(fsdp=1, replica=1, tensor=1, expert=1) | sizes)
        assert train(resolve(config))
        found.append(weights(config))
    for other in found[1:]:
        assert other.keys() == found[0].keys()
        for name, want in found[0].items():
            np.testing.assert_allclose(other[name], want, atol=2e-4, err_msg=name)
    return found[0]


@pytest.mark.thorough
def test_a_value_head_on_the_backbone_trains_with_the_adapters(lora_config, tmp_path):
    lora_config.algorithm.advantage, lora_config.critic.shared = "gae", True
    lora_config.total_steps, lora_config.eval.every = 1, 0
    found = weights_on_meshes(lora_config, tmp_path, {}, dict(fsdp=2, tensor=2))
    assert np.abs(found["base_model.model.score.weight"]).max() > 0  # it starts at zero
    assert any(np.abs(found[name]).max() > 0.01 for name in found if "lora_B" in name)


@pytest.mark.thorough
@pytest.mark.parametrize("level", [1, 2])
def test_replicas_that_share_optimizer_state_train_the_same_adapters(level, lora_config, tmp_path):
    lora_config.total_steps, lora_config.eval.every = 1, 0
    lora_config.mesh.update(replica=2)
    assert train(resolve(lora_config))
    want = weights(lora_config)
    lora_config.learner.zero = level
    found = weights_on_meshes(lora_config, tmp_path, dict(replica=2))
    for name in want:
        np.testing.assert_allclose(found[name], want[name], atol=1e-6, err_msg=name)


@pytest.mark.thorough
def test_expert_parallelism_trains_the_same_adapters(lora_config, tiny_experts, tmp_path):
    lora_config.model.path = str(tiny_experts)
    lora_config.lora.target_modules = ("all-linear", "w1", "w2", "w3")
    lora_config.total_steps, lora_config.eval.every = 1, 0
    found = weights_on_meshes(lora_config, tmp_path, {}, dict(expert=2))
    assert any(".experts.3." in name and np.abs(found[name]).max() > 0.01 for name in found)


@pytest.mark.thorough
def test_asynchronous_rollouts_without_staleness_train_the_same_adapters(lora_config, tmp_path):
    assert train(resolve(lora_config))
    want = weights(lora_config)
    lora_config.run_dir = str(tmp_path / "async")
    lora_config.schedule.mode, lora_config.schedule.rollout_devices = "async", 1
    lora_config.schedule.max_staleness = 0
    assert train(resolve(lora_config))
    found = weights(lora_config)
    assert all(np.array_equal(found[name], want[name]) for name in want)
