"""Responses with observation tokens, uneven lengths and padding: as rows, and packed by jaxrl.

The rows [N, T] are those of golden/policy.json (scripts/make_golden_policy.py).
"""

import dataclasses
import json
from pathlib import Path

import jax
import jax.numpy as jnp
import numpy as np

from jaxrl.algorithms.losses.aggregation import aggregate, apply_mask, sequences_weight
from jaxrl.config.keys import AlgorithmConfig, DataConfig, RunConfig
from jaxrl.data.packing import gather, pack
from jaxrl.learner.policy_objective import policy_loss_inputs
from jaxrl.types import TrainingSample
from tests.algorithms import peers

GOLDEN = json.loads((Path(__file__).parent / "golden" / "policy.json").read_text())
ROWS = {name: np.array(rows) for name, rows in GOLDEN["batch"].items()}
SAMPLES, LONGEST = GOLDEN["n_samples"], GOLDEN["longest"]
LENGTHS, MASK = ROWS["lengths"], ROWS["mask"]
N, T = MASK.shape
IN_RESPONSE = np.arange(T) < LENGTHS[:, None]
BATCH = peers.Responses(
    mask=MASK,
    logp=ROWS["logp"],
    old_logp=ROWS["old_logp"],
    rollout_logp=ROWS["rollout_logp"],
    ref_logp=ROWS["ref_logp"],
    advantages=ROWS["advantages"],
    selected=(np.random.default_rng(4).random((N, T)) > 0.6).astype(float),
)


def sample(i: int) -> TrainingSample:
    """Response i after a prompt of 2 to 5 tokens."""
    inside = IN_RESPONSE[i]
    return TrainingSample(
        prompt_tokens=np.arange(2 + i % 4, dtype=np.int32),
        tokens=np.arange(LENGTHS[i], dtype=np.int32),
        loss_mask=MASK[i][inside] > 0,
        rollout_logp=BATCH.rollout_logp[i][inside].astype(np.float32),
        advantages=BATCH.advantages[i][inside].astype(np.float32),
        selected=BATCH.selected[i][inside] > 0,
        group=i // SAMPLES,
    )


PACKED = pack([sample(i) for i in range(N)], shapes=((4, 16),), align=4, n_ranks=1)


def placed(rows):
    """[N, T] values at the tokens of every micro-batch; 50 at prompts and padding."""
    arrays = []
    for micro in PACKED:
        array = np.full(micro.batch.tokens.shape, 50.0, np.float32)
        for span in micro.spans:
            values = rows[span.item][: span.length]
            array[span.row, span.start : span.start + span.length] = values
        arrays.append(array)
    return arrays


FILLED = [
    dataclasses.replace(
        micro,
        batch=jax.tree.map(jnp.asarray, micro.batch.replace(old_logp=old, ref_logp=ref)),
    )
    for micro, old, ref in zip(PACKED, placed(BATCH.old_logp), placed(BATCH.ref_logp), strict=True)
]
MICRO_BATCHES = [micro.batch for micro in FILLED]


def rows_of(arrays):
    """Per-token values of the micro-batches as [N, T] rows, 0 outside of the mask."""
    found = gather([np.asarray(x) for x in arrays], PACKED)
    padded = [np.pad(x, (0, T - len(x))) for x in found]
    return np.stack(padded) * MASK


def config(**algorithm) -> RunConfig:
    keys = dict(old_logp="recompute", clip_low=0.2, clip_high=0.28) | algorithm
    data = DataConfig(max_response_len=LONGEST)
    return RunConfig(algorithm=AlgorithmConfig(**keys), data=data)


def inputs_of(logp, batch, cfg):
    """Everything that a loss, correction or rejection reads."""
    masked, behavior = (apply_mask(x, batch.mask) for x in (logp, batch.behavior_logp))
    return policy_loss_inputs(masked, behavior, batch, cfg)


def token_values(function, cfg):
    """[N, T] values of function(inputs, algorithm) over all micro-batches."""
    pairs = zip(MICRO_BATCHES, placed(BATCH.logp), strict=True)
    found = [
        function(inputs_of(jnp.asarray(logp), batch, cfg), cfg.algorithm) for batch, logp in pairs
    ]
    return rows_of(found)


def loss_and_gradient(function, cfg, aggregation="token_mean"):
    """Loss of all micro-batches and its gradient [N, T], for function(inputs, batch, algorithm)."""

    def total(logp, batch):
        loss = function(inputs_of(logp, batch, cfg), batch, cfg.algorithm)
        return aggregate(
            loss, batch.mask, batch.response_len, mode=aggregation, max_response_len=LONGEST
        )

    return summed(total, MICRO_BATCHES, aggregation)


def summed(total, batches, aggregation):
    """Loss and gradient [N, T] of total(logp, batch) -> (sum, weight) over all micro-batches."""
    sums, weights, grads = 0.0, 0.0, []
    for batch, logp in zip(batches, placed(BATCH.logp), strict=True):
        (value, weight), grad = jax.value_and_grad(total, has_aux=True)(jnp.asarray(logp), batch)
        assert not np.asarray(grad)[np.asarray(batch.mask) == 0].any()
        sums, weights = sums + float(value), weights + float(weight)
        grads.append(grad)
    weights += sequences_weight([], mode=aggregation)
    return sums / weights, rows_of(grads) / weights
