"""Tests of jaxrl/subprocesses/channel.py."""

import json
import os
import pickle
import random
import socket
import struct
import threading
import time

import pytest

from jaxrl.subprocesses.channel import (
    MAX_ANSWER_BYTES,
    Channel,
    ProtocolError,
    WorkerChannel,
    is_text,
    wait,
)


@pytest.fixture
def ends():
    """(trainer's end, worker's socket)."""
    ours, theirs = socket.socketpair()
    with ours, theirs:
        yield Channel(ours), theirs


def frame(content):
    return struct.pack(">Q", len(content)) + content


def test_messages_arrive_in_order_and_only_when_complete(ends):
    channel, worker = ends
    assert channel.receive() is None
    data = frame(b'{"a": 1}') + frame(b"[2]")
    worker.sendall(data[:11])
    assert channel.receive() is None
    worker.sendall(data[11:])
    assert [channel.receive(), channel.receive(), channel.receive()] == [{"a": 1}, [2], None]


def test_the_end_is_reported_after_the_last_message(ends):
    channel, worker = ends
    worker.sendall(frame(b"[1]") + b"\0\0")
    worker.close()
    assert channel.receive() == [1]
    with pytest.raises(EOFError):
        channel.receive()
    channel.send("the worker is gone")  # no error: receive() reports it


GARBAGE = {
    "text": b"hello from print(file=socket)",
    "a newline before an answer": b"\n" + frame(b"[1]"),
    "a zero byte before an answer": b"\0" + frame(b"[1]"),
    "a pickle": frame(pickle.dumps(print)),
    "not JSON": frame(b"{1: 2}"),
    "empty": frame(b""),
    "not UTF-8": frame(b'"\xff"'),
    "deeply nested": frame(b"[" * 100_000 + b"]" * 100_000),
    "a number of 10,000 digits": frame(b"1" * 10_000),
    "too long": struct.pack(">Q", MAX_ANSWER_BYTES + 1),
}


@pytest.mark.parametrize("garbage", GARBAGE)
def test_garbage_is_a_protocol_error(ends, garbage):
    channel, worker = ends
    threading.Thread(target=worker.sendall, args=(GARBAGE[garbage],), daemon=True).start()
    deadline = time.monotonic() + 10
    with pytest.raises(ProtocolError):
        while time.monotonic() < deadline:
            wait([channel], 1.0)
            assert channel.receive() is None


@pytest.mark.parametrize("n", [200, pytest.param(20_000, marks=pytest.mark.slow)])
def test_random_bytes_never_raise_anything_else_and_never_block(n):
    generator = random.Random(0)
    for _ in range(n):
        ours, theirs = socket.socketpair()
        with ours, theirs:
            theirs.sendall(generator.randbytes(generator.randrange(1, 64)))
            theirs.close()
            with pytest.raises((ProtocolError, EOFError)):
                while True:
                    Channel(ours).receive()


def test_sending_to_a_worker_that_does_not_read_never_blocks(ends):
    channel, worker = ends
    text = "x" * (8 << 20)
    start = time.monotonic()
    channel.send([text, (1, 2), b"any type"])
    assert time.monotonic() - start < 5 and channel.sending
    received = []
    thread = threading.Thread(target=lambda: received.append(WorkerChannel(worker).receive()))
    thread.start()
    while channel.sending:
        wait([channel], 5.0)
    thread.join(10)
    assert received == [[text, (1, 2), b"any type"]]


def test_a_worker_sends_json_up_to_the_limit(ends):
    channel, worker = ends
    end = WorkerChannel(worker)
    end.send({"text": "é \udcff"})  # half of a surrogate pair, as in names of files
    assert channel.receive() == {"text": "é ?"}
    with pytest.raises(ValueError, match=f"{MAX_ANSWER_BYTES} are allowed; return less"):
        end.send("x" * MAX_ANSWER_BYTES)
    with pytest.raises(TypeError):
        end.send({"any": object()})
    assert channel.receive() is None  # nothing of them was sent


def test_a_socket_reaches_the_worker(ends):
    channel, worker = ends
    a, b = socket.socketpair()
    with a, b:
        channel.send("start")
        channel.send_socket(b)
        end = WorkerChannel(worker)
        assert end.receive() == "start"
        with end.receive_socket() as received:
            received.sendall(b"hi")
        assert os.read(a.fileno(), 10) == b"hi"


def test_text_is_what_utf_8_can_express():
    assert is_text("é \N{ROCKET}") and is_text("")
    assert not is_text(json.loads('"\\ud83d"')) and not is_text(5) and not is_text(None)
