"""Tests of jaxrl/rewards/call_runner.py and jaxrl/rewards/calls.py: workers that fail."""

import contextlib
import os
import random
import signal
import threading
import time

import pytest

from jaxrl.config.keys import RewardConfig
from jaxrl.rewards.calls import CallSignature, RewardResult, read_results, read_signatures
from jaxrl.rewards.pool import RewardPool
from jaxrl.subprocesses.channel import ProtocolError
from tests.rewards.test_pool import is_alive, rollout, wait_until_gone

FUNCTIONS = """
import os, pickle, socket, struct, sys, threading, time

if os.path.exists({broken!r}):
    raise ImportError("the module has changed")


def length(data_source, solution_str, ground_truth, extra_info):
    time.sleep(extra_info.get("sleep", 0.0))
    return len(solution_str)


def exit_later(data_source, solution_str, ground_truth, extra_info):
    threading.Timer(0.5, os._exit, [3]).start()
    return len(solution_str)


def leave_child(data_source, solution_str, ground_truth, extra_info):
    if os.fork() == 0:  # it inherits the socket of the worker
        os.setsid()
        time.sleep(3)
        os._exit(0)
    threading.Timer(0.02, os._exit, [3]).start()
    return len(solution_str)


def write_to_socket(data_source, solution_str, ground_truth, extra_info):
    if solution_str in ("fine", "slow"):
        time.sleep(0.0 if solution_str == "fine" else 100.0)
        return 4.0
    frame = lambda data: struct.pack(">Q", len(data)) + data
    data = {{
        "garbage": b"hello",
        "pickle": frame(pickle.dumps(Evil())),
        "forged": frame(b'{{"end": 99, "results": [[1.0, {{}}, ""]]}}'),
        "not finite": frame(b'{{"end": 0, "results": [[NaN, {{}}, ""]]}}'),
    }}[solution_str]
    fd = int(sys.argv[1])
    os.write(fd, data)
    return 1.0


class Evil:
    def __reduce__(self):
        return os.mkdir, ({evil!r},)


def talk(data_source, solution_str, ground_truth, extra_info):
    print("\\x1b[31mscoring", solution_str)
    os.write(2, b"native code\\n")
    if solution_str == "exit":
        os._exit(1)
    return 1.0


def long_result(data_source, solution_str, ground_truth, extra_info):
    return {{"score": 1.0}} | {{f"{{i:0100}}": 1.0 for i in range(200_000 * len(solution_str))}}


def bad_error(data_source, solution_str, ground_truth, extra_info):
    class Error(Exception):
        def __str__(self):
            return 1 / 0
    raise Error
"""


class Functions:
    """A module of reward functions, and the pools that use it."""

    def __init__(self, folder):
        self.broken, self.evil, self.file = folder / "broken", folder / "evil", folder / "f.py"
        self.file.write_text(FUNCTIONS.format(broken=str(self.broken), evil=str(self.evil)))
        self.lines = []

    def pool(self, name, **cfg):
        cfg = RewardConfig(functions=(f"{self.file}:{name}",), **cfg)
        return RewardPool(cfg, write=self.lines.append)


@pytest.fixture
def functions(tmp_path):
    return Functions(tmp_path)


def workers(pool):
    return pool._runner._workers


def kill(worker):
    """Kills the worker and waits until it has ended: until then it could be sent a call."""
    os.kill(worker.process.pid, signal.SIGKILL)
    while not worker.process.ended:
        time.sleep(0.01)


def values(pool, texts, **extra):
    return [r.value for r in pool.score([rollout(text, **extra) for text in texts])]


def test_workers_that_died_idle_are_replaced(functions):
    with functions.pool("length", workers=2) as pool:
        for victims in (workers(pool)[:1], list(workers(pool)), list(workers(pool))):
            for worker in victims:
                if not worker.process.ended:
                    kill(worker)
            assert values(pool, ["a", "bb", "ccc"] * 5) == [1, 2, 3] * 5


def test_a_worker_that_dies_before_it_begins_a_call_loses_nothing(functions):
    with functions.pool("length", workers=1) as pool:
        (worker,) = workers(pool)
        os.kill(worker.process.pid, signal.SIGSTOP)  # it gets the calls but does not begin
        timer = threading.Timer(0.3, kill, [worker])
        timer.start()
        scored = pool.score([rollout(text) for text in ("a", "bb")])
        assert [(r.value, r.error) for r in scored] == [(1, ""), (2, "")]


def test_a_worker_that_stops_before_it_begins_a_call_is_replaced_after_the_time_limit(functions):
    with functions.pool("length", workers=1, timeout_s=0.5) as pool:
        os.kill(workers(pool)[0].process.pid, signal.SIGSTOP)
        assert values(pool, ["a", "bb"]) == [1, 2]


