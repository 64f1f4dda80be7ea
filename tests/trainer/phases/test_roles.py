"""Running means of the rewards of roles."""

import numpy as np
import pytest

from jaxrl.config.keys import AlgorithmConfig
from jaxrl.trainer.phases.advantage import add_advantages
from jaxrl.trainer.phases.roles import with_role_baselines
from jaxrl.types import TrainingSample


def sample(role, reward, source="poker", branch=0):
    return TrainingSample(
        prompt_tokens=np.arange(2, dtype=np.int32),
        tokens=np.arange(3, dtype=np.int32),
        loss_mask=np.array([True, False, True]),
        role=role,
        role_reward=reward,
        source=source,
        branch=branch,
    )


def test_baselines_are_those_before_the_step_by_source_and_role():
    samples = [sample("first", 1.0), sample("second", -1.0, branch=1), sample("first", 0.0, "go")]
    filled, baselines = with_role_baselines(samples, {"poker:first": 0.5}, decay=0.5)
    assert [s.role_baseline for s in filled] == [0.5, 0.0, 0.0]
    assert baselines == pytest.approx({"poker:first": 0.75, "poker:second": -0.5, "go:first": 0.0})
    cfg = AlgorithmConfig(advantage="rae")
    found = add_advantages(filled, np.zeros(3), cfg)
    np.testing.assert_allclose(found[0].advantages, [0.5, 0, 0.5])
    np.testing.assert_allclose(found[1].advantages, [-1, 0, -1])
