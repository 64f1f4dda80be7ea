"""Advantage estimators on host arrays: P prompts with n samples each, or N responses of T tokens.

A response-level estimator gives one number per response, which applies to each of its tokens. A
token-level estimator (`gae`, `reinforce_plus_plus`, `distill`, `remax`, `gigpo`) gives one number
per token.
All arithmetic is float64: in float32 the mean of equal rewards has a rounding error, which division
by a small standard deviation would amplify.

Groups may have fewer than n samples: a missing one is NaN in `rewards`. It is in no statistic, and
its result has no meaning.
"""

import dataclasses
from collections.abc import Callable
from typing import Any, Literal

import numpy as np
from jaxtyping import Float, Int

from jaxrl.algorithms.role_advantages import hierarchical_grpo, rae

Groups = Float[np.ndarray, "P n"]
Tokens = Float[np.ndarray, "N T"]


def grpo(rewards: Groups, *, norm_adv_by_std: bool = True, eps: float = 1e-6) -> Groups:
    """A = (r - mean(r)) / (std(r) + eps) over each group, with the unbiased (n - 1) std.

    GRPO, section 4.1.2 (https://arxiv.org/abs/2402.03300). Without `norm_adv_by_std` it is
    `dr_grpo`. A group of equal rewards gives zeros. Raises ValueError for groups of one sample,
    which have no baseline.
    """
    r, centred = _centred("grpo", rewards)
    return _float32(centred / (_std(r) + eps) if norm_adv_by_std else centred)


def dr_grpo(rewards: Groups) -> Groups:
    """A = r - mean(r) over each group: Dr.GRPO (https://arxiv.org/abs/2503.20783).

    Dr.GRPO also aggregates by `seq_mean_token_sum_norm`. Raises ValueError for groups of one
    sample.
    """
    return _float32(_centred("dr_grpo", rewards)[1])


def rloo(rewards: Groups) -> Groups:
    """A_i = r_i - mean of the other n - 1 rewards = (r_i - mean(r)) n / (n - 1).

    RLOO (https://arxiv.org/abs/2402.14740). Raises ValueError for groups of one sample.
    """
    n = _counts(rewards)
    return _float32(_centred("rloo", rewards)[1] * n / np.maximum(n - 1, 1))


def opo(rewards: Groups, lengths: Int[np.ndarray, "P n"]) -> Groups:
    """A_i = r_i - Σ_j l_j r_j / Σ_j l_j with the lengths l in tokens.

    This baseline has the least variance if the squared gradient of a response grows in proportion
    to its length: OPO (https://arxiv.org/abs/2505.23585). Raises ValueError for groups of one
    sample.
    """
    _check_groups("opo", rewards)
    r = rewards.astype(np.float64)
    weights = np.where(np.isnan(r), 0.0, np.maximum(lengths, 1))
    # Relative to the group's lowest reward, so that equal rewards cancel exactly for any weights.
    relative = r - np.nanmin(r, axis=1, keepdims=True)
    weighted = np.nansum(weights * relative, axis=1, keepdims=True)
    return _float32(relative - weighted / weights.sum(axis=1, keepdims=True))


def gpg(rewards: Groups) -> Groups:
    """A = α (r - mean(r)) with α = P / (number of groups whose rewards differ).

    GPG with F_norm = 1 (https://arxiv.org/abs/2504.02546). α compensates for groups of equal
    rewards, which have no gradient and would only shrink the mean. Raises ValueError for groups of
    one sample.
    """
    r, centred = _centred("gpg", rewards)
    n_differ = int((np.nanmin(r, axis=1) != np.nanmax(r, axis=1)).sum())
    return _float32(centred * len(r) / max(n_differ, 1))


def grpo_batch_std(rewards: Groups, *, eps: float = 1e-6) -> Groups:
    """A = (r - mean(r)) / (S + eps): mean over the group, std S over all rewards of the step.

    Lite PPO (https://arxiv.org/abs/2508.08221); S is unbiased. The scale is that of the whole step,
    so it is not large for groups of almost equal rewards. Raises ValueError for groups of one
    sample.
    """
    r, centred = _centred("grpo_batch_std", rewards)
    return _float32(centred / (np.nanstd(r, ddof=1) + eps))


