"""Tests of jaxrl/rewards/calls.py."""

import functools
import math

import pytest

from jaxrl.rewards.calls import CallSignature, read_signature
from jaxrl.rewards.functions import BUILT_IN, load_reward

VERL = ("data_source", "solution_str", "ground_truth", "extra_info")
TRL = ("prompts", "completions", "completion_ids")


def verl(data_source, solution_str, ground_truth, extra_info=None, *, scale=1): ...


async def judge(solution_str, ground_truth, timeout_s, **kwargs): ...


def batch(data_sources, solution_strs, ground_truths, extra_infos): ...


def trl(completions, level, **kwargs): ...


async def trl_async(prompts, completions, completion_ids, solution, weight=1.0): ...


def everything(**kwargs): ...


class Callable:
    async def __call__(self, solution_str): ...


@pytest.mark.parametrize(
    "function, signature",
    [
        (verl, CallSignature("verl", False, VERL)),
        (functools.partial(verl, scale=2), CallSignature("verl", False, VERL)),
        (everything, CallSignature("verl", False, VERL)),
        (math.hypot, CallSignature("verl", False, VERL)),
        (
            judge,
            CallSignature(
                "verl",
                True,
                ("solution_str", "ground_truth", "timeout_s", "data_source", "extra_info"),
            ),
        ),
        (functools.partial(judge, model="x"), None),
        (Callable(), CallSignature("verl", True, ("solution_str",))),
        (batch, CallSignature("verl_batch", False, tuple(f"{name}s" for name in VERL))),
        (
            trl,
            CallSignature(
                "trl",
                False,
                ("completions", "level", "prompts", "completion_ids"),
                required=("level",),
                all_columns=True,
            ),
        ),
        (
            trl_async,
            CallSignature("trl", True, (*TRL, "solution", "weight"), required=("solution",)),
        ),
        (
            functools.partial(trl_async, weight=2.0),
            CallSignature("trl", True, (*TRL, "solution"), required=("solution",)),
        ),
    ],
)
def test_the_form_is_recognized_by_the_names_of_the_parameters(function, signature):
    assert read_signature(function) == (signature or read_signature(judge))


def test_every_built_in_reward_has_a_form():
    judge = "?url=http://x&model=m&rubric=r"
    options = {"remote": "?url=http://x", "judge": judge, "judge_pairs": judge}
    for name in BUILT_IN:
        assert read_signature(load_reward(name + options.get(name, ""))).form in (
            "verl",
            "verl_batch",
            "verl_group",
        )


def other_names(source, solution, truth): ...


def positions(data_source, /, solution_str): ...


def two_forms(solution_str, completions): ...


def needs_tokenizer(solution_str, reward_model_tokenizer): ...


def needs_state(completions, trainer_state): ...


@pytest.mark.parametrize(
    "function, message",
    [
        (other_names, "other_names(source, solution, truth) has no parameter for a response"),
        (positions, "takes 'data_source' by position only"),
        (two_forms, "has parameters of verl and trl"),
        (needs_tokenizer, "requires 'reward_model_tokenizer', which is no argument of its form"),
        (needs_state, "requires 'trainer_state', which is no argument of its form"),
        (load_reward("remote"), "requires 'url'"),
    ],
)
def test_other_signatures_are_rejected_with_what_is_accepted(function, message):
    with pytest.raises(ValueError) as error:
        read_signature(function)
    assert message in str(error.value)
    assert "accepted are verl's (data_source, solution_str, " in str(error.value)


def test_an_option_that_a_function_does_not_have_is_rejected():
    with pytest.raises(ValueError, match=r"function verl\(data_source, .* has no option 'scael'"):
        read_signature(functools.partial(verl, scael=2))
