"""A group of processes, and the run that it makes."""

import pytest

from tests.runtime.hosts.process_group import Group


@pytest.fixture
def start_group(tmp_path):
    """start_group(config, n=2, n_devices=4): the processes of a run; `of_process` gives some of them
    arguments of their own, `folders` working directories."""
    groups = []

    def start_one(config, *, of_process=None, folders=None, **sizes) -> Group:
        groups.append(
            Group(config, tmp_path, of_process=of_process or {}, folders=folders, **sizes)
        )
        return groups[-1]

    yield start_one
    for group in groups:
        group.kill()


@pytest.fixture
def group_config(tiny_config):
    """The tiny run on 8 devices: FSDP over 4 x tensor over 2, two updates a step, a reference model."""
    tiny_config.total_steps = 2
    tiny_config.mesh.fsdp, tiny_config.mesh.tensor = 4, 2
    tiny_config.learner.mini_batch_prompts = 2
    tiny_config.algorithm.kl_coef = 0.1
    tiny_config.learner.token_budget = 128
    tiny_config.learner.eps = (
        1e-4  # Adam must not make a whole step of a gradient that is rounding alone
    )
    tiny_config.data.max_prompt_len = 64
    tiny_config.rollout.max_num_seqs = 4
    tiny_config.rollout.max_num_batched_tokens = 128
    return tiny_config
