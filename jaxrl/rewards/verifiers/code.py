"""Does the program in the response pass the task's tests? Each test is a process that is shut in (sandbox.py).

The ground truth is JSON, in the forms of the field's data sets:

  {"inputs": [...], "outputs": [...]}            APPS, TACO, PRIME: what the program reads and must print; with
                                                 "fn_name" arguments and results of that function
  [{"input", "output", "testtype"}, ...]         LiveCodeBench; testtype "functional" calls metadata's func_name
  {"test": "...", "entry_point": "f"}            HumanEval: the code defines check(candidate); "prompt" is put before
  {"test_list": ["assert ..."], ...}             MBPP; "test_imports" (list) and "test_setup_code" come before
  ["assert ...", ...]                            the same without more
"""

import dataclasses
import itertools
import json
import re
import time
from collections.abc import Sequence
from decimal import Decimal, InvalidOperation
from typing import Any

from jaxrl.rewards.sandbox.runner import Limits, Outcome, run

_FENCED = re.compile(r"^```[^\n]*\n(.*?)^```", re.DOTALL | re.MULTILINE)
_MISTAKES = ("no_code", "error", "timeout", "output", "wrong")
_MARGIN_S = 1.0  # of the time of a call, for its end
_FORMS = (
    "inputs and outputs, test and entry_point, test_list, a list of asserts or of {input, output}"
)


@dataclasses.dataclass(frozen=True)
class Test:
    """One of: standard input and what must come out, a call and its result, code that must not raise."""

    stdin: str = ""
    expected: Any = None
    call: dict[str, Any] | None = None
    code: str | None = None


def code(
    data_source: str,
    solution_str: str,
    ground_truth: str,
    extra_info: dict[str, Any] | None = None,
    *,
    timeout_s: float,
    fraction: bool = False,
    test_s: float = 4.0,
    memory_mib: int = 1024,
    max_tests: int = 0,
) -> dict[str, float]:
    """1 if the last code block after </think> passes all tests, else 0; with `fraction` the share that it passes.

    A test has `test_s` seconds; all together have `timeout_s`, and those that it does not reach have failed. Without
    `fraction` the first failure ends the trial. `max_tests` takes only the first ones (0 = all). Beside the score
    stand 1s for the mistakes that were met: no_code, error, timeout, output (over 4 MiB), wrong.
    """
    prefix, tests = read_tests(ground_truth)
    tests = tests[:max_tests] if max_tests else tests
    program = last_block(solution_str)
    mistakes: dict[str, float] = dict.fromkeys(_MISTAKES, 0.0)
    if program is None:
        return {"score": 0.0} | mistakes | {"no_code": 1.0}
    end, passed = time.monotonic() + timeout_s - _MARGIN_S, 0
    for test in tests:
        left_s = end - time.monotonic()
        limits = Limits(wall_s=max(0.1, min(test_s, left_s)), memory_mib=memory_mib)
        mistake = "timeout" if left_s <= 0 else judge(prefix + program, test, limits)
        if mistake:
            mistakes[mistake] = 1.0
        passed += not mistake
        if left_s <= 0 or (mistake and not fraction):
            break
    share = passed / len(tests)
    return {"score": share if fraction else float(share == 1.0), **mistakes}


def last_block(response: str) -> str | None:
    """The last fenced block after the thoughts; None where there is none that ends."""
    blocks = _FENCED.findall(response.rpartition("</think>")[2])
    return blocks[-1] if blocks else None


def judge(program: str, test: Test, limits: Limits) -> str:
    """ "" where the test is passed, else what went wrong."""
    outcome = run(program, stdin=test.stdin, test=test.code, call=test.call, limits=limits)
    if outcome.end != "ok":
        return outcome.end
    return "" if test.code is not None or _as_expected(outcome, test) else "wrong"


def _as_expected(outcome: Outcome, test: Test) -> bool:
    if test.call is None:
        return same_output(outcome.output, test.expected)
    result = json.loads(outcome.output)
    return result == test.expected or [result] == test.expected  # APPS wraps some results


def same_output(output: str, expected: str) -> bool:
    """Line by line, white space between words aside; words that are numbers are compared as numbers."""
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


def read_tests(ground_truth: str) -> tuple[str, list[Test]]:
    """(code that stands before the program, tests). Raises ValueError where the form is none that is known."""
    try:
        given = json.loads(ground_truth)
    except ValueError as error:
        raise ValueError(
            f"the ground truth of a code task is no JSON ({error}); it may hold {_FORMS}"
        ) from error
    prefix, tests = "", []
    match given:
        case {"inputs": [*inputs], "outputs": [*outputs]} if len(inputs) == len(outputs):
            name = given.get("fn_name")
            pairs = zip(inputs, outputs, strict=True)
            tests = [_call(name, i, o) if name else _stdin(i, o) for i, o in pairs]
        case {"test": str(test), "entry_point": str(name)}:
            prefix = given.get("prompt", "") + "\n"
            tests = [Test(code=f"{test}\ncheck({name})")]
        case {"test_list": [*asserts]}:
            before = [*given.get("test_imports", []), given.get("test_setup_code", "")]
            tests = [_code(line, before) for line in asserts]
        case [{"input": _, "output": _}, *_]:
            tests = [_live(case) for case in given]
        case [str(), *_]:
            tests = [_code(line, ()) for line in given]
    if not tests:
        found = list(given) if isinstance(given, dict) else type(given).__name__
        raise ValueError(
            f"the ground truth of a code task holds no tests but {found}; it may hold {_FORMS}"
        )
    return prefix, tests


def _stdin(given: str | Sequence[str], expected: str | Sequence[str]) -> Test:
    """Some data sets give a list of lines."""
    stdin, out = (x if isinstance(x, str) else "\n".join(map(str, x)) for x in (given, expected))
    return Test(stdin=stdin, expected=out)


def _call(name: str, arguments: Sequence[Any], expected: Any) -> Test:
    return Test(call={"name": name, "arguments": arguments}, expected=expected)


def _code(line: str, before: Sequence[str]) -> Test:
    return Test(code="\n".join([*before, line]))


def _live(case: dict[str, Any]) -> Test:
    """A functional test has one JSON value a line for each argument, and one for the result."""
    if case.get("testtype", "stdin") == "stdin":
        return _stdin(case["input"], case["output"])
    metadata = case.get("metadata") or {}
    metadata = json.loads(metadata) if isinstance(metadata, str) else metadata
    arguments = [json.loads(line) for line in case["input"].splitlines() if line.strip()]
    return _call(metadata["func_name"], arguments, json.loads(case["output"]))
