"""The wire format of protocol buffers, as far as the messages of the API use it.

https://protobuf.dev/programming-guides/encoding: a message is a sequence of fields, each a tag
(number and wire type) and a value. Numbers of unknown fields are the caller's business.
"""

import struct
from collections.abc import Iterator

VARINT, FIXED64, BYTES, FIXED32 = 0, 1, 2, 5
MAX_VARINT_BITS = 63
FieldValue = int | bytes


def read_fields(raw: bytes) -> Iterator[tuple[int, FieldValue]]:
    """(number, value) of each field: an int for a varint, else the bytes of the value.

    Raises ValueError for what is no message.
    """
    at = 0
    while at < len(raw):
        tag, at = _read_varint(raw, at)
        kind = tag & 7
        if kind == VARINT:
            value, at = _read_varint(raw, at)
            yield tag >> 3, value
            continue
        if kind == BYTES:
            size, at = _read_varint(raw, at)
        elif kind in (FIXED32, FIXED64):
            size = 4 if kind == FIXED32 else 8
        else:
            raise ValueError(f"the wire type {kind} is unknown")
        if at + size > len(raw):
            raise ValueError("a field is longer than its message")
        yield tag >> 3, raw[at : at + size]
        at += size


def _read_varint(raw: bytes, at: int) -> tuple[int, int]:
    """(value, place after it) of the number that starts at `at`."""
    value = shift = 0
    while True:
        if at >= len(raw) or shift > MAX_VARINT_BITS:
            raise ValueError("a number is not complete")
        byte = raw[at]
        at, value = at + 1, value | (byte & 0x7F) << shift
        if byte < 0x80:
            return value, at
        shift += 7


def read_packed(value: FieldValue) -> list[int]:
    """The numbers of a repeated field of varints, which may be packed."""
    if isinstance(value, int):
        return [value]
    found, at = [], 0
    while at < len(value):
        number, at = _read_varint(value, at)
        found.append(number)
    return found


def read_double(value: FieldValue) -> float:
    return struct.unpack("<d", as_bytes(value))[0]


def as_bytes(value: FieldValue) -> bytes:
    """The value of a field that has bytes. Raises ValueError if it is a number."""
    if isinstance(value, int):
        raise ValueError("a field has a number in place of bytes")
    return value


def as_int(value: FieldValue) -> int:
    """The value of a field that has a number. Raises ValueError if it has bytes."""
    if not isinstance(value, int):
        raise ValueError("a field has bytes in place of a number")
    return value


def varint(value: int) -> bytes:
    parts = bytearray()
    while value >= 0x80:
        parts.append(value & 0x7F | 0x80)
        value >>= 7
    parts.append(value)
    return bytes(parts)


def number_field(number: int, value: int) -> bytes:
    return varint(number << 3 | VARINT) + varint(value)


def bytes_field(number: int, value: bytes | str) -> bytes:
    value = value.encode() if isinstance(value, str) else value
    return varint(number << 3 | BYTES) + varint(len(value)) + value


def double_field(number: int, value: float) -> bytes:
    return varint(number << 3 | FIXED64) + struct.pack("<d", value)
