"""Landlock: the files that a confined process can open, and the processes that it can signal.

https://docs.kernel.org/userspace-api/landlock.html describes the interface and its versions (ABI).
"""

import ctypes
import os
import struct
from collections.abc import Mapping

_LIBC = ctypes.CDLL(None, use_errno=True)
_CREATE_RULESET, _ADD_RULE, _RESTRICT_SELF = 444, 445, 446  # system calls, on all machines
_VERSION = 1  # flag of _CREATE_RULESET
_RULE_PATH_BENEATH = 1
# Rights that an ABI version adds, as numbers of bits: version 1 has 13, from EXECUTE to MAKE_SYM.
_N_RIGHTS = ((1, 13), (2, 1), (3, 1), (5, 1))  # 2: REFER, 3: TRUNCATE, 5: IOCTL_DEV
_WRITE_FILE, _READ_FILE, _READ_DIR, _REMOVE_DIR, _REMOVE_FILE = (1 << bit for bit in range(1, 6))
_MAKE_DIR, _MAKE_REG, _REFER, _TRUNCATE = 1 << 7, 1 << 8, 1 << 13, 1 << 14
_NETWORK = 0b11  # version 4: TCP bind and connect
_SCOPES = 0b11  # version 6: abstract Unix sockets and signals

READ = _READ_FILE | _READ_DIR
USE_DEVICE = _READ_FILE | _WRITE_FILE
# No symbolic links, sockets, pipes or devices can be made, and nothing can be executed.
WRITE = READ | _WRITE_FILE | _TRUNCATE | _MAKE_DIR | _MAKE_REG | _REMOVE_DIR | _REMOVE_FILE | _REFER
_OF_FILES = _READ_FILE | _WRITE_FILE | _TRUNCATE


def version() -> int:
    """Landlock's ABI version; 0 if the kernel has no Landlock or it is off."""
    return max(0, _LIBC.syscall(_CREATE_RULESET, None, 0, _VERSION))


def restrict(rights: Mapping[str, int]) -> None:
    """Denies this process all files but those below the given paths, for good.

    `rights` is READ, USE_DEVICE or WRITE per path; paths that do not exist are skipped. From ABI 4
    on also denies TCP, from ABI 6 on signals to other processes and abstract Unix sockets. Raises
    OSError if the kernel refuses.
    """
    abi = version()
    handled = (1 << sum(n for since, n in _N_RIGHTS if abi >= since)) - 1
    network, scopes = _NETWORK * (abi >= 4), _SCOPES * (abi >= 6)
    attributes = struct.pack("QQQ", handled, network, scopes)[: 8 + 8 * (abi >= 4) + 8 * (abi >= 6)]
    ruleset = _call(_CREATE_RULESET, attributes, len(attributes), 0)
    for path, wanted in rights.items():
        if not os.path.exists(path):
            continue
        wanted &= handled if os.path.isdir(path) else handled & _OF_FILES
        place = os.open(path, os.O_PATH)
        _call(_ADD_RULE, ruleset, _RULE_PATH_BENEATH, struct.pack("=Qi", wanted, place), 0)
        os.close(place)
    _call(_RESTRICT_SELF, ruleset, 0)
    os.close(ruleset)


def _call(number: int, *arguments: bytes | int) -> int:
    result = _LIBC.syscall(number, *arguments)
    if result < 0:
        error = ctypes.get_errno()
        raise OSError(error, f"Landlock: {os.strerror(error)}")
    return result