def max_rl(rewards: Groups) -> Groups:
    """A = (r - mean(r)) / mean(r) over each group, 0 if all rewards are 0.

    MaxRL (https://arxiv.org/abs/2602.02710): with rewards of 0 and 1 the gradient is that of the
    maximum likelihood objective truncated at order n, which gives a prompt of pass rate p a weight
    of about 1 / p. Raises ValueError for groups of one sample and for rewards below 0.
    """
    r, centred = _centred("max_rl", rewards)
    if np.nanmin(r) < 0:
        raise ValueError(
            f"max_rl divides by the mean reward of a prompt, but a reward is {np.nanmin(r):g}; "
            "give rewards of 0 or more (best 0 and 1), or set config.algorithm.advantage='grpo'"
        )
    mean = np.nanmean(r, axis=1, keepdims=True)
    return _float32(centred / np.where(mean > 0, mean, 1.0))


def flash_reinforce(rewards: Groups) -> Groups:
    """A = r - mean of all rewards of the step: FlashREINFORCE (https://github.com/NVIDIA-NeMo).

    It needs no group: with one sample per prompt, a step has as many prompts as samples.
    """
    r = rewards.astype(np.float64)
    return _float32(r - np.nanmean(r))


def gdpo(
    rewards: Groups,
    reward_parts: Float[np.ndarray, "K P n"],
    reward_weights: Float[np.ndarray, " K"],
    *,
    norm_adv_by_std: bool = True,
    eps: float = 1e-6,
) -> Groups:
    """A = X / (std(X) + eps) over the step, with X = Σ_k w_k (r_k - mean(r_k)) / (std(r_k) + eps).

    Each of K rewards is normalized over its group, so that none is lost next to one with a larger
    spread; then their weighted sum, whose mean is 0, is normalized over all responses of the step:
    GDPO (https://arxiv.org/abs/2601.05242). A reward without a score for a response (NaN) adds 0.
    `rewards` only says which samples there are. Raises ValueError for groups of one sample.
    """
    _check_groups("gdpo", rewards)
    r = reward_parts.astype(np.float64)
    scored = ~np.isnan(r)
    count = scored.sum(axis=2, keepdims=True)
    centred = np.where(scored, r, 0.0)
    centred = np.where(scored, centred - centred.sum(2, keepdims=True) / np.maximum(count, 1), 0.0)
    if norm_adv_by_std:
        variance = np.square(centred).sum(2, keepdims=True) / np.maximum(count - 1, 1)
        centred = centred / (np.sqrt(variance) + eps)
    total = np.where(np.isnan(rewards), np.nan, np.tensordot(reward_weights, centred, axes=1))
    return _float32(total / (np.nanstd(total, ddof=1) + eps))


def grpo_passk(rewards: Groups, *, norm_adv_by_std: bool = True, eps: float = 1e-6) -> Groups:
    """A = best - second-best reward for the best response of each group, 0 for the others.

    This is each response's contribution to the group's maximum: pass@k with k = n
    (https://arxiv.org/abs/2503.19595). `norm_adv_by_std` divides by std(r) + eps, as verl's
    grpo_passk does. If several responses share the best reward, all of them get 0. Raises
    ValueError for groups of one sample.
    """
    _check_groups("grpo_passk", rewards)
    r = rewards.astype(np.float64)
    best = np.nanargmax(r, axis=1)
    ordered = np.sort(np.where(np.isnan(r), -np.inf, r), axis=1)
    gain = ordered[:, -1] - ordered[:, -2]
    if norm_adv_by_std:
        gain = gain / (_std(r)[:, 0] + eps)
    return _float32(np.eye(r.shape[1])[best] * gain[:, None])


def online_dpo(task_groups: Groups, kl_penalties: Groups, *, kl_coef: float) -> Groups:
    """n β σ(-(m_best - m_worst)) for a group's best response, minus that for its worst, else 0.

    m = β log π / π_ref is the KL penalty of a response (`kl_penalties`), β = `kl_coef`. At a sum
    over tokens and a mean over responses, -A log π has the gradient of the DPO loss of the best
    and the worst response, as a mean over groups: online DPO (https://arxiv.org/abs/2402.04792).
    `task_groups` are the rewards without the penalty; a group of equal rewards gives zeros. Raises
    ValueError for groups of one sample.
    """
    _check_groups("online_dpo", task_groups)
    r, margins = task_groups.astype(np.float64), kl_penalties.astype(np.float64)
    groups, n = np.arange(len(r)), _counts(r)[:, 0]
    best, worst = np.nanargmax(r, axis=1), np.nanargmin(r, axis=1)
    differ = r[groups, best] > r[groups, worst]
    distance = np.clip(margins[groups, best] - margins[groups, worst], -500.0, 500.0)
    slope = np.where(differ, n * kl_coef / (1.0 + np.exp(distance)), 0.0)
    result = np.zeros(r.shape)
    result[groups, best] += slope
    result[groups, worst] -= slope
    return _float32(result)


