"""Python values as JSON, so that data can leave a process that is not trusted.

JSON has its values and lists; everything else is an object with one key, the type:

  {"tuple": [1, 2]}   {"set": [1]}   {"dict": [[1, "a"], ...]}   {"bytes": "00ff"}

Decoding makes objects of built-in types only, so nothing that a program overrides (`__eq__`,
`__class__`, a patched builtin) crosses. A subclass becomes its base: a Counter a dict, a named
tuple a tuple. Any other object is replaced by what `refer` returns for it.
"""

from collections.abc import Callable

PlainData = None | bool | int | float | str | list | dict
_MAX_BITS = 64  # longer integers are hexadecimal: Python limits the digits of decimal ones
_SEQUENCES = {"tuple": tuple, "set": set, "frozenset": frozenset}


def encode(value: object, refer: Callable[[object], PlainData]) -> PlainData:
    """The value as JSON data. Raises RecursionError for a value that contains itself."""
    if value is None or isinstance(value, bool | str):
        return value
    if isinstance(value, int):
        return int(value) if value.bit_length() <= _MAX_BITS else {"int": hex(value)}
    if isinstance(value, float):
        return float(value)
    if isinstance(value, list):
        return [encode(item, refer) for item in value]
    if isinstance(value, dict):
        return {"dict": [[encode(k, refer), encode(v, refer)] for k, v in value.items()]}
    if isinstance(value, tuple | set | frozenset):
        name = next(name for name, kind in _SEQUENCES.items() if isinstance(value, kind))
        return {name: [encode(item, refer) for item in value]}
    if isinstance(value, bytes | bytearray):
        return {"bytes": bytes(value).hex()}
    if isinstance(value, complex):
        return {"complex": [value.real, value.imag]}
    if isinstance(value, range):
        return {"range": [value.start, value.stop, value.step]}
    return refer(value)


def decode(data: object, resolve: Callable[[dict[str, object]], object]) -> object:
    """The value of JSON data; `resolve` gets the objects of `refer`.

    Raises ValueError, TypeError or RecursionError for data that `encode` does not make.
    """
    if isinstance(data, list):
        return [decode(item, resolve) for item in data]
    if not isinstance(data, dict):
        return data
    match data:
        case {"dict": [*items]}:
            return {decode(k, resolve): decode(v, resolve) for k, v in items}
        case {"tuple": [*items]} | {"set": [*items]} | {"frozenset": [*items]}:
            return _SEQUENCES[next(iter(data))](decode(item, resolve) for item in items)
        case {"bytes": str(digits)}:
            return bytes.fromhex(digits)
        case {"int": str(digits)}:
            return int(digits, 16)
        case {"complex": [float(real), float(imaginary)]}:
            return complex(real, imaginary)
        case {"range": [int(start), int(stop), int(step)]}:
            return range(start, stop, step)
    return resolve(data)
