"""Tests of sharding/transfer.py."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from sharding import make_mesh, make_transfer

SPECS = {"a": jax.P("tensor", None), "b": jax.P(None, "tensor"), "c": jax.P()}


@pytest.mark.parametrize(
    ("training", "n", "tensor"),
    [
        ({"fsdp": 4}, 2, 2),  # sent as halves
        ({"fsdp": 2}, 4, 4),  # sent as halves, quarters on the target
        ({"fsdp": 3}, 4, 2),  # sent whole
        ({"tensor": 2}, 4, 2),  # sent as they are, to two replicas
        ({"fsdp": 2, "tensor": 2}, 3, 1),
    ],
)
def test_weights_arrive_on_other_devices_in_their_shards(training, n, tensor):
    mesh = make_mesh(**training)
    values = {name: np.arange(24 * 12).reshape(24, 12) + i for i, name in enumerate("abc")}
    here = {"a": jax.P("tensor", "fsdp"), "b": jax.P("fsdp", "tensor"), "c": jax.P("fsdp")}
    devices = jax.devices()[-n:]
    with jax.set_mesh(mesh):
        tree = {
            name: jax.device_put(jnp.float32(values[name]), jax.NamedSharding(mesh, here[name]))
            for name in values
        }
        transfer = make_transfer(mesh, devices, expert=1, tensor=tensor)
        sent = transfer.reshard(tree, SPECS, jnp.bfloat16)
    for name, array in sent.items():
        assert array.sharding == jax.NamedSharding(transfer.mesh, SPECS[name])
        assert array.sharding.device_set == set(devices) and array.dtype == jnp.bfloat16
        np.testing.assert_array_equal(array, jnp.bfloat16(values[name]))
