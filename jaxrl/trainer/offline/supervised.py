"""Supervised fine-tuning: the likelihood of what the assistant says in given conversations.

-Σ log π is the policy gradient of advantages that are all 1, so this is a lesson of the RL learner: packed rows,
chunked cross-entropy, any mesh.
"""

from collections.abc import Sequence

import numpy as np

from jaxrl.data.demonstrations import load_demonstrations
from jaxrl.planner.programs import OfflineWorkload
from jaxrl.trainer.offline.offline import IDLE, Lesson, Offline, logps
from jaxrl.trainer.step import policy_logps
from jaxrl.types import Rollout


def imitate(run: Offline, items: Sequence[Rollout]) -> tuple[list[Rollout], dict[str, float]]:
    """The demonstrations as they are."""
    return list(items), {"perf/own_tokens": float(sum(r.n_own for r in items))}


def likelihood(run: Offline, items: Sequence[Rollout]) -> dict[str, float]:
    """val/nll, nats per token, overall and per source; val/perplexity is its exponential."""
    found = logps(run, items, policy_logps)
    nll = -float(np.concatenate(found).mean())
    metrics = {"val/nll": nll, "val/perplexity": float(np.exp(nll))}
    sources = sorted({r.prompt.source for r in items})
    if len(sources) > 1:
        for source in sources:
            own = [logp for r, logp in zip(items, found, strict=True) if r.prompt.source == source]
            metrics[f"val/{source}/nll"] = -float(np.concatenate(own).mean())
    return metrics


SFT = Lesson(
    load=load_demonstrations,
    teach=imitate,
    judge=likelihood,
    aggregation="token_mean",
    given=OfflineWorkload(responses_per_example=1, scores_policy=False, has_reference=False),
    idle=(*IDLE, "preference"),
    logged={"loss/policy": "loss/nll", "loss/entropy": "loss/entropy"},
)
