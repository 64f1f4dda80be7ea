"""Tests of jaxrl/reward_model.py, jaxrl/trainer/offline/reward_model.py and
jaxrl/learner/reward_model.py: reward models trained from pairs, exported for transformers, and
used as the reward of a run."""

import contextlib
import dataclasses
import json
import random
import shutil
from pathlib import Path

import jax
import jax.numpy as jnp
import numpy as np
import pytest
import transformers
from safetensors.numpy import load_file, save_file

from jaxrl import reward_model
from jaxrl.algorithms.losses.preference import bradley_terry, centering
from jaxrl.config.resolve import default_config, resolve, resolve_evaluation
from jaxrl.data.packing import pack
from jaxrl.evaluate import evaluate
from jaxrl.learner.loss import loss_sums, value_objective
from jaxrl.learner.reward_model import ResponseScore, open_reward_model, with_score
from jaxrl.models.files.hf_load import load_model, model_config
from jaxrl.models.packed import forward_packed
from jaxrl.train import train
from jaxrl.trainer.offline.objective import with_objective
from jaxrl.trainer.offline.reward_model import PAIRS, make_samples, score_objective
from jaxrl.trainer.setup.opening import open_offline, open_run
from jaxrl.types import Episode, Prompt, Reward, Rollout
from sharding import make_mesh
from sharding.rules import TRAIN
from tests.trainer.conftest import perturbed


def pairs(n, seed):
    """Pairs: the chosen answer has letters from a to h, the rejected one from s to z."""
    draw = random.Random(seed)

    def answer(letters):
        return "".join(draw.choices(letters, k=draw.randint(2, 8)))

    return [
        {
            "prompt": f"{draw.randint(0, 99)}?",
            "chosen": answer("abcdefgh"),
            "rejected": answer("stuvwxyz"),
        }
        for _ in range(n)
    ]


def write(path, rows):
    path.write_text("\n".join(json.dumps(row) for row in rows))
    return (str(path),)


def with_rows(config, tmp_path, rows, *, steps, per_step):
    """Training of a reward model on each of rows(n, seed) once; 40 other rows are held out."""
    config.rollout.update(default_config().rollout)
    config.reward.update(default_config().reward)
    config.data.train = write(tmp_path / "train.jsonl", rows(steps * per_step, 0))
    config.data.val = write(tmp_path / "val.jsonl", rows(40, 1))
    config.data.prompts_per_step = per_step
    config.total_steps = steps
    config.learner.lr = 3e-3
    return config


@pytest.fixture
def ranking_config(tiny_config, tmp_path):
    """20 steps of 8 pairs."""
    return with_rows(tiny_config, tmp_path, pairs, steps=20, per_step=8)


@pytest.fixture(scope="session")
def tiny_scorer(tiny_model, tmp_path_factory):
    """The tiny model as a sequence classifier with a random head and its own chat template."""
    folder = tmp_path_factory.mktemp("scorer") / "model"
    shutil.copytree(tiny_model, folder)
    tensors = load_file(folder / "model.safetensors")
    tensors["score.weight"] = np.random.default_rng(0).normal(size=(1, 32)).astype(np.float32)
    save_file(tensors, folder / "model.safetensors")
    template = "{% for m in messages %}{{ m.role }}: {{ m.content }}<|im_end|>{% endfor %}"
    generation_prompt = "{% if add_generation_prompt %}assistant: {% endif %}"
    (folder / "chat_template.jinja").write_text(template + generation_prompt)
    return folder


def metrics(run_dir):
    return [json.loads(line) for line in (Path(run_dir) / "metrics.jsonl").read_text().splitlines()]


def weights(run_dir):
    return load_file(Path(run_dir) / "hf" / "model.safetensors")


