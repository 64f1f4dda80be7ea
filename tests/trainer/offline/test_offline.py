"""Tests of whole SFT and DPO runs on a tiny model: learning, resuming, and packing.

They cover jaxrl/sft.py, jaxrl/dpo.py, and sft.py, dpo.py and objective.py in jaxrl/trainer/offline;
tests/trainer/test_reward_models.py covers reward_model.py."""

import dataclasses
import itertools
import json
import math
from pathlib import Path

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from safetensors.numpy import load_file

from jaxrl import dpo, sft
from jaxrl.algorithms.losses.preference_table import length_weights, weighted_losses
from jaxrl.config.keys import PreferenceConfig, RunConfig
from jaxrl.config.resolve import default_config, resolve
from jaxrl.data.demonstrations import to_sample
from jaxrl.data.packing import pack
from jaxrl.data.preferences import Labelled, Pair
from jaxrl.data.tokenizer import load_tokenizer
from jaxrl.learner.loss import score_tokens
from jaxrl.runtime.signals import Interrupted
from jaxrl.tracking.first_samples import read_first_samples
from jaxrl.trainer.core import Core
from jaxrl.trainer.offline.dpo import (
    DPO,
    completions_of,
    make_samples,
    measure,
    mismatched,
)
from jaxrl.trainer.offline.objective import OfflineRun, with_objective
from jaxrl.trainer.offline.sft import SFT
from jaxrl.trainer.offline.unpaired import as_labelled, labelled_samples
from jaxrl.trainer.setup.opening import open_offline
from jaxrl.types import Demonstration
from sharding.rules import TRAIN
from tests.marks import graded
from tests.trainer.conftest import perturbed

QUESTIONS = [(f"{a} + {b}?", str(a + b), str(a + b + 1)) for a in range(6) for b in range(4)]

PREFERENCES = {
    "dpo": {},
    "ipo": {"loss": "ipo", "ipo_reduction": "mean"},
    "aot": {"loss": "aot", "ld_alpha": 0.5},
    "mpo": {"more_losses": ("bco_pair", "sft"), "loss_weights": (0.8, 0.2, 1.0)},
    "f_dpo": {"f_divergence": "js"},
    "wpo": {"weighted": True},
    "bco": {"loss": "bco"},
    "simpo": {"loss": "simpo", "beta": 2.0},
    "orpo": {"loss": "orpo"},
}


def write(folder, rows):
    path = folder / "rows.jsonl"
    path.write_text("\n".join(json.dumps(row) for row in rows))
    return (str(path),)


@pytest.fixture
def sft_config(tiny_config, tmp_path):
    """6 steps of 8 short sums with their answers; the held-out data is the training data."""
    rows = [{"question": q, "answer": f"It is {a}."} for q, a, _ in QUESTIONS]
    return offline(tiny_config, write(tmp_path, rows))


@pytest.fixture
def dpo_config(tiny_config, tmp_path):
    """The same sums with a chosen and a rejected answer."""
    rows = [{"prompt": q, "chosen": f"It is {a}.", "rejected": f"{b}?"} for q, a, b in QUESTIONS]
    return offline(tiny_config, write(tmp_path, rows))


def offline(config, source):
    """The config without the keys of sampling runs, on the data of `source`."""
    config.rollout.update(default_config().rollout)
    config.reward.update(default_config().reward)
    config.data.train = config.data.val = source
    config.data.prompts_per_step = 8
    config.total_steps = 6
    config.learner.lr = 1e-2
    return config


def metrics(run_dir):
    lines = (Path(run_dir) / "metrics.jsonl").read_text().splitlines()
    return [
        {k: v for k, v in json.loads(line).items() if "time" not in k and "_per_s" not in k}
        for line in lines
    ]


def weights(run_dir):
    return load_file(Path(run_dir) / "hf" / "model.safetensors")


