"""Confines the process that runs an untrusted program. Needs no privileges.

user        as root: a separate user; otherwise a user namespace if the kernel permits one
limits      CPU seconds, memory, file size, open files, threads
privileges  capabilities are dropped, and none can be gained
Landlock    files: Python and the system libraries can be read, the working folder can be written
seccomp     system calls: only those that a Python program needs (rewards/sandbox/seccomp.py)
"""

import ctypes
import os
import resource
import signal
import struct
import sys

from jaxrl.rewards.sandbox import landlock, seccomp

_LIBC = ctypes.CDLL(None, use_errno=True)
_READABLE = ("/usr", "/lib", "/lib64", "/etc/ld.so.cache", "/etc/localtime")
_DEVICES = ("/dev/null", "/dev/zero", "/dev/random", "/dev/urandom")
_FIRST_USER = 1 << 30  # plus the process id: a user id that no account and no other jail has
_MAX_THREADS = 64
_MAX_FILES = 64
_PR_SET_PDEATHSIG, _PR_SET_DUMPABLE, _PR_SET_KEEPCAPS = 1, 4, 8
_PR_SET_NO_NEW_PRIVS = 38
_CAPSET = {"x86_64": 126, "aarch64": 91}
_CAP_DAC_READ_SEARCH = 1 << 2


def problem() -> str:
    """Why this machine cannot confine a program at all; "" if it can."""
    machine = os.uname().machine
    if sys.platform == "linux" and machine in seccomp.ARCHITECTURES:
        return ""
    return (
        f"programs cannot be confined on {sys.platform} {machine}; use the code reward on Linux "
        f"with {' or '.join(seccomp.ARCHITECTURES)}"
    )


def weakness() -> str:
    """Why a confined program could still read the user's files; "" if it cannot."""
    if landlock.version() > 0:
        return ""
    return (
        f"Linux {os.uname().release} has no Landlock (it needs 5.13 with CONFIG_SECURITY_LANDLOCK "
        "and 'landlock' in the boot parameter lsm=), so programs of the code reward could read "
        "files of this user and memory of its processes"
    )


def confine(
    *, cpu_s: int, memory_bytes: int, file_bytes: int, parent: int | None, unsafe: bool
) -> None:
    """Confines this process irreversibly to its working folder.

    With `parent`, its process id, this process ends when the parent does.
    Raises OSError if the kernel refuses a part; without Landlock unless `unsafe`.
    """
    folder = os.getcwd()
    separate = _leave_root(folder) if os.geteuid() == 0 else _leave_user_namespace()
    readable = (os.__file__, sys.prefix, folder)
    capabilities = 0 if all(os.access(path, os.R_OK) for path in readable) else _CAP_DAC_READ_SEARCH
    _limit_resources(cpu_s, memory_bytes, file_bytes, _MAX_THREADS + (not separate) * _n_threads())
    _keep_capabilities(capabilities)
    _prctl(_PR_SET_NO_NEW_PRIVS, 1)
    _prctl(_PR_SET_DUMPABLE, 0)
    if parent is not None:
        _prctl(_PR_SET_PDEATHSIG, signal.SIGKILL)  # a change of user would reset it
        if os.getppid() != parent:
            os._exit(1)
    if landlock.version() > 0:
        allowed = dict.fromkeys((*_READABLE, sys.prefix, sys.base_prefix), landlock.READ)
        allowed |= dict.fromkeys(_DEVICES, landlock.USE_DEVICE)
        landlock.restrict(allowed | {folder: landlock.WRITE})
    elif not unsafe:
        raise OSError(weakness())
    seccomp.install(os.uname().machine)


def _leave_root(folder: str) -> bool:
    """Becomes a user that owns nothing but the folder; False if this root may not."""
    user = _FIRST_USER + os.getpid()
    _prctl(_PR_SET_KEEPCAPS, 1)
    try:
        os.chown(folder, user, user)
        os.setgroups([])
        os.setresgid(user, user, user)
        os.setresuid(user, user, user)
    except OSError:  # a container's root without these capabilities or user ids
        os.chown(folder, os.geteuid(), os.getegid())
        return False
    return True


def _leave_user_namespace() -> bool:
    """Enters a new user namespace, so that processes of the old one cannot be inspected."""
    try:
        os.unshare(os.CLONE_NEWUSER)
    except OSError:  # switched off on this machine
        return False
    return True


def _n_threads() -> int:
    """Threads on this machine: the kernel counts all threads of a user together."""
    with open("/proc/loadavg") as file:
        return int(file.read().split()[3].partition("/")[2])


def _limit_resources(cpu_s: int, memory_bytes: int, file_bytes: int, threads: int) -> None:
    limits = {
        resource.RLIMIT_AS: memory_bytes,
        resource.RLIMIT_FSIZE: file_bytes,
        resource.RLIMIT_NOFILE: _MAX_FILES,
        resource.RLIMIT_NPROC: threads,
        resource.RLIMIT_CORE: 0,
    }
    for name, value in limits.items():
        _, hard = resource.getrlimit(name)
        value = value if hard == resource.RLIM_INFINITY else min(value, hard)
        resource.setrlimit(name, (value, value))
    # SIGXCPU tells why the process ended; SIGKILL follows if it is ignored.
    resource.setrlimit(resource.RLIMIT_CPU, (cpu_s, cpu_s + 1))


def _keep_capabilities(capabilities: int) -> None:
    """Drops all capabilities of this process except the given ones that it has.

    CAP_DAC_READ_SEARCH remains for a Python in a folder that only root can read; Landlock still
    decides which files can be opened.
    """
    header = struct.pack("Ii", 0x20080522, 0)  # version 3, this process
    for wanted in (capabilities, 0):
        sets = struct.pack("IIIIII", wanted, wanted, 0, 0, 0, 0)  # effective, permitted, inherited
        if _LIBC.syscall(_CAPSET[os.uname().machine], header, sets) == 0:
            return
    raise OSError(ctypes.get_errno(), "capabilities cannot be dropped")


def _prctl(option: int, value: int) -> None:
    if _LIBC.prctl(option, value, 0, 0, 0) < 0:
        error = ctypes.get_errno()
        raise OSError(error, f"prctl {option}: {os.strerror(error)}")
