"""Supervised fine-tuning: the likelihood of what the assistant says in given conversations.

-Σ log π is the policy gradient of advantages that are all 1, so this is a lesson of the RL learner: packed rows,
chunked cross-entropy, any mesh.
"""

from collections.abc import Sequence

import numpy as np

from jaxrl.data.demonstrations import load_demonstrations, to_sample
from jaxrl.planner.programs import OfflineWorkload
from jaxrl.trainer.offline.offline import IDLE, Lesson, Offline, logps
from jaxrl.trainer.phases import policy_logps
from jaxrl.types import Demonstration, TrainingSample


def imitate(
    run: Offline, items: Sequence[Demonstration]
) -> tuple[list[TrainingSample], dict[str, float]]:
    """The demonstrations with advantage 1."""
    n_tokens = float(sum(d.n_loss_tokens for d in items))
    return [to_sample(d, advantage=1.0) for d in items], {"perf/own_tokens": n_tokens}


def likelihood(run: Offline, items: Sequence[Demonstration]) -> dict[str, float]:
    """val/nll, nats per token, overall and per source; val/perplexity is its exponential."""
    found = logps(run, items, policy_logps)
    nll = -float(np.concatenate(found).mean())
    metrics = {"val/nll": nll, "val/perplexity": float(np.exp(nll))}
    sources = sorted({d.source for d in items})
    if len(sources) > 1:
        for source in sources:
            group = [logp for d, logp in zip(items, found, strict=True) if d.source == source]
            metrics[f"val/{source}/nll"] = -float(np.concatenate(group).mean())
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