def test_sft_learns_its_answers_and_writes_a_complete_folder(sft_config):
    assert sft.train(resolve(sft_config))
    folder = Path(sft_config.run_dir)
    for name in ("config.json", "report.html", "checkpoints/6", "hf/model.safetensors"):
        assert (folder / name).exists(), name
    lines = metrics(folder)
    held_out = [line["val/nll"] for line in lines if "val/nll" in line]
    assert [line["step"] for line in lines if "val/nll" in line] == [0, 6]
    assert held_out[1] < 0.6 * held_out[0]
    trained = [line["loss/nll"] for line in lines if "loss/nll" in line]
    assert len(trained) == 6 and trained[-1] < trained[0]
    assert trained[0] == pytest.approx(held_out[0], rel=0.1)
    report = (folder / "report.html").read_text()
    assert "Not logged" not in report
    samples = read_first_samples(folder)
    assert len(samples) == 8
    for row, parts in samples:  # the order of the first step's rows
        question, answer, _ = QUESTIONS[row]
        asked = f"<|im_start|>user\n{question}<|im_end|>\n<|im_start|>assistant\n"
        assert parts == [(asked, False), (f"It is {answer}.<|im_end|>", True)]
        assert f"<mark>It is {answer}.&lt;|im_end|&gt;</mark>" in report
    every = [json.loads(line) for line in (folder / "metrics.jsonl").read_text().splitlines()]
    timed = [{name for name in line if "time/" in name} for line in every if "val/nll" in line]
    assert timed == [{"time/val_s"}] * 2, "validation time is only the scoring of held-out answers"


@pytest.mark.parametrize("train", [sft.train, dpo.train])
def test_lengths_beyond_the_context_of_the_model_are_refused_at_the_start(sft_config, train):
    sft_config.data.max_prompt_len = 200  # of 256, with max_response_len
    sft_config.data.max_response_len = 57
    sft_config.learner.token_budget = 512
    with pytest.raises(ValueError, match=r"may take 257 tokens, the model supports 256; lower"):
        train(resolve(sft_config))


@pytest.mark.thorough
def test_dpo_learns_to_prefer_the_chosen_answers(dpo_config):
    assert dpo.train(resolve(dpo_config))
    lines = metrics(dpo_config.run_dir)
    first, last = [line for line in lines if "val/accuracy" in line]
    assert first["val/loss"] == pytest.approx(np.log(2), abs=1e-5), "policy and reference are equal"
    assert last["val/accuracy"] > 0.8 and last["val/loss"] < 0.6 and last["val/margin"] > 0
    assert lines[1]["preference/loss"] == pytest.approx(np.log(2), abs=1e-5)


def demonstration(prompt, completion):
    return Demonstration(
        id=0,
        prompt_tokens=np.array(prompt, np.int32),
        tokens=np.array(completion, np.int32),
        loss_mask=np.ones(len(completion), bool),
    )


PAIRS = [
    Pair(i, demonstration([i] * i, [10 + i]), demonstration([i] * i, [20 + i, 30 + i]))
    for i in (1, 2, 3)
]


def test_kto_estimates_its_kl_from_all_answers_with_the_prompts_of_other_pairs():
    found = mismatched(PAIRS, max_len=4)
    prompts = [len(d.prompt_tokens) for d in found]
    assert prompts == [2, 3, 1, 2, 3, 1], "the prompt of the next pair; prompt i has i tokens"
    answers = [d.tokens.tolist() for d in found]
    # chosen, then rejected; the second has one token left next to three of the prompt
    assert answers == [[11], [12], [13], [21, 31], [22], [23, 33]]
    assert all(len(d.loss_mask) == len(d.tokens) for d in found)
    assert mismatched(PAIRS[:1], max_len=4) == [], "a single pair has no other prompt"


