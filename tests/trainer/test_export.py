"""Tests of jaxrl/trainer/export.py, jaxrl/checkpoint/saved_arrays.py and
jaxrl/models/files/hf_stream.py."""

import dataclasses
import json
import shutil
from pathlib import Path

import jax
import ml_dtypes
import numpy as np
import pytest
from safetensors.numpy import load_file, save_file

from jaxrl import convert
from jaxrl.checkpoint.checkpointer import Checkpointer
from jaxrl.config import resolve
from jaxrl.config.saved import to_json
from jaxrl.learner.state import OptState
from jaxrl.models.decoder import decoder_specs
from jaxrl.models.files.safetensors import map_tensor
from jaxrl.models.files.weight_files import find_tensors
from jaxrl.models.spec import hf_names, is_spec, map_specs
from jaxrl.train import train
from jaxrl.types import TrainState
from tests.marks import graded
from tests.models.resized import resized
from tests.trainer.conftest import LLAMA, write_model


def values_of(cfg, seed, dtype=np.float32):
    """Random numbers of every parameter."""
    rng = np.random.default_rng(seed)
    return map_specs(lambda s: rng.standard_normal(s.shape).astype(dtype), decoder_specs(cfg))


def sharded(tree, mesh):
    """The arrays on a mesh of two axes; axes of even length are split."""

    def put(array):
        even = [i for i, n in enumerate(array.shape) if n % 2 == 0]
        axes = dict(zip(even, ("x", "y"), strict=False))
        spec = jax.P(*(axes.get(i) for i in range(array.ndim)))
        return jax.device_put(array, jax.NamedSharding(mesh, spec))

    return jax.tree.map(put, tree)


def tensors(folder) -> dict[str, np.ndarray]:
    return {name: np.asarray(map_tensor(info)) for name, info in find_tensors(folder).items()}


def named(tree, cfg) -> dict[str, np.ndarray]:
    """The tensors of a file that has these arrays."""
    specs = jax.tree.leaves(decoder_specs(cfg), is_leaf=is_spec)
    return {
        name: leaf.reshape(-1, *spec.hf_shape)[i]
        for spec, leaf in zip(specs, jax.tree.leaves(tree), strict=True)
        for i, name in enumerate(hf_names(spec))
    }


def assert_equal(found, want):
    assert found.keys() == want.keys()
    for name in want:
        assert found[name].dtype == want[name].dtype, name
        np.testing.assert_array_equal(found[name], want[name], err_msg=name)


@pytest.fixture(params=[pytest.param("list", marks=pytest.mark.thorough), "stacked"])
def saved_run(request, tiny_config, two_layers):
    """(run folder, config of the model, policy, average, critic) with steps 3 and 5, 3 the best."""
    tiny_config.model.path = str(two_layers)
    tiny_config.algorithm.advantage = "gae"
    tiny_config.checkpoint.best_metric, tiny_config.eval.every = "val/reward", 1
    tiny_config.checkpoint.keep = 2
    run = resolve(tiny_config)
    run.run_path.mkdir()
    (run.run_path / "config.json").write_text(to_json(run))
    cfg = resized(LLAMA, L=2, stacked=request.param == "stacked")
    critic_cfg = dataclasses.replace(cfg, heads=("score",))
    policy = values_of(cfg, 0, ml_dtypes.bfloat16)
    average, critic = values_of(cfg, 1), values_of(critic_cfg, 2)
    explicit = (jax.sharding.AxisType.Explicit,) * 2
    mesh = jax.make_mesh((2, 2), ("y", "x"), axis_types=explicit, devices=jax.devices()[:4])
    checkpoints = Checkpointer(run.run_path / "checkpoints", run.checkpoint)
    with jax.set_mesh(mesh):
        opt = OptState(inner=(), master=(), ema=sharded(average, mesh))
        one = jax.device_put(np.int32(1), jax.NamedSharding(mesh, jax.P()))
        state = TrainState(sharded(policy, mesh), opt, one)
        values = TrainState(sharded(critic, mesh), OptState(inner=(), master=()), one)
        for step, reward in ((3, 0.9), (5, 0.2)):
            both = dataclasses.replace(state, critic=values)
            checkpoints.save(step, both, {}, {"val/reward": reward})
        checkpoints.close()
    return run.run_path, cfg, policy, average, critic


def export(run, target, *options):
    convert.main(convert.read([str(run), f"--output={target}", *options]))
    return tensors(target)


