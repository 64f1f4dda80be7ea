"""How the built-in rewards read ground truths and answers, and the check of truths at the start."""

import json
import pathlib
import time
from decimal import Decimal

import numpy as np
import pytest

from jaxrl.config.keys import RewardConfig, RunConfig
from jaxrl.data.items import ItemMaker
from jaxrl.data.sources.rows import Dropped, SourceRow
from jaxrl.environments.builtin.calculator import Calculator
from jaxrl.environments.worker import checked_step
from jaxrl.http.errors import RequestError
from jaxrl.rewards.calls import check_score
from jaxrl.rewards.pool import RewardPool
from jaxrl.rewards.truths import answers, check_truth
from jaxrl.rewards.verifiers.answer_text import number_in_words, undecorated
from jaxrl.rewards.verifiers.exact import exact
from jaxrl.rewards.verifiers.extraction import last_tagged
from jaxrl.rewards.verifiers.format import format
from jaxrl.rewards.verifiers.ground_truth import as_text, read_expression, read_number
from jaxrl.rewards.verifiers.gsm8k import gsm8k
from jaxrl.rewards.verifiers.last_number import last_number
from jaxrl.rewards.verifiers.math import math
from jaxrl.rewards.verifiers.numbers import _NUMBER, _plain, _value, last_number_of, same_number
from jaxrl.rewards.verifiers.reasoning_gym import extract
from jaxrl.rewards.verifiers.remote import read_scores
from jaxrl.rollout.agents.chat import parse_reward
from jaxrl.tracking.progress import Progress
from jaxrl.trainer.setup.truths import report_truths, with_checked_truths
from jaxrl.types import Prompt, Rollout

DATA = pathlib.Path(__file__).parents[3] / "shared" / "data"
SOLUTION = "48 / 2 = <<48/2=24>>24\n48 + 24 = <<48+24=72>>72\n#### 72"


@pytest.mark.parametrize(
    "truth, response, score",
    [
        pytest.param("73", "<think>70+3</think> <answer>73</answer>", 1, id="B1"),
        pytest.param("73", r"<answer>\boxed{73}</answer>", 1, id="B1 box in tags"),
        pytest.param("73", "<answer>The answer is $73$.</answer>", 1, id="B1 sentence in tags"),
        pytest.param("73", r"\boxed{73} <answer>72</answer>", 0, id="B1 tags before boxes"),
        pytest.param("73", r"I use <answer></answer>. \boxed{73}", 1, id="B1 empty tags"),
        pytest.param("73", "<answer>73</answer> <answer>7</answer>", 0, id="B1 the last tags"),
        pytest.param("x^2+1", "<answer>Hence $1+x^2$.</answer>", 1, id="B1 expression"),
        pytest.param(1e-05, "5", 0, id="B2 exponent"),
        pytest.param(1e-05, "0.00001", 1, id="B2"),
        pytest.param(1e-05, r"\boxed{10^{-5}}", 1, id="B2 power"),
        pytest.param("1e-05", r"\boxed{1 \times 10^{-5}}", 1, id="B2 text"),
        pytest.param(1.5e16, "16", 0, id="B3 exponent"),
        pytest.param(1.5e16, "15000000000000000", 1, id="B3"),
        pytest.param(1.5e16, r"\boxed{15000000000000001}", 0, id="B3 integers are exact"),
        pytest.param("100000", "1e5", 1, id="B6"),
        pytest.param("100000", r"\boxed{1e5}", 1, id="B6 boxed"),
        pytest.param("0.005", r"\boxed{5e-3}", 1, id="B6 fraction"),
        pytest.param("0.0000004", r"\boxed{0}", 0, id="B7"),
        pytest.param("0.0000004", r"\boxed{\sin(0)}", 0, id="B7 expression"),
        pytest.param("0.0000004", r"\boxed{\frac{1}{2500000}}", 1, id="B7 right"),
        pytest.param(SOLUTION, r"\boxed{72}", 1, id="B8"),
        pytest.param(SOLUTION, r"\boxed{24}", 0, id="B8 wrong"),
        pytest.param("so it is\n#### $1,234.50", r"\boxed{1234.5}", 1, id="B8 money"),
        pytest.param("The answer is 7", r"\boxed{7}", 1, id="B9 sentence"),
        pytest.param("12.", r"\boxed{12}", 1, id="B9 full stop"),
        pytest.param("$12.$", r"\boxed{12}", 1, id="B9 delimiters"),
        pytest.param("12 dollars", r"\boxed{12}", 1, id="B9 dollars"),
        pytest.param("12 people", r"\boxed{12}", 1, id="B9 people"),
        pytest.param("12 people", r"\boxed{13}", 0, id="B9 wrong"),
        pytest.param("1/2 cup", r"\boxed{\frac{1}{2}}", 1, id="B9 fraction"),
        pytest.param("(A) 12", r"\boxed{12}", 1, id="B9 choice"),
        pytest.param(r"\approx 3.14", r"\boxed{3.14}", 1, id="B9 approx"),
        pytest.param("1 1/2 cups", r"\boxed{1.5}", 1, id="B9 mixed number"),
        pytest.param("5 million", r"\boxed{5000000}", 1, id="B9 scale"),
        pytest.param("12", r"\boxed{12.}", 1, id="B10 full stop"),
        pytest.param("12", r"\boxed{12~}", 1, id="B10 tie"),
        pytest.param("12", r"\boxed{\color{red}{12}}", 1, id="B10 color"),
        pytest.param("12", r"\boxed{\underline{12}}", 1, id="B10 underline"),
        pytest.param("12", r"\boxed{12 people}", 1, id="B10 unit"),
        pytest.param("12", r"\boxed{12!}", 0, id="B10 factorial"),
        pytest.param("12", r"\boxed{\textcolor{red}{\frac{24}{2}}}", 1, id="B10 fraction"),
        pytest.param("0.333333", r"\boxed{\frac13}", 1, id="six digits of a fraction"),
        pytest.param("2x", r"\boxed{2}", 0, id="a variable is no unit"),
        pytest.param("(1,234)", r"\boxed{1234}", 0, id="a point is no number"),
    ],
)
def test_math(truth, response, score):
    assert math("", response, truth) == score


