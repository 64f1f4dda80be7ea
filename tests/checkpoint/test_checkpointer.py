"""Tests of jaxrl/checkpoint: bitwise, onto other meshes and layouts, never a partial one.

`read_weights` is tested in tests/serve/test_checkpoint_watcher.py.
"""

import os
import resource

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from jax.sharding import NamedSharding

from jaxrl.checkpoint.checkpointer import Checkpointer, best_step
from jaxrl.checkpoint.errors import CheckpointError
from jaxrl.config.keys import CheckpointConfig
from jaxrl.models.config import DecoderConfig, uniform_decoder
from jaxrl.models.decoder import decoder_specs
from jaxrl.models.spec import init_params, partition_specs
from jaxrl.types import TrainState
from sharding import Rules, make_mesh

RULES = Rules()
OPTIMIZER = optax.chain(optax.clip_by_global_norm(1.0), optax.adamw(1e-3))
HOST = {"data": {"epoch": 3, "order": [4, 1, 0]}, "seed": 2**53 + 1}


def tiny(**changes) -> DecoderConfig:
    return uniform_decoder(
        "llama",
        **({"L": 3, "D": 8, "N": 4, "K": 2, "H": 4, "F": 16, "V": 32, "tied": True} | changes),
    )


def make_state(cfg: DecoderConfig, optimizer=OPTIMIZER) -> TrainState:
    """Random numbers in the shapes and shardings of a trained state, on the mesh that is set."""
    rng = np.random.default_rng(0)

    def fill(leaf):
        values = rng.standard_normal(leaf.shape).astype(leaf.dtype)
        spec = leaf.sharding.spec if leaf.shape else jax.P()
        return jax.device_put(values, NamedSharding(jax.sharding.get_mesh(), spec))

    return jax.tree.map(fill, abstract_state(cfg, optimizer))


def abstract_state(cfg: DecoderConfig, optimizer=OPTIMIZER) -> TrainState:
    def init() -> TrainState:
        params = init_params(jax.random.key(0), decoder_specs(cfg), RULES, jnp.float32)
        return TrainState(params, optimizer.init(params), jnp.int32(7))

    return jax.eval_shape(init)


def abstract(state: TrainState) -> TrainState:
    return jax.tree.map(
        lambda a: jax.ShapeDtypeStruct(a.shape, a.dtype, sharding=a.sharding), state
    )


def shardings_of(tree) -> list:
    return [leaf.sharding for leaf in jax.tree.leaves(tree)]


def assert_bitwise_equal(a, b):
    assert jax.tree.structure(a) == jax.tree.structure(b)
    for x, y in zip(jax.tree.leaves(a), jax.tree.leaves(b), strict=True):
        assert x.dtype == y.dtype
        np.testing.assert_array_equal(np.asarray(x), np.asarray(y))


@pytest.fixture
def open_checkpointer(tmp_path):
    opened = []

    def make(**cfg) -> Checkpointer:
        opened.append(Checkpointer(tmp_path / "checkpoints", CheckpointConfig(**cfg)))
        return opened[-1]

    yield make
    for checkpointer in opened:
        checkpointer.close()


def numbers(step: int, n: int = 3, shape=(4, 8)) -> TrainState:
    """A small state without a model: every array is filled with `step` plus its index."""
    return TrainState(
        {"w": [jnp.full(shape, step + i, jnp.float32) for i in range(n)]}, (), jnp.int32(step)
    )


def test_a_restored_state_is_bitwise_the_saved_one(open_checkpointer):
    saving = open_checkpointer()
    with jax.set_mesh(make_mesh(fsdp=4, tensor=2)):
        state = make_state(tiny())
        saving.save(7, state, HOST)
        saving.wait()
    restored, host = open_checkpointer().restore(abstract(state))
    assert_bitwise_equal(state, restored)
    assert host == HOST
    assert shardings_of(restored) == shardings_of(state)


