"""Parts of the objective (algorithm.parts) in a step: their tokens, factors and metrics."""

import dataclasses
from collections.abc import Mapping, Sequence

import numpy as np

from jaxrl.algorithms.losses.aggregation import sequences_weight
from jaxrl.config.choices import RESPONSE_PARTS
from jaxrl.config.keys import AlgorithmConfig
from jaxrl.config.parts import names_roles, parse_parts, part_of
from jaxrl.data.demonstrations import to_sample
from jaxrl.data.image_places import is_text
from jaxrl.learner.parts import in_part, token_parts
from jaxrl.trainer.phases.turns import observation_roles
from jaxrl.types import Batch, Demonstration, Rollout, TrainingSample


def with_parts(
    sample: TrainingSample,
    masks: Mapping[tuple[str, str], np.ndarray],
    source: str,
    cfg: AlgorithmConfig,
) -> TrainingSample:
    """The sample with the response tokens in each mask in their part of the objective, if any.

    `masks` are by the kind of the parts (PART_KINDS) and the role of an observation, `source` is
    that of the row.
    """
    found = np.zeros(len(sample.tokens), np.int32)
    for (kind, role), mask in masks.items():
        if (part := part_of(cfg, kind, source, role)) is not None:
            found |= np.where(mask, np.int32(1 << part), np.int32(0))
    return dataclasses.replace(sample, parts=found) if found.any() else sample


def sampled_parts(
    samples: Sequence[TrainingSample],
    source: str,
    cfg: AlgorithmConfig,
    roles: Sequence[np.ndarray] = (),
) -> list[TrainingSample]:
    """The samples of a rollout with the parts of its tokens.

    `roles` are the `observation_roles` of each, if parts name them. Tokens of images are in no
    part: the model never writes them.
    """

    def masks(sample: TrainingSample, role: np.ndarray) -> dict[tuple[str, str], np.ndarray]:
        given = ~sample.loss_mask & is_text(sample)
        found = {(kind, ""): sample.loss_mask for kind in RESPONSE_PARTS}
        return found | {("observations", str(r)): given & (role == r) for r in np.unique(role)}

    roles = roles or [np.full(len(s.tokens), "") for s in samples]
    pairs = zip(samples, roles, strict=True)
    return [with_parts(s, masks(s, role), source, cfg) for s, role in pairs]


def in_parts(
    samples: Sequence[TrainingSample], rollout: Rollout, cfg: AlgorithmConfig
) -> list[TrainingSample]:
    """`sampled_parts` of the samples of a rollout, one of each of its first sequences."""
    sequences = rollout.sequences[: len(samples)] if names_roles(cfg) else ()
    roles = [observation_roles(sequence) for sequence in sequences]
    return sampled_parts(samples, rollout.prompt.source, cfg, roles)


def given_samples(
    demonstrations: Sequence[Demonstration], cfg: AlgorithmConfig
) -> list[TrainingSample]:
    """Demonstrations as samples without tokens of the policy."""
    return [
        with_parts(
            dataclasses.replace(to_sample(d), loss_mask=np.zeros_like(d.loss_mask)),
            {("demonstrations", ""): d.loss_mask},
            d.source,
            cfg,
        )
        for d in demonstrations
    ]


def part_factors(
    samples: Sequence[TrainingSample], weight: float, step: int, cfg: AlgorithmConfig
) -> tuple[float, ...]:
    """The factor c_k = w_k W / N_k of each part's sum over the tokens of a mini-batch.

    W = `weight` is the denominator of the update, by which it divides the loss. N_k is that of the
    part, by its aggregation. A part without tokens has the factor 0, the entropy bonus a negative
    one, and the routers' loss, which is a mean already, its weight.
    """
    factors = []
    for k, part in enumerate(parse_parts(cfg.parts)):
        w, mode = part.weight(step), part.aggregation(cfg)
        counts = [(s, n_tokens(s, k)) for s in samples if n_tokens(s, k)]
        lens, shares = [n for _, n in counts], [s.share for s, _ in counts]
        n = sequences_weight(lens, shares if part.of_responses else None, mode=mode)
        factor = w * weight / n if counts else 0.0
        sign = -1.0 if part.kind == "entropy" else 1.0
        factors.append(w if part.kind == "router" else sign * factor)
    return tuple(factors)


def n_tokens(sample: TrainingSample, part: int) -> int:
    """Number of tokens of a sample in algorithm.parts[part]."""
    return 0 if sample.parts is None else int(in_part(sample.parts, part).sum())


def part_metrics(
    samples: Sequence[TrainingSample], step: int, cfg: AlgorithmConfig
) -> dict[str, float]:
    """loss/<part>_tokens of a step and loss/<part>_weight."""
    metrics = {}
    for k, part in enumerate(parse_parts(cfg.parts)):
        if part.kind != "router":
            metrics[f"loss/{part.name}_tokens"] = float(sum(n_tokens(s, k) for s in samples))
        metrics[f"loss/{part.name}_weight"] = part.weight(step)
    return metrics


def with_trained_parts(
    metrics: dict[str, float], batches: Sequence[Batch], cfg: AlgorithmConfig
) -> dict[str, float]:
    """The metrics of an update without the losses of parts that have no token in it."""
    bits = 0
    for batch in batches:
        bits |= 0 if batch.parts is None else int(np.bitwise_or.reduce(batch.parts, axis=None))
    absent = {f"loss/{part.name}" for k, part in token_parts(cfg) if not in_part(bits, k)}
    return {name: value for name, value in metrics.items() if name not in absent}