@pytest.mark.parametrize(
    "truth, response, score",
    [
        pytest.param("42", "#### 42" + " and so on" * 35, 1, id="B11"),
        pytest.param("42", "#### 42" + " and so on" * 50_000, 1, id="B11 long"),
        pytest.param("7", "#### +7", 1, id="B12 plus"),
        pytest.param("7", r"#### \boxed{7}", 1, id="B12 box"),
        pytest.param("7", "#### **7**", 1, id="B12 bold"),
        pytest.param("-7", r"#### $\boxed{-7}$", 1, id="B12 minus"),
        pytest.param("7", "#### x7", 0, id="B12 a variable"),
        pytest.param("100000", "#### 1e5", 1, id="B6"),
        pytest.param("0.0000004", "#### 0", 0, id="B7"),
        pytest.param(1e-05, "#### 5", 0, id="B2"),
        pytest.param("12 dollars", "#### 12", 1, id="B9"),
        pytest.param(SOLUTION, SOLUTION, 1, id="the solution"),
    ],
)
def test_gsm8k(truth, response, score):
    assert gsm8k("", response, truth) == score


@pytest.mark.parametrize(
    "truth, response, score",
    [
        pytest.param(1e-05, "5", 0, id="B2 exponent"),
        pytest.param(1e-05, "it is 10^{-5}", 1, id="B2 power"),
        pytest.param(1.5e16, "16", 0, id="B3 exponent"),
        pytest.param(1.5e16, "15000000000000000", 1, id="B3"),
        pytest.param("3/4", "3/4", 1, id="B5 fraction"),
        pytest.param("3/4", "0.75", 1, id="B5 decimal"),
        pytest.param("4", "3/4", 0, id="B5 the denominator"),
        pytest.param("100000", "1e5", 1, id="B6"),
        pytest.param("0.005", "5e-3", 1, id="B6 fraction"),
        pytest.param("0.0000004", "0", 0, id="B7"),
        pytest.param("0.0000004", "4e-7", 1, id="B7 right"),
        pytest.param("1234", r"1{,}234", 1, id="thousands of LaTeX"),
        # a column of float32 has 73.2 as 73.19999694824219
        pytest.param(float(np.float32(73.2)), "73.2", 1, id="float32"),
        pytest.param("123456.78", "123456.80", 0, id="cents"),
        pytest.param(SOLUTION, "72", 1, id="a solution"),
        pytest.param("12 m", "12", 1, id="a unit"),
    ],
)
def test_last_number(truth, response, score):
    assert last_number("", response, truth) == score


