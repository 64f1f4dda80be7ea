"""Tests of whole runs of a tiny model: their output files, resuming, interrupting, packing, meshes.

They cover jaxrl/train.py, and in jaxrl/trainer loop.py, core.py, rl_step.py, sampling.py,
update.py, checkpointing.py and setup/ (data.py, devices.py, engines.py, folder.py, host.py,
learner.py, models.py, opening.py, session.py, warmup.py)."""

import collections
import contextlib
import gc
import json
import os
import signal
import subprocess
import sys
import time
from pathlib import Path

import jax
import numpy as np
import pytest
from safetensors.numpy import load_file

from jaxrl.config import resolve
from jaxrl.data.tokenizer import load_tokenizer, stop_ids
from jaxrl.engine.device.batches import decode_buckets
from jaxrl.tracking.first_samples import read_first_samples
from jaxrl.tracking.json_lines import read_lines
from jaxrl.train import train
from jaxrl.trainer.phases.update import NonFiniteError

CACHES = os.environ.get("XDG_CACHE_HOME") or str(Path.home() / ".cache")
TIMES = ("time", "time/", "_per_s", "host_fraction")


def weights(run_dir, name="hf"):
    return load_file(Path(run_dir) / name / "model.safetensors")


def assert_same_weights(a, b, name="hf"):
    a, b = weights(a, name), weights(b, name)
    assert a.keys() == b.keys()
    for name in a:
        np.testing.assert_array_equal(a[name], b[name], err_msg=name)


def metrics(run_dir):
    """Lines of metrics.jsonl without the metrics that depend on the clock."""
    lines = (Path(run_dir) / "metrics.jsonl").read_text().splitlines()
    return [
        {
            k: v
            for k, v in json.loads(line).items()
            if k != "time" and not any(t in k for t in TIMES[1:])
        }
        for line in lines
    ]


def start_process(config, tmp_path, *overrides, n_devices=1):
    """Starts the run in a separate process through the command line, with simulated devices."""
    values = config.to_dict()
    path = tmp_path / "config.py"
    path.write_text(
        "from jaxrl.config import default_config\n"
        f"VALUES = {values!r}\n"
        "def get_config():\n"
        "    config = default_config()\n"
        "    config.update(VALUES)\n"
        "    return config\n"
    )
    return subprocess.Popen(
        [sys.executable, "-m", "jaxrl.train", f"--config={path}", *overrides],
        env={
            "JAX_PLATFORMS": "cpu",
            "JAX_NUM_CPU_DEVICES": str(n_devices),
            "PATH": "/usr/bin:/bin",
            "HOME": str(tmp_path),
            "XDG_CACHE_HOME": CACHES,  # of compiled C kernels
        },
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
    )


def finish_process(config, tmp_path, *overrides, n_devices=1):
    """Runs to the end in a separate process.

    A bitwise comparison needs two such processes: thread pools depend on the number of simulated
    devices, and the last bit of a sum on the thread pool.
    """
    process = start_process(config, tmp_path, *overrides, n_devices=n_devices)
    output, _ = process.communicate(timeout=300)
    assert process.returncode == 0, output


def wait_for_step(run_dir, step, process, timeout_s=240):
    """Returns when metrics.jsonl has a training line of `step` or a later one."""
    path, deadline = Path(run_dir) / "metrics.jsonl", time.monotonic() + timeout_s
    while time.monotonic() < deadline:
        assert process.poll() is None, process.stdout.read()
        if path.exists():
            lines = [
                json.loads(line) for line in path.read_text().splitlines() if line.endswith("}")
            ]
            if any(line["step"] >= step and "reward/mean" in line for line in lines):
                return
        time.sleep(0.05)
    raise AssertionError(f"no step {step} within {timeout_s} s")


@contextlib.contextmanager
def counted_compilations():
    """Counts the compilations in the block by program."""
    counts = collections.Counter()

    def listener(event, seconds, *, fun_name="", **_):
        if "backend_compile" in event:
            counts[fun_name] += 1

    jax.monitoring.register_event_duration_secs_listener(listener)
    try:
        yield counts
    finally:
        jax.monitoring.unregister_event_duration_listener(listener)


