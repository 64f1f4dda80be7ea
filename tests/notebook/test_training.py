"""Tests of jaxrl/notebook/training.py and evaluation.py: runs in the caller's process."""

import os
import signal
import threading

import jax
import pytest

import jaxrl
from jaxrl.notebook import RunFolder, evaluate, generate, train
from jaxrl.report.record import read_record
from jaxrl.trainer import loop

calls = []  # of `letters`, which is a function of a notebook
counting = threading.Lock()


def letters(solution_str, extra_info):
    with counting:  # several threads call, and one of them has this number
        calls.append(extra_info)
        number = len(calls)
    if number == letters.interrupt_at:
        os.kill(os.getpid(), signal.SIGINT)
    return sum(c.isalpha() for c in solution_str) / 8


letters.interrupt_at = 0
CHATML = {"data.chat_template": "chatml", "data.max_prompt_len": 128, "mesh.fsdp": 1}


@pytest.fixture(autouse=True)
def no_calls():
    calls.clear()
    letters.interrupt_at = 0


def test_wrong_arguments_are_one_message(tiny_config):
    with pytest.raises(ValueError, match="reward= and overrides"):
        train(tiny_config, overrides={"reward.functions": ("math",)}, reward=letters)
    with pytest.raises(ValueError, match=r"(?s)there is no key totl_steps.*rollout\.n='many'"):
        train(tiny_config, overrides={"totl_steps": 1, "rollout.n": "many"})
    with pytest.raises(FileNotFoundError, match=r"no config file configs/quickstrat\.py"):
        train("quickstrat")
    found = []

    def in_thread():
        try:
            train(tiny_config)
        except ValueError as error:
            found.append(str(error))

    thread = threading.Thread(target=in_thread)
    thread.start()
    thread.join()
    assert "main thread" in found[0]


def live_bytes():
    return sum(array.nbytes for array in jax.live_arrays())


@pytest.mark.thorough
def test_a_run_with_a_function_of_the_caller_is_interrupted_resumed_and_used(tiny_config, tmp_path):
    before = live_bytes()
    whole = train(tiny_config, overrides={"run_dir": str(tmp_path / "whole")}, reward=letters)
    assert not whole.interrupted and calls

    calls.clear()
    letters.interrupt_at = 6 + 16 + 4  # validation, the first step, and in the second
    handlers = signal.getsignal(signal.SIGINT)
    run = train(tiny_config, reward=letters)
    assert run.interrupted and signal.getsignal(signal.SIGINT) is handlers
    assert not (run.run_dir / "hf").exists()
    (text,) = generate(run, "What is 1 + 2?", n=2, temperature=1.0, max_tokens=4)
    assert len(text) == 2  # of the last checkpoint

    with pytest.raises(ValueError, match=r"reward\.functions: .*notebook:letters\?source="):
        train(tiny_config, overrides={"reward.functions": ("format",)})
    letters.interrupt_at = 0
    resumed = train(tiny_config, reward=letters)
    assert not resumed.interrupted

    def rewards(one):
        return read_record(one.run_dir).series["reward/mean"]

    assert rewards(resumed) == rewards(whole) and len(rewards(whole)) == 4
    assert live_bytes() < before + (1 << 14)  # less than a copy of the weights

    assert (run.export(tmp_path / "model") / "config.json").is_file()
    assert generate(tmp_path / "model", ["a", "b"], max_tokens=4, overrides=CHATML) == generate(
        RunFolder(run.run_dir), ["a", "b"], max_tokens=4
    )
    with pytest.raises(ValueError, match=r"pass it with jaxrl.train\(\.\.\., reward=letters\)"):
        evaluate(run)
    sampled = {"eval.n": 2, "eval.sampling.temperature": 1.0}
    found = evaluate(run, overrides=sampled, reward=letters)
    assert found["all"]["prompts"] == 6  # of one digit: a tenth of all sums


@pytest.mark.thorough
def test_a_second_interrupt_stops_at_once(tiny_config, monkeypatch):
    tiny_config.data.val = ()
    letters.interrupt_at = 4
    ours = signal.default_int_handler  # a process in the background of a shell ignores SIGINT
    before = signal.signal(signal.SIGINT, ours)
    try:
        with monkeypatch.context() as patched, pytest.raises(KeyboardInterrupt):
            patched.setattr(loop, "save", lambda core: os.kill(os.getpid(), signal.SIGINT))
            jaxrl.train(tiny_config, reward=letters)
        assert signal.getsignal(signal.SIGINT) is ours
    finally:
        signal.signal(signal.SIGINT, before)
    letters.interrupt_at = 0
    run = jaxrl.train(tiny_config, overrides={"total_steps": 1}, reward=letters)
    assert not run.interrupted and (run.run_dir / "hf").is_dir()
