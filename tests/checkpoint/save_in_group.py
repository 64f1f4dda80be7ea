"""Process I of two: `save_in_group.py ADDRESS I FOLDER` saves and restores, and prints results.

Then a file of one process is damaged, and then process 0 cannot make the folder of a save.
"""

import errno
import os
import sys
import time

import jax
import numpy as np
from jax.sharding import NamedSharding

from jaxrl.checkpoint.checkpointer import Checkpointer
from jaxrl.checkpoint.errors import CheckpointError
from jaxrl.config.keys import CheckpointConfig
from jaxrl.types import TrainState
from sharding import hosts, make_mesh

NUMBERS = np.arange(4096.0, dtype=np.float32).reshape(64, 64)


def make_state(step: int) -> TrainState:
    mesh = make_mesh(fsdp=jax.device_count())

    def put(values, spec):
        sharding = NamedSharding(mesh, spec)
        return jax.make_array_from_callback(values.shape, sharding, values.__getitem__)

    w = put(NUMBERS + step, jax.P("fsdp"))
    return TrainState({"w": w}, (), put(np.asarray(step, np.int32), jax.P()))


def main() -> None:
    address, i, folder = sys.argv[1], int(sys.argv[2]), sys.argv[3]
    jax.config.update("jax_platforms", "cpu")
    jax.config.update("jax_num_cpu_devices", 2)
    jax.distributed.initialize(address, 2, i, heartbeat_timeout_seconds=10)
    checkpointer = Checkpointer(folder, CheckpointConfig())
    for step in (1, 2):
        checkpointer.save(step, make_state(step), {"step": step})
    state, host = checkpointer.restore(make_state(0))
    print("restored", np.array_equal(hosts.host_array(state.params["w"]), NUMBERS + 2), host)

    if i == 0:
        data = checkpointer.directory / "2" / "state" / "ocdbt.process_1" / "d"
        largest = max(data.iterdir(), key=lambda path: path.stat().length)
        largest.write_bytes(bytes([255]) + largest.read_bytes()[1:])
    hosts.barrier()
    try:
        checkpointer.restore(make_state(0))
    except CheckpointError as error:
        print("damaged", error, flush=True)

    mkdir = os.mkdir

    def full(path, *args, **kwargs):
        if i == 0 and "3.orbax" in str(path):
            raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC), path)
        mkdir(path, *args, **kwargs)

    os.mkdir = full
    start = time.monotonic()
    try:
        checkpointer.save(3, make_state(3), {"step": 3})
        checkpointer.close()
    except CheckpointError as error:
        print(f"failed after {time.monotonic() - start:.0f} s", error, flush=True)
        hosts.exit_immediately(1)


if __name__ == "__main__":
    main()
