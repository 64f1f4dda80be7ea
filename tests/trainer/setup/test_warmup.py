"""Tests of jaxrl/trainer/setup/warmup.py and of the table of jaxrl/learner/programs.py."""

import jax
import numpy as np
import pytest

from jaxrl.config import resolve
from jaxrl.learner.programs import training_programs
from jaxrl.learner.state import checkpoint_state
from jaxrl.trainer.rl_step import train_step
from jaxrl.trainer.setup import warmup
from jaxrl.trainer.setup.opening import open_run
from tests.trainer.test_train import counted_compilations


@pytest.mark.thorough
def test_every_role_runs_on_padding_without_a_change_and_compiles_nothing_afterwards(
    tiny_config, monkeypatch
):
    """On CPU warm-up runs nothing; here as on accelerators."""
    monkeypatch.setattr(warmup, "needs_trial_run", lambda: True)
    monkeypatch.setattr("jaxrl.engine.engine.needs_trial_run", lambda: True)
    tiny_config.algorithm.advantage, tiny_config.algorithm.kl_coef = "gae", 0.1
    tiny_config.learner.mini_batch_prompts = 2  # old logprobs are scored
    tiny_config.critic.token_budget = 512
    with open_run(resolve(tiny_config)) as run:
        rows = {row.name for row in training_programs(warmup.rl_models(run))}
        assert rows == {"the update", "values", "the critic's update", "score", "reference"}
        with counted_compilations() as counts:
            train_step(run)
        names = ("_accumulate", "_apply", "_zeros", "score_tokens", "score_values", "decode")
        assert not any(counts[f"jit({name})"] for name in names), counts


@pytest.mark.thorough
def test_a_trial_run_leaves_the_weights(tiny_config, monkeypatch):
    tiny_config.algorithm.advantage = "gae"
    with open_run(resolve(tiny_config)) as run:
        core = run.core
        before = jax.device_get(whole_states(core))
        monkeypatch.setattr(warmup, "needs_trial_run", lambda: True)
        warmup.try_training(core, warmup.rl_models(run))
        jax.tree.map(np.testing.assert_array_equal, before, jax.device_get(whole_states(core)))


def whole_states(core):
    """States of the policy and of the critic, the same trees before and after an update."""
    return [checkpoint_state(state) for state in (core.state, core.learner.critic.state)]
