"""Metrics of a step from those of its updates, and the moving reference."""

import jax.numpy as jnp
import numpy as np

from jaxrl.trainer.phases.update import average_updates, moved, with_first_mismatch

UPDATES = [
    {"loss/total": 1.0, "mismatch/logp_diff_mean": 0.25, "mismatch/logp_diff_max": 0.5},
    {"loss/total": 2.0, "mismatch/logp_diff_mean": 0.75, "mismatch/logp_diff_max": 1.5},
]


def test_metrics_are_averaged_over_updates_and_maxima_are_kept():
    want = {"loss/total": 1.5, "mismatch/logp_diff_mean": 0.5, "mismatch/logp_diff_max": 1.5}
    assert average_updates(UPDATES) == want
    assert average_updates([]) == {}


def test_a_policy_that_has_moved_does_not_enter_the_mismatch():
    """Later updates compare the engine with the current policy if its start is not scored."""
    want = {"loss/total": 1.5, "mismatch/logp_diff_mean": 0.25, "mismatch/logp_diff_max": 0.5}
    assert average_updates(with_first_mismatch(UPDATES)) == want
    assert average_updates(with_first_mismatch(UPDATES[:1])) == UPDATES[0]


def test_a_reference_moves_towards_the_policy_by_the_rate_in_its_own_dtype():
    # 0.25 * 4 + 0.75 * 8 = 7 and 0.25 * -2 + 0.75 * 2 = 1
    old = {"w": jnp.array([8.0, 2.0], jnp.bfloat16)}
    got = moved(old, {"w": jnp.array([4.0, -2.0], jnp.float32)}, rate=0.25)
    assert got["w"].dtype == jnp.bfloat16
    np.testing.assert_array_equal(got["w"].astype(np.float32), [7, 1])
