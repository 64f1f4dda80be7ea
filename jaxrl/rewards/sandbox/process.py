"""The process that runs an untrusted program; runner.py starts it as main(JOB, TEST).

JOB and TEST are file descriptors of JSON and text. The process confines itself before the program
runs. With a test it is two processes: the program is in one, the test in the other, and neither
can reach the other except through two pipes of data (rewards/sandbox/remote.py).
"""

import json
import os
import sys
import types

from jaxrl.rewards.sandbox.jail import confine
from jaxrl.rewards.sandbox.remote import NotPlainData, RemoteProgram, serve


def main(job_fd: int, test_fd: int | None = None) -> None:
    """Runs the job; the standard output is then the program's, or the result as JSON.

    For a call it is what the function returned; for a test {"end", "reason"}.
    """
    sys.argv = ["program.py"]
    if test_fd is not None:
        return _fork(job_fd, test_fd)
    job = _read(job_fd)
    if job["call"] is None:
        confine(**job["limits"], parent=job["parent"])
        _run(job["program"], "__main__")
        return None
    result = os.fdopen(_take_output(), "w")
    confine(**job["limits"], parent=job["parent"])
    module = _run(job["program"], "program")
    owner = module.Solution() if hasattr(module, "Solution") else module
    answer = getattr(owner, job["call"]["name"])(*job["call"]["arguments"])
    result.write(json.dumps(answer))
    result.flush()
    os._exit(0)  # without the program's exit handlers


def _fork(job_fd: int, test_fd: int) -> None:
    """Runs the program in this process and the test in a child.

    The program is in the process that the runner started, because the kernel ends that one with the
    runner. It never has the test's text: only the child reads it.
    """
    job = _read(job_fd)
    output = _take_output()
    (request, ask), (answer, reply) = os.pipe(), os.pipe()
    if os.fork() == 0:
        for fd in (request, reply):
            os.close(fd)
        _report(job, test_fd, RemoteProgram(os.fdopen(ask, "w"), os.fdopen(answer)), output)
        os._exit(0)
    for fd in (test_fd, output, ask, answer):
        os.close(fd)
    confine(**job["limits"], parent=job["parent"])
    serve(_run(job["program"], "program"), os.fdopen(request), os.fdopen(reply, "w"))
    os._exit(0)


def _report(job: dict, test_fd: int, program: RemoteProgram, output: int) -> None:
    """Runs the test and writes how it ended."""
    with os.fdopen(test_fd) as file:
        test = file.read()
    os.chdir(job["test_folder"])
    os.environ |= {"HOME": job["test_folder"], "TMPDIR": job["test_folder"]}
    confine(**job["limits"], parent=None)
    with os.fdopen(output, "w") as report:
        json.dump(_run_test(test, program), report)


def _run_test(test: str, program: RemoteProgram) -> dict[str, str]:
    """How the test ended: "ok", "wrong" (an assert failed), "error" or "unsupported"."""
    try:
        exec(compile(test, "test.py", "exec"), program.namespace(test))
    except AssertionError:
        return {"end": "wrong"}
    except NotPlainData as error:
        return {"end": "unsupported", "reason": str(error)}
    except BaseException:  # of the test, or of the program, or the program has ended
        return {"end": "error"}
    return {"end": "ok"}


def _run(program: str, name: str) -> types.ModuleType:
    """Runs the program as a module of this name."""
    module = types.ModuleType(name)
    sys.modules[name] = module
    exec(compile(program, "program.py", "exec"), module.__dict__)
    return module


def _take_output() -> int:
    """A descriptor of the standard output, which is the null device from then on."""
    output = os.dup(1)
    null = os.open(os.devnull, os.O_WRONLY)
    os.dup2(null, 1)
    os.close(null)
    return output


def _read(fd: int) -> dict:
    with os.fdopen(fd) as file:
        return json.load(file)