def test_the_parts_of_a_sharded_checkpoint_are_exported(saved_run, tmp_path, capsys):
    run, cfg, policy, average, critic = saved_run
    as_trained = jax.tree.map(lambda a: a.astype(ml_dtypes.bfloat16), average)
    assert_equal(export(run, tmp_path / "a", "--step=last"), named(policy, cfg))
    assert "policy of step 5, llama, 2 layers" in capsys.readouterr().out
    assert_equal(export(run, tmp_path / "b", "--step=best", "--part=ema"), named(as_trained, cfg))
    assert "ema of step 3, " in capsys.readouterr().out
    heads = dataclasses.replace(cfg, heads=("score",))
    found = export(run, tmp_path / "c", "--step=3", "--part=critic", "--max-shard-bytes=9000")
    assert_equal(found, named(critic, heads))
    assert (tmp_path / "c" / "model.safetensors.index.json").is_file()
    assert "ForSequenceClassification" in (tmp_path / "c" / "config.json").read_text()
    half = export(run, tmp_path / "d", "--step=5", "--dtype=float16")
    assert half["model.norm.weight"].dtype == np.float16
    template = (tmp_path / "a" / "chat_template.jinja").read_text()
    assert "im_start" in template and (tmp_path / "a" / "tokenizer.json").is_file()


@pytest.mark.thorough
@pytest.mark.parametrize("saved_run", ["list"], indirect=True)
def test_what_cannot_be_exported_is_named(saved_run, tmp_path, capsys):
    run = saved_run[0]

    def stopped(*options):
        with pytest.raises(SystemExit):
            export(run, tmp_path / "out", *options)
        assert not (tmp_path / "out").exists()
        return capsys.readouterr().err

    assert "--step=4 is not in" in stopped("--step=4") and "one of 3, 5" in stopped("--step=4")
    assert "set last, best or one of 3, 5" in stopped("--step=newest")
    with pytest.raises(ValueError, match=r"export a checkpoint with .* --step=last --output=DIR"):
        convert.resolve_model(run)
    settings = json.loads((run / "config.json").read_text())
    settings["checkpoint"]["best_metric"] = ""
    (run / "config.json").write_text(json.dumps(settings))
    assert "the run measured no checkpoint" in stopped("--step=best")
    settings["model"]["path"] = str(write_model(tmp_path / "model", LLAMA))
    (run / "config.json").write_text(json.dumps(settings))
    assert "is from another model: layers/1/" in stopped("--step=5")
    data, *_ = (run / "checkpoints" / "5" / "state" / "ocdbt.process_0").glob("d/*")
    data.write_bytes(bytes(data.stat().st_size))
    assert "does not match its checksum" in stopped("--step=5")


@pytest.mark.parametrize(
    "layout", graded(["one device", "mesh", "stages"], thorough=["one device", "stages"])
)
def test_the_last_checkpoint_is_the_export_of_the_run(tiny_config, two_layers, tmp_path, layout):
    source = shutil.copytree(two_layers, tmp_path / "source")
    drafter = {"mtp.norm.weight": np.ones(3, ml_dtypes.bfloat16)}
    save_file(load_file(source / "model.safetensors") | drafter, source / "model.safetensors")
    tiny_config.model.path, tiny_config.data.val = str(source), ()
    tiny_config.checkpoint.every = tiny_config.total_steps = 2
    tiny_config.learner.ema = 0.9
    if layout == "mesh":
        tiny_config.mesh.update(fsdp=4, tensor=2)
    if layout == "stages":
        tiny_config.mesh.update(fsdp=2, stage=2)
        tiny_config.model.layers = "stacked"
    cfg = resolve(tiny_config)
    train(cfg)
    for part, folder in (("policy", "hf"), ("ema", "hf_ema")):
        export(cfg.run_path, tmp_path / part, "--step=last", f"--part={part}")
        for file in (cfg.run_path / folder).iterdir():
            assert (tmp_path / part / file.name).read_bytes() == file.read_bytes(), file.name
    exported = load_file(tmp_path / "policy" / "model.safetensors")
    assert exported["mtp.norm.weight"].tobytes() == drafter["mtp.norm.weight"].tobytes()
    names = {file.name for file in (tmp_path / "policy").iterdir()}
    assert names == {Path(file).name for file in (cfg.run_path / "hf").iterdir()}
