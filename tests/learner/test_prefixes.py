"""Updates and scores of rows with shared prefixes have the numbers of separate sequences.

They cover everything between packing and gradient that sees rows.
"""

import dataclasses
import functools

import jax
import numpy as np
import pytest

from jaxrl.config.choices import POLICY_LOSSES
from jaxrl.config.keys import ModelConfig, RunConfig
from jaxrl.data.packing import gather, pack, pack_samples
from jaxrl.kernels import attention, ring_attention
from jaxrl.kernels.attention.splash import attention_splash
from jaxrl.kernels.ring_attention.splash import ring_splash
from jaxrl.learner.step import take_tokens
from jaxrl.models.config import LoRA
from sharding import PIPELINE, RING, TRAIN, ULYSSES, make_mesh
from tests.learner.test_critic import BOTH
from tests.learner.test_experts import MOE
from tests.learner.tiny_policy import (
    HYBRID,
    MODEL,
    new_params,
    programs,
    rollouts,
    run_config,
    update_once,
)
from tests.models.resized import resized

N = 4  # samples per prompt


def groups():
    """Four prompts of 8 to 12 tokens with four responses each, and a continued conversation."""
    rng, samples = np.random.default_rng(1), []
    for i, r in enumerate(rollouts(4 * N)):
        if i % N == 0:
            prompt = rng.integers(0, MODEL.V, rng.integers(8, 13)).astype(np.int32)
        fields = dict(group=i // N, sample=i % N, selected=np.arange(len(r.tokens)) % 3 == 0)
        samples.append(dataclasses.replace(r, prompt_tokens=prompt, **fields))
    at = max(range(len(samples)), key=lambda i: len(samples[i].tokens)) + 1
    longest = samples[at - 1]
    continued = np.concatenate([longest.prompt_tokens, longest.tokens[:-1]])
    branch = dataclasses.replace(longest, prompt_tokens=continued, branch=1)
    return [*samples[:at], branch, *samples[at:]]


SAMPLES = groups()
VALUES = [
    dataclasses.replace(s, values=0.1 * s.rollout_logp, returns=-0.2 * s.rollout_logp)
    for s in SAMPLES
]


def packed(shared: bool, samples=SAMPLES, n_ranks=1, row_len=64):
    """Micro-batches of one shape, so that both kinds run the same program."""
    how = dict(shapes=((1, row_len),), align=4, n_ranks=n_ranks)
    return pack(samples, **how, share_prefixes=shared)


def both(cfg, model=MODEL, *, mesh=None, rules=TRAIN, samples=SAMPLES, n_ranks=1):
    """The numbers of an update with shared prefixes on a mesh, and of separate ones."""
    got = [p.batch for p in packed(True, samples, n_ranks)]
    want = [p.batch for p in packed(False, samples)]
    return (
        update_once(cfg, got, mesh or {}, model=model, rules=rules),
        update_once(cfg, want, {}, model=model),
    )


def assert_same(got, want, tol=1e-5):
    jax.tree.map(lambda a, b: np.testing.assert_allclose(a, b, rtol=tol, atol=tol), got, want)


def test_rows_hold_fewer_tokens():
    tokens = [sum((p.batch.segments > 0).sum() for p in packed(shared)) for shared in (True, False)]
    assert tokens[0] < 0.7 * tokens[1]
    assert any(len(np.unique(p.batch.copies)) > 3 for p in packed(True))  # a tree, with a branch


CASES = {name: dict(policy_loss=name) for name in POLICY_LOSSES} | {
    "sequence means and corrections": dict(
        policy_loss="gspo",
        aggregation="seq_mean_token_mean",
        correction="seq_tis",
        rejection="seq_mean_k1",
        rejection_low=0.01,
        rejection_high=100.0,
        entropy_coef=0.01,
    ),
}
THOROUGH = ("ppo_clip", "sequence means and corrections")


def marks(case):
    return pytest.mark.thorough if case in THOROUGH else pytest.mark.slow


@pytest.mark.parametrize("case", [pytest.param(c, marks=marks(c)) for c in CASES])
def test_every_loss_has_the_gradient_of_separate_sequences(case):
    assert_same(*both(run_config(old_logp="rollout", **CASES[case])))


@pytest.mark.thorough
def test_scores_are_those_of_separate_sequences():
    cfg, found = run_config(old_logp="rollout"), []
    with jax.set_mesh(make_mesh()):
        _, update, score = programs(cfg)
        for shared in (True, False):
            some = packed(shared)
            rows = [take_tokens(score(new_params(), update.put(p.batch))[0], TRAIN) for p in some]
            found.append(gather(rows, some))
    assert_same(*found)


DEEP = resized(MODEL, L=2, stacked=True, windows=(9, 0), attn_softcap=5.0)
MODELS = {
    "windows, caps and remat": (dict(learner=dict(remat="full")), DEEP),
    "adapters": ({}, dataclasses.replace(MODEL, lora=LoRA(rank=4, alpha=8.0))),
    "experts": (dict(learner=dict(router_aux_coef=0.5)), MOE),
    "states": (
        dict(learner=dict(segment_align=4)),
        dataclasses.replace(HYBRID, lora=LoRA(4, 8.0, targets=("in_proj_qkv", "q_proj"))),
    ),
}
MESHES = {
    "fsdp 2, tensor 2": (dict(fsdp=2, tensor=2), TRAIN, 2),
    "ring": (dict(fsdp=2, sequence=2), RING, 2),
    "ulysses": (dict(fsdp=2, sequence=2), ULYSSES, 2),
    "pipeline": (dict(fsdp=2, stage=2), PIPELINE, 2),
}


@pytest.mark.parametrize(
    "name",
    [
        pytest.param(n, marks=pytest.mark.thorough if n == "states" else pytest.mark.slow)
        for n in MODELS
    ],
)
def test_every_kind_of_model_has_the_gradient_of_separate_sequences(name):
    keys, model = MODELS[name]
    assert_same(*both(run_config(old_logp="rollout", **keys), model))


@pytest.mark.slow
def test_a_shared_critic_has_the_gradient_of_separate_sequences():
    cfg = run_config(advantage="gae", old_logp="rollout")
    cfg = dataclasses.replace(cfg, critic=dataclasses.replace(cfg.critic, shared=True))
    assert_same(*both(cfg, BOTH, samples=VALUES))


@pytest.mark.parametrize(
    "name",
    [
        pytest.param(n, marks=pytest.mark.thorough if n == "ring" else pytest.mark.slow)
        for n in MESHES
    ],
)
def test_every_mesh_has_the_gradient_of_separate_sequences(name):
    mesh, rules, n_ranks = MESHES[name]
    model = resized(MODEL, L=2, stacked=True)
    got, want = both(run_config(old_logp="rollout"), model, mesh=mesh, rules=rules, n_ranks=n_ranks)
    assert_same(got, want)


@pytest.mark.parametrize(
    ("mesh", "rules"),
    [
        pytest.param({}, TRAIN, marks=pytest.mark.thorough),
        pytest.param(dict(sequence=2), RING, marks=pytest.mark.slow),
    ],
    ids=["one device", "ring"],
)
def test_splash_has_the_gradient_of_separate_sequences(mesh, rules, monkeypatch):
    """Emulated, in place of the kernel that CPU selects."""
    for module, kernel in ((attention, attention_splash), (ring_attention, ring_splash)):
        emulated = functools.partial(kernel, interpret=True)
        monkeypatch.setitem(module.IMPLEMENTATIONS, "blockwise", emulated)
    assert_same(*both(run_config(old_logp="rollout"), DEEP, mesh=mesh, rules=rules))


def config(shared_prefixes: str, kernel: str = "auto") -> RunConfig:
    cfg = run_config(dict(shared_prefixes=shared_prefixes, segment_align=4))
    return dataclasses.replace(cfg, model=ModelConfig(attention=kernel))


def test_off_packs_every_sequence_separately():
    copies = {
        wanted: max(p.batch.copies.max() for p in pack_samples(SAMPLES, config(wanted), 1))
        for wanted in ("off", "auto", "on")
    }
    assert copies["off"] == 1 and copies["auto"] == copies["on"] > N


@pytest.mark.parametrize("kernel", ["auto", "blockwise", "splash", "triton"])
def test_all_other_kernels_share(kernel):
    assert config("auto", kernel).shares_prefixes and config("on", kernel).shares_prefixes
