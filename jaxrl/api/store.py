"""The records in the run folder: sessions, models, samplers, checkpoints and results.

One SQLite file, which a transaction changes completely or not at all, also if the process is
killed. Everything that a client has been answered is in it: the changes of all requests that are
handled at the same time are committed together, before their answers (`GroupCommit`). Every row has
an owner, and a client only finds its own rows.
"""

import asyncio
import dataclasses
import json
import sqlite3
import threading
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

from jaxrl.http.errors import RequestError
from jaxrl.json_text import parse_json

FILE = "api.sqlite"
KEPT_S = 3600.0  # for which the result of a request stays after a client has read it
UNREAD_S = 7 * 86400.0  # for which it stays if no client reads it
CLEANED_S = 60.0  # between two deletions of old results, which read the whole table
TABLES = """
CREATE TABLE IF NOT EXISTS sessions (id TEXT PRIMARY KEY, owner TEXT, created REAL, seen REAL,
    details TEXT);
CREATE TABLE IF NOT EXISTS models (id TEXT PRIMARY KEY, owner TEXT, session TEXT, created REAL,
    seen REAL, seq_id INTEGER, lost INTEGER, details TEXT);
CREATE TABLE IF NOT EXISTS samplers (id TEXT PRIMARY KEY, owner TEXT, session TEXT, path TEXT);
CREATE TABLE IF NOT EXISTS checkpoints (path TEXT PRIMARY KEY, owner TEXT, model TEXT, kind TEXT,
    folder TEXT, created REAL, expires REAL, n_bytes INTEGER, details TEXT);
CREATE TABLE IF NOT EXISTS futures (id TEXT PRIMARY KEY, owner TEXT, kind TEXT, state TEXT,
    body BLOB, created REAL, read REAL);
"""
PENDING, DONE, FAILED = "pending", "done", "failed"
SAMPLE = "sample"  # the kind of a request
RESTARTED = "the server was restarted before the request had run"


@dataclasses.dataclass(frozen=True)
class RequestResult:
    """The outcome of a request so far: the body of a response, or the message of an error."""

    state: str  # PENDING, DONE or FAILED
    body: bytes = b""
    kind: str = ""  # of the request


