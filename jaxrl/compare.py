"""python -m jaxrl.compare RUN_A RUN_B: one page that compares runs.

    python -m jaxrl.compare runs/grpo runs/dapo
    python -m jaxrl.compare --a runs/grpo-0 runs/grpo-1 --b runs/dapo-0 runs/dapo-1

The page has final values with intervals, curves with the spread of seeds, and what differs in
configuration, versions and commit.
"""

import argparse
import re
import sys
from collections.abc import Sequence
from pathlib import Path

if __name__ == "__main__":
    from jaxrl.ending import end_on_signals

    end_on_signals()

from jaxrl.report.compare_page import write_comparison
from jaxrl.report.comparison import Side, read_side


def main(argv: list[str] | None = None) -> int:
    """Exit status: 0 done, 1 after an error with a message, 2 for wrong arguments."""
    parser = argparse.ArgumentParser(
        prog="python -m jaxrl.compare",
        description=__doc__,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    parser.add_argument("runs", type=Path, nargs="*", help="run folders, each a side")
    parser.add_argument("--a", type=Path, nargs="+", default=[], help="runs of one side, by seed")
    parser.add_argument("--b", type=Path, nargs="+", default=[], help="runs of the other side")
    parser.add_argument("--names", nargs="+", default=[], help="names of the sides on the page")
    parser.add_argument("--output", type=Path, default=Path("compare.html"), help="the page")
    args = parser.parse_args(argv)
    folders = [[run] for run in args.runs] + [side for side in (args.a, args.b) if side]
    if len(folders) < 2:
        parser.error("two sides are needed: RUN_A RUN_B, or --a RUN ... --b RUN ...")
    if args.names and len(args.names) != len(folders):
        parser.error(f"--names has {len(args.names)} names for {len(folders)} sides")
    try:
        names = args.names or side_names(folders)
        print(write_comparison(read_sides(names, folders), args.output))
    except (ValueError, OSError) as error:
        print(error, file=sys.stderr)
        return 1
    return 0


def read_sides(names: Sequence[str], folders: Sequence[Sequence[Path]]) -> list[Side]:
    return [read_side(name, side) for name, side in zip(names, folders, strict=True)]


def side_names(folders: Sequence[Sequence[Path]]) -> list[str]:
    """The folders' names without the numbers of seeds; A, B, ... if these are not distinct."""
    names = []
    for side in folders:
        runs = [run.absolute().name for run in side]
        if len(runs) > 1:
            runs = [re.sub(r"([-_.]?(seed)?[-_.]?\d+)?$", "", run, count=1) for run in runs]
        names.append(runs[0] if len(set(runs)) == 1 else "")
    if len(set(names)) < len(names) or not all(names):
        return [chr(ord("A") + i) for i in range(len(folders))]
    return names


if __name__ == "__main__":
    sys.exit(main())