def test_a_run_leaves_a_complete_folder(tiny_config):
    gc.disable()  # as `python -m jaxrl.train` does before its imports
    with counted_compilations() as counts:
        assert train(resolve(tiny_config))
    assert gc.isenabled()
    # What compiles while weights are loaded is what the run calls.
    assert counts["jit(_accumulate)"] == counts["jit(_apply)"] == 1
    # Other runs of this process may have compiled decode.
    assert counts["jit(decode)"] <= len(decode_buckets(tiny_config.rollout.max_num_seqs))
    folder = Path(tiny_config.run_dir)
    for name in ("config.json", "metrics.jsonl", "samples.jsonl", "report.html", "checkpoints/4"):
        assert (folder / name).exists(), name
    for name in ("config.json", "model.safetensors", "tokenizer.json"):
        assert (folder / "hf" / name).exists(), name
    lines = metrics(folder)
    assert [line["step"] for line in lines if "reward/mean" in line] == [1, 2, 3, 4]
    assert [line["step"] for line in lines if "val/reward" in line] == [0, 4]
    trained = [line for line in lines if "optim/grad_norm" in line]
    assert trained and all(line["mismatch/logp_diff_max"] < 1e-4 for line in trained)
    samples = read_lines(folder / "samples.jsonl")
    assert len(samples) == 4 * 16 + 2 * 6
    [first, *_] = [sample for sample in samples if sample["kind"] == "train"]
    row, [(prompt, asked), (response, learned)] = read_first_samples(folder)[0]
    assert (row, asked, learned) == (first["prompt_id"], False, True)
    assert first["prompt"] in prompt and first["completion"] in response


@pytest.mark.slow
def test_a_kept_sampling_mask_leaves_no_mismatch_and_compiles_nothing_after_warm_up(tiny_config):
    tiny_config.rollout.sampling.top_k = 20
    algorithm, learner = tiny_config.algorithm, tiny_config.learner
    algorithm.keep_sampling_mask, algorithm.kl_coef = True, 0.1
    algorithm.correction = "token_tis"
    learner.mini_batch_prompts = tiny_config.data.prompts_per_step // 2  # old logprobs are scored
    tiny_config.total_steps = 2
    with counted_compilations() as counts:
        assert train(resolve(tiny_config))
    once = ("jit(_accumulate)", "jit(_apply)", "jit(score_tokens)", "jit(mixed)")
    assert [counts[name] for name in once] == [1, 1, 2, 1]  # of the policy and of the reference
    lines = [line for line in metrics(tiny_config.run_dir) if "optim/grad_norm" in line]
    assert len(lines) == 2
    for line in lines:
        assert (
            line["mismatch/logp_diff_max"] < 1e-4 and abs(line["mismatch/weight_mean"] - 1) < 1e-4
        )
    assert lines[0]["rollout/entropy"] < np.log(20)  # of the distribution over 20 tokens


@pytest.mark.slow
def test_a_mixture_of_experts_trains_with_expert_parallelism(tiny_config, tiny_experts):
    tiny_config.model.path = str(tiny_experts)
    tiny_config.mesh.expert = 2
    tiny_config.learner.router_aux_coef = 0.01
    tiny_config.total_steps = 2
    assert train(resolve(tiny_config))  # nothing compiles after warm-up
    lines = [line for line in metrics(tiny_config.run_dir) if "optim/grad_norm" in line]
    assert len(lines) == 2
    for line in lines:
        assert line["mismatch/logp_diff_max"] < 1e-4
        assert 1.9 < line["router/balance_loss"] < 4 and line["router/load_max"] >= 1
        aux = 0.01 * line["router/balance_loss"]
        np.testing.assert_allclose(line["loss/total"], line["loss/policy"] + aux, rtol=1e-4)
    before = load_file(tiny_experts / "model.safetensors")
    after = weights(tiny_config.run_dir)
    assert before.keys() == after.keys()
    router = "model.layers.0.block_sparse_moe.gate.weight"
    assert (before[router] != after[router]).any()


