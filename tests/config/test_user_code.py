"""Tests of jaxrl/config/user_code.py, and of every place that reports an error of user code."""

import jax.numpy as jnp
import pytest

from jaxrl.algorithms.user_rows import check_user_rows
from jaxrl.config.keys import AlgorithmConfig, RunConfig
from jaxrl.config.plugins import load_plugin
from jaxrl.config.user_code import MAX_FRAMES, error_text
from jaxrl.environments.worker import check_factory, turn_or_error
from jaxrl.learner.optimizers.plugin import load_optimizer

CODE = """
import json


def score(n=0):
    return deeper(n)


def deeper(n):
    return json.loads("{") if n else {}["boxed"]


def endless():
    return endless()


def optimizer(learning_rate):
    return {}["mu"]
"""


@pytest.fixture
def code(tmp_path, monkeypatch):
    (tmp_path / "mine.py").write_text(CODE)
    monkeypatch.chdir(tmp_path)
    return lambda name: load_plugin(f"mine.py:{name}", built_in={}, key="KEY")


def raised_by(function, *arguments):
    with pytest.raises(Exception) as raised:
        function(*arguments)
    raised.value.__traceback__ = raised.tb.tb_next  # without this file, which is user code too
    return raised.value


def test_the_lines_of_user_code_follow_the_error(code):
    assert error_text(raised_by(code("score"))) == (
        "KeyError: 'boxed'\n"
        '  File "mine.py", line 6, in score\n'
        "    return deeper(n)\n"
        '  File "mine.py", line 10, in deeper\n'
        '    return json.loads("{") if n else {}["boxed"]'
    )


def test_lines_of_libraries_are_left_out_and_deep_tracebacks_are_cut(code):
    text = error_text(raised_by(code("score"), 1))
    assert "JSONDecodeError" in text and "decoder.py" not in text and text.count("File") == 2
    assert error_text(raised_by(code("endless"))).count("  File ") == MAX_FRAMES


def test_errors_without_user_code_are_one_line():
    assert error_text(ValueError("x" * 900)) == "ValueError: " + "x" * (500 - len("ValueError: "))


def test_errors_at_import_show_the_line(code, tmp_path):
    (tmp_path / "mine.py").write_text("import os\nscores = {}['a']\n")
    with pytest.raises(ValueError, match=r"KEY 'mine.py:f'.*KeyError: 'a'") as raised:
        code("f")
    assert "\n  File \"mine.py\", line 2, in <module>\n    scores = {}['a']" in str(raised.value)
    (tmp_path / "wrong.py").write_text("def f(:\n    pass\n")
    with pytest.raises(ValueError, match="SyntaxError") as raised:
        load_plugin("wrong.py:f", built_in={}, key="KEY")
    assert str(raised.value).endswith('\n  File "wrong.py", line 1\n    def f(:')


def test_environments_agents_and_optimizers_show_the_line(code):
    place = '\n  File "mine.py", line 6, in score\n    return deeper(n)\n'
    assert place in turn_or_error(code("score")).error
    with pytest.raises(ValueError, match="cannot be created") as raised:
        check_factory(code("score"), "mine.py:score")
    assert place in str(raised.value)
    with pytest.raises(ValueError, match="cannot take a step") as raised:
        load_optimizer("mine.py:optimizer", lambda step: jnp.float32(1.0), {})
    assert 'line 18, in optimizer\n    return {}["mu"]' in str(raised.value)


def test_a_users_loss_shows_the_line(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    (tmp_path / "loss.py").write_text(
        "from jaxrl.algorithms.losses.policy_loss import PolicyLoss\n\n\n"
        "def wrong(log_ratio, advantages):\n    return {}['ratio']\n\n\n"
        "ROW = PolicyLoss(wrong, ('log_ratio', 'advantages'))\n"
    )
    run = RunConfig(algorithm=AlgorithmConfig(policy_loss="loss.py:ROW"))
    with pytest.raises(ValueError, match="a call raises KeyError: 'ratio'") as raised:
        check_user_rows(run)
    assert "line 5, in wrong\n    return {}['ratio']" in str(raised.value)
