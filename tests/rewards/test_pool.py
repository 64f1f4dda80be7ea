"""Tests of jaxrl/rewards/pool.py, jaxrl/rewards/worker.py and jaxrl/subprocesses/process.py."""

import os
import signal
import subprocess
import sys
import textwrap
import time

import numpy as np
import pytest

from jaxrl.config.keys import RewardConfig
from jaxrl.rewards.pool import RewardPool
from jaxrl.types import Prompt, Rollout

HAZARDS = """
import asyncio, os, signal, subprocess, sys, time


def length(data_source, solution_str, ground_truth, extra_info=None, *, scale=1):
    return scale * len(solution_str)


def obey(data_source, solution_str, ground_truth, extra_info):
    if solution_str == "raise":
        raise RuntimeError("out of cheese")
    if solution_str == "exit":
        os._exit(3)
    if solution_str == "sys.exit":
        sys.exit("bye")
    if solution_str == "segfault":
        os.kill(os.getpid(), signal.SIGSEGV)
    if solution_str == "sleep":
        time.sleep(1000)
    if solution_str == "hang in C":
        return 9 ** 9 ** 9
    if solution_str == "spawn":
        child = subprocess.Popen(["sleep", "1000"])
        with open(ground_truth, "w") as file:
            file.write(str(child.pid))
        child.wait()
    return {"nan": float("nan"), "none": None, "text": "0.5", "no score": {"acc": 1.0}}.get(
        solution_str, 1.0
    )


def rollouts(rollouts): ...


def late(data_source, solution_str, ground_truth, extra_info):
    time.sleep(0.2)
    return 1.0


def parts(data_source, solution_str, ground_truth, extra_info):
    further = {"acc": True, "pred": "seven", "bad": float("inf")}
    return {"score": 2.0, "feedback": f"not {chr(0xD83D)} but 7", **further}


def batched(data_sources, solution_strs, ground_truths, extra_infos, *, bonus=0):
    if "raise" in solution_strs:
        raise RuntimeError("out of cheese")
    if "sleep" in solution_strs:
        time.sleep(1000)
    if "short" in solution_strs:
        return [1.0]
    found = [{"score": len(s) + bonus, "n": len(solution_strs)} for s in solution_strs]
    return [float("nan") if s == "nan" else f for s, f in zip(solution_strs, found)]


def impatient(
    data_source, solution_str, ground_truth, extra_info, *, timeout_s, prompt_str, query_str
):
    return {"score": timeout_s, "prompt": len(prompt_str), "query": len(query_str)}


def search_r1(data_source, solution_str, ground_truth, extra_info=None):
    return float(solution_str in ground_truth["target"])


def trl(prompts, completions, completion_ids, level, weight=2.0, *, bonus=0.0, **columns):
    return [
        None if "none" in str(completion) else {"score": level + bonus, "n_ids": len(ids)}
        | {"answer": answer, "is_text": isinstance(prompt, str) and isinstance(completion, str)}
        | {"is_chat": prompt[0] == {"role": "user"} and completion[0]["role"] == "assistant"}
        | {"weight": weight[0] if isinstance(weight, list) else weight, "columns": len(columns)}
        for prompt, completion, ids, level, answer in zip(
            prompts, completions, completion_ids, level, columns["answer"], strict=True
        )
    ]


in_flight, most, loops = 0, 0, set()


async def judge(solution_str, ground_truth, timeout_s, *, wait_s=0.01):
    global in_flight, most
    in_flight += 1
    most = max(most, in_flight)
    loops.add(asyncio.get_running_loop())
    try:
        if solution_str == "raise":
            raise SystemExit("bye")
        if solution_str == "spin":
            time.sleep(1000)
        await asyncio.sleep(1000 if solution_str == "sleep" else wait_s)
        return {"score": len(solution_str), "most": most, "loops": len(loops), "limit": timeout_s}
    finally:
        in_flight -= 1


async def judge_batch(completions, **columns):
    return await asyncio.gather(*(judge(c, None, 1.0) for c in completions))


def what_it_sees(data_source, solution_str, ground_truth, extra_info):
    return {
        "score": len(data_source + ground_truth),
        "truncated": extra_info["finish"] == "length",
        "response_len": extra_info["response_len"],
        "index": extra_info["index"],
        "jax": "jax" in sys.modules,
        "pid": os.getpid(),
        "sigint_ignored": signal.getsignal(signal.SIGINT) == signal.SIG_IGN,
    }
"""


