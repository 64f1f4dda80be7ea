"""Metrics of a step: rewards, episodes, throughput; and the records of samples.jsonl."""

import collections
from collections.abc import Sequence
from typing import Any

import jax
import numpy as np

from jaxrl.config.keys import RewardConfig
from jaxrl.data.packing import Packed, sequence_lens, shared_lens
from jaxrl.models.flops import forward_flops
from jaxrl.planner.chips import chip_of
from jaxrl.trainer.core import Core
from jaxrl.trainer.phases.rewards import valid_samples
from jaxrl.types import Rollout, ScoredRollout


def reward_metrics(rollouts: Sequence[ScoredRollout], cfg: RewardConfig) -> dict[str, float]:
    """reward/*, env/* and the lengths of the rollouts of a step.

    Means and deviations of rewards are over valid rewards; absent if there are none.
    """
    valid = valid_samples(rollouts, cfg)
    sampled, means = [s for r in rollouts for s in r.rollout.sequences], {}
    if valid:
        rewards = np.array([r.reward.value for r in valid])
        means = {"reward/mean": float(rewards.mean()), "reward/std": float(rewards.std())}
    return means | {
        "reward/errors": float(sum(bool(r.error) for r in rollouts)),
        **{f"reward/{name}": mean for name, mean in part_means(valid).items()},
        **{f"env/{name}": value for name, value in episode_means(rollouts).items()},
        "rollout/entropy": sampling_entropy(sampled),
        "rollout/response_len": float(np.mean([len(r.tokens) for r in sampled])),
        "rollout/prompt_len": float(np.mean([len(r.prompt.tokens) for r in sampled])),
        "rollout/truncated_fraction": float(np.mean([r.finish == "length" for r in sampled])),
    }


def sampling_entropy(rollouts: Sequence[Rollout]) -> float:
    """Mean of -log p of the sampled tokens, an unbiased estimate of the sampling entropy, nats."""
    logps = [r.logp if r.behavior_logp is None else r.behavior_logp for r in rollouts]
    n_tokens = max(sum(r.n_loss_tokens for r in rollouts), 1)
    pairs = zip(logps, rollouts, strict=True)
    return -float(sum(logp[r.loss_mask].sum(dtype=np.float64) for logp, r in pairs) / n_tokens)


def part_means(rollouts: Sequence[ScoredRollout]) -> dict[str, float]:
    """Mean of each part of the rewards, over the rollouts whose reward has that part."""
    parts = collections.defaultdict(list)
    for r in rollouts:
        for name, value in r.reward.parts.items():
            parts[name].append(value)
    return {name: float(np.mean(values)) for name, values in parts.items()}


def episode_means(rollouts: Sequence[ScoredRollout]) -> dict[str, float]:
    """Metrics of episodes; {} for rollouts without an environment.

    turns: mean number of turns. own_fraction: fraction of the response tokens that the model
    sampled. failures: number of failed environments. Other keys: means of the counts that the
    environment reports.
    """
    sampled = [r.rollout for r in rollouts]
    episodes = [r.episode for r in sampled if r.episode is not None]
    if not episodes:
        return {}
    names = sorted({name for e in episodes for name in e.counts})
    counts = {name: float(np.mean([e.counts.get(name, 0.0) for e in episodes])) for name in names}
    sequences = [s for r in sampled for s in r.sequences]
    n_tokens = sum(len(s.tokens) for s in sequences)
    return counts | {
        "turns": float(np.mean([e.n_turns for e in episodes])),
        "own_fraction": sum(s.n_loss_tokens for s in sequences) / max(n_tokens, 1),
        "failures": float(sum(bool(e.error) for e in episodes)),
    }


def sample_records(rollouts: Sequence[ScoredRollout], *, kind: str) -> list[dict[str, Any]]:
    """JSON-serializable records for samples.jsonl and the report, one per rollout."""
    return [_sample_record(r, kind) for r in rollouts]


def _sample_record(scored: ScoredRollout, kind: str) -> dict[str, Any]:
    rollout, prompt = scored.rollout, scored.rollout.prompt
    return {
        "kind": kind,
        "prompt_id": prompt.id,
        "sample": rollout.sample,
        "source": prompt.source,
        "prompt": (rollout.prompt_messages or prompt.messages)[-1]["content"],
        "completion": rollout.text,
        "answer": prompt.answer_text,
        "reward": scored.reward.value,
        "finish": rollout.finish,
        "error": scored.error,
    }


def speed_metrics(core: Core, n_tokens: int, trained: Sequence[Packed]) -> dict[str, float]:
    """perf/tokens_per_s of the step, perf/tokens_per_s_per_device and perf/mfu_actor.

    perf/mfu_actor is the model FLOPs of the updates divided by the peak FLOPs of the devices during
    time/update_actor_s; tokens of shared prefixes count once. It is logged only for chips with a
    known peak rate (planner/chips.py).
    Call it after the timed block "step".

    Args:
      n_tokens: tokens of the step's sequences.
      trained: the micro-batches of one epoch.
    """
    seconds, n_devices = core.clock.seconds, jax.device_count()
    rate = n_tokens / seconds["time/step_s"]
    metrics = {"perf/tokens_per_s": rate, "perf/tokens_per_s_per_device": rate / n_devices}
    chip = chip_of(jax.devices()[0].device_kind)
    if chip is not None and trained:
        params = core.state.params
        whole, shared = (
            forward_flops(params.cfg, np.concatenate([lens(packed.batch) for packed in trained]))
            for lens in (sequence_lens, shared_lens)
        )
        flops = 3 * core.cfg.learner.epochs * (whole - shared)
        peak = n_devices * chip.rate("bf16" if params.embed.dtype.itemsize == 2 else "f32")
        metrics["perf/mfu_actor"] = flops / (peak * seconds["time/update_actor_s"])
    return metrics
