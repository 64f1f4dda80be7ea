"""Tests of the rewards in jaxrl/rewards/verifiers except code.py and remote.py."""

import functools
import re
import sys
import time
from decimal import Decimal

import hypothesis
import hypothesis.strategies as st
import pytest

from jaxrl.rewards.verifiers.by_source import by_source
from jaxrl.rewards.verifiers.exact import exact
from jaxrl.rewards.verifiers.extraction import last_boxed
from jaxrl.rewards.verifiers.format import format
from jaxrl.rewards.verifiers.gsm8k import gsm8k
from jaxrl.rewards.verifiers.last_number import last_number
from jaxrl.rewards.verifiers.math import math
from jaxrl.rewards.verifiers.numbers import _NUMBER, _plain, _value
from jaxrl.rewards.verifiers.reasoning_gym import extract, reasoning_gym


@pytest.mark.parametrize(
    "text, numbers",
    [
        ("1,234 and 12,345,678.50", ["1234", "12345678.50"]),
        ("it is 12.", ["12"]),
        ("-5 or \N{MINUS SIGN}7", ["-5", "-7"]),
        ("10-3 = 7", ["10", "3", "7"]),
        ("x = -3", ["-3"]),
        ("-$1.50, $.5", ["-1.50", "0.5"]),
        ("a list: 1,2,3", ["1", "2", "3"]),
        ("1,2345", ["1", "2345"]),
        ("none", []),
    ],
)
def test_numbers_in_text(text, numbers):
    assert [_value(match) for match in _NUMBER.finditer(_plain(text))] == [
        Decimal(n) for n in numbers
    ]


@pytest.mark.parametrize(
    "response, truth, score",
    [
        ("What is 1 + 2? It is 3.", "3", 1),
        ("3", "3.0", 1),
        ("The sum is 1,003", "1003", 1),
        ("3 or rather 4", "3", 0),
        ("three", "3", 0),
        ("-3", "3", 0),
        ("12345678901234567891", "12345678901234567890", 0),  # equal as floats
    ],
)
def test_last_number(response, truth, score):
    assert last_number("", response, truth) == score


def test_a_number_is_a_ground_truth_and_a_structure_is_an_error():
    assert last_number("", "so 3.0", 3) == gsm8k("", "#### 3", 3) == exact("", "3", 3) == 1
    assert math("", "\\boxed{0.5}", 0.5) == 1
    for verifier in (last_number, gsm8k, exact, math):
        with pytest.raises(ValueError, match=r"{'target': .* is of type dict.* use a reward for"):
            verifier("", "3", {"target": ["3"]})


def test_last_number_gives_0_for_truncated_responses():
    assert last_number("", "3", "3", {"finish": "stop"}) == 1
    assert last_number("", "3", "3", {"finish": "length"}) == 0
    assert last_number("", "3", "3", {"finish": "length"}, require_stop=False) == 1


def test_a_ground_truth_without_a_number_is_an_error():
    for reward in (last_number, gsm8k):
        with pytest.raises(ValueError, match="'blue' is not one number"):
            reward("", "3", "blue")


@pytest.mark.parametrize(
    "response, strict, flexible",
    [
        ("so #### 72", 1, 1),
        ("so #### 1,072", 0.1, 0.1),
        ("#### 5 no, #### $72", 1, 1),
        ("it is 72.", 0, 1),
        ("#### 72 and 8", 1, 0.1),
        ("#### none", 0, 0),
        ("72" + " word" * 80, 0, 1),  # the number may be far from the end
    ],
)
def test_gsm8k(response, strict, flexible):
    truth = "48 + 24 = <<48+24=72>>72\n#### 72"
    assert gsm8k("", response, truth, format_score=0.1) == strict
    assert gsm8k("", response, "72", method="flexible", format_score=0.1) == flexible


def test_gsm8k_rejects_an_unknown_method():
    with pytest.raises(ValueError, match="use 'strict' or 'flexible'"):
        gsm8k("", "1", "1", method="loose")


def test_exact_compares_the_response_or_what_the_pattern_finds():
    assert exact("", " Paris\n", "paris") == 1
    assert exact("", "Paris", "paris", ignore_case=False) == 0
    tags = "<answer>(.*?)</answer>"
    assert exact("", "<answer>a</answer> <answer> b\n</answer>", "b", pattern=tags) == 1
    assert exact("", "b", "b", pattern=tags) == 0
    assert exact("", "key: 42!", "42", pattern=r"\d+") == 1


@pytest.mark.parametrize(
    "response, score",
    [
        ("<think>a\nb</think>\n<answer>c</answer>\n", 1),
        ("<think>a</think> so <answer>c</answer>", 0),
        ("<answer>c</answer>", 0),
        ("<think>a</think><answer>c", 0),
        ("<think>a</think><answer>b</answer><answer>c</answer>", 0),
        ("<think><think>a</think><answer>c</answer>", 0),
    ],
)
def test_format_requires_think_then_answer_once(response, score):
    assert format("", response, "") == score


def test_format_accepts_another_pattern():
    assert format("", "A: 7", "", pattern=r"A: \d", tags="") == 1
    assert format("", "A: seven", "", pattern=r"A: \d", tags="") == 0


