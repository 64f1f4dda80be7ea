"""The system calls of a confined process, as a seccomp filter: what is not in the table fails.

The table has what a Python interpreter, its standard library, numpy and threads need. It has
nothing that reaches another process, opens a socket, starts a program, or changes the mode, owner,
times or attributes of a file. A filter sees the arguments of a call but not the memory they point
to, so a call is permitted by number, or by numbers in its arguments.
"""

import ctypes
import os
import re
import struct

# name, its number on x86-64, its number on aarch64 ("-": it has none)
_CALLS = """
read 0 63, write 1 64, readv 19 65, writev 20 66, pread64 17 67, pwrite64 18 68, preadv 295 69,
pwritev 296 70, preadv2 327 286, pwritev2 328 287, open 2 -, openat 257 56, close 3 57,
close_range 436 436, lseek 8 62, dup 32 23, dup2 33 -, dup3 292 24, stat 4 -, fstat 5 80,
lstat 6 -, newfstatat 262 79, statx 332 291, access 21 -, faccessat 269 48, faccessat2 439 439,
readlink 89 -, readlinkat 267 78, getdents 78 -, getdents64 217 61, getcwd 79 17, chdir 80 49,
fchdir 81 50, mkdir 83 -, mkdirat 258 34, rmdir 84 -, unlink 87 -, unlinkat 263 35, rename 82 -,
renameat 264 38, renameat2 316 276, ftruncate 77 46, fallocate 285 47, fsync 74 82,
fdatasync 75 83, flock 73 32, umask 95 166, statfs 137 43, fstatfs 138 44, sendfile 40 71,
copy_file_range 326 285, fadvise64 221 223, pipe 22 -, pipe2 293 59,

brk 12 214, mmap 9 222, munmap 11 215, mremap 25 216, mprotect 10 226, madvise 28 233,
msync 26 227, mincore 27 232, membarrier 324 283,

futex 202 98, set_robust_list 273 99, get_robust_list 274 100, set_tid_address 218 96,
rseq 334 293, gettid 186 178, sched_yield 24 124, sched_getaffinity 204 123,
sched_getparam 143 121, sched_getscheduler 145 120, sched_get_priority_max 146 125,
sched_get_priority_min 147 126, getcpu 309 168, arch_prctl 158 -, restart_syscall 219 128,
exit 60 93, exit_group 231 94, wait4 61 260,

rt_sigaction 13 134, rt_sigprocmask 14 135, rt_sigreturn 15 139, rt_sigpending 127 136,
rt_sigsuspend 130 133, rt_sigtimedwait 128 137, sigaltstack 131 132, pause 34 -, alarm 37 -,
getitimer 36 102, setitimer 38 103,

time 201 -, gettimeofday 96 169, clock_gettime 228 113, clock_getres 229 114,
clock_nanosleep 230 115, nanosleep 35 101, times 100 153, getrusage 98 165,

poll 7 -, ppoll 271 73, select 23 -, pselect6 270 72, epoll_create 213 -, epoll_create1 291 20,
epoll_ctl 233 21, epoll_wait 232 -, epoll_pwait 281 22, eventfd2 290 19, sendto 44 206,
recvfrom 45 207, shutdown 48 210, getsockname 51 204, getpeername 52 205, getsockopt 55 209,

getpid 39 172, getppid 110 173, getpgrp 111 -, getpgid 121 155, getsid 124 156, getuid 102 174,
geteuid 107 175, getgid 104 176, getegid 108 177, getresuid 118 148, getresgid 120 150,
getgroups 115 158, getpriority 140 141, uname 63 160, sysinfo 99 179, getrlimit 97 163,
setrlimit 160 164, getrandom 318 278,

clone 56 220, prctl 157 167, prlimit64 302 261, ioctl 16 29, fcntl 72 25, socketpair 53 199
"""
_CLONE3 = 435  # both machines
ARCHITECTURES = {"x86_64": 0xC000003E, "aarch64": 0xC00000B7}  # numbers of linux/audit.h

# A condition: the low 32 bits of argument i, and-ed with a mask, are one of some values. The kernel
# reads these arguments as 32-bit numbers, so their high bits have no meaning.
_Condition = tuple[int, int, tuple[int, ...]]
_ANY = 0xFFFFFFFF
_CLONE_THREAD = 0x10000
_NAME_CALLS = (15, 16)  # prctl: PR_SET_NAME, PR_GET_NAME
# TCGETS, TIOCGWINSZ, FIONREAD, FIONBIO, FIONCLEX, FIOCLEX
_IOCTLS = (0x5401, 0x5413, 0x541B, 0x5421, 0x5450, 0x5451)
# F_DUPFD, F_GETFD, F_SETFD, F_GETFL, locks, F_DUPFD_CLOEXEC, F_GETPIPE_SZ: none sends a signal
_FCNTLS = (0, 1, 2, 3, 5, 6, 7, 36, 37, 38, 1030, 1032)
_F_SETFL, _O_ASYNC = 4, 0o20000
_AF_UNIX, _SOCK_STREAM, _SOCK_FLAGS = 1, 1, 0o2004000  # SOCK_CLOEXEC, SOCK_NONBLOCK