def gigpo(
    rewards: Groups,
    places: tuple[Int[np.ndarray, " N"], Int[np.ndarray, " N"]],
    turn_rewards: Float[np.ndarray, "N U"],
    turn_anchors: Int[np.ndarray, "N U"],
    token_turns: Int[np.ndarray, "N T"],
    mask: Tokens,
    *,
    gamma: float,
    turn_weight: float,
    norm_adv_by_std: bool = True,
    eps: float = 1e-6,
) -> Tokens:
    """A_t = grpo(r) + ω (R_u - mean(R)) / (std(R) + eps), R_u = Σ_{v >= u} γ^(v - u) r_v.

    GiGPO, eq. 3 to 8 (https://arxiv.org/abs/2505.10978). u is the turn of token t. Its return is
    compared with those of all turns of the group that answered the same state, the anchor. ω is
    `turn_weight`; without `norm_adv_by_std` both terms have no division. A turn whose state has no
    other turn, or equal returns, gets the first term alone.

    `places` are (group, sample) of each response in `rewards`. `turn_anchors` numbers the states,
    so that those of different groups differ, and is -1 after the last turn. Raises ValueError for
    groups of one sample.
    """
    _check_groups("gigpo", rewards)
    of_episodes = grpo(rewards, norm_adv_by_std=norm_adv_by_std, eps=eps)[places]
    returns = _discounted(turn_rewards, gamma)
    states = np.unique(turn_anchors, return_inverse=True)[1].reshape(turn_anchors.shape)
    count = np.bincount(states.ravel())
    mean = np.bincount(states.ravel(), returns.ravel()) / count
    centred = returns - mean[states]
    lowest, highest = np.full(len(count), np.inf), np.full(len(count), -np.inf)
    np.minimum.at(lowest, states, returns)
    np.maximum.at(highest, states, returns)
    centred = np.where((lowest == highest)[states], 0.0, centred)  # without a rounding error
    if norm_adv_by_std:
        squares = np.bincount(states.ravel(), np.square(centred).ravel())
        centred = centred / (np.sqrt(squares / np.maximum(count - 1, 1))[states] + eps)
    of_turns = np.take_along_axis(centred, token_turns, axis=1)
    return _float32((of_episodes[:, None] + turn_weight * of_turns) * mask)


def remax(
    task_rewards: Float[np.ndarray, " N"],
    baselines: Float[np.ndarray, " N"],
    token_kl_rewards: Tokens,
    mask: Tokens,
) -> Tokens:
    """A_t = r - b + Σ_{s >= t} k_s with b the reward of the greedy response to the same prompt.

    ReMax, algorithm 1 (https://arxiv.org/abs/2310.10505). r is the reward without a KL; all samples
    of a prompt share b. k_s is minus the KL penalty of a token, which is part of the reward-to-go
    but not of b, as in verl's compute_remax_outcome_advantage. Without a KL in the reward, A is the
    same at every token.
    """
    gain = task_rewards.astype(np.float64) - baselines.astype(np.float64)
    return _float32((gain[:, None] + _discounted(token_kl_rewards * mask, 1.0)) * mask)


def reinforce_plus_plus_baseline(rewards: Groups, lengths: Int[np.ndarray, "P n"]) -> Groups:
    """A = whiten(r - mean(r)): group mean, whitening over all response tokens of the step.

    REINFORCE++-baseline (https://arxiv.org/abs/2501.03262). Raises ValueError for groups of one
    sample.
    """
    _, centred = _centred("reinforce_plus_plus_baseline", rewards)
    missing = np.isnan(centred)
    return _float32(_whiten(np.where(missing, 0, centred), np.where(missing, 0, lengths)))


def reinforce_plus_plus(token_rewards: Tokens, mask: Tokens, *, gamma: float) -> Tokens:
    """A = whiten(Σ_{s >= t} γ^(s - t) r_s) over all response tokens of the step.

    REINFORCE++ (https://arxiv.org/abs/2501.03262). `token_rewards` holds minus the KL penalty of
    each token, plus the response's reward at its last token. A row starts at the first response
    token.
    """
    returns = _discounted(token_rewards * mask, gamma)
    return _float32(_whiten(returns, mask) * mask)


