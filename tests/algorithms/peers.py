"""NumPy ports of the algorithms of verl, OpenRLHF and TRL, written from their papers and docs.

Everything is float64 on padded rows [N, T], response n and token t, as these projects have it.
`mask` is 1 at the tokens that the policy sampled: 0 at observations within a response and at
padding after it. Nothing here comes from jaxrl. A gradient is a central difference; `sg` are the
logprobs that a stop-gradient sees.
"""

import dataclasses
from collections.abc import Callable

import numpy as np

Rows = np.ndarray  # float64 [N, T]


@dataclasses.dataclass(frozen=True)
class Responses:
    """A batch of N responses to N / n prompts; the n responses of a prompt are adjacent."""

    mask: Rows
    logp: Rows  # of the current policy
    old_logp: Rows  # of the policy at the start of the step
    rollout_logp: Rows  # of the engine
    ref_logp: Rows
    advantages: Rows
    selected: Rows


def gradient(loss: Callable[[Rows], float], logp: Rows, eps: float = 1e-6) -> Rows:
    """d loss / d logp of every token, by central differences."""
    slopes = np.zeros_like(logp)
    for at in np.ndindex(logp.shape):
        step = np.zeros_like(logp)
        step[at] = eps
        slopes[at] = (loss(logp + step) - loss(logp - step)) / (2 * eps)
    return slopes


def mean_of_responses(x: Rows, mask: Rows) -> Rows:
    """Mean over the tokens of each response, [N, 1]."""
    return (x * mask).sum(1, keepdims=True) / mask.sum(1, keepdims=True)


# Aggregation: verl's loss_agg_mode; TRL's loss_type dapo / grpo / dr_grpo; OpenRLHF's token mean


def token_mean(loss: Rows, mask: Rows, longest: int) -> float:
    return (loss * mask).sum() / mask.sum()


def token_sum(loss: Rows, mask: Rows, longest: int) -> float:
    """verl's token-sum."""
    return (loss * mask).sum()


def seq_mean_token_mean(loss: Rows, mask: Rows, longest: int) -> float:
    return mean_of_responses(loss, mask).mean()


def seq_mean_token_sum(loss: Rows, mask: Rows, longest: int) -> float:
    return (loss * mask).sum(1).mean()


def seq_mean_token_sum_norm(loss: Rows, mask: Rows, longest: int) -> float:
    return (loss * mask).sum(1).mean() / longest


AGGREGATIONS = {
    "token_mean": token_mean,
    "token_sum": token_sum,
    "seq_mean_token_mean": seq_mean_token_mean,
    "seq_mean_token_sum": seq_mean_token_sum,
    "seq_mean_token_sum_norm": seq_mean_token_sum_norm,
}


# Policy losses: (logp, sg(logp), batch, low, high) -> loss per token


def _surrogate(ratio: Rows, b: Responses, low: float, high: float) -> Rows:
    return -np.minimum(ratio * b.advantages, np.clip(ratio, 1 - low, 1 + high) * b.advantages)


def _ratio(logp: Rows, b: Responses) -> Rows:
    return np.exp(np.clip(logp - b.old_logp, -20, 20))


def ppo_clip(logp, sg, b, low, high):
    """OpenRLHF's and TRL's loss."""
    return _surrogate(_ratio(logp, b), b, low, high)


def dual_clip(logp, sg, b, low, high):
    """verl's vanilla loss, OpenRLHF's with dual_clip = 3."""
    loss = ppo_clip(logp, sg, b, low, high)
    return np.where(b.advantages < 0, np.minimum(loss, -3.0 * b.advantages), loss)


def policy_gradient(logp, sg, b, low, high):
    """verl's gpg."""
    return -b.advantages * logp


def gspo(logp, sg, b, low, high):
    """OpenRLHF's gspo; TRL with importance_sampling_level = sequence."""
    return _surrogate(np.exp(mean_of_responses(logp - b.old_logp, b.mask)), b, low, high)


def gspo_token(logp, sg, b, low, high):
    """verl's gspo."""
    log_ratio = mean_of_responses(sg - b.old_logp, b.mask) + logp - sg
    return _surrogate(np.exp(np.minimum(log_ratio, 10.0)), b, low, high)


def cispo(logp, sg, b, low, high):
    """verl's cispo."""
    return -np.clip(_ratio(sg, b), 1 - low, 1 + high) * b.advantages * logp


