"""Every loss has the same gradient by 1F1B as on one device."""

import dataclasses
import functools

import jax
import numpy as np
import pytest

from jaxrl.config.keys import RunConfig
from jaxrl.data.support import PackedSets
from jaxrl.learner.loss import loss_gradients, policy_objective, value_objective
from jaxrl.learner.scorer import join_batches
from jaxrl.learner.step import put_batch
from jaxrl.learner.xla import compiler_options
from jaxrl.models.config import DecoderConfig, LoRA
from jaxrl.types import Batch
from sharding import PIPELINE, TRAIN, make_mesh
from tests.learner.test_prefixes import VALUES, packed
from tests.learner.tiny_policy import MODEL, QUICK_COMPILE, host_params, put_params, run_config
from tests.models.resized import resized

STACKED = resized(MODEL, L=2, stacked=True)
# Eight rows of 64 tokens with shared prefixes, values and returns.
ROWS = [p.batch for p in packed(True, VALUES, row_len=32)][:8]
BATCH = join_batches(ROWS)


def learner_config(schedule: str, critic: dict | None = None, **algorithm) -> RunConfig:
    learner = dict(remat="full", pipeline_schedule=schedule)
    cfg = run_config(learner, old_logp="rollout", **algorithm)
    return dataclasses.replace(cfg, critic=dataclasses.replace(cfg.critic, **critic or {}))


def restricted(batch: Batch) -> Batch:
    """The batch with supports of two ids, one of them the target."""
    ids = np.stack([batch.targets.ravel(), (batch.targets.ravel() + 7) % MODEL.V], axis=1)
    index = np.repeat(np.arange(len(ids)), 2)
    return dataclasses.replace(batch, support=PackedSets(index, ids.ravel().astype(np.int32)))


def host_weights(model: DecoderConfig, seed: int):
    """Random weights, also of heads and of the second factors of adapters."""
    draw = np.random.default_rng(seed).standard_normal
    moved = lambda a: a + 0.1 * draw(a.shape).astype(a.dtype)  # noqa: E731
    return jax.tree.map(moved, host_params(model, seed, "float32"))


def gradients(schedule, mesh, rules, model, objective, batch, **changes):
    """(gradient, sums) of a micro-batch; the reference model has other weights."""
    cfg = learner_config(schedule, **changes)
    options = compiler_options(QUICK_COMPILE, "cpu")

    @functools.partial(jax.jit, compiler_options=options)
    def run(params, ref, batch):
        return loss_gradients(objective, params, ref, batch, cfg=cfg, rules=rules)

    with jax.set_mesh(make_mesh(None, **mesh)):
        params, ref = (put_params(host_weights(model, seed), model, rules) for seed in range(2))
        n_vocab = model.V if batch.support is not None else 0
        return jax.device_get(run(params, ref, put_batch(batch, rules, n_vocab)))


LORA = LoRA(4, 8.0, targets=("q_proj", "up_proj", "embed_tokens", "lm_head"))
CASES = {
    "shared prefixes": (STACKED, policy_objective, BATCH, {}),
    "segments": (
        STACKED,
        policy_objective,
        BATCH,
        dict(policy_loss="gspo", aggregation="seq_mean_token_mean", entropy_coef=0.01),
    ),
    "a KL over the vocabulary": (STACKED, policy_objective, BATCH, dict(kl_coef=0.1, kl="full")),
    "a kept sampling mask": (
        STACKED,
        policy_objective,
        restricted(BATCH),
        dict(keep_sampling_mask=True),
    ),
    "adapters": (dataclasses.replace(STACKED, tied=False, lora=LORA), policy_objective, BATCH, {}),
    "a shared critic": (
        dataclasses.replace(STACKED, heads=("vocab", "score")),
        policy_objective,
        BATCH,
        dict(advantage="gae", critic=dict(shared=True, value_clip=0.0)),
    ),
    "a separate critic": (
        dataclasses.replace(STACKED, heads=("score",)),
        value_objective,
        BATCH,
        dict(advantage="gae", critic=dict(value_clip=0.0)),
    ),
}


@pytest.mark.slow
@pytest.mark.parametrize("case", CASES)
def test_losses_have_the_gradients_of_one_device(case):
    model, objective, batch, changes = CASES[case]
    want = gradients("gpipe", {}, TRAIN, model, objective, batch, **changes)
    got = gradients("1f1b", dict(stage=2, fsdp=2), PIPELINE, model, objective, batch, **changes)
    for a, b in zip(jax.tree.leaves(got), jax.tree.leaves(want), strict=True):
        np.testing.assert_allclose(a, b, rtol=2e-5, atol=2e-5 * np.abs(b).max())
    assert all(np.abs(leaf).max() > 0 for leaf in jax.tree.leaves(want[0]))
