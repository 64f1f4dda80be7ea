"""Tests in one process, the program in another: only plain data crosses.

The tests' process has a RemoteProgram. Names that a test takes from the program are RemoteObjects:
a call sends its arguments as data and returns the result as data. The program's process runs
`serve`. Whatever it does to its interpreter, the tests compare values that were rebuilt from data.

A result that is not plain data stays with the program. The test gets a RemoteObject for it, which
it can call, iterate, index, print, convert to a number and pass back, but not compare: comparing
would let the program decide.
"""

import builtins
import importlib
import io
import json
import operator
import symtable
import sys
from collections.abc import Callable
from types import ModuleType

from jaxrl.rewards.sandbox.plain_data import PlainData, decode, encode

PROGRAM = "_program"  # the program's module in the namespace of the tests

_OPERATIONS: dict[str, Callable[..., object]] = {
    "call": lambda function, *arguments, **keywords: function(*arguments, **keywords),
    "names": lambda module, names: {
        n: v for n, v in vars(module).items() if n in names and not isinstance(v, ModuleType)
    },
    "modules": lambda module: {
        n: v.__name__ for n, v in vars(module).items() if isinstance(v, ModuleType)
    },
    "getattr": getattr,
    "setattr": setattr,
    "getitem": operator.getitem,
    "setitem": operator.setitem,
    "iter": iter,
    "next": next,
    "len": len,
    "bool": bool,
    "str": str,
    "repr": repr,
    "int": int,
    "float": float,
}


class NotPlainData(TypeError):
    """A test passes an object to the program that cannot leave the tests' process."""


class ProgramEnded(BaseException):
    """The program's process ended before it answered. Not an error that a test may expect."""


def serve(module: ModuleType, requests: io.TextIOWrapper, replies: io.TextIOWrapper) -> None:
    """Answers requests about the module's objects, one JSON line each, until `requests` ends."""
    objects: list[object] = [module]

    def refer(value: object) -> PlainData:
        if hasattr(type(value), "tolist"):  # scalars and arrays of numpy
            return encode(value.tolist(), refer)  # pyright: ignore[reportAttributeAccessIssue]
        objects.append(value)
        return {"object": len(objects) - 1, "type": type(value).__name__}

    for line in requests:
        operation, *data = json.loads(line)
        arguments, keywords = (
            decode(item, lambda d: objects[int(str(d["object"]))]) for item in data
        )
        assert isinstance(arguments, tuple) and isinstance(keywords, dict)
        try:
            reply = [encode(_OPERATIONS[operation](*arguments, **keywords), refer)]
        except Exception as error:
            reply = [None, [kind.__name__ for kind in type(error).__mro__], str(error)]
        replies.write(json.dumps(reply) + "\n")
        replies.flush()


class RemoteProgram:
    """The program in a process that runs `serve` at the other end of two pipes."""

    def __init__(self, requests: io.TextIOWrapper, replies: io.TextIOWrapper):
        self._requests, self._replies = requests, replies
        self.module = RemoteObject(self, 0, "module")

    def namespace(self, test: str) -> dict[str, object]:
        """The program's names that a test uses and does not define.

        Names of builtins are Python's, unless the test uses no other name of the program: then a
        function such as `sum` is what it tests. Modules of the standard library that only the
        program imports are imported here; the test has to import others.
        """
        used = _free_names(symtable.symtable(test, "test.py", "exec"))
        used = {name for name in used if not hasattr(builtins, name)} or used
        found = self.request("names", self.module, used)
        modules = self.request("modules", self.module)
        if not isinstance(found, dict) or not isinstance(modules, dict) or found.keys() - used:
            raise ValueError("the program's process sent no names")
        for name in used & modules.keys():
            if str(modules[name]).partition(".")[0] in sys.stdlib_module_names:
                found[name] = importlib.import_module(modules[name])
        return {"__name__": "tests", **found, PROGRAM: self.module}

    def request(self, operation: str, *arguments: object, **keywords: object) -> object:
        """The result of an operation, or the built-in exception that it raised.

        Raises ProgramEnded, and ValueError, TypeError or RecursionError for an invalid reply.
        """
        request = [operation, encode(arguments, _refer), encode(keywords, _refer)]
        try:
            self._requests.write(json.dumps(request) + "\n")
            self._requests.flush()
            line = self._replies.readline()
        except BrokenPipeError:
            line = ""
        if not line:
            raise ProgramEnded
        match json.loads(line):
            case [value]:
                return decode(value, self._resolve)
            case [None, [*kinds], str(message)]:
                raise _exception(kinds, message)
        raise ValueError("the program's process sent no result")

    def _resolve(self, data: dict[str, object]) -> object:
        match data:
            case {"object": int(index), "type": str(kind)}:
                return RemoteObject(self, index, kind)
        raise ValueError("the program's process sent no plain data")