def gmpo(logp, sg, b, low, high):
    """verl's geo_mean."""
    sign, d = np.sign(b.advantages), logp - b.old_logp
    least = sign * np.minimum(sign * d, sign * np.clip(d, -low, high))
    return -mean_of_responses(b.advantages, b.mask) * np.exp(mean_of_responses(least, b.mask))


def sapo(logp, sg, b, low, high):
    """verl's and TRL's sapo, with their default temperatures 1 and 1.05."""
    tau = np.where(b.advantages > 0, 1.0, 1.05)
    return -4 / tau / (1 + np.exp(-tau * (_ratio(logp, b) - 1))) * b.advantages


def clip_cov(logp, sg, b, low, high):
    """verl's clip_cov for given tokens."""
    return _surrogate(_ratio(logp, b), b, low, high) * (1 - b.selected)


def kl_cov(logp, sg, b, low, high):
    """verl's kl_cov for given tokens, with ppo_kl_coef = 1."""
    return -_ratio(logp, b) * b.advantages + b.selected * np.abs(logp - b.old_logp)


def _trust_region(divergence, logp, sg, b, low, high):
    """Kept unless the probability has moved too far in the direction of the advantage."""
    up = (sg > b.old_logp) & (divergence > high)
    down = (sg < b.old_logp) & (divergence > low)
    weight = np.minimum(np.exp(sg - b.old_logp), 20.0)
    return -weight * b.advantages * logp * ~np.where(b.advantages > 0, up, down)


def dppo_tv(logp, sg, b, low, high):
    """verl's dppo_tv, with the paper's large bound of the ratio."""
    return _trust_region(np.abs(np.exp(sg) - np.exp(b.old_logp)), logp, sg, b, low, high)


def dppo_kl(logp, sg, b, low, high):
    """verl's dppo_kl."""
    p, q = np.exp(sg), np.exp(b.old_logp)
    binary = q * np.log(q / p) + (1 - q) * np.log((1 - q) / (1 - p))
    return _trust_region(binary, logp, sg, b, low, high)


def dro(logp, sg, b, low, high):
    """verl's and Tinker's dro with beta = 0.3."""
    return -(logp * b.advantages - 0.15 * (logp - b.old_logp) ** 2)


def vespo(logp, sg, b, low, high):
    """TRL's vespo with its defaults."""
    log_w = ((sg - b.old_logp) * b.mask).sum(1, keepdims=True)
    k, decay = np.where(b.advantages >= 0, 2.0, 3.0), np.where(b.advantages >= 0, 3.0, 2.0)
    return -np.exp(decay + k * log_w - decay * np.exp(log_w)) * b.advantages * logp


POLICY_LOSSES = {
    f.__name__: f
    for f in (
        ppo_clip,
        dual_clip,
        policy_gradient,
        gspo,
        gspo_token,
        cispo,
        gmpo,
        sapo,
        clip_cov,
        kl_cov,
        dppo_tv,
        dppo_kl,
        dro,
        vespo,
    )
}


# KL in the loss: (logp, sg(logp), batch) -> KL per token


def _k2(logp, b):
    return (logp - b.ref_logp) ** 2 / 2


def _k3(logp, b):
    return np.exp(b.ref_logp - logp) - (b.ref_logp - logp) - 1


def _plus(value):
    """verl's names with +: the value of the estimator, the gradient of k2."""
    return lambda logp, sg, b: _k2(logp, b) - _k2(sg, b) + value(sg, b)


KLS = {
    "k1": lambda logp, sg, b: logp - b.ref_logp,
    "abs": lambda logp, sg, b: np.abs(logp - b.ref_logp),
    "k2": lambda logp, sg, b: _k2(logp, b),
    "k3": lambda logp, sg, b: _k3(logp, b),
    # TRL's use_bias_correction_kl
    "k3_unbiased": lambda logp, sg, b: _k3(logp, b) * np.exp(logp - b.old_logp),
    "k1+": _plus(lambda logp, b: logp - b.ref_logp),
    "abs+": _plus(lambda logp, b: np.abs(logp - b.ref_logp)),
    "k2+": lambda logp, sg, b: _k2(logp, b),
    "k3+": _plus(_k3),
}


# Off-policy corrections: (d, mask) -> weight per token, d = log(trainer / engine)


def verl_token(d, mask, high=2.0):
    """rollout_is = token."""
    return np.minimum(np.exp(np.clip(d, -20, 20)), high)


