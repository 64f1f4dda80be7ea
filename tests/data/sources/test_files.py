"""Tests of jaxrl/data/sources/files.py: damaged files end with one error that names them."""

import json

import pyarrow as pa
import pyarrow.parquet as pq
import pytest
from hypothesis import strategies as st

from jaxrl.data.sources.files import find_files, read_rows
from tests.file_damage import assert_named_or_valid, damage, fuzz

ROWS = [{"question": f"{i} + 1", "extra": {"list": [i, None]}, "answer": 0.5} for i in range(40)]


def write(folder, kind):
    table, path = pa.Table.from_pylist(ROWS), folder / f"rows.{kind}"
    if kind == "parquet":
        pq.write_table(table, path)
    elif kind == "arrow":
        with pa.OSFile(str(path), "wb") as file, pa.ipc.new_stream(file, table.schema) as stream:
            stream.write_table(table)
    elif kind == "jsonl":
        path.write_text("".join(json.dumps(row) + "\n" for row in ROWS))
    else:
        path.write_text(json.dumps(ROWS))
    return path


@pytest.mark.parametrize("kind", ["parquet", "arrow", "jsonl", "json"])
def test_rows_come_back_from_every_kind_of_file(kind, tmp_path):
    path = write(tmp_path, kind)
    rows = list(read_rows(str(path)))
    assert [row for _, row in rows] == ROWS
    assert rows[1][0] == f"{path}:2"


@fuzz(40, 3000, kind=st.sampled_from(["parquet", "arrow", "jsonl", "json"]), edit=damage())
def test_dataset_files_with_damaged_bytes(folder, kind, edit):
    path = write(folder, kind)
    path.write_bytes(edit(path.read_bytes()))
    assert_named_or_valid(lambda: list(read_rows(str(path))), path.name)


@pytest.mark.parametrize(
    ("line", "message"),
    [
        ("[" * 100_000, "rows.jsonl:2 is nested too deeply"),
        ('{"question": "\\ud800"}', "rows.jsonl:2 has text that is not Unicode"),
        ("[1]", "rows.jsonl:2 is not a JSON object"),
        ("{", "rows.jsonl:2 is not JSON"),
    ],
)
def test_a_damaged_line_is_named(line, message, tmp_path):
    (tmp_path / "rows.jsonl").write_text('{"question": "\\ud83d\\ude00"}\n' + line)
    with pytest.raises(ValueError, match=message):
        list(read_rows(str(tmp_path / "rows.jsonl")))


@pytest.mark.parametrize(
    "name", ["../secret.arrow", "/etc/passwd", "a/b.arrow", "..", "", 3, None, [1], {"a": 1}]
)
def test_a_dataset_folder_names_only_its_own_files(name, tmp_path):
    (tmp_path / "state.json").write_text(json.dumps({"_data_files": [{"filename": name}]}))
    with pytest.raises(
        ValueError, match=r"state\.json names .*, which is not a file of its folder"
    ):
        find_files(str(tmp_path))
    (tmp_path / "dataset_dict.json").write_text(json.dumps({"splits": [name]}))
    with pytest.raises(ValueError, match=r"dataset_dict\.json names .*, which is not a file"):
        find_files(str(tmp_path))
