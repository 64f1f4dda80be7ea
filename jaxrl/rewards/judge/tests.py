"""The tests of a task, from its ground truth in the forms of the common datasets.

{"inputs": [...], "outputs": [...]}     APPS, TACO, PRIME: standard input and expected output;
                                        with "fn_name" arguments and results of that function,
                                        as lists or, in verl's files, one JSON text per line
[{"input", "output", "testtype"}, ...]  LiveCodeBench; testtype "functional" calls the function
                                        metadata["func_name"]
{"test": "...", "entry_point": "f"}     HumanEval: the test defines check(candidate); "prompt" is
                                        put before the program
{"test_list": ["assert ..."], ...}      MBPP; "test_imports" (list) and "test_setup_code" are run
                                        before each assert
["assert ...", ...]                     plain asserts
"""

import ast
import contextlib
import dataclasses
import re
from collections.abc import Mapping, Sequence
from typing import Any

from jaxrl.json_text import parse_json
from jaxrl.rewards.sandbox.remote import PROGRAM

_FORMS = (
    "inputs and outputs, test and entry_point, test_list, a list of asserts or of {input, output}"
)
_FUNCTION_KEYS = ("fn_name", "func_name", "entry_point")
MAX_DEPTH = 200  # of arguments and results
_CHECKS = (ast.Assert, ast.Raise, ast.Call)  # code without any of these cannot fail


@dataclasses.dataclass(frozen=True)
class TestCall:
    """A call of the program's function or of a method of its class Solution."""

    name: str  # "": the only function of the program that takes so many arguments
    arguments: list[Any]


@dataclasses.dataclass(frozen=True)
class Test:
    """One test: standard input and expected output, a call and its result, or code to run."""

    stdin: str = ""
    expected: Any = None
    call: TestCall | None = None
    may_wrap: bool = False  # APPS: the expected result may be in a list of one element
    code: str | None = None  # passes if it does not raise
    setup: str = ""  # code before it
    setup_in_program: str = ""  # in its place, if the setup makes objects that are not plain data

    @property
    def gives_imports(self) -> bool:
        """Whether the judge of this form imports the common modules before the program."""
        return self.code is None or re.search(r"\bSolution\b", self.code) is not None


def read_tests(
    ground_truth: Any, extra_info: Mapping[str, Any] | None = None
) -> tuple[str, list[Test]]:
    """(code to put before the program, tests).

    `extra_info` may name the function of tests that do not: its columns `metadata` and
    `starter_code`, as in LiveCodeBench. Raises ValueError for a truth that cannot be judged.
    """
    try:
        truth = (
            parse_json(ground_truth, max_depth=MAX_DEPTH)
            if isinstance(ground_truth, str)
            else ground_truth
        )
    except ValueError as error:
        raise ValueError(
            f"the ground truth of a code task is not JSON ({error}); give one of: {_FORMS}"
        ) from error
    prefix, tests = "", []
    match truth:
        case {"inputs": [*inputs], "outputs": [*outputs]}:
            tests = _inputs_and_outputs(truth, inputs, outputs)
        case {"test": str(test), "entry_point": str(name)}:
            prefix = (truth.get("prompt") or "") + "\n"
            setup = prefix if _is_complete(prefix) else ""
            tests = [_code(f"{test}\ncheck({PROGRAM}.{name})", 0, setup)]
        case {"test_list": [*asserts]}:
            imports = _text(truth.get("test_imports") or [], "test_imports")
            setup = f"{imports}\n{truth.get('test_setup_code') or ''}"
            tests = [_code(line, i, setup, setup) for i, line in enumerate(asserts)]
        case [{"input": _, "output": _}, *_]:
            tests = [_livecodebench(case, extra_info or {}, i) for i, case in enumerate(truth)]
        case [str(), *_]:
            tests = [_code(line, i) for i, line in enumerate(truth)]
    if not tests:
        found = list(truth) if isinstance(truth, dict) else type(truth).__name__
        raise ValueError(
            f"the ground truth of a code task has no tests but {found}; give one of: {_FORMS}"
        )
    return prefix, tests


def _inputs_and_outputs(truth: dict, inputs: list, outputs: list) -> list[Test]:
    if len(inputs) != len(outputs):
        raise ValueError(
            f"the ground truth of a code task has {len(inputs)} inputs and {len(outputs)} "
            "outputs; give one output per input"
        )
    name = next((truth[key] for key in _FUNCTION_KEYS if truth.get(key)), None)
    pairs = list(enumerate(zip(inputs, outputs, strict=True)))
    if name is None:
        return [_stdin(given, expected, i) for i, (given, expected) in pairs]
    return [_apps_call(str(name), given, expected, i) for i, (given, expected) in pairs]