@pytest.mark.thorough
def test_the_export_has_the_trained_weights_and_the_template_and_stop_tokens_of_the_run(
    tiny_config, tiny_model
):
    tiny_config.rollout.sampling.stop_token_ids = (7,)
    assert train(resolve(tiny_config))
    before = load_file(tiny_model / "model.safetensors")
    after = weights(tiny_config.run_dir)
    assert any((before[name] != after[name]).any() for name in before)
    # transformers renders and stops as the run did, though the model's own template differs
    folder = Path(tiny_config.run_dir) / "hf"
    messages = [{"role": "user", "content": "1 + 1?"}]
    text = load_tokenizer(folder).apply_chat_template(messages, tokenize=False)
    assert text == "<|im_start|>user\n1 + 1?<|im_end|>\n"
    generation = json.loads((folder / "generation_config.json").read_text())
    stop = stop_ids(tiny_model, load_tokenizer(tiny_model))
    assert set(np.atleast_1d(generation["eos_token_id"])) == {*stop, 7}


@pytest.mark.thorough
def test_packing_does_not_change_the_result(tiny_config, tmp_path):
    tiny_config.total_steps = 2
    # Adam's first step is g / (|g| + eps): at eps 1e-8 rounding errors of a tiny g change the step.
    tiny_config.learner.eps = 1e-5
    assert train(resolve(tiny_config))
    first = weights(tiny_config.run_dir)
    tiny_config.run_dir = str(tmp_path / "other")
    tiny_config.learner.token_budget = 512
    tiny_config.learner.buckets = (256, 512)
    assert train(resolve(tiny_config))
    second = weights(tiny_config.run_dir)
    for name in first:
        np.testing.assert_allclose(first[name], second[name], atol=2e-5, err_msg=name)


MESHES = {
    "fsdp 4, tensor 2": dict(fsdp=4, tensor=2),
    "ulysses": dict(fsdp=2, sequence=2, tensor=2),
    "ring": dict(replica=2, fsdp=2, sequence=2),
    "pipeline": dict(stage=2, fsdp=2, tensor=2),
}


@pytest.mark.slow
@pytest.mark.parametrize("mesh", MESHES)
def test_eight_devices_give_the_weights_of_one(tiny_config, two_layers, tmp_path, mesh):
    tiny_config.model.path = str(two_layers)
    tiny_config.total_steps = 2
    tiny_config.learner.mini_batch_prompts = 2  # two updates per step, so old_logp is computed
    assert train(resolve(tiny_config))
    one = weights(tiny_config.run_dir)
    tiny_config.run_dir = str(tmp_path / "eight")
    tiny_config.mesh.update(MESHES[mesh])
    if mesh in ("ulysses", "ring"):
        tiny_config.learner.sequence_parallel = mesh
    assert train(resolve(tiny_config))
    eight = weights(tiny_config.run_dir)
    for name in one:
        np.testing.assert_allclose(one[name], eight[name], atol=2e-5, err_msg=name)


@pytest.mark.slow
def test_quantized_products_are_those_of_the_policy_and_of_its_reference(tiny_config, tmp_path):
    tiny_config.learner.matmul_dtype, tiny_config.learner.lr = "int8", 0.01
    tiny_config.algorithm.kl_coef, tiny_config.algorithm.kl_in = 0.1, "loss"
    tiny_config.algorithm.correction, tiny_config.total_steps = "token_tis", 2
    assert train(resolve(tiny_config))
    first, last = [m for m in metrics(tiny_config.run_dir) if "loss/total" in m]
    assert abs(first["loss/kl"]) < 1e-6 < last["loss/kl"]
    # The engine's products are float32.
    assert 1e-6 < first["mismatch/logp_diff_mean"] < first["mismatch/logp_diff_max"] < 0.1
    tiny_config.run_dir, tiny_config.mesh.fsdp = str(tmp_path / "mesh"), 2
    tiny_config.mesh.tensor, tiny_config.total_steps = 2, 1
    assert train(resolve(tiny_config))
    (again,) = [m for m in metrics(tiny_config.run_dir) if "loss/total" in m]
    assert again["loss/total"] == pytest.approx(first["loss/total"], rel=1e-3, abs=1e-5)


