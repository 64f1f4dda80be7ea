"""The process that runs an untrusted program; runner.py starts it as main(JOB, TEST).

JOB and TEST are file descriptors of JSON and text. The process confines itself before the program
runs, and writes CONFINED to its standard error; what is written there before is why it could not.
With a test it is two processes: the program is in one, the test in the other, and neither can reach
the other except through two pipes of data (rewards/sandbox/remote.py).
"""

import json
import os
import sys
import types
import warnings

from jaxrl.rewards.sandbox.given_imports import give_imports
from jaxrl.rewards.sandbox.jail import confine
from jaxrl.rewards.sandbox.plain_data import PlainData, decode, encode
from jaxrl.rewards.sandbox.remote import NotPlainData, RemoteProgram, serve

CONFINED = b"jaxrl: confined\n"


def main(job_fd: int, test_fd: int | None = None) -> None:
    """Runs the job; the standard output is then the program's, or the result as JSON.

    For a call it is what the function returned, as plain_data.py encodes it; for a test {"end",
    "reason"}.
    """
    sys.argv = ["program.py"]
    sys.set_int_max_str_digits(0)  # the CPU time is limited
    if test_fd is not None:
        return _fork(job_fd, test_fd)
    job = _read(job_fd)
    if job["call"] is None:
        _confine(job, parent=job["parent"])
        _run(job, "__main__")
        return None
    result = os.fdopen(_take_output(), "w")
    _confine(job, parent=job["parent"])
    name, *arguments = job["call"]
    module = _run(job, "program")
    owner = module.Solution() if hasattr(module, "Solution") else module
    answer = getattr(owner, name)(*(decode(item, _reject) for item in arguments))
    result.write(json.dumps(encode(answer, _as_data)))
    result.flush()
    os._exit(0)  # without the program's exit handlers


def _as_data(value: object) -> PlainData:
    """Scalars and arrays of numpy as data. Raises TypeError for other objects."""
    if hasattr(type(value), "tolist"):
        return encode(value.tolist(), _as_data)  # pyright: ignore[reportAttributeAccessIssue]
    raise TypeError(f"the function returned a {type(value).__name__}, which is no data")


def _reject(data: dict[str, object]) -> object:
    raise ValueError(f"{data!r:.80} is no argument of a call")


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
    _confine(job, parent=job["parent"])
    serve(_run(job, "program"), os.fdopen(request), os.fdopen(reply, "w"))
    os._exit(0)


def _report(job: dict, test_fd: int, program: RemoteProgram, output: int) -> None:
    """Runs the test and writes how it ended."""
    with os.fdopen(test_fd) as file:
        test = file.read()
    os.chdir(job["test_folder"])
    os.environ |= {"HOME": job["test_folder"], "TMPDIR": job["test_folder"]}
    _confine(job, parent=None)
    with os.fdopen(output, "w") as report:
        json.dump(_run_test(test, program), report)


def _run_test(test: str, program: RemoteProgram) -> dict[str, str]:
    """How the test ended: "ok", "wrong" (an assert failed), "error" or "unsupported"."""
    # `assert f(3).__eq__(9)` for None: Python 3.14 raises a TypeError here
    warnings.filterwarnings("error", "NotImplemented should not be used", DeprecationWarning)
    try:
        exec(compile(test, "test.py", "exec"), program.namespace(test))
    except AssertionError:
        return {"end": "wrong"}
    except NotPlainData as error:
        return {"end": "unsupported", "reason": str(error)}
    except BaseException:  # of the test, or of the program, or the program has ended
        return {"end": "error"}
    return {"end": "ok"}


def _confine(job: dict, *, parent: int | None) -> None:
    """Confines this process and reports it. From then on the standard error is the null device."""
    null = os.open(os.devnull, os.O_WRONLY)
    confine(**job["limits"], parent=parent)
    os.write(2, CONFINED)
    os.dup2(null, 2)
    os.close(null)


def _run(job: dict, name: str) -> types.ModuleType:
    """Runs the program as a module of this name."""
    if job["imports"]:
        give_imports()
    module = types.ModuleType(name)
    sys.modules[name] = module
    exec(compile(job["program"], "program.py", "exec"), module.__dict__)
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
