"""The same devices as another mesh: which arrays move, which share their buffers, and to where."""

import jax
import numpy as np
import pytest
from jax.sharding import NamedSharding

from jaxrl.planner.cost import program_cost
from sharding import make_mesh, reshape_mesh

MESHES = [
    (dict(fsdp=4, tensor=2), dict(replica=4, tensor=2)),
    (dict(fsdp=4, tensor=2), dict(replica=-1)),
    (dict(fsdp=2, tensor=4), dict(replica=4, tensor=2)),
    (dict(fsdp=8), dict(replica=2, tensor=4)),
    (dict(fsdp=2, expert=2, sequence=2), dict(replica=2, expert=4)),
    (dict(stage=2, fsdp=4), dict(fsdp=2, sequence=4)),
    (dict(fsdp=6), dict(replica=2, tensor=3)),
]


def pointers(array: jax.Array) -> dict:
    return {s.device: s.data.unsafe_buffer_pointer() for s in array.addressable_shards}


@pytest.mark.parametrize(("old", "new"), MESHES)
def test_arrays_keep_their_numbers_on_any_other_mesh(old, new):
    mesh = make_mesh(**old)
    way = reshape_mesh(mesh, **new)
    assert {a: n for a, n in way.mesh.shape.items() if n > 1} == {
        a: mesh.size if n == -1 else n for a, n in new.items()
    }
    assert set(way.mesh.devices.flat) == set(mesh.devices.flat)
    rows = np.arange(24.0 * 24).reshape(24, 24)
    lies = NamedSharding(mesh, jax.P("tensor", ("stage", "fsdp", "sequence")))
    wanted = jax.P(("expert", "tensor"), ("fsdp", "sequence"))
    moved = way.reshard(jax.device_put(rows, lies), wanted)
    assert moved.sharding == NamedSharding(way.mesh, wanted)
    np.testing.assert_array_equal(moved, rows)


def test_what_lies_right_shares_its_buffers_and_the_rest_is_copied():
    mesh = make_mesh(fsdp=4, tensor=2)
    specs = {"heads": jax.P("tensor"), "norm": jax.P(), "embed": jax.P(None, "fsdp")}
    tree = {
        name: jax.device_put(np.ones((8, 8), np.float32), NamedSharding(mesh, spec))
        for name, spec in specs.items()
    }
    way = reshape_mesh(mesh, replica=4, tensor=2)
    moved = way.reshard(tree, specs)
    assert pointers(moved["heads"]) == pointers(tree["heads"])
    assert pointers(moved["norm"]) == pointers(tree["norm"])
    assert way.shares_buffers(tree["norm"], specs["norm"])
    assert not way.shares_buffers(tree["embed"], specs["embed"])
    assert not set(pointers(moved["embed"]).values()) & set(pointers(tree["embed"]).values())
    assert len({s.data.shape for s in moved["embed"].addressable_shards} - {(8, 8)}) == 0
    narrow = way.reshard(tree, specs, jax.numpy.bfloat16)
    assert all(leaf.dtype == jax.numpy.bfloat16 for leaf in narrow.values())


def test_a_smaller_tensor_axis_moves_half_of_what_another_order_would():
    """Device d of tensor=4 has quarter d; of tensor=2 it gets the half that its quarter is in."""
    way = reshape_mesh(make_mesh(tensor=4), replica=2, tensor=2)
    assert [[d.id for d in row] for row in way.mesh.devices.reshape(2, 2)] == [[0, 2], [1, 3]]


@pytest.mark.parametrize(
    ("old", "new", "moved"),
    [  # a device has an eighth of 64 KiB x 4; of tensor=2 it needs a half
        (dict(fsdp=4, tensor=2), dict(tensor=2), [("all-gather", 2**17)]),
        # its part of the half is traded for that of another, then the half is brought together
        (dict(fsdp=8), dict(tensor=2), [("all-to-all", 2**15), ("all-gather", 2**17)]),
    ],
)
def test_devices_trade_parts_before_they_gather_what_they_keep(old, new, moved):
    mesh = make_mesh(**old)
    way, spec = reshape_mesh(mesh, replica=-1, **new), jax.P("tensor", "fsdp")
    leaf = jax.ShapeDtypeStruct((256, 256), "float32", sharding=NamedSharding(mesh, spec))
    text = way.lower(leaf, spec).compile().as_text() or ""
    found = program_cost(text, lambda loop: 1).collectives
    assert [(one.kind, one.bytes) for one in found] == moved


def test_sizes_that_do_not_make_the_devices_are_refused():
    with pytest.raises(ValueError, match="needs 6 devices but there are 8"):
        reshape_mesh(make_mesh(fsdp=8), replica=2, tensor=3)
