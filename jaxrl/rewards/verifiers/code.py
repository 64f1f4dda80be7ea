"""Runs the program in the response against the task's tests, in sandbox processes.

The ground truth is a list, a dict or their JSON text, in the forms of the common datasets:

  {"inputs": [...], "outputs": [...]}     APPS, TACO, PRIME: standard input and expected output;
                                          with "fn_name" arguments and results of that function
  [{"input", "output", "testtype"}, ...]  LiveCodeBench; testtype "functional" calls the function
                                          metadata["func_name"]
  {"test": "...", "entry_point": "f"}     HumanEval: the test defines check(candidate); "prompt" is
                                          put before the program
  {"test_list": ["assert ..."], ...}      MBPP; "test_imports" (list) and "test_setup_code" are run
                                          before each assert
  ["assert ...", ...]                     plain asserts

Tests that are code run in a separate process and see only the data that the program's functions
return (rewards/sandbox/remote.py).
"""

import ast
import dataclasses
import itertools
import json
import logging
import re
import time
from collections.abc import Sequence
from decimal import Decimal, InvalidOperation
from typing import Any

from jaxrl.rewards.sandbox import jail
from jaxrl.rewards.sandbox.remote import PROGRAM, NotPlainData
from jaxrl.rewards.sandbox.runner import Limits, run

log = logging.getLogger(__name__)
_FENCED = re.compile(r"^```[^\n]*\n(.*?)^```", re.DOTALL | re.MULTILINE)
_FAILURES = ("no_code", "error", "timeout", "output", "wrong")
_MARGIN_S = 1.0  # reserved within the time limit to return the result
_FORMS = (
    "inputs and outputs, test and entry_point, test_list, a list of asserts or of {input, output}"
)


@dataclasses.dataclass(frozen=True)
class Test:
    """One test: standard input and expected output, a call and its result, or code to run."""

    stdin: str = ""
    expected: Any = None
    call: dict[str, Any] | None = None
    code: str | None = None  # passes if it does not raise
    setup: str = ""  # code before it
    setup_in_program: str = ""  # in its place, if the setup makes objects that are not plain data


def check_machine(*, unsafe: bool = False) -> None:
    """Raises ValueError if this machine cannot confine programs. Call it before the run starts.

    With `unsafe`, a machine without Landlock only causes a warning.
    """
    if reason := jail.problem():
        raise ValueError(reason)
    reason = jail.weakness()
    if reason and not unsafe:
        raise ValueError(
            f"{reason}; run on a kernel that has it, or set the option code?unsafe=true if you "
            "trust the programs that the model writes"
        )
    if reason:
        log.warning("code?unsafe=true: %s", reason)


def code(
    data_source: str,
    solution_str: str,
    ground_truth: Any,
    extra_info: dict[str, Any] | None = None,
    *,
    timeout_s: float,
    fraction: bool = False,
    test_s: float = 4.0,
    memory_mib: int = 1024,
    max_tests: int = 0,
    unsafe: bool = False,
) -> dict[str, float]:
    """1 if the last code block after </think> passes all tests, else 0.

    `fraction` gives the share of passed tests instead; without it, the first failure ends the run.
    Each test has `test_s` seconds, all together have `timeout_s`; tests not reached have failed.
    `max_tests` runs only the first tests (0 = all). `unsafe` permits a kernel without Landlock.
    The result also has a 1 for each kind of failure that occurred: no_code, error, timeout, output
    (over 4 MiB), wrong. Raises NotPlainData if a test passes to the program what is not plain data.
    """
    prefix, tests = read_tests(ground_truth)
    tests = tests[:max_tests] if max_tests else tests
    program = last_block(solution_str)
    failures: dict[str, float] = dict.fromkeys(_FAILURES, 0.0)
    if program is None:
        return {"score": 0.0} | failures | {"no_code": 1.0}
    end, passed = time.monotonic() + timeout_s - _MARGIN_S, 0
    for test in tests:
        left_s = end - time.monotonic()
        limits = Limits(wall_s=max(0.1, min(test_s, left_s)), memory_mib=memory_mib)
        failure = "timeout" if left_s <= 0 else run_test(prefix + program, test, limits, unsafe)
        if failure:
            failures[failure] = 1.0
        passed += not failure
        if left_s <= 0 or (failure and not fraction):
            break
    share = passed / len(tests)
    return {"score": share if fraction else float(share == 1.0), **failures}


def last_block(response: str) -> str | None:
    """The last complete fenced block after </think>; None if there is none."""
    blocks = _FENCED.findall(response.rpartition("</think>")[2])
    return blocks[-1] if blocks else None


