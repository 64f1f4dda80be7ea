"""Advantages of conversations with roles, by hand."""

import numpy as np
import pytest

from jaxrl.algorithms.role_advantages import hierarchical_grpo, rae, updated_baseline

MASK = np.ones((6, 2), np.float32)


def test_rae_subtracts_the_baseline_of_each_role():
    given = np.array([1.0, -1.0], np.float32), np.array([0.25, -0.5], np.float32)
    found = rae(*given, np.array([[1, 1], [1, 0]], np.float32))
    np.testing.assert_allclose(found, [[0.75, 0.75], [-0.5, 0]])


def test_a_baseline_moves_as_by_single_updates_in_any_order():
    # α = 0.5: 0.5 (0.5 · 4 + 0.5 · 1) + 0.5 · 1 = 1.75 for two rewards of 1
    assert updated_baseline(4.0, np.array([1.0, 1.0]), 0.5) == pytest.approx(1.75)
    found = [updated_baseline(0.0, np.array(r), 0.9) for r in ([0.0, 1.0], [1.0, 0.0])]
    assert found[0] == found[1] == pytest.approx((1 - 0.81) * 0.5)


def test_hierarchical_grpo_compares_solvers_of_an_episode_and_proposers_of_a_group():
    roles = ("proposer", "solver/0", "solver/1", "proposer", "solver/0", "solver/1")
    places = np.zeros(6, np.int64), np.array([0, 0, 0, 1, 1, 1])
    r = np.array([1.0, 1.0, 0.0, 0.0, 0.1, 0.1], np.float32)
    found = hierarchical_grpo(r, places, roles, MASK, episode_roles=("solver",))
    # proposers 1 and 0; solvers of the first episode 1 and 0, of the second equal
    np.testing.assert_allclose(found[:, 0], [0.5, 0.5, -0.5, -0.5, 0.0, 0.0])
    whole = hierarchical_grpo(r, places, roles, MASK, episode_roles=())
    np.testing.assert_allclose(whole[1:3, 0], [0.7, -0.3], rtol=1e-6)  # mean of solvers: 0.3
    alone = hierarchical_grpo(r[:1], (places[0][:1],) * 2, roles[:1], MASK[:1], episode_roles=())
    assert not alone.any()
