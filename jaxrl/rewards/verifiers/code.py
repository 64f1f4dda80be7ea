"""Runs the program in the response against the task's tests, in sandbox processes.

The ground truth is a list, a dict or their JSON text, in the forms of the common datasets
(rewards/judge/tests.py). Each is judged as its public judge does: docs/how_to/code_rewards.md.

Tests that are code run in a separate process and see only the data that the program's functions
return (rewards/sandbox/remote.py).
"""

import logging
import time
from collections.abc import Mapping
from typing import Any

from jaxrl.json_text import parse_json
from jaxrl.rewards.judge.called_function import only_function
from jaxrl.rewards.judge.code_blocks import last_program
from jaxrl.rewards.judge.comparison import same_output, same_value
from jaxrl.rewards.judge.tests import MAX_DEPTH, Test, read_tests
from jaxrl.rewards.sandbox import check, jail, runner
from jaxrl.rewards.sandbox.plain_data import decode
from jaxrl.rewards.sandbox.remote import NotPlainData
from jaxrl.rewards.sandbox.runner import NotStarted, SandboxLimits

log = logging.getLogger(__name__)
_FAILURES = ("no_code", "error", "timeout", "output", "wrong")
_MARGIN_S = 1.0  # reserved within the time limit to return the result


def check_machine(*, unsafe: bool = False) -> None:
    """Raises ValueError if this machine cannot confine programs. Call it before the run starts.

    Runs programs in the jail. With `unsafe`, a machine without Landlock only causes a warning.
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
    if failure := check.failure(unsafe=unsafe):
        raise ValueError(
            f"the code reward cannot run programs on this machine: {failure}; run outside of a "
            "container or on a machine that permits it"
        )


def check_truth(ground_truth: Any, extra_info: Mapping[str, Any] | None = None) -> None:
    """Raises ValueError with the reason if no program can be judged by this ground truth.

    `extra_info` has the other columns of the row.
    """
    _, tests = read_tests(ground_truth, extra_info)
    if all(test.call is None and test.code is None and not test.expected.strip() for test in tests):
        raise ValueError(
            "all expected outputs of a code task are empty, so a program that does nothing passes; "
            "give outputs"
        )


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
    tolerance: float = 1e-6,
    unsafe: bool = False,
) -> dict[str, float]:
    """1 if the last program after </think> passes all tests, else 0.

    `fraction` gives the share of passed tests instead; without it, the first failure ends the run.
    Each test has `test_s` seconds, all together have `timeout_s`; tests not reached have failed.
    `max_tests` runs only the first tests (0 = all). `tolerance`, relative and absolute, is for
    expected numbers with a fraction. `unsafe` permits a kernel without Landlock.
    The result also has a 1 for each kind of failure that occurred: no_code, error, timeout, output
    (over 4 MiB), wrong.

    Raises ValueError for a ground truth that cannot be judged, NotPlainData if a test passes to
    the program what is not plain data, and OSError if the jail cannot be set up.
    """
    end = time.monotonic() + timeout_s - min(_MARGIN_S, timeout_s / 4)
    prefix, tests = read_tests(ground_truth, extra_info)
    tests = tests[:max_tests] if max_tests else tests
    program = last_program(solution_str, prefix)
    failures: dict[str, float] = dict.fromkeys(_FAILURES, 0.0)
    if program is None:
        return {"score": 0.0} | failures | {"no_code": 1.0}
    limits = SandboxLimits(wall_s=test_s, memory_mib=memory_mib, end=end)
    passed = 0
    for i, test in enumerate(tests):
        try:
            failure = _run_test(prefix + program, test, limits, tolerance, unsafe)
        except NotStarted:
            if i == 0:
                raise
            failures["timeout"] = 1.0  # the earlier tests have used the time
            break
        if failure:
            failures[failure] = 1.0
        passed += not failure
        if failure and not fraction:
            break
    share = passed / len(tests)
    return {"score": share if fraction else float(share == 1.0), **failures}


def _run_test(
    program: str, test: Test, limits: SandboxLimits, tolerance: float, unsafe: bool
) -> str:
    """The kind of failure, "" if the program passes the test."""
    if test.code is not None:
        return _run_code(program, test, limits, unsafe)
    call = None
    if test.call is not None:
        name = test.call.name or only_function(program, len(test.call.arguments))
        if not name:
            return "error"
        call = (name, *test.call.arguments)
    imports = test.gives_imports
    outcome = runner.run(
        program, stdin=test.stdin, call=call, imports=imports, limits=limits, unsafe=unsafe
    )
    if outcome.end != "ok":
        return outcome.end
    if call is None:
        return "" if same_output(outcome.output, test.expected, tolerance) else "wrong"
    try:
        result = decode(parse_json(outcome.output, max_depth=2 * MAX_DEPTH), _reject)
    except (ValueError, TypeError, RecursionError):  # the program changed what writes its result
        return "error"
    candidates = [result, [result]] if test.may_wrap else [result]
    is_same = any(same_value(value, test.expected, tolerance) for value in candidates)
    return "" if is_same else "wrong"


def _run_code(program: str, test: Test, limits: SandboxLimits, unsafe: bool) -> str:
    """Runs the setup with the test if possible, where the program cannot change it."""
    imports, code = test.gives_imports, f"{test.setup}\n{test.code}"
    try:
        end = runner.run(program, test=code, imports=imports, limits=limits, unsafe=unsafe).end
    except NotPlainData:
        if not test.setup:
            raise
        program = f"{program}\n{test.setup_in_program}"
        end = runner.run(program, test=test.code, imports=imports, limits=limits, unsafe=unsafe).end
    return "" if end == "ok" else end


def _reject(data: dict[str, object]) -> object:
    raise ValueError(f"{data!r:.80} is no result of a call")
