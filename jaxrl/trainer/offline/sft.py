"""Supervised fine-tuning: maximizes the likelihood of the assistant turns of conversations.

-Σ log π is the policy gradient loss with all advantages 1. So SFT is an objective of the RL learner
and shares its packing, chunked cross-entropy and meshes.
"""

from collections.abc import Sequence

import numpy as np

from jaxrl.config.keys import RunConfig
from jaxrl.data.demonstrations import demonstration_maker, to_sample
from jaxrl.planner.programs import OfflineWorkload
from jaxrl.trainer.offline.objective import UNUSED_SECTIONS, OfflineObjective, OfflineRun, logps
from jaxrl.trainer.phases.experience import policy_logps
from jaxrl.types import Demonstration, TrainingSample


def make_samples(
    run: OfflineRun, items: Sequence[Demonstration]
) -> tuple[list[TrainingSample], dict[str, float]]:
    """The demonstrations as samples with advantage 1, or 0 where a teacher is compared."""
    n_tokens = float(sum(d.n_loss_tokens for d in items))
    samples = [to_sample(d, advantage=1.0 if d.teacher is None else 0.0) for d in items]
    return samples, {"perf/own_tokens": n_tokens}


def used_keys(cfg: RunConfig) -> tuple[str, ...]:
    """The keys of a divergence from the teacher in the column of data.teacher_logprobs."""
    names = ("kl", "kl_beta", "kl_top_k", "kl_coef") if cfg.data.teacher_logprobs else ()
    return ("data.teacher_logprobs", *(f"algorithm.{name}" for name in names))


def evaluate(run: OfflineRun, items: Sequence[Demonstration]) -> dict[str, float]:
    """val/nll (nats per token), overall and per source, and val/perplexity = exp(val/nll)."""
    found = logps(run.core, items, policy_logps)
    nll = -float(np.concatenate(found).mean())
    metrics = {"val/nll": nll, "val/perplexity": float(np.exp(nll))}
    sources = sorted({d.source for d in items})
    if len(sources) > 1:
        for source in sources:
            group = [logp for d, logp in zip(items, found, strict=True) if d.source == source]
            metrics[f"val/{source}/nll"] = -float(np.concatenate(group).mean())
    return metrics


SFT = OfflineObjective(
    maker=lambda renderer, cfg, *, stop, images: demonstration_maker(
        renderer, cfg.data, stop=stop, images=images, top_k=cfg.algorithm.kl_top_k
    ),
    make_samples=make_samples,
    evaluate=evaluate,
    aggregation="token_mean",
    workload=lambda cfg: OfflineWorkload(
        responses_per_example=1, scores_policy=False, has_reference=False
    ),
    unused_keys=(*UNUSED_SECTIONS, "preference"),
    metric_names={
        "loss/policy": "loss/nll",
        "loss/entropy": "loss/entropy",
        "loss/kl": "loss/kl",
    },
    used_keys=used_keys,
)