@pytest.mark.thorough
def test_several_updates_and_epochs_per_step_with_kl_and_entropy(tiny_config):
    tiny_config.total_steps = 2
    tiny_config.learner.mini_batch_prompts = 2
    tiny_config.learner.epochs = 2
    tiny_config.algorithm.kl_coef = 0.1
    tiny_config.algorithm.entropy_coef = 0.01
    assert train(resolve(tiny_config))
    lines = [line for line in metrics(tiny_config.run_dir) if "perf/n_updates" in line]
    assert [line["perf/n_updates"] for line in lines] == [4.0, 4.0]
    # the first update starts at the reference, so its KL is zero
    assert 0 < lines[0]["loss/kl"] < lines[1]["loss/kl"]


@pytest.mark.slow
def test_offloading_to_host_memory_does_not_change_the_run(tiny_config, tmp_path):
    """A reference on the host changes no bit; steps layer by layer round some last bits."""
    tiny_config.total_steps = 2
    tiny_config.algorithm.kl_coef = 0.1
    assert train(resolve(tiny_config))
    first = tiny_config.run_dir
    tiny_config.run_dir = str(tmp_path / "reference")
    tiny_config.learner.offload = ("reference",)
    assert train(resolve(tiny_config))
    assert metrics(tiny_config.run_dir) == metrics(first)
    assert_same_weights(tiny_config.run_dir, first)
    tiny_config.run_dir = str(tmp_path / "optimizer")
    tiny_config.learner.offload = ("optimizer", "reference")
    assert train(resolve(tiny_config))
    assert metrics(tiny_config.run_dir)[:2] == metrics(first)[:2]  # before the first update
    found, want = weights(tiny_config.run_dir), weights(first)
    for name in want:
        np.testing.assert_allclose(found[name], want[name], rtol=1e-5, atol=1e-7, err_msg=name)


@pytest.mark.thorough
def test_full_kl_and_kl_in_the_reward_are_logged(tiny_config, tmp_path):
    tiny_config.total_steps = 2
    tiny_config.algorithm.kl_coef = 0.1
    tiny_config.algorithm.kl = "full"
    assert train(resolve(tiny_config))
    assert metrics(tiny_config.run_dir)[-2]["loss/kl"] >= 0
    tiny_config.run_dir = str(tmp_path / "other")
    tiny_config.algorithm.kl, tiny_config.algorithm.kl_in = "k1", "reward"
    assert train(resolve(tiny_config))
    line = metrics(tiny_config.run_dir)[1]
    assert "reward/kl" in line and "loss/kl" not in line, "the loss has no KL"


@pytest.mark.thorough
def test_remax_trains_with_a_greedy_baseline_and_clip_cov_selects_tokens(tiny_config):
    tiny_config.total_steps = 2
    tiny_config.rollout.n, tiny_config.data.prompts_per_step = 2, 4
    tiny_config.algorithm.advantage = "remax"
    tiny_config.algorithm.policy_loss = "clip_cov"
    tiny_config.algorithm.clip_cov_low, tiny_config.algorithm.clip_cov_high = -100.0, 100.0
    tiny_config.algorithm.cov_fraction = 0.25
    assert train(resolve(tiny_config))
    lines = [line for line in metrics(tiny_config.run_dir) if "optim/grad_norm" in line]
    assert len(lines) == 2 and all(line["optim/grad_norm"] > 0 for line in lines)
    # a quarter of all tokens has no gradient, or fewer if their response is idle
    assert all(0.1 < line["loss/clip_fraction"] <= 0.4 for line in lines)