def rollout(text, answer="1", finish="stop", is_text=False, **extra):
    messages = ({"role": "user", "content": "?"},) if is_text else ({"role": "user"},)
    prompt = Prompt(
        id=0,
        messages=messages,
        tokens=np.zeros(3, np.int32),
        answer=answer,
        source="s",
        extra=extra,
        is_text=is_text,
    )
    tokens, logp, mask = np.zeros(4, np.int32), np.zeros(4, np.float32), np.ones(4, bool)
    return Rollout(prompt, 0, tokens, logp, mask, versions=tokens, finish=finish, text=text)


@pytest.fixture(scope="module")
def hazards(tmp_path_factory):
    path = tmp_path_factory.mktemp("rewards") / "hazards.py"
    path.write_text(HAZARDS)
    return str(path)


@pytest.fixture
def pool_of(hazards):
    """Creates pools of functions in hazards.py (":name") or built-in ones; closes them."""
    pools = []

    def make(*functions, **cfg):
        names = tuple(hazards + f if f.startswith(":") else f for f in functions)
        pools.append(RewardPool(RewardConfig(functions=names, **cfg)))
        return pools[-1]

    yield make
    for pool in pools:
        pool.close()


def test_rewards_are_returned_in_order(pool_of):
    pool = pool_of("last_number", workers=3)
    scored = pool.score([rollout(f"it is {i % 7}.", answer=str(i % 5)) for i in range(300)])
    assert [r.value for r in scored] == [float(i % 7 == i % 5) for i in range(300)]
    assert all(r.parts == {"last_number": r.value} and not r.error for r in scored)
    assert pool.score([]) == []


def test_the_reward_is_the_weighted_sum_with_parts_by_name(pool_of):
    pool = pool_of("last_number", ":length?scale=2", weights=(1.0, 0.5))
    [scored] = pool.score([rollout("is 1")])
    assert scored.value == 1.0 * 1 + 0.5 * 2 * 4
    assert scored.parts == {"last_number": 1.0, "length": 8.0}


def test_a_reward_has_the_seconds_of_its_slowest_call(pool_of):
    [scored] = pool_of(":late", "last_number").score([rollout("is 1")])
    assert 0.2 <= scored.seconds < 30


def test_a_dict_gives_the_score_and_further_numbers(pool_of):
    [scored] = pool_of(":parts").score([rollout("")])
    assert scored.value == 2.0
    assert scored.parts == {"parts": 2.0, "parts/acc": 1.0}
    assert scored.feedback == "not ? but 7"


def test_a_function_gets_verls_arguments_in_a_process_without_jax(pool_of):
    pool = pool_of(":what_it_sees", workers=1)
    [scored] = pool.score([rollout("", answer="abc", finish="length", index=7)])
    parts = scored.parts
    assert parts["what_it_sees"] == len("s" + "abc")
    seen = {key.partition("/")[2]: value for key, value in parts.items()}
    assert (seen["truncated"], seen["response_len"], seen["index"]) == (1, 4, 7)
    assert (seen["jax"], seen["sigint_ignored"]) == (0, 1)
    assert seen["pid"] != os.getpid()


@pytest.mark.parametrize(
    "text, error",
    [
        ("raise", "obey: RuntimeError: out of cheese"),
        ("sys.exit", "obey: SystemExit: bye"),
        ("exit", "obey: the worker process died with status 3"),
        ("segfault", "obey: the worker process died with status -11"),
        ("sleep", "obey: no answer within 0.5 s (reward.timeout_s or the option timeout_s)"),
        ("hang in C", "obey: no answer within 0.5 s (reward.timeout_s or the option timeout_s)"),
        ("nan", "obey: ValueError: the function returned nan"),
        ("none", "obey: TypeError: the function returned None; return a number"),
        ("text", "obey: TypeError: the function returned '0.5'; return a number"),
        ("no score", "obey: TypeError: the function returned a dict with the keys ['acc']; add"),
    ],
)
def test_a_failing_call_is_an_error_value_and_the_others_are_scored(pool_of, text, error):
    pool = pool_of(":obey", timeout_s=0.5, error_value=-1.0)
    texts = ["fine"] * 20
    texts[3] = texts[17] = text
    scored = pool.score([rollout(t) for t in texts])
    for r, text in zip(scored, texts, strict=True):
        assert (r.value, bool(r.error)) == ((1.0, False) if text == "fine" else (-1.0, True))
    assert scored[3].error.startswith(error) and scored[17].error.startswith(error)
    assert pool.score([rollout("fine")])[0].value == 1.0  # the pool still works


