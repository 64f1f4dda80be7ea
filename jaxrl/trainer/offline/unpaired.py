"""KTO, BCO and APO-zero of completions with a label as an objective of the RL learner."""

import dataclasses
from collections.abc import Callable, Sequence

import jax
import jax.numpy as jnp
import numpy as np

from jaxrl.algorithms.losses.preference import bco_labelled, kto_labelled
from jaxrl.data.demonstrations import to_sample
from jaxrl.data.images.mrope import continue_text
from jaxrl.data.preferences import Labelled, Pair
from jaxrl.trainer.offline.objective import OfflineRun, logps
from jaxrl.trainer.phases.experience import policy_logps, reference_logps
from jaxrl.types import Array, Demonstration, TrainingSample


@dataclasses.dataclass(frozen=True)
class Measured:
    """Completions against the reference model, at the current weights."""

    ratio: np.ndarray  # float32 [N], log π / π_ref summed over the tokens
    desirable: np.ndarray  # bool [N]
    shift: float  # z: the estimate of the KL, BCO's running mean; 0 for APO-zero
    beta: float
    loss: Callable[[Array], Array]  # of ratio [N] -> loss of each completion [N]


def as_labelled(items: Sequence[Pair | Labelled]) -> list[Labelled]:
    """The completions of the items; a pair has a desirable and an undesirable one."""
    found: list[Labelled] = []
    for item in items:
        if isinstance(item, Pair):
            sides = (item.chosen, True), (item.rejected, False)
            found += [Labelled(item.id, completion, good) for completion, good in sides]
        else:
            found.append(item)
    return found


def labelled_samples(
    run: OfflineRun, items: Sequence[Labelled]
) -> tuple[list[TrainingSample], dict[str, float]]:
    """The completions as samples, whose advantages give the gradient of the mean loss."""
    measured = measure_labelled(run, items, trains=True)
    slope = jax.grad(lambda ratio: measured.loss(ratio).sum())(jnp.asarray(measured.ratio))
    each = zip(items, (-np.asarray(slope)).tolist(), strict=True)
    samples = [to_sample(item.completion, advantage) for item, advantage in each]
    return samples, labelled_metrics(measured)


def measure_labelled(
    run: OfflineRun, items: Sequence[Labelled], *, trains: bool = False
) -> Measured:
    """The log ratios of the completions and what the loss subtracts from them.

    That is for KTO an estimate of the KL, max(0, mean log ratio) over the completions, each with
    the prompt of the next one (section 4.1, https://arxiv.org/abs/2402.01306), and 0 for a single
    completion. For BCO see `running_shift`.
    """
    cfg, n = run.core.cfg.preference, len(items)
    has_kl = cfg.loss == "kto" and n > 1
    desirable = np.array([item.desirable for item in items])
    completions = [item.completion for item in items]
    others = with_prompts(
        completions, [*completions[1:], *completions[:1]], run.core.cfg.data.max_len
    )
    scored = [*completions, *(others if has_kl else [])]
    ratio = log_ratios(run, scored)
    shift = max(float(ratio[n:].mean()), 0.0) if has_kl else 0.0
    if cfg.loss == "bco":
        shift = running_shift(run, ratio, trains=trains)

    def loss(ratio: Array) -> Array:
        labels = jnp.asarray(desirable)
        weights = dict(chosen_weight=cfg.chosen_weight, rejected_weight=cfg.rejected_weight)
        if cfg.loss == "bco":
            return bco_labelled(ratio, labels, beta=cfg.beta, shift=shift, **weights)
        return kto_labelled(ratio, labels, beta=cfg.beta, kl=shift, **weights)

    return Measured(ratio[:n], desirable, shift, cfg.beta, loss)


def running_shift(run: OfflineRun, ratio: np.ndarray, *, trains: bool) -> float:
    """The mean log ratio of all completions so far, for BCO; `trains` adds these, [N].

    The run's moments of rewards hold it, so that checkpoints contain it.
    """
    if trains:
        run.core.reward_scale = run.core.reward_scale.including(ratio)
    return run.core.reward_scale.mean


def log_ratios(run: OfflineRun, completions: Sequence[Demonstration]) -> np.ndarray:
    """float32 [N]: log π / π_ref of each completion, summed over its tokens."""
    policy, reference = (logps(run.core, completions, f) for f in (policy_logps, reference_logps))
    return np.array([(a - b).sum() for a, b in zip(policy, reference, strict=True)], np.float32)


def labelled_metrics(measured: Measured) -> dict[str, float]:
    """Means over completions: the loss, the share on the right side of z, and how far from it."""
    distance = np.where(measured.desirable, 1, -1) * (measured.ratio - measured.shift)
    return {
        "preference/loss": float(jnp.mean(measured.loss(jnp.asarray(measured.ratio)))),
        "preference/accuracy": float(np.mean(distance > 0)),
        "preference/margin": measured.beta * float(np.mean(distance)),
    }


def with_prompts(
    completions: Sequence[Demonstration], others: Sequence[Demonstration], max_len: int
) -> list[Demonstration]:
    """The completions with the prompts of others, up to `max_len` tokens together."""
    found = []
    for completion, other in zip(completions, others, strict=True):
        n = max(max_len - len(other.prompt_tokens), 1)
        found.append(
            dataclasses.replace(
                completion,
                prompt_tokens=other.prompt_tokens,
                tokens=completion.tokens[:n],
                loss_mask=completion.loss_mask[:n],
                images=other.images,
                axis_positions=_axis_positions(other, len(completion.tokens[:n])),
            )
        )
    return found


def _axis_positions(prompt: Demonstration, n: int) -> np.ndarray | None:
    """Positions by axis of its prompt and of `n` tokens of text; None if it has none."""
    if prompt.axis_positions is None:
        return None
    return continue_text(prompt.axis_positions[:, : len(prompt.prompt_tokens)], n)
