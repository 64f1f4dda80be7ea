"""Tests of sharding/mesh.py, rules.py, order.py and tree.py.

Offload to host memory is tested in tests/learner/test_offload.py, collectives.py in
tests/test_collectives.py, hosts.py in tests/runtime/hosts.
"""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.experimental import topologies

from jaxrl.planner.topology import topology
from sharding import (
    MESH_AXES,
    RING,
    TRAIN,
    ULYSSES,
    Rules,
    abstract_mesh,
    bytes_per_device,
    make_mesh,
    mesh_order,
    put_batch,
    row_order,
    unshuffle,
    zigzag,
)
from sharding.mesh import axis_sizes


def test_every_axis_is_always_present():
    mesh = make_mesh(fsdp=4, tensor=2)
    assert mesh.axis_names == MESH_AXES
    assert dict(mesh.shape) == dict.fromkeys(MESH_AXES, 1) | dict(fsdp=4, tensor=2)
    assert make_mesh().size == 1


def test_one_axis_takes_the_remaining_devices():
    assert axis_sizes(8, fsdp=-1, tensor=2)["fsdp"] == 4
    assert make_mesh(fsdp=-1).shape["fsdp"] == 8
    assert abstract_mesh(64, replica=-1, fsdp=16).shape["replica"] == 4


def test_a_mesh_may_split_an_axis_of_a_torus():
    pytest.importorskip("libtpu", reason="a description of a torus of TPUs needs libtpu")
    devices = topology("v5p:4x4x4").devices
    mesh = make_mesh(devices, fsdp=8, expert=8)
    assert len({device.id for device in mesh.devices.flat}) == 64
    mesh = make_mesh(devices, fsdp=16, tensor=4)  # 4 chips a host
    hosts = np.vectorize(lambda device: device.process_index)(mesh.devices).reshape(8, 2, 2, 2)
    assert (hosts == hosts[:, :1, :, :1]).all()


def test_replicas_or_stages_span_slices():
    pytest.importorskip("libtpu", reason="a description of slices of TPUs needs libtpu")
    topology("v5e:2x4")  # sets the environment that the compiler needs
    two = topologies.get_topology_desc(
        platform="tpu", topology_name="v5e:2x4", num_slices=2
    ).devices
    for axis in ("replica", "stage"):
        mesh = make_mesh(two, **{axis: 2, "fsdp": 4, "tensor": 2})
        rows = np.moveaxis(mesh.devices, MESH_AXES.index(axis), 0).reshape(2, 8)
        assert [{device.slice_index for device in row} for row in rows] == [{0}, {1}]
    with pytest.raises(ValueError, match=r"are in 2 slices, .* set config.mesh.replica=2"):
        make_mesh(two, fsdp=16)


@pytest.mark.parametrize(
    ("sizes", "message"),
    [
        (dict(model=2), r"unknown mesh axes \['model'\]; the axes are stage, replica"),
        (dict(fsdp=-1, tensor=-1), r"\['fsdp', 'tensor'\] are both -1"),
        (dict(fsdp=0), r"must be positive, got \{'fsdp': 0\}"),
        (dict(fsdp=2, tensor=2), r"fsdp 2 x tensor 2\) needs 4 devices but there are 8"),
        (dict(fsdp=-1, tensor=3), r"needs 6 devices but there are 8"),
    ],
)
def test_invalid_sizes_are_rejected_with_a_remedy(sizes, message):
    with pytest.raises(ValueError, match=message):
        axis_sizes(8, **sizes)


def test_rules_name_the_mesh_axes_of_an_array():
    assert TRAIN.spec("vocab", "w_embed") == jax.P("tensor", "fsdp")
    assert TRAIN.gathered("vocab", "w_embed") == jax.P("tensor", None)
    assert TRAIN.spec("batch", None) == jax.P(("replica", "fsdp", "expert"), None)


