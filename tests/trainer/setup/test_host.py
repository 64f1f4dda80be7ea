"""Tests of jaxrl/trainer/setup/host.py: parts of the objective and the rows that they train."""

import numpy as np
import pytest

from jaxrl.config.keys import AlgorithmConfig, RunConfig
from jaxrl.data.iterator import StepItems
from jaxrl.trainer.setup.host import check_part_sources
from jaxrl.types import Demonstration, Prompt


def check(*parts, prompts=("math",), demonstrations=(), lists=()):
    none = np.zeros(0, np.int32)
    cfg = RunConfig(algorithm=AlgorithmConfig(parts=parts, source_parts=lists))
    rows = [Prompt(i, (), none, "", source=source) for i, source in enumerate(prompts)]
    given = [Demonstration(0, none, none, none, source=source) for source in demonstrations]
    items = StepItems(given, per_step=1, shuffle=False, seed=0) if given else None
    check_part_sources(cfg, rows, items)


def test_parts_whose_source_no_row_has_are_refused():
    with pytest.raises(ValueError, match="no row has the data_source 'code'; the sources are math"):
        check("observations?source=code")
    with pytest.raises(ValueError, match="'demonstrations/math', but no row"):
        check("demonstrations", "demonstrations?source=math", demonstrations=("chat",))


def test_demonstrations_that_no_entry_names_are_refused():
    with pytest.raises(ValueError, match="data_source 'code', which no entry"):
        check("demonstrations?source=chat", demonstrations=("chat", "code"))


def test_rows_of_every_part_are_accepted():
    both = "demonstrations?source=chat", "demonstrations"
    check("observations?source=math", *both, demonstrations=("chat", "code"))


def test_lists_of_sources_without_rows_and_rows_without_a_part_are_refused():
    with pytest.raises(ValueError, match="source_parts names code, but no row"):
        check("policy", lists=("code?parts=policy",))
    lists = ("math?parts=demonstrations",)
    with pytest.raises(ValueError, match="'math' without a part; name 'policy'"):
        check("policy", "demonstrations", demonstrations=("math",), lists=lists)
    with pytest.raises(ValueError, match="'math' without a part"):
        check("policy?source=code", prompts=("math", "code"))
    check("policy", "entropy", prompts=("math", "code"), lists=("math?parts=entropy",))
