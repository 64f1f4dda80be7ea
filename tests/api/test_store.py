import asyncio
import os
import signal
import sqlite3
import subprocess
import sys

import pytest

from jaxrl.api.store import DONE, FAILED, FILE, PENDING, SAMPLE, GroupCommit, Store
from jaxrl.http.errors import RequestError

ALICE, BOB = "alice", "bob"


@pytest.fixture
def store(tmp_path):
    store = Store(tmp_path)
    store.add_session("s", ALICE, {})
    store.add_model("s:train:0", ALICE, "s", {"rank": 4})
    yield store
    store.close()


def reopened(store, folder) -> Store:
    store.close()
    return Store(folder)


def test_a_repeated_request_is_not_new(store):
    assert store.begin("r", ALICE, "optim_step", "s:train:0", 1)
    assert not store.begin("r", ALICE, "optim_step", "s:train:0", 1)
    store.end("r", DONE, b"{}")
    assert store.result("r", ALICE).body == b"{}"


def test_requests_of_a_model_come_in_order(store):
    store.begin("r2", ALICE, "optim_step", "s:train:0", 2)
    with pytest.raises(RequestError, match="not above"):
        store.begin("r1", ALICE, "optim_step", "s:train:0", 1)


def test_a_client_finds_nothing_of_another_one(store):
    store.begin("r", ALICE, SAMPLE)
    store.add_sampler("s:sample:0", ALICE, "s", "")
    values = dict(model="s:train:0", kind="training", folder="f", expires=None, n_bytes=1)
    store.add_checkpoint("tinker://p", ALICE, **values, details={})
    for find in (
        lambda: store.session("s", BOB),
        lambda: store.model("s:train:0", BOB),
        lambda: store.sampler("s:sample:0", BOB),
        lambda: store.checkpoint("tinker://p", BOB),
        lambda: store.remove_checkpoint("tinker://p", BOB),
        lambda: store.begin("r", BOB, SAMPLE),
        lambda: store.begin("x", BOB, "optim_step", "s:train:0", 9),
    ):
        with pytest.raises(RequestError, match="there is no") as failed:
            find()
        assert failed.value.status == 404
    with pytest.raises(RequestError) as failed:
        store.result("r", BOB)
    assert failed.value.status == 410
    lists = store.sessions, store.models, store.samplers, store.checkpoints
    assert [len(rows(BOB)) for rows in lists] == [0] * 4
    assert [len(rows(ALICE)) for rows in lists] == [1] * 4


def test_after_a_restart_results_are_there_and_pending_work_has_failed(store, tmp_path):
    store.begin("done", ALICE, "forward_backward", "s:train:0", 1)
    store.end("done", DONE, b"body")
    store.begin("lost", ALICE, "optim_step", "s:train:0", 2)
    store.begin("sample", ALICE, SAMPLE)
    store = reopened(store, tmp_path)
    assert (store.result("done", ALICE).state, store.result("done", ALICE).body) == (DONE, b"body")
    lost = store.result("lost", ALICE)
    assert lost.state == FAILED and b"restarted" in lost.body
    with pytest.raises(RequestError, match="send it again"):  # clients sample again by themselves
        store.result("sample", ALICE)
    assert store.model("s:train:0", ALICE)["lost"]
    store.close()


def test_an_expired_checkpoint_is_not_there(store):
    values = dict(model="s:train:0", kind="sampler", n_bytes=1, details={})
    store.add_checkpoint("tinker://old", ALICE, folder="old", expires=1.0, **values)
    store.add_checkpoint("tinker://new", ALICE, folder="new", expires=None, **values)
    assert [row["path"] for row in store.checkpoints(ALICE)] == ["tinker://new"]
    assert store.kept_folders() == {"new"}
    with pytest.raises(RequestError, match="there is no checkpoint"):
        store.checkpoint("tinker://old", ALICE)


def test_a_second_server_is_refused(store, tmp_path):
    with pytest.raises(ValueError, match="stop the other server"):
        Store(tmp_path)


def test_requests_at_the_same_time_are_committed_together(store, monkeypatch):
    commits, called, commit = [], [], store.commit
    monkeypatch.setattr(store, "commit", lambda: (commits.append(len(called)), commit()))
    group = GroupCommit(store)

    async def request(name):
        store.begin(name, ALICE, SAMPLE)
        group.after(lambda: called.append(name))
        await group.wait()
        assert name in called and not store.changed

    async def main():
        await asyncio.gather(*map(request, "abc"))
        await group.wait()  # nothing changed

    asyncio.run(main())
    assert (commits, called) == ([0], ["a", "b", "c"])


def test_a_request_that_is_not_in_the_file_is_not_run(store, monkeypatch):
    def full():
        store._db.execute("ROLLBACK")
        raise sqlite3.OperationalError("database or disk is full")

    group, called = GroupCommit(store), []

    async def main():
        store.begin("r", ALICE, SAMPLE)
        group.after(lambda: called.append("r"), lambda: called.append("failed"))
        with monkeypatch.context() as patch, pytest.raises(sqlite3.OperationalError):
            patch.setattr(store, "commit", full)
            await group.wait()
        assert store.begin("r", ALICE, SAMPLE)  # the client sends it again
        await group.wait()

    store.commit()
    asyncio.run(main())
    assert called == ["failed"]


def test_a_full_disk_fails_all_changes_that_it_undoes(store):
    store.commit()
    store._db.execute("PRAGMA max_page_count = 30")
    store.begin("before", ALICE, SAMPLE)
    with pytest.raises(sqlite3.OperationalError, match="full"):
        store.end("before", DONE, bytes(2**20))
    store.begin("after", ALICE, SAMPLE)
    with pytest.raises(sqlite3.OperationalError, match="full"):
        store.commit()
    assert not store.changed
    for name in ("before", "after"):
        assert store.begin(name, ALICE, SAMPLE)  # the clients send them again
    store.commit()


KILLED = """
import itertools, pathlib, sys
from jaxrl.api.store import DONE, Store
store = Store(pathlib.Path(sys.argv[1]))
store.add_session("s", "alice", {})
store.add_model("s:train:0", "alice", "s", {"rank": 4})
for i in itertools.count(1):
    store.begin(f"r{i}", "alice", "optim_step", "s:train:0", i)
    store.end(f"r{i}", DONE, str(i).encode())
    store.commit()
    print(i, flush=True)  # what a client has been answered
"""


def test_kill_9_loses_no_result_that_was_reported(tmp_path):
    process = subprocess.Popen(
        [sys.executable, "-c", KILLED, str(tmp_path)], stdout=subprocess.PIPE, text=True
    )
    assert process.stdout is not None
    reported = [process.stdout.readline() for _ in range(20)]
    os.kill(process.pid, signal.SIGKILL)
    reported += process.stdout.readlines()
    process.wait()
    last = max(int(line) for line in reported if line.endswith("\n"))
    store = Store(tmp_path)
    for i in range(1, last + 1):
        result = store.result(f"r{i}", "alice")
        assert (result.state, result.body) == (DONE, str(i).encode())
    store.close()
    [(count,)] = sqlite3.connect(tmp_path / FILE).execute(
        "SELECT count(*) FROM futures WHERE state = ?", (PENDING,)
    )
    assert count == 0
