"""Tests of sharding/resharding.py; several processes are tested in tests/runtime/hosts."""

import dataclasses

import jax
import numpy as np
import pytest
from jax.sharding import NamedSharding

from jaxrl.planner.compiled.cost import program_cost
from jaxrl.planner.topology import topology
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
def test_arrays_keep_their_values_on_any_other_mesh(old, new):
    mesh = make_mesh(**old)
    resharding = reshape_mesh(mesh, **new)
    assert {a: n for a, n in resharding.mesh.shape.items() if n > 1} == {
        a: mesh.size if n == -1 else n for a, n in new.items()
    }
    assert set(resharding.mesh.devices.flat) == set(mesh.devices.flat)
    rows = np.arange(24.0 * 24).reshape(24, 24)
    source = NamedSharding(mesh, jax.P("tensor", ("stage", "fsdp", "sequence")))
    wanted = jax.P(("expert", "tensor"), ("fsdp", "sequence"))
    moved = resharding.reshard(jax.device_put(rows, source), wanted)
    assert moved.sharding == NamedSharding(resharding.mesh, wanted)
    np.testing.assert_array_equal(moved, rows)


def test_matching_leaves_share_their_buffers_and_others_are_copied():
    mesh = make_mesh(fsdp=4, tensor=2)
    specs = {"heads": jax.P("tensor"), "norm": jax.P(), "embed": jax.P(None, "fsdp")}
    tree = {
        name: jax.device_put(np.ones((8, 8), np.float32), NamedSharding(mesh, spec))
        for name, spec in specs.items()
    }
    resharding = reshape_mesh(mesh, replica=4, tensor=2)
    moved = resharding.reshard(tree, specs)
    assert pointers(moved["heads"]) == pointers(tree["heads"])
    assert pointers(moved["norm"]) == pointers(tree["norm"])
    assert resharding.shares_buffers(tree["norm"], specs["norm"])
    assert not resharding.shares_buffers(tree["embed"], specs["embed"])
    assert not set(pointers(moved["embed"]).values()) & set(pointers(tree["embed"]).values())
    assert len({s.data.shape for s in moved["embed"].addressable_shards} - {(8, 8)}) == 0
    narrow = resharding.reshard(tree, specs, jax.numpy.bfloat16)
    assert all(leaf.dtype == jax.numpy.bfloat16 for leaf in narrow.values())


def test_a_smaller_tensor_axis_gives_a_device_the_half_with_its_quarter():
    """Device d of tensor=4 has quarter d; under tensor=2 it gets the half with that quarter."""
    resharding = reshape_mesh(make_mesh(tensor=4), replica=2, tensor=2)
    assert [[d.id for d in row] for row in resharding.mesh.devices.reshape(2, 2)] == [
        [0, 2],
        [1, 3],
    ]


@pytest.mark.parametrize(
    ("old", "new", "moved"),
    [  # a device has an eighth of 64 KiB x 4; under tensor=2 it needs a half
        (dict(fsdp=4, tensor=2), dict(tensor=2), [("all-gather", 2**17)]),
        # exchanges parts so that its half needs one all-gather
        (dict(fsdp=8), dict(tensor=2), [("all-to-all", 2**15), ("all-gather", 2**17)]),
    ],
)
def test_devices_exchange_parts_before_the_all_gather(old, new, moved):
    mesh = make_mesh(**old)
    resharding, spec = reshape_mesh(mesh, replica=-1, **new), jax.P("tensor", "fsdp")
    leaf = jax.ShapeDtypeStruct((256, 256), "float32", sharding=NamedSharding(mesh, spec))
    text = resharding.lower(leaf, spec).compile().as_text() or ""
    found = program_cost(text, lambda loop: 1).collectives
    assert [(one.kind, one.bytes) for one in found] == moved


def test_sizes_that_do_not_match_the_devices_are_rejected():
    with pytest.raises(ValueError, match="needs 6 devices but there are 8"):
        reshape_mesh(make_mesh(fsdp=8), replica=2, tensor=3)


ONE_LAYER = 64 * 64 * 4  # bytes


