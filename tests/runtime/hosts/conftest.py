"""Fixtures that start a group of processes and configure the tiny run that it trains."""

import pytest

from tests.runtime.hosts.process_group import Group
from tests.trainer.conftest import tiny_config, tiny_model

__all__ = ["tiny_config", "tiny_model"]


@pytest.fixture
def start_group(tmp_path):
    """start_group(config, n=2, n_devices=4) starts the processes of a run.

    `per_process` is {process: additional arguments}; `folders` are the working directories.
    """
    groups = []

    def start_one(config, *, per_process=None, folders=None, **sizes) -> Group:
        groups.append(
            Group(config, tmp_path, per_process=per_process or {}, folders=folders, **sizes)
        )
        return groups[-1]

    yield start_one
    for group in groups:
        group.kill()


@pytest.fixture
def group_config(tiny_config):
    """The tiny run on 8 devices: FSDP 4 x tensor 2, two updates per step, a reference model."""
    tiny_config.total_steps = 2
    tiny_config.mesh.fsdp, tiny_config.mesh.tensor = 4, 2
    tiny_config.learner.mini_batch_prompts = 2
    tiny_config.algorithm.kl_coef = 0.1
    tiny_config.learner.token_budget = 128
    tiny_config.learner.eps = 1e-4  # Adam must not amplify gradients that are only rounding errors
    tiny_config.data.max_prompt_len = 64
    tiny_config.rollout.max_num_seqs = 4
    tiny_config.rollout.max_num_batched_tokens = 128
    return tiny_config
