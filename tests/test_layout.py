"""Scoring on a separate mesh gives the same logprobs as one device for every micro-batch.

Tests of jaxrl/layout.py.
"""

import dataclasses
import functools
import types

import jax
import numpy as np
import pytest

from jaxrl.config.keys import MeshConfig, RunConfig, ScoringConfig
from jaxrl.config.keys.schedule import ScheduleConfig
from jaxrl.config.resolve import default_config, resolve
from jaxrl.layout import role_layout, split_devices, training_rules
from jaxrl.learner.scorer import Scorer
from jaxrl.learner.step import take_tokens
from sharding import TRAIN, bytes_per_device, make_mesh
from tests.learner.tiny_policy import MODEL, batches, new_params, programs, rollouts, run_config

CFG = run_config()
# Three micro-batches of 2 rows of 128 tokens, and one of 2 rows of 64.
BATCHES = [
    *batches(rollouts(60), row_len=128, token_budget=128, n_ranks=2)[:3],
    *batches(rollouts(6), row_len=64, token_budget=64, n_ranks=2)[:1],
]


@functools.cache
def alone() -> list[np.ndarray]:
    with jax.set_mesh(make_mesh()):
        _, update, score = programs(CFG)
        params = new_params()
        return [take_tokens(score(params, update.put(b))[0], TRAIN) for b in BATCHES]


@pytest.mark.parametrize(
    ("mesh", "role", "role_mesh", "n_joined"),
    [
        pytest.param(
            dict(fsdp=2, sequence=4),
            dict(sequence=1),
            dict(fsdp=8),
            4,
            marks=pytest.mark.thorough,
        ),
        pytest.param(
            dict(fsdp=2, sequence=4),
            dict(sequence=2, tensor=2),
            dict(fsdp=2, sequence=2, tensor=2),
            1,
            marks=pytest.mark.thorough,
        ),
        pytest.param(
            dict(replica=2, fsdp=1),
            dict(sequence=2),
            dict(sequence=2),
            1,
            marks=pytest.mark.thorough,
        ),
    ],
)
def test_scores_of_a_role_equal_those_of_one_device(mesh, role, role_mesh, n_joined):
    assert len(BATCHES) == 4 and len({b.tokens.shape for b in BATCHES}) == 2
    cfg = dataclasses.replace(CFG, mesh=MeshConfig(**mesh), score=ScoringConfig(**role))
    with jax.set_mesh(make_mesh(**mesh)):
        params = new_params(rules=training_rules(cfg))
        scorer = Scorer(cfg, role_layout(cfg, "score", MODEL, params.embed.dtype), cfg.score)
        in_place = scorer.layout.weight_bytes(params)[0] == bytes_per_device(params)
        assert in_place == (
            role_mesh == dict(fsdp=8)
        )  # Ulysses shards weights over the same devices
        calls = []
        with scorer.layout.weights(params) as weights:
            sizes = jax.sharding.get_mesh().shape
            logps = scorer.logps(weights, BATCHES, on_batch=lambda: calls.append(1))
    assert {axis: n for axis, n in sizes.items() if n > 1} == role_mesh
    assert len(calls) == -(-3 // n_joined) + 1  # micro-batches of one shape are joined
    for got, want in zip(logps, alone(), strict=True):
        np.testing.assert_allclose(got, want, atol=1e-5)


def test_a_token_budget_of_scoring_joins_micro_batches_without_changing_logprobs():
    """Three micro-batches of one shape are one call of three times the tokens."""
    budget = 3 * CFG.learner.token_budget
    cfg = dataclasses.replace(CFG, score=ScoringConfig(token_budget=budget))
    with jax.set_mesh(make_mesh()):
        params, calls = new_params(), []
        scorer = Scorer(cfg, role_layout(cfg, "score", MODEL, params.embed.dtype), cfg.score)
        logps = scorer.logps(params, BATCHES, on_batch=lambda: calls.append(1))
    assert scorer.n_joined == 3 and len(calls) == 2
    for got, want in zip(logps, alone(), strict=True):
        np.testing.assert_allclose(got, want, atol=1e-5)


def test_scores_are_read_after_the_next_call_is_dispatched(monkeypatch):
    events, [batch, *_] = [], BATCHES

    def read(logp, rules):
        events.append("read")
        return np.asarray(logp)

    monkeypatch.setattr("jaxrl.learner.scorer.take_tokens", read)
    with jax.set_mesh(make_mesh()):
        params = new_params()
        scorer = Scorer(CFG, role_layout(CFG, "score", MODEL, params.embed.dtype), CFG.score)
        monkeypatch.setattr(scorer, "score", lambda params, batch: (batch.mask, None))
        logps = scorer.logps(params, [batch] * 3, on_batch=lambda: events.append("call"))
    assert events == ["call", "call", "read", "call", "read", "read"]
    assert len(logps) == 3


def test_a_role_with_the_mesh_of_training_shares_its_weights():
    cfg = dataclasses.replace(CFG, mesh=MeshConfig(fsdp=4, tensor=2), score=ScoringConfig(tensor=2))
    with jax.set_mesh(make_mesh(fsdp=4, tensor=2)):
        layout = role_layout(cfg, "score", MODEL, np.dtype("float32"))
    assert layout.resharding is None and layout.rules == training_rules(cfg)


def invalid(tiny: dict, words: str, **sections):
    return pytest.param(tiny, sections, words, id=words[:24])


@pytest.mark.parametrize(
    ("mesh", "sections", "words"),
    [
        invalid(dict(fsdp=8), "ref.tensor=3.*needs a multiple of 3", ref=dict(tensor=3)),
        invalid(dict(fsdp=8), "score.sequence=3 devices cannot share", score=dict(sequence=3)),
        invalid(dict(fsdp=8), "ref.token_budget=9000 is not a multiple of .*=8192; set 16384",
                ref=dict(token_budget=9000)),
        invalid(dict(fsdp=8), "ref.tensor=2 gives the reference another mesh.*'full'",
              ref=dict(tensor=2), algorithm=dict(kl="full", kl_coef=0.1)),
    ],
)  # fmt: skip
def test_invalid_role_sizes_say_what_to_set(mesh, sections, words):
    config = default_config()
    config.update({"mesh": mesh, "model": {"path": "m"}, "data": {"train": ("task:addition",)}})
    config.update(sections)
    with pytest.raises(ValueError, match=words):
        resolve(config, n_devices=8)


def test_the_rollout_has_the_last_devices_of_each_process():
    devices = [types.SimpleNamespace(id=i, process_index=i // 4) for i in range(8)]
    cfg = RunConfig(schedule=ScheduleConfig(mode="async", rollout_devices=1))
    training, rollout = split_devices(cfg, devices)
    assert [device.id for device in training] == [0, 1, 2, 4, 5, 6]
    assert [device.id for device in rollout] == [3]  # of this process
    assert split_devices(RunConfig(), devices) == (devices, [])
