import pytest

from jaxrl.workers.functions import BUILT_IN, load_function, part_names


@pytest.mark.parametrize("name", BUILT_IN)
def test_built_in_names_load_their_function(name):
    assert load_function(name).__name__ == name


def test_user_functions_load_by_module_and_by_file(tmp_path, monkeypatch):
    (tmp_path / "my_rewards.py").write_text("def one(*args, **kwargs): return 1.0, kwargs")
    monkeypatch.syspath_prepend(tmp_path)
    assert load_function("my_rewards:one")() == (1.0, {})
    assert load_function(f"{tmp_path}/my_rewards.py:one")() == (1.0, {})


def test_options_become_typed_keywords(tmp_path):
    (tmp_path / "r.py").write_text("def f(**kwargs): return kwargs")
    spec = rf"{tmp_path}/r.py:f?a=1&b=0.5&c=true&d=x+y&pattern=(\d+)=&e='2'"
    options = {"a": 1, "b": 0.5, "c": True, "d": "x+y", "pattern": r"(\d+)=", "e": "2"}
    assert load_function(spec)() == options


def test_parts_are_named_after_the_function_unless_two_share_it():
    assert part_names(("math", "pkg.mod:score", "a.py:shape?x=1")) == ("math", "score", "shape")
    assert part_names(("exact?pattern=a", "exact?pattern=b")) == (
        "exact?pattern=a",
        "exact?pattern=b",
    )


def test_module_that_raises_at_import_says_so(tmp_path):
    (tmp_path / "r.py").write_text("1 / 0")
    with pytest.raises(ValueError, match=r"cannot be imported \(ZeroDivisionError"):
        load_function(f"{tmp_path}/r.py:f")
    with pytest.raises(ValueError, match=r"cannot be imported \(FileNotFoundError"):
        load_function(f"{tmp_path}/nowhere.py:f")
