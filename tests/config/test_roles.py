"""Errors of estimators and preference losses that read more than the reward of a response."""

import pytest

from jaxrl.config import resolve
from tests.config.runnable import complaint, runnable


def test_roles_need_an_agent_and_its_rewards_alone():
    found = complaint(runnable(algorithm__advantage="rae", reward__functions=("math",)))
    assert "there is no agent; set env.agent" in found
    assert "reward.functions=('math',) concerns the reward of an episode" in found
    found = complaint(runnable(algorithm__role_decay=0.5))
    assert "algorithm.role_decay=0.5 has no effect with algorithm.advantage='grpo'" in found


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"top_entropy": 0.2}, "algorithm.top_entropy=0.2 does not go together"),
        ({"keep_sampling_mask": True}, "algorithm.keep_sampling_mask=True does not go together"),
    ],
)
def test_the_token_baseline_needs_the_scoring_for_itself(changes, message):
    keys = {f"algorithm__{name}": value for name, value in changes.items()}
    config = runnable(
        algorithm__advantage="optimal_token_baseline", rollout__sampling__top_k=20, **keys
    )
    assert message in complaint(config)


def test_online_dpo_needs_a_fixed_beta():
    keys = dict(algorithm__advantage="online_dpo", algorithm__kl_in="reward")
    assert "needs beta" in complaint(runnable(**keys))
    keys |= dict(algorithm__kl_coef=0.1, algorithm__kl_target=0.1)
    assert "which is the fixed beta" in complaint(runnable(**keys))


def test_weights_of_pairs_need_pairs():
    found = complaint(runnable(preference__weighted=True, preference__loss="bco"))
    assert "preference.weighted=True weights pairs, but the loss bco" in found
    assert resolve(runnable(preference__weighted=True)).preference.weighted