class Store:
    """The tables; methods may be called by any thread. Changes are kept from `commit` on."""

    def __init__(self, folder: Path):
        """Raises ValueError if another server has the folder open."""
        folder.mkdir(parents=True, exist_ok=True)
        self.folder = folder
        self._lock = threading.Lock()
        self._read: dict[str, float] = {}  # results that clients have read since the last commit
        self._cleaned = 0.0
        self._closed = False
        self._rolled_back: sqlite3.Error | None = None  # why SQLite ended the open transaction
        self._db = sqlite3.connect(
            folder / FILE, check_same_thread=False, isolation_level=None, timeout=0.1
        )
        self._db.row_factory = sqlite3.Row
        try:
            self._db.execute("PRAGMA locking_mode=EXCLUSIVE")
            self._db.execute("PRAGMA journal_mode=WAL")
            # A commit is then with the operating system, which keeps it if the process is killed.
            # Only a crash of the machine can lose the last ones, as it can files of checkpoints.
            self._db.execute("PRAGMA synchronous=NORMAL")
            self._db.executescript(TABLES)
            # The work of the process before this one is lost, except what it has written.
            self._change("UPDATE models SET lost = 1")
            # Clients send samples again by themselves, if there is no result.
            self._change("DELETE FROM futures WHERE state = ? AND kind = ?", PENDING, SAMPLE)
            values = FAILED, failure(RESTARTED, by_client=False), PENDING
            self._change("UPDATE futures SET state = ?, body = ? WHERE state = ?", *values)
            self.commit()
        except sqlite3.OperationalError as error:
            raise ValueError(
                f"{folder / FILE} cannot be opened ({error}); stop the other server with this "
                "--run-dir, or set another one"
            ) from error

    def close(self) -> None:
        if not self._closed:
            self.commit()
            self._closed = True
            self._db.close()

    @property
    def changed(self) -> bool:
        """Whether there are changes that have not been committed."""
        return self._db.in_transaction or self._rolled_back is not None

    def commit(self) -> None:
        """Writes all changes to the file, or none of them if it fails."""
        read, self._read = self._read, {}
        sql = "UPDATE futures SET read = ? WHERE id = ? AND read IS NULL"
        try:
            for request, seconds in read.items():
                self._change(sql, seconds, request)
            self._remove_old()
            with self._lock:
                if self._rolled_back is not None:
                    raise self._rolled_back
                if self._db.in_transaction:
                    self._db.execute("COMMIT")
        except BaseException:
            with self._lock:
                self._db.rollback()
                self._rolled_back = None
            raise

    def _remove_old(self) -> None:
        """Deletes results that are not kept any more, once in CLEANED_S."""
        if (now := time.time()) - self._cleaned < CLEANED_S:
            return
        self._cleaned = now
        sql = "DELETE FROM futures WHERE (read < ? OR created < ?) AND state != ?"
        self._change(sql, now - KEPT_S, now - UNREAD_S, PENDING)

    def _change(self, sql: str, *values: Any) -> None:
        """Part of the transaction that the next `commit` ends."""
        with self._lock:
            if not self._db.in_transaction:
                self._db.execute("BEGIN IMMEDIATE")
            try:
                self._db.execute(sql, values)
            except sqlite3.Error as error:
                if not self._db.in_transaction:  # the changes before it are lost, too
                    self._rolled_back = error
                raise

    def _run(self, sql: str, *values: Any) -> list[sqlite3.Row]:
        with self._lock:
            return self._db.execute(sql, values).fetchall()

    # Sessions

    def add_session(self, session: str, owner: str, details: dict[str, Any]) -> None:
        now = time.time()
        values = session, owner, now, now, json.dumps(details)
        self._change("INSERT INTO sessions VALUES (?, ?, ?, ?, ?)", *values)

    def see_session(self, session: str, owner: str) -> None:
        """Records a sign of life. Raises RequestError (404) for an unknown session."""
        self.session(session, owner)
        self._change("UPDATE sessions SET seen = ? WHERE id = ?", time.time(), session)

    def session(self, session: str, owner: str) -> dict[str, Any]:
        return self._one("sessions", session, owner, "session")

    def sessions(self, owner: str) -> list[dict[str, Any]]:
        return self._all("sessions", owner)

    # TrainedModels

    def add_model(self, model: str, owner: str, session: str, details: dict[str, Any]) -> None:
        """Records a model that can be trained; an older one of this id is replaced."""
        now = time.time()
        values = model, owner, session, now, now, 0, 0, json.dumps(details)
        self._change("INSERT OR REPLACE INTO models VALUES (?, ?, ?, ?, ?, ?, ?, ?)", *values)

    def silent_models(self, before: float) -> list[str]:
        """The models of sessions that gave no sign of life since `before`."""
        sql = (
            "SELECT models.id FROM models JOIN sessions ON sessions.id = models.session "
            "WHERE sessions.seen < ? AND models.seen < ?"
        )
        return [row["id"] for row in self._run(sql, before, before)]

    def lose_model(self, model: str) -> None:
        """Records that a model cannot be trained any more."""
        self._change("UPDATE models SET lost = 1 WHERE id = ?", model)

    def model(self, model: str, owner: str) -> dict[str, Any]:
        return self._one("models", model, owner, "model")

    def is_lost(self, model: str, owner: str) -> bool:
        return bool(self._one("models", model, owner, "model", "lost")["lost"])

    def has_model(self, model: str) -> bool:
        return bool(self._run("SELECT id FROM models WHERE id = ?", model))

    def models(self, owner: str) -> list[dict[str, Any]]:
        return self._all("models", owner)

    # Samplers

    def add_sampler(self, sampler: str, owner: str, session: str, path: str) -> None:
        """`path` is that of a checkpoint, or "" for the base model."""
        values = sampler, owner, session, path
        self._change("INSERT OR REPLACE INTO samplers VALUES (?, ?, ?, ?)", *values)

    def sampler(self, sampler: str, owner: str) -> dict[str, Any]:
        return self._one("samplers", sampler, owner, "sampling session")

    def samplers(self, owner: str) -> list[dict[str, Any]]:
        return self._all("samplers", owner)

    # Checkpoints

    def add_checkpoint(self, path: str, owner: str, **values: Any) -> None:
        """`values` are the other columns but `created`."""
        row = values | {"path": path, "owner": owner, "created": time.time()}
        row["details"] = json.dumps(row["details"])
        names = ", ".join(row)
        marks = ", ".join("?" * len(row))
        self._change(
            f"INSERT OR REPLACE INTO checkpoints ({names}) VALUES ({marks})", *row.values()
        )

    def checkpoint(self, path: str, owner: str) -> dict[str, Any]:
        found = self._one("checkpoints", path, owner, "checkpoint", key="path")
        if _is_expired(found):
            raise unknown("checkpoint", path)
        return found

    def checkpoints(self, owner: str) -> list[dict[str, Any]]:
        return [row for row in self._all("checkpoints", owner) if not _is_expired(row)]

    def kept_folders(self) -> set[str]:
        """The folders of all checkpoints that have not expired."""
        rows = [dict(row) for row in self._run("SELECT folder, expires FROM checkpoints")]
        return {row["folder"] for row in rows if not _is_expired(row)}

    def remove_checkpoint(self, path: str, owner: str) -> None:
        self.checkpoint(path, owner)
        self._change("DELETE FROM checkpoints WHERE path = ?", path)

    # Futures

    def begin(self, request: str, owner: str, kind: str, model: str = "", seq_id: int = 0) -> bool:
        """Whether the request is new. A repeated one, as after a lost answer, is not.

        A new one with a `model` must have a larger `seq_id` than those before it. Raises
        RequestError (409) for an older one, and (403) for the request of another client.
        """
        if rows := self._run("SELECT owner FROM futures WHERE id = ?", request):
            if rows[0]["owner"] != owner:
                raise unknown("request", request)
            return False
        now = time.time()
        if model and self._one("models", model, owner, "model", "seq_id")["seq_id"] >= seq_id:
            raise RequestError(
                422, f"seq_id {seq_id} of {model} is not above those before it", param="seq_id"
            )
        new = request, owner, kind, PENDING, b"", now
        self._change("INSERT INTO futures VALUES (?, ?, ?, ?, ?, ?, NULL)", *new)
        if model:
            sql = "UPDATE models SET seq_id = ?, seen = ? WHERE id = ?"
            self._change(sql, seq_id, now, model)
        return True

    def has_future(self, request: str) -> bool:
        return bool(self._run("SELECT id FROM futures WHERE id = ?", request))

    def end(self, request: str, state: str, body: bytes) -> None:
        """Records the outcome of a request."""
        self._change("UPDATE futures SET state = ?, body = ? WHERE id = ?", state, body, request)

    def result(self, request: str, owner: str) -> RequestResult:
        """Raises RequestError (410) for a request that is unknown, or whose result is gone."""
        rows = self._run("SELECT * FROM futures WHERE id = ? AND owner = ?", request, owner)
        if not rows:
            raise RequestError(410, f"there is no result of the request {request!r}; send it again")
        [row] = rows
        if row["state"] != PENDING and row["read"] is None:
            self._read.setdefault(request, time.time())
        return RequestResult(row["state"], bytes(row["body"]), row["kind"])

    def _one(
        self, table: str, row: str, owner: str, noun: str, columns: str = "*", key: str = "id"
    ) -> dict[str, Any]:
        sql = f"SELECT {columns} FROM {table} WHERE {key} = ? AND owner = ?"
        rows = self._run(sql, row, owner)
        if not rows:
            raise unknown(noun, row)
        return _values(rows[0])

    def _all(self, table: str, owner: str) -> list[dict[str, Any]]:
        rows = self._run(f"SELECT * FROM {table} WHERE owner = ? ORDER BY rowid", owner)
        return [_values(row) for row in rows]


