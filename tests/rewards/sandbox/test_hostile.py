"""Escapes that a program may try. Each must fail; the programs of a group share one process.

An attempt is a line of Python. It has failed if it raises OSError with an error of DENIED; `call`
raises it for functions of libc that return -1.
"""

import contextlib
import functools
import os
import subprocess

import pytest

from jaxrl.rewards.sandbox import jail
from jaxrl.rewards.sandbox.runner import SandboxLimits, run

pytestmark = pytest.mark.skipif(
    bool(jail.problem() or jail.weakness()), reason=jail.problem() or jail.weakness()
)

START = """
import ctypes, errno, fcntl, mmap, os, resource, select, signal, socket, struct, sys
libc = ctypes.CDLL(None, use_errno=True)
target, folder, victim = {target!r}, {folder!r}, {victim}
me, word, page = os.getpid(), 1 << 32, ctypes.create_string_buffer(4096)
read_end, write_end = os.pipe()
one, other = socket.socketpair()
open("own", "w").write("a")
own = os.open("own", os.O_RDWR)

def call(name, *arguments):
    arguments = [ctypes.c_long(a) if isinstance(a, int) else a for a in arguments]
    if isinstance(name, str):
        result = getattr(libc, name)(*arguments)
    else:  # its number, or those on x86-64 and aarch64
        number = name if isinstance(name, int) else name[os.uname().machine != "x86_64"]
        result = libc.syscall(ctypes.c_long(number), *arguments)
    if result == -1:
        raise OSError(ctypes.get_errno(), str(name))

def attempt(line):
    try:
        exec(line, globals())
    except OSError as error:
        return errno.errorcode.get(error.errno, str(error))
    except ValueError as error:
        return "EPERM" if "not allowed to raise" in str(error) else str(error)
    except BaseException as error:
        return f"{{type(error).__name__}}: {{error}}"
    return "succeeded"

"""
SIGNALS = """
os.kill(victim, 9)
os.kill(me, 0)
os.kill(-1, 0)
os.killpg(victim, 9)
signal.pidfd_send_signal(os.pidfd_open(victim), 9)
call("tgkill", victim, victim, 9)
call("sigqueue", victim, 9, 0)
fcntl.fcntl(write_end, fcntl.F_SETOWN, victim)
fcntl.fcntl(write_end, fcntl.F_SETOWN, me)
fcntl.fcntl(own, 15, struct.pack("ii", 1, victim))  # F_SETOWN_EX
fcntl.fcntl(write_end, 10, 9)  # F_SETSIG
fcntl.fcntl(write_end, fcntl.F_SETFL, os.O_NONBLOCK | os.O_ASYNC)
call("fcntl64", read_end, fcntl.F_SETOWN | word, victim)
call("fcntl64", read_end, fcntl.F_SETFL, os.O_ASYNC | word)
fcntl.fcntl(own, fcntl.F_SETLEASE, fcntl.F_WRLCK)
fcntl.fcntl(os.open(".", os.O_RDONLY), fcntl.F_NOTIFY, fcntl.DN_CREATE)
fcntl.ioctl(one, 0x8901, struct.pack("i", victim))  # FIOSETOWN
fcntl.ioctl(one, 0x8902, struct.pack("i", victim))  # SIOCSPGRP
fcntl.ioctl(one, 0x5452, struct.pack("i", 1))  # FIOASYNC
call("ioctl", one.fileno(), 0x5452 | word, page)
fcntl.ioctl(0, 0x5412, b"x")  # TIOCSTI
call("prctl", 1, 0, 0, 0, 0)  # PR_SET_PDEATHSIG
call("timer_create", 0, None, page)
"""
PROCESSES = """
os.fork()
os.forkpty()
os.posix_spawn("/bin/true", ["true"], {})
os.execv("/bin/true", ["true"])
call("fexecve", os.open("/bin/true", os.O_RDONLY), page, page)
call("vfork")
call((56, 220), 17, 0, 0, 0, 0)  # clone as fork does
call(435, page, 88)  # clone3
call("ptrace", 16, victim, 0, 0)
call("process_vm_readv", victim, page, 1, page, 1, 0)
call("process_vm_writev", victim, page, 1, page, 1, 0)
open(f"/proc/{victim}/environ").read()
open(f"/proc/{victim}/cmdline").read()
open(f"/proc/{victim}/mem", "rb")
open(f"/proc/{os.getppid()}/environ").read()
open("/proc/self/mem", "r+b")
os.listdir("/proc")
os.listdir("/proc/self/fd")
resource.prlimit(victim, resource.RLIMIT_CPU)
resource.prlimit(os.getppid(), resource.RLIMIT_CPU)
os.sched_setaffinity(victim, {0})
os.sched_setscheduler(victim, os.SCHED_BATCH, os.sched_param(0))
os.setpriority(os.PRIO_PROCESS, victim, 19)
os.setsid()
os.setpgid(0, 0)
os.unshare(os.CLONE_NEWUSER)
os.setns(own)
os.pidfd_open(victim)
call(438, 3, 0, 0)  # pidfd_getfd
call(440, 3, page, 1, 4, 0)  # process_madvise
call(425, 8, page)  # io_uring_setup
call((321, 280), 0, page, 64)  # bpf
call((298, 241), page, 0, -1, -1, 0)  # perf_event_open
call((323, 282), 0)  # userfaultfd
call((250, 219), 0, -3, 0, 0, 0)  # keyctl
call("personality", 0xFFFFFFFF)
"""
FILES = """
open(target).read()
open(target, "a")
open(target, "w")
open(f"{folder}/new", "w")
os.open(folder, os.O_TMPFILE | os.O_RDWR)
os.listdir(folder)
open("/etc/passwd").read()
os.listdir("/root")
open("/dev/shm/jaxrl", "w")
os.mkdir(f"{folder}/new")
os.rmdir(folder)
os.unlink(target)
os.rename(target, "mine")
os.rename("own", f"{folder}/new")
os.link(target, "mine")
os.link("own", "own2")
os.symlink(target, "mine")
os.symlink("/", "root")
os.mkfifo("fifo")
os.mknod("node")
os.mknod("device", 0o020666, os.makedev(1, 1))
os.chmod(target, 0o4777)
os.chmod("own", 0o4777)
os.chmod("/usr", 0o755)
os.fchmod(own, 0o4777)
os.fchmod(os.open("/usr/bin/env", os.O_RDONLY), 0o755)
call(452, -100, target.encode(), 0, 0)  # fchmodat2
os.chown(target, me, me)
os.chown("own", 0, 0)
os.lchown(target, 0, 0)
os.fchown(own, 0, 0)
os.utime(target, (0, 0))
os.utime("own", (0, 0))
os.utime(own, (0, 0))
os.setxattr(target, "user.a", b"a")
os.setxattr("own", "user.a", b"a")
os.setxattr(own, "user.a", b"a")
os.getxattr(target, "user.a")
os.listxattr(target)
os.removexattr(target, "user.a")
os.truncate(target, 0)
os.chroot(".")
call("mount", b"none", b".", b"tmpfs", 0, None)
call("umount2", b"/", 2)
call("inotify_init")
call("fanotify_init", 0, 0)
call("name_to_handle_at", -100, target.encode(), page, page, 0)
call("open_by_handle_at", -100, page, 0)
call("swapoff", target.encode())
call("acct", None)
"""
NETWORK_AND_IPC = """
socket.create_connection(("127.0.0.1", 80))
socket.create_server(("127.0.0.1", 0))
socket.socket(socket.AF_UNIX)
socket.socket(socket.AF_INET6, socket.SOCK_DGRAM)
socket.socket(socket.AF_NETLINK, socket.SOCK_RAW)
socket.socketpair(socket.AF_UNIX, socket.SOCK_DGRAM)
socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
one.connect("/run/systemd/journal/socket")
one.bind("name")
one.listen()
one.sendmsg([b"a"])
one.recvmsg(1)
one.setsockopt(socket.SOL_SOCKET, socket.SO_SNDBUF, 1)
call("shmget", 0, 4096, 0o1600)
call("shmat", 0, None, 0)
call("shmdt", page)
call("shmctl", 0, 2, page)
call("semget", 0, 1, 0o1600)
call("semop", 0, page, 1)
call("semtimedop", 0, page, 1, None)
call("semctl", 0, 0, 2, page)
call("msgget", 0, 0o1600)
call("msgsnd", 0, page, 8, 0)
call("msgrcv", 0, page, 8, 0, 0)
call("msgctl", 0, 2, page)
call("mq_open", b"/jaxrl", 0o102, 0o600, None)
call("mq_unlink", b"/jaxrl")
call("shm_open", b"/jaxrl", 0o102, 0o600)
call("memfd_create", b"jaxrl", 0)
"""
PRIVILEGES = """
os.setuid(0)
os.setresuid(0, 0, 0)
os.setgid(0)
os.setgroups([0])
call("capset", struct.pack("Ii", 0x20080522, 0), b"\\xff" * 24)
call("prctl", 4, 1, 0, 0, 0)  # PR_SET_DUMPABLE
call("prctl", 22, 1, 0, 0, 0)  # PR_SET_SECCOMP
call("prctl", 24, 0, 0, 0, 0)  # PR_CAPBSET_DROP
call((317, 277), 1, 0, page)  # seccomp
call(444, page, 8, 0)  # landlock_create_ruleset
call(446, own, 0)  # landlock_restrict_self
call("sethostname", b"a", 1)
call("settimeofday", page, None)
call("adjtimex", page)
call("reboot", 0)
call("init_module", page, 1, page)
call("klogctl", 3, page, 1)
call("quotactl", 0, page, 0, page)
call("mlockall", 1)
call("mlock", page, 4096)
call("vhangup")
call("syscall", 0x40000000 + 39)  # x32
os.nice(1)
os.setpriority(os.PRIO_PROCESS, 0, 1)
"""
LIMITS = """
resource.setrlimit(resource.RLIMIT_AS, (1 << 40, 1 << 40))
resource.setrlimit(resource.RLIMIT_CPU, (1000, 1000))
resource.setrlimit(resource.RLIMIT_NOFILE, (1000, 1000))
resource.setrlimit(resource.RLIMIT_NPROC, (1 << 20, 1 << 20))
resource.setrlimit(resource.RLIMIT_FSIZE, (1 << 40, 1 << 40))
resource.setrlimit(resource.RLIMIT_CORE, (1 << 20, 1 << 20))
"""
GROUPS = dict(
    signals=SIGNALS,
    processes=PROCESSES,
    files=FILES,
    network_and_ipc=NETWORK_AND_IPC,
    privileges=PRIVILEGES,
    limits=LIMITS,
)
# EXDEV: Landlock, for a rename or a link out of the folder
DENIED = {"EPERM", "EACCES", "ENOSYS", "EXDEV"}
LINES = [(group, line) for group, text in GROUPS.items() for line in text.strip().splitlines()]