@pytest.mark.parametrize(
    "truth, response, score",
    [
        pytest.param(42.0, "42", 1, id="B4"),
        pytest.param(42, "42.0", 1, id="B4 an integer"),
        pytest.param(1e-05, "0.00001", 1, id="B4 exponent"),
        pytest.param(42.0, "43", 0, id="B4 wrong"),
        pytest.param(42.0, "42 or 43", 0, id="B4 two numbers"),
        pytest.param("007", "7", 0, id="text is compared as text"),
        pytest.param(True, "1", 0, id="a truth value is no number"),
    ],
)
def test_exact(truth, response, score):
    assert exact("", response, truth) == score


@pytest.mark.parametrize(
    "truth",
    ["2024-05-01", "(1, 2)", "5 to 7", "x^2", "2x", "blue", "12 + 3", "3 cats, 2 dogs", "12!"],
)
def test_b5_a_truth_that_is_not_one_number_is_refused(truth):
    for spec in ("last_number", "gsm8k", "gsm8k?method=flexible"):
        with pytest.raises(ValueError, match="is not one number; give the number alone"):
            check_truth(spec, prompt(truth))


@pytest.mark.parametrize("truth", ["", "  ", float("nan"), None, {"target": ["3"]}, "$$", ["3"]])
def test_a_truth_without_an_answer_is_refused(truth):
    for spec in ("math", "last_number", "gsm8k"):
        with pytest.raises(ValueError, match="the ground truth"):
            check_truth(spec, prompt(truth))


def test_a_sentence_is_no_truth_of_math_and_text_is():
    with pytest.raises(ValueError, match="no answer alone; give the number or the expression, put"):
        read_expression("She sells 16 eggs and eats 3 of them, so 13 remain")
    for truth in ("Evelyn", "east of the house", r"\frac{1}{2}", "x=5", r"\text{(A)}", "5 to 7"):
        assert read_expression(truth) == undecorated(truth)


def test_the_check_follows_the_source_of_the_row_for_by_source():
    check_truth("by_source", prompt("blue", "math"))
    with pytest.raises(ValueError, match="is not one number"):
        check_truth("by_source", prompt("blue", "openai/gsm8k"))
    with pytest.raises(ValueError, match="no reward for data_source 'poems'"):
        check_truth("by_source", prompt("blue", "poems"))


def test_a_code_truth_without_tests_is_refused():
    check_truth("code", prompt('{"inputs": ["1"], "outputs": ["2"]}'))
    for truth in ("print(1)", "{}", "[]"):
        with pytest.raises(ValueError, match="the ground truth of a code task"):
            check_truth("code", prompt(truth))


@pytest.mark.parametrize("spec", ["environment", "format", "my_reward.py:score", "remote?url=x"])
def test_rewards_without_a_known_truth_accept_all(spec):
    check_truth(spec, prompt(""))
    assert answers(spec, prompt("")) == []


def test_bad_truths_end_the_run_with_the_rows_of_the_file():
    maker = with_checked_truths(plain_maker(), ("format", "last_number"))
    assert [p.answer for p in maker.make(rows("1", "2"), Dropped())] == ["1", "2"]
    with pytest.raises(ValueError) as error:
        maker.make(rows("1", "blue", "3", "x^2", "", "4", "5 to 7"), Dropped())
    text = str(error.value)
    assert "with the reward last_number, which takes a number" in text
    assert "data.jsonl:2: the ground truth 'blue' is not one number" in text
    assert "data.jsonl:4" in text and "data.jsonl:5" in text and "(and 1 more rows)" in text
    assert text.endswith("or set another reward in reward.functions")


def test_rows_that_are_too_long_are_not_checked():
    maker = plain_maker(dropped=("blue",))
    assert len(with_checked_truths(maker, ("last_number",)).make(rows("1", "blue"), Dropped())) == 1