class GroupCommit:
    """One transaction for the requests that an event loop handles at the same time."""

    def __init__(self, store: Store):
        self._store = store
        self._next: asyncio.Future[None] | None = None
        self._after: list[tuple[Callable[[], None], Callable[[], None] | None]] = []

    def after(self, call: Callable[[], None], failed: Callable[[], None] | None = None) -> None:
        """Calls the function once the changes so far are in the file, or `failed` if that fails."""
        self._after.append((call, failed))
        self._begin()

    async def wait(self) -> None:
        """Returns when the changes so far are in the file."""
        if self._next is not None or self._store.changed:
            await asyncio.shield(self._begin())

    def _begin(self) -> asyncio.Future[None]:
        if self._next is None:
            loop = asyncio.get_running_loop()
            self._next = loop.create_future()
            loop.call_soon(self._commit, self._next)
        return self._next

    def _commit(self, done: asyncio.Future[None]) -> None:
        self._next, after, self._after = None, self._after, []
        try:
            self._store.commit()
        except Exception as error:  # of the disk: the requests fail, and clients send them again
            for _, failed in after:
                if failed is not None:
                    failed()
            done.set_exception(error)
            return
        for call, _ in after:
            call()
        done.set_result(None)


def _is_expired(checkpoint: dict[str, Any]) -> bool:
    return checkpoint["expires"] is not None and checkpoint["expires"] < time.time()


def _values(row: sqlite3.Row) -> dict[str, Any]:
    found = dict(row)
    if "details" in found:
        found["details"] = parse_json(found["details"])
    return found


def failure(message: str, *, by_client: bool) -> bytes:
    """The result of a failed request; `by_client`: the client can change what failed."""
    return json.dumps({"error": message, "category": "user" if by_client else "server"}).encode()


def unknown(noun: str, name: str) -> RequestError:
    """The error for what does not exist, or is another client's."""
    return RequestError(404, f"there is no {noun} {name!r}", code="not_found")