def test_a_worker_that_dies_while_it_starts_is_replaced(functions):
    with functions.pool("length", workers=1) as pool:
        kill(workers(pool)[0])
        runner = pool._runner
        runner._replace_failed(check_ended=True)
        runner._start_missing()
        kill(workers(pool)[0])
        assert values(pool, ["a", "bb"]) == [1, 2]


def test_only_the_call_that_was_running_is_an_error(functions):
    with functions.pool("length", workers=1, error_value=-1.0) as pool:
        threading.Timer(1.0, lambda: kill(workers(pool)[0])).start()
        calls = [rollout("a"), rollout("bb", sleep=2.0), rollout("ccc"), rollout("dddd")]
        scored = pool.score(calls)
    assert [r.value for r in scored] == [1, -1, 3, 4]
    assert scored[1].error == "length: the worker process died with status -9"


def test_a_function_that_ends_its_process_after_answering(functions):
    with functions.pool("exit_later", workers=1) as pool:
        for text in ("a", "bb"):
            assert values(pool, [text]) == [len(text)]
            while not workers(pool)[0].process.ended:
                time.sleep(0.05)


def test_a_process_that_left_a_child_with_its_socket_is_noticed(functions):
    with functions.pool("leave_child", workers=1) as pool:
        assert values(pool, ["a"]) == [1]
        time.sleep(0.1)
        assert values(pool, ["bb"]) == [2]


def test_workers_that_cannot_be_started_are_an_error_with_advice(functions):
    with functions.pool("length", workers=2) as pool:
        functions.broken.touch()
        pids = [worker.process.pid for worker in workers(pool)]
        for worker in workers(pool):
            kill(worker)
        with pytest.raises(ChildProcessError, match=r"3 times in a row .*has changed.* resume"):
            pool.score([rollout("a")])
        wait_until_gone(pids)


def test_calls_are_served_by_the_workers_that_are_left(functions):
    with functions.pool("length", workers=2) as pool:
        functions.broken.touch()
        kill(workers(pool)[0])
        for _ in range(2):
            assert values(pool, ["a", "bb"] * 20) == [1, 2] * 20


def test_a_system_that_starts_no_process_is_an_error_once_no_worker_is_left(functions, monkeypatch):
    def fail(*args, **kwargs):
        raise BlockingIOError("no process for you")

    with functions.pool("length", workers=2) as pool:
        monkeypatch.setattr("jaxrl.subprocesses.process.subprocess.Popen", fail)
        kill(workers(pool)[0])
        assert values(pool, ["a", "bb"] * 20) == [1, 2] * 20
        pool._runner._no_start_before = 0.0
        kill(workers(pool)[0])
        with pytest.raises(ChildProcessError, match="no process for you"):
            pool.score([rollout("a")])
    with pytest.raises(ChildProcessError, match="no process for you"):
        functions.pool("length", workers=2)


@pytest.mark.parametrize(
    "n_kills",
    [pytest.param(12, marks=pytest.mark.thorough), pytest.param(200, marks=pytest.mark.slow)],
)
def test_kills_at_random_moments_cost_only_the_running_calls(functions, n_kills):
    generator = random.Random(0)
    n_killed, n_errors = 0, 0
    with functions.pool("length", workers=3, error_value=-1.0) as pool:
        stop = threading.Event()

        def kill_workers():
            nonlocal n_killed
            while n_killed < n_kills and not stop.wait(generator.uniform(0.0, 0.3)):
                ready = [worker for worker in tuple(workers(pool)) if worker.ready]
                if ready and is_alive(pid := generator.choice(ready).process.pid):
                    with contextlib.suppress(ProcessLookupError):  # replaced in the meantime
                        os.kill(pid, signal.SIGKILL)
                        n_killed += 1

        thread = threading.Thread(target=kill_workers)
        thread.start()
        try:
            while thread.is_alive():
                time.sleep(generator.choice([0.0, 0.2]))  # idle
                texts = ["x" * generator.randrange(1, 9) for _ in range(40)]
                scored = pool.score([rollout(text, sleep=0.001) for text in texts])
                failed = [r for r in scored if r.error]
                n_errors += len(failed)
                assert all("died with status -9" in r.error and r.value == -1 for r in failed)
                for text, r in zip(texts, scored, strict=True):
                    assert r.error or r.value == len(text)
        finally:
            stop.set()
            thread.join()
        assert n_killed == n_kills and n_errors <= n_kills
        assert values(pool, ["a", "bb"]) == [1, 2]
    print(f"{n_kills} kills, {n_errors} running calls failed")