def verl_sequence(d, mask, high=2.0):
    """rollout_is = sequence."""
    total = np.clip((d * mask).sum(1, keepdims=True), -20, 20)
    return np.minimum(np.exp(total), high) * np.ones_like(d)


def verl_normalized(weights, mask, level):
    """rollout_is_batch_normalize of token or sequence weights."""
    if level == "token":
        return weights / ((weights * mask).sum() / mask.sum())
    return weights / mean_of_responses(weights, mask).mean()


def trl(mode, d, mask, low, high):
    """vllm_importance_sampling_mode with clip_min and clip_max."""
    level, kind = mode.split("_")
    total = (d * mask).sum(1, keepdims=True) * np.ones_like(d)
    ratio = np.exp(d * mask if level == "token" else total)
    if kind == "truncate":
        return np.clip(ratio, low, high)
    return np.where((ratio < low) | (ratio > high), 0.0, ratio)


def openrlhf(kind, d, mask, low, high):
    """is_correction_type with is_correction_threshold."""
    ratio = np.exp(d)
    if kind == "tis":
        return np.clip(ratio, low, high)
    if kind == "icepop":
        return ratio * ((ratio >= low) & (ratio <= high))
    geometric = np.exp(mean_of_responses(d, mask))
    return ratio * ((geometric >= low) & (geometric <= high))  # seq-mask-tis


def verl_rejection(name, d, mask, lower, upper):
    """Kept tokens of rollout_rs; (lower, upper) for k1 bound -d and the upper one k2 and k3."""
    reduction, estimator = name.rsplit("_", 1)
    d = np.clip(d, -20, 20)
    x = {"k1": -d, "k2": d**2 / 2, "k3": np.exp(d) - 1 - d}[estimator]
    x = {
        "token": x,
        "seq_sum": (x * mask).sum(1, keepdims=True),
        "seq_mean": mean_of_responses(x, mask),
        "seq_max": np.where(mask > 0, x, -np.inf).max(1, keepdims=True),
    }[reduction]
    kept = x <= (np.log(upper) if estimator == "k1" else upper)
    if estimator == "k1":
        kept &= x >= np.log(lower)
    return kept * np.ones_like(d)


def molt_sequence_gate(behavior: Rows, current: Rows, mask: Rows, bound: float) -> Rows:
    """Molt's is_correction_gating = binary_kl."""
    q, p = np.exp(behavior), np.exp(current)
    binary = q * np.log(q / p) + (1 - q) * np.log((1 - q) / (1 - p))
    return (mean_of_responses(binary, mask) <= bound) * np.ones_like(mask)


def trl_off_policy_mask(sg, b, threshold):
    """off_policy_mask_threshold: DeepSeek-V3.2, eq. 9."""
    distance = mean_of_responses(b.rollout_logp - sg, b.mask)
    return ((b.advantages >= 0) | (distance <= threshold)) * 1.0


# Advantage estimators: rewards per token [N, T], already minus the KL penalty


def _groups(token_rewards, n):
    return token_rewards.sum(1).reshape(-1, n)


def _spread(x, mask):
    return x.reshape(-1, 1) * mask


def _whitened(x, mask):
    """verl's masked_whiten. OpenRLHF's variance is biased: divided by the number of tokens."""
    total = mask.sum()
    mean = (x * mask).sum() / total
    variance = (((x - mean) ** 2) * mask).sum() / (total - 1)
    return (x - mean) / np.sqrt(variance + 1e-8) * mask


def grpo(rewards, mask, n, **_):
    r = _groups(rewards, n)
    centred = r - r.mean(1, keepdims=True)
    return _spread(centred / (r.std(1, ddof=1, keepdims=True) + 1e-6), mask)


def dr_grpo(rewards, mask, n, **_):
    r = _groups(rewards, n)
    return _spread(r - r.mean(1, keepdims=True), mask)


def rloo(rewards, mask, n, **_):
    r = _groups(rewards, n)
    return _spread(r - (r.sum(1, keepdims=True) - r) / (n - 1), mask)


def opo(rewards, mask, n, **_):
    r, lengths = _groups(rewards, n), mask.sum(1).reshape(-1, n)
    baseline = (r * lengths).sum(1, keepdims=True) / lengths.sum(1, keepdims=True)
    return _spread(r - baseline, mask)