@pytest.mark.thorough
def test_a_reward_model_learns_from_pairs_and_then_rewards_a_run(
    ranking_config, tiny_config, tmp_path
):
    assert reward_model.train(resolve(ranking_config))
    lines = metrics(ranking_config.run_dir)
    first, last = [line for line in lines if "val/accuracy" in line]
    assert first["val/loss"] == pytest.approx(np.log(2), abs=1e-6), "the head starts at zero"
    assert last["val/accuracy"] > 0.9 and last["val/loss"] < 0.5 and last["val/margin"] > 0
    trained = [line for line in lines if "preference/loss" in line]
    assert len(trained) == 20 and all(line["optim/grad_norm"] > 0 for line in trained)

    folder = Path(ranking_config.run_dir) / "hf"
    config = transformers.AutoConfig.from_pretrained(folder)
    assert config.architectures == ["LlamaForSequenceClassification"]
    assert config.num_labels == 1
    assert config.pad_token_id is not None and config.pad_token_id != 2, (
        "padding is not the EOS token"
    )
    tensors = load_file(folder / "model.safetensors")
    assert tensors["score.weight"].shape == (1, 32) and "lm_head.weight" not in tensors
    assert "<|im_start|>" in (folder / "chat_template.jinja").read_text()

    run = rl_config(tiny_config, tmp_path, folder)
    assert train(resolve(run))
    trained = [line for line in metrics(run.run_dir) if "reward/mean" in line]
    for line in trained:
        total = 0.5 * line["reward/reward_model"] + line["reward/short_is_good"]
        assert line["reward/mean"] == pytest.approx(total, abs=1e-5)
        assert line["reward/errors"] == 0
    assert any("val/reward" in line for line in metrics(run.run_dir))


def rl_config(config, tmp_path, folder):
    """A run of 3 steps on sums; the reward is a function plus half the score of the model."""
    conftest = Path(__file__).parent / "conftest.py"
    config.run_dir = str(tmp_path / "rl")
    config.total_steps = 3
    config.data.train = ("task:addition?digits=1&size=64&split=train",)
    config.data.val = ("task:addition?digits=1&size=8&split=val",)
    config.data.prompts_per_step = 4
    config.rollout.n = 4
    config.rollout.max_num_seqs = 16
    config.rollout.max_num_batched_tokens = 256
    config.reward.functions = (f"{conftest}:short_is_good",)
    config.reward_model.path = str(folder)
    config.reward_model.weight = 0.5
    return config


@pytest.mark.thorough
def test_the_gradient_equals_that_of_the_bradley_terry_loss(ranking_config):
    """Packed samples through the value loss, against the derivative of the loss of whole pairs."""
    ranking_config.preference.update({"margin_weight": 0.5, "center_coef": 0.1})
    rows = [row | {"margin": i} for i, row in enumerate(pairs(2, 2))]
    with at_moved_weights(ranking_config, rows) as (run, items, moved):
        samples, found = make_samples(run, items)

        def score(params, answer):
            return score_at_end(
                params, jnp.concatenate([answer.prompt_tokens, answer.tokens])[None]
            )

        margins = jnp.array([0.5 * pair.margin for pair in items], jnp.float32)
        assert len(set(margins.tolist())) == 2

        def direct(params):
            chosen, rejected = (
                jnp.stack([score(params, getattr(pair, side)) for pair in items])
                for side in ("chosen", "rejected")
            )
            centered = 0.1 * centering(chosen, rejected)
            return (bradley_terry(chosen, rejected, margin=margins) + centered).mean()

        loss = assert_gradient(run, samples, moved, direct)
        assert found["preference/loss"] == pytest.approx(loss, rel=1e-5)


@contextlib.contextmanager
def at_moved_weights(config, rows):
    """(run, items of its first step, weights): a reward model whose weights are not the first.

    The step has all of the rows.
    """
    config.data.train = write(Path(config.data.train[0]), rows)
    config.data.prompts_per_step = len(rows)
    cfg = resolve(config)
    objective = score_objective(cfg)
    with open_offline(with_objective(cfg, objective), objective) as run:
        moved = perturbed(run.core.state.params)
        run.core.state = dataclasses.replace(run.core.state, params=moved)
        yield run, next(run.core.iterator), moved


def assert_gradient(run, samples, params, direct):
    """The value loss of the packed samples has the gradient of `direct`, whose value is returned.

    `direct` is a function of the weights.
    """
    cfg = run.core.cfg
    packed = pack(samples, shapes=cfg.learner.shapes, align=64, n_ranks=1)
    batches = [run.core.learner.update.put(p.batch) for p in packed]

    def ours(params):
        sums = [loss_sums(value_objective, params, None, b, cfg=cfg, rules=TRAIN) for b in batches]
        return sum(loss for loss, _ in sums) / sum(s.weight for _, s in sums)

    loss, want = jax.jit(jax.value_and_grad(direct))(params)
    got = jax.jit(jax.grad(ours))(params)
    for a, b in zip(jax.tree.leaves(got), jax.tree.leaves(want), strict=True):
        np.testing.assert_allclose(a, b, rtol=1e-4, atol=1e-6)
    return float(loss)


