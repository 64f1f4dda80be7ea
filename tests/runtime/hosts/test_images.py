"""Runs of two processes on prompts with images: the numbers of one process."""

import pytest

from tests.runtime.hosts.process_group import assert_close, assert_same_run, metrics
from tests.trainer.conftest import image_config, vlm
from tests.trainer.test_image_episodes import FRAMES

AGENT = '''

def agent(base_url, api_key, task):
    """Shows a picture after the first answer."""
    import json
    import urllib.request

    messages, answer = list(task["messages"]), ""
    for n in (1, 2):
        body = json.dumps(dict(model="m", messages=messages)).encode()
        headers = {"Content-Type": "application/json", "Authorization": f"Bearer {api_key}"}
        request = urllib.request.Request(f"{base_url}/chat/completions", body, headers)
        with urllib.request.urlopen(request) as response:
            answer = json.load(response)["choices"][0]["message"]["content"]
        url = "data:image/png;base64," + base64.b64encode(frame(n, 16 + 8 * n)).decode()
        parts = [{"type": "text", "text": "Now:"}, {"type": "image_url", "image_url": {"url": url}}]
        messages += [{"role": "assistant", "content": answer}, {"role": "user", "content": parts}]
    return float(len(answer) > 1)
'''

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
def test_later_images_of_two_processes_give_the_numbers_of_one(start_group, config, tmp_path, kind):
    """A process gets the images that the environments and agents of the other one have shown."""
    path = tmp_path / "frames.py"
    path.write_text(FRAMES + AGENT)
    config.reward.functions = ("environment",)
    config.data.max_prompt_len, config.data.max_response_len = 96, 160
    config.learner.token_budget = 512
    config.rollout.max_num_batched_tokens = 512
    config.rollout.sampling.stop = ("a", "e", "i", "o", "u", "0", "1", "2", " ")
    if kind == "agent":
        config.env.agent = f"{path}:agent"
    else:
        config.env.name = f"{path}:Frames"
    start_group(config, n=1, n_devices=2).finish()
    reference = config.run_dir
    assert any(line.get("env/turns", 0) > 1 for line in metrics(reference))
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
