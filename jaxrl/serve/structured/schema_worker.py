"""The process that tries JSON schemas: each in a child process with limits of time and memory.

A schema can take hours and gigabytes to compile, and nothing ends a compilation but the end of its
process. The child is a copy of this process, which has loaded the tokenizer, so it starts at once.

Messages: first (tokenizer.json, n_vocab, stop ids), then schemas as JSON text. The answer to each
is the reason why it is refused, or "".
"""

import contextlib
import os
import resource
import signal
import sys
from pathlib import Path
from typing import Any

from jaxrl.engine.json_matcher import build_matcher, make_tokenizer
from jaxrl.subprocesses.process import connect

MAX_CPU_S = 1  # of one schema; hundreds of properties take 0.1 s
MAX_MEMORY_MIB = 64  # of one schema
MAX_REASON_BYTES = 2000
NICENESS = 5  # below the server, whose requests must not wait for schemas
TOO_COMPLEX = (
    f"is too complex: it takes more than {MAX_CPU_S} s or {MAX_MEMORY_MIB} MiB to compile; use "
    "smaller numbers in multipleOf and fewer and simpler patterns"
)


def main(fd: int) -> None:
    os.nice(NICENESS)
    os.environ["TOKENIZERS_PARALLELISM"] = "false"  # a child process has no other threads
    channel = connect(fd)
    tokenizer = make_tokenizer(*channel.receive())
    channel.send("")
    with contextlib.suppress(EOFError):  # the server has ended
        while True:
            channel.send(refusal(tokenizer, channel.receive()))


def refusal(tokenizer: Any, schema: str) -> str:
    """Why a schema cannot be compiled within the limits; "" if it can."""
    read_end, write_end = os.pipe()
    if (pid := os.fork()) == 0:
        _try(tokenizer, schema, write_end)
    os.close(write_end)
    with open(read_end, "rb") as pipe:
        answer = pipe.read().decode(errors="replace")
    _, status = os.waitpid(pid, 0)
    return answer if os.waitstatus_to_exitcode(status) == 0 else TOO_COMPLEX


def _try(tokenizer: Any, schema: str, write_end: int) -> None:
    """Compiles a schema in this process, a child, and ends it."""
    status = 1
    try:
        _limit()
        answer = ""
        try:
            build_matcher(tokenizer, schema)
        except ValueError as error:
            answer = f"is not supported: {error}"
        os.write(write_end, answer.encode(errors="replace")[:MAX_REASON_BYTES])
        status = 0
    finally:
        os._exit(status)


def _limit() -> None:
    """Limits of this process. It has no output: the library reports failed allocations there."""
    for stream in 1, 2:
        os.dup2(os.open(os.devnull, os.O_WRONLY), stream)
    signal.signal(signal.SIGXCPU, signal.SIG_DFL)
    resource.setrlimit(resource.RLIMIT_CORE, (0, 0))
    resource.setrlimit(resource.RLIMIT_CPU, (MAX_CPU_S, MAX_CPU_S + 1))
    if sys.platform == "linux":
        n_pages = int(Path("/proc/self/statm").read_text().split()[0])
        limit = n_pages * resource.getpagesize() + (MAX_MEMORY_MIB << 20)
        resource.setrlimit(resource.RLIMIT_AS, (limit, limit))


if __name__ == "__main__":
    main(int(sys.argv[1]))
