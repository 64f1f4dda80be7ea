"""The choice of thorough tests, and the second run of failed ones."""

import pathlib
import shutil

import pytest

from scripts import ci_tests, slow_tests


def test_packages_that_import_a_change_come_after_it():
    importers = {"jaxrl.data": {"jaxrl.rewards", "jaxrl.trainer"}, "jaxrl.rewards": {"jaxrl.eval"}}
    assert ci_tests.distances({"jaxrl.data"}, importers) == {
        "jaxrl.data": 0,
        "jaxrl.rewards": 1,
        "jaxrl.trainer": 1,
        "jaxrl.eval": 2,
    }


@pytest.mark.parametrize(
    ("path", "package"),
    [
        ("jaxrl/data/sources/files.py", "jaxrl.data"),
        ("jaxrl/train.py", "jaxrl.train"),
        ("tests/data/test_items.py", "jaxrl.data"),
        ("tests/test_layout.py", ""),
        ("sharding/rules.py", "sharding"),
        ("tests/sharding/test_sharding.py", "sharding"),
        ("docs/LOG.md", ""),
    ],
)
def test_package_of_a_path(path, package):
    assert ci_tests.package_of(path) == package


def test_changed_packages_are_found_with_what_imports_them(monkeypatch):
    monkeypatch.setattr(ci_tests, "git", lambda *arguments: "jaxrl/planner/search.py\nREADME.md\n")
    files = ci_tests.changed_test_files("abc")
    assert "tests/planner/test_search.py" in files[: len(files) // 2]
    assert any(
        name.startswith("tests/trainer/") for name in files
    )  # the trainer imports the planner
    assert "tests/tool_calls/test_parser.py" not in files  # nothing there imports the planner


SOMETIMES = """
import pathlib
def test_sometimes():
    seen = pathlib.Path(__file__).with_suffix(".seen")
    first = not seen.exists()
    seen.touch()
    assert not first
"""


@pytest.mark.thorough
@pytest.mark.parametrize(
    ("body", "status", "line"),
    [
        (SOMETIMES, 0, "flaky: test_it.py::test_sometimes"),
        ("def test_never():\n    assert False", 1, "failed twice: test_it.py::test_never"),
        ("import no_such_module", 1, "1 error"),
        ("def test_always():\n    pass", 0, ""),
    ],
)
def test_a_failed_test_runs_once_more_alone(body, status, line, tmp_path, monkeypatch, capfd):
    shutil.copy(pathlib.Path(__file__).with_name("conftest.py"), tmp_path)
    (tmp_path / "sharding").symlink_to(ci_tests.ROOT / "sharding")
    (tmp_path / "test_it.py").write_text(body)
    monkeypatch.setattr(ci_tests, "ROOT", tmp_path)
    assert ci_tests.run([]) == status
    assert line in capfd.readouterr().out


def test_the_slowest_tests_and_files_are_printed(capsys):
    seconds = {"a.py::test_1": 1.0, "a.py::test_2": 1.5, "b.py::test_1": 2.0}
    ci_tests.print_slowest([{"name": name, "s": s} for name, s in seconds.items()])
    lines = [line.split() for line in capsys.readouterr().out.splitlines()[1:]]
    assert [line[2] for line in lines[:3]] == ["a.py", "b.py", "b.py::test_1"]
    assert [line[0] for line in lines] == ["2.5", "2.0", "2.0", "1.5", "1.0"]


def test_slow_tests_are_due_by_age():
    old, new = slow_tests.Run("a", "passed", 1.0, "c1", "2026-01-02"), slow_tests.Run("b")
    failed = slow_tests.Run("c", "failed", 1.0, "c2", "2026-02-02")
    later = slow_tests.Run("d", "passed", 1.0, "c2", "2026-02-02")
    assert slow_tests.in_order([later, old, failed, new]) == [new, failed, old, later]


def test_the_record_of_slow_tests_keeps_what_cannot_be_collected_here(tmp_path):
    here = slow_tests.Run("tests/test_targets.py::test_a", "passed", 12.5, "c1", "2026-01-02")
    gpu = slow_tests.Run("tests/kernels/test_on_gpu.py::test_b", "passed", 1.0, "c1", "2026-01-02")
    removed = slow_tests.Run("tests/test_targets.py::test_gone", "failed", 1.0, "c1", "2026-01-02")
    slow_tests.write_record(tmp_path / "record", [here, gpu, removed])
    record = slow_tests.read_record(tmp_path / "record")
    assert record[here.name] == here
    new = "tests/test_targets.py::test_new"
    runs = slow_tests.current_runs(record, [here.name, new])
    assert runs == [here, slow_tests.Run(new), gpu]
