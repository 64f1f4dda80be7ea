"""Runs of two processes on prompts with images: the numbers of one process."""

import pytest

from tests.runtime.hosts.process_group import assert_close, assert_same_run, metrics
from tests.trainer.conftest import image_config, vlm
from tests.trainer.test_image_episodes import FRAMES

# Shows a picture after the first turn, as the user, to the model of the run's endpoint.
AGENT = """
import base64
import io
import json
import urllib.request

from PIL import Image


def turn(base_url, messages):
    data = json.dumps({"messages": messages, "max_tokens": 20}).encode()
    reply = urllib.request.urlopen(f"{base_url}/chat/completions", data).read()
    return json.loads(reply)["choices"][0]["message"]


def agent(base_url, api_key, task):
    messages, file = list(task["messages"]), io.BytesIO()
    messages.append(turn(base_url, messages))
    Image.new("RGB", (24, 16), (len(messages[-1]["content"]) * 10 % 256, 0, 0)).save(file, "PNG")
    url = "data:image/png;base64," + base64.b64encode(file.getvalue()).decode()
    messages.append({"role": "user", "content": [{"type": "image_url", "image_url": {"url": url}}]})
    messages.append(turn(base_url, messages))
    return sum(c.isalpha() for c in messages[-1]["content"]) / 20
"""

__all__ = ["image_config", "vlm"]


@pytest.fixture
def config(image_config):
    """One step on one device of each process."""
    image_config.total_steps = 1
    image_config.mesh.fsdp = 2
    image_config.learner.token_budget = 128
    image_config.learner.eps = 1e-4  # Adam must not amplify gradients that are rounding errors
    image_config.rollout.max_num_seqs = 8
    return image_config


@pytest.mark.thorough
@pytest.mark.parametrize(
    ("freeze", "engines"), [("all", "process"), ("none", "process"), ("all", "mesh")]
)
def test_two_processes_give_the_numbers_of_one(start_group, config, tmp_path, freeze, engines):
    """With an engine in each, a process has its tower, which follows training's."""
    config.model.freeze_vision = freeze
    config.eval.every = 1
    start_group(config, n=1, n_devices=2).finish()
    reference = config.run_dir
    config.run_dir, config.rollout.engines = str(tmp_path / "two"), engines
    first, _ = start_group(config, n=2, n_devices=1).finish()
    assert "in 2 processes" in first
    assert_same_run(config.run_dir, reference)


@pytest.mark.slow
@pytest.mark.parametrize("kind", ["environment", "agent"])
def test_episodes_of_two_processes_have_the_images_of_one(start_group, config, tmp_path, kind):
    """Each process plays its share, with images of the data and of later turns."""
    path = tmp_path / "episodes.py"
    path.write_text(FRAMES if kind == "environment" else AGENT)
    if kind == "environment":
        config.env.name = f"{path}:Frames?turns=2"
    else:
        config.env.agent, config.env.workers = f"{path}:agent", 8
    config.reward.functions = ("environment",)
    config.data.max_prompt_len, config.data.max_response_len = 96, 160
    config.learner.token_budget = 512
    config.rollout.sampling.stop = ("a", "e", "i", "o", "u", "0", "1", "2", " ")
    start_group(config, n=1, n_devices=2).finish()
    reference = config.run_dir
    [line] = [line for line in metrics(reference) if "reward/mean" in line]
    assert line["env/turns"] > 1.5 and not line["env/failures"]
    assert line["mismatch/logp_diff_max"] < 1e-4
    config.run_dir = str(tmp_path / "two")
    start_group(config, n=2, n_devices=1).finish()
    assert_same_run(config.run_dir, reference)


@pytest.mark.slow
def test_rollout_workers_of_two_processes_give_the_weights_of_their_engines(
    start_group, config, tmp_path
):
    """With one worker, the second process generates nothing."""
    config.total_steps = 3
    config.schedule.mode, config.schedule.rollout_devices = "async", 1
    start_group(config, n=2, n_devices=2).finish()
    local = config.run_dir
    config.schedule.rollout_devices = 0
    for n_workers in (1, 2):
        config.run_dir = str(tmp_path / f"{n_workers}_workers")
        config.schedule.rollout_workers = n_workers
        program = "tests.trainer.schedule.local_workers"
        start_group(config, n=2, n_devices=1, program=program).finish()
        assert_close(config.run_dir, local, atol=0)
        lines = [line for line in metrics(config.run_dir) if "workers/ready" in line]
        assert [line["workers/ready"] for line in lines] == [n_workers] * 3
