"""The clipped surrogate on hand-made ratios, its gradient, and which tokens it cuts off."""

import jax
import jax.numpy as jnp
import numpy as np

from jaxrl.algorithms.policy_loss import POLICY_LOSSES, is_clipped, ppo_clip

CLIP = dict(clip_low=0.2, clip_high=0.3)


def row(*values):
    return jnp.array([values], jnp.float32)


RATIOS = row(1.0, 1.5, 1.5, 0.5, 0.5)
ADVANTAGES = row(2.0, 2.0, -2.0, 2.0, -2.0)


def test_ppo_clip_takes_the_worse_of_ratio_and_clipped_ratio():
    got = ppo_clip(jnp.log(RATIOS), jnp.zeros((1, 5)), ADVANTAGES, **CLIP)
    # -1 * 2; clipped to 1.3: -1.3 * 2; negative advantage keeps the larger ratio: 1.5 * 2;
    # positive keeps the smaller: -.5 * 2; clipped to .8: .8 * 2
    np.testing.assert_allclose(got, [[-2.0, -2.6, 3.0, -1.0, 1.6]], rtol=1e-6)


def test_the_gradient_is_cut_off_exactly_at_the_clipped_tokens():
    logp, old = jnp.log(RATIOS), jnp.zeros((1, 5))
    grad = jax.grad(lambda logp: jnp.sum(ppo_clip(logp, old, ADVANTAGES, **CLIP)))(logp)
    # d(-r A)/dlogp = -r A where it is not cut: -2, 0, 3, -1, 0
    np.testing.assert_allclose(grad, [[-2.0, 0.0, 3.0, -1.0, 0.0]], rtol=1e-6)
    clipped = is_clipped(logp, old, ADVANTAGES, **CLIP)
    np.testing.assert_array_equal(clipped, grad == 0)


def test_descent_raises_good_tokens_and_lowers_bad_ones():
    def loss(logp):
        return jnp.sum(ppo_clip(logp, row(-1.0, -1.0), row(1.0, -1.0), **CLIP))

    good, bad = jax.grad(loss)(row(-1.0, -1.0))[0]
    assert good < 0 < bad


def test_the_table_names_the_losses():
    assert POLICY_LOSSES["ppo_clip"] is ppo_clip
