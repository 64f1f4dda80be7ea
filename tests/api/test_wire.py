import pytest

from jaxrl.api.wire import bytes_field, double_field, number_field, read_double, read_fields


def test_fields_are_read_as_they_are_written():
    # 300 = 0b10_0101100: the low 7 bits with a continuation bit, 0xAC, then 0x02
    assert number_field(1, 300) == b"\x08\xac\x02"
    # field 2 with bytes has the tag 2 << 3 | 2 = 0x12
    assert bytes_field(2, "ab") == b"\x12\x02ab"
    raw = number_field(1, 300) + bytes_field(2, "ab") + double_field(16, -0.5)
    (a, n), (b, text), (c, double) = read_fields(raw)
    assert (a, n, b, text, c, read_double(double)) == (1, 300, 2, b"ab", 16, -0.5)


@pytest.mark.parametrize(
    "raw",
    [
        b"\x08",  # no value
        b"\x08\xff",  # a number that does not end
        b"\x12\x05ab",  # 2 of 5 bytes
        b"\x0b",  # the wire type 3
        b"\x08" + b"\xff" * 11,  # more than 64 bits
    ],
)
def test_what_is_no_message_is_a_value_error(raw):
    with pytest.raises(ValueError):
        list(read_fields(raw))