@pytest.mark.parametrize(
    "text, error",
    [
        ("garbage", "user code wrote to the worker's socket: b'hello"),
        ("pickle", "user code wrote to the worker's socket: "),
        ("forged", "user code wrote to the worker's socket: unexpected {'end': 99"),
        ("not finite", "NaN is no number of JSON"),
    ],
)
def test_a_function_that_writes_to_its_socket_fails_only_its_call(functions, text, error):
    with functions.pool("write_to_socket", workers=1, timeout_s=20.0) as pool:
        scored = pool.score([rollout(one) for one in (text, "fine", "fine")])
    assert [r.value for r in scored] == [0, 4, 4]
    assert error in scored[0].error
    assert not functions.evil.exists()


def test_output_is_shown_with_the_name_of_the_worker(functions):
    with functions.pool("talk", workers=1) as pool:
        pool.score([rollout("a"), rollout("exit"), rollout("c")])
    deadline = time.monotonic() + 10
    while len(functions.lines) < 6 and time.monotonic() < deadline:
        time.sleep(0.01)
    assert functions.lines[:4] == [
        "reward worker 1: scoring a",
        "reward worker 1: native code",
        "reward worker 1: scoring exit",
        "reward worker 1: native code",
    ]
    assert sorted(functions.lines[4:]) == [
        "reward worker 2: native code",
        "reward worker 2: scoring c",
    ]


def test_a_result_that_is_too_long_is_an_error(functions):
    with functions.pool("long_result", workers=1, timeout_s=60.0) as pool:
        fine, long = pool.score([rollout(""), rollout("x")])
    assert fine.value == 1 and "16777216 are allowed; return less" in long.error


def test_an_exception_without_a_message_is_an_error_of_its_call(functions):
    with functions.pool("bad_error", workers=1) as pool:
        (scored,) = pool.score([rollout("a")])
    headline, *frames = scored.error.splitlines()
    assert headline == "bad_error: Error: its message cannot be shown"
    assert frames[-1].strip() == "raise Error"


def test_a_replacement_is_started_before_the_time_limit_has_passed(functions, monkeypatch):
    with functions.pool("length", workers=1, timeout_s=3.0, error_value=-1.0) as pool:
        runner, n_workers = pool._runner, []
        late = runner._late

        def counted_late(worker):
            n_workers.append(len(workers(pool)))
            return late(worker)

        monkeypatch.setattr(runner, "_late", counted_late)
        scored = pool.score([rollout("a", sleep=100.0), rollout("bb")])
        assert n_workers == [1 + 1], "the replacement had been started at the limit"
        assert [r.value for r in scored] == [-1, 2]
        assert len(workers(pool)) == 1 + 1, "one spare is kept after a timeout"


def test_spares_do_not_raise_the_number_of_calls_at_a_time(functions):
    with functions.pool("length", workers=1) as pool:
        pool._runner._had_timeout = True
        busy = []
        thread = threading.Thread(target=lambda: values(pool, ["a"] * 4, sleep=0.1))
        thread.start()
        while thread.is_alive():
            busy.append(sum(bool(worker.calls) for worker in tuple(workers(pool))))
            time.sleep(0.01)
        assert max(busy) == 1 and len(workers(pool)) == 2


def test_messages_are_validated():
    given = [["trl", True, ["timeout_s"], ["x"], False]]
    assert read_signatures(given, 1) == [CallSignature("trl", True, ("timeout_s",), ("x",), False)]
    assert read_results([[None, {}, "", {}, ""]], 1) == [RewardResult(None, {}, "", {})]
    result = RewardResult(1.0, {"a": 2.0}, "", {"b": 3.0}, "wrong")
    assert read_results([[*result]], 1) == [result]
    for wrong in ([], [["x", *given[0][1:]]], [[*given[0][:2], [1], [], True]], [[]], "ab", [None]):
        with pytest.raises(ProtocolError):
            read_signatures(wrong, 1)
    for wrong in (
        [],
        [[1, {}, "", {}, ""]],
        [["1", {}, "", {}, ""]],
        [[float("inf"), {}, "", {}, ""]],
        [[1.0, {"a": "b"}, "", {}, ""]],
        [[1.0, {"a": True}, "", {}, ""]],
        [[1.0, {"a": float("nan")}, "", {}, ""]],
        [[1.0, {"\ud83d": 1.0}, "", {}, ""]],
        [[1.0, {}, 5, {}, ""]],
        [[1.0, [], "", {}, ""]],
        [[1.0, {}, ""]],
        [[1.0, {}, "", 2, ""]],
        [[1.0, {}, "", {"a": "b"}, ""]],
        [[1.0, {}, "", {"a": float("inf")}, ""]],
        [[1.0, {}, "", {}]],
        [[1.0, {}, "", {}, 3]],
        [[1.0, {}, "", {}, "\ud83d"]],
        [{}],
    ):
        with pytest.raises(ProtocolError):
            read_results(wrong, 1)