def test_two_dimensions_on_one_mesh_axis_are_rejected():
    with pytest.raises(ValueError, match="maps one mesh axis twice"):
        TRAIN.spec("batch", "w_embed")
    with pytest.raises(ValueError, match="maps one mesh axis twice"):
        Rules(time="tensor").spec("time", "heads")


def test_put_batch_gives_each_device_its_rows():
    batch = {"tokens": np.arange(32).reshape(8, 4), "mask": np.ones((8, 4), np.float32)}
    with jax.set_mesh(make_mesh(replica=2, fsdp=2, tensor=2)):
        placed = put_batch(batch, TRAIN)
        assert placed["tokens"].sharding.spec == TRAIN.spec("batch", "time")
        for shard in placed["tokens"].addressable_shards:
            assert shard.data.shape == (2, 4)  # 8 rows over replica 2 x fsdp 2
            np.testing.assert_array_equal(shard.data, batch["tokens"][shard.index])


def test_bytes_per_device_count_shards_and_replicas():
    mesh = make_mesh(fsdp=4, tensor=2)
    with jax.set_mesh(mesh):
        tree = {"w": jnp.zeros((8, 16)), "norm": jnp.zeros(16)}
        specs = {"w": jax.P("tensor", "fsdp"), "norm": jax.P(None)}
        placed = jax.reshard(tree, specs)
        sharding = jax.sharding.NamedSharding(mesh, specs["w"])
        assert placed["w"].sharding == sharding
        # w: 8 * 16 * 4 bytes over 8 devices = 64; norm: 16 * 4 bytes on each = 64
        assert bytes_per_device(placed) == 128
        abstract = jax.ShapeDtypeStruct((8, 16), jnp.bfloat16, sharding=sharding)
        assert bytes_per_device(abstract) == 32


def test_zigzag_gives_every_device_an_early_and_a_late_chunk():
    # 12 tokens, 3 devices, chunks of 2: device 0 has chunks 0 and 5, device 1 has 1 and 4,
    # device 2 has 2 and 3
    assert zigzag(12, 3).tolist() == [0, 1, 10, 11, 2, 3, 8, 9, 4, 5, 6, 7]
    with pytest.raises(ValueError, match=r"10 tokens.*3 devices; make its length a multiple of 6"):
        zigzag(10, 3)


@pytest.mark.parametrize("rules", [TRAIN, ULYSSES, RING])
def test_row_order_inverts_mesh_order(rules):
    rows = np.arange(24).reshape(2, 12)
    with jax.set_mesh(make_mesh(sequence=3)):
        placed = mesh_order(rows, rules)
        assert (placed[0].tolist() == list(range(12))) != rules.ring
        np.testing.assert_array_equal(row_order(placed, rules), rows)


@pytest.mark.parametrize("rules", [TRAIN, ULYSSES, RING], ids=["train", "ulysses", "ring"])
def test_unshuffle_restores_the_order_of_a_row_on_the_mesh(rules):
    rows = np.arange(48.0).reshape(4, 12)
    mesh = make_mesh(fsdp=2, sequence=3)
    with jax.set_mesh(mesh):
        sharding = jax.sharding.NamedSharding(mesh, rules.spec("batch", "time"))
        shuffled = mesh_order(rows, rules)
        placed = jax.device_put(shuffled, sharding)
        got = jax.jit(lambda rows: unshuffle(rows, rules))(placed)
        slope = jax.jit(jax.grad(lambda x: (unshuffle(x, rules) * rows).sum()))(placed)
    np.testing.assert_array_equal(got, rows)
    np.testing.assert_array_equal(slope, shuffled)


def test_rules_of_whole_rows_shard_heads_instead_of_time():
    inside = ULYSSES.whole_rows()
    assert ULYSSES.spec("batch", "time", "heads", None)[1:] == ("sequence", "tensor", None)
    assert inside.spec("batch", "time", "heads", None)[1:] == (None, ("tensor", "sequence"), None)
    assert TRAIN.whole_rows() == TRAIN