def distill(token_kl_rewards: Tokens, mask: Tokens, *, gamma: float) -> Tokens:
    """A_t = Σ_{s >= t} γ^(s - t) r_s with r_s = log p(y_s) - log π(y_s), p the teacher.

    This is the policy gradient of the reverse KL on responses sampled from the policy. γ = 1 is
    MiniLLM, eq. 2 (https://arxiv.org/abs/2306.08543). γ = 0 uses each token's KL alone, as
    on-policy GKD does (eq. 4 with reverse KL and λ = 1, https://arxiv.org/abs/2306.13649). There is
    no whitening and no task reward.
    """
    return _float32(_discounted(token_kl_rewards * mask, gamma) * mask)


def optimal_token_baseline(
    rewards: Groups,
    places: tuple[Int[np.ndarray, " N"], Int[np.ndarray, " N"]],
    token_rewards: Tokens,
    score_norms: Tokens,
    mask: Tokens,
) -> Tokens:
    """A_t = G_t - B_t with B_t = Σ_i W_it G_it / Σ_i W_it over the group, G_t = Σ_{s >= t} r_s.

    W_t = Σ_{s <= t} w_s with w = 1 - 2 π + Σ π² (`score_norms`), the squared norm of the score
    function by the logits: the baseline of least variance at each token. The optimal token baseline
    (https://arxiv.org/abs/2602.07078); verl's optimal_token_baseline and, for episodes of several
    turns, tir_optimal_token_baseline. Beyond the length of all others, the longest response has no
    baseline, as in verl. `places` are (group, sample) of each response in `rewards`, which only
    says which samples there are. Raises ValueError for groups of one sample.
    """
    _check_groups("optimal_token_baseline", rewards)
    returns = _discounted(token_rewards * mask, 1.0)
    energy = np.cumsum(score_norms.astype(np.float64) * mask, axis=1) * mask
    result = np.zeros(returns.shape)
    for group in np.unique(places[0]):
        rows = np.flatnonzero(places[0] == group)
        inside, weight = mask[rows] > 0, energy[rows]
        compared = inside.sum(axis=0) > 1
        # Relative to the group's lowest return, so that equal returns cancel exactly.
        lowest = np.where(inside, returns[rows], np.inf).min(axis=0)
        lowest = np.where(compared, lowest, 0.0)
        relative = np.where(inside, returns[rows] - lowest, 0.0)
        total = np.maximum(weight.sum(axis=0), 1e-8)
        baseline = np.where(compared, (weight * relative).sum(axis=0) / total, 0.0)
        result[rows] = relative - baseline
    return _float32(result * mask)


def gae(
    token_rewards: Tokens, values: Tokens, mask: Tokens, *, gamma: float, lam: float
) -> tuple[Tokens, Tokens]:
    """(advantages, returns): A_t = Σ_k (γ λ)^k δ_{t+k}, δ_t = r_t + γ V_{t+1} - V_t; returns A + V.

    GAE, eq. 16 (https://arxiv.org/abs/1506.02438). A row starts at the first response token; the
    value after the last one is 0. The advantages are not whitened.
    """
    values = values.astype(np.float64) * mask
    following = np.concatenate([values[:, 1:], np.zeros_like(values[:, :1])], axis=1)
    delta = (token_rewards + gamma * following - values) * mask
    advantages = _discounted(delta, gamma * lam)
    return _float32(advantages), _float32((advantages + values) * mask)


def whiten(x: Tokens, mask: Tokens) -> Tokens:
    """(x - mean) / std over the unmasked tokens of all rows; 0 at masked tokens."""
    return _float32(_whiten(x.astype(np.float64), mask) * mask)


def _whiten(x: np.ndarray, weight: np.ndarray, eps: float = 1e-8) -> np.ndarray:
    weight = weight.astype(np.float64)
    total = max(weight.sum(), 1.0)
    centred = x - (x * weight).sum() / total
    variance = (np.square(centred) * weight).sum() / max(total - 1.0, 1.0)
    if variance <= eps * eps:  # equal numbers: only rounding errors are left
        return np.zeros_like(centred)
    return centred / np.sqrt(variance + eps)


