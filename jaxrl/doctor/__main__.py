"""python -m jaxrl.doctor: checks devices, versions, kernels and disks, for a bug report."""

import argparse
import contextlib
import itertools
import json
import os
import sys
from collections.abc import Iterator
from pathlib import Path

from jaxrl.doctor.arguments import parser
from jaxrl.runtime.start import begin_loading, end_loading

ENVIRONMENT = dict(os.environ)  # before JAX adds to it
if __name__ == "__main__":  # answers a mistyped argument before the imports that take seconds
    ARGUMENTS = parser().parse_args()
    with contextlib.redirect_stdout(sys.stderr):  # standard output has the findings
        begin_loading()

from rich.console import Console

from jaxrl.doctor import machine
from jaxrl.doctor.finding import Finding, as_json, section_table
from jaxrl.doctor.operations import operations
from jaxrl.doctor.self_test import kernel_findings, step_findings
from jaxrl.runtime.backend import BackendError, open_backend
from jaxrl.runtime.compilation import open_cache

WIDTH = 100  # columns of a table that goes to a file


def main(args: argparse.Namespace) -> int:
    """Prints the findings. Exit status 1 if a check failed."""
    end_loading()
    found = findings(Path(args.run_dir), with_self_test=not args.no_self_test)
    if args.json:
        report = as_json(found)
        print(json.dumps(report))
        return 0 if report["passed"] else 1
    console = Console(width=None if sys.stdout.isatty() else WIDTH)
    failed = []
    for section, rows in itertools.groupby(found, key=lambda one: one.section):
        rows = list(rows)
        console.print(section_table(section, rows))
        failed += [row.name for row in rows if row.status == "failed"]
    console.print(f"failed: {', '.join(failed)}" if failed else "all checks passed")
    return 1 if failed else 0


def findings(run_dir: Path, *, with_self_test: bool) -> Iterator[Finding]:
    """All findings, section by section."""
    yield from machine.version_findings()
    yield from machine.variable_findings(ENVIRONMENT)
    yield from machine.disk_findings(run_dir)
    yield machine.hub_finding()
    open_cache("")
    try:
        backend = open_backend()
    except BackendError as error:
        yield Finding("devices", "JAX", str(error), "failed")
        return
    yield from machine.device_findings(backend)
    all_operations = list(operations(backend))
    for operation in all_operations:
        yield Finding("kernels", operation.name, f"{operation.chosen}: {operation.reason}")
    if with_self_test:
        for operation in all_operations:
            print(f"jaxrl: testing {operation.name}", file=sys.stderr, flush=True)
            yield from kernel_findings(operation, backend)
        print("jaxrl: testing a step", file=sys.stderr, flush=True)
        yield from step_findings(backend)


if __name__ == "__main__":
    sys.exit(main(ARGUMENTS))
