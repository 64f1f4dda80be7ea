"""Random damage of files, and the property that readers give one named error or a valid value."""

import struct
import tracemalloc
from collections.abc import Callable

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

MAX_ALLOCATION = 100_000_000
HEADER = 2048  # most damage hits the first bytes, where counts and lengths are
ABSURD = [0, 1, 7, 2**31 - 1, 2**31, 2**32 - 1, 2**48, 2**62, 2**63 - 1, 2**64 - 1]

names = st.sampled_from(
    ["../../etc/passwd", "/etc/passwd", "a/../b.safetensors", "", ".", "\0", "x"]
)
values = st.recursive(
    st.none()
    | st.booleans()
    | st.sampled_from([*ABSURD, -1, 10**400, 1e308, -0.0, float("nan"), float("inf")])
    | st.text(max_size=8)
    | names,
    lambda inner: st.lists(inner, max_size=4) | st.dictionaries(st.text(max_size=4), inner),
    max_leaves=6,
)


@st.composite
def damage(draw) -> Callable[[bytes], bytes]:
    """One to four edits of a file's bytes."""
    edits = draw(
        st.lists(
            st.tuples(
                st.sampled_from(["cut", "byte", "word", "long", "delete", "repeat"]),
                st.floats(0, 1, exclude_max=True),
                st.booleans(),
                st.integers(0, 255),
                st.sampled_from(ABSURD),
            ),
            min_size=1,
            max_size=4,
        )
    )

    def apply(data: bytes) -> bytes:
        for kind, place, near, byte, number in edits:
            at = int(place * (min(len(data), HEADER) if near else len(data)))
            head, tail = data[:at], data[at:]
            data = {
                "cut": head,
                "byte": head + bytes([byte]) + tail[1:],
                "word": head + struct.pack("<I", number % 2**32) + tail[4:],
                "long": head + struct.pack("<Q", number) + tail[8:],
                "delete": head + tail[byte:],
                "repeat": head + tail[:byte] + tail,
            }[kind]
        return data

    return apply


@st.composite
def replaced(draw, keys: tuple[str, ...]) -> dict:
    """One to three entries with values of any type."""
    return draw(st.dictionaries(st.sampled_from(keys), values, min_size=1, max_size=3))


def assert_named_or_valid(read: Callable[[], object], name: str) -> None:
    """`read` returns, or raises ValueError with `name`; it never allocates much."""
    tracemalloc.start()
    try:
        read()
    except ValueError as error:
        assert name in str(error), error
        assert len(str(error)) < 3000
    finally:
        peak = tracemalloc.get_traced_memory()[1]
        tracemalloc.stop()
    assert peak < MAX_ALLOCATION


def fuzz(n: int, n_slow: int, **strategies):
    """Two tests of one property: a few examples by default, many with -m slow."""
    checks = [HealthCheck.function_scoped_fixture, HealthCheck.too_slow, HealthCheck.data_too_large]

    def make(check):
        @pytest.mark.parametrize(
            "n_examples", [n, pytest.param(n_slow, marks=pytest.mark.slow)], ids=["few", "many"]
        )
        def test(n_examples, tmp_path):
            @settings(
                max_examples=n_examples,
                deadline=None,
                database=None,
                derandomize=n_examples == n,
                suppress_health_check=checks,
            )
            @given(**strategies)
            def run(**drawn):
                check(tmp_path, **drawn)

            run()

        test.__doc__ = check.__doc__
        return test

    return make
