"""The process that runs an untrusted program: python -I jail.py JOB, started by runner.py only.

It confines itself and only then runs the program in the same interpreter. This needs no privileges:

  limits      CPU seconds, memory, file size, open files
  privileges  all capabilities are dropped, and no program can gain any
  seccomp     these system calls fail: sockets, new processes and programs, signals, access to other
              processes
  Landlock    files (Linux 5.13 and later): Python and the system libraries can be read, the working
              folder can be written, nothing else
"""

import ctypes
import json
import os
import platform
import resource
import signal
import struct
import sys
import types

_LIBC = ctypes.CDLL(None, use_errno=True)
# seccomp: the architecture's number in the filter, and the system calls that fail
_X86_64 = (
    0xC000003E,
    {
        **dict(socket=41, fork=57, vfork=58, execve=59, kill=62, semget=64, msgget=68, ptrace=101),
        **dict(
            setpgid=109, setsid=112, rt_sigqueueinfo=129, setpriority=141, sched_setscheduler=144
        ),
        **dict(
            tkill=200, sched_setaffinity=203, tgkill=234, mq_open=240, add_key=248, request_key=249
        ),
        **dict(keyctl=250, ioprio_set=251, unshare=272, rt_tgsigqueueinfo=297, perf_event_open=298),
        **dict(setns=308, process_vm_readv=310, process_vm_writev=311, bpf=321, execveat=322),
        **dict(userfaultfd=323, shmget=29),
    },
)
_AARCH64 = (
    0xC00000B7,
    {
        **dict(socket=198, execve=221, kill=129, semget=190, msgget=186, ptrace=117),
        **dict(
            setpgid=154, setsid=157, rt_sigqueueinfo=138, setpriority=140, sched_setscheduler=119
        ),
        **dict(
            tkill=130, sched_setaffinity=122, tgkill=131, mq_open=180, add_key=217, request_key=218
        ),
        **dict(keyctl=219, ioprio_set=30, unshare=97, rt_tgsigqueueinfo=240, perf_event_open=241),
        **dict(setns=268, process_vm_readv=270, process_vm_writev=271, bpf=280, execveat=281),
        **dict(userfaultfd=282, shmget=194),
    },
)
_BOTH = dict(pidfd_send_signal=424, io_uring_setup=425, io_uring_enter=426, io_uring_register=427)
_BOTH |= dict(pidfd_open=434, pidfd_getfd=438, process_madvise=440)
_CLONE3 = 435
_SPECIAL = {"x86_64": dict(clone=56, prctl=157, prlimit64=302, capset=126)}
_SPECIAL["aarch64"] = dict(clone=220, prctl=167, prlimit64=261, capset=91)
MACHINES = {"x86_64": _X86_64, "aarch64": _AARCH64}

_ALLOW, _KILL, _EPERM, _ENOSYS = 0x7FFF0000, 0x80000000, 0x00050001, 0x00050026
_LOAD, _EQUAL, _AT_LEAST, _ANY_BIT, _RETURN = 0x20, 0x15, 0x35, 0x45, 0x06
_NR, _ARCH, _FIRST_ARGUMENT = 0, 4, 16  # offsets in the data that the filter reads
_CLONE_THREAD, _PR_SET_PDEATHSIG, _PR_SET_SECCOMP, _PR_SET_NO_NEW_PRIVS = 0x10000, 1, 22, 38

_READ = 1 << 2 | 1 << 3  # Landlock: files, folders
_READABLE = ("/usr", "/lib", "/lib64", "/etc/ld.so.cache", "/etc/localtime")
_DEVICES = ("/dev/null", "/dev/zero", "/dev/random", "/dev/urandom")


def main(path: str) -> None:
    """Runs the job in the file `path`: its program, then the test or the call.

    The result of a test or a call goes to the standard output after the job's secret. Without
    either, the output is that of the program.
    """
    with open(path) as file:
        job = json.load(file)
    os.unlink(path)
    sys.argv = ["program.py"]
    test, call, secret = job["test"], job["call"], job["secret"]
    found = None
    if test is not None or call is not None:
        found = os.fdopen(os.dup(1), "w")
        os.dup2(os.open(os.devnull, os.O_WRONLY), 1)
    confine(**job["limits"])
    name = "__main__" if found is None else "program"
    module = types.ModuleType(name)
    sys.modules[name] = module
    exec(compile(job["program"], "program.py", "exec"), module.__dict__)
    if found is None:
        return
    answer = None
    if call is not None:
        owner = module.Solution() if hasattr(module, "Solution") else module
        answer = getattr(owner, call["name"])(*call["arguments"])
    elif test is not None:
        exec(compile(test, "test.py", "exec"), module.__dict__)
    found.write(secret + json.dumps(answer))
    found.close()