def _apps_call(name: str, given: Any, expected: Any, i: int) -> Test:
    """A call of APPS. Keys of its first argument that are numbers are integers, as in its judge."""
    if isinstance(given, str):  # verl's files
        given, expected = _json_lines(given, i), _json(expected, f"output {i}")
    if not isinstance(given, list):
        raise ValueError(
            f"input {i} of a code task is {given!r:.80}; give the list of the arguments of {name}"
        )
    if given and isinstance(given[0], dict):
        with contextlib.suppress(ValueError):
            given = [{int(key): value for key, value in given[0].items()}, *given[1:]]
    return Test(call=TestCall(name, given), expected=expected, may_wrap=True)


def _stdin(given: Any, expected: Any, i: int) -> Test:
    """A standard-input test; some datasets have lists of lines, and numbers."""
    return Test(stdin=_text(given, f"input {i}"), expected=_text(expected, f"output {i}"))


def _text(value: Any, place: str) -> str:
    if isinstance(value, str):
        return value
    lines = value if isinstance(value, Sequence) else [value]
    if not all(isinstance(line, str | int | float) for line in lines):
        raise ValueError(
            f"{place} of a code task is {value!r:.80}; give text or a list of lines, or the name "
            "of a function as fn_name if these are arguments and results"
        )
    return "\n".join(map(str, lines))


def _livecodebench(case: Any, row: Mapping[str, Any], i: int) -> Test:
    """A LiveCodeBench test; functional ones have one JSON value per line for each argument."""
    match case:
        case {"input": given, "output": expected}:
            kind = case.get("testtype") or "stdin"
        case _:
            raise ValueError(f"test {i} of a code task is {case!r:.80}; give input and output")
    if kind == "stdin":
        return _stdin(given, expected, i)
    if kind != "functional":
        raise ValueError(
            f"test {i} of a code task has testtype {kind!r:.80}; set 'stdin' or 'functional'"
        )
    call = TestCall(_named_function(case) or _named_function(row), _json_lines(given, i))
    return Test(call=call, expected=_json(expected, f"output {i}"))


def _named_function(row: Mapping[str, Any]) -> str:
    """The function that a row's metadata names or its starter code begins; "" if none does."""
    metadata = row.get("metadata") or {}
    if isinstance(metadata, str):
        with contextlib.suppress(ValueError):
            metadata = parse_json(metadata)
    named = metadata.get("func_name") if isinstance(metadata, Mapping) else None
    found = re.findall(r"^\s*def (\w+)\(", str(row.get("starter_code") or ""), re.MULTILINE)
    return str(named or (found[0] if len(found) == 1 else ""))


def _json_lines(text: Any, i: int) -> list[Any]:
    if not isinstance(text, str):
        raise ValueError(f"input {i} of a code task is {text!r:.80}; give one JSON text per line")
    return [_json(line, f"input {i}") for line in text.split("\n") if line.strip()]


def _json(text: Any, place: str) -> Any:
    try:
        return parse_json(text, max_depth=MAX_DEPTH) if isinstance(text, str) else text
    except ValueError as error:
        raise ValueError(
            f"{place} of a code task is not JSON ({error}): {text[:80]!r}; give one JSON text per "
            "argument and for the result"
        ) from error


def _code(code: Any, i: int, setup: str = "", setup_in_program: str = "") -> Test:
    """A test that is code. Raises ValueError if it is not Python or cannot fail."""
    if not isinstance(code, str):
        raise ValueError(f"test {i} of a code task is {code!r:.80}; give an assert as text")
    try:
        ast.parse(setup_in_program)
        tree = ast.parse(code)
    except (SyntaxError, ValueError, RecursionError, MemoryError) as error:
        raise ValueError(
            f"test {i} of a code task is not Python ({error}): {code[:80]!r}"
        ) from error
    if not any(isinstance(node, _CHECKS) for node in ast.walk(tree)):
        raise ValueError(
            f"test {i} of a code task, {code[:80]!r}, asserts nothing, so every program passes; "
            "give asserts, or inputs and outputs"
        )
    return Test(code=code, setup=setup, setup_in_program=setup_in_program)


def _is_complete(prompt: str) -> bool:
    """Whether a prompt is code by itself: with a docstring as the function's body, for example."""
    try:
        ast.parse(prompt)
    except SyntaxError:
        return False
    return True
