"""Advantages on hand-made rewards, and against a slow reference over random episodes."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from jaxrl.algorithms.advantages import (
    ADVANTAGES,
    distill,
    dr_grpo,
    flash_reinforce,
    gae,
    gdpo,
    gigpo,
    gpg,
    grpo,
    grpo_batch_std,
    grpo_passk,
    max_rl,
    online_dpo,
    opo,
    optimal_token_baseline,
    reinforce_plus_plus,
    reinforce_plus_plus_baseline,
    remax,
    rloo,
    whiten,
)
from jaxrl.algorithms.losses.preference import dpo

MISSING = float("nan")


def rewards(*rows):
    return np.array(rows, np.float32)


def lens(*rows):
    return np.array(rows, np.int64)


def test_grpo_divides_by_the_unbiased_std_of_the_group():
    # mean 1, deviations (-1, 0, 1), std = sqrt((1 + 0 + 1) / 2) = 1
    got = grpo(rewards([0, 1, 2]), eps=0.0)
    np.testing.assert_allclose(got, [[-1, 0, 1]], rtol=1e-6)
    # mean 0.25, deviations (-.25, -.25, -.25, .75), std = sqrt((3 * .0625 + .5625) / 3) = .5;
    # with eps 0.5 the divisor is 1
    got = grpo(rewards([0, 0, 0, 1]), eps=0.5)
    np.testing.assert_allclose(got, [[-0.25, -0.25, -0.25, 0.75]], rtol=1e-6)


def test_dr_grpo_is_reward_minus_mean_and_equals_grpo_without_std():
    some = rewards([0, 4], [1, 2])
    np.testing.assert_allclose(dr_grpo(some), [[-2, 2], [-0.5, 0.5]], rtol=1e-6)
    np.testing.assert_array_equal(grpo(some, norm_adv_by_std=False), dr_grpo(some))


def test_rloo_compares_with_the_mean_of_the_others():
    # 0 - (3 + 6) / 2, 3 - (0 + 6) / 2, 6 - (0 + 3) / 2
    np.testing.assert_allclose(rloo(rewards([0, 3, 6])), [[-4.5, 0, 4.5]], rtol=1e-6)


def test_opo_weighs_the_baseline_by_length():
    # baseline (10 * 1 + 30 * 0) / 40 = 0.25
    got = opo(rewards([1, 0]), lens([10, 30]))
    np.testing.assert_allclose(got, [[0.75, -0.25]], rtol=1e-6)


def test_gpg_rescales_for_groups_without_a_gradient():
    # one of three groups differs: alpha = 3; mean of it 0.5
    got = gpg(rewards([1, 0], [1, 1], [0, 0]))
    np.testing.assert_allclose(got, [[1.5, -1.5], [0, 0], [0, 0]], rtol=1e-6)
    np.testing.assert_array_equal(gpg(rewards([1, 1], [0, 0])), 0.0)


def test_passk_rewards_only_the_gain_of_the_best_response_over_the_second():
    got = grpo_passk(rewards([0, 3, 1], [2, 2, 0]), norm_adv_by_std=False)
    # 3 - 1; the second group has two best responses: without one, the maximum is the same
    np.testing.assert_allclose(got, [[0, 2, 0], [0, 0, 0]], rtol=1e-6)
    # mean 1, std = sqrt((1 + 1 + 4 + 0) / 3) = sqrt 2: 2 / sqrt 2
    got = grpo_passk(rewards([0, 0, 3, 1]), eps=0.0)
    np.testing.assert_allclose(got, [[0, 0, 2 / 2**0.5, 0]], rtol=1e-6)


def test_the_batch_std_is_that_of_all_rewards_of_the_step():
    # group means 2 and 2; all rewards 1, 3, 2, 2: mean 2, std = sqrt(2 / 3)
    got = grpo_batch_std(rewards([1, 3], [2, 2]), eps=0.0)
    np.testing.assert_allclose(got, [[-(1.5**0.5), 1.5**0.5], [0, 0]], rtol=1e-6)


def test_max_rl_divides_by_the_mean_of_the_group():
    # pass rates 1/4 and 1/2: (1 - 1/4) / (1/4) = 3, -1; (1 - 1/2) / (1/2) = 1, -1
    got = max_rl(rewards([0, 0, 0, 1], [0, 1, 0, 1], [0, 0, 0, 0]))
    np.testing.assert_allclose(got, [[-1, -1, -1, 3], [-1, 1, -1, 1], [0, 0, 0, 0]], rtol=1e-6)


def test_max_rl_refuses_rewards_below_zero():
    with pytest.raises(ValueError, match="a reward is -1; give rewards of 0 or more"):
        max_rl(rewards([-1, 1]))


def test_flash_reinforce_compares_with_the_mean_of_the_step():
    # one sample of each of four prompts: mean 3 / 4
    np.testing.assert_allclose(
        flash_reinforce(rewards([1], [0], [2], [0])), [[0.25], [-0.75], [1.25], [-0.75]], rtol=1e-6
    )
    got = flash_reinforce(rewards([1, MISSING], [0, 2]))
    np.testing.assert_allclose(got, [[0, MISSING], [-1, 1]], rtol=1e-6)


def test_gdpo_normalizes_each_reward_before_the_sum():
    # a reward of 0 and 1 and one of 0 and 100, both with std of (x / 2)^.5: +-(1 / 2)^.5 each.
    # Weights 1 and .5. Group 1: (.7071 * 1.5, -.7071 * 1.5); group 2, opposite: (.7071 * .5, -...)
    first, second = rewards([1, 0], [1, 0]), rewards([100, 0], [0, 100])
    got = gdpo(first + second, np.stack([first, second]), np.array([1.0, 0.5]), eps=0.0)
    # X / .7071 = 1.5, -1.5, .5, -.5: std = sqrt(5 / 3)
    want = np.array([[1.5, -1.5], [0.5, -0.5]]) / (5 / 3) ** 0.5
    np.testing.assert_allclose(got, want, rtol=1e-6)
    got = gdpo(first, np.stack([first, second]), np.array([1.0, 0.5]), norm_adv_by_std=False)
    # centred: .5 and 50, so X = 25.5, -25.5, -24.5, 24.5: std = sqrt((2 * 650.25 + 2 * 600.25) / 3)
    want = np.array([[25.5, -25.5], [-24.5, 24.5]]) / (2501 / 3) ** 0.5
    np.testing.assert_allclose(got, want, rtol=1e-5)


def test_a_reward_that_scores_only_some_responses_compares_these_alone():
    # the second reward scores two of three: +-1 / 2^.5; the first is equal for all
    parts = np.stack([rewards([1, 1, 1]), rewards([4, MISSING, 2])])
    got = gdpo(rewards([5, 1, 3]), parts, np.ones(2), eps=0.0 + 1e-12)
    # X = .7071, 0, -.7071: std = sqrt(1 / 2)
    np.testing.assert_allclose(got, [[1, 0, -1]], atol=1e-6)


def test_remax_subtracts_the_reward_of_the_greedy_response():
    kl, mask = rewards([0, 0], [0, 0]), rewards([1, 1], [1, 0])
    got = remax(np.array([1, 0], np.float32), np.array([0.25, 1.0], np.float32), kl, mask)
    np.testing.assert_allclose(got, [[0.75, 0.75], [-1.0, 0]], rtol=1e-6)


def test_remax_adds_the_kl_rewards_from_each_token_on_but_not_those_of_the_baseline():
    # r - b = 1 - 0.25; KL rewards -1, -2, -4: -7, -6, -4 from each token on
    kl, mask = rewards([-1, -2, -4], [-1, -2, -4]), rewards([1, 1, 1], [1, 1, 0])
    got = remax(np.array([1, 1], np.float32), np.array([0.25, 0.25], np.float32), kl, mask)
    np.testing.assert_allclose(got, [[-6.25, -5.25, -3.25], [-2.25, -1.25, 0]], rtol=1e-6)


def test_reinforce_plus_plus_baseline_whitens_over_all_tokens():
    # centred 1 (2 tokens), -1 (2), 0 (1), 0 (1): token mean 0, variance 4 / 5
    got = reinforce_plus_plus_baseline(rewards([3, 1], [2, 2]), lens([2, 2], [1, 1]))
    want = 1 / 0.8**0.5
    np.testing.assert_allclose(got, [[want, -want], [0, 0]], atol=1e-6)


def test_reinforce_plus_plus_discounts_from_the_end():
    token_rewards, mask = rewards([0, 0, 4], [2, 0, 0]), rewards([1, 1, 1], [1, 0, 0])
    # returns with gamma 1/2: 1, 2, 4 and 2; mean 9/4, squares (25 + 1 + 49 + 1) / 16 = 76/16,
    # over 3
    got = reinforce_plus_plus(token_rewards, mask, gamma=0.5)
    std = (76 / 16 / 3) ** 0.5
    want = np.array([[1 - 2.25, 2 - 2.25, 4 - 2.25], [2 - 2.25, 0, 0]]) / std
    np.testing.assert_allclose(got, want, rtol=1e-5)


def test_gae_by_hand():
    # gamma 1/2, lambda 1/2: delta_1 = 1 - 3 = -2; delta_0 = 0 + 3/2 - 1 = 1/2
    # A_1 = -2, A_0 = 1/2 + 1/4 * -2 = 0; returns A + V
    got, returns = gae(rewards([0, 1]), rewards([1, 3]), rewards([1, 1]), gamma=0.5, lam=0.5)
    np.testing.assert_allclose(got, [[0, -2]], rtol=1e-6)
    np.testing.assert_allclose(returns, [[1, 1]], rtol=1e-6)


def test_distill_by_hand():
    # log p - log π of three tokens: -1, 2, 4;
    # γ = 0.5: -1 + 0.5 (2 + 0.5 * 4) = 1, 2 + 0.5 * 4 = 4, 4
    of_tokens, mask = rewards([-1, 2, 4]), rewards([1, 1, 1])
    np.testing.assert_allclose(distill(of_tokens, mask, gamma=0.5), [[1, 4, 4]])
    np.testing.assert_allclose(distill(of_tokens, mask, gamma=0.0), of_tokens)
    np.testing.assert_allclose(distill(of_tokens, rewards([1, 1, 0]), gamma=1.0), [[1, 2, 0]])


def slow_gae(r, v, gamma, lam):
    """Eq. 16 literally: a double loop over the episode."""
    v = [*v, 0.0]
    delta = [r[t] + gamma * v[t + 1] - v[t] for t in range(len(r))]
    return [
        sum((gamma * lam) ** k * delta[t + k] for k in range(len(r) - t)) for t in range(len(r))
    ]


@pytest.mark.parametrize("seed", range(5))
def test_gae_of_random_episodes_equals_the_double_loop_and_ignores_padding(seed):
    rng = np.random.default_rng(seed)
    lengths = rng.integers(1, 12, 6)
    mask = (np.arange(12) < lengths[:, None]).astype(np.float32)
    r, v = rng.standard_normal((2, 6, 12)).astype(np.float32)
    gamma, lam = rng.uniform(0.8, 1.0, 2)
    got, returns = gae(r, v, mask, gamma=gamma, lam=lam)
    for row, n in enumerate(lengths):
        want = slow_gae(r[row, :n], v[row, :n], gamma, lam)
        np.testing.assert_allclose(got[row, :n], want, rtol=1e-4, atol=1e-5)
        np.testing.assert_allclose(returns[row, :n], want + v[row, :n], rtol=1e-4, atol=1e-5)
        assert not got[row, n:].any() and not returns[row, n:].any()


def test_lambda_one_gives_the_return_minus_the_value():
    r, v = rewards([1, 2, 3]), rewards([5, 5, 5])
    got, returns = gae(r, v, np.ones((1, 3), np.float32), gamma=1.0, lam=1.0)
    np.testing.assert_allclose(returns, [[6, 5, 3]], rtol=1e-6)
    np.testing.assert_allclose(got, [[1, 0, -2]], rtol=1e-6)


def test_whitened_tokens_have_mean_zero_and_variance_one():
    x, mask = rewards([1, 2, 99], [4, 5, 6]), rewards([1, 1, 0], [1, 1, 1])
    got = whiten(x, mask)
    assert got[0, 2] == 0
    kept = got[mask > 0]
    np.testing.assert_allclose([kept.mean(), kept.var(ddof=1)], [0, 1], atol=1e-6)


LENGTHS = lens([1, 2, 3, 4], [4, 3, 2, 1])


# Two samples of two turns. Their first turns answer the same state 0, their second ones differ.
TURNS = dict(
    rewards=rewards([1, 0]),
    places=(np.array([0, 0]), np.array([0, 1])),
    turn_rewards=np.array([[0.0, 1.0], [0.0, 0.0]]),
    turn_anchors=np.array([[0, 1], [0, 2]]),
    token_turns=np.array([[0, 0, 1], [0, 1, 0]]),
    mask=np.array([[1, 1, 1], [1, 1, 0]], np.float32),
)


def test_gigpo_adds_the_comparison_of_turns_from_the_same_state():
    # Returns with gamma 0.5: (0.5, 1) and (0, 0). State 0: 0.5 and 0, deviations 0.25 and -0.25;
    # states 1 and 2 have one turn each. Of the episodes: 0.5 and -0.5.
    got = gigpo(**TURNS, gamma=0.5, turn_weight=2.0, norm_adv_by_std=False)
    np.testing.assert_allclose(got, [[1, 1, 0.5], [-1, -0.5, 0]], rtol=1e-6)


def test_gigpo_divides_both_terms_by_their_standard_deviation():
    # sqrt(1/2) of the episodes, 0.5 sqrt(1/2) of state 0: 0.5^0.5 each
    got = gigpo(**TURNS, gamma=0.5, turn_weight=1.0, eps=1e-12)
    half = 0.5**0.5
    np.testing.assert_allclose(got, [[2 * half, 2 * half, half], [-2 * half, -half, 0]], rtol=1e-6)


def test_gigpo_without_a_weight_is_grpo():
    got = gigpo(**TURNS, gamma=0.5, turn_weight=0.0)
    np.testing.assert_array_equal(got, grpo(TURNS["rewards"])[0][:, None] * TURNS["mask"])


def test_gigpo_equals_a_loop_over_states():
    rng = np.random.default_rng(0)
    n, n_turns, n_tokens = 6, 4, 9
    anchors = rng.integers(0, 5, (n, n_turns)) + 5 * (np.arange(n) // 3)[:, None]
    n_of = rng.integers(1, n_turns + 1, n)
    anchors[np.arange(n_turns) >= n_of[:, None]] = -1
    turns = np.sort(rng.integers(0, n_of[:, None], (n, n_tokens)), axis=1)
    turn_rewards = np.where(anchors >= 0, rng.normal(size=(n, n_turns)), 0.0)
    r = turn_rewards.sum(1).reshape(2, 3).astype(np.float32)
    got = gigpo(
        r,
        (np.arange(n) // 3, np.arange(n) % 3),
        turn_rewards,
        anchors,
        turns,
        np.ones((n, n_tokens), np.float32),
        gamma=0.9,
        turn_weight=0.7,
    )
    returns = np.array(
        [
            [sum(0.9 ** (v - u) * row[v] for v in range(u, 4)) for u in range(4)]
            for row in turn_rewards
        ]
    )
    for i in range(n):
        for t in range(n_tokens):
            group = returns[anchors == anchors[i, turns[i, t]]]
            deviation = returns[i, turns[i, t]] - group.mean()
            std = group.std(ddof=1) if len(group) > 1 else 0.0
            own = r[i // 3]
            want = (own[i % 3] - own.mean()) / (own.std(ddof=1) + 1e-6)
            np.testing.assert_allclose(
                got[i, t], want + 0.7 * deviation / (std + 1e-6), rtol=1e-4, atol=1e-5
            )


def gigpo_of(r):
    """`gigpo` of episodes of one turn each, without the comparison of turns."""
    places = np.nonzero(np.ones(r.shape))
    turns = np.zeros((r.size, 1), np.int64)
    found = gigpo(
        r,
        places,
        np.nan_to_num(r).reshape(-1, 1),
        turns,
        turns,
        np.ones((r.size, 1), np.float32),
        gamma=1.0,
        turn_weight=0.0,
    )
    return found.reshape(r.shape)


def optimal_token_baseline_of(r):
    """`optimal_token_baseline` of responses of one token, whose gradients have equal norms."""
    places = np.nonzero(~np.isnan(r))
    ones = np.ones((len(places[0]), 1), np.float32)
    found = np.full(r.shape, np.nan, np.float32)
    found[places] = optimal_token_baseline(r, places, r[places][:, None], ones, ones)[:, 0]
    return found


def gdpo_of(r):
    """`gdpo` of two rewards with different spreads, whose order is that of their sum."""
    return gdpo(r, np.stack([r, 3 * r]), np.array([1.0, 0.5]))


GROUPS = {
    "grpo_batch_std": grpo_batch_std,
    "max_rl": max_rl,
    "gdpo": gdpo_of,
    "gigpo": gigpo_of,
    "online_dpo": lambda r: online_dpo(r, np.zeros(r.shape), kl_coef=1.0),
    "optimal_token_baseline": optimal_token_baseline_of,
    "grpo": grpo,
    "dr_grpo": dr_grpo,
    "rloo": rloo,
    "opo": lambda r: opo(r, LENGTHS[: len(r), : r.shape[1]]),
    "gpg": gpg,
    "grpo_passk": grpo_passk,
    "reinforce_plus_plus_baseline": lambda r: reinforce_plus_plus_baseline(
        r, LENGTHS[: len(r), : r.shape[1]]
    ),
}


@pytest.mark.parametrize("name", GROUPS)
def test_advantages_of_a_group_are_ordered_by_reward(name):
    got = GROUPS[name](rewards([0, 1, 2, 5]))[0]
    assert got[3] > 0 and got[3] == got.max()
    assert got[0] == got.min() and (got[0] < 0 or name == "grpo_passk")


@pytest.mark.parametrize("name", GROUPS)
def test_equal_rewards_give_no_advantage_even_if_their_mean_is_rounded(name):
    assert not GROUPS[name](np.full((2, 3), 0.1, np.float32)).any()


def test_online_dpo_has_the_gradient_of_dpo_on_the_best_and_the_worst_response():
    # m = β log π / π_ref: m_best - m_worst = 1.0 - 0.3; 3 β σ(-0.7) = 0.497718 with β = 0.5; the
    # second group has equal rewards
    task = rewards([0, 2, 1], [1, 1, 1])
    margins = np.array([[0.3, 1.0, 9.0], [5.0, 1.0, 2.0]])
    found = online_dpo(task, margins, kl_coef=0.5)
    np.testing.assert_allclose(found, [[-0.497718, 0.497718, 0], [0, 0, 0]], rtol=1e-5)
    # the mean over three responses of -A log π, against the loss of the pair
    ratios = jnp.array([1.0, 0.3]) / 0.5
    slope = jax.grad(lambda r: dpo(r[:1], r[1:], beta=0.5)[0])(ratios)
    np.testing.assert_allclose(slope, [-found[0, 1] / 3, -found[0, 0] / 3], rtol=1e-5)
    far = np.array([[2000.0, 0.0, 0.0], [0.0] * 3])
    assert online_dpo(task, far, kl_coef=0.5)[0, 1] == 1.5


def test_the_optimal_token_baseline_weighs_returns_by_the_energy_so_far():
    # rewards 1 and 0 at the ends; W = 1, 3 and 1, 2, 4: B_1 = 1 / 2, B_2 = 3 / (3 + 2) = 3/5; the
    # third token of the second response is compared with none, so that its return stays: 0
    norms = np.array([[1, 2, 9], [1, 1, 2]], np.float32)
    mask = np.array([[1, 1, 0], [1, 1, 1]], np.float32)
    token_rewards = np.array([[0, 1, 0], [0, 0, 0]], np.float32)
    places = np.array([0, 0]), np.array([0, 1])
    found = optimal_token_baseline(rewards([1, 0]), places, token_rewards, norms, mask)
    np.testing.assert_allclose(found, [[0.5, 0.4, 0], [-0.5, -0.6, 0]], rtol=1e-6)


@pytest.mark.parametrize("name", ["grpo", "dr_grpo", "rloo", "opo", "grpo_passk", "max_rl"])
def test_groups_are_independent(name):
    both = GROUPS[name](rewards([0, 1, 2, 2], [5, 5, 8, 1]))
    np.testing.assert_array_equal(both[:1], GROUPS[name](rewards([0, 1, 2, 2])))


@pytest.mark.parametrize("name", GROUPS)
def test_a_missing_sample_changes_no_advantage_of_the_others(name):
    full = rewards([0.1, 5, 2], [1, 3, 3], [0.1, 0.1, 0.1])
    holes = rewards([0.1, 5, MISSING, 2], [MISSING, 1, 3, 3], [0.1, 0.1, 0.1, MISSING])
    there = ~np.isnan(holes)
    lengths = lens([1, 2, 9, 3], [9, 3, 2, 1], [2, 2, 2, 9])
    with_lengths = {"opo": opo, "reinforce_plus_plus_baseline": reinforce_plus_plus_baseline}
    if name in with_lengths:
        got = with_lengths[name](holes, lengths)[there]
        want = with_lengths[name](full, lengths[there].reshape(3, 3))
    else:
        got, want = GROUPS[name](holes)[there], GROUPS[name](full)
    np.testing.assert_allclose(got.reshape(3, 3), want, rtol=1e-6, atol=1e-7)
    np.testing.assert_array_equal(got == 0, want.reshape(-1) == 0)


@pytest.mark.parametrize("name", GROUPS)
def test_a_group_with_one_sample_left_is_an_error(name):
    with pytest.raises(ValueError, match=f"{name} compares"):
        GROUPS[name](rewards([1, 0, 2], [2, MISSING, MISSING]))


@pytest.mark.parametrize("name", GROUPS)
def test_a_group_of_one_is_an_error_that_says_what_to_set(name):
    with pytest.raises(ValueError, match=rf"{name} compares.*rollout\.n >= 2"):
        GROUPS[name](rewards([1], [2]))


@pytest.mark.parametrize("name", ADVANTAGES)
def test_the_table_marks_the_estimators_that_need_groups(name):
    assert ADVANTAGES[name].needs_group == (name in GROUPS)
