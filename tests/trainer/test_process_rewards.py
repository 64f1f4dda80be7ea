"""Tests of jaxrl/trainer/offline/steps.py and of scores of steps in jaxrl/learner/reward_model.py:
process reward models trained from labels of steps, and their scores as rewards of a run."""

import dataclasses
import random
from pathlib import Path

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from jaxrl import reward_model
from jaxrl.config.keys import RewardConfig, RewardModelConfig, RunConfig
from jaxrl.config.resolve import check_only_offline, resolve
from jaxrl.data.steps import LabelledSteps
from jaxrl.learner.reward_model import (
    STEP_SCORES,
    open_reward_model,
    probabilities,
    scored_sequence,
)
from jaxrl.models.packed import forward_packed
from jaxrl.train import train
from jaxrl.trainer.offline.steps import make_samples, step_metrics
from jaxrl.trainer.phases.advantage import EstimatorInputs, places_in_groups
from jaxrl.trainer.phases.mini_batches import to_samples
from jaxrl.trainer.phases.rewards import RewardScale, turn_rewards
from jaxrl.trainer.setup.opening import open_run
from jaxrl.types import Demonstration, Prompt, Reward, Rollout, ScoredRollout
from sharding import make_mesh
from sharding.rules import TRAIN
from tests.trainer.test_reward_models import (
    assert_gradient,
    assert_layouts_train_alike,
    at_moved_weights,
    metrics,
    tiny_scorer,
    with_rows,
)

__all__ = ["tiny_scorer"]


def answers(n, seed):
    """Answers of 2 to 4 steps: right ones have letters from a to h, wrong ones from s to z."""
    draw, rows = random.Random(seed), []
    for _ in range(n):
        labels = [draw.random() < 0.5 for _ in range(draw.randint(2, 4))]
        steps = ["".join(draw.choices("abcdefgh" if y else "stuvwxyz", k=5)) for y in labels]
        rows.append({"prompt": f"{draw.randint(0, 99)}?", "completions": steps, "labels": labels})
    return rows


@pytest.fixture
def step_config(tiny_config, tmp_path):
    """120 steps of 8 answers."""
    tiny_config.reward_model.objective = "steps"
    return with_rows(tiny_config, tmp_path, answers, steps=120, per_step=8)


@pytest.mark.thorough
def test_a_process_reward_model_learns_steps_and_then_rewards_the_tokens_of_a_run(
    step_config, tmp_path
):
    assert reward_model.train(resolve(step_config))
    lines = metrics(step_config.run_dir)
    first, last = [line for line in lines if "val/accuracy" in line]
    assert first["val/loss"] == pytest.approx(np.log(2), abs=1e-6), "the head starts at zero"
    assert last["val/accuracy"] > 0.9 and last["val/loss"] < 0.4
    assert last["val/first_error"] > max(0.7, first["val/first_error"])
    assert all("steps/loss" in line for line in lines if "optim/grad_norm" in line)

    config, folder = step_config, Path(step_config.run_dir) / "hf"
    config.run_dir, config.total_steps = str(tmp_path / "rl"), 2
    config.data.train = ("task:addition?digits=1&size=64&split=train",)
    config.data.val = ()
    config.data.prompts_per_step, config.rollout.n = 4, 4
    config.rollout.max_num_seqs, config.rollout.max_num_batched_tokens = 16, 256
    config.reward.functions = (f"{Path(__file__).parent / 'conftest.py'}:short_is_good",)
    config.reward.workers = 1
    config.reward_model.objective = "pairs"
    config.reward_model.path = str(folder)
    config.reward_model.step_reward = "tokens"
    config.reward_model.step_separator = "e"
    config.algorithm.advantage = "reinforce_plus_plus"
    assert train(resolve(config))
    trained = [line for line in metrics(config.run_dir) if "reward/mean" in line]
    assert len(trained) == 2
    for line in trained:
        total = line["reward/reward_model"] + line["reward/short_is_good"]
        assert line["reward/mean"] == pytest.approx(total, abs=1e-5)
        assert line["reward/errors"] == 0 and line["optim/grad_norm"] > 0