def test_a_function_with_verls_batch_signature_gets_batches(pool_of):
    pool = pool_of(":batched?batch_size=3&bonus=1", "last_number", workers=1)
    scored = pool.score([rollout(text) for text in ("a", "bb", "nan", "is 1", "e")])
    sizes = [r.parts.get("batched/n") for r in scored]
    assert sizes == [3, 3, None, 2, 2]
    assert [r.value for r in scored] == [2, 3, 0, 5 + 1, 2]
    assert (
        scored[2].error == "batched: ValueError: the function returned nan; return a finite number"
    )


def test_search_r1s_ground_truth_is_a_structure(pool_of):
    pool = pool_of(":search_r1")
    truth = {"target": ["Paris", "paris"]}
    scored = pool.score([rollout("Paris", answer=truth), rollout("Rome", answer=truth)])
    assert [r.value for r in scored] == [1.0, 0.0]


def test_a_function_with_trls_signature_gets_the_columns(pool_of):
    pool = pool_of(":trl?bonus=0.5", workers=1)
    first = rollout("a", answer=7, is_text=True, level=3, other="x")
    texts = pool.score([first, rollout("none", is_text=True, level=1)])
    assert [r.value for r in texts] == [3.5, 0.0]
    seen = {key.partition("/")[2]: value for key, value in texts[0].parts.items()}
    # the columns ground_truth, answer, solution, label, data_source and other
    assert seen == {"": 3.5, "n_ids": 4, "answer": 7, "is_text": 1, "is_chat": 0} | {
        "weight": 2.0,
        "columns": 6,
    }
    assert (texts[1].parts, texts[1].error) == ({}, "")  # None: no score, and no error
    [chat] = pool.score([rollout("a", answer=7, level=3, weight=5.0)])
    assert (chat.parts["trl/is_chat"], chat.parts["trl/is_text"]) == (1, 0)
    assert chat.parts["trl/weight"] == 5.0


def test_a_column_that_no_row_has_is_rejected_at_the_start(pool_of):
    pool = pool_of(":trl")
    pool.check_columns([rollout("a", level=1).prompt, rollout("a").prompt])
    with pytest.raises(ValueError, match=r"trl requires level, .* \(answer, data_source, gr.*x\)"):
        pool.check_columns([rollout("a", x=1).prompt])


def test_an_async_function_has_many_awaits_in_flight_up_to_a_bound(pool_of):
    pool = pool_of(":judge?concurrency=8", workers=1, timeout_s=9.0)
    for _ in range(2):
        scored = pool.score([rollout("x" * i) for i in range(40)])
        assert [r.value for r in scored] == list(range(40))
    last = {key.partition("/")[2]: value for key, value in scored[-1].parts.items()}
    assert last == {"": 39.0, "most": 8, "loops": 1, "limit": 9.0}


@pytest.mark.parametrize(
    "text, error",
    [
        ("raise", "judge: SystemExit: bye"),
        ("sleep", "judge: no answer within 0.5 s (reward.timeout_s or the option timeout_s)"),
    ],
)
def test_a_failing_await_costs_only_its_response(pool_of, text, error):
    pool = pool_of(":judge", workers=1, timeout_s=0.5)
    scored = pool.score([rollout(t) for t in ("a", text, "bb", "ccc")])
    assert [r.error.partition("\n")[0] for r in scored] == ["", error, "", ""]
    assert [r.value for r in scored] == [1, 0, 2, 3]