def test_a_sample_of_truths_is_scored_as_the_answer(caplog):
    functions = ("gsm8k", "exact?pattern=<answer>(.*?)</answer>", r"exact?pattern=\d+")
    cfg = RunConfig(reward=RewardConfig(functions=functions, workers=1))
    truths = [prompt(truth, id=i) for i, truth in enumerate(["7", SOLUTION, "8 cups"])]
    with RewardPool(cfg.reward) as pool:
        progress = Recorded()
        report_truths(cfg, pool, truths, progress)
    shown = "\n".join(progress.lines)
    assert "ground truths of gsm8k: a number, alone, with words and units, or after ####" in shown
    assert shown.count("3 of 3 score 1 as the answer") == 2
    assert "1 of 3 score 1 as the answer" in shown
    [warning] = caplog.messages  # the pattern finds 7 only
    assert "gives less than 1 to 2 of 3 ground truths" in warning
    assert "'8 cups' (row 3): 0" in warning


@pytest.mark.parametrize(
    "a, b, same",
    [
        ("51.0", "51", True),
        ("0.3333333", "0.333333", True),
        ("12345678901234567891", "12345678901234567890", False),
        ("1e999999999", "1", False),
        ("0", "4e-7", False),
        ("4.00001e-7", "4e-7", True),
        ("100000003.5", "100000000", False),
    ],
)
def test_numbers_are_equal_within_a_relative_tolerance(a, b, same):
    assert same_number(Decimal(a), Decimal(b)) is same


def test_floats_are_written_without_exponents():
    floats = [42.0, -0.5, 1e-05, 1.5e16, 1e22]
    assert [as_text(x) for x in floats] == [
        "42",
        "-0.5",
        "0.00001",
        "15000000000000000",
        f"1{'0' * 22}",
    ]


HOSTILE = {
    "answer tags": "<answer>" * 30_000,
    "calc tags": "<calc>" * 40_000,
    "think tags": "<think>" * 35_000,
    "closing tags": "</answer>" * 30_000,
    "digits": "7" * 250_000,
    "thousands": ",777" * 60_000,
    "slashes": "7/" * 120_000,
    "exponents": "7e" * 120_000,
    "marks": "#### " * 50_000,
    "marks and signs": "####$$$$" * 30_000,
    "blanks": "<answer>" + " " * 250_000,
}


@pytest.mark.parametrize("name", HOSTILE)
def test_hostile_responses_are_read_in_linear_time(name):
    response = HOSTILE[name]
    start = time.process_time()
    calculator = Calculator()
    calculator.answer = "5"
    calculator.step(response)
    exact("", response, "x", pattern="<answer>(.*?)</answer>")
    format("", response, "")
    extract(response, "x")
    gsm8k("", response, "5")
    last_number("", response, "5")
    assert time.process_time() - start < 4  # under 0.5 s; a quadratic search takes far longer


@pytest.mark.parametrize(
    "text", ["*" * 2000, "a'" * 1000 + "^", "\\(" * 1000, "{" * 1000 + "}" * 1000]
)
def test_hostile_answers_are_cleaned_in_linear_time(text):
    start = time.process_time()
    undecorated(text)
    number_in_words("1 " + text)
    assert time.process_time() - start < 1  # a millisecond; exponential without possessive groups


def test_the_last_complete_tags_count():
    assert last_tagged("<answer>a</answer> <answer>b</answer> <answer>c") == "b"
    assert last_tagged("<answer>a</answer> </answer>") == "a"
    assert last_tagged("a</answer>") is None and last_tagged("<answer>a") is None


def test_numbers_in_several_notations():
    text = r"2 \times 10^{3}, 3 x 10^4, -\frac{3}{4}, 2\frac12, 05/01/24, 5 thousand"
    found = ["2000", "30000", "-0.75", "2.5", "5", "1", "24", "5000"]
    assert [_value(match) for match in _NUMBER.finditer(_plain(text))] == [
        Decimal(number) for number in found
    ]
    assert last_number_of("none") is None
    assert read_number("1e999999999") == Decimal("1e999999999")


@pytest.mark.parametrize("score", [1e39, -1e39, float("inf"), float("nan")])
def test_a_score_beyond_float32_is_an_error(score):
    with pytest.raises(ValueError, match=r"finite number|beyond the range of float32"):
        check_score(score, "the function")
    with pytest.raises(ValueError, match=r"step .*(finite number|beyond the range of float32)"):
        checked_step(("", score, False))
    check_score(3e38, "the function")


