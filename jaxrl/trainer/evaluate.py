"""Validation: answers to held-out prompts, rewarded; overall and per source."""

import collections
from collections.abc import Sequence

import numpy as np

from jaxrl.types import Rollout


def validation_metrics(rollouts: Sequence[Rollout]) -> dict[str, float]:
    """val/reward, val/response_len, val/truncated_fraction, and val/<source>/reward per data source.

    Every sample counts once, so with eval.n samples a prompt's reward is their mean (pass@1).
    """
    by_source: dict[str, list[float]] = collections.defaultdict(list)
    for r in rollouts:
        by_source[r.prompt.source].append(r.reward)
    metrics = {
        "val/reward": float(np.mean([r.reward for r in rollouts])),
        "val/response_len": float(np.mean([len(r.tokens) for r in rollouts])),
        "val/truncated_fraction": float(np.mean([r.finish == "length" for r in rollouts])),
        "val/errors": float(sum(bool(r.reward_error) for r in rollouts)),
    }
    if len(by_source) > 1:
        metrics |= {f"val/{source}/reward": float(np.mean(v)) for source, v in by_source.items()}
    return metrics


def reward_metrics(rollouts: Sequence[Rollout]) -> dict[str, float]:
    """reward/* and the lengths of a step's rollouts."""
    rewards = np.array([r.reward for r in rollouts])
    parts = collections.defaultdict(list)
    for r in rollouts:
        for name, value in r.reward_parts.items():
            parts[name].append(value)
    return {
        "reward/mean": float(rewards.mean()),
        "reward/std": float(rewards.std()),
        "reward/errors": float(sum(bool(r.reward_error) for r in rollouts)),
        **{f"reward/{name}": float(np.mean(values)) for name, values in parts.items()},
        "rollout/response_len": float(np.mean([len(r.tokens) for r in rollouts])),
        "rollout/prompt_len": float(np.mean([len(r.prompt.tokens) for r in rollouts])),
        "rollout/truncated_fraction": float(np.mean([r.finish == "length" for r in rollouts])),
    }


def sample_records(rollouts: Sequence[Rollout], *, kind: str) -> list[dict]:
    """One JSON-able record a rollout, for samples.jsonl and the report."""
    return [
        {
            "kind": kind,
            "prompt_id": r.prompt.id,
            "sample": r.sample,
            "source": r.prompt.source,
            "prompt": r.prompt.messages[-1]["content"],
            "completion": r.text,
            "answer": r.prompt.answer,
            "reward": r.reward,
            "finish": r.finish,
            "error": r.reward_error,
        }
        for r in rollouts
    ]
