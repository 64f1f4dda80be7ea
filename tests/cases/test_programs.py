"""Programs that must get the score that the public judges of their tasks' formats give.

The ids name the rows of the table: C1 to C8, and their relatives.
"""

import functools
import json
import sys
import time

import pytest

from jaxrl.rewards.judge.called_function import only_function
from jaxrl.rewards.judge.code_blocks import last_program
from jaxrl.rewards.judge.comparison import same_output, same_value
from jaxrl.rewards.judge.tests import read_tests
from jaxrl.rewards.sandbox import jail
from jaxrl.rewards.verifiers.code import check_truth
from jaxrl.rewards.verifiers.code import code as code_reward

needs_jail = pytest.mark.skipif(
    bool(jail.problem() or jail.weakness()), reason=jail.problem() or jail.weakness()
)
code = functools.partial(code_reward, "", timeout_s=30.0, test_s=10.0)
TOLERANCE = 1e-6


def block(program):
    return f"```python\n{program}\n```\n"


def score(program, truth, **options):
    return code(block(program), json.dumps(truth), **options)["score"]


def prints(expected, given=""):
    return {"inputs": [given], "outputs": [expected]}


def returns(expected, *arguments):
    return {"fn_name": "f", "inputs": [arguments], "outputs": [expected]}


def functional(arguments, output, **metadata):
    case = {"input": arguments, "output": output, "testtype": "functional"}
    return [case | {"metadata": json.dumps(metadata)}] if metadata else [case]


OUTPUTS = {
    "C1 fewer digits": ("0.333333", "0.333333333333", True),
    "C1 relative to large numbers": ("1234567.1", "1234567.9", True),
    "C1 too far": ("0.33333", "0.333333333333", False),
    "C1 absolute near zero": ("0", "0.0000001", True),
    "C2 sums of floats": ("0.30000000000000004", "0.3", True),
    "C2 exponents": ("1e-07 1.5E+16", "0.0000001 15000000000000000.0", True),
    "C2 words around numbers": ("Case #1: 0.3000001", "Case #1: 0.3", True),
    "C4 leading zeros": ("0011", "11", False),
    "C4 a sign": ("+11", "11", False),
    "C4 hexadecimal words": ("0e12", "0e13", False),
    "C4 long integers that floats confuse": ("50000000000000000", "50000000000000001", False),
    "C4 long integers, one with a fraction": ("50000000000000000.0", "50000000000000001", False),
    "C4 an integer with a fraction": ("11.0", "11", True),
    "C4 an integer is not rounded": ("10.9999999999", "11", False),
    "C4 versions": ("1.2.3", "1.2.30", False),
    "C4 no ASCII digits": ("\u0660.\u0665", "0.5", False),
    "C4 infinite": ("1e+999", "1.0e+400", False),
    "C4 separators": ("1_0.5", "10.5", False),
}


@pytest.mark.parametrize("output, expected, same", OUTPUTS.values(), ids=OUTPUTS)
def test_an_output_is_the_expected_one(output, expected, same):
    assert same_output(output, expected, TOLERANCE) is same


def test_the_tolerance_is_an_option():
    assert not same_output("0.333333", "0.333333333333", 1e-9)
    assert same_output("0.33", "0.333333333333", 0.1)
    assert same_output("0.50", "0.5", 0.0)


RESULTS = {
    "C2 in a list": ([0.1 + 0.2, 1.0], [0.3, 1.0], True),
    "C2 in a dict": ({"a": (0.1 + 0.2,)}, {"a": [0.3]}, True),
    "C2 an integer for a float": (1, 1.0, True),
    "C2 a float for an integer": (1.0, 1, True),
    "C2 not rounded to an integer": (0.9999999, 1, False),
    "C4 a bool for a number": (True, 1, False),
    "C4 a number for a bool": (1, True, False),
    "C4 a bool for a float": (True, 1.0, False),
    "C4 a bool in a list": ([True, False], [1, 0], False),
    "C4 text for a number": ("0.3", 0.3, False),
    "C4 text is exact": ("0.30", "0.3", False),
    "tuples": ((1, (2, 3)), [1, [2, 3]], True),
    "another length": ([1], [1, 2], False),
    "keys that JSON makes text": ({1: 2, None: 3}, {"1": 2, "null": 3}, True),
    "another key": ({1: 2}, {"2": 2}, False),
    "a set for a list": ({1}, [1], False),
    "an integer that no float holds": (10**400, 0.5, False),
    "None for an empty list": (None, [], False),
}