# Calls that need one of these alternatives, each a tuple of conditions.
_RULES: dict[str, tuple[tuple[_Condition, ...], ...]] = {
    "clone": (((0, _CLONE_THREAD, (_CLONE_THREAD,)),),),
    "prctl": (((0, _ANY, _NAME_CALLS),),),
    "prlimit64": (((0, _ANY, (0,)),),),  # 0: this process
    "ioctl": (((1, _ANY, _IOCTLS),),),
    "fcntl": (((1, _ANY, _FCNTLS),), ((1, _ANY, (_F_SETFL,)), (2, _O_ASYNC, (0,)))),
    # A datagram socket could send to any Unix socket of the machine; a stream has one peer.
    "socketpair": (
        ((0, _ANY, (_AF_UNIX,)), (1, _ANY ^ _SOCK_FLAGS, (_SOCK_STREAM,)), (2, _ANY, (0,))),
    ),
}

_PERMIT, _KILL, _EPERM, _ENOSYS = 0x7FFF0000, 0x80000000, 0x00050001, 0x00050026
# classic BPF: load a word of the call, jump by a constant, jump if equal, jump if at least, and
_LOAD, _JUMP, _EQUAL, _AT_LEAST, _AND, _RETURN = 0x20, 0x05, 0x15, 0x35, 0x54, 0x06
_NUMBER, _ARCHITECTURE, _ARGUMENTS = 0, 4, 16  # offsets in the data that a filter reads
_PR_SET_SECCOMP, _SECCOMP_MODE_FILTER = 22, 2

_Instruction = tuple[int, int, int, int]  # operation, jump if true, jump if false, constant
_Code = tuple[_Instruction, ...]


def install(machine: str) -> None:
    """Filters the system calls of this process for good. Raises OSError if the kernel refuses.

    Needs no privileges after PR_SET_NO_NEW_PRIVS.
    """
    program = filter_program(machine)
    code = ctypes.create_string_buffer(b"".join(struct.pack("HBBI", *line) for line in program))
    header = struct.pack("HxxxxxxQ", len(program), ctypes.addressof(code))
    libc = ctypes.CDLL(None, use_errno=True)
    if libc.prctl(_PR_SET_SECCOMP, _SECCOMP_MODE_FILTER, header, 0, 0) < 0:
        error = ctypes.get_errno()
        raise OSError(error, f"seccomp: {os.strerror(error)}")


def filter_program(machine: str) -> list[_Instruction]:
    """The filter for a machine in ARCHITECTURES."""
    numbers = call_numbers(machine)
    permitted, denied = (_return(_PERMIT),), (_return(_EPERM),)
    codes = dict.fromkeys(numbers.values(), permitted)
    codes |= {numbers[name]: _rule(alternatives) for name, alternatives in _RULES.items()}
    codes[_CLONE3] = (_return(_ENOSYS),)  # libc then uses clone, whose flags are an argument
    firsts = [
        (number, codes.get(number, denied))
        for number in range(max(codes) + 2)
        if number == 0 or codes.get(number, denied) != codes.get(number - 1, denied)
    ]
    return [
        (_LOAD, 0, 0, _ARCHITECTURE),
        (_EQUAL, 1, 0, ARCHITECTURES[machine]),
        _return(_KILL),
        (_LOAD, 0, 0, _NUMBER),
        *_search(firsts),
    ]


def call_numbers(machine: str) -> dict[str, int]:
    """Numbers of the calls in the table, by name."""
    column = list(ARCHITECTURES).index(machine)
    found = re.findall(r"(\w+) (\d+|-) (\d+|-)", _CALLS)
    return {name: int(n[column]) for name, *n in found if n[column] != "-"}


def _search(firsts: list[tuple[int, _Code]]) -> _Code:
    """A binary search for the last entry that is at most the call's number, and its code."""
    if len(firsts) == 1:
        return firsts[0][1]
    middle = len(firsts) // 2
    low, high = _search(firsts[:middle]), _search(firsts[middle:])
    return (_AT_LEAST, len(low), 0, firsts[middle][0]), *low, *high


def _rule(alternatives: tuple[tuple[_Condition, ...], ...]) -> _Code:
    """Permits the call if all conditions of an alternative hold."""
    lines = [line for conditions in alternatives for line in _alternative(conditions)]
    return *lines, _return(_EPERM)


def _alternative(conditions: tuple[_Condition, ...]) -> list[_Instruction]:
    """Permits the call if all conditions hold, else continues after this code."""
    code = [_return(_PERMIT)]
    for argument, mask, values in reversed(conditions):
        tests = [(_EQUAL, len(values) - i, 0, value) for i, value in enumerate(values)]
        load = (_LOAD, 0, 0, _ARGUMENTS + 8 * argument)
        code = [load, (_AND, 0, 0, mask), *tests, (_JUMP, 0, 0, len(code)), *code]
    return code


def _return(action: int) -> _Instruction:
    return _RETURN, 0, 0, action