@pytest.mark.thorough
def test_the_gradient_equals_that_of_the_mean_cross_entropy_of_steps(step_config):
    """Packed samples through the value loss, against the derivative of the loss of each answer."""
    with at_moved_weights(step_config, answers(3, 2)) as (run, items, moved):
        samples, found = make_samples(run, items)

        def direct(params):
            losses = []
            for item in items:
                d = item.completion
                tokens = jnp.concatenate([d.prompt_tokens, d.tokens])[None]
                n = tokens.shape[1]
                at = len(d.prompt_tokens) + np.flatnonzero(d.loss_mask)
                hidden = forward_packed(
                    params, tokens, jnp.ones_like(tokens), jnp.arange(n)[None], rules=TRAIN
                )
                scores, places = params.scores(hidden, TRAIN), jnp.arange(n)[None]
                of_steps = [jnp.sum(jnp.where(places == i, scores, 0.0)) for i in at.tolist()]
                right, y = jax.nn.sigmoid(jnp.stack(of_steps)), item.labels
                losses.append(-(y * jnp.log(right) + (1 - y) * jnp.log(1 - right)))
            return jnp.concatenate(losses).mean()

        loss = assert_gradient(run, samples, moved, direct)
        assert found["steps/loss"] == pytest.approx(loss, rel=1e-5)


@pytest.mark.thorough
def test_packing_and_mesh_do_not_change_the_trained_weights(step_config, tmp_path):
    assert_layouts_train_alike(step_config, tmp_path)


def test_the_probabilities_of_steps_are_reduced_to_one_score():
    right = probabilities(np.array([0.0, np.log(3.0), -np.log(3.0)], np.float32))
    np.testing.assert_allclose(right, [0.5, 0.75, 0.25], rtol=1e-6)
    want = {"min": 0.25, "mean": 0.5, "product": 3 / 32, "last": 0.25, "tokens": 1.5}
    assert {n: f(right) for n, f in STEP_SCORES.items()} == pytest.approx(want, rel=1e-6)


def floats(*values):
    return np.array(values, np.float32)


def labelled(*labels):
    """The labels of steps; their tokens have no meaning."""
    tokens, ends = np.zeros(len(labels), np.int32), np.ones(len(labels), bool)
    return LabelledSteps(0, Demonstration(0, tokens[:1], tokens, ends), floats(*labels))


def test_metrics_of_steps_are_means_over_steps_and_over_answers():
    items = [labelled(1, 0, 1), labelled(1, 1), labelled(0)]
    scores = [floats(2, -1, -1), floats(1, -1), floats(1)]
    found = step_metrics(items, scores)  # wrong: the third, fifth and sixth of 6 steps
    assert found["accuracy"] == pytest.approx(3 / 6)
    assert found["first_error"] == pytest.approx(1 / 3)  # step 2 of the first answer is found


def rollout(text, tokens):
    prompt = Prompt(0, ({"role": "user", "content": "1 + 2?"},), np.zeros(3, np.int32), "3")
    logp = np.zeros(len(tokens), np.float32)
    mask = np.ones(len(tokens), bool)
    return Rollout(prompt, 0, tokens, logp, mask, tokens, "stop", text=text)


@pytest.mark.thorough
def test_steps_have_the_scores_at_their_ends_in_both_tokenizations(
    tiny_config, tiny_scorer, renderer
):
    tiny_config.reward_model.path = str(tiny_scorer)
    tiny_config.reward_model.weight = 2.0
    tiny_config.reward_model.step_reward = "tokens"
    tiny_config.algorithm.advantage = "reinforce_plus_plus"
    text = "1 + 2\n\nis 3"
    tokens = np.append(renderer.tokenize([text])[0], 2).astype(np.int32)
    with jax.set_mesh(make_mesh(fsdp=1)):
        model = open_reward_model(
            resolve(tiny_config), tiny_scorer, jnp.dtype("float32"), policy_renderer=renderer
        )
        right, other = model.add_scores(
            [rollout(text, tokens), rollout("one step", tokens)], [Reward(1.0), Reward(1.0)]
        )
        ids = renderer.tokenizer(
            f"user: 1 + 2?<|im_end|>assistant: {text}<|im_end|>", add_special_tokens=False
        )["input_ids"]
        row = jnp.array([ids])

        @jax.jit
        def all_scores(params):
            positions = jnp.arange(len(ids))[None]
            hidden = forward_packed(params, row, jnp.ones_like(row), positions, rules=TRAIN)
            return params.scores(hidden, TRAIN)

        scores = np.asarray(all_scores(model.params))[0]
    at = [len(ids) - 1 - len("\nis 3<"), len(ids) - 1]  # a token is a byte; "<" is the end token
    steps = 1 / (1 + np.exp(-scores[at]))
    assert right.step_rewards == (
        (len("1 + 2\n"), pytest.approx(steps[0], abs=1e-5)),
        (len(tokens), pytest.approx(steps[1], abs=1e-5)),
    )
    assert right.parts["reward_model"] == pytest.approx(steps.sum(), abs=1e-5)
    assert right.value == pytest.approx(1 + 2 * steps.sum(), abs=1e-5) and not right.error
    assert "the response has 2 steps, and 1 in the reward model's chat template" in other.error