@pytest.mark.thorough
def test_two_rewards_apart_train_the_tokens_of_large_entropy_in_a_sum(tiny_config):
    tiny_config.total_steps = 2
    tiny_config.rollout.n, tiny_config.data.prompts_per_step = 4, 2
    tiny_config.reward.functions = (f"{__file__}:often_flat", f"{__file__}:length")
    tiny_config.algorithm.advantage, tiny_config.algorithm.top_entropy = "gdpo", 0.2
    tiny_config.algorithm.policy_loss, tiny_config.algorithm.aggregation = "dppo_tv", "token_sum"
    assert train(resolve(tiny_config))
    lines = [line for line in metrics(tiny_config.run_dir) if "optim/grad_norm" in line]
    assert len(lines) == 2 and all(line["optim/grad_norm"] > 0 for line in lines)
    assert all(line["reward/length"] < 0 for line in lines)


@pytest.mark.thorough
def test_the_optimal_token_baseline_reads_the_scoring_of_the_policy(tiny_config):
    tiny_config.total_steps = 2
    tiny_config.rollout.n, tiny_config.data.prompts_per_step = 4, 2
    tiny_config.reward.functions = (f"{__file__}:length",)
    tiny_config.algorithm.advantage = "optimal_token_baseline"
    assert train(resolve(tiny_config))
    lines = [line for line in metrics(tiny_config.run_dir) if "optim/grad_norm" in line]
    assert len(lines) == 2 and all(line["optim/grad_norm"] > 0 for line in lines)


@pytest.mark.thorough
def test_adaptive_coefficients_dynamic_sampling_and_curriculum_resume_bitwise(
    tiny_config, two_layers, tmp_path
):
    tiny_config.model.path = str(two_layers)  # its samples solve a prompt within three steps
    tiny_config.total_steps = 3
    tiny_config.data.prompts_per_step = 2
    tiny_config.data.train = ("task:addition?digits=1&size=9&split=train",)
    tiny_config.data.skip_solved = 0.55
    tiny_config.rollout.n = 2
    tiny_config.reward.functions = (f"{__file__}:often_flat",)
    tiny_config.reward.overlong_buffer = 4
    tiny_config.reward.normalize, tiny_config.reward.clip = True, (-1.0, 1.0)
    algorithm = tiny_config.algorithm
    algorithm.advantage, algorithm.policy_loss = "reinforce_plus_plus", "gspo_token"
    algorithm.dynamic_sampling = True
    algorithm.kl, algorithm.kl_coef, algorithm.kl_target = "k3+", 0.1, 0.01
    algorithm.entropy_coef, algorithm.entropy_target = 0.01, 8.0
    algorithm.clip_low = algorithm.clip_high = 0.01
    algorithm.aggregation = "seq_mean_token_mean"
    algorithm.correction, algorithm.rejection = "seq_tis", "seq_mean_k1"
    algorithm.correction_normalize, algorithm.off_policy_threshold = True, 0.5
    assert train(resolve(tiny_config))
    uninterrupted = tiny_config.run_dir
    tiny_config.run_dir = str(tmp_path / "resumed")
    tiny_config.total_steps = 1
    assert train(resolve(tiny_config))
    tiny_config.total_steps = 3
    assert train(resolve(tiny_config))
    assert_same_weights(uninterrupted, tiny_config.run_dir)
    trained = [line for line in metrics(uninterrupted) if "reward/mean" in line]
    assert trained == [line for line in metrics(tiny_config.run_dir) if "reward/mean" in line]
    assert len({line["reward/running_mean"] for line in trained}) == 3
    assert any(line["reward/clip_fraction"] > 0 for line in trained)
    assert len({line["loss/kl_coef"] for line in trained}) == 3
    assert len({line["loss/entropy_coef"] for line in trained}) == 3
    assert max(line["rollout/batches"] for line in trained) > 1
    assert any(line["data/solved"] > 0 for line in trained)
    assert all(line["mismatch/weight_mean"] == pytest.approx(1.0, abs=1e-4) for line in trained)


