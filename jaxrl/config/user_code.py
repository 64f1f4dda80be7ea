"""Errors of user code in messages: the exception, and the lines of the user's files that raised it.

KeyError: 'boxed'
  File "my_reward.py", line 7, in score
    return parts["boxed"]
"""

import linecache
import os
import sysconfig
import traceback
from pathlib import Path

import jaxrl

MAX_FRAMES = 3  # the innermost ones
_MAX_ERROR_CHARS = 500  # of an exception's message
_MAX_LINE_CHARS = 200  # of a source line
# code that the user has not written
_LIBRARIES = tuple(
    {
        *(str(Path(folder).resolve()) + os.sep for folder in jaxrl.__path__),
        *(sysconfig.get_paths()[name] + os.sep for name in ("stdlib", "purelib", "platlib")),
        "<",  # <frozen importlib._bootstrap>, <string>
    }
)


def error_text(error: BaseException) -> str:
    """Type and message of an exception, shortened, and the frames of user code."""
    return exception_text(error) + user_frames(error)


def exception_text(error: BaseException) -> str:
    """Type and message of an exception, shortened."""
    try:
        message = str(error)
    except Exception:  # the user's class
        message = "its message cannot be shown"
    return f"{type(error).__name__}: {message}"[:_MAX_ERROR_CHARS]


def user_frames(error: BaseException) -> str:
    """The frames of an exception in user code, as Python prints them; "" if there are none."""
    places = [
        (frame.f_code.co_filename, line, f", in {frame.f_code.co_name}")
        for frame, line in traceback.walk_tb(error.__traceback__)
        if not frame.f_code.co_filename.startswith(_LIBRARIES)
    ]
    if isinstance(error, SyntaxError) and error.filename and error.lineno:
        places.append((error.filename, error.lineno, ""))
    return "".join(_frame(*place) for place in places[-MAX_FRAMES:])


def _frame(path: str, line: int, function: str) -> str:
    source = linecache.getline(path, line).strip()[:_MAX_LINE_CHARS]
    text = f'\n  File "{_short(path)}", line {line}{function}' + (
        f"\n    {source}" if source else ""
    )
    return text.encode(errors="backslashreplace").decode()  # a path may be no UTF-8


def _short(path: str) -> str:
    """The path from the working directory, if it is in there."""
    try:
        folder = Path.cwd()
    except OSError:  # removed
        return path
    return str(Path(path).relative_to(folder)) if Path(path).is_relative_to(folder) else path
