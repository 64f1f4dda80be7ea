import functools
import json
import os
import subprocess
import sys
import time

import pytest

from jaxrl.rewards.sandbox import jail
from jaxrl.rewards.sandbox.runner import Limits, run
from jaxrl.rewards.verifiers.code import code as code_reward
from jaxrl.rewards.verifiers.code import last_block, same_output

code = functools.partial(code_reward, "", timeout_s=20.0, test_s=0.5)
ADD = {"inputs": ["1 2\n", "3 4\n"], "outputs": ["3\n", "7\n"]}
SUM = "print(sum(map(int, input().split())))"


def block(program):
    return f"Here it is:\n```python\n{program}\n```\n"


def mistakes(found):
    return {name for name, value in found.items() if name != "score" and value}


CASES = {
    "APPS": ADD | {"difficulty": "introductory"},
    "lines": {"inputs": [["1 2"]], "outputs": [["3"]]},
    "LiveCodeBench": [{"input": "1 2\n", "output": "3", "testtype": "stdin"}],
}


@pytest.mark.parametrize("tests", CASES.values(), ids=CASES)
def test_programs_that_read_and_print(tests):
    right = code(block(SUM), json.dumps(tests))
    assert (right["score"], mistakes(right)) == (1.0, set())
    wrong = code(block("print(input())"), json.dumps(tests))
    assert (wrong["score"], mistakes(wrong)) == (0.0, {"wrong"})


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
def test_functions_that_are_called(tests):
    assert code(block("def add(a, b):\n    return a + b"), json.dumps(tests))["score"] == 1.0
    assert code(block("def add(a, b):\n    return a - b"), json.dumps(tests))["score"] == 0.0
    assert mistakes(code(block("def mul(a, b): pass"), json.dumps(tests))) == {"error"}


def test_a_method_of_solution_is_called_where_there_is_one():
    tests = json.dumps({"fn_name": "add", "inputs": [[1, 2]], "outputs": [3]})
    program = "class Solution:\n    def add(self, a, b):\n        return a + b"
    assert code(block(program), tests)["score"] == 1.0


def test_fraction_counts_every_test_and_all_stops_at_the_first_failure():
    tests = json.dumps({"inputs": ["1", "2", "3", "4"], "outputs": ["1", "0", "3", "0"]})
    echo = block("print(input())")
    assert code(echo, tests, fraction=True)["score"] == 0.5
    assert code(echo, tests)["score"] == 0.0
    assert code(echo, tests, max_tests=1)["score"] == 1.0


def test_the_last_block_after_the_thoughts_is_the_program():
    assert last_block("```python\na\n```\n</think>x\n```py\nb\n```\ny\n```\nc\n```") == "c\n"
    assert last_block("```python\na\n```\n</think>no block") is None
    assert last_block("```python\ncut off") is None
    assert mistakes(code("def add(a, b): return a + b", json.dumps(ADD))) == {"no_code"}


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
    assert same_output(output, expected) == same


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
        "import signal, time\nfor s in (1, 2, 15): signal.signal(s, signal.SIG_IGN)\ntime.sleep(100)",
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


@pytest.mark.parametrize("program, mistake", HOSTILE.values(), ids=HOSTILE)
def test_what_a_program_does_is_a_mistake_of_its_own_kind(program, mistake):
    start = time.monotonic()
    found = code(block(program), json.dumps(ADD))
    assert (found["score"], mistakes(found)) == (0.0, {mistake})
    assert time.monotonic() - start < 6


CHEATS = {
    "leaves with status 0": "import os, sys\ndef add(a, b): os._exit(0)",
    "leaves before the test": "import sys; sys.exit(0)",
    "returns what equals everything": (
        "class Any:\n    def __eq__(self, other): return True\ndef add(a, b): return Any()"
    ),
    "returns what is no JSON": "def add(a, b): return {1, 2, 3}",
    "prints the result": "def add(a, b): print(3); import os; os._exit(0)",
}