@pytest.mark.parametrize(("loss", "n_scored"), [("kto", 10), ("apo_zero_unpaired", 5)])
def test_labelled_answers_have_the_advantages_of_pairs(monkeypatch, loss, n_scored):
    """KTO also scores each of the five answers with another prompt, for its KL."""
    given = itertools.count()

    def fake_logps(core, completions, score):
        assert len(completions) == n_scored
        return [np.full(d.n_loss_tokens, 0.1 * next(given)) for d in completions]

    monkeypatch.setattr("jaxrl.trainer.offline.unpaired.logps", fake_logps)
    core = object.__new__(Core)
    core.cfg = RunConfig(preference=PreferenceConfig(loss=loss, rejected_weight=2.0))
    run = OfflineRun(core, DPO)
    items = as_labelled([PAIRS[0], Labelled(7, PAIRS[1].chosen, True), *PAIRS[2:]])
    assert [item.desirable for item in items] == [True, False, True, True, False]
    samples, found = labelled_samples(run, items)
    assert [s.prompt_id for s in samples] == [item.completion.id for item in items]
    signs = [float(np.sign(s.advantages[0])) for s in samples if s.advantages is not None]
    assert signs == [1, -1, 1, 1, -1]
    assert set(found) == {"preference/loss", "preference/accuracy", "preference/margin"}


@pytest.mark.thorough
def test_kto_learns_from_labels_without_pairs(dpo_config, tmp_path):
    rows = [{"prompt": q, "completion": f"It is {a}.", "label": True} for q, a, _ in QUESTIONS]
    rows += [{"prompt": q, "completion": f"{b}?", "label": False} for q, _, b in QUESTIONS[:12]]
    config = offline(dpo_config, write(tmp_path, rows))
    config.preference.loss, config.checkpoint.export_hf = "kto", False
    assert dpo.train(resolve(config))
    first, last = [line for line in metrics(config.run_dir) if "val/loss" in line]
    assert last["val/loss"] < first["val/loss"] and last["val/accuracy"] > 0.6


def samples_of_pairs(monkeypatch, **keys):
    """Samples and metrics of PAIRS, whose tokens have the logprobs -1, -1.1, ... in their order."""
    scored = []

    def fake_logps(core, completions, score):
        scored.append(score)
        given = itertools.count()
        return [np.full(d.n_loss_tokens, -1.0 - 0.1 * next(given)) for d in completions]

    monkeypatch.setattr("jaxrl.trainer.offline.dpo.logps", fake_logps)
    core = object.__new__(Core)
    core.cfg = RunConfig(preference=PreferenceConfig(**keys))
    samples, found = make_samples(OfflineRun(core, DPO), PAIRS)
    return [s.advantages for s in samples], found, len(scored)


def test_each_token_has_the_slope_of_the_loss_times_its_weight(monkeypatch):
    advantages, found, n_scored = samples_of_pairs(monkeypatch, beta=0.5, ld_alpha=0.25)
    assert n_scored == 2 and found["preference/loss"] == pytest.approx(math.log(2))
    # r = 0: the slope of -log σ is -β / 2, times 2 completions of a pair, negated
    for chosen, rejected in zip(advantages[:3], advantages[3:], strict=True):
        np.testing.assert_allclose(chosen, [0.5])
        np.testing.assert_allclose(rejected, [-0.5, -0.125])


def test_losses_without_a_reference_score_the_policy_only(monkeypatch):
    advantages, found, n_scored = samples_of_pairs(monkeypatch, loss="simpo", simpo_gamma=0.0)
    assert n_scored == 1
    # means -1, -1.1, -1.2 and -1.3, -1.4, -1.5: a margin of 0.3, times β = 0.1
    assert found["preference/margin"] == pytest.approx(0.03)
    slope = 0.1 / (1 + math.exp(0.03))
    for chosen, rejected in zip(advantages[:3], advantages[3:], strict=True):
        np.testing.assert_allclose(chosen, [2 * slope], rtol=1e-5)
        np.testing.assert_allclose(rejected, [-slope, -slope], rtol=1e-5)


@pytest.mark.thorough
@pytest.mark.parametrize("loss", ["ipo", "kto", "simpo"])
def test_preference_losses_fall(dpo_config, loss):
    dpo_config.preference.loss = loss
    dpo_config.checkpoint.export_hf = False
    assert dpo.train(resolve(dpo_config))
    first, last = [line for line in metrics(dpo_config.run_dir) if "val/loss" in line]
    assert last["val/loss"] < first["val/loss"] and last["val/margin"] > 0


