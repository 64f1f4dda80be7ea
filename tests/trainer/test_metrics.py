"""Tests of the clock and the speed of jaxrl/trainer/core.py, and of the sampling entropy."""

from types import SimpleNamespace

import numpy as np
import pytest

from jaxrl.config.resolve import resolve
from jaxrl.data.packing import pack, sequence_lens
from jaxrl.models.config import uniform_decoder
from jaxrl.models.flops import forward_flops
from jaxrl.planner.chips import CHIPS, chip_of
from jaxrl.trainer.core import Clock, Core
from jaxrl.trainer.phases.rewards import sampling_entropy
from jaxrl.trainer.setup import opening
from jaxrl.types import Prompt, Rollout, TrainState
from tests.trainer.phases.test_mini_batches import config, samples_of

MODEL = uniform_decoder("llama", L=1, D=16, N=2, K=2, H=8, F=32, V=64)


def packed():
    some = samples_of(2)
    return some, pack(some, shapes=((2, 64),), align=8, n_ranks=1)


def test_sequence_lens_recovers_the_lengths_of_packed_sequences():
    some, micro = packed()
    lens = np.concatenate([sequence_lens(p.batch) for p in micro])
    # the last token of a sequence is only a target
    want = [len(s.prompt_tokens) + len(s.tokens) - 1 for s in some]
    assert sorted(lens) == sorted(want)


def test_a_nested_phase_is_not_counted_in_the_outer_phase_but_in_the_step(monkeypatch):
    clock = iter([0.0, 1.0, 3.0, 8.0, 9.0, 10.0])  # step, adv, ref begin; ref, adv, step end
    monkeypatch.setattr("jaxrl.trainer.core.time.perf_counter", lambda: next(clock))
    job = SimpleNamespace(seconds={})
    with Clock.timed(job, "step"), Clock.timed(job, "adv"), Clock.timed(job, "ref"):
        pass
    assert job.seconds == {"time/ref_s": 5.0, "time/adv_s": 3.0, "time/step_s": 10.0}


def test_mfu_counts_all_devices_and_epochs(monkeypatch):
    c = config()
    c.learner.epochs = 2
    params = SimpleNamespace(cfg=MODEL)
    run = Core.__new__(Core)
    run.cfg = resolve(c)
    run.state = TrainState(params, None, np.int32(0))
    seconds = {"time/step_s": 4.0, "time/update_actor_s": 2.0}
    run.clock = Clock(cfg=run.cfg, total_steps=1, validates=False, seconds=seconds)
    h100 = SimpleNamespace(device_kind="NVIDIA H100 80GB HBM3")
    monkeypatch.setattr(opening.jax, "devices", lambda: [h100] * 3)
    monkeypatch.setattr(opening.jax, "device_count", lambda: 3)
    micro = packed()[1]
    run.peak_flops = opening.peak_flops(np.dtype("float16"))
    got = run.speed_metrics(120, micro)
    assert got["perf/tokens_per_s"] == 30 and got["perf/tokens_per_s_per_device"] == 10
    lens = np.concatenate([sequence_lens(p.batch) for p in micro])
    done = 2 * 3 * forward_flops(MODEL, lens)
    assert got["perf/mfu_actor"] == pytest.approx(done / (3 * 989e12 * 2.0))
    h100.device_kind = "cpu"
    run.peak_flops = opening.peak_flops(np.dtype("float16"))
    assert "perf/mfu_actor" not in run.speed_metrics(120, micro)


@pytest.mark.parametrize(
    ("kind", "chip"),
    [("TPU v5 lite", "v5e"), ("TPU v5", "v5p"), ("TPU v6 lite", "v6e"), ("NVIDIA H200", "h200")],
)
def test_chips_are_found_by_their_device_kind(kind, chip):
    assert chip_of(kind) == CHIPS[chip]
    assert chip_of("cpu") is None


def test_the_sampling_entropy_is_over_all_tokens_that_the_policy_sampled():
    prompt, tokens = Prompt(0, (), np.array([5], np.int32), ""), np.array([3, 4, 5], np.int32)
    logp = np.array([-1.0, -9.0, -2.0], np.float32)  # the second token is an observation
    mask = np.array([True, False, True])
    plain = Rollout(prompt, 0, tokens, logp, mask, tokens, "stop")
    filtered = Rollout(prompt, 1, tokens, logp, mask, tokens, "stop", behavior_logp=logp + 0.5)
    # (1 + 2 + 0.5 + 1.5) / 4
    assert sampling_entropy([plain, filtered]) == 1.25