@pytest.mark.thorough
@pytest.mark.parametrize("rate", [1.0, pytest.param(0.5, marks=pytest.mark.slow)])
def test_reference_refresh_and_weight_average_resume_bitwise(tiny_config, tmp_path, rate):
    tiny_config.algorithm.kl_coef = 0.1
    tiny_config.algorithm.ref_refresh_every = 2
    tiny_config.algorithm.ref_refresh_rate = rate
    tiny_config.learner.ema = 0.5
    assert train(resolve(tiny_config))
    uninterrupted = tiny_config.run_dir
    tiny_config.run_dir = str(tmp_path / "resumed")
    tiny_config.total_steps = 3
    assert train(resolve(tiny_config))
    tiny_config.total_steps = 4
    assert train(resolve(tiny_config))
    assert_same_weights(uninterrupted, tiny_config.run_dir)
    assert_same_weights(uninterrupted, tiny_config.run_dir, "hf_ema")
    trained = [line for line in metrics(uninterrupted) if "reward/mean" in line]
    assert trained == [line for line in metrics(tiny_config.run_dir) if "reward/mean" in line]
    # Engine and trainer logprobs agree, so the KL is zero while policy and reference are equal: at
    # the first step and right after the refresh, if it is a copy.
    kl = [line["loss/kl"] for line in trained]
    assert abs(kl[0]) < 1e-6 and (abs(kl[2]) < 1e-6) == (rate == 1) and min(kl[1], kl[3]) > 1e-6
    a, b = weights(uninterrupted), weights(uninterrupted, "hf_ema")
    assert any(not np.array_equal(a[name], b[name]) for name in a)


def often_flat(data_source, solution_str, ground_truth, extra_info=None):
    """A reward of 0 or 1, often equal for the two samples of a prompt."""
    return float(sum(c.isalpha() for c in solution_str) >= 4)


def length(data_source, solution_str, ground_truth, extra_info=None):
    """Minus the number of characters."""
    return -float(len(solution_str))


@pytest.mark.bitwise
def test_a_resumed_run_is_bitwise_equal_to_an_uninterrupted_one(tiny_config, tmp_path):
    assert train(resolve(tiny_config))
    uninterrupted = tiny_config.run_dir
    tiny_config.run_dir = str(tmp_path / "resumed")
    tiny_config.total_steps = 2
    assert train(resolve(tiny_config))
    tiny_config.total_steps = 4
    assert train(resolve(tiny_config))
    assert_same_weights(uninterrupted, tiny_config.run_dir)
    trained = [line for line in metrics(uninterrupted) if "reward/mean" in line]
    assert trained == [line for line in metrics(tiny_config.run_dir) if "reward/mean" in line]


@pytest.mark.slow
@pytest.mark.parametrize("step", [1, 3])
def test_a_killed_run_resumes_bitwise(tiny_config, tmp_path, step):
    tiny_config.total_steps = 6
    tiny_config.checkpoint.every = 1
    finish_process(tiny_config, tmp_path)
    uninterrupted = tiny_config.run_dir
    tiny_config.run_dir = str(tmp_path / "killed")
    process = start_process(tiny_config, tmp_path)
    wait_for_step(tiny_config.run_dir, step, process)
    process.kill()
    process.wait()
    finish_process(tiny_config, tmp_path)  # resumes from a checkpoint if the folder has one
    assert_same_weights(uninterrupted, tiny_config.run_dir)


@pytest.mark.thorough
def test_ctrl_c_saves_prints_the_resume_command_and_resumes_bitwise(tiny_config, tmp_path):
    tiny_config.total_steps = 40
    process = start_process(tiny_config, tmp_path)
    wait_for_step(tiny_config.run_dir, 2, process)
    process.send_signal(signal.SIGINT)
    output, _ = process.communicate(timeout=120)
    assert process.returncode == 130, output
    assert "--config.resume=True" in output and "SIGINT" in output
    (saved,) = [
        int(p.name) for p in Path(tiny_config.run_dir, "checkpoints").iterdir() if p.name.isdigit()
    ]
    assert 2 <= saved < 40

    tiny_config.total_steps = saved + 2
    finish_process(tiny_config, tmp_path, "--config.resume=True")
    resumed = tiny_config.run_dir
    tiny_config.run_dir = str(tmp_path / "uninterrupted")
    finish_process(tiny_config, tmp_path)
    assert_same_weights(resumed, tiny_config.run_dir)