@pytest.mark.parametrize("program", CHEATS.values(), ids=CHEATS)
def test_a_call_counts_only_if_it_returns_the_value(program):
    tests = json.dumps({"fn_name": "add", "inputs": [[1, 2]], "outputs": [3]})
    assert code(block(program), tests)["score"] == 0.0


def test_all_tests_together_keep_to_the_time_of_the_call():
    tests = json.dumps({"inputs": [""] * 50, "outputs": [""] * 50})
    start = time.monotonic()
    found = code(block("import time; time.sleep(100)"), tests, timeout_s=3.0, fraction=True)
    assert (found["score"], mistakes(found)) == (0.0, {"timeout"})
    assert time.monotonic() - start < 6  # 50 tests by themselves would take 100 s


@pytest.mark.parametrize("truth", ["not JSON", "{}", "[]", "3", '{"inputs": [1], "outputs": []}'])
def test_a_ground_truth_without_tests_is_refused(truth):
    with pytest.raises(ValueError, match="ground truth of a code task"):
        code(block(SUM), truth)


TRY = """
import os
def fails(action):
    try:
        action()
    except (OSError, ValueError):
        return True
"""


def says(program):
    """Whether the program, shut in, prints True at its end."""
    outcome = run(TRY + program, limits=Limits(wall_s=3.0))
    assert outcome.end == "ok"
    return outcome.output.split()[-1] == "True"


def test_nothing_can_be_reached_over_the_network():
    import socket

    with socket.create_server(("127.0.0.1", 0)) as server:
        address = server.getsockname()
        connect = f"import socket; print(fails(lambda: socket.create_connection({address!r})))"
        assert says(connect)
        env = os.environ | {"PYTHONPATH": ""}
        free = subprocess.run(
            [sys.executable, "-c", TRY + connect], env=env, capture_output=True, text=True
        )
        assert free.stdout.strip() == "None"  # outside the sandbox the very same program connects
    assert says("import socket; print(fails(lambda: socket.socket(socket.AF_UNIX)))")


def test_other_processes_are_out_of_reach():
    assert says("print(fails(lambda: os.kill(os.getppid(), 0)))")
    assert says("import resource; print(fails(lambda: resource.prlimit(os.getppid(), 0)))")
    assert says("print(fails(os.setsid))")
    assert says("print(fails(lambda: os.execv('/bin/true', ['true'])))")


def test_limits_cannot_be_raised():
    raise_limit = "resource.setrlimit(resource.RLIMIT_AS, (1 << 40, 1 << 40))"
    assert says(f"import resource; print(fails(lambda: {raise_limit}))")


def test_secrets_of_the_environment_are_not_inherited(monkeypatch):
    monkeypatch.setenv("API_KEY", "hunter2")
    outcome = run("import os; print(dict(os.environ))", limits=Limits())
    assert outcome.end == "ok" and "hunter2" not in outcome.output


@pytest.mark.skipif(jail.landlock_version() <= 0, reason="this kernel has no Landlock")
def test_files_outside_are_out_of_reach(tmp_path):
    (tmp_path / "secret").write_text("hunter2")
    assert says(f"print(fails(lambda: open({str(tmp_path / 'secret')!r}).read()))")
    assert says(f"print(fails(lambda: open({str(tmp_path / 'new')!r}, 'w')))")
    assert says("print(fails(lambda: open(f'/proc/{os.getppid()}/environ').read()))")
    assert not (tmp_path / "new").exists()


def test_an_honest_program_has_files_threads_and_numpy():
    program = """
import threading, numpy
open("own", "w").write("a"); text = open("own").read()
found = []
thread = threading.Thread(target=lambda: found.append(1)); thread.start(); thread.join()
print(text == "a" and found == [1] and int((numpy.ones((8, 8)) @ numpy.ones((8, 8))).sum()) == 512)
"""
    assert says(program)


def test_nothing_is_left_behind(tmp_path, monkeypatch):
    monkeypatch.setattr("tempfile.tempdir", str(tmp_path))
    code(block("open('x', 'w').write('a')\nimport time; time.sleep(100)"), json.dumps(ADD))
    assert not list(tmp_path.iterdir())