@pytest.mark.parametrize(
    "response, truth, score",
    [
        (r"so \boxed{2}", "2", 1),
        (r"\boxed{\frac{1}{2}}", "0.5", 1),
        (r"\boxed{(3, \pi/2)}", r"\left( 3, \frac{\pi}{2} \right)", 1),
        (r"\boxed{(x+1)^2}", "x^2+2x+1", 1),
        (r"\boxed{[0,1)}", "[0,1)", 1),
        (r"\boxed{[0,1]}", "[0,1)", 0),
        (r"\boxed{\text{Evelyn}}", "Evelyn", 1),
        (r"\boxed{C}", "(C)", 1),
        (r"\boxed{4}, no, \boxed{5}", "5", 1),
        (r"\boxed{5}, no, \boxed{4}", "5", 0),
        (r"\boxed{5} or \boxed{4", "5", 1),  # the last box is incomplete
        (r"<think>\boxed{5}</think> \boxed{4}", "4", 1),
        (r"<think>\boxed{5}</think> I do not know", "5", 0),
        ("The answer is 72.", "72", 1),
        ("The answer is $1{,}234$.", "1234", 1),
        ("no idea", "5", 0),
        ("", "5", 0),
        (r"\boxed{2}", r"\boxed{2}", 1),
    ],
)
def test_math(response, truth, score):
    assert math("", response, truth) == score


def test_math_can_require_the_box():
    assert math("", "it is 5", "5") == 1
    assert math("", "it is 5", "5", boxed_only=True) == 0


def test_math_rejects_an_empty_ground_truth():
    with pytest.raises(ValueError, match="ground truth is empty"):
        math("", "5", " ")


def test_last_boxed_balances_braces():
    assert last_boxed(r"\boxed{a} \boxed{\frac{1}{b}} }") == r"\frac{1}{b}"
    assert last_boxed(r"\boxed{a} \boxed{b") == "a"
    assert last_boxed("none") is None
    assert last_boxed(r"\boxed{a \boxed{b}}") == "b"
    assert last_boxed(r"\boxed{a \boxed{b}") == "b"
    assert last_boxed(r"\boxed{a {b} \fbox{c") is None
    assert last_boxed(r"} \fbox{a}") == "a"


@hypothesis.settings(max_examples=300, deadline=None)
@hypothesis.given(st.lists(st.sampled_from([r"\boxed{", r"\fbox{", "{", "}", "x", "\\"])))
def test_last_boxed_is_the_last_start_whose_brace_is_closed(parts):
    text = "".join(parts)
    expected = None
    for start in re.finditer(r"\\(?:boxed|fbox)\{", text):  # the definition, in quadratic time
        depth = 1
        for place in range(start.end(), len(text)):
            depth += {"{": 1, "}": -1}.get(text[place], 0)
            if depth == 0:
                expected = text[start.end() : place]
                break
    assert last_boxed(text) == expected


@pytest.mark.parametrize(
    "response",
    [
        r"\boxed{" * 4000,
        r"\boxed{" * 150_000,
        r"\boxed{" * 75_000 + "}" * 75_000,
        "{" * 1_000_000,
        r"\frac{" * 200_000,
        "1+" * 500_000,
        r"\boxed{" + "1+" * 500_000 + "1}",
    ],
    ids=["4,000 boxes", "1 MB of boxes", "nested", "braces", "fractions", "sum", "boxed sum"],
)
def test_math_reads_hostile_responses_in_linear_time(response):
    start = time.process_time()
    assert math("", response, "5") == 0
    assert time.process_time() - start < 2  # milliseconds; a quadratic search takes over 10 s


def test_math_looks_at_the_end_of_a_long_response():
    assert math("", r"\boxed{5}" + "x" * 99_000, "5") == 1
    assert math("", r"\boxed{5}" + " or so." * 20_000, "5") == 0
    long = "1+" * 2000 + "1"
    assert math("", rf"\boxed{{{long}}}", long) == 1, "a long answer may be the ground truth"


def test_by_source_selects_the_reward_of_the_dataset():
    reward = functools.partial(by_source, timeout_s=5.0)
    program = "```python\nprint(int(input()) + 1)\n```"
    assert reward("taco", program, '{"inputs": ["1"], "outputs": ["2"]}')["score"] == 1
    assert reward("addition/2", "it is 12", "12", {"finish": "stop"}) == 1
    assert reward("openai/gsm8k", "#### 12", "12") == 1
    assert reward("openai/gsm8k", "it is 12", "12") == 0
    assert reward("HuggingFaceH4/MATH-500", r"\boxed{\frac12}", "0.5") == 1
    with pytest.raises(ValueError, match="no reward for data_source 'poems'"):
        reward("poems", "", "")


@pytest.mark.parametrize(
    "response, truth, answer",
    [
        ("<answer> 7 </answer>", "7", "7"),
        (r"\boxed{7}", "7", "7"),
        ("I get 6 + 1 = 7.", "7", "7"),
        ("First.\nred, green\n", "red, green", "red, green"),
        ("<think>7</think>", "7", ""),
    ],
)
def test_answer_is_extracted_for_reasoning_gym(response, truth, answer):
    assert extract(response, truth) == answer


def test_reasoning_gym_scores_the_extracted_answer(monkeypatch):
    class Gym:
        @staticmethod
        def get_score_answer_fn(name):
            scores = {"7": 1.0, "8": 0.5}
            return lambda answer, entry: scores[answer] * entry["metadata"]["x"]

    monkeypatch.setitem(sys.modules, "reasoning_gym", Gym)
    origin = {"reasoning_gym": {"name": "chain_sum", "entry": {"metadata": {"x": 1}}}}
    assert reasoning_gym("", "it is 7", "7", origin) == 1
    assert reasoning_gym("", "it is 8", "7", origin) == 0
    assert reasoning_gym("", "it is 9", "7", origin) == 0  # the verifier raises KeyError
    assert reasoning_gym("", "it is 8", "7", origin, partial_credit=True) == 0.5
    with pytest.raises(ValueError, match="not from reasoning-gym"):
        reasoning_gym("other", "it is 7", "7", {})