def test_scores_beyond_float32_are_errors_of_their_responses(tmp_path):
    path = tmp_path / "large.py"
    path.write_text(
        "def large(data_source, solution_str, ground_truth, extra_info=None):\n"
        "    return {'big': 1e39, 'int': 10 ** 400}.get(solution_str, 3e38)\n"
    )
    cfg = RewardConfig(functions=(f"{path}:large", f"{path}:large?timeout_s=9"), workers=1)
    with RewardPool(cfg) as pool:
        big, integer, total = pool.score([rollout(text) for text in ("big", "int", "sum")])
    assert "1e+39 is beyond the range of float32" in big.error and big.value == 0
    assert "return a finite number" in integer.error
    assert "the sum 6e+38 of the rewards is beyond" in total.error


@pytest.mark.parametrize("number", ["1e999", "-1e999", "NaN", "1e39", "9" * 400])
def test_a_servers_number_out_of_range_is_an_error_of_its_response(number):
    body = f'{{"rewards": [1.0, {number}], "extra_logs": {{"length": [3, 4]}}}}'.encode()
    fine, wrong = read_scores(body, 2, "http://server")
    assert fine["score"] == 1.0
    with pytest.raises((ValueError, OverflowError)):
        check_score(float(wrong["score"]), "the function")


@pytest.mark.parametrize(
    "body, message",
    [
        (b'{"rewards": [' + b"9" * 5000 + b"]}", "not JSON"),
        (b'{"rewards": ' + b"[" * 3000, "nested more than 64 deep"),
        (b'{"rewards": [1], "extra_logs": [1]}', "extra_logs of type list"),
    ],
)
def test_a_servers_malformed_answer_is_named(body, message):
    with pytest.raises(ValueError, match=message):
        read_scores(body, 1, "http://server")


@pytest.mark.parametrize("number", ["1e999", "1e39", "9" * 400])
def test_an_agents_reward_out_of_range_is_a_bad_request(number):
    with pytest.raises(RequestError):
        parse_reward(f'{{"reward": {number}}}'.encode())
    assert parse_reward(b'{"reward": 0.5, "n": 3}') == {"reward": 0.5, "n": 3.0}


@pytest.mark.parametrize(
    "step", [pytest.param(40, id="sample"), pytest.param(1, id="all", marks=pytest.mark.thorough)]
)
def test_truths_of_public_datasets_score_1_against_themselves(step):
    if not DATA.is_dir():
        pytest.skip("the datasets are not there")
    solutions = [
        json.loads(line)["answer"]
        for split in ("train", "test")
        for line in (DATA / "gsm8k" / f"{split}.jsonl").read_text().splitlines()
    ]
    for truth in solutions[::step]:
        answer = truth.rpartition("####")[2].strip()
        assert gsm8k("", truth, truth) == last_number("", answer, truth) == 1
        assert math("", rf"\boxed{{{answer}}}", truth) == 1
        assert math("", f"<answer>{answer}</answer>", truth) == 1
    for row in json.loads((DATA / "svamp" / "SVAMP.json").read_text())[::step]:
        truth, answer = row["Answer"], as_text(row["Answer"])
        assert gsm8k("", f"#### {truth}", truth) == last_number("", f"{answer}", truth) == 1
        assert math("", rf"\boxed{{{answer}}}", truth) == exact("", f"{answer}", truth) == 1
    for path in (DATA / "math").glob("*.json"):
        for row in json.loads(path.read_text())[::step]:
            if row["answer"]:  # four rows have none
                read_expression(row["answer"])
                for form in (r"so \boxed{ %s}.", "<answer>%s</answer>"):
                    assert math("", form % row["answer"], row["answer"]) == 1


class Recorded(Progress):
    """Keeps the lines instead of printing them."""

    def __init__(self):
        super().__init__()
        self.lines = []

    def status(self, text):
        self.lines.append(text)


def prompt(truth, source="default", id=0):
    return Prompt(id, (), np.zeros(0, np.int32), truth, source)


def rollout(text):
    ids, logp, mask = np.zeros(0, np.int32), np.zeros(0, np.float32), np.zeros(0, bool)
    return Rollout(prompt("1"), 0, ids, logp, mask, versions=ids, finish="stop", text=text)


def rows(*truths):
    return [SourceRow(0, i, f"data.jsonl:{i + 1}", {"answer": t}) for i, t in enumerate(truths)]


def plain_maker(dropped=()):
    """Makes prompts of rows, without those whose answer is in `dropped`."""

    def make(rows, lengths):
        kept = [row for row in rows if row.columns["answer"] not in dropped]
        return [prompt(row.columns["answer"], id=row.number) for row in kept]

    return ItemMaker("prompts", "", (), make)
