"""Tests of jaxrl/config/plugins.py. Process start and time limits: tests/rewards/test_pool.py."""

import pytest

from jaxrl.config.plugins import load_plugin


def load(spec):
    return load_plugin(spec, built_in={"deque": "collections:deque"}, key="my.key", reserved=("n",))


def test_built_in_names_load_by_table():
    assert load("deque?maxlen=3")("abcd").maxlen == 3


def test_user_functions_load_by_module_and_by_file(tmp_path, monkeypatch):
    (tmp_path / "my_rewards.py").write_text("def one(*args, **kwargs): return 1.0, kwargs")
    monkeypatch.syspath_prepend(tmp_path)
    assert load("my_rewards:one")() == (1.0, {})
    assert load(f"{tmp_path}/my_rewards.py:one")() == (1.0, {})


def test_options_become_typed_keywords_except_reserved_ones(tmp_path):
    (tmp_path / "r.py").write_text("def f(**kwargs): return kwargs")
    spec = rf"{tmp_path}/r.py:f?a=1&b=0.5&c=true&d=x+y&pattern=(\d+)=&e='2'&n=8"
    options = {"a": 1, "b": 0.5, "c": True, "d": "x+y", "pattern": r"(\d+)=", "e": "2"}
    assert load(spec)() == options


def test_errors_name_the_key_the_cause_and_the_remedy(tmp_path):
    with pytest.raises(ValueError, match=r"my\.key has the unknown name 'dequeue'; .* deque, to"):
        load("dequeue")
    (tmp_path / "r.py").write_text("1 / 0")
    with pytest.raises(ValueError, match=r"cannot be imported \(ZeroDivisionError"):
        load(f"{tmp_path}/r.py:f")
    with pytest.raises(ValueError, match=r"cannot be imported \(FileNotFoundError"):
        load(f"{tmp_path}/nowhere.py:f")