def attributes(path):
    return {name: os.getxattr(path, name) for name in os.listxattr(path)}


@pytest.fixture(scope="module")
def outcome_of(tmp_path_factory):
    """Runs a group once: the outcome of each of its lines. Afterwards nothing has changed."""
    folder = tmp_path_factory.mktemp("outside")
    target = folder / "target"
    target.write_text("hunter2")
    with contextlib.suppress(OSError):  # some file systems have no attributes
        os.setxattr(target, "user.a", b"b")
    before = target.stat(), attributes(target)
    victim = subprocess.Popen(["sleep", "600"], env={"KEY": "hunter2"})

    @functools.cache
    def outcomes(group):
        start = START.format(target=str(target), folder=str(folder), victim=victim.pid)
        lines = GROUPS[group].strip().splitlines()
        show = f"import json; print(json.dumps([attempt(line) for line in {lines!r}]))"
        outcome = run(start + show, limits=SandboxLimits(wall_s=10.0))
        assert outcome.end == "ok", outcome
        return dict(zip(lines, eval(outcome.output), strict=True))

    yield outcomes
    assert victim.poll() is None
    victim.kill()
    victim.wait()
    now = target.stat()
    for name in ("st_mode", "st_uid", "st_gid", "st_mtime", "st_nlink"):
        assert getattr(now, name) == getattr(before[0], name)
    assert target.read_text() == "hunter2" and attributes(target) == before[1]
    assert [path.name for path in folder.iterdir()] == ["target"]


@pytest.mark.parametrize("group, line", LINES, ids=[line for _, line in LINES])
def test_an_escape_is_denied(outcome_of, group, line):
    assert outcome_of(group)[line] in DENIED