@pytest.mark.thorough
def test_the_folder_of_another_config_is_rejected(tiny_config):
    tiny_config.total_steps = 1
    assert train(resolve(tiny_config))
    tiny_config.learner.lr = 1e-5
    with pytest.raises(ValueError, match=r"learner\.lr: 0\.001 -> 1e-05.*run_dir"):
        train(resolve(tiny_config))


@pytest.mark.thorough
def test_changed_data_and_a_changed_template_are_rejected_on_resume(tiny_config, tmp_path):
    data, template = tmp_path / "rows.jsonl", tmp_path / "t.jinja"
    rows = [{"question": f"{i} + 1?", "answer": str(i + 1)} for i in range(8)]
    data.write_text("\n".join(map(json.dumps, rows)))
    source = "{% for m in messages %}Q: {{ m.content }} A:{% endfor %}"
    template.write_text(source)
    tiny_config.data.train, tiny_config.data.chat_template = (str(data),), str(template)
    tiny_config.total_steps = 1
    assert train(resolve(tiny_config))
    tiny_config.total_steps = 2
    data.write_text(data.read_text().replace("7 + 1?", "8 + 1?"))
    with pytest.raises(ValueError, match=r"data\.train: the rows have changed"):
        train(resolve(tiny_config))
    data.write_text(data.read_text().replace("8 + 1?", "7 + 1?"))
    template.write_text(source.replace("Q", "{{ strftime_now('%Y') }}"))
    with pytest.raises(ValueError, match=r"data\.train: the rows are the same.*\n  data\.val"):
        train(resolve(tiny_config))


@pytest.mark.thorough
def test_resuming_without_a_checkpoint_is_rejected(tiny_config):
    tiny_config.resume = True
    with pytest.raises(ValueError, match="no checkpoint"):
        train(resolve(tiny_config))


@pytest.mark.thorough
def test_a_nonfinite_loss_stops_the_run_and_saves_the_batch(tiny_config):
    tiny_config.learner.lr = 1e30
    tiny_config.learner.clip_norm = 0.0
    with pytest.raises(NonFiniteError, match=r"step \d: .*nonfinite_step_\d\.npz"):
        train(resolve(tiny_config))
    (saved,) = Path(tiny_config.run_dir).glob("nonfinite_step_*.npz")
    batch = np.load(saved)
    assert batch["0/tokens"].shape == (1, 256)
    step = int(saved.stem.rpartition("_")[2])
    assert Path(tiny_config.run_dir, "checkpoints", str(step - 1)).is_dir()


@pytest.mark.thorough
def test_a_reward_that_raises_is_counted(tiny_config, tmp_path):
    path = tmp_path / "bad.py"
    path.write_text(
        "def reward(data_source, solution_str, ground_truth, extra_info=None):\n"
        "    raise KeyError('x')\n"
    )
    tiny_config.total_steps = 1
    tiny_config.reward.functions = (f"{path}:reward",)
    tiny_config.reward.max_error_fraction = 1.0
    assert train(resolve(tiny_config))
    (line,) = [line for line in metrics(tiny_config.run_dir) if "reward/errors" in line]
    assert line["reward/errors"] == 16.0


@pytest.mark.slow
@pytest.mark.parametrize("replay", ["R2", "R3"])
def test_experts_are_replayed_in_scoring_and_updates(tiny_config, tiny_experts, replay):
    """The engine's int8 weights choose other experts, which R3 gives training."""
    tiny_config.model.path, tiny_config.rollout.dtype = str(tiny_experts), "int8"
    tiny_config.learner.router_replay, tiny_config.total_steps = replay, 2
    tiny_config.learner.mini_batch_prompts = 2  # two updates per step, so old_logp is computed
    tiny_config.algorithm.kl_coef, tiny_config.algorithm.correction = 0.1, "token_tis"
    assert train(resolve(tiny_config))  # nothing compiles after warm-up
    lines = [line for line in metrics(tiny_config.run_dir) if "optim/grad_norm" in line]
    assert len(lines) == 2
    for line in lines:
        assert 0 <= line["router/changed_fraction"] < 0.5
