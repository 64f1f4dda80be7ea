import asyncio
import json
import sqlite3
from pathlib import Path

import numpy as np
import pytest

from jaxrl.api.lanes import AdamParams, OptimizerCall, TrainingCall
from jaxrl.api.losses import read_loss
from jaxrl.api.queue import Results, TrainingQueue
from jaxrl.api.sampling import AdapterSlots
from jaxrl.api.store import DONE, FAILED, PENDING, GroupCommit, Store
from jaxrl.data.packing import Packed, empty_batch
from jaxrl.http.errors import RequestError

STEP = "step"


@pytest.fixture
def store(tmp_path):
    store = Store(tmp_path)
    yield store
    store.close()


def run(store, *works, max_queued: int = 9) -> list[str]:
    """The order in which queued works ran: (client, model, name, error, n of lanes or STEP).

    A dispatch has at most 4 lanes, and is in the order as the names of its calls.
    """
    order, names = [], {}

    async def main():
        results = Results(store, GroupCommit(store))

        async def run_lanes(calls):
            order.append(" ".join(names[call] for call in calls))
            for call in calls:
                if isinstance(call, OptimizerCall):
                    call.metrics = {}
                    continue
                call.logps.append(np.zeros((1, 8), np.float32))
                call.losses.append(0.0)

        queue = TrainingQueue(results, run_lanes, lambda call: 4, max_queued)

        def work(model, name, given):
            async def run() -> bytes:
                order.append(name)
                if given is not None:
                    raise given
                return b"{}"

            if given == STEP:
                call = OptimizerCall(model, AdamParams())
            elif isinstance(given, int):
                micro = Packed(empty_batch(1, 8), ())
                call = TrainingCall(model, read_loss("cross_entropy", {}), False, [micro] * given)
            else:
                return run
            names[call] = name
            return call

        for client, model, name, given in works:
            queue.check_room(client)
            queue.accept(client)
            store.begin(name, client, "optim_step")
            queue.add(client, model, name, work(model, name, given))
        running = asyncio.create_task(queue.run())
        for _, _, name, _ in works:
            await results.wait(name, 10)
        running.cancel()

    asyncio.run(main())
    return order


def test_clients_take_turns_and_each_model_is_served_in_order(store):
    works = [("a", "m", "a1", None), ("a", "m", "a2", None), ("a", "m", "a3", None)]
    assert run(store, *works, ("b", "n", "b1", None)) == ["a1", "b1", "a2", "a3"]
    assert store.result("a3", "a").state == DONE


def test_calls_share_dispatches_in_turns_between_clients(store):
    works = [
        ("a", "m", "a1", 6),
        ("a", "m", "a2", 1),  # after a1, which is the same model's
        ("a", "n", "a3", 1),
        ("b", "o", "b1", 2),
        ("c", "p", "c1", None),
    ]
    # First one lane of each client's first model, then a's other model, then further ones of each.
    assert run(store, *works) == ["a1 b1 a3 a1", "c1", "b1 a1 a1 a1", "a1", "a2"]
    assert {store.result(f"a{i}", "a").state for i in (1, 2, 3)} == {DONE}


def test_steps_share_a_dispatch_before_further_gradients(store):
    works = [
        ("a", "m", "a1", 1),
        ("a", "m", "a2", STEP),
        ("b", "n", "b1", 1),
        ("b", "n", "b2", STEP),
        ("c", "o", "c1", 2),
        ("c", "o", "c2", 3),
    ]
    assert run(store, *works) == ["a1 b1 c1 c1", "a2 b2", "c2 c2 c2"]


def test_an_error_is_the_result_and_the_next_request_runs(store):
    works = [
        ("a", "m", "user", ValueError("no gradient")),
        ("a", "m", "device", RuntimeError("secret of the device")),
        ("a", "m", "next", None),
    ]
    assert len(run(store, *works)) == 3
    user, device = (json.loads(store.result(name, "a").body) for name in ("user", "device"))
    assert user == {"error": "no gradient", "category": "user"}
    assert device == {"error": "the server failed (RuntimeError)", "category": "server"}
    assert store.result("user", "a").state == FAILED
    assert store.result("next", "a").state == DONE


def test_a_client_with_too_many_requests_waits(store):
    with pytest.raises(RequestError, match="2 training requests are queued") as failed:
        run(store, *(("a", f"m{i}", str(i), None) for i in range(3)), max_queued=2)
    assert failed.value.status == 429


