"""Tests of jaxrl/learner/coefficients.py: adaptive KL and entropy coefficients."""

import pytest

from jaxrl.config.resolve import resolve
from jaxrl.learner.coefficients import (
    adapt_coefficients,
    adaptive_entropy_coef,
    adaptive_kl_coef,
    coefficient_metrics,
    initial_coefficients,
)
from tests.trainer.phases.test_mini_batches import config


def test_fixed_coefficients_stay_constant_and_are_not_logged():
    cfg = resolve(config(kl_coef=0.1, entropy_coef=0.01))
    first = initial_coefficients(cfg)
    assert (
        adapt_coefficients(first, {"loss/kl": 9.0, "loss/entropy": 9.0}, cfg, n_samples=4) == first
    )
    assert coefficient_metrics(first, cfg) == {}


def test_the_kl_coefficient_follows_the_kl_of_the_loss_or_of_the_reward():
    keys = dict(kl_coef=0.1, kl_target=0.05, kl_horizon=100.0)
    metrics = {"loss/kl": 9.0, "reward/kl": 0.0}
    # relative error clipped to +-0.2, times 4 samples / horizon 100
    cfg = resolve(config(**keys))
    up = adapt_coefficients(initial_coefficients(cfg), metrics, cfg, n_samples=4)
    assert up.kl == pytest.approx(0.1 * (1 + 0.2 * 4 / 100))
    cfg = resolve(config(**keys, kl="k1", kl_in="reward"))
    down = adapt_coefficients(initial_coefficients(cfg), metrics, cfg, n_samples=4)
    assert down.kl == pytest.approx(0.1 * (1 - 0.2 * 4 / 100))


def test_the_entropy_bonus_is_off_above_its_target():
    cfg = resolve(config(entropy_coef=0.01, entropy_target=0.5, entropy_delta=0.002))
    above = adapt_coefficients(initial_coefficients(cfg), {"loss/entropy": 0.6}, cfg, n_samples=4)
    assert above.entropy == pytest.approx(0.008) and above.loss_coefs().entropy == 0.0
    below = adapt_coefficients(above, {"loss/entropy": 0.4}, cfg, n_samples=4)
    assert below.loss_coefs().entropy == pytest.approx(0.01)
    assert coefficient_metrics(below, cfg) == {"loss/entropy_coef": pytest.approx(0.01)}


def test_a_step_without_an_update_keeps_the_coefficients():
    cfg = resolve(config(kl_coef=0.1, kl_target=0.05, entropy_target=0.5))
    first = initial_coefficients(cfg)
    assert adapt_coefficients(first, {}, cfg, n_samples=4) == first


@pytest.mark.parametrize(
    ("kl", "want"),
    [
        (0.11, 2.0 * (1 + 0.1 * 64 / 1000)),  # 10 % above the target
        (1.0, 2.0 * (1 + 0.2 * 64 / 1000)),  # far above: clipped to 20 %
        (0.0, 2.0 * (1 - 0.2 * 64 / 1000)),
        (0.1, 2.0),
    ],
)
def test_the_kl_coefficient_follows_the_error_clipped_to_20_percent(kl, want):
    got = adaptive_kl_coef(2.0, kl, target=0.1, horizon=1000.0, n_samples=64)
    assert got == pytest.approx(want)


def test_the_entropy_coefficient_rises_below_the_target_and_falls_above_it_but_not_below_zero():
    assert adaptive_entropy_coef(0.5, 0.1, target=0.2, delta=0.25) == 0.75
    assert adaptive_entropy_coef(0.5, 0.3, target=0.2, delta=0.25) == 0.25
    assert adaptive_entropy_coef(0.1, 0.3, target=0.2, delta=0.25) == 0.0
