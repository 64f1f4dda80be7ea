import pytest

from jaxrl.config import resolve
from jaxrl.config.keys import DataConfig
from jaxrl.train import train
from jaxrl.trainer.phases.length_stages import LengthStage
from tests.trainer.test_train import metrics


def limits(data, steps):
    """The maximum response lengths of the steps with these (truncated share, mean reward)."""
    stage, found = LengthStage(), []
    for truncated, reward in steps:
        found.append(stage.max_response_len(data))
        measured = {"rollout/truncated_fraction": truncated, "reward/mean": reward}
        stage = stage.after_step(measured, data)
    return found


def test_stages_end_by_steps_or_when_the_running_means_reach_what_is_set():
    lens = dict(length_stages=(2, 4), max_response_len=8)
    data = DataConfig(**lens, length_steps=2)
    assert limits(data, [(0.0, 0.0)] * 6) == [2, 2, 4, 4, 8, 8]
    data = DataConfig(**lens, length_truncated=0.5, length_memory=0.5)
    # running shares 0.4, (0.4 + 0.5) / 2 = 0.45, (0.45 + 0.9) / 2 = 0.675; then of the next stage
    steps = [(0.4, 0.0), (0.5, 0.0), (0.9, 0.0), (0.1, 0.0), (0.9, 0.0), (0.0, 0.0)]
    assert limits(data, steps) == [2, 2, 2, 4, 4, 8]  # (0.1 + 0.9) / 2 = 0.5
    data = DataConfig(**lens, length_reward=0.6, length_truncated=0.1, length_memory=0.0)
    assert limits(data, [(0.0, 0.9), (0.9, 0.5), (0.2, 0.7), (0.0, 0.0)]) == [2, 2, 2, 4]


@pytest.mark.thorough
def test_a_run_with_stages_resumes_bitwise(tiny_config, tmp_path):
    config = tiny_config
    config.data.prompts_per_step, config.rollout.n, config.total_steps = 4, 2, 4
    config.data.val, config.checkpoint.every = (), 1
    config.data.length_stages, config.data.length_steps = (4,), 2
    assert train(resolve(config))
    whole = [m for m in metrics(config.run_dir) if "reward/mean" in m]
    assert [m["data/max_response_len"] for m in whole] == [4, 4, 8, 8]
    assert all(m["rollout/response_len"] <= m["data/max_response_len"] for m in whole)
    config.run_dir, config.total_steps = str(tmp_path / "resumed"), 1
    assert train(resolve(config))
    config.total_steps = 4
    assert train(resolve(config))
    assert [m for m in metrics(config.run_dir) if "reward/mean" in m] == whole
