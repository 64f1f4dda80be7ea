"""Messages between the trainer and its worker processes, over a pair of sockets.

A message is its length (8 bytes, big-endian) and its content. User code runs in a worker and may
write anything to the socket, so the trainer reads JSON only, never blocks on a worker, and limits
the length. What the trainer sends is pickled: arguments of user code have any type.
"""

import json
import pickle
import select
import socket
import struct
from collections.abc import Iterable
from typing import Any

from jaxrl.json_text import MAX_DEPTH, parse_json

MAX_ANSWER_BYTES = 16 << 20  # of one message to the trainer
_HEADER = struct.Struct(">Q")
_READ_BYTES = 1 << 16
_SEND_BYTES = 1 << 18


class ProtocolError(ValueError):
    """A worker sent something that is not one of its messages."""


class Channel:
    """The trainer's end. It never blocks: `wait` says when to call `receive`."""

    def __init__(self, sock: socket.socket):
        sock.setblocking(False)
        self._socket = sock
        self._received = bytearray()
        self._unsent = bytearray()

    def fileno(self) -> int:
        return self._socket.fileno()

    def close(self) -> None:
        self._socket.close()

    def send(self, value: Any) -> None:
        """Queues a message and sends what the socket takes; `wait` sends the rest.

        Does not fail if the worker has ended: `receive` reports that.
        """
        self._unsent += _framed(pickle.dumps(value))
        self.flush()

    def flush(self) -> None:
        """Sends queued bytes as far as the socket takes them."""
        while self._unsent:
            try:
                n = self._socket.send(self._unsent[:_SEND_BYTES])
            except BlockingIOError:
                return
            except OSError:
                self._unsent.clear()
                return
            del self._unsent[:n]

    def send_socket(self, sock: socket.socket) -> None:
        """Sends a socket for `receive_socket`. Raises OSError if the worker does not read."""
        if self._unsent:
            raise BlockingIOError("the worker does not read its messages")
        socket.send_fds(self._socket, [b"\0"], [sock.fileno()])

    @property
    def sending(self) -> bool:
        """Whether queued bytes are still to be sent."""
        return bool(self._unsent)

    def receive(self) -> Any:
        """The next message, or None if none is complete.

        Raises EOFError after the last message of a worker that closed its socket, ProtocolError for
        bytes that are no message.
        """
        while (content := self._complete_message()) is None:
            try:
                data = self._socket.recv(_READ_BYTES)
            except BlockingIOError:
                return None
            except OSError as error:
                raise EOFError from error
            if not data:
                raise EOFError
            self._received += data
        try:
            # twice the depth: a message may hold values that were read with that limit
            return parse_json(content, max_depth=2 * MAX_DEPTH)
        except ValueError as error:
            raise ProtocolError(f"{content[:40]!r} is not JSON ({error})") from error

    def _complete_message(self) -> bytes | None:
        """Removes and returns the first message if all of it has arrived."""
        if len(self._received) < _HEADER.size:
            return None
        (length,) = _HEADER.unpack_from(self._received)
        if length > MAX_ANSWER_BYTES:
            raise ProtocolError(f"{bytes(self._received[:40])!r} is no message")
        end = _HEADER.size + length
        if len(self._received) < end:
            return None
        content = bytes(self._received[_HEADER.size : end])
        del self._received[:end]
        return content


def wait(channels: Iterable[Channel], timeout_s: float) -> list[Channel]:
    """The channels with something to receive, waiting for the first. Also sends what is queued."""
    poll, by_fd = select.poll(), {channel.fileno(): channel for channel in channels}
    for fd, channel in by_fd.items():
        poll.register(fd, select.POLLIN | (select.POLLOUT if channel.sending else 0))
    ready = []
    for fd, events in poll.poll(max(0.0, timeout_s) * 1000):
        by_fd[fd].flush()
        if events & ~select.POLLOUT:
            ready.append(by_fd[fd])
    return ready


class WorkerChannel:
    """The worker's end. It blocks."""

    def __init__(self, sock: socket.socket):
        sock.setblocking(True)
        self._socket = sock

    def close(self) -> None:
        self._socket.close()

    def receive(self) -> Any:
        """The next message of the trainer. Raises EOFError once it has closed its end."""
        (length,) = _HEADER.unpack(self._read(_HEADER.size))
        return pickle.loads(self._read(length))

    def receive_socket(self) -> socket.socket:
        """The socket that `send_socket` sent."""
        data, (fd, *_), _, _ = socket.recv_fds(self._socket, 1, 1)
        if not data:
            raise EOFError
        return socket.socket(fileno=fd)

    def send(self, value: Any) -> None:
        """Sends a value that JSON can express. Raises ValueError if it is too long."""
        content = json.dumps(value, ensure_ascii=False).encode(errors="replace")
        if len(content) > MAX_ANSWER_BYTES:
            raise ValueError(
                f"the result has {len(content)} bytes, {MAX_ANSWER_BYTES} are allowed; return less"
            )
        self._socket.sendall(_framed(content))

    def _read(self, n: int) -> bytes:
        data = bytearray()
        while len(data) < n:
            part = self._socket.recv(min(n - len(data), _READ_BYTES))
            if not part:
                raise EOFError
            data += part
        return bytes(data)


def is_text(value: object) -> bool:
    """Whether a value is a string that UTF-8 can express: no half of a surrogate pair."""
    try:
        return isinstance(value, str) and value.encode() is not None
    except UnicodeEncodeError:
        return False


def _framed(content: bytes) -> bytes:
    return _HEADER.pack(len(content)) + content
