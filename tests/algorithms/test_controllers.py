"""Adaptive coefficients by hand."""

import pytest

from jaxrl.algorithms.controllers import adaptive_entropy_coef, adaptive_kl_coef


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
