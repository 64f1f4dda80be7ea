"""Tests of jaxrl/notebook/planning.py: the planner as a function."""

import pytest

from jaxrl.notebook import planning

MODEL = {"model.path": "Qwen/Qwen2.5-0.5B-Instruct"}


def test_a_plan_that_does_not_fit_has_the_tables_and_is_shown_as_they_are(monkeypatch):
    monkeypatch.setattr(planning, "_run", lambda arguments: (2, "a < b\n", ""))
    plan = planning.plan("grpo_1p5b", "v5e:2x4")
    assert not plan.fits and plan.numbers == {}
    assert "a &lt; b" in plan._repr_html_()


def test_an_error_is_the_message_of_the_program(monkeypatch):
    failed = (1, "", "compiling update\nerror: v5e:3x3 is no shape\nof the chip\n")
    monkeypatch.setattr(planning, "_run", lambda arguments: failed)
    with pytest.raises(ValueError, match=r"^v5e:3x3 is no shape\nof the chip$"):
        planning.plan("grpo_1p5b", "v5e:3x3")


def test_a_wrong_key_is_answered_before_the_program_starts(monkeypatch):
    monkeypatch.setattr(planning, "_run", lambda arguments: pytest.fail("it started"))
    with pytest.raises(ValueError, match=r"there is no key rollout\.m"):
        planning.plan("grpo_1p5b", "v5e:2x4", overrides={"rollout.m": 4})


@pytest.mark.thorough
def test_the_program_plans_in_another_process(capsys, tiny_config):
    plan = planning.plan(tiny_config, "cpu:1", response_len=4)
    assert plan.fits and "fits" in plan.text
    assert plan.numbers["lengths"]["response"] == 4
    assert "compiling" in capsys.readouterr().out
    with pytest.raises(ValueError, match="unknown argument --respons-len"):
        planning.plan(tiny_config, "cpu:1", respons_len=4)