def test_eight_devices_restore_onto_four_in_another_layout(open_checkpointer):
    checkpointer, cfg = open_checkpointer(), tiny()
    with jax.set_mesh(make_mesh(fsdp=8)):
        state = make_state(cfg)
        checkpointer.save(1, state, HOST)
    mesh = make_mesh(fsdp=2, tensor=2)
    with jax.set_mesh(mesh):
        restored, _ = checkpointer.restore(abstract(make_state(cfg)))
        specs = partition_specs(decoder_specs(cfg), RULES)
    assert_bitwise_equal(state, restored)
    assert shardings_of(restored.params) == [
        jax.sharding.NamedSharding(mesh, spec) for spec in jax.tree.leaves(specs)
    ]


@pytest.mark.parametrize("stacked", [False, True])
def test_layers_restore_in_the_other_layout(open_checkpointer, stacked):
    checkpointer = open_checkpointer()
    with jax.set_mesh(make_mesh(fsdp=2, tensor=2)):
        state, other = make_state(tiny(stacked=stacked)), make_state(tiny(stacked=not stacked))
        checkpointer.save(1, state, HOST)
        restored, _ = checkpointer.restore(abstract(other))
    assert shardings_of(restored) == shardings_of(other)
    stack, layers = (state, restored) if stacked else (restored, state)
    for part in (lambda s: s.params.layers, lambda s: s.opt_state[1][0].mu.layers):
        for i in range(3):
            one = jax.tree.map(lambda w, i=i: w[i], part(stack))
            for x, y in zip(jax.tree.leaves(one), jax.tree.leaves(part(layers)[i]), strict=True):
                np.testing.assert_array_equal(np.asarray(x), np.asarray(y))


def test_shardings_over_an_abstract_mesh_restore_onto_the_mesh_that_is_set(open_checkpointer):
    checkpointer = open_checkpointer()
    mesh = make_mesh(fsdp=4)
    with jax.set_mesh(mesh):
        state = make_state(tiny())
        checkpointer.save(1, state, HOST)
        restored, _ = checkpointer.restore(abstract_state(tiny()))
        assert restored.params.embed.sharding.mesh == mesh
        assert_bitwise_equal(state, restored)


def test_donating_the_state_right_after_save_does_not_change_the_checkpoint(open_checkpointer):
    state = numbers(1, n=16, shape=(512, 512))
    expected = jax.tree.map(lambda a: np.asarray(a).copy(), state)
    checkpointer = open_checkpointer()
    checkpointer.save(1, state, HOST)
    overwrite = jax.jit(lambda s: jax.tree.map(lambda a: a * 0 - 1, s), donate_argnums=0)
    jax.block_until_ready(overwrite(state))
    restored, _ = checkpointer.restore(numbers(0, n=16, shape=(512, 512)))
    assert_bitwise_equal(expected, restored)


def test_later_changes_of_the_host_state_do_not_reach_the_checkpoint(open_checkpointer):
    checkpointer, host = open_checkpointer(), {"at": [1]}
    checkpointer.save(1, numbers(1), host)
    host["at"].append(2)
    assert checkpointer.restore(numbers(0))[1] == {"at": [1]}


def test_the_newest_and_the_best_checkpoints_are_kept(open_checkpointer):
    checkpointer = open_checkpointer(keep=2, best_metric="val/reward", best_mode="max")
    for step, value in [(1, 0.2), (2, 0.9), (3, 0.5), (4, 0.6), (5, float("nan"))]:
        checkpointer.save(step, numbers(step), HOST, {"val/reward": value})
    checkpointer.wait()
    assert checkpointer.all_steps() == [2, 4, 5]
    assert (best_step(checkpointer.directory, checkpointer.cfg), checkpointer.latest_step()) == (
        2,
        5,
    )


def test_the_smallest_is_best_in_mode_min(open_checkpointer):
    checkpointer = open_checkpointer(keep=1, best_metric="loss", best_mode="min")
    for step, value in [(1, 0.2), (2, 0.1), (3, 0.5), (4, 0.6)]:
        checkpointer.save(step, numbers(step), HOST, {"loss": value})
    checkpointer.wait()
    assert checkpointer.all_steps() == [2, 4]
    resumed = open_checkpointer(keep=1, best_metric="loss", best_mode="min")
    assert best_step(resumed.directory, resumed.cfg) == 2
    resumed.save(5, numbers(5), HOST, {"loss": 0.3})
    resumed.wait()
    assert resumed.all_steps() == [2, 5]


