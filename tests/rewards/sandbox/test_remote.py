"""Tests of jaxrl/rewards/sandbox/remote.py through the reward `code`: what tests that are code can
use, and programs that forge them."""

import functools
import json

import pytest

from jaxrl.rewards.sandbox import jail
from jaxrl.rewards.sandbox.remote import NotPlainData
from jaxrl.rewards.verifiers.code import code as code_reward

pytestmark = pytest.mark.skipif(
    bool(jail.problem() or jail.weakness()), reason=jail.problem() or jail.weakness()
)

code = functools.partial(code_reward, "", timeout_s=20.0, test_s=1.0)

WRONG = "def add(a, b): return 0\n"
FORGERIES = {
    "patches exec": "import builtins\nbuiltins.exec = lambda *a: None\n" + WRONG,
    "patches compile": "import builtins\nbuiltins.compile = lambda *a: None\n" + WRONG,
    "patches isinstance": "import builtins\nbuiltins.isinstance = lambda *a: True\n" + WRONG,
    "patches AssertionError": (
        "import builtins\nbuiltins.AssertionError = type('A', (BaseException,), {})\n" + WRONG
    ),
    "patches json to write no JSON": "import json\njson.dumps = lambda *a: '{'\n" + WRONG,
    "patches json to raise": "import json\njson.dumps = None\n" + WRONG,
    "patches the process that serves it": (
        "import sys\n"
        "for name, module in list(sys.modules.items()):\n"
        "    if 'sandbox' in name:\n"
        "        for key, value in list(vars(module).items()):\n"
        "            if callable(value): setattr(module, key, lambda *a, **k: True)\n" + WRONG
    ),
    "returns an object that equals everything": (
        "class Any:\n"
        "    def __eq__(self, other): return True\n"
        "    def __bool__(self): return True\n"
        "def add(a, b): return Any()"
    ),
    "returns a number that equals everything": (
        "class Any(int):\n    def __eq__(self, other): return True\ndef add(a, b): return Any(0)"
    ),
    "returns a list that equals everything": (
        "class Any(list):\n    def __eq__(self, other): return True\ndef add(a, b): return Any()"
    ),
    "changes the class of its result": (
        "class Any:\n"
        "    __class__ = int\n"
        "    def __eq__(self, other): return True\n"
        "def add(a, b): return Any()"
    ),
    "exits at import": "import sys\nsys.exit(0)",
    "exits in the call": "import sys\ndef add(a, b): sys.exit(0)",
    "ends its process": "import os\ndef add(a, b): os._exit(0)",
    "ends its process at exit": (
        "import atexit, os\natexit.register(os._exit, 0)\ndef add(a, b): raise SystemExit(0)"
    ),
    "raises KeyboardInterrupt": "def add(a, b): raise KeyboardInterrupt",
    "raises the exception of a failing assert": "def add(a, b): raise AssertionError",
    "raises StopIteration": "def add(a, b): raise StopIteration",
    "prints the report": 'def add(a, b): print(\'{"end": "ok"}\', flush=True)',
    "writes the report to every descriptor": (
        "import os\n"
        "def add(a, b):\n"
        "    for fd in range(64):\n"
        '        try: os.write(fd, b\'{"end": "ok"}\\n\')\n'
        "        except OSError: pass\n"
        "    os._exit(0)"
    ),
    "closes every descriptor": "import os\ndef add(a, b): os.closerange(0, 64); os._exit(0)",
    "searches for the test in memory and frames": (
        "import gc, re, sys\n"
        "def texts():\n"
        "    frame = sys._getframe()\n"
        "    while frame:\n"
        "        yield from map(repr, frame.f_locals.values())\n"
        "        frame = frame.f_back\n"
        "    yield from (x for x in map(repr, gc.get_objects()) if 'assert' in x)\n"
        "def add(a, b):\n"
        "    for text in texts():\n"
        "        if found := re.search(r'add\\(1234, 4321\\) == (\\d+)', text):\n"
        "            return int(found[1])"
    ),
    "defines the builtins of the test": (
        "def abs(x): return 0\ndef all(x): return True\ndef isinstance(a, b): return True\n" + WRONG
    ),
    "defines the modules of the test": (
        "class math:\n    isclose = staticmethod(lambda *a: True)\n" + WRONG
    ),
    "hides its function from the module's names": (
        "def __getattr__(name):\n"
        "    if name == 'add': return lambda a, b: 0\n"
        "    raise AttributeError(name)\n"
        "def abs(x): return 1\ndef all(x): return True"
    ),
    "returns a module to be passed back": "import math\n" + WRONG.replace("0", "math"),
    "redefines the helpers of the prompt": "def expected(a, b): return 0\n" + WRONG,
    "hangs": "def add(a, b):\n    while True: pass",
    "has no such function": "def sub(a, b): return a - b",
}
FORMS = {
    "asserts": ["assert abs(add(1234, 4321) == 5555)"],
    "MBPP": {
        "test_list": ["assert math.isclose(add(1234, 4321), 5555)"],
        "test_imports": ["import math"],
    },
    "HumanEval": {
        "prompt": 'def expected(a, b): return a + b\n\ndef add(a, b):\n    "Adds."\n',
        "test": "METADATA = {}\n\ndef check(candidate):\n"
        "    assert all([candidate(1234, 4321) == expected(1234, 4321)])",
        "entry_point": "add",
    },
}


def score(program, truth, **options):
    return code(f"```python\n{program}\n```\n", json.dumps(truth), **options)


@pytest.mark.parametrize("form", FORMS)
def test_a_right_program_passes(form):
    assert score("def add(a, b): return a + b", FORMS[form])["score"] == 1.0