@pytest.mark.thorough
def test_packing_and_mesh_do_not_change_the_trained_weights(ranking_config, tmp_path):
    assert_layouts_train_alike(ranking_config, tmp_path)


def assert_layouts_train_alike(config, tmp_path):
    """Two steps of a reward model have the same weights in other rows and on a mesh of four."""
    config.total_steps, config.learner.eps, config.data.val = 2, 1e-4, ()
    assert reward_model.train(resolve(config))
    reference = weights(config.run_dir)

    config.run_dir = str(tmp_path / "packed")
    config.learner.token_budget, config.learner.segment_align = 144, 8
    assert reward_model.train(resolve(config))
    assert_close(weights(config.run_dir), reference)

    config.run_dir = str(tmp_path / "mesh")
    config.learner.token_budget, config.learner.segment_align = 256, 64
    config.mesh.fsdp = config.mesh.tensor = 2
    assert reward_model.train(resolve(config))
    assert_close(weights(config.run_dir), reference)


def assert_close(found, reference):
    for name, one in reference.items():
        np.testing.assert_allclose(found[name], one, rtol=0, atol=2e-5, err_msg=name)


@pytest.mark.slow  # a default or thorough case resumes DPO, which shares this loop
def test_reward_model_training_resumes_bitwise(ranking_config, tmp_path):
    config = ranking_config
    config.total_steps = 3
    assert reward_model.train(resolve(config))
    uninterrupted = weights(config.run_dir)
    config.run_dir, config.total_steps = str(tmp_path / "resumed"), 1
    assert reward_model.train(resolve(config))
    config.total_steps = 3
    assert reward_model.train(resolve(config))
    for name, one in uninterrupted.items():
        np.testing.assert_array_equal(weights(config.run_dir)[name], one, err_msg=name)


def rollout(text, **fields):
    prompt = Prompt(0, ({"role": "user", "content": "1 + 2?"},), np.zeros(3, np.int32), "3")
    tokens, logp = np.zeros(4, np.int32), np.zeros(4, np.float32)
    return Rollout(prompt, 0, tokens, logp, np.ones(4, bool), tokens, "stop", text=text, **fields)


@pytest.mark.thorough
def test_scores_are_of_the_last_token_in_its_own_chat_template_on_any_mesh(
    tiny_config, tiny_scorer
):
    tiny_config.mesh.fsdp = 2
    tiny_config.reward_model.path = str(tiny_scorer)
    tiny_config.reward_model.weight = 2.0
    tiny_config.reward_model.token_budget = 192
    texts, found = ["3", "it is three, I think", ""], {}
    for tensor in (0, 2):
        tiny_config.reward_model.mesh.tensor = tensor
        tiny_config.learner.offload = ("reward_model",) if tensor else ()
        with jax.set_mesh(make_mesh(fsdp=2)):
            model = open_reward_model(resolve(tiny_config), tiny_scorer, jnp.dtype("float32"))
            found[tensor] = model.add_scores(
                [rollout(text) for text in texts], [Reward(1.0)] * len(texts)
            )
        sharding = jax.tree.leaves(model.params)[0].sharding
        assert sharding.mesh.shape["tensor"] == max(tensor, 1)
        assert sharding.memory_kind == ("pinned_host" if tensor else "device")
    tokenizer = transformers.AutoTokenizer.from_pretrained(tiny_scorer)
    with jax.set_mesh(make_mesh(fsdp=1)):
        _, alone = load_model(tiny_scorer, rules=TRAIN, heads=("score",))
        for i, text in enumerate(texts):
            text_in_template = f"user: 1 + 2?<|im_end|>assistant: {text}<|im_end|>"
            ids = jnp.array([tokenizer(text_in_template, add_special_tokens=False)["input_ids"]])
            score = float(score_at_end(alone, ids))
            for rewards in found.values():
                assert rewards[i].parts["reward_model"] == pytest.approx(score, abs=1e-4)
                assert rewards[i].value == pytest.approx(1.0 + 2.0 * score, abs=1e-4)
    assert len({r.value for r in found[0]}) == 3