@pytest.mark.parametrize("name", graded(PREFERENCES, thorough=["dpo", "aot", "wpo", "bco"]))
def test_the_gradient_of_the_samples_equals_that_of_the_loss(dpo_config, name):
    """Packed samples in two passes, against the derivative of the loss of whole pairs."""
    dpo_config.preference.update(PREFERENCES[name])
    cfg = with_objective(resolve(dpo_config), DPO)
    with open_offline(cfg, DPO) as run:
        pairs = next(run.core.iterator)
        moved = perturbed(run.core.state.params)
        run.core.state = dataclasses.replace(run.core.state, params=moved)
        samples, _ = make_samples(run, pairs)
        packed = pack(samples, shapes=cfg.learner.shapes, align=64, n_ranks=1)

        batches = [run.core.learner.update.put(p.batch) for p in packed]

        def row_logps(params, batch, weights):
            logp, _ = score_tokens(params, batch, cfg=cfg, rules=TRAIN)
            return jnp.sum(jnp.where(batch.mask > 0, weights * logp, 0.0), axis=1)

        def surrogate(params):
            total = sum(row_logps(params, b, b.advantages).sum() for b in batches)
            return -total / (2 * len(pairs))

        measured = measure(run, pairs).logps  # of its shift and weights
        assert (float(measured.shift) != 0) == (name == "bco")
        assert np.all(np.asarray(measured.weights) == 1) == (name != "wpo")
        completions = completions_of(pairs)
        lens = np.array([d.n_loss_tokens for d in completions])
        token_weights = length_weights(lens, cfg.preference.ld_alpha)
        rows = [  # the weights of tokens are in the field of advantages
            pack([to_sample(d, w)], shapes=((1, 256),), align=64, n_ranks=1)[0].batch
            for d, w in zip(completions, token_weights, strict=True)
        ]
        one_per_row = run.core.learner.update.put(
            jax.tree.map(lambda *row: np.concatenate(row), *rows)
        )

        def direct(params):
            policy = row_logps(params, one_per_row, one_per_row.advantages)
            reference = jnp.zeros_like(policy)
            if run.core.ref_params is not None:
                reference = row_logps(run.core.ref_params, one_per_row, one_per_row.advantages)
            policy, reference = (jax.reshard(x, jax.P()) for x in (policy, reference))
            logps = dataclasses.replace(measured, ratio=policy - reference, reference=reference)
            return weighted_losses(logps, cfg.preference).mean()

        got, want = (jax.jit(jax.grad(f))(moved) for f in (surrogate, direct))
        for a, b in zip(jax.tree.leaves(got), jax.tree.leaves(want), strict=True):
            np.testing.assert_allclose(a, b, rtol=1e-4, atol=1e-6)


@pytest.mark.thorough
@pytest.mark.parametrize("name", ["sft", "dpo", "aot", "mpo", "orpo", "wpo"])
def test_packing_does_not_change_the_trained_weights(name, request, tmp_path):
    objective = "sft" if name == "sft" else "dpo"
    config = request.getfixturevalue(f"{objective}_config")
    config.preference.update(PREFERENCES.get(name, {}))
    config.total_steps, config.learner.eps = 3, 1e-4
    train = {"sft": sft, "dpo": dpo}[objective].train
    assert train(resolve(config))
    reference = config.run_dir
    config.run_dir = str(tmp_path / "other")
    config.learner.token_budget, config.learner.segment_align = 144, 8
    assert train(resolve(config))
    for name, one in weights(reference).items():
        np.testing.assert_allclose(weights(config.run_dir)[name], one, rtol=0, atol=2e-5)


@pytest.mark.thorough
def test_an_interrupted_run_resumes_bitwise(dpo_config, tmp_path, monkeypatch):
    assert dpo.train(resolve(dpo_config))
    uninterrupted = dpo_config.run_dir
    dpo_config.run_dir = str(tmp_path / "resumed")

    def interrupt_at_step_4(run, pairs):
        if run.core.clock.step == 3 and run.core.clock.first_step == 0:
            raise Interrupted("SIGINT")
        return make_samples(run, pairs)

    monkeypatch.setattr(dpo, "DPO", dataclasses.replace(DPO, make_samples=interrupt_at_step_4))
    assert not dpo.train(resolve(dpo_config))
    assert dpo.train(resolve(dpo_config))
    for name, one in weights(uninterrupted).items():
        np.testing.assert_array_equal(weights(dpo_config.run_dir)[name], one, err_msg=name)
    assert metrics(dpo_config.run_dir) == metrics(uninterrupted)


