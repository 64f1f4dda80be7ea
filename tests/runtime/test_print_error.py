"""The message with which a program ends (print_error of jaxrl/runtime/multihost.py)."""

import errno
import os

import pytest

from jaxrl.runtime.multihost import print_error

FULL = OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))


@pytest.mark.parametrize(
    ("error", "message"),
    [
        (
            FULL,
            f"error: {FULL}; free disk space, or set config.run_dir to a folder on another disk\n",
        ),
        (OSError("no room; free disk space"), "error: no room; free disk space\n"),
        (ValueError("two\nlines"), "error: two\nlines\n"),
    ],
)
def test_a_full_disk_is_printed_with_what_to_do(error, message, capsys):
    print_error(error)
    assert capsys.readouterr().err == message