def test_an_async_function_that_blocks_its_worker_is_stopped(pool_of):
    pool = pool_of(":judge?concurrency=1", workers=3, timeout_s=0.3)
    scored = pool.score([rollout(t) for t in ("spin", "a", "bb")])
    assert [r.value for r in scored] == [0, 1, 2]
    assert scored[0].error.startswith("judge: no answer within 0.3 s")


def test_an_async_batch_is_awaited(pool_of):
    scored = pool_of(":judge_batch", workers=1).score(
        [rollout(t, is_text=True) for t in ("a", "bb", "ccc")]
    )
    assert [(r.value, r.parts["judge_batch/most"]) for r in scored] == [(1, 3), (2, 3), (3, 3)]


def test_batches_are_distributed_over_the_workers(pool_of):
    scored = pool_of(":batched", workers=2).score([rollout("a")] * 10)
    assert [r.parts["batched/n"] for r in scored] == [5] * 10


@pytest.mark.parametrize(
    "text, error",
    [
        ("raise", "batched: RuntimeError: out of cheese"),
        (
            "short",
            "batched: ValueError: the function returned 1 scores for a batch of 2 responses; "
            "return one score per response",
        ),
        ("sleep", "batched: no answer within 0.3 s (reward.timeout_s or the option timeout_s)"),
    ],
)
def test_a_batch_fails_as_a_unit_and_the_others_are_scored(pool_of, text, error):
    pool = pool_of(":batched?batch_size=2&timeout_s=0.3", workers=2)
    scored = pool.score([rollout(t) for t in ("a", "a", text, "a", "a", "a")])
    assert [r.error.partition("\n")[0] for r in scored] == ["", "", error, error, "", ""]


def test_a_function_gets_its_time_limit_and_the_texts_that_it_declares(hazards):
    functions = (hazards + ":impatient?timeout_s=7", hazards + ":obey")
    cfg = RewardConfig(functions=functions, timeout_s=0.5)
    with RewardPool(cfg, decode=lambda tokens: "x" * len(tokens)) as pool:
        slow, fine = pool.score([rollout("sleep"), rollout("fine")])
    assert fine.parts == {
        "impatient": 7.0,
        "impatient/prompt": 3.0,
        "impatient/query": 3.0 + 4.0,
        "obey": 1.0,
    }
    assert slow.error == "obey: no answer within 0.5 s (reward.timeout_s or the option timeout_s)"


def test_one_failing_function_gives_the_error_value_but_keeps_the_other_parts(pool_of):
    pool = pool_of(":obey", ":length", error_value=-0.5)
    [scored] = pool.score([rollout("raise")])
    assert scored.value == -0.5
    assert scored.parts == {"length": 5.0}
    headline, place, source = scored.error.splitlines()
    assert headline == "obey: RuntimeError: out of cheese"
    assert place.startswith('  File "') and place.endswith(", in obey")
    assert source == '    raise RuntimeError("out of cheese")'


def test_a_single_worker_recovers_after_every_hanging_call(pool_of):
    pool = pool_of(":obey", workers=1, timeout_s=0.3)
    scored = pool.score([rollout("sleep"), rollout("fine"), rollout("sleep"), rollout("fine")])
    assert [r.value for r in scored] == [0, 1, 0, 1]


@pytest.mark.thorough
def test_math_that_hangs_in_c_is_stopped(pool_of):
    pool = pool_of("math", workers=1, timeout_s=2.0)
    start = time.monotonic()
    hangs = rollout(r"\boxed{9^{9^{9}}}", answer="5")
    scored = pool.score([rollout(r"\boxed{\frac{1}{2}}", answer="0.5"), hangs])
    assert [r.value for r in scored] == [1.0, 0.0]
    assert (
        scored[1].error == "math: no answer within 2 s (reward.timeout_s or the option timeout_s)"
    )
    assert time.monotonic() - start < 30


def test_a_timeout_kills_the_processes_that_the_function_started(pool_of, tmp_path):
    pid_file = tmp_path / "pid"
    pool_of(":obey", timeout_s=1.0).score([rollout("spawn", answer=str(pid_file))])
    wait_until_gone([int(pid_file.read_text())])