def confine(*, cpu_s: int, memory_bytes: int, file_bytes: int) -> None:
    """Confines this process irreversibly. Raises OSError if the kernel rejects a part."""
    machine = platform.machine()
    special = _SPECIAL[machine]
    _check(_LIBC.prctl(_PR_SET_PDEATHSIG, signal.SIGKILL, 0, 0, 0))
    limits = {
        resource.RLIMIT_AS: memory_bytes,
        resource.RLIMIT_FSIZE: file_bytes,
        resource.RLIMIT_NOFILE: 64,
        resource.RLIMIT_CORE: 0,
    }
    for name, value in limits.items():
        resource.setrlimit(name, (value, value))
    # SIGXCPU tells why the process ended; SIGKILL follows if it is ignored.
    resource.setrlimit(resource.RLIMIT_CPU, (cpu_s, cpu_s + 1))
    header, none = struct.pack("Ii", 0x20080522, 0), bytes(24)  # version 3, this process
    _check(_LIBC.syscall(special["capset"], header, none))
    _check(_LIBC.prctl(_PR_SET_NO_NEW_PRIVS, 1, 0, 0, 0))
    if landlock_version() > 0:
        _confine_files(os.getcwd())
    _filter_calls(machine)


def landlock_version() -> int:
    """Landlock's ABI version; 0 or less if the kernel has no Landlock."""
    return _LIBC.syscall(444, None, 0, 1)


def _confine_files(work_folder: str) -> None:
    version = landlock_version()
    n_rights = 13 + (version >= 2) + (version >= 3) + (version >= 5)
    everything = (1 << n_rights) - 1
    ruleset = _check(_LIBC.syscall(444, struct.pack("Q", everything), 8, 0))
    of_files = everything & (1 << 1 | 1 << 2 | 1 << 14 | 1 << 15)
    allowed = {work_folder: everything} | dict.fromkeys(_DEVICES, of_files)
    allowed |= dict.fromkeys((*_READABLE, sys.prefix, sys.base_prefix), _READ)
    for path, rights in allowed.items():
        if not os.path.exists(path):
            continue
        place = os.open(path, os.O_PATH)
        if not os.path.isdir(path):
            rights &= of_files
        _check(_LIBC.syscall(445, ruleset, 1, struct.pack("=Qi", rights, place), 0))
        os.close(place)
    _check(_LIBC.syscall(446, ruleset, 0))
    os.close(ruleset)


def _filter_calls(machine: str) -> None:
    number, denied = MACHINES[machine]
    special = _SPECIAL[machine]

    def rule_for(call: int, *rule: tuple[int, int, int, int]) -> list[tuple[int, int, int, int]]:
        """The rule, skipped for other calls; then the call number is loaded again."""
        return [(_EQUAL, 0, len(rule) + 1, call), *rule, (_LOAD, 0, 0, _NR)]

    def when(test: int, value: int, then: int, other: int) -> tuple[tuple[int, int, int, int], ...]:
        argument = (_LOAD, 0, 0, _FIRST_ARGUMENT)
        return argument, (test, 0, 1, value), (_RETURN, 0, 0, then), (_RETURN, 0, 0, other)

    program = [
        (_LOAD, 0, 0, _ARCH),
        (_EQUAL, 1, 0, number),
        (_RETURN, 0, 0, _KILL),
        (_LOAD, 0, 0, _NR),
        (_AT_LEAST, 0, 1, 0x40000000),  # x32: the same calls with other numbers
        (_RETURN, 0, 0, _EPERM),
        *rule_for(special["clone"], *when(_ANY_BIT, _CLONE_THREAD, _ALLOW, _EPERM)),
        *rule_for(special["prctl"], *when(_EQUAL, _PR_SET_PDEATHSIG, _EPERM, _ALLOW)),
        *rule_for(special["prlimit64"], *when(_EQUAL, 0, _ALLOW, _EPERM)),  # 0: this process
        *rule_for(
            _CLONE3, (_RETURN, 0, 0, _ENOSYS)
        ),  # libc then uses clone, whose flags the filter can read
    ]
    for call in (denied | _BOTH).values():
        program += [(_EQUAL, 0, 1, call), (_RETURN, 0, 0, _EPERM)]
    program.append((_RETURN, 0, 0, _ALLOW))
    code = ctypes.create_string_buffer(b"".join(struct.pack("HBBI", *line) for line in program))
    head = struct.pack("HxxxxxxQ", len(program), ctypes.addressof(code))
    _check(_LIBC.prctl(_PR_SET_SECCOMP, 2, head, 0, 0))


def _check(result: int) -> int:
    if result < 0:
        error = ctypes.get_errno()
        raise OSError(error, os.strerror(error))
    return result


if __name__ == "__main__":
    main(sys.argv[1])
