"""Runs whose judge is a second model on the devices, of another family and tokenizer."""

import json

import numpy as np
import pytest

from jaxrl.config import resolve
from jaxrl.models.config import uniform_decoder
from jaxrl.trainer.loop import run_to_end
from jaxrl.trainer.phases.sampling import sample
from jaxrl.trainer.rl_step import train_step, validate
from jaxrl.trainer.setup.opening import open_run
from tests.trainer.conftest import write_model
from tests.trainer.test_local_judge import VARIED, judged_config, long_context, verdicts
from tests.trainer.test_train import metrics

__all__ = ["judged_config", "long_context"]  # fixtures
JUDGE = uniform_decoder(
    "qwen2", L=2, D=32, N=4, K=2, H=8, F=64, V=264, tied=True, qkv_bias=True, max_len=2048
)
N_NEW = 4  # token ids of the judge's tokenizer before those of the policy's


@pytest.fixture(scope="module")
def other_model(tmp_path_factory):
    """Folder of a Qwen2 whose tokenizer has every token of the policy's under another id."""
    folder = write_model(tmp_path_factory.mktemp("judge") / "model", JUDGE)
    path = folder / "tokenizer.json"
    tokenizer = json.loads(path.read_text())
    vocab = tokenizer["model"]["vocab"]
    tokenizer["model"]["vocab"] = {f"<{i}>": i for i in range(N_NEW)} | {
        token: i + N_NEW for token, i in vocab.items()
    }
    for token in tokenizer["added_tokens"]:
        token["id"] += N_NEW
    path.write_text(json.dumps(tokenizer))
    (folder / "generation_config.json").write_text(json.dumps({"eos_token_id": 2 + N_NEW}))
    return folder


@pytest.fixture
def config(judged_config, tmp_path, tiny_model, other_model):
    config, own = judged_config, tmp_path / "own.py"
    own.write_text(VARIED)
    config.model.path = str(tiny_model)
    config.reward.functions = ("judge", f"{own}:varied")  # the verdicts may all be equal
    judge = config.reward.judge
    judge.weights, judge.path, judge.chat_template = "checkpoint", str(other_model), "chatml"
    judge.max_num_seqs = 2
    return config


def judged_run(config):
    """(verdicts on four responses before two steps, after them, metrics of the steps)."""
    with open_run(resolve(config)) as run:
        rollouts = sample(run, list(run.core.val)[:4])[0]
        before = verdicts(run, rollouts)
        assert run_to_end(run, train_step, validate)
        after = verdicts(run, rollouts)
    return before, after, [m for m in metrics(config.run_dir) if "reward/mean" in m]


@pytest.mark.thorough
def test_a_second_model_judges_with_weights_that_stay(config, tmp_path):
    before, after, steps = judged_run(config)
    assert before == after and all(score is not None and not error for score, error in before)
    assert len(steps) == 2 and all(m["reward/judge/requests"] == 4 for m in steps)
    assert all(m["reward/judge/failures"] == 0 for m in steps)
    assert all(m["reward/judge/completion_tokens"] > 0 for m in steps)
    config.run_dir, config.learner.offload = str(tmp_path / "offloaded"), ("judge",)
    again, _, others = judged_run(config)
    assert again == before
    for name in ("reward/judge/good", "loss/total", "optim/grad_norm"):
        assert [m[name] for m in others] == [m[name] for m in steps]


@pytest.mark.thorough
def test_the_judge_is_sharded_as_the_rollout(config, tmp_path):
    before, *_ = judged_run(config)
    config.run_dir, config.mesh.fsdp, config.rollout.tensor = str(tmp_path / "mesh"), 4, 2
    sharded, after, steps = judged_run(config)
    assert sharded == before == after
    assert all(m["reward/judge/failures"] == 0 for m in steps)


@pytest.mark.thorough
def test_a_judge_in_int8_resumes_with_the_same_verdicts(config, tmp_path):
    config.reward.judge.dtype, config.checkpoint.every = "int8", 1
    *_, whole = judged_run(config)
    config.run_dir, config.total_steps = str(tmp_path / "resumed"), 1
    config.learner.lr_schedule = "constant"
    judged_run(config)
    config.total_steps = 2
    *_, steps = judged_run(config)
    for name in ("reward/mean", "reward/judge/good", "optim/grad_norm"):
        np.testing.assert_array_equal([m[name] for m in steps], [m[name] for m in whole])