@pytest.mark.parametrize("result, expected, same", RESULTS.values(), ids=RESULTS)
def test_a_result_is_the_expected_one(result, expected, same):
    assert same_value(result, expected, TOLERANCE) is same


RUN = {
    "C1": ("print(0.333333)", prints("0.333333333333"), 1),
    "C2": ("def f(n): return [n / 10 + 0.2, 1.0]", returns([0.3, 1.0], 1), 1),
    "C4": ("def f(n): return True", returns(1, 1), 0),
    "C5": (
        "class Solution:\n"
        "    def f(self, nums: List[int], k: Optional[int] = None) -> int:\n"
        "        return Counter(nums).most_common(1)[0][1] + (gcd(4, 6) if inf > 1 else 0)",
        functional("[1, 1, 2]", "4", func_name="f"),
        1,
    ),
    "C5 printed": ("print(math.floor(sqrt(int(input()))))", prints("3", "9"), 1),
    "C5 deep recursion": ("f = lambda n: n and 1 + f(n - 1)\nprint(f(9000))", prints("9000"), 1),
    "C5 a program's own names": ("def gcd(a, b): return 7\nprint(gcd(1, 1))", prints("7"), 1),
    "C5 imports from the future": (
        "from __future__ import annotations\ndef f(x: List[Node]): return x",
        returns(1, 1),
        1,
    ),
    "C5 given names are no answer": (
        "def mul(a, b): return 3",
        functional("1\n2", "3", func_name="add"),
        0,
    ),
    "C5 LeetCode's asserts": (
        "class Solution:\n    def f(self, x: List[int]): return x",
        ["assert Solution().f([1]) == [1]"],
        1,
    ),
    "C5 no imports in MBPP": (
        "def f(x): return floor(x)",
        {"test_list": ["assert f(1.5) == 1"], "test_imports": [], "test_setup_code": ""},
        0,
    ),
    "C6": ("class Solution:\n    def f(self, x): return x + 1", functional("1", "2"), 1),
    "C6 without a class": ("def f(x): return x + 1", functional("1", "2"), 1),
    "C6 no function": ("print(2)", functional("1", "2"), 0),
    "a list of one for a number": ("def f(): return 3", functional("", "[3]", func_name="f"), 0),
    "a list of one for a number, APPS": ("def f(): return 3", returns([3]), 1),
    "verl's calls as text": (
        "def f(a, b): return a + b",
        {"fn_name": "f", "inputs": ["[1]\n[2]"], "outputs": ["[1, 2]"]},
        1,
    ),
    "APPS's keys that are numbers": ("def f(d): return d[1]", returns(2, {"1": 2}), 1),
    "numpy's numbers": ("import numpy\ndef f(x): return numpy.int64(x)", returns(3, 3), 1),
    "NotImplemented is no pass": ("def f(x): return None", ["assert f(3).__eq__(9)"], 0),
    "NotImplemented in all()": ("def f(x): pass", ["assert all([f(3).__eq__(9)])"], 0),
    "NotImplemented in and": ("def f(x): pass", ["assert f(3).__lt__(9) and True"], 0),
    "methods that compare": ("def f(x): return 9", ["assert f(3).__eq__(9)"], 1),
}


@needs_jail
@pytest.mark.parametrize("program, truth, expected", RUN.values(), ids=RUN)
def test_a_program_gets_the_score_of_the_public_judge(program, truth, expected):
    assert score(program, truth) == expected


@needs_jail  # C3
def test_integers_of_any_length_are_printed_and_returned():
    sys.set_int_max_str_digits(0)
    try:
        digits = str(2**20000)
    finally:
        sys.set_int_max_str_digits(4300)
    assert len(digits) == 6021
    assert score("print(2**20000)", prints(digits)) == 1.0
    truth = {"fn_name": "f", "inputs": [[]], "outputs": [2**20000]}
    assert code(block("def f(): return 2**20000"), truth)["score"] == 1.0


