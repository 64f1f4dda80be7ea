"""Tests of jaxrl/planner/remedies.py and of the time of a step in check.py."""

import dataclasses
import re

from jaxrl.planner.check import cpu_time_line
from jaxrl.planner.remedies import remedies_text, smaller
from jaxrl.planner.sizes import settings_of
from tests.planner.tiny_job import job, machine
from tests.planner.tiny_run import run


def options(text: str) -> list[tuple[float, str]]:
    """(GiB, option) of each line."""
    return [(float(n), o) for n, o in re.findall(r"^ +([\d.]+) GiB  (.*)$", text, re.MULTILINE)]


def test_the_settings_are_named_in_the_order_of_what_they_free():
    big = machine(float(2**20))
    tiny = job(run(learner__token_budget=1024, learner__remat="none"), where=big)
    names = [option for option, _ in smaller(tiny, settings_of(tiny))]
    text = remedies_text(tiny)
    freed = options(text)
    assert freed == sorted(freed, key=lambda one: -one[0])
    assert len(freed) >= 4 and {option for _, option in freed} <= set(names)
    for option in ("--config.learner.remat=full", "--config.learner.offload=optimizer"):
        assert option in text
    assert re.search(r"--config\.learner\.token_budget=\d+$", text, re.MULTILINE)
    assert "rollout.max_num_seqs" in text and "--search" in text


def test_only_what_the_run_does_not_have_yet_is_named():
    cfg = run(learner__token_budget=1024, learner__remat="full", learner__offload=("optimizer",))
    tiny = job(cfg)
    found = dict(smaller(tiny, settings_of(tiny)))
    assert "--config.learner.remat=full" not in found
    assert "--config.learner.offload=optimizer,gradients" in found
    row = max(cfg.learner.row_lens)
    least = dataclasses.replace(cfg.learner, token_budget=row)
    tiny = job(dataclasses.replace(cfg, learner=least))
    assert not any("token_budget" in option for option, _ in smaller(tiny, settings_of(tiny)))


def test_the_time_on_cpu_is_labelled_and_says_what_to_lower_if_it_is_long(monkeypatch):
    monkeypatch.setattr("jaxrl.planner.check.SLOW_S", 1e9)
    assert "a rough estimate from sizes" in (line := cpu_time_line(job()))
    assert "for responses of 6 to 64 tokens" in line and "prompts_per_step" not in line
    monkeypatch.setattr("jaxrl.planner.check.SLOW_S", 0.0)
    assert "lower data.prompts_per_step, rollout.n and data.max_response_len" in cpu_time_line(
        job()
    )
