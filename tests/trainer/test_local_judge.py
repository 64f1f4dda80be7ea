"""Runs whose own engine judges the responses, with its current or its initial weights."""

import dataclasses

import pytest

from jaxrl.config import resolve
from jaxrl.trainer.loop import run_to_end
from jaxrl.trainer.phases.sampling import reward, sample
from jaxrl.trainer.rl_step import train_step, validate
from jaxrl.trainer.setup.opening import open_run
from tests.trainer.conftest import LLAMA, write_model
from tests.trainer.test_train import metrics

RUBRIC = """
criteria:
  - {name: good, description: It is good., scale: [0, 100]}
"""
VARIED = """
import zlib

def varied(data_source, solution_str, ground_truth, extra_info):
    return zlib.crc32(solution_str.encode()) % 7
"""


@pytest.fixture(scope="module")
def long_context(tmp_path_factory):
    folder = tmp_path_factory.mktemp("long") / "model"
    return write_model(folder, dataclasses.replace(LLAMA, max_len=2048))


@pytest.fixture
def judged_config(tiny_config, tmp_path, long_context):
    config, path = tiny_config, tmp_path / "rubric.yaml"
    path.write_text(RUBRIC)
    config.model.path = str(long_context)
    config.reward.functions = ("judge",)
    judge = config.reward.judge
    judge.weights, judge.rubric, judge.explain = "policy", str(path), False
    judge.max_prompt_len, judge.max_verdict_len, judge.attempts = 1400, 128, 1
    judge.cache = False
    config.total_steps, config.data.prompts_per_step, config.rollout.n = 2, 2, 2
    config.learner.lr, config.checkpoint.every = 1e-2, 0
    return config


def verdicts(run, rollouts):
    """(score of the rubric's criterion, error) of each response."""
    return [(one.reward.parts.get("judge/good"), one.reward.error) for one in reward(run, rollouts)]


@pytest.mark.thorough
def test_the_base_of_adapters_is_a_frozen_judge_and_the_policy_one_that_moves(
    judged_config, tmp_path
):
    """The verdicts of one and the same responses, before and after two steps."""
    config, found, own = judged_config, {}, tmp_path / "own.py"
    own.write_text(VARIED)
    config.reward.functions = ("judge", f"{own}:varied")  # the verdicts may all be equal
    for weights, rank, merge in (
        ("policy", 0, False),
        ("reference", 4, False),
        ("reference", 4, True),
    ):
        config.reward.judge.weights, config.run_dir = weights, str(tmp_path / f"{weights}{merge}")
        config.lora.rank, config.lora.merge = rank, merge
        with open_run(resolve(config)) as run:
            rollouts = sample(run, list(run.core.val)[:4])[0]
            before = verdicts(run, rollouts)
            assert run_to_end(run, train_step, validate)
            found[weights, merge] = before, verdicts(run, rollouts)
        steps = [m for m in metrics(config.run_dir) if "reward/mean" in m]
        assert len(steps) == 2 and all(m["reward/judge/requests"] == 4 for m in steps)
        assert all(m["reward/judge/failures"] == 0 for m in steps)
    initial = found["policy", False][0]
    assert all(score is not None and not error for score, error in initial)
    for merge in (False, True):
        before, after = found["reference", merge]
        assert before == after == initial
    assert found["policy", False][1] != initial


@pytest.mark.thorough
@pytest.mark.parametrize("fsdp", [1, 2])
def test_the_reference_of_a_kl_is_a_frozen_judge(judged_config, tmp_path, fsdp):
    """Its verdicts before and after two steps; with two devices the engine reads a copy."""
    config, own = judged_config, tmp_path / "own.py"
    own.write_text(VARIED)
    config.reward.functions = ("judge", f"{own}:varied")
    config.reward.judge.weights, config.algorithm.kl_coef = "reference", 0.1
    config.mesh.fsdp = fsdp
    with open_run(resolve(config)) as run:
        rollouts = sample(run, list(run.core.val)[:4])[0]
        before = verdicts(run, rollouts)
        assert run_to_end(run, train_step, validate)
        assert verdicts(run, rollouts) == before
    assert all(score is not None and not error for score, error in before)
    steps = [m for m in metrics(config.run_dir) if "reward/mean" in m]
    assert len(steps) == 2 and all(m["reward/judge/requests"] == 4 for m in steps)
    assert all(m["reward/judge/failures"] == 0 for m in steps)
    assert steps[1]["loss/kl"] > 0  # the policy has moved


@pytest.mark.thorough
def test_pairs_on_the_engine_and_a_prompt_that_is_too_long(judged_config, tmp_path):
    config = judged_config
    config.reward.functions, config.data.val = ("judge_pairs",), ()
    config.lora.rank, config.reward.judge.weights = 4, "reference"
    with open_run(resolve(config)) as run:
        rollouts = sample(run, [prompt for prompt in next(run.core.iterator)])[0]
        found = reward(run, rollouts)
        assert not any(one.error for one in found)
        for i in (0, 2):  # the two win rates of a pair
            assert found[i].reward.value + found[i + 1].reward.value == pytest.approx(1.0)
        assert sum(one.reward.counts["judge_pairs/requests"] for one in found) == 4
        config.reward.judge.max_prompt_len = 100
    config.run_dir, config.reward.functions = str(tmp_path / "short"), ("judge",)
    with open_run(resolve(config)) as run:
        (one, *_) = reward(run, rollouts)
    assert "raise reward.judge.max_prompt_len" in one.error
    assert one.reward.counts["judge/failed_status"] == 1
