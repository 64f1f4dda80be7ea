"""Runs of several processes over gloo: same numbers as one process, one message per error."""

import json
import signal
from pathlib import Path

import jax
import numpy as np
import pytest

from jaxrl.checkpoint.saved_arrays import read_weights
from jaxrl.data.tokenizer import load_tokenizer
from jaxrl.models.files.hf_load import load_model
from sharding import make_mesh
from sharding.rules import TRAIN
from tests.runtime.hosts.process_group import assert_close, assert_same_run, metrics
from tests.teachers.fake_server import FakeServer


@pytest.fixture
def short_config(group_config):
    """One step of `group_config` on 4 devices: one update, no reference model."""
    group_config.total_steps = 1
    group_config.mesh.fsdp = 2
    group_config.learner.mini_batch_prompts = 0
    group_config.algorithm.kl_coef = 0.0
    return group_config


@pytest.mark.thorough
def test_one_step_of_two_processes_gives_the_numbers_of_one(start_group, short_config, tmp_path):
    assert_two_processes_give_the_numbers_of_one(start_group, short_config, tmp_path, n_devices=4)


@pytest.mark.thorough
def test_two_processes_give_the_numbers_of_one(start_group, group_config, tmp_path):
    assert_two_processes_give_the_numbers_of_one(start_group, group_config, tmp_path, n_devices=8)