@needs_jail
def test_the_name_of_a_function_comes_from_the_row_or_is_refused():
    two = "class Solution:\n    def g(self, x): return x\n    def f(self, x): return x + 1"
    truth = json.dumps(functional("1", "2"))
    for row in ({"metadata": '{"func_name": "f"}'}, {"starter_code": "  def f(self, x):\n    "}):
        assert code(block(two), truth, row)["score"] == 1.0
    with pytest.raises(ValueError, match="name no function and the program has f, g"):
        code(block(two), truth)


FUNCTIONS = {
    "by the number of arguments": ("def f(a, b): pass\ndef g(a): pass", 1, "g"),
    "with defaults": ("def f(a, b=1): pass", 1, "f"),
    "with any number": ("def f(*a): pass\ndef g(): pass", 3, "f"),
    "static methods": ("class Solution:\n  @staticmethod\n  def f(a): pass", 1, "f"),
    "private ones are helpers": ("def _g(a): pass\ndef f(a): pass", 1, "f"),
    "none": ("x = 1", 1, ""),
    "no Python": ("def f(:", 1, ""),
}


@pytest.mark.parametrize("program, n, name", FUNCTIONS.values(), ids=FUNCTIONS)
def test_the_only_function_that_fits(program, n, name):
    assert only_function(program, n) == name


P = "print(int(input()) * 2)"
BLOCKS = {
    "C7 output in a text block": f"```python\n{P}\n```\nOutput:\n```text\n4\n```",
    "C7 output in a bare block": f"```python\n{P}\n```\nOutput:\n```\n4\n```",
    "C7 several outputs": f"```\n{P}\n```\n```\n[1, 2]\n```\n```\nYES\n3 4\n```",
    "C7 a command": f"```python\n{P}\n```\nRun it:\n```bash\npython main.py\n```",
    "C7 JSON": f'```\n{P}\n```\n```json\n{{"a": 1}}\n```',
    "C7 a doctest": f"```python\n{P}\n```\n```python\n>>> f(2)\n4\n```",
    "C7 an example value": f"```python\n{P}\n```\n```python\nresult = 4\n```",
    "C7 the last program": f"```python\nprint(1)\n```\nBetter:\n```\n{P}\n```",
    "C7 another label": f"```solution\n{P}\n```",
    "C8 a list item": f"1. First:\n\n   ```python\n   {P}\n   ```\n",
    "C8 after a list's mark": f"- ```python\n  {P}\n  ```\n",
    "C8 a list item, not indented inside": f"1. First:\n   ```python\n{P}\n   ```\n",
    "C8 tags": f"<answer>```python\n{P}\n```</answer>",
    "C8 one line": f"<answer>```python {P}```</answer>",
    "C8 closed on the last line": f"```python\n{P}```\nIt prints\n```\n4\n```",
    "C8 closed on the last line, tag": f"<answer>\n```python\n{P}```</answer>",
    "C8 tildes": f"~~~python\n{P}\n~~~",
    "C8 four backticks": f"````python\n{P}\n````",
    "C8 attributes": f"```{{.python .numberLines}}\n{P}\n```",
    "C8 capital letters": f"```Python3\n{P}\n```",
    "C8 not closed before the next": f"```python\nprint(1)\n```python\n{P}\n```",
    "C8 carriage returns": f"```python\r\n{P}\r\n```\r\n",
    "an unclosed fence before": f"~~~ so\n```python\n{P}\n```",
    "a fence in a sentence": f"Use ```python``` fences:\n```python\n{P}\n```",
    "the only block is not Python": f"```python\n{P}\n```",
}


@pytest.mark.parametrize("response", BLOCKS.values(), ids=BLOCKS)
def test_the_last_block_that_is_a_program_is_run(response):
    assert (last_program(response) or "").strip() == P


KEPT = {
    "fences in a docstring": 'def f():\n    """\n    ```\n    4\n    ```\n    """\n',
    "fences in a text": 'def f():\n    return """Use ```"""\n',
    "a fence in a comment": "x = f()  # no ```\ny = 1\n",
    "relative indentation": "def f():\n    if 1:\n        return 2\n",
}


@pytest.mark.parametrize("program", KEPT.values(), ids=KEPT)
def test_text_in_a_program_does_not_end_its_block(program):
    assert last_program(f"```python\n{program}```") == program
    indented = "".join(f"   {line}" for line in program.splitlines(keepends=True))
    assert last_program(f"1. So:\n   ```python\n{indented}   ```") == program


