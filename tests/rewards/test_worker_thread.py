"""Tests of jaxrl/rewards/worker_thread.py: reward functions that are objects of this process."""

import asyncio
import functools
import threading
import time

import numpy as np
import pytest

from jaxrl.config.keys import RewardConfig
from jaxrl.rewards.pool import RewardPool
from jaxrl.rewards.worker_thread import named
from jaxrl.types import Prompt, Rollout

SCALE = 2.0  # read by a function, as a name of the notebook is


def rollout(text):
    ids = np.zeros(1, np.int32)
    prompt = Prompt(0, ({"role": "user", "content": "?"},), ids, "7")
    return Rollout(prompt, 0, ids, ids.astype(np.float32), ids == 0, ids, "stop", text)


def scores(function, *texts, **cfg):
    own = named(function)
    with RewardPool(RewardConfig(functions=tuple(own), **cfg), own=own) as pool:
        return pool.score([rollout(text) for text in texts])


def scaled(solution_str, ground_truth):
    return SCALE * (solution_str == ground_truth)


def test_a_function_reads_the_names_around_it_and_runs_in_threads_of_this_process():
    threads = set()

    def seen(solution_str):
        threads.add(threading.current_thread())
        return scaled(solution_str, "7")

    found = scores(seen, *"7877", workers=1)
    assert [reward.value for reward in found] == [2.0, 0.0, 2.0, 2.0]
    assert found[0].parts == {"seen": 2.0}
    (thread,) = threads
    assert thread is not threading.main_thread()
    thread.join(timeout=10)
    assert not thread.is_alive()  # the pool is closed


def test_batches_async_functions_and_errors_are_those_of_worker_processes():
    def lengths(completions, **columns):
        return [len(one[0]["content"]) for one in completions]

    async def waits(solution_str):
        await asyncio.sleep(0)
        return {"score": 1.0, "further": 3.0}

    def fails(solution_str):
        if solution_str == "exit":
            raise SystemExit("bye")
        raise KeyError("boxed")

    own = named([lengths, waits])
    with RewardPool(RewardConfig(functions=tuple(own)), own=own) as pool:
        (found,) = pool.score([rollout("abc")])
    assert found.value == 4.0 and found.parts["waits/further"] == 3.0
    wrong = scores(fails, "exit", "x")
    assert "SystemExit: bye" in wrong[0].error and "KeyError: 'boxed'" in wrong[1].error


def test_a_call_over_its_limit_is_an_error_and_the_next_one_has_another_thread():
    release = threading.Event()

    def slow(solution_str):
        if solution_str == "wait":
            release.wait(60)
        return 1.0

    start = time.monotonic()
    found = scores(slow, "wait", "x", "y", workers=1, timeout_s=0.2)
    assert "no answer within 0.2 s" in found[0].error
    assert [reward.value for reward in found[1:]] == [1.0, 1.0]
    assert time.monotonic() - start < 30
    release.set()


def test_names_have_a_digest_of_the_source():
    (spec,) = named(scaled)
    assert spec.startswith("notebook:scaled?source=")
    (other,) = named(rollout)
    assert spec.partition("=")[2] != other.partition("=")[2]
    namespace: dict = {}
    exec("def score(solution_str): return 1.0", namespace)  # Python has no source of it
    assert list(named(namespace["score"])) == ["notebook:score"]


@pytest.mark.parametrize(
    ("functions", "message"),
    [
        (lambda solution_str: 1.0, "define it with `def`"),
        (functools.partial(scaled, ground_truth="7"), "no function with a name"),
        ("my_reward.py:score", "no function with a name"),
        ([], "has no function"),
        ([scaled, scaled], "two functions scaled"),
    ],
)
def test_objects_that_are_no_named_functions_are_rejected(functions, message):
    with pytest.raises(ValueError, match=message):
        named(functions)


def test_a_signature_of_no_form_and_a_function_that_is_not_passed_are_rejected_at_the_start():
    def wrong(text, answer):
        return 1.0

    with pytest.raises(ValueError, match=r"notebook:wrong\?source=.*accepted are verl's"):
        scores(wrong, "x")
    with pytest.raises(ValueError, match=r"pass it with jaxrl.train\(\.\.\., reward=scaled\)"):
        RewardPool(RewardConfig(functions=tuple(named(scaled))))
