"""Tests of jaxrl/rewards/verifiers/code.py: datasets, hostile programs and cheats."""

import functools
import json
import time

import pytest

from jaxrl.rewards.judge.code_blocks import last_program
from jaxrl.rewards.judge.comparison import same_output
from jaxrl.rewards.judge.tests import read_tests
from jaxrl.rewards.sandbox import jail, runner
from jaxrl.rewards.sandbox.folder import wait_for_removals
from jaxrl.rewards.verifiers.code import code as code_reward

pytestmark = pytest.mark.skipif(
    bool(jail.problem() or jail.weakness()), reason=jail.problem() or jail.weakness()
)

code = functools.partial(code_reward, "", timeout_s=20.0, test_s=0.5)
ADD = {"inputs": ["1 2\n", "3 4\n"], "outputs": ["3\n", "7\n"]}
SUM = "print(sum(map(int, input().split())))"


def block(program):
    return f"Here it is:\n```python\n{program}\n```\n"


def failures(found):
    return {name for name, value in found.items() if name != "score" and value}


CASES = {
    "APPS": ADD | {"difficulty": "introductory"},
    "lines": {"inputs": [["1 2"]], "outputs": [["3"]]},
    "LiveCodeBench": [{"input": "1 2\n", "output": "3", "testtype": "stdin"}],
}


@pytest.mark.parametrize("tests", CASES.values(), ids=CASES)
def test_a_program_is_scored_by_its_output(tests):
    right = code(block(SUM), json.dumps(tests))
    assert (right["score"], failures(right)) == (1.0, set())
    wrong = code(block("print(input())"), json.dumps(tests))
    assert (wrong["score"], failures(wrong)) == (0.0, {"wrong"})


CALLS = {
    "HumanEval": {"test": "def check(f):\n    assert f(1, 2) == 3", "entry_point": "add"},
    "HumanEval's prompt": {
        "prompt": "import math\ndef unused(): pass\n",
        "test": "def check(f):\n    assert f(1, 2) == 3 and math.pi > 3",
        "entry_point": "add",
    },
    "MBPP": {
        "test_list": ["assert add(1, 2) == 3", "assert add(math.floor(1.5), 3) == 4"],
        "test_imports": ["import math"],
        "test_setup_code": "",
    },
    "asserts": ["assert add(1, 2) == 3"],
    "APPS calls": {"fn_name": "add", "inputs": [[1, 2], [3, 4]], "outputs": [3, [7]]},
    "LiveCodeBench calls": [
        {
            "input": "1\n2",
            "output": "3",
            "testtype": "functional",
            "metadata": json.dumps({"func_name": "add"}),
        }
    ],
}


@pytest.mark.parametrize("tests", CALLS.values(), ids=CALLS)
def test_a_function_is_scored_by_its_results(tests):
    assert code(block("def add(a, b):\n    return a + b"), json.dumps(tests))["score"] == 1.0
    assert read_tests(json.dumps(tests)) == read_tests(tests)
    assert failures(code(block("def add(a, b):\n    return a - b"), json.dumps(tests))) == {"wrong"}
    assert failures(code(block("def mul(a, b): pass"), json.dumps(tests))) == {"error"}


def test_a_method_of_solution_is_called_if_there_is_one():
    tests = json.dumps({"fn_name": "add", "inputs": [[1, 2]], "outputs": [3]})
    program = "class Solution:\n    def add(self, a, b):\n        return a + b"
    assert code(block(program), tests)["score"] == 1.0


def test_fraction_runs_every_test_and_without_it_the_first_failure_stops():
    tests = json.dumps({"inputs": ["1", "2", "3", "4"], "outputs": ["1", "0", "3", "0"]})
    echo = block("print(input())")
    assert code(echo, tests, fraction=True)["score"] == 0.5
    assert code(echo, tests)["score"] == 0.0
    assert code(echo, tests, max_tests=1)["score"] == 1.0


def test_the_last_block_after_think_is_the_program():
    text = "```python\na()\n```\n</think>x\n```py\nb()\n```\ny\n```\nc()\n```"
    assert last_program(text) == "c()\n"
    assert last_program("```python\na\n```\n</think>no block") is None
    assert last_program("```python\ncut off") is None
    assert failures(code("def add(a, b): return a + b", json.dumps(ADD))) == {"no_code"}


@pytest.mark.parametrize(
    "output, expected, same",
    [
        ("1 2\n3\n", "1  2 \n3", True),
        ("1 2 3", "1 2\n3", False),
        ("0.50", "0.5", True),
        ("0.5001", "0.5", False),
        ("YES", "yes", False),
        ("nan", "nan", True),
        ("", "0", False),
    ],
)
def test_outputs_are_compared_by_lines_words_and_numbers(output, expected, same):
    assert same_output(output, expected, 1e-6) == same


