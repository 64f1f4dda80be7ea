"""Tests of jaxrl/data/streaming.py and jaxrl/data/sources/row_blocks.py."""

import json
import subprocess
import sys

import pyarrow as pa
import pyarrow.parquet as pq
import pytest

from jaxrl.data.items import ItemMaker, load_items
from jaxrl.data.sources.row_blocks import index_blocks
from jaxrl.data.streaming import ItemStream


def numbers(rows, dropped):
    """The numbers in the rows; multiples of ten are too long."""
    found = [int(row.columns["answer"]) for row in rows]
    dropped.lengths += [n for n in found if n % 10 == 0]
    return [(row.number, n) for row, n in zip(rows, found, strict=True) if n % 10]


MAKER = ItemMaker("numbers", "9", (), numbers)


def write(folder, kind, n=300, start=0):
    rows = [{"question": "?", "answer": start + i} for i in range(n)]
    table, path = pa.Table.from_pylist(rows), folder / f"rows{start}.{kind}"
    if kind == "parquet":
        pq.write_table(table, path, row_group_size=20)
    elif kind == "arrow":
        with pa.OSFile(str(path), "wb") as file, pa.ipc.new_stream(file, table.schema) as stream:
            stream.write_table(table, max_chunksize=20)
    else:
        path.write_text("\n".join(json.dumps(row) for row in rows))
    return str(path)


def stream(*sources, shuffle=True, buffer=31, seed=3):
    return ItemStream(sources, MAKER, shuffle=shuffle, buffer=buffer, seed=seed)


@pytest.mark.parametrize("kind", ["parquet", "arrow", "jsonl"])
def test_streamed_items_are_those_of_memory(kind, tmp_path):
    sources = write(tmp_path, kind), write(tmp_path, kind, 10, start=5000)
    expected = load_items(sources, MAKER)
    in_order = stream(*sources, shuffle=False)
    assert len(in_order) == 310  # ten times the buffer
    assert in_order.take(len(expected) + 2) == [*expected, *expected[:2]]
    shuffled = stream(*sources)
    epochs = [shuffled.take(len(expected)) for _ in range(2)]
    assert [sorted(epoch) for epoch in epochs] == [expected] * 2
    assert epochs[0] != expected and epochs[0] != epochs[1]


@pytest.mark.parametrize("shuffle", [True, False])
@pytest.mark.parametrize("n_before", [0, 1, 70, 400])
def test_restore_continues_identically(shuffle, n_before, tmp_path):
    source = write(tmp_path, "parquet")
    uninterrupted = stream(source, shuffle=shuffle)
    uninterrupted.take(n_before)
    resumed = stream(source, shuffle=shuffle)
    resumed.restore(json.loads(json.dumps(uninterrupted.state())))
    assert uninterrupted.take(350) == resumed.take(350)
    assert uninterrupted.state() == resumed.state()


def test_the_first_row_of_each_source_shows_its_columns(tmp_path):
    sources = write(tmp_path, "jsonl", 5, start=11), write(tmp_path, "parquet", 5, start=24)
    assert [n for _, n in stream(*sources).items] == [11, 24]


def test_the_seed_changes_the_order(tmp_path):
    source = write(tmp_path, "jsonl")
    assert stream(source, seed=1).take(50) != stream(source, seed=2).take(50)


def test_changed_files_are_rejected_at_resume(tmp_path):
    source = write(tmp_path, "jsonl")
    state = stream(source).state()
    text = (tmp_path / "rows0.jsonl").read_text()
    (tmp_path / "rows0.jsonl").write_text(text.replace(": 299", ": 298"))
    with pytest.raises(ValueError, match=r"not those of the checkpoint \(rows0\.jsonl\)"):
        stream(source).restore(state)


def test_a_damaged_row_is_named_when_it_is_read(tmp_path):
    path = tmp_path / "rows.jsonl"
    path.write_text('{"answer": 1}\n{"answer"\n')
    found = stream(str(path), shuffle=False)
    assert found.take(1) == [(0, 1)]
    with pytest.raises(ValueError, match=r"rows\.jsonl:2 is not JSON"):
        found.take(1)


def test_sources_without_items_are_errors(tmp_path):
    (tmp_path / "empty.jsonl").write_text("")
    with pytest.raises(ValueError, match=r"no numbers in .*empty\.jsonl"):
        stream(str(tmp_path / "empty.jsonl"))
    (tmp_path / "long.jsonl").write_text('{"answer": 10}\n')
    with pytest.raises(ValueError, match=r"all 3 numbers .* are longer than 9 tokens"):
        stream(str(tmp_path / "long.jsonl")).take(1)
    (tmp_path / "list.json").write_text("[]")
    with pytest.raises(ValueError, match=r"list\.json cannot be streamed; convert it to JSONL"):
        list(index_blocks([str(tmp_path / "list.json")]))


def test_a_task_is_streamed_as_a_source(tmp_path):
    found = stream(write(tmp_path, "jsonl", 5, start=1), "task:addition?digits=1&size=9")
    assert len(found) == 14


LIMITED = """
import resource, sys
from jaxrl.data.streaming import ItemStream
from tests.data.test_streaming import MAKER
stream = ItemStream([sys.argv[1]], MAKER, shuffle=True, buffer=1000, seed=0)
used = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
for _ in range(60):
    stream.take(500)
print(resource.getrusage(resource.RUSAGE_SELF).ru_maxrss - used)
"""


@pytest.mark.thorough
@pytest.mark.parametrize("kind", ["parquet", "jsonl"])
def test_memory_does_not_grow_with_the_file(kind, tmp_path):
    """60 MB of text per epoch pass through at most 25 MB."""
    path = tmp_path / f"big.{kind}"
    rows = [{"question": f"{i} " + chr(97 + i % 26) * 6000, "answer": i} for i in range(10_000)]
    if kind == "parquet":
        table = pa.Table.from_pylist(rows)
        pq.write_table(table, path, row_group_size=500, compression="none", use_dictionary=False)
    else:
        path.write_text("".join(json.dumps(row) + "\n" for row in rows))
    assert path.stat().st_size > 60_000_000
    done = subprocess.run(
        [sys.executable, "-c", LIMITED, str(path)], capture_output=True, text=True, check=True
    )
    assert int(done.stdout) * (1024 if sys.platform == "linux" else 1) < 25_000_000