def test_saving_a_step_again_is_a_no_op_and_an_earlier_one_an_error(open_checkpointer):
    checkpointer = open_checkpointer()
    checkpointer.save(5, numbers(5), HOST)
    checkpointer.save(5, numbers(6), HOST)
    assert int(checkpointer.restore(numbers(0))[0].step) == 5
    with pytest.raises(CheckpointError, match="has the later step 5"):
        checkpointer.save(4, numbers(4), HOST)


@pytest.mark.parametrize(
    "changes, message",
    [
        ({"D": 12}, r"params/embed is \[32, 8\] in it and \[32, 12\] in this run"),
        ({"L": 4}, r"params/layers/3/.* is not in it"),
        ({"L": 2}, r"params/layers/2/.* is in it but not in this run"),
        ({"L": 4, "stacked": True}, r"params/layers/attn/k/w is not in it"),
        ({"L": 2, "stacked": True}, r"is not in it"),
        ({"tied": False}, r"params/lm_head is not in it"),
    ],
)
def test_another_architecture_is_one_clear_error(open_checkpointer, one_device, changes, message):
    checkpointer = open_checkpointer()
    checkpointer.save(1, make_state(tiny()), HOST)
    with pytest.raises(CheckpointError, match=message):
        checkpointer.restore(make_state(tiny(**changes)))


def test_fewer_layers_than_the_stacked_checkpoint_has_is_an_error(open_checkpointer, one_device):
    checkpointer = open_checkpointer()
    checkpointer.save(1, make_state(tiny(stacked=True)), HOST)
    with pytest.raises(CheckpointError, match="has 3 layers in it and 2 in this run"):
        checkpointer.restore(make_state(tiny(L=2)))


def test_another_optimizer_is_one_clear_error(open_checkpointer, one_device):
    checkpointer = open_checkpointer()
    checkpointer.save(1, make_state(tiny()), HOST)
    with pytest.raises(
        CheckpointError, match="opt_state/1/0/mu/embed is in it but not in this run"
    ):
        checkpointer.restore(make_state(tiny(), optimizer=optax.sgd(1e-3)))


def test_another_dtype_is_an_error_instead_of_a_silent_cast(open_checkpointer, one_device):
    checkpointer = open_checkpointer()
    checkpointer.save(1, numbers(1), HOST)
    other = jax.tree.map(lambda a: a.astype(jnp.bfloat16), numbers(1))
    with pytest.raises(CheckpointError, match="params/w/0 is float32 in it and bfloat16"):
        checkpointer.restore(other)


def test_the_error_about_an_empty_folder_says_what_to_set(open_checkpointer):
    checkpointer = open_checkpointer()
    assert checkpointer.latest_step() is None
    assert checkpointer.all_steps() == []
    with pytest.raises(CheckpointError, match=r"it has none; .*config\.resume=False"):
        checkpointer.restore(numbers(0))


def test_the_error_about_a_missing_step_names_the_existing_ones(open_checkpointer):
    checkpointer = open_checkpointer()
    checkpointer.save(3, numbers(3), HOST)
    with pytest.raises(CheckpointError, match=r"step 2 .* it has \[3\]"):
        checkpointer.restore(numbers(0), step=2)


def test_the_error_about_a_damaged_checkpoint_names_the_one_to_resume_from(
    open_checkpointer, tmp_path
):
    checkpointer = open_checkpointer()
    for step in (1, 2):
        checkpointer.save(step, numbers(step, shape=(64, 64)), HOST)
    checkpointer.wait()
    for data in (tmp_path / "checkpoints" / "2" / "state").rglob("d/*"):
        data.unlink()
    with pytest.raises(CheckpointError, match=r"cannot be read: .* resume from step 1"):
        open_checkpointer().restore(numbers(0, shape=(64, 64)))
    assert int(open_checkpointer().restore(numbers(0, shape=(64, 64)), step=1)[0].step) == 1