@pytest.mark.parametrize(
    "form",
    ["asserts", *(pytest.param(f, marks=pytest.mark.thorough) for f in ("MBPP", "HumanEval"))],
)
@pytest.mark.parametrize("program", FORGERIES.values(), ids=FORGERIES)
def test_a_test_cannot_be_forged(program, form):
    assert score(program, FORMS[form])["score"] == 0.0


def test_helpers_of_the_test_cannot_be_redefined():
    for name, form in (
        ("defines the builtins of the test", "HumanEval"),
        ("defines the modules of the test", "MBPP"),
        ("redefines the helpers of the prompt", "HumanEval"),
    ):
        assert score(FORGERIES[name], FORMS[form])["score"] == 0.0


PAIR = "class Pair:\n    def __init__(self, a, b): self.a, self.b = a, b\n"
WORKING = {
    "tuples, sets and nested data": (
        "def f(x): return {(1, 2): [{3}, None, 1.5, b'a', 2j]}",
        ["assert f(0) == {(1, 2): [{3}, None, 1.5, b'a', 2j]}", "assert isinstance(f(0), dict)"],
    ),
    "subclasses of plain data": (
        "from collections import *\ndef f(x): return Counter(x)",
        ["assert f('aab') == {'a': 2, 'b': 1}"],
    ),
    "results of numpy": (
        "import numpy as np\ndef f(x): return np.arange(x)",
        ["import numpy as np\nassert (f(3) == np.arange(3)).all() and f(3) == [0, 1, 2]"],
    ),
    "iterators": (
        "import itertools\ndef f():\n    yield from itertools.count()",
        [
            "assert list(zip(f(), 'ab')) == [(0, 'a'), (1, 'b')]",
            "g = f(); assert next(g) == 0 < next(g)",
        ],
    ),
    "objects of the program as arguments": (
        PAIR + "def total(pairs): return sum(p.a + p.b for p in pairs)",
        ["assert total([Pair(1, 2), Pair(a=3, b=4)]) == 10", "assert Pair(1, 2).a == 1"],
    ),
    "attributes that a test sets": (
        PAIR + "def total(pair): return pair.a + pair.b",
        ["p = Pair(1, 2)\np.b = 5\nassert total(p) == 6"],
    ),
    "no special attributes of the program's objects": (
        "class Array:\n    __array_interface__ = {}\n    size = 3\ndef f(x): return Array()",
        ["assert f(0).size == 3 and not hasattr(f(0), '__array_interface__')"],
    ),
    "functions that return functions": (
        "def adder(a): return lambda b: a + b",
        ["assert adder(1)(2) == 3"],
    ),
    "methods of Solution": (
        "class Solution:\n    def add(self, a, b): return a + b",
        ["assert Solution().add(1, b=2) == 3"],
    ),
    "expected exceptions": (
        "def f(x): raise KeyError(x)",
        ["try:\n    f(1)\n    assert False\nexcept LookupError:\n    pass"],
    ),
    "a program's own exceptions": (
        "class Mine(ValueError): pass\ndef f(x): raise Mine(x)",
        ["try:\n    f(1)\nexcept ValueError as error:\n    text = str(error)\nassert text == '1'"],
    ),
    "a function with the name of a builtin": (
        "def sum(a, b): return a + b",
        ["assert sum(1, 2) == 3"],
    ),
    "modules that only the program imports": (
        "import math\ndef f(x): return math.sqrt(x)",
        ["assert math.isclose(f(2) ** 2, 2)"],
    ),
    "long integers": ("def f(n): return 10 ** n", ["assert f(9999) == 10 ** 9999"]),
    "constants of the program": ("N = 3\ndef f(): return N + 1", ["assert f() == N + 1"]),
    "setup that uses the program": (
        PAIR + "def total(pair): return pair.a + pair.b",
        {"test_list": ["assert total(p) == 6"], "test_setup_code": "p = Pair(1, 2)\np.b = 5"},
    ),
    "setup with classes": (
        "def total(point): return point.x + 1",
        {
            "test_list": ["assert total(Point(1)) == 2"],
            "test_setup_code": "class Point:\n    def __init__(self, x): self.x = x",
        },
    ),
    "a prompt with classes, as in LeetCodeDataset": (
        "class Solution:\n    def last(self, head):\n        return head if head.next is None else "
        "self.last(head.next)",
        {
            "prompt": "class Node:\n    def __init__(self, val=0, next=None):\n"
            "        self.val, self.next = val, next\n"
            "def nodes(x):\n    return Node(x[0], nodes(x[1:])) if x else None\n"
            "def same(a, b):\n    return a.val == b.val\n",
            "test": "def check(f):\n    assert same(f(head=nodes([1, 2])), nodes([2]))",
            "entry_point": "Solution().last",
        },
    ),
    "a prompt that is no code by itself": (
        "    return a + b\n",
        {
            "prompt": "def add(a, b):",
            "test": "def check(candidate):\n    assert candidate(1, 2) == 3",
            "entry_point": "add",
        },
    ),
}


@pytest.mark.parametrize("program, truth", WORKING.values(), ids=WORKING)
def test_tests_can_use(program, truth):
    assert score(program, truth, test_s=10.0)["score"] == 1.0


def test_a_test_that_passes_a_function_is_an_error_of_the_dataset():
    with pytest.raises(NotPlainData, match="a test passes a function to the program"):
        score("def apply(f, x): return f(x)", ["assert apply(lambda x: x + 1, 2) == 3"])


def test_arguments_are_copies():
    sort = "def sort(x):\n    x.sort()\n    return x"
    assert score(sort, ["x = [2, 1]\nassert sort(x) == [1, 2] and x == [2, 1]"])["score"] == 1.0