@jax.jit
def score_at_end(params, tokens):
    """Score, or scores [K], at the last token of one row [1, T] without padding."""
    n = tokens.shape[1]
    positions = jnp.arange(n)[None]
    hidden = forward_packed(params, tokens, jnp.ones_like(tokens), positions, rules=TRAIN)
    scores = params.scores(hidden, TRAIN)
    last = (positions == n - 1).reshape(1, n, *[1] * (scores.ndim - 2))
    return jnp.sum(jnp.where(last, scores, 0.0), axis=(0, 1))


@pytest.mark.thorough
def test_a_reward_model_trains_adapters_and_its_head(ranking_config):
    ranking_config.lora.rank, ranking_config.lora.alpha = 8, 16.0
    ranking_config.learner.lr, ranking_config.total_steps = 0.02, 6
    assert reward_model.train(resolve(ranking_config))
    first, last = [line for line in metrics(ranking_config.run_dir) if "val/accuracy" in line]
    assert last["val/loss"] < 0.9 * first["val/loss"] and last["val/accuracy"] > 0.8
    base = load_file(Path(ranking_config.model.path) / "model.safetensors")
    found = weights(ranking_config.run_dir)
    changed = {name for name in base if np.any(found[name] != base[name])}
    assert changed and all("_proj" in name for name in changed)
    adapter = load_file(Path(ranking_config.run_dir) / "adapter" / "adapter_model.safetensors")
    head = adapter["base_model.model.score.weight"]
    np.testing.assert_array_equal(head, found["score.weight"])


@pytest.mark.thorough
def test_all_messages_of_a_multi_turn_episode_are_scored(tiny_config, tiny_scorer):
    def message(role, content):
        return {"role": role, "content": content}

    question, reply = message("user", "1 + 2?"), message("user", "No.")
    completion = (message("assistant", "4"), reply, message("assistant", "3"))
    episode = Episode(
        prompt_messages=(question,),
        completion_messages=completion,
        n_turns=2,
        step_rewards=((1, 0.0), (2, 1.0)),
    )
    broken = dataclasses.replace(episode, error="KeyError: 'x'")
    tiny_config.reward_model.path = str(tiny_scorer)
    with jax.set_mesh(make_mesh(fsdp=1)):
        model = open_reward_model(resolve(tiny_config), tiny_scorer, jnp.dtype("float32"))
        found, failed, alone = model.add_scores(
            [
                rollout("43", episode=episode),
                rollout("43", episode=broken),
                rollout("3"),
            ],
            [Reward(1.0), Reward(0.0), Reward(0.0)],
        )
        _, params = load_model(tiny_scorer, rules=TRAIN, heads=("score",))
        text = (
            "user: 1 + 2?<|im_end|>assistant: 4<|im_end|>user: No.<|im_end|>assistant: 3<|im_end|>"
        )
        tokenizer = transformers.AutoTokenizer.from_pretrained(tiny_scorer)
        ids = jnp.array([tokenizer(text, add_special_tokens=False)["input_ids"]])
        score = float(score_at_end(params, ids))
    assert found.value == pytest.approx(1.0 + score, abs=1e-4) and not found.error
    assert alone.parts["reward_model"] != pytest.approx(score, abs=1e-3)
    assert failed.error == "reward_model: the environment failed before the conversation ended"


@pytest.mark.thorough
def test_an_evaluation_adds_the_rewards_of_environment_and_model(
    tiny_config, tiny_scorer, tmp_path
):
    game = tmp_path / "game.py"
    game.write_text(
        "class Twice:\n    n = 0\n    def reset(self, prompt):\n        return None\n"
        "    def step(self, completion):\n        self.n += 1\n"
        "        return 'More.', 1.0, self.n == 2\n"
    )
    tiny_config.env.name = f"{game}:Twice"
    tiny_config.data.max_response_len = 96
    tiny_config.eval.sampling.temperature = 1.0
    tiny_config.eval.sampling.stop = ("a", "e", "i", "o", "u", "0", "1", "2", " ")
    tiny_config.reward.functions, tiny_config.reward.weights = ("environment",), (0.25,)
    tiny_config.reward_model.path, tiny_config.reward_model.weight = str(tiny_scorer), 0.5
    # paths that only training reads need not exist
    tiny_config.algorithm.teacher = tiny_config.critic.path = "/nowhere"
    assert evaluate(resolve_evaluation(tiny_config))
    summary = json.loads((Path(tiny_config.run_dir) / "summary.json").read_text())
    found = summary["results"]["all"]
    assert summary["reward_model"] == str(tiny_scorer)
    assert found["errors"] == 0 and 1 < found["env/turns"] <= 2
    total = 0.25 * found["reward/environment"] + 0.5 * found["reward/reward_model"]
    assert found["reward"] == pytest.approx(total, abs=1e-5)
    assert found["reward/reward_model"] != 0

    tiny_config.reward_model.token_budget = 128
    with pytest.raises(ValueError, match=r"do not fit the longest row, reward_model\.token_budget"):
        resolve_evaluation(tiny_config)
    tiny_config.reward_model.token_budget, tiny_config.learner.token_budget = 0, 128
    with pytest.raises(ValueError, match=r"do not fit the longest row, learner\.token_budget"):
        resolve_evaluation(tiny_config)