def grpo_batch_std(rewards, mask, n, **_):
    """TRL's scale_rewards = batch."""
    r = _groups(rewards, n)
    return _spread((r - r.mean(1, keepdims=True)) / (r.std(ddof=1) + 1e-6), mask)


def max_rl(rewards, mask, n, **_):
    """prime-rl's max_rl."""
    r = _groups(rewards, n)
    mean = r.mean(1, keepdims=True)
    return _spread((r - mean) / np.where(mean > 0, mean, np.inf), mask)


def flash_reinforce(rewards, mask, n, **_):
    """Molt's flash_reinforce."""
    r = _groups(rewards, n)
    return _spread(r - r.mean(), mask)


def gdpo(rewards, mask, n, *, parts, weights, **_):
    """TRL's normalize_then_sum."""
    total = 0.0
    for part, weight in zip(parts.T, weights, strict=True):
        r = part.reshape(-1, n)
        total += weight * (r - r.mean(1, keepdims=True)) / (r.std(1, ddof=1, keepdims=True) + 1e-6)
    return _spread((total - total.mean()) / (total.std(ddof=1) + 1e-6), mask)


def gpg(rewards, mask, n, **_):
    """The paper's α: groups / groups with a gradient. verl counts rewards other than 0."""
    r = _groups(rewards, n)
    alpha = len(r) / sum(len(set(row)) > 1 for row in r)
    return _spread(alpha * (r - r.mean(1, keepdims=True)), mask)


def grpo_passk(rewards, mask, n, **_):
    r = _groups(rewards, n)
    out = np.zeros_like(r)
    for i, row in enumerate(r):
        second, best = np.sort(row)[-2:]
        out[i, row.argmax()] = (best - second) / (row.std(ddof=1) + 1e-6)
    return _spread(out, mask)


def reinforce_plus_plus_baseline(rewards, mask, n, **_):
    return _whitened(dr_grpo(rewards, mask, n), mask)


def remax(rewards, mask, n, *, baselines, **_):
    """verl's compute_remax_outcome_advantage: the rewards still to come, without those passed."""
    returns = np.cumsum((rewards * mask)[:, ::-1], axis=1)[:, ::-1]
    return (returns - baselines[:, None]) * mask


def reinforce_plus_plus(rewards, mask, n, *, gamma, **_):
    """The return over the policy's tokens. verl restarts it at every observation."""
    out = np.zeros_like(rewards)
    for i in range(len(rewards)):
        total = 0.0
        for t in reversed(np.flatnonzero(mask[i])):
            total = rewards[i, t] + gamma * total
            out[i, t] = total
    return _whitened(out, mask)


def gae(rewards, mask, n, *, values, gamma, lam, **_):
    """Observations are skipped, as verl skips them."""
    out = np.zeros_like(rewards)
    for i in range(len(rewards)):
        following, advantage = 0.0, 0.0
        for t in reversed(np.flatnonzero(mask[i])):
            delta = rewards[i, t] + gamma * following - values[i, t]
            advantage = delta + gamma * lam * advantage
            out[i, t], following = advantage, values[i, t]
    return _whitened(out, mask)


ADVANTAGES = {
    f.__name__: f
    for f in (
        grpo,
        dr_grpo,
        rloo,
        opo,
        gpg,
        grpo_passk,
        grpo_batch_std,
        max_rl,
        gdpo,
        flash_reinforce,
        reinforce_plus_plus_baseline,
        remax,
        reinforce_plus_plus,
        gae,
    )
}


# Preferences and values


def trl_dpo(chosen, rejected, beta, smoothing):
    margin = beta * (chosen - rejected)
    return (1 - smoothing) * np.log1p(np.exp(-margin)) + smoothing * np.log1p(np.exp(margin))


def trl_ipo(chosen, rejected, beta):
    """On means over tokens in TRL, on sums in OpenRLHF."""
    return (chosen - rejected - 1 / (2 * beta)) ** 2


def trl_kto(chosen, rejected, kl, beta, desirable, undesirable):
    """Mean over the completions of both kinds, with kl = max(0, mean of the mismatched ratios)."""
    good = 1 - 1 / (1 + np.exp(-beta * (chosen - kl)))
    bad = 1 - 1 / (1 + np.exp(-beta * (kl - rejected)))
    return np.concatenate([desirable * good, undesirable * bad]).mean()


def verl_value_loss(values, old, returns, clip):
    limited = np.clip(values, old - clip, old + clip)
    return np.maximum((values - returns) ** 2, (limited - returns) ** 2) / 2