HOSTILE = {
    "hangs": ("while True: pass", "timeout"),
    "uses all its CPU time at once": (
        "import hashlib, threading\n"
        "def spin(): hashlib.pbkdf2_hmac('sha256', b'', b'', 1 << 30)\n"
        "for _ in range(4): threading.Thread(target=spin).start()",
        "timeout",
    ),
    "sleeps": ("import time; time.sleep(100)", "timeout"),
    "hangs in C": ("9 ** 9 ** 9 ** 9", "timeout"),
    "ignores signals": (
        "import signal, time\n"
        "for s in (1, 2, 15): signal.signal(s, signal.SIG_IGN)\n"
        "time.sleep(100)",
        "timeout",
    ),
    "raises": ("1 / 0", "error"),
    "does not compile": ("def f(:", "error"),
    "takes all memory": ("x = bytearray(8 << 30)", "error"),
    "recurses": ("def f(): f()\nf()", "error"),
    "writes a large file": ("open('x', 'wb').write(bytes(64 << 20))", "error"),
    "prints gigabytes": ("while True: print('x' * 100000)", "output"),
    "starts a process": ("import subprocess; subprocess.run(['true'])", "error"),
    "forks": ("import os\nwhile True: os.fork()", "error"),
    "closes its output and sleeps": ("import os, time; os.close(1); time.sleep(100)", "timeout"),
    "prints no text": (r"import sys; sys.stdout.buffer.write(b'\xff\xfe')", "wrong"),
}


@pytest.mark.parametrize("program, failure", HOSTILE.values(), ids=HOSTILE)
def test_a_hostile_program_gets_the_failure_of_its_kind(program, failure):
    start = time.monotonic()
    found = code(block(program), json.dumps(ADD))
    assert (found["score"], failures(found)) == (0.0, {failure})
    assert time.monotonic() - start < 6


CHEATS = {
    "leaves with status 0": "import os, sys\ndef add(a, b): os._exit(0)",
    "leaves before the test": "import sys; sys.exit(0)",
    "returns what equals everything": (
        "class Any:\n    def __eq__(self, other): return True\ndef add(a, b): return Any()"
    ),
    "returns what is no JSON": "def add(a, b): return {1, 2, 3}",
    "patches json to write no JSON": (
        "import json\njson.dumps = lambda *a: '{'\ndef add(a, b): return 0"
    ),
    "patches json to write nested lists": (
        "import json\njson.dumps = lambda *a: '[' * 100000\ndef add(a, b): return 0"
    ),
    "patches json to write a long number": (
        "import json\njson.dumps = lambda *a: '9' * 100000\ndef add(a, b): return 0"
    ),
    "patches json to raise": "import json\njson.dumps = None\ndef add(a, b): return 3",
    "patches json to exit": "import json, os\njson.dumps = lambda *a: os._exit(0)\n"
    "def add(a, b): return 3",
    "prints the result": "def add(a, b): print(3); import os; os._exit(0)",
}


@pytest.mark.parametrize("program", CHEATS.values(), ids=CHEATS)
def test_a_call_counts_only_if_it_returns_the_value(program):
    tests = json.dumps({"fn_name": "add", "inputs": [[1, 2]], "outputs": [3]})
    found = code(block(program), tests)
    assert found["score"] == 0.0 and failures(found) <= {"wrong", "error"}


def test_all_tests_together_respect_the_time_limit_of_the_call():
    tests = json.dumps({"inputs": [""] * 50, "outputs": [""] * 50})
    start = time.monotonic()
    found = code(block("import time; time.sleep(100)"), tests, timeout_s=3.0, fraction=True)
    assert (found["score"], failures(found)) == (0.0, {"timeout"})
    assert time.monotonic() - start < 6  # 50 tests without the limit take 75 s


def test_tests_that_hang_leave_the_credit_of_the_others():
    tests = json.dumps({"inputs": ["1", "2", "hang", "3"], "outputs": ["1", "2", "hang", "3"]})
    program = "x = input()\nif x == 'hang': import time; time.sleep(600)\nprint(x)"
    assert code(block(program), tests, fraction=True)["score"] == 0.75
    found = code(block(program), tests, timeout_s=4.0, test_s=600.0, fraction=True)
    assert (found["score"], failures(found)) == (0.5, {"timeout"})


@pytest.mark.parametrize("timeout_s", [10.0, 0.5])
def test_no_program_may_take_the_time_to_return_the_result(monkeypatch, timeout_s):
    ends = []

    def run(*_, limits, **__):
        ends.append(limits.end)
        return runner.SandboxOutcome("ok", "7")

    monkeypatch.setattr(runner, "run", run)
    start = time.monotonic()
    assert code(block(SUM), {"inputs": [""] * 2, "outputs": ["7"] * 2}, timeout_s=timeout_s)[
        "score"
    ]
    assert all(start < end < start + timeout_s * 0.95 for end in ends)


def test_a_machine_too_slow_to_start_a_program_is_an_error_only_for_the_first_test(monkeypatch):
    outcomes = iter(["7", None, None])

    def run(*_, **__):
        if (output := next(outcomes)) is None:
            raise runner.NotStarted
        return runner.SandboxOutcome("ok", output)

    monkeypatch.setattr(runner, "run", run)
    tests = {"inputs": ["", ""], "outputs": ["7", "7"]}
    assert failures(code(block(SUM), tests)) == {"timeout"}
    with pytest.raises(runner.NotStarted):
        code(block(SUM), tests)


@pytest.mark.parametrize("truth", ["not JSON", "{}", "[]", "3", '{"inputs": [1], "outputs": []}'])
def test_a_ground_truth_without_tests_is_an_error(truth):
    with pytest.raises(ValueError, match="ground truth of a code task"):
        code(block(SUM), truth)


def test_temporary_files_are_removed(tmp_path, monkeypatch):
    monkeypatch.setattr("tempfile.tempdir", str(tmp_path))
    code(block("open('x', 'w').write('a')\nimport time; time.sleep(100)"), json.dumps(ADD))
    wait_for_removals(limit_s=10.0)
    assert not list(tmp_path.iterdir())
