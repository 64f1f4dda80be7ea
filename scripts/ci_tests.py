"""Runs the tests of the gate. A failed test runs once more alone; if it passes then, it is flaky.

    python scripts/ci_tests.py default            # the README's `pytest`
    python scripts/ci_tests.py thorough           # two parts of the thorough tests
    python scripts/ci_tests.py thorough --all     # all thorough tests
    python scripts/ci_tests.py thorough --shard=3 # with this eighth instead of the commit's

The thorough tests of packages that the last 60 commits change, and of what imports them, run for at
most 12 minutes: first the changed packages, then what imports them directly, and so on. Of all
other thorough tests one eighth runs, chosen by the commit's hash.

Prints the slowest tests and files, and `flaky: NAME` for a test that passes alone. A flaky test is
a defect. Exits with 1 if a test fails twice.
"""

import argparse
import ast
import collections
import json
import pathlib
import subprocess
import sys
import tempfile
import time
import zlib
from typing import Any

ROOT = pathlib.Path(__file__).parents[1]
THOROUGH = "(thorough or bitwise) and not slow"
N_COMMITS = 60
N_SHARDS = 8
CHANGED_MINUTES = 12
PRINTED = 20  # of the slowest tests and files
MAX_RERUNS = 12  # more failures than this are no matter of luck
NO_TESTS = 5  # exit status of pytest


def main() -> int:
    parser = argparse.ArgumentParser(description=(__doc__ or "").split("\n")[0])
    parser.add_argument("tests", choices=("default", "thorough"))
    parser.add_argument("--all", action="store_true", help="all thorough tests")
    parser.add_argument("--shard", type=int, choices=range(N_SHARDS), help="default: by the commit")
    options = parser.parse_args()
    if options.tests == "default":
        return run([])
    if options.all:
        return run(["-m", THOROUGH])
    return run_parts(options.shard)


def run_parts(shard: int | None) -> int:
    """The thorough tests of changed packages within their time, and one shard of the others."""
    commit = git("rev-parse", "HEAD")
    shard = int(commit, 16) % N_SHARDS if shard is None else shard
    changed = changed_test_files(commit)
    print(f"== thorough tests: shard {shard} of {N_SHARDS} of what did not change", flush=True)
    ignored = [f"--ignore={path}" for path in changed]
    failed = run(["-m", THOROUGH, f"--shard={shard}/{N_SHARDS}", *ignored])
    if not changed:
        return failed
    print(f"== thorough tests of {len(changed)} files for changed packages", flush=True)
    until = time.time() + 60 * CHANGED_MINUTES
    limits = ["--no-loadscope-reorder", f"--until={until}"]
    return run(["-m", THOROUGH, *limits, *changed]) or failed


def run(arguments: list[str]) -> int:
    """Runs pytest, then each failed test once more alone; 0 if all passed in the end."""
    with tempfile.TemporaryDirectory() as folder:
        record = pathlib.Path(folder) / "record"
        command = [sys.executable, "-m", "pytest"]
        status = subprocess.run([*command, *arguments, f"--record={record}"], cwd=ROOT).returncode
        lines = record.read_text().splitlines() if record.exists() else []
    rows = [json.loads(line) for line in lines]
    print_slowest(rows)
    if status in (0, NO_TESTS):
        return 0
    failed = list(dict.fromkeys(row["name"] for row in rows if row["result"] == "failed"))
    if status != 1 or not 0 < len(failed) <= MAX_RERUNS:
        return 1
    marks = arguments[:2] if arguments[:1] == ["-m"] else []
    return int(any([not passes_alone(command, marks, name) for name in failed]))


def print_slowest(rows: list[dict[str, Any]]) -> None:
    """Prints the slowest tests, and the files whose tests take longest together."""
    files = collections.Counter()
    for row in rows:
        files[row["name"].split("::")[0]] += row["s"]
    tests = collections.Counter({row["name"]: row["s"] for row in rows})
    print(f"== slowest of {sum(files.values()):.0f} s:")
    for name, seconds in (*files.most_common(PRINTED), *tests.most_common(PRINTED)):
        print(f"{seconds:6.1f} s  {name}")


def passes_alone(command: list[str], marks: list[str], name: str) -> bool:
    print(f"== once more, alone: {name}", flush=True)
    passed = subprocess.run([*command, *marks, "-n0", name], cwd=ROOT).returncode == 0
    print(f"{'flaky' if passed else 'failed twice'}: {name}", flush=True)
    return passed


def changed_test_files(commit: str) -> list[str]:
    """Test files of the packages that changed and of what imports them, in the order to run them.

    Files of the same distance from a change are ordered by the commit, so that another run begins
    with others.
    """
    names = git("log", f"-{N_COMMITS}", "--name-only", "--format=", commit).splitlines()
    distance = distances({package_of(name) for name in names if name} - {""}, importers())
    found = {}
    for path in sorted((ROOT / "tests").rglob("test_*.py")):
        name = str(path.relative_to(ROOT))
        near = [distance[p] for p in (package_of(name), *imports(path)) if p in distance]
        if name in names or near:
            found[name] = 0 if name in names else min(near)
    return sorted(found, key=lambda name: (found[name], zlib.crc32(f"{commit}{name}".encode())))


def package_of(path: str) -> str:
    """The package of a source or test file: jaxrl.data of jaxrl/data/iterator.py and tests/data."""
    top, *rest = pathlib.PurePath(path).with_suffix("").parts
    if top == "sharding" or (top == "tests" and rest[:1] == ["sharding"]):
        return "sharding"
    if top not in ("jaxrl", "tests") or not rest:
        return ""
    package = f"jaxrl.{rest[0].removeprefix('test_')}"
    return package if (ROOT / package.replace(".", "/")).exists() or top == "jaxrl" else ""


def imports(path: pathlib.Path) -> set[str]:
    """Packages that a file imports."""
    found = set()
    for node in ast.walk(ast.parse(path.read_text())):
        if isinstance(node, ast.Import):
            found |= {alias.name for alias in node.names}
        elif isinstance(node, ast.ImportFrom) and node.module:
            found |= {f"{node.module}.{alias.name}" for alias in node.names}
    packages = {".".join(name.split(".")[:2]) for name in found if name.startswith("jaxrl.")}
    return packages | {"sharding" for name in found if name.split(".")[0] == "sharding"}


def importers() -> dict[str, set[str]]:
    """For each package those that import it."""
    found: dict[str, set[str]] = {}
    for folder in ("jaxrl", "sharding"):
        for path in (ROOT / folder).rglob("*.py"):
            package = package_of(str(path.relative_to(ROOT)))
            for imported in imports(path) - {package}:
                found.setdefault(imported, set()).add(package)
    return found


def distances(changed: set[str], importers: dict[str, set[str]]) -> dict[str, int]:
    """The number of imports from a package to the nearest changed one."""
    found, level = dict.fromkeys(changed, 0), set(changed)
    while level:
        level = {user for package in level for user in importers.get(package, ())} - set(found)
        found |= dict.fromkeys(level, max(found.values()) + 1)
    return found


def git(*arguments: str) -> str:
    return subprocess.run(
        ["git", *arguments], cwd=ROOT, check=True, stdout=subprocess.PIPE, text=True
    ).stdout.strip()


if __name__ == "__main__":
    sys.exit(main())
