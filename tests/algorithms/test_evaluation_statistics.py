"""pass@k against counting every draw; standard errors against repeated experiments."""

import itertools
import math

import numpy as np
import pytest

from jaxrl.algorithms.evaluation_statistics import pass_at_k, standard_error


def test_pass_at_k_by_hand():
    # n = 5, c = 2, k = 2: 1 - C(3, 2) / C(5, 2) = 1 - 3 / 10;
    # c = 4: two of five always include one of four
    np.testing.assert_allclose(pass_at_k(np.array([0, 2, 4, 5]), n=5, k=2), [0, 0.7, 1, 1])
    np.testing.assert_allclose(pass_at_k(np.array([0, 1, 3]), n=4, k=1), [0, 0.25, 0.75])


@pytest.mark.parametrize("n", [1, 4, 7])
def test_pass_at_k_is_the_fraction_of_draws_with_a_passing_sample(n):
    for c, k in itertools.product(range(n + 1), range(1, n + 1)):
        draws = list(itertools.combinations([1] * c + [0] * (n - c), k))
        share = sum(map(any, draws)) / len(draws)
        np.testing.assert_allclose(pass_at_k(np.array([c]), n=n, k=k), [share], atol=1e-12)


def test_pass_at_k_is_unbiased():
    """Its mean over all outcomes of n samples that pass with probability p is 1 - (1 - p)^k."""
    n, k, p = 6, 3, 0.3
    counts = np.arange(n + 1)
    chance = np.array([math.comb(n, c) * p**c * (1 - p) ** (n - c) for c in counts])
    np.testing.assert_allclose((chance * pass_at_k(counts, n=n, k=k)).sum(), 1 - (1 - p) ** k)


def test_pass_at_k_of_many_samples_does_not_overflow():
    np.testing.assert_allclose(pass_at_k(np.array([1]), n=10_000, k=100), [0.01], rtol=1e-9)


def test_pass_at_k_with_k_above_n_is_an_error():
    with pytest.raises(
        ValueError, match=r"pass@5 cannot be estimated from 4 samples .* at least 5"
    ):
        pass_at_k(np.array([1]), n=4, k=5)


def test_standard_error_by_hand():
    # means 0, 1, 1, 0: mean 1/2, squares 4 * 1/4 = 1, / 3 / 4 = 1/12
    assert standard_error(np.array([0.0, 1.0, 1.0, 0.0])) == pytest.approx(math.sqrt(1 / 12))
    assert math.isnan(standard_error(np.array([0.5])))


@pytest.mark.parametrize("k", [1, 4])
def test_95_percent_intervals_cover_the_truth_95_percent_of_the_time(k):
    """Prompts of random difficulty, 8 samples each: treating samples as independent covers less."""
    rng, n, n_prompts, n_times = np.random.default_rng(0), 8, 100, 2000
    # E[1 - (1 - p)^k] for p ~ Beta(a, b): 1 - prod_{i < k} (b + i) / (a + b + i)
    a, b = 0.5, 1.0
    truth = 1 - np.prod([(b + i) / (a + b + i) for i in range(k)])
    c = rng.binomial(n, rng.beta(a, b, (n_times, n_prompts)))
    values = np.array([pass_at_k(row, n=n, k=k) for row in c])
    errors = np.array([standard_error(row) for row in values])
    covered = np.mean(np.abs(values.mean(axis=1) - truth) <= 1.96 * errors)
    assert 0.93 < covered < 0.965
    if k == 1:
        naive = np.sqrt((c.mean(axis=1) / n) * (1 - c.mean(axis=1) / n) / (n * n_prompts))
        assert np.mean(np.abs(values.mean(axis=1) - truth) <= 1.96 * naive) < 0.75
