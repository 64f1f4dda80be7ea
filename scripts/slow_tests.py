"""Runs the slow tests that were not run for longest, and keeps a record of all of them.

    python scripts/slow_tests.py                  # prints the oldest and the failed ones
    python scripts/slow_tests.py --minutes=30     # runs the oldest for half an hour, then prints
    python scripts/slow_tests.py --only=tests/trainer --minutes=60

The gate leaves slow tests out. The record is tests/slow_tests.tsv: commit, date, result and seconds
of each test. Commit it after a run; one that is interrupted is recorded too. Tests that were never
run come first, then failed ones.
"""

import argparse
import contextlib
import csv
import dataclasses
import datetime
import json
import pathlib
import signal
import subprocess
import sys
import tempfile
import time

ROOT = pathlib.Path(__file__).parents[1]
RECORD = ROOT / "tests" / "slow_tests.tsv"
PRINTED = 15  # of the oldest


@dataclasses.dataclass(frozen=True)
class Run:
    """The last run of one slow test; `date` is empty if there was none."""

    name: str
    result: str = "never run"
    seconds: float = 0.0
    commit: str = ""
    date: str = ""


def main() -> int:
    parser = argparse.ArgumentParser(description=(__doc__ or "").split("\n")[0])
    parser.add_argument(
        "--minutes", type=float, help="start no test after this time; default: none"
    )
    parser.add_argument("--only", nargs="*", default=[], help="prefixes of test names")
    parser.add_argument("-n", type=int, default=2, help="processes; default: 2")
    options = parser.parse_args()
    signal.signal(signal.SIGTERM, signal.default_int_handler)
    runs = current_runs(read_record(RECORD), collect_slow())
    if options.minutes is not None:
        chosen = [run for run in runs if run.name.startswith(tuple(options.only) or "")]
        found = run_tests(in_order(chosen), options.minutes, options.n)
        runs = [found.get(run.name, run) for run in runs]
        write_record(RECORD, runs)
    print_oldest(runs)
    return int(any(run.result == "failed" for run in runs))


def read_record(path: pathlib.Path) -> dict[str, Run]:
    if not path.exists():
        return {}
    with path.open(newline="") as file:
        rows = csv.DictReader(file, delimiter="\t")
        return {row["name"]: Run(**{**row, "seconds": float(row["seconds"])}) for row in rows}


def write_record(path: pathlib.Path, runs: list[Run]) -> None:
    names = [field.name for field in dataclasses.fields(Run)]
    with path.open("w", newline="") as file:
        writer = csv.DictWriter(file, names, delimiter="\t", lineterminator="\n")
        writer.writeheader()
        writer.writerows(dataclasses.asdict(run) for run in sorted(runs, key=lambda run: run.name))


def collect_slow() -> list[str]:
    """Names of all slow tests of the tree."""
    command = [sys.executable, "-m", "pytest", "-n0", "-q", "--collect-only", "-m", "slow"]
    output = subprocess.run(command, cwd=ROOT, stdout=subprocess.PIPE, text=True).stdout
    names = [line for line in output.splitlines() if line.startswith("tests/") and "::" in line]
    if not names:
        raise SystemExit(f"no slow test is found; {' '.join(command)} prints:\n{output[-2000:]}")
    return names


def current_runs(record: dict[str, Run], names: list[str]) -> list[Run]:
    """The runs of the tests that exist.

    Removed tests leave the record. Tests of a file that is not collected here, because it needs a
    compiler or package that is absent, stay.
    """
    files = {name.split("::")[0] for name in names}
    absent = [
        run
        for name, run in record.items()
        if (file := name.split("::")[0]) not in files and (ROOT / file).exists()
    ]
    return [*(record.get(name, Run(name)) for name in names), *absent]


def in_order(runs: list[Run]) -> list[Run]:
    """The order in which tests are due: never run, failed, then the oldest."""
    return sorted(runs, key=lambda run: (run.date != "", run.result != "failed", run.date))


def run_tests(runs: list[Run], minutes: float, n_processes: int) -> dict[str, Run]:
    """Runs tests in the given order, files together, until the time is over."""
    files = dict.fromkeys(run.name.split("::")[0] for run in runs)
    names = [run.name for file in files for run in runs if run.name.split("::")[0] == file]
    commit = subprocess.run(
        ["git", "rev-parse", "--short=9", "HEAD"], cwd=ROOT, stdout=subprocess.PIPE, text=True
    ).stdout.strip()
    until = time.time() + 60 * minutes
    with tempfile.TemporaryDirectory() as folder:
        results, arguments = pathlib.Path(folder) / "results", pathlib.Path(folder) / "names"
        arguments.write_text("\n".join(names))
        command = [sys.executable, "-m", "pytest", "-m", "slow", f"-n{n_processes}"]
        command += ["--no-loadscope-reorder", f"--record={results}", f"--until={until}"]
        with contextlib.suppress(KeyboardInterrupt):
            subprocess.run([*command, f"@{arguments}"], cwd=ROOT)
        rows = results.read_text().splitlines() if results.exists() else []
    found = [_as_run(json.loads(row), commit) for row in rows]
    return {run.name: run for run in found if run is not None}


def _as_run(row: dict, commit: str) -> Run | None:
    """The run of a recorded row; None if the time was over before it."""
    if "out of time" in row.get("reason", ""):
        return None
    date = datetime.datetime.now(datetime.UTC).strftime("%Y-%m-%d")
    return Run(row["name"], row["result"], row["s"], commit, date)


def print_oldest(runs: list[Run]) -> None:
    n_of = {result: sum(run.result == result for run in runs) for result in ("never run", "failed")}
    print(f"{len(runs)} slow tests, {n_of['never run']} never run, {n_of['failed']} failed")
    for run in in_order(runs)[:PRINTED]:
        print(f"{run.date or '-':10}  {run.commit or '-':9}  {run.result:9}  {run.name}")


if __name__ == "__main__":
    sys.exit(main())