def test_rewards_of_steps_are_at_their_tokens_and_the_rest_at_the_last():
    reward = Reward(3.0, step_rewards=((2, 0.5), (4, 0.25)))
    scored = ScoredRollout(rollout("abcd", np.arange(4, dtype=np.int32)), reward)
    cfg = RunConfig(
        reward=RewardConfig(functions=("math",)), reward_model=RewardModelConfig(weight=2.0)
    )
    turns = turn_rewards(scored, RewardScale(), cfg)
    assert turns is not None and turns.tolist() == [0, 1.0, 0, 0.5]
    samples = to_samples(scored.rollout, cfg.algorithm, turn_rewards=turns)
    inputs = EstimatorInputs(samples, np.array([3.0]), places_in_groups(samples), None, None, None)
    # 3 = 2 (0.5 + 0.25) from the model and 1.5 from the function, which is at the last token
    np.testing.assert_allclose(inputs.token_rewards, [[0, 1.0, 0, 0.5 + 1.5]])
    failed = dataclasses.replace(scored, reward=dataclasses.replace(reward, error="hung"))
    assert turn_rewards(failed, RewardScale(), cfg) is None


def test_places_of_scores_are_after_their_tokens():
    sample = scored_sequence(np.array([5, 6, 7, 8], np.int32), 3, [1, 3])
    np.testing.assert_array_equal(sample.prompt_tokens, [5, 6])
    np.testing.assert_array_equal(sample.tokens, [7, 8, 0])
    np.testing.assert_array_equal(sample.loss_mask, [True, False, True])
    last = scored_sequence(np.array([5, 6], np.int32), 3)
    np.testing.assert_array_equal(last.prompt_tokens, [5, 6])
    assert last.tokens.tolist() == [0] and last.loss_mask.tolist() == [True]


@pytest.mark.parametrize(
    "changes, message",
    [
        ({"step_reward": "tokens"}, "'grpo' does not read; set .*reinforce_plus_plus"),
        ({"step_separator": "#"}, "step_separator='#' has no effect without steps"),
        ({"step_reward": "min", "step_separator": ""}, "step_separator is empty"),
    ],
)
def test_keys_of_steps_that_do_not_go_together_are_refused(tiny_config, changes, message):
    tiny_config.reward_model.path = "rm"
    tiny_config.reward_model.update(changes)
    with pytest.raises(ValueError, match=message):
        resolve(tiny_config)


def test_steps_of_episodes_are_refused(tiny_config):
    tiny_config.reward_model.update({"path": "rm", "step_reward": "min"})
    tiny_config.env.name = "calculator"
    tiny_config.reward.functions = ("environment",)
    with pytest.raises(ValueError, match=r"one response, but env\.name='calculator' has episodes"):
        resolve(tiny_config)


def test_an_rl_run_refuses_the_keys_of_offline_training(tiny_config):
    tiny_config.preference.beta = 0.5
    tiny_config.reward_model.update({"path": "rm", "objective": "steps"})
    with (
        pytest.raises(ValueError, match=r"preference\.beta=0\.5, reward_model\.objective='steps'"),
        open_run(resolve(tiny_config)),
    ):
        pass
    check_only_offline(RunConfig())