def _forward(operation: str) -> Callable[..., object]:
    """A method that the program's process executes."""

    def method(self: "RemoteObject", *arguments: object, **keywords: object) -> object:
        return self._program.request(operation, self, *arguments, **keywords)

    return method


class RemoteObject:
    """An object in the program's process."""

    __slots__ = ("_index", "_kind", "_program")
    _index: int
    _kind: str
    _program: RemoteProgram

    def __init__(self, program: RemoteProgram, index: int, kind: str):
        for name, value in (("_program", program), ("_index", index), ("_kind", kind)):
            object.__setattr__(self, name, value)

    def _incomparable(self, *_: object) -> bool:
        raise TypeError(
            f"the program returned a {self._kind}; tests compare plain data only: numbers, text, "
            "bytes, lists, tuples, sets and dicts"
        )

    def __getattr__(self, name: str) -> object:
        # Libraries read special attributes, such as numpy's addresses of arrays, and trust them.
        if name.startswith("__"):
            raise AttributeError(f"{name} of an object of the program")
        return self._program.request("getattr", self, name)

    __eq__ = __ne__ = __lt__ = __le__ = __gt__ = __ge__ = _incomparable
    __hash__ = None  # pyright: ignore[reportAssignmentType]  # as for any type with __eq__ alone
    __call__ = _forward("call")
    __getitem__, __setitem__ = _forward("getitem"), _forward("setitem")
    __iter__, __next__, __len__ = _forward("iter"), _forward("next"), _forward("len")
    __bool__, __int__, __float__ = _forward("bool"), _forward("int"), _forward("float")
    # Python checks what these return, so their types need not say it.
    __setattr__ = _forward("setattr")  # pyright: ignore[reportAssignmentType]
    __str__ = _forward("str")  # pyright: ignore[reportAssignmentType]
    __repr__ = _forward("repr")  # pyright: ignore[reportAssignmentType]


def _refer(value: object) -> PlainData:
    if isinstance(value, RemoteObject):
        return {"object": value._index}
    raise NotPlainData(
        f"a test passes a {type(value).__name__} to the program; tests can pass plain data "
        "(numbers, text, bytes, lists, tuples, sets, dicts) and objects of the program"
    )


def _exception(kinds: list[object], message: str) -> Exception:
    """An exception of the first built-in class in a method resolution order."""
    for name in kinds:
        kind = getattr(builtins, str(name), None)
        if isinstance(kind, type) and issubclass(kind, Exception):
            try:
                return kind(message)
            except TypeError:  # it needs other arguments, as UnicodeDecodeError does
                continue
    return RuntimeError(message)


def _free_names(table: symtable.SymbolTable) -> set[str]:
    """Names that code reads, in its functions too, but does not define at its top level."""
    defined = {s.get_name() for s in table.get_symbols() if s.is_assigned() or s.is_imported()}
    tables, read = [table], set[str]()
    while tables:
        inner = tables.pop()
        tables += inner.get_children()
        symbols = (s for s in inner.get_symbols() if s.is_referenced())
        read |= {s.get_name() for s in symbols if inner is table or s.is_global()}
    return {name for name in read - defined if not name.startswith("__")}
