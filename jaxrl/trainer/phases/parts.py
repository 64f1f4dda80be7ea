"""Denominators of a mini-batch, and the tokens and factors of the objective's further parts."""

import dataclasses
from collections.abc import Sequence

import numpy as np

from jaxrl.algorithms.losses.aggregation import AGGREGATIONS
from jaxrl.algorithms.table import lookup
from jaxrl.config.keys import AlgorithmConfig
from jaxrl.config.parts import parse_parts, part_of
from jaxrl.data.demonstrations import to_sample
from jaxrl.data.image_places import is_text
from jaxrl.types import Batch, Demonstration, TrainingSample


def sequences_weight(
    response_lens: Sequence[int], shares: Sequence[float] | None = None, *, mode: str
) -> float:
    """The weight in which the aggregation `mode` counts sequences.

    It is their number, with their `shares` of an episode, one each by default, or the number of
    their tokens if the weight counts tokens. A sum over tokens is divided by 1.
    """
    row = lookup(AGGREGATIONS, mode, "algorithm.aggregation")
    if row.weight == "none":
        return 1.0
    n_sequences = len(response_lens) if shares is None else sum(shares)
    return float(sum(response_lens) if row.weight == "tokens" else n_sequences)


def policy_weight(samples: Sequence[TrainingSample], cfg: AlgorithmConfig) -> float:
    """The weight of samples in the denominator of the policy's terms."""
    lens, shares = [s.n_loss_tokens for s in samples], [s.share for s in samples]
    return sequences_weight(lens, shares, mode=cfg.aggregation)


def with_part(
    sample: TrainingSample, tokens: str, mask: np.ndarray, source: str, cfg: AlgorithmConfig
) -> TrainingSample:
    """The sample with the response tokens in `mask` in their part of the objective, if one is set.

    `tokens` is the kind of the tokens (PART_TOKENS), `source` that of the row.
    """
    part = part_of(parse_parts(cfg.parts), tokens, source)
    if part is None:
        return sample
    return dataclasses.replace(sample, parts=np.where(mask, part + 1, 0).astype(np.int32))


def with_observations(
    samples: Sequence[TrainingSample], source: str, cfg: AlgorithmConfig
) -> list[TrainingSample]:
    """The samples of a rollout with the tokens of its environment in their part, if one is set.

    Tokens of images are in none: the model never writes them.
    """
    return [with_part(s, "observations", ~s.loss_mask & is_text(s), source, cfg) for s in samples]


def given_samples(
    demonstrations: Sequence[Demonstration], cfg: AlgorithmConfig
) -> list[TrainingSample]:
    """Demonstrations as samples without tokens of the policy."""
    return [
        with_part(
            dataclasses.replace(to_sample(d), loss_mask=np.zeros_like(d.loss_mask)),
            "demonstrations",
            d.loss_mask,
            d.source,
            cfg,
        )
        for d in demonstrations
    ]


def part_coefs(
    samples: Sequence[TrainingSample], weight: float, step: int, cfg: AlgorithmConfig
) -> tuple[float, ...]:
    """The factor c_k = w_k W / N_k of each part's sum over the tokens of a mini-batch.

    W = `weight` is the denominator of the policy's terms, by which the update divides the loss. N_k
    is that of the part, by its aggregation. A part without tokens has the factor 0.
    """
    coefs = []
    for k, part in enumerate(parse_parts(cfg.parts)):
        lens = [int((s.parts == k + 1).sum()) for s in samples if s.parts is not None]
        n = sequences_weight([length for length in lens if length], mode=part.options.aggregation)
        coefs.append(part.weight(step) * weight / n if n else 0.0)
    return tuple(coefs)


def part_metrics(
    samples: Sequence[TrainingSample], step: int, cfg: AlgorithmConfig
) -> dict[str, float]:
    """loss/<part>_tokens of a step and loss/<part>_weight."""
    metrics = {}
    for k, part in enumerate(parse_parts(cfg.parts)):
        n_tokens = sum(int((s.parts == k + 1).sum()) for s in samples if s.parts is not None)
        metrics[f"loss/{part.name}_tokens"] = float(n_tokens)
        metrics[f"loss/{part.name}_weight"] = part.weight(step)
    return metrics


def with_trained_parts(
    metrics: dict[str, float], batches: Sequence[Batch], cfg: AlgorithmConfig
) -> dict[str, float]:
    """The metrics of an update without the losses of parts that have no token in it."""
    trained = {k for b in batches if b.parts is not None for k in np.unique(b.parts).tolist()}
    absent = {
        f"loss/{p.name}" for k, p in enumerate(parse_parts(cfg.parts)) if k + 1 not in trained
    }
    return {name: value for name, value in metrics.items() if name not in absent}
