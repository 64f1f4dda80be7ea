"""Rollout workers in processes of this machine, without Ray."""

import contextlib
import dataclasses
import multiprocessing
import pickle
from multiprocessing.connection import Connection, wait
from multiprocessing.process import BaseProcess

import jax

from jaxrl.rollout.remote.actors import ActorGroup, WorkerLost
from jaxrl.rollout.remote.worker import RolloutWorker
from jaxrl.runtime.versions import versions


@dataclasses.dataclass(eq=False)
class Call:
    """A call to a process, which works on one at a time."""

    pipe: Connection


class ProcessActors:
    """Implements GroupActors; each process has `n_devices` simulated devices."""

    def __init__(self, settings, n_devices):
        self.settings, self.n_devices = pickle.dumps(settings), n_devices
        self.processes: dict[Connection, BaseProcess] = {}

    def start(self):
        spawning = multiprocessing.get_context("spawn")
        ours, theirs = spawning.Pipe()
        process = spawning.Process(target=serve, args=(theirs, self.n_devices), daemon=True)
        process.start()
        theirs.close()  # so that the end of the process is the end of the file
        self.processes[ours] = process
        return ours

    def start_group(self, n_hosts):
        return ActorGroup(tuple(self.start() for _ in range(n_hosts)), lambda: None)

    def locate(self, worker):
        return self.call(worker, "locate")

    def register(self, worker, distributed=None):
        return self.call(worker, "register", versions(), self.settings, distributed)

    def dispatch(self, worker, work):
        return self.call(worker, "dispatch", work)

    def call(self, worker, name, *arguments):
        with contextlib.suppress(OSError):  # the process has ended, as its result will say
            worker.send((name, arguments))
        return Call(worker)

    def finished(self, calls, timeout_s):
        ready = wait([call.pipe for call in calls], timeout_s)
        return [call for call in calls if call.pipe in ready]

    def result(self, call):
        try:
            found = call.pipe.recv()
        except (EOFError, OSError) as error:
            raise WorkerLost("its process has ended") from error
        if isinstance(found, Exception):
            raise found
        return found

    def kill(self, worker):
        process = self.processes.pop(worker)
        process.kill()
        process.join()
        worker.close()


def serve(pipe, n_devices):
    """Answers the calls to a worker, in order."""
    jax.config.update("jax_num_cpu_devices", n_devices)
    worker = RolloutWorker(list)  # a reference is its object
    while True:
        name, arguments = pipe.recv()
        try:
            pipe.send(getattr(worker, name)(*arguments))
        except Exception as error:
            pipe.send(RuntimeError(f"{type(error).__name__}: {error}"))
