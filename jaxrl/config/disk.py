"""Errors of a disk without room."""

import errno

ADVICE = "free disk space, or set config.run_dir to a folder on another disk"
_NUMBERS = (errno.ENOSPC, errno.EDQUOT)


def is_full(error: BaseException) -> bool:
    """Whether the error says that a disk has no room. Some libraries only quote the system."""
    return getattr(error, "errno", None) in _NUMBERS or "No space left on device" in str(error)
