"""Atomic writing of files."""

import pytest

from jaxrl.replaced_file import replaced_file


def test_a_file_is_replaced_at_the_end(tmp_path):
    path = tmp_path / "notes"
    path.write_text("old")
    with replaced_file(path) as file:
        file.write(b"new")
        assert path.read_text() == "old"
    assert path.read_text() == "new"
    assert list(tmp_path.iterdir()) == [path]


def test_an_error_leaves_the_former_file_and_no_other(tmp_path):
    path = tmp_path / "notes"
    path.write_text("old")
    with pytest.raises(OSError, match="no room"), replaced_file(path) as file:
        file.write(b"half")
        raise OSError("no room")
    assert path.read_text() == "old"
    assert list(tmp_path.iterdir()) == [path]
