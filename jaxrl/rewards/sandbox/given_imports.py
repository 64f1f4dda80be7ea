"""The names that the judges of LeetCode, LiveCodeBench and APPS import before a program.

They are added to the builtins, so that the program's own module has only what it defines: a task
to write `add` is not solved by `operator.add`.
"""

import builtins
import importlib
import sys

MODULES = (
    *("string", "re", "datetime", "collections", "heapq", "bisect", "copy", "math", "random"),
    *("statistics", "itertools", "functools", "operator", "io", "sys", "json", "typing"),
)
RECURSION_LIMIT = 50_000


def give_imports() -> None:
    """Gives the modules and all their public names; builtins keep theirs."""
    modules = {name: importlib.import_module(name) for name in MODULES}
    names: dict[str, object] = {}
    for module in modules.values():
        public = getattr(module, "__all__", None) or [n for n in dir(module) if n[0] != "_"]
        names |= {name: getattr(module, name) for name in public}
    for name, value in (names | modules).items():
        if not hasattr(builtins, name):
            setattr(builtins, name, value)
    sys.setrecursionlimit(RECURSION_LIMIT)