def test_requests_are_counted_before_they_are_in_the_queue(store):
    results = Results(store, GroupCommit(store))
    queue = TrainingQueue(results, lambda calls: pytest.fail("runs"), lambda call: 4, 2)
    queue.accept("a")
    queue.accept("a")  # both are in one commit, which has not ended
    queue.check_room("b")
    with pytest.raises(RequestError, match="2 training requests are queued"):
        queue.check_room("a")
    queue.drop("a")  # the commit failed
    queue.check_room("a")


def fail_to_end(store, monkeypatch):
    store._db.execute("PRAGMA max_page_count = 30")  # a full disk: SQLite drops the transaction


def fail_to_commit(store, monkeypatch):
    commit, fails = store.commit, iter([True])

    def once() -> None:
        if next(fails, False):
            store._db.rollback()
            raise sqlite3.OperationalError("disk I/O error")
        commit()

    monkeypatch.setattr(store, "commit", once)


@pytest.mark.parametrize("fail", [fail_to_end, fail_to_commit])
def test_a_result_that_cannot_be_stored_is_an_error_and_the_next_request_runs(
    store, monkeypatch, fail
):
    async def large() -> bytes:
        fail(store, monkeypatch)
        return bytes(2**20)

    async def small() -> bytes:
        return b"{}"

    async def main():
        results = Results(store, GroupCommit(store))
        queue = TrainingQueue(results, lambda calls: pytest.fail("runs"), lambda call: 4, 9)
        for name, work in (("large", large), ("small", small)):
            store.begin(name, "a", "save_weights")
            queue.accept("a")
            queue.add("a", "m", name, work)
        store.commit()
        running = asyncio.create_task(queue.run())
        await results.wait("small", 10)
        assert not running.done()
        running.cancel()
        failed = results.result("large", "a")
        assert failed.state == FAILED
        assert json.loads(failed.body) == {
            "error": "the server could not store the result (OperationalError)",
            "category": "server",
        }
        assert results.result("small", "a").state == DONE
        with pytest.raises(RequestError):  # another client's
            results.result("large", "b")

    asyncio.run(main())


def test_a_place_that_is_in_use_is_not_overwritten():
    loaded = []

    async def load(slot: int, folder: Path, drop_cache: bool) -> None:
        loaded.append((slot, folder.name, drop_cache))

    async def main():
        slots = AdapterSlots(2, load)
        a, b, c = Path("a"), Path("b"), Path("c")
        async with slots.place(None) as base, slots.place(a) as first, slots.place(b) as second:
            assert (base.slot, first.slot, second.slot) == (0, 1, 2)
            waiting = asyncio.create_task(use(slots, c))
            async with asyncio.timeout(1):
                while not slots._loading.locked():
                    await asyncio.sleep(0)
            assert not waiting.done()
        assert await waiting == 1  # of both places the one that was used less recently
        async with slots.place(a) as again, slots.place(c) as still:
            assert (again.slot, still.slot) == (2, 1)

    async def use(slots: AdapterSlots, folder: Path) -> int:
        async with slots.place(folder) as place:
            return place.slot

    asyncio.run(main())
    # The KV that a had cached is dropped with all others', so that b's place has none.
    assert loaded == [(1, "a", False), (2, "b", False), (1, "c", True), (2, "a", False)]


def test_a_place_whose_load_failed_is_free():
    fails = iter([True, False])

    async def load(slot: int, folder: Path, drop_cache: bool) -> None:
        if next(fails):
            raise ValueError("of another model")

    async def main():
        slots = AdapterSlots(1, load)
        with pytest.raises(ValueError, match="of another model"):
            async with slots.place(Path("a")):
                pass
        async with slots.place(Path("b")) as place:
            assert place.slot == 1

    asyncio.run(main())


def test_a_shutdown_ends_polls_and_leaves_work_pending(store):
    async def main():
        results = Results(store, GroupCommit(store))

        async def forever() -> bytes:
            await asyncio.Event().wait()
            return b""

        store.begin("r", "a", "sample")
        results.start("r", forever)
        poll = asyncio.create_task(results.wait("r", 60))
        await asyncio.sleep(0)
        results.end_polls()
        await asyncio.wait_for(poll, 5)
        await results.cancel()

    asyncio.run(main())
    assert store.result("r", "a").state == PENDING  # a restart makes the client send it again