def test_host_state_that_is_not_json_is_an_error(open_checkpointer):
    with pytest.raises(CheckpointError, match=r"cannot be saved as JSON: .*int32"):
        open_checkpointer().save(1, numbers(1), {"step": np.int32(1)})


def test_the_error_about_an_unusable_folder_says_what_to_set(tmp_path):
    (tmp_path / "file").write_text("")
    with pytest.raises(CheckpointError, match=r"cannot be opened: .*set config\.run_dir"):
        Checkpointer(tmp_path / "file" / "checkpoints", CheckpointConfig())


def test_a_full_disk_is_an_error_before_anything_is_written(
    open_checkpointer, monkeypatch, tmp_path
):
    checkpointer = open_checkpointer()
    checkpointer.save(1, numbers(1), HOST)
    checkpointer.wait()
    monkeypatch.setattr("shutil.disk_usage", lambda _: type("Usage", (), {"free": 100})())
    with pytest.raises(CheckpointError, match=r"no room .* lower config\.checkpoint\.keep"):
        checkpointer.save(2, numbers(2), HOST)
    assert sorted(os.listdir(tmp_path / "checkpoints")) == ["1"]


@pytest.mark.parametrize(
    ("there", "n_saves", "export", "needed"),
    [
        (0, 1, 0, 0),  # the one that fits
        (0, 2, 0, 2),  # keep=2: no third one
        (0, 9, 0, 3),  # the oldest of two goes when the third is complete
        (2, 9, 0, 0),  # two are there
        (0, 1, 1, 2),  # the last one and the export
        (0, 9, 2, 4),  # two and the export
    ],
)
def test_later_checkpoints_and_the_export_are_checked_before_the_first_step(
    open_checkpointer, monkeypatch, there, n_saves, export, needed
):
    checkpointer, state = open_checkpointer(keep=2), numbers(1, shape=(64, 64))
    n_bytes = sum(leaf.nbytes for leaf in jax.tree.leaves(state))
    monkeypatch.setattr(checkpointer, "all_steps", lambda: list(range(there)))
    monkeypatch.setattr("jaxrl.checkpoint.checkpointer.gib", lambda n: f"{n / n_bytes:g} saves")
    usage = type("Usage", (), {"free": int(1.5 * n_bytes)})()
    monkeypatch.setattr("shutil.disk_usage", lambda _: usage)
    warning = checkpointer.check_room(state, n_saves=n_saves, export_bytes=export * n_bytes)
    if not needed:
        assert warning == ""
        return
    assert f"has 1.5 saves free and the run needs {needed} saves: a checkpoint takes 1" in warning
    assert "config.checkpoint.keep (now 2)" in warning and "config.checkpoint.every=0" in warning
    usage.free = 100
    with pytest.raises(CheckpointError, match="no room for the checkpoint"):
        checkpointer.check_room(state, n_saves=n_saves, export_bytes=0)


def test_a_failed_write_leaves_the_last_good_checkpoint(open_checkpointer, capfd):
    checkpointer = open_checkpointer()
    good = numbers(1, n=20, shape=(256, 256))
    checkpointer.save(1, good, HOST)
    checkpointer.wait()
    soft, hard = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (100_000, hard))  # as if the disk were full
    try:
        with pytest.raises(
            CheckpointError, match=r"step 2 .* failed: .*; the one of step 1 is intact"
        ):
            checkpointer.save(2, numbers(2, n=20, shape=(256, 256)), HOST)
            checkpointer.wait()
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, (soft, hard))
    assert "Traceback" not in capfd.readouterr().err
    assert checkpointer.all_steps() == [1]
    assert_bitwise_equal(good, checkpointer.restore(good)[0])
    checkpointer.save(3, numbers(3, n=20, shape=(256, 256)), HOST)
    assert int(checkpointer.restore(good)[0].step) == 3