def test_a_rollout_that_cannot_be_scored_gets_an_error(tiny_config, tiny_scorer):
    tiny_config.reward_model.path = str(tiny_scorer)
    tiny_config.reward.error_value = -1.0
    cfg = resolve(tiny_config)
    with jax.set_mesh(make_mesh(fsdp=1)):
        model = open_reward_model(cfg, tiny_scorer, jnp.dtype("float32"))
        scored, too_long = model.add_scores(
            [rollout("3"), rollout("x" * 300)], [Reward(0.0), Reward(0.0)]
        )
    assert not scored.error
    assert too_long.value == -1.0
    assert "tokens in the reward model's tokenizer, more than a row of 256" in too_long.error
    nan = with_score(Reward(5.0), ResponseScore(error="the score is nan"), cfg)
    assert (nan.value, nan.error) == (-1.0, "reward_model: the score is nan")
    failed = with_score(Reward(-1.0, error="math: hung"), ResponseScore(7.0), cfg)
    assert (failed.value, failed.parts) == (-1.0, {"reward_model": 7.0})


@pytest.mark.thorough
def test_the_plan_check_includes_the_reward_model(tiny_config, tiny_scorer, monkeypatch):
    tiny_config.reward_model.path = str(tiny_scorer)
    jobs = []

    def check_plan(job):
        jobs.append(job)
        raise ValueError("it does not fit")

    monkeypatch.setattr("jaxrl.trainer.setup.devices.device_memory", lambda: 2**30)
    monkeypatch.setattr("jaxrl.trainer.setup.devices.check_plan", check_plan)
    with pytest.raises(ValueError, match="it does not fit"), open_run(resolve(tiny_config)):
        pass
    assert set(jobs[0].role_decoders) == {"critic", "teacher", "reward_model"}
    assert jobs[0].role_decoders["reward_model"] == model_config(tiny_scorer)


def test_a_language_model_is_rejected_as_reward_model(tiny_config, tiny_model):
    tiny_config.reward_model.path = str(tiny_model)
    with (
        jax.set_mesh(make_mesh(fsdp=1)),
        pytest.raises(ValueError, match=r"no score\.weight, so it is not a sequence classifier"),
    ):
        open_reward_model(resolve(tiny_config), tiny_model, jnp.dtype("float32"))


@pytest.mark.parametrize(
    "n, bias, message",
    [
        (
            2,
            False,
            r"2 labels \(LABEL_0, LABEL_1\), but .*label_weights=\(\) has 0 weights; give one",
        ),
        (2, True, r"2 labels and a score\.bias; set it to one without a bias"),
    ],
)
def test_a_classifier_of_several_labels_without_weights_or_with_a_bias_is_refused(
    tiny_config, tiny_scorer, tmp_path, n, bias, message
):
    folder = shutil.copytree(tiny_scorer, tmp_path / "model")
    tensors = load_file(folder / "model.safetensors")
    tensors["score.weight"] = np.repeat(tensors["score.weight"], n, axis=0)
    if bias:
        tensors["score.bias"] = np.zeros(n, np.float32)
    save_file(tensors, folder / "model.safetensors")
    tiny_config.reward_model.path = str(folder)
    with (
        jax.set_mesh(make_mesh(fsdp=1)),
        pytest.raises(ValueError, match=message),
    ):
        open_reward_model(resolve(tiny_config), folder, jnp.dtype("float32"))


def test_unused_keys_are_rejected(ranking_config):
    ranking_config.preference.beta = 0.5
    ranking_config.reward.workers = 3
    with pytest.raises(ValueError, match=r"beta, config\.reward\.workers have no effect"):
        with_objective(resolve(ranking_config), PAIRS)