def test_a_table_keeps_its_rows_in_parts_of_every_shard():
    """Rows sharded over tensor before and after; a device gathers 16 of its 64 rows at a time."""
    mesh, spec = make_mesh(fsdp=4, tensor=2), jax.P("tensor", "fsdp")
    rows = np.arange(128 * 64, dtype=np.float32).reshape(128, 64)
    table = jax.device_put(rows, NamedSharding(mesh, spec))
    resharding = reshape_mesh(mesh, replica=4, tensor=2)
    resharding = dataclasses.replace(resharding, group_bytes=16 * 64 * 4)
    np.testing.assert_array_equal(resharding.reshard(table, spec), rows)
    compiled = resharding.lower(table, spec).compile()
    gathers = program_cost(compiled.as_text() or "", lambda loop: 1).collectives
    assert {one.kind for one in gathers} == {"all-gather"}
    assert [one.bytes for one in gathers] == [16 * 64 * 4]
    assert compiled.memory_analysis().temp_size_in_bytes < 2 * 64 * 64 * 4


@pytest.mark.thorough
def test_reshards_on_tpu_have_small_temporaries():
    """Stacks and a table of 3 x 80 and 160 MiB on a device, and arrays of 1 MiB."""
    pytest.importorskip("libtpu")
    machine = topology("v5e:2x4")
    mesh = make_mesh(machine.devices, fsdp=4, tensor=2)

    def leaf(shape: tuple[int, ...], spec: jax.P) -> jax.ShapeDtypeStruct:
        return jax.ShapeDtypeStruct(shape, "bfloat16", sharding=NamedSharding(mesh, spec))

    specs = [jax.P(None, "tensor", "fsdp")] * 3 + [jax.P("tensor", "fsdp")] * 5
    shapes = [(4, 8192, 2560)] * 3 + [(65536, 2560)] + [(1024, 1024)] * 4
    tree = [leaf(shape, spec) for shape, spec in zip(shapes, specs, strict=True)]
    compiled = reshape_mesh(mesh, replica=4, tensor=2).lower(tree, specs).compile()
    memory = compiled.memory_analysis()
    assert memory.output_size_in_bytes > 400 * 2**20 > 20 * memory.temp_size_in_bytes


def layers(mesh: jax.sharding.Mesh, n_stacked: int, n_single: int):
    """Stacked layers, and single ones, sharded by FSDP."""
    rng = np.random.default_rng(0)

    def put(shape: tuple[int, ...], spec: jax.P) -> jax.Array:
        values = rng.standard_normal(shape, np.float32)
        return jax.device_put(values, NamedSharding(mesh, spec))

    singles = [put((64, 64), jax.P(None, "fsdp")) for _ in range(n_single)]
    return put((n_stacked, 64, 64), jax.P(None, None, "fsdp")), singles


def in_groups(n_layers: int):
    """Resharding from FSDP to replicas of at most so many layers at a time."""
    resharding = reshape_mesh(make_mesh(fsdp=4), replica=4)
    return dataclasses.replace(resharding, group_bytes=n_layers * ONE_LAYER)


@pytest.mark.parametrize("n_layers", [1, 2, 4, 1000])
def test_groups_of_layers_give_the_same_arrays(n_layers):
    tree = layers(make_mesh(fsdp=4), n_stacked=6, n_single=5)
    moved = in_groups(n_layers).reshard(tree, jax.tree.map(lambda _: jax.P(), tree))
    jax.tree.map(np.testing.assert_array_equal, moved, tree)
    assert all(leaf.sharding.is_fully_replicated for leaf in jax.tree.leaves(moved))


def test_temporaries_are_those_of_one_group_of_layers():
    def temporaries(n_group: int, **sizes: int) -> int:
        tree = layers(make_mesh(fsdp=4), **sizes)
        specs = jax.tree.map(lambda _: jax.P(), tree)
        compiled = in_groups(n_group).lower(tree, specs).compile()
        return compiled.memory_analysis().temp_size_in_bytes

    stacked = [temporaries(2, n_stacked=n, n_single=0) for n in (4, 16)]
    assert stacked[0] == stacked[1] < 2 * 2 * ONE_LAYER
    assert temporaries(1000, n_stacked=16, n_single=0) >= 16 * ONE_LAYER
    single = [temporaries(n, n_stacked=1, n_single=16) for n in (2, 1000)]
    assert single[0] < single[1] / 2