def test_keys_of_sampling_runs_are_rejected(sft_config):
    sft_config.rollout.n = 3
    sft_config.learner.epochs = 2
    sft_config.preference.beta = 0.5
    with pytest.raises(
        ValueError, match=r"rollout\.n, config\.preference\.beta, .*epochs .*remove"
    ):
        with_objective(resolve(sft_config), SFT)


@pytest.mark.parametrize(
    "loss",
    [pytest.param("dpo", marks=pytest.mark.thorough), pytest.param("kto", marks=pytest.mark.slow)],
)
def test_preference_losses_of_adapters_have_the_base_as_their_reference(dpo_config, loss):
    dpo_config.preference.loss = loss
    dpo_config.lora.rank, dpo_config.lora.alpha = 8, 16.0
    dpo_config.learner.lr = 0.02
    assert dpo.train(resolve(dpo_config))
    first, last = [line for line in metrics(dpo_config.run_dir) if "val/accuracy" in line]
    at_reference = math.log(2) if loss == "dpo" else 0.5  # policy and base are equal
    assert first["val/loss"] == pytest.approx(at_reference, abs=1e-6)
    fraction = 0.9 if loss == "dpo" else 0.97
    assert last["val/loss"] < fraction * first["val/loss"] and last["val/accuracy"] == 1.0
    assert (Path(dpo_config.run_dir) / "adapter" / "adapter_model.safetensors").is_file()


@pytest.mark.slow
def test_sft_trains_adapters(sft_config):
    sft_config.lora.rank, sft_config.lora.alpha = 8, 16.0
    sft_config.learner.lr, sft_config.total_steps = 0.02, 4
    assert sft.train(resolve(sft_config))
    first, last = [line["val/nll"] for line in metrics(sft_config.run_dir) if "val/nll" in line]
    assert last < 0.98 * first  # 5.56 -> 5.33, below a random embedding and unembedding
    base = load_file(Path(sft_config.model.path) / "model.safetensors")
    found = weights(sft_config.run_dir)
    changed = {name for name in base if np.any(found[name] != base[name])}
    assert changed and all("_proj" in name for name in changed)


@pytest.mark.thorough
def test_sft_approaches_the_most_likely_tokens_of_a_teacher_in_a_column(sft_config, tmp_path):
    rows = [{"question": q, "answer": f"It is {a}."} for q, a, _ in QUESTIONS]
    tokenizer = load_tokenizer(sft_config.model.path)
    for row in rows[1:]:  # without a teacher the first one's likelihood is learned
        tokens = tokenizer(row["answer"] + "<|im_end|>", add_special_tokens=False)["input_ids"]
        row["top"] = [
            {"token": t, "ids": [t, t % 200 + 5, 3], "logprobs": [-0.2, -2.0, -4.0]} for t in tokens
        ]
    rows[0]["top"] = None
    sft_config.data.train = write(tmp_path, rows)
    sft_config.data.teacher_logprobs = "top"
    with pytest.raises(ValueError, match=r"teacher_logprobs='top' has no weight.*kl_coef=1\.0"):
        resolve(sft_config)
    sft_config.algorithm.update(kl="jsd", kl_beta=0.0, kl_top_k=2, kl_coef=1.0)
    assert sft.train(resolve(sft_config))
    lines = [line for line in metrics(sft_config.run_dir) if "loss/kl" in line]
    assert len(lines) == 6 and lines[-1]["loss/kl"] < 0.8 * lines[0]["loss/kl"]
    assert max(line["loss/nll"] for line in lines) > 0  # of the row without a teacher
    sft_config.data.teacher_logprobs, sft_config.run_dir = "", str(tmp_path / "unused")
    with pytest.raises(ValueError, match=r"config\.algorithm\.kl.* have no effect in offline"):
        sft.train(resolve(sft_config))