def test_close_leaves_no_process(pool_of):
    pool = pool_of(":obey", workers=2, timeout_s=0.3)
    before = [w.process.process for w in pool._runner._workers]
    pool.score([rollout("sleep")])
    after = [w.process.process for w in pool._runner._workers]
    pool.close()
    for process in {*before, *after}:
        assert process.returncode is not None  # it was waited for, so it is no zombie
    wait_until_gone([p.pid for p in {*before, *after}])


@pytest.mark.thorough
def test_ctrl_c_in_the_parent_is_quiet_and_leaves_nothing(hazards):
    parent = start_parent(hazards, "time.sleep(0.5); print('scoring', flush=True)")
    pids = [int(pid) for pid in parent.stdout.readline().split()]
    assert parent.stdout.readline() == "scoring\n"
    time.sleep(0.5)
    os.killpg(parent.pid, signal.SIGINT)
    _, errors = parent.communicate(timeout=30)
    assert errors.count("Traceback") == 1 and "worker.py" not in errors
    assert errors.rstrip().endswith("KeyboardInterrupt")
    wait_until_gone(pids)


def test_workers_end_when_the_parent_is_killed(hazards):
    parent = start_parent(hazards, "os.kill(os.getpid(), signal.SIGKILL)")
    pids = [int(pid) for pid in parent.stdout.readline().split()]
    parent.communicate(timeout=30)
    wait_until_gone(pids)


def start_parent(hazards, action):
    """A program that creates a pool, prints the worker pids, runs `action` and scores."""
    program = f"""
        import os, signal, sys, time
        signal.signal(signal.SIGINT, signal.default_int_handler)  # background shells ignore it
        sys.path.insert(0, {os.getcwd()!r})
        from tests.rewards.test_pool import RewardConfig, RewardPool, rollout
        pool = RewardPool(RewardConfig(functions=({hazards + ":obey"!r},)))
        print(*(w.process.pid for w in pool._runner._workers), flush=True)
        {action}
        pool.score([rollout("sleep"), rollout("fine")])
    """
    return subprocess.Popen(
        [sys.executable, "-c", textwrap.dedent(program)],
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
        start_new_session=True,
    )


def wait_until_gone(pids):
    deadline = time.monotonic() + 10
    while time.monotonic() < deadline:
        if not any(os.path.exists(f"/proc/{pid}/exe") and is_alive(pid) for pid in pids):
            return
        time.sleep(0.05)
    raise AssertionError(f"still alive: {pids}")


def is_alive(pid):
    try:
        with open(f"/proc/{pid}/stat") as stat:
            return stat.read().rpartition(")")[2].split()[0] != "Z"  # zombies have ended
    except (FileNotFoundError, ProcessLookupError):  # ended before the open, or before the read
        return False


def test_wrong_names_and_weights_fail_at_startup(hazards, tmp_path):
    with pytest.raises(ValueError, match=r"unknown name 'maths'; set .* by_source, code, env"):
        RewardPool(RewardConfig(functions=("maths",)))
    with pytest.raises(
        ValueError, match=r"math\?timeout_s=soon': timeout_s='soon' is not a positive number"
    ):
        RewardPool(RewardConfig(functions=("math?timeout_s=soon",)))
    with pytest.raises(ValueError, match="2 reward functions and 1 weights"):
        RewardPool(RewardConfig(functions=("exact", "format"), weights=(1.0,)))
    with pytest.raises(ValueError, match=r"nowhere.* cannot be imported \(ModuleNotFoundError"):
        RewardPool(RewardConfig(functions=("nowhere.module:f",)))
    with pytest.raises(
        ValueError, match=r"has no function or class 'lenght'; set one that it has: length, obey"
    ):
        RewardPool(RewardConfig(functions=(hazards + ":lenght",)))
    with pytest.raises(ValueError, match=r"ds.py:rollouts': the function .* accepted are verl's"):
        RewardPool(RewardConfig(functions=(hazards + ":rollouts",)))
    broken = tmp_path / "broken.py"
    broken.write_text("import os\nos._exit(4)")
    with pytest.raises(ValueError, match="died at startup with status 4"):
        RewardPool(RewardConfig(functions=(f"{broken}:f",)))
