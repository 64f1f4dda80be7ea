"""Runs with RAE and hierarchical GRPO: advantages of an agent's conversations by their roles."""

from pathlib import Path

import numpy as np
import pytest
from safetensors.numpy import load_file

from jaxrl.config.resolve import resolve
from jaxrl.train import train
from jaxrl.trainer.phases import mini_batches
from jaxrl.trainer.phases.advantage import add_advantages, places_in_groups
from tests.trainer.test_train import metrics

SELF_PLAY = '''
import json
import urllib.request


def turn(base_url, text, name):
    body = {"messages": [{"role": "user", "content": text}], "max_tokens": 8, "model": name}
    reply = urllib.request.urlopen(f"{base_url}/chat/completions", json.dumps(body).encode())
    return json.loads(reply.read())["choices"][0]["message"]["content"]


def letters(text):
    return sum(c.isalpha() for c in text) / 8


def agent(base_url, api_key, task):
    """A proposer writes a problem, and two solvers answer it; each is rewarded for letters."""
    problem = turn(base_url, task["messages"][-1]["content"], "proposer")
    rewards = {"proposer": letters(problem)}
    for name in ("solver/0", "solver/1"):
        rewards[name] = letters(turn(base_url, f"{name}: {len(problem)}", name)) - 1
    return {"reward": 0.0} | rewards
'''


@pytest.fixture
def self_play_config(agent_config, tmp_path):
    """Two steps of 16 episodes, each of a proposer and two solvers."""
    path = tmp_path / "self_play.py"
    path.write_text(SELF_PLAY)
    agent_config.env.agent = f"{path}:agent"
    agent_config.data.val = ()
    return agent_config


@pytest.mark.thorough
@pytest.mark.parametrize("name", ["rae", "hierarchical_grpo"])
def test_conversations_are_trained_by_the_rewards_of_their_roles(
    self_play_config, name, monkeypatch
):
    config, steps = self_play_config, []
    config.algorithm.advantage = name

    def recorded(samples, *args, **kwargs):
        steps.append(add_advantages(samples, *args, **kwargs))
        return steps[-1]

    monkeypatch.setattr(mini_batches, "add_advantages", recorded)
    assert train(resolve(config))
    assert len(steps) == 2
    for samples in steps:
        assert {s.role for s in samples} == {"proposer", "solver/0", "solver/1"}
        for s in samples:
            assert len(set(s.advantages[s.loss_mask].tolist())) == 1, "one of each conversation"
            assert not s.advantages[~s.loss_mask].any()
    lines = [line for line in metrics(config.run_dir) if "optim/grad_norm" in line]
    assert all(line["optim/grad_norm"] > 0 for line in lines)
    check = {"rae": check_baselines, "hierarchical_grpo": check_cohorts}[name]
    for i, samples in enumerate(steps):
        check(samples, lines[i - 1] if i else {})
    trained = load_file(Path(config.run_dir) / "hf" / "model.safetensors")
    start = load_file(Path(config.model.path) / "model.safetensors")
    assert any(np.any(trained[key] != start[key]) for key in start)


def check_baselines(samples, before):
    """The advantage is the reward minus the mean of its role that the step before has logged."""
    for s in samples:
        [baseline] = [
            v for k, v in before.items() if k.endswith(f":{s.role.partition('/')[0]}")
        ] or [0]
        assert s.role_baseline == pytest.approx(baseline, abs=1e-6)
        want = s.role_reward - baseline
        np.testing.assert_allclose(s.advantages[s.loss_mask], want, atol=1e-6)


def check_cohorts(samples, _):
    """Solvers are compared in their episode, proposers over the episodes of a prompt."""
    group, episode = places_in_groups(samples)
    cohorts = {}
    for s, g, e in zip(samples, group.tolist(), episode.tolist(), strict=True):
        key = (g, "proposer") if s.role == "proposer" else (g, e)
        cohorts.setdefault(key, []).append(s)
    sizes = {len(cohort) for cohort in cohorts.values()}
    assert sizes == {2, 4}, "two solvers of an episode, four episodes of a prompt"
    for cohort in cohorts.values():
        mean = np.mean([s.role_reward for s in cohort])
        for s in cohort:
            np.testing.assert_allclose(s.advantages[s.loss_mask], s.role_reward - mean, atol=1e-6)