def assert_two_processes_give_the_numbers_of_one(start_group, config, tmp_path, *, n_devices):
    start_group(config, n=1, n_devices=n_devices).finish()
    reference = config.run_dir
    config.run_dir = str(tmp_path / "two")
    first, second = start_group(config, n=2, n_devices=n_devices // 2).finish()
    assert "in 2 processes" in first and "step" in first
    assert "reward" not in second, "only process 0 logs"
    assert_same_run(config.run_dir, reference)


@pytest.mark.thorough
def test_a_config_that_differs_stops_all_with_one_message(start_group, group_config):
    group = start_group(
        group_config,
        n=2,
        n_devices=4,
        per_process={1: ["--config.learner.lr=0.5", "--config.seed=7"]},
    )
    first, second = group.outputs()
    assert [process.returncode for process in group.processes] == [1, 1]
    assert "process 1 on" in first
    assert "seed: 0 -> 7" in first and "learner.lr: 0.001 -> 0.5" in first
    assert "Traceback" not in first + second and "error" not in second


@pytest.mark.thorough
def test_an_error_on_one_host_stops_all_with_its_message(start_group, group_config, tmp_path):
    """Process 1 runs in another folder, in which the relative path of the data does not exist."""
    rows = [json.dumps({"question": f"{i} + 1?", "answer": str(i + 1)}) for i in range(8)]
    (tmp_path / "train.jsonl").write_text("\n".join(rows))
    group_config.data.train = ("train.jsonl",)
    (tmp_path / "elsewhere").mkdir()
    group = start_group(group_config, n=2, n_devices=4, folders=[tmp_path, tmp_path / "elsewhere"])
    first, second = group.outputs()
    assert [process.returncode for process in group.processes] == [1, 1]
    assert "process 1 on" in first and "train.jsonl" in first
    assert "Traceback" not in first + second and "error" not in second


@pytest.mark.slow
def test_ctrl_c_at_one_process_saves_and_stops_all(start_group, group_config):
    group_config.total_steps = 200
    group = start_group(group_config, n=2, n_devices=4)
    group.wait_for_step(group_config.run_dir, 1)
    group.processes[1].send_signal(signal.SIGINT)
    first, _ = group.outputs()
    assert [process.returncode for process in group.processes] == [130, 130], first
    assert "SIGINT: saved after step" in first
    steps = [p.name for p in Path(group_config.run_dir, "checkpoints").iterdir()]
    assert len(steps) == 1 and 1 <= int(steps[0]) < 200


@pytest.mark.slow
def test_one_engine_over_both_processes_gives_the_numbers_of_one(
    start_group, group_config, tmp_path
):
    start_group(group_config, n=1, n_devices=8).finish()
    reference = group_config.run_dir
    group_config.run_dir = str(tmp_path / "two")
    group_config.rollout.engines = "mesh"
    start_group(group_config, n=2, n_devices=4).finish()
    assert_same_run(group_config.run_dir, reference)


@pytest.mark.slow
def test_each_of_two_processes_reads_its_responses_at_a_teachers_server(
    start_group, group_config, tmp_path
):
    group_config.algorithm.kl, group_config.algorithm.kl_top_k = "jsd", 4
    group_config.algorithm.kl_beta = 0.5
    group_config.rollout.sampling.temperature = 1.0
    sent, reference = {}, str(tmp_path / "one")
    for n, run_dir in ((1, reference), (2, str(tmp_path / "two"))):
        server = FakeServer(load_tokenizer(Path(group_config.model.path)), 260)
        group_config.algorithm.teacher, group_config.run_dir = server.url, run_dir
        try:
            start_group(group_config, n=n, n_devices=8 // n).finish()
        finally:
            server.close()
        sent[n] = server.bodies[1:]  # the first is the probe of the main process
    assert_same_run(str(tmp_path / "two"), reference)
    for n, bodies in sent.items():
        lines = metrics(tmp_path / ("one" if n == 1 else "two"))
        assert len(bodies) == sum(line.get("teacher/requests", 0) for line in lines) > 0
    prompts = [{tuple(body["prompt"]) for body in bodies} for bodies in sent.values()]
    assert prompts[0] == prompts[1]


@pytest.mark.slow
def test_four_processes_give_the_numbers_of_one(start_group, group_config, tmp_path):
    group_config.mesh.fsdp = 8
    group_config.model.layers = "stacked"  # as on TPU
    start_group(group_config, n=1, n_devices=16).finish()
    reference = group_config.run_dir
    group_config.run_dir = str(tmp_path / "four")
    start_group(group_config, n=4, n_devices=4).finish()
    assert_same_run(group_config.run_dir, reference)


@pytest.mark.slow
@pytest.mark.parametrize("victim", [0, 1])
def test_a_killed_process_ends_the_others_and_the_group_resumes_bitwise(
    start_group, group_config, tmp_path, victim
):
    group_config.total_steps = 6
    group_config.checkpoint.every = 1
    start_group(group_config, n=2, n_devices=4).finish()
    unbroken = group_config.run_dir
    group_config.run_dir = str(tmp_path / "killed")
    group = start_group(group_config, n=2, n_devices=4)
    group.wait_for_step(group_config.run_dir, 2)
    group.processes[victim].kill()
    group.outputs(timeout_s=90)  # the other process must not wait forever
    assert group.processes[1 - victim].returncode != 0
    start_group(group_config, n=2, n_devices=4).finish()
    assert_close(group_config.run_dir, unbroken, atol=0)
    assert metrics(group_config.run_dir) == metrics(unbroken)


def assert_checkpoint_is_the_export(run_dir, step):
    """Asserts that reading only the weights, as a server does, gives the exported model."""
    with jax.set_mesh(make_mesh()):
        export = load_model(run_dir, rules=TRAIN)[1]
    weights = read_weights(run_dir / "checkpoints", step, export)
    for saved, exported in zip(*map(jax.tree.leaves, (weights, export)), strict=True):
        np.testing.assert_array_equal(saved, exported)


@pytest.mark.slow
def test_one_process_with_fewer_devices_resumes_a_checkpoint_of_two(
    start_group, group_config, tmp_path
):
    """8 devices as FSDP 4 x tensor 2 in two processes, then 4 as tensor 2 x FSDP 2 in one."""
    group_config.total_steps = 4
    start_group(group_config, n=1, n_devices=8).finish()
    unbroken = group_config.run_dir
    group_config.run_dir = str(tmp_path / "moved")
    group_config.total_steps = 2
    start_group(group_config, n=2, n_devices=4).finish()
    assert_checkpoint_is_the_export(Path(group_config.run_dir), 2)
    group_config.total_steps, group_config.mesh.fsdp = 4, 2
    start_group(group_config, n=1, n_devices=4).finish()
    assert_close(group_config.run_dir, unbroken, atol=2e-5)


@pytest.mark.slow
def test_two_processes_with_environments_give_the_numbers_of_one(
    start_group, group_config, tmp_path
):
    path = tmp_path / "letters.py"
    path.write_text(
        "class Letters:\n"
        "    def reset(self, prompt):\n"
        "        self.left = 2\n"
        "        return [{'role': 'user', 'content': str(prompt['seed'])[:3]}]\n"
        "    def step(self, text):\n"
        "        self.left -= 1\n"
        "        return 'More.', sum(c.isalpha() for c in text) / 8, self.left == 0\n"
    )
    group_config.env.name = f"{path}:Letters"
    group_config.reward.functions = ("environment",)
    group_config.data.max_response_len = 64
    group_config.rollout.sampling.stop = ("a", "e", "i", "o", "u", "0", "1", "2", " ")
    start_group(group_config, n=1, n_devices=8).finish()
    reference = group_config.run_dir
    assert any(line.get("env/turns", 0) > 1 for line in metrics(reference))
    group_config.run_dir = str(tmp_path / "two")
    start_group(group_config, n=2, n_devices=4).finish()
    assert_same_run(group_config.run_dir, reference)
