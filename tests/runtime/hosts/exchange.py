"""Process I of two with four devices: `exchange.py ADDRESS I ORDER ...` prints the results."""

import sys

import jax
import numpy as np

from sharding import hosts, make_mesh, process_mesh_sizes, reshape_mesh

NUMBERS = np.arange(64.0, dtype=np.float32).reshape(8, 8)
ORDERS = {
    "in order": range(8),
    "reversed": range(7, -1, -1),
    "shuffled": (5, 4, 7, 6, 1, 0, 2, 3),
    "in turns": (0, 1, 4, 5, 2, 3, 6, 7),
}
NO_BLOCK = (0, 1, 2, 4, 3, 5, 6, 7)


def reshards_correctly(order) -> bool:
    """Whether arrays of every sharding are resharded correctly.

    Targets are meshes over the devices of this process and replicas over all devices.
    """
    mesh = make_mesh([jax.devices()[i] for i in order], fsdp=4, tensor=2)
    reshardings = [
        reshape_mesh(mesh, per_process=True, **process_mesh_sizes(mesh)),
        reshape_mesh(mesh, per_process=True, replica=2, tensor=2),
        reshape_mesh(mesh, per_process=True, replica=4),
        reshape_mesh(mesh, replica=2, tensor=4),
    ]
    right = []
    for spec in (jax.P("fsdp", "tensor"), jax.P(None, "tensor"), jax.P()):
        sharding = jax.sharding.NamedSharding(mesh, spec)
        array = jax.make_array_from_callback(NUMBERS.shape, sharding, NUMBERS.__getitem__)
        for resharding in reshardings:
            (own,) = resharding.reshard([array], [spec])
            with jax.set_mesh(resharding.mesh):
                right += [
                    np.array_equal(hosts.host_array(own), NUMBERS),
                    bool(jax.jit(lambda a: a.sum())(own) == 2016),
                ]
        with jax.set_mesh(mesh):
            right += [np.array_equal(hosts.host_array(array), NUMBERS)]
    return all(right)


def main() -> None:
    address, i, orders = sys.argv[1], int(sys.argv[2]), sys.argv[3:]
    jax.distributed.initialize(address, 2, i)
    for name in orders:
        print(name, reshards_correctly(ORDERS[name]), hosts.gather((i, "x")), flush=True)
    long = hosts.gather(bytes([i]) * (3_000_000 + i))
    print(
        "long",
        [(len(one), set(one)) for one in long],
        hosts.gather_items([i] * i),
        hosts.local_slice(5),
    )
    try:
        process_mesh_sizes(make_mesh([jax.devices()[i] for i in NO_BLOCK], fsdp=2, tensor=4))
    except ValueError as problem:
        print(problem)


if __name__ == "__main__":
    main()
