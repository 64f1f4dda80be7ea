"""The arguments of `jaxrl.doctor`."""

import argparse

HELP = """\
python -m jaxrl.doctor: checks this machine, and prints the table that belongs into a bug report.

Devices, versions, memory, the kernel of each operation, disks, the model hub and environment
variables; then every kernel at small shapes against its reference, and one tiny step against
stored numbers. It takes seconds on CPU, about two minutes on an accelerator. The table has no
tokens, and ~ in place of the home folder. The exit status is 1 if a check fails.
"""


def parser() -> argparse.ArgumentParser:
    """The parser of the arguments."""
    found = argparse.ArgumentParser(
        prog="python -m jaxrl.doctor",
        description=HELP,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    add = found.add_argument
    add("--json", action="store_true", help="print one JSON object instead of tables")
    add("--no-self-test", action="store_true", help="run no kernel and no step")
    add("--run-dir", default="runs", help="folder for runs, whose disk is checked (runs)")
    return found