def test_no_block_is_no_program_and_one_that_does_not_parse_is():
    assert last_program("def f(): pass") is None
    assert last_program("```python\ncut off") is None
    assert last_program("```\n```") == ""
    assert last_program("```python\ndef f(:\n```\n```\n4\n```") == "def f(:\n"
    body = "    return 1\n"
    assert last_program(f"```python\n{body}```\n```\n4\n```", "def f():\n") == body


@pytest.mark.parametrize(
    "line",
    ["```python\n", "```\n~~~\n", "```python\nx```\n", "-" * 5000 + "```\n", "a" + ".a" * 5000],
)
def test_hostile_responses_are_read(line):
    start = time.process_time()
    last_program("```python\n1\n```\n" + line * (8_000 // len(line)) + "\n```python\n2\n```\n")
    last_program("".join(" " * i + "```py\n" for i in range(200)) + "\n" * 20_000)
    assert time.process_time() - start < 5.0  # quadratic time takes longer by far


REFUSED = {
    "C6 arguments that are no JSON": (functional("1 2", "3", func_name="f"), "input 0 .* JSON"),
    "a result that is no JSON": (functional("1", "three", func_name="f"), "output 0 .* JSON"),
    "another kind of test": ([{"input": "", "output": "", "testtype": "file"}], "'file'"),
    "a test without output": ([{"input": "", "output": ""}, {"input": ""}], "test 1 .* input and"),
    "lengths": ({"inputs": ["1", "2"], "outputs": ["1"]}, "2 inputs and 1 outputs"),
    "arguments without a name": ({"inputs": [{"x": 1}], "outputs": ["1"]}, "fn_name"),
    "no expected output": ({"inputs": ["1"], "outputs": [None]}, "output 0 .* None"),
    "arguments that are no list": (
        {"fn_name": "f", "inputs": [3], "outputs": [3]},
        "input 0 .* list of the arguments",
    ),
    "asserts that assert nothing": (["3", "7"], "'3', asserts nothing"),
    "an assert that is no text": (["assert f()", {"a": 1}], "test 1 .* assert as text"),
    "an assert that is no Python": ({"test_list": ["assert f(1) = 2"]}, "test 0 .* not Python"),
    "setup that is no Python": (
        {"test_list": ["assert f()"], "test_setup_code": "class:"},
        "not Python",
    ),
    "empty outputs": ({"inputs": ["1"], "outputs": ["\n"]}, "all expected outputs .* are empty"),
    "unknown keys": ({"tests": ["1"]}, r"no tests but \['tests'\]"),
    "a number": (3, "no tests but int"),
    "text": ("three", "not JSON"),
    "deep nesting": ("[" * 100_000, "not JSON"),
    "infinite numbers": ('{"fn_name": "f", "inputs": [[]], "outputs": [1e999]}', "not JSON"),
}


@pytest.mark.parametrize("truth, message", REFUSED.values(), ids=REFUSED)
def test_a_truth_that_cannot_be_judged_is_refused(truth, message):
    for given in (truth,) if isinstance(truth, str) else (truth, json.dumps(truth)):
        with pytest.raises(ValueError, match=message):
            check_truth(given)


ACCEPTED = {
    "numbers as lines": {"inputs": [[1, 2]], "outputs": [3]},
    "an import as text": {"test_list": ["assert f()"], "test_imports": "import math"},
    "metadata as an object": [functional("1", "2")[0] | {"metadata": {"func_name": "f"}}],
    "metadata that is no JSON": [functional("1", "2")[0] | {"metadata": "none"}],
    "a line separator in an argument": functional(json.dumps("a\u2028b", ensure_ascii=False), "1"),
    "a check that calls": {"test": "def check(f): f(1)", "entry_point": "f"},
    "the name by another key": {"func_name": "f", "inputs": [[1]], "outputs": [1]},
}


@pytest.mark.parametrize("truth", ACCEPTED.values(), ids=ACCEPTED)
def test_a_truth_that_can_be_judged_is_accepted(truth):
    check_truth(truth)
    check_truth(json.dumps(truth))


def test_numbers_as_lines_are_text():
    _, (test,) = read_tests(ACCEPTED["numbers as lines"])
    assert (test.stdin, test.expected) == ("1\n2", "3")