def run_test(program: str, test: Test, limits: Limits, unsafe: bool = False) -> str:
    """The kind of failure, "" if the program passes the test."""
    if test.code is not None:
        return _run_code(program, test, limits, unsafe)
    outcome = run(program, stdin=test.stdin, call=test.call, limits=limits, unsafe=unsafe)
    if outcome.end != "ok":
        return outcome.end
    if test.call is None:
        return "" if same_output(outcome.output, test.expected) else "wrong"
    try:
        result = json.loads(outcome.output)
        # APPS wraps some results
        return "" if result == test.expected or [result] == test.expected else "wrong"
    except (ValueError, RecursionError):  # the program changed what writes its result
        return "error"


def _run_code(program: str, test: Test, limits: Limits, unsafe: bool) -> str:
    """Runs the setup with the test if possible, where the program cannot change it."""
    code = f"{test.setup}\n{test.code}"
    try:
        end = run(program, test=code, limits=limits, unsafe=unsafe).end
    except NotPlainData:
        if not test.setup:
            raise
        program = f"{program}\n{test.setup_in_program}"
        end = run(program, test=test.code, limits=limits, unsafe=unsafe).end
    return "" if end == "ok" else end


def same_output(output: str, expected: str) -> bool:
    """Compares lines word by word, ignoring white space; numbers are compared as numbers."""
    ours, theirs = (
        [line.split() for line in text.strip().split("\n")] for text in (output, expected)
    )
    if [len(words) for words in ours] != [len(words) for words in theirs]:
        return False
    pairs = zip(itertools.chain(*ours), itertools.chain(*theirs), strict=True)
    return all(a == b or _same_number(a, b) for a, b in pairs)


def _same_number(a: str, b: str) -> bool:
    try:
        return Decimal(a) == Decimal(b)
    except InvalidOperation:
        return False


def read_tests(ground_truth: Any) -> tuple[str, list[Test]]:
    """(code to put before the program, tests). Raises ValueError for an unknown form."""
    try:
        truth = json.loads(ground_truth) if isinstance(ground_truth, str) else ground_truth
    except ValueError as error:
        raise ValueError(
            f"the ground truth of a code task is not JSON ({error}); give one of: {_FORMS}"
        ) from error
    prefix, tests = "", []
    match truth:
        case {"inputs": [*inputs], "outputs": [*outputs]} if len(inputs) == len(outputs):
            name = truth.get("fn_name")
            pairs = zip(inputs, outputs, strict=True)
            tests = [_call(name, i, o) if name else _stdin(i, o) for i, o in pairs]
        case {"test": str(test), "entry_point": str(name)}:
            prefix = (truth.get("prompt") or "") + "\n"
            setup = prefix if _is_complete(prefix) else ""
            tests = [Test(code=f"{test}\ncheck({PROGRAM}.{name})", setup=setup)]
        case {"test_list": [*asserts]}:
            before = [*(truth.get("test_imports") or []), truth.get("test_setup_code") or ""]
            setup = "\n".join(before)
            tests = [Test(code=line, setup=setup, setup_in_program=setup) for line in asserts]
        case [{"input": _, "output": _}, *_]:
            tests = [_livecodebench(case) for case in truth]
        case [str(), *_]:
            tests = [Test(code=line) for line in truth]
    if not tests:
        found = list(truth) if isinstance(truth, dict) else type(truth).__name__
        raise ValueError(
            f"the ground truth of a code task has no tests but {found}; give one of: {_FORMS}"
        )
    return prefix, tests


def _stdin(given: str | Sequence[str], expected: str | Sequence[str]) -> Test:
    """A standard-input test; some datasets have lists of lines."""
    stdin, out = (x if isinstance(x, str) else "\n".join(map(str, x)) for x in (given, expected))
    return Test(stdin=stdin, expected=out)


def _call(name: str, arguments: Sequence[Any], expected: Any) -> Test:
    return Test(call={"name": name, "arguments": arguments}, expected=expected)


def _is_complete(prompt: str) -> bool:
    """Whether a prompt is code by itself: with a docstring as the function's body, for example."""
    try:
        ast.parse(prompt)
    except SyntaxError:
        return False
    return True


def _livecodebench(case: dict[str, Any]) -> Test:
    """A LiveCodeBench test; functional ones have one JSON value per line for each argument."""
    if (case.get("testtype") or "stdin") == "stdin":
        return _stdin(case["input"], case["output"])
    metadata = case.get("metadata") or {}
    metadata = json.loads(metadata) if isinstance(metadata, str) else metadata
    arguments = [json.loads(line) for line in case["input"].splitlines() if line.strip()]
    return _call(metadata["func_name"], arguments, json.loads(case["output"]))
