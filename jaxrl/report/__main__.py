"""python -m jaxrl.report RUN_DIR: writes RUN_DIR/report.html.

With --curve=OUT.svg it also writes the learning curve as a picture, for a README. With --watch it
serves the page instead, and the page follows the run.
"""

import argparse
import sys
from pathlib import Path

from jaxrl.report.curve import write_curve_svg
from jaxrl.report.page import write_report
from jaxrl.report.watch import watch


def parser() -> argparse.ArgumentParser:
    """The parser of the arguments."""
    parser = argparse.ArgumentParser(prog="python -m jaxrl.report", description=__doc__)
    parser.add_argument("run_dir", type=Path, help="run folder with metrics.jsonl")
    parser.add_argument(
        "--curve", type=Path, help="also write an SVG of reward and validation accuracy"
    )
    parser.add_argument(
        "--watch",
        action="store_true",
        help="serve the page and refresh it while the run continues; the run may begin later",
    )
    parser.add_argument("--host", default="127.0.0.1", help="address of --watch (127.0.0.1)")
    parser.add_argument("--port", type=int, default=8700, help="port of --watch (8700; 0 = any)")
    return parser


def main(argv: list[str] | None = None) -> int:
    args = parser().parse_args(argv)
    try:
        if args.watch:
            watch(args.run_dir, args.host, args.port)
            return 0
        print(write_report(args.run_dir))
        if args.curve is not None:
            print(write_curve_svg(args.run_dir, args.curve))
    except (ValueError, OSError) as error:
        print(error, file=sys.stderr)
        return 1
    return 0


if __name__ == "__main__":
    sys.exit(main())
