"""Aggregation of two sequences by hand, independent of their packing."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from jaxrl.algorithms.losses.aggregation import (
    AGGREGATIONS,
    aggregate,
    masked_max,
    sequences_weight,
)

# Sequence a: 1 response token, loss 6. Sequence b: 3 response tokens, losses 1, 2, 3.
WANT = {
    "token_mean": (12.0, 4.0),  # 6 + 1 + 2 + 3 over 4 tokens
    "token_sum": (12.0, 0.0),  # divided by 1
    "seq_mean_token_mean": (8.0, 2.0),  # 6/1 + 6/3 over 2 sequences
    "seq_mean_token_sum": (12.0, 2.0),
    "seq_mean_token_sum_norm": (1.2, 2.0),  # 12 / 10 over 2 sequences
}
ONE_ROW = dict(
    loss=[[99.0, 6.0, 99.0, 1.0, 2.0, 3.0, 99.0]],
    mask=[[0.0, 1.0, 0.0, 1.0, 1.0, 1.0, 0.0]],
    response_len=[[1.0, 1.0, 3.0, 3.0, 3.0, 3.0, 1.0]],
)
TWO_ROWS = dict(
    loss=[[6.0, 99.0, 99.0, 99.0], [99.0, 1.0, 2.0, 3.0]],
    mask=[[1.0, 0.0, 0.0, 0.0], [0.0, 1.0, 1.0, 1.0]],
    response_len=[[1.0, 1.0, 1.0, 1.0], [3.0, 3.0, 3.0, 3.0]],
)


def parts(fields, mode):
    arrays = {name: jnp.array(value) for name, value in fields.items()}
    return aggregate(**arrays, mode=mode, max_response_len=10)


@pytest.mark.parametrize("packing", [ONE_ROW, TWO_ROWS], ids=["one_row", "two_rows"])
@pytest.mark.parametrize("mode", AGGREGATIONS)
def test_sum_and_weight(mode, packing):
    np.testing.assert_allclose(parts(packing, mode), WANT[mode], rtol=1e-6)


@pytest.mark.parametrize("mode", AGGREGATIONS)
def test_sums_of_rows_add_up_to_those_of_the_batch(mode):
    rows = [{name: value[i : i + 1] for name, value in TWO_ROWS.items()} for i in (0, 1)]
    added = np.sum([parts(row, mode) for row in rows], axis=0)
    np.testing.assert_allclose(added, WANT[mode], rtol=1e-6)


@pytest.mark.parametrize("mode", AGGREGATIONS)
def test_masked_tokens_give_no_gradient_and_no_nan(mode):
    mask, length = jnp.array(ONE_ROW["mask"]), jnp.array(ONE_ROW["response_len"])
    loss = jnp.where(mask > 0, 1.0, jnp.nan)

    def total(loss):
        return aggregate(loss, mask, length, mode=mode, max_response_len=10)[0]

    value, grad = jax.value_and_grad(total)(loss)
    assert np.isfinite(value)
    np.testing.assert_array_equal(grad[mask == 0], 0.0)
    assert np.all(np.asarray(grad[mask == 1]) > 0)


def test_an_unknown_name_is_an_error_that_lists_the_known_ones():
    with pytest.raises(ValueError, match=r"algorithm\.aggregation = 'mean'.*'token_mean'"):
        parts(ONE_ROW, "mean")


@pytest.mark.parametrize("mode", AGGREGATIONS)
def test_idle_sequences_have_the_weight_that_they_would_have_in_a_batch(mode):
    if mode == "token_sum":  # the divisor of the mini-batch, whatever it has
        assert sequences_weight([1, 3], mode=mode) == sequences_weight([], mode=mode) == 1
        return
    assert sequences_weight([1, 3], mode=mode) == WANT[mode][1]
    # two samples of one episode share its weight
    assert sequences_weight([1, 3], [0.25, 0.75], mode=mode) == (4 if mode == "token_mean" else 1)


def test_the_maximum_over_no_tokens_is_minus_infinity():
    assert masked_max(jnp.ones((1, 3)), jnp.zeros((1, 3))) == -jnp.inf
