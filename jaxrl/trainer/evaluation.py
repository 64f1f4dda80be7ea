"""Statistics of an evaluation: mean reward, pass@k and standard errors, per data source."""

import collections
from collections.abc import Sequence

import numpy as np

from jaxrl.algorithms.evaluation_statistics import pass_at_k, standard_error
from jaxrl.config.keys import EvalConfig
from jaxrl.rewards.pool import count_sums
from jaxrl.trainer.phases.rewards import episode_means, part_means, split_groups
from jaxrl.types import ScoredRollout


def statistics(rollouts: Sequence[ScoredRollout], cfg: EvalConfig) -> dict[str, float]:
    """The statistics of one evaluation. The cfg.n samples of each prompt are adjacent.

    Keys: reward and pass_at_<k> with their standard errors (<name>_stderr, only with several
    prompts), reward/<function> (mean of each reward function, sum of what it counts), response_len,
    truncated_fraction, errors (a count), and env/<name> for episodes. A sample passes if its
    reward is at least cfg.pass_reward.
    """
    groups = split_groups(rollouts, cfg.n)
    rewards = np.array([[r.reward.value for r in group] for group in groups])  # [prompts, n]
    n_passed = (rewards >= cfg.pass_reward).sum(axis=1)
    per_prompt = {"reward": rewards.mean(axis=1)}
    per_prompt |= {f"pass_at_{k}": pass_at_k(n_passed, n=cfg.n, k=k) for k in cfg.k}
    found, counts = {}, count_sums(r.reward for r in rollouts)
    for name, values in per_prompt.items():
        found[name] = float(values.mean())
        if len(groups) > 1:
            found[f"{name}_stderr"] = standard_error(values)
    return found | {
        **{f"reward/{name}": mean for name, mean in part_means(rollouts).items()},
        **{f"reward/{name}": total for name, total in counts.items()},
        "response_len": float(np.mean([len(r.rollout.tokens) for r in rollouts])),
        "truncated_fraction": float(np.mean([r.rollout.finish == "length" for r in rollouts])),
        "errors": float(sum(bool(r.error) for r in rollouts)),
        **{f"env/{name}": value for name, value in episode_means(rollouts).items()},
    }


def by_source(rollouts: Sequence[ScoredRollout]) -> dict[str, list[ScoredRollout]]:
    """The rollouts of each data source, sorted by the name of the source."""
    found = collections.defaultdict(list)
    for r in rollouts:
        found[r.rollout.prompt.source].append(r)
    return dict(sorted(found.items()))


def validation_metrics(rollouts: Sequence[ScoredRollout], cfg: EvalConfig) -> dict[str, float]:
    """The statistics as val/<name>, and with several data sources also as val/<source>/<name>."""
    metrics = {f"val/{name}": value for name, value in statistics(rollouts, cfg).items()}
    sources = by_source(rollouts)
    if len(sources) > 1:
        for source, group in sources.items():
            found = statistics(group, cfg).items()
            metrics |= {f"val/{source}/{name}": value for name, value in found}
    return metrics