def _discounted(x: np.ndarray, factor: float) -> np.ndarray:
    """y_t = x_t + factor y_{t+1}."""
    out = np.zeros(x.shape, np.float64)
    carry = np.zeros(x.shape[0], np.float64)
    for t in reversed(range(x.shape[1])):
        carry = x[:, t] + factor * carry
        out[:, t] = carry
    return out


def _centred(name: str, rewards: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    _check_groups(name, rewards)
    r = rewards.astype(np.float64)
    return r, r - np.nanmean(r, axis=1, keepdims=True)


def _std(r: np.ndarray) -> np.ndarray:
    return np.nanstd(r, axis=1, ddof=1, keepdims=True)


def _counts(rewards: np.ndarray) -> np.ndarray:
    return (~np.isnan(rewards)).sum(axis=1, keepdims=True)


def _check_groups(name: str, rewards: np.ndarray) -> None:
    if (_counts(rewards) < 2).any():
        raise ValueError(
            f"{name} compares the samples of a prompt, but there is 1; set config.rollout.n >= 2"
        )


def _float32(x: np.ndarray) -> np.ndarray:
    return x.astype(np.float32)


@dataclasses.dataclass(frozen=True)
class Advantage:
    """One row of `ADVANTAGES`: an estimator, what it reads and what it requires."""

    function: Callable[..., Any]
    inputs: tuple[str, ...]  # fields of EstimatorInputs (trainer/phases/advantage.py), in order
    hyper_parameters: tuple[str, ...] = ()  # keys of config.algorithm
    level: Literal["response", "token"] = "response"  # result [P, n], or [N, T]
    needs_group: bool = False  # compares the samples of a prompt: rollout.n >= 2
    needs_critic: bool = False  # gives (advantages, returns); the program whitens the advantages


ADVANTAGES = {
    "grpo": Advantage(grpo, ("rewards",), ("norm_adv_by_std",), needs_group=True),
    "dr_grpo": Advantage(dr_grpo, ("rewards",), needs_group=True),
    "rloo": Advantage(rloo, ("rewards",), needs_group=True),
    "reinforce_plus_plus": Advantage(
        reinforce_plus_plus, ("token_rewards", "mask"), ("gamma",), level="token"
    ),
    "reinforce_plus_plus_baseline": Advantage(
        reinforce_plus_plus_baseline, ("rewards", "lengths"), needs_group=True
    ),
    "remax": Advantage(
        remax, ("task_rewards", "baselines", "token_kl_rewards", "mask"), level="token"
    ),
    "opo": Advantage(opo, ("rewards", "lengths"), needs_group=True),
    "gpg": Advantage(gpg, ("rewards",), needs_group=True),
    "grpo_passk": Advantage(grpo_passk, ("rewards",), ("norm_adv_by_std",), needs_group=True),
    "grpo_batch_std": Advantage(grpo_batch_std, ("rewards",), needs_group=True),
    "max_rl": Advantage(max_rl, ("rewards",), needs_group=True),
    "gdpo": Advantage(
        gdpo,
        ("rewards", "reward_parts", "reward_weights"),
        ("norm_adv_by_std",),
        needs_group=True,
    ),
    "flash_reinforce": Advantage(flash_reinforce, ("rewards",)),
    "online_dpo": Advantage(
        online_dpo, ("task_groups", "kl_penalties"), ("kl_coef",), needs_group=True
    ),
    "rae": Advantage(rae, ("role_rewards", "role_baselines", "mask"), level="token"),
    "hierarchical_grpo": Advantage(
        hierarchical_grpo,
        ("role_rewards", "places", "roles", "mask"),
        ("episode_roles",),
        level="token",
    ),
    "gigpo": Advantage(
        gigpo,
        ("rewards", "places", "turn_rewards", "turn_anchors", "token_turns", "mask"),
        ("gamma", "turn_weight", "norm_adv_by_std"),
        level="token",
        needs_group=True,
    ),
    "optimal_token_baseline": Advantage(
        optimal_token_baseline,
        ("rewards", "places", "token_rewards", "score_norms", "mask"),
        level="token",
        needs_group=True,
    ),
    "gae": Advantage(
        gae,
        ("token_rewards", "values", "mask"),
        ("gamma", "lam"),
        level="token",
        needs_critic=True,
    ),
    "distill": Advantage(distill, ("token_kl_rewards", "mask"), ("gamma",), level="token"),
}
