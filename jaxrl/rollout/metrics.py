"""The rollout/* metrics of one engine, and of several together."""

from collections.abc import Sequence

import numpy as np

from jaxrl.engine.api import EngineStats

SUMMED = (
    *("tokens_per_s", "running", "waiting", "preempted", "prefill_tokens", "shared_tokens"),
    *("buffer/size", "buffer/dropped"),
    *("workers/ready", "workers/lost", "workers/moved_requests", "weights/published_bytes"),
)


def merge_metrics(per_engine: Sequence[dict[str, float]]) -> dict[str, float]:
    """The metrics of all engines: sum of counts and rates, maximum of *_max, or mean."""
    merged = {}
    for name in per_engine[0]:
        values = [metrics[name] for metrics in per_engine if name in metrics]
        short = name.removeprefix("rollout/")
        if short in SUMMED:
            merged[name] = float(sum(values))
        elif short.endswith("_max"):
            merged[name] = float(max(values))
        else:
            merged[name] = float(np.mean(values))
    return merged


def engine_metrics(stats: EngineStats, n_tokens: int, wall_s: float) -> dict[str, float]:
    """The rollout/* metrics of one call, averaged over its decode steps.

    `n_tokens` counts the tokens of finished responses, `wall_s` is the wall time of the call.
    """
    steps = max(stats.n_steps, 1)
    n_prompt_tokens = stats.n_prefill_tokens + stats.n_cached_tokens
    return {
        "rollout/tokens_per_s": n_tokens / max(wall_s, 1e-9),
        "rollout/cache_utilization": stats.cache_used / steps,
        "rollout/cache_utilization_max": stats.cache_used_max,
        "rollout/running": stats.running / steps,
        "rollout/waiting": stats.waiting / steps,
        "rollout/preempted": float(stats.n_preempted),
        "rollout/prefill_tokens": float(stats.n_prefill_tokens),
        "rollout/shared_tokens": float(stats.n_cached_tokens),
        "rollout/prefix_hit_rate": stats.n_cached_tokens / max(n_prompt_tokens, 1),
        "rollout/padding_fraction": 1.0
        - (stats.n_tokens - stats.n_accepted_tokens) / max(stats.n_batch_slots, 1),
        "rollout/draft_acceptance": stats.n_accepted_tokens / max(stats.n_draft_tokens, 1),
        "rollout/host_fraction": stats.host_s / max(stats.host_s + stats.device_s, 1e-9),
    }
