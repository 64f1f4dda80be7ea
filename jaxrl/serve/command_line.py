"""The parts that the command lines of all servers have in common."""

import argparse
from collections.abc import Mapping

# option: (default, smallest value, help)
OptionLimits = Mapping[str, tuple[int | float, int | float, str]]


def server_parser(prog: str, description: str) -> argparse.ArgumentParser:
    """A parser of a server's own options; the keys of a run are read separately."""
    return argparse.ArgumentParser(
        prog=prog,
        description=description,
        formatter_class=argparse.RawDescriptionHelpFormatter,
        allow_abbrev=False,
    )


def add_address(parser: argparse.ArgumentParser, port: int) -> None:
    parser.add_argument(
        "--host",
        default="127.0.0.1",
        help="address to listen on (default: %(default)s, this machine only)",
    )
    parser.add_argument(
        "--port", type=int, default=port, help="0 picks a free one (default: %(default)s)"
    )


def add_limits(parser: argparse.ArgumentParser, limits: OptionLimits) -> None:
    for name, (default, _, text) in limits.items():
        kind, explained = type(default), f"{text} (default: %(default)s)"
        parser.add_argument(f"--{name}", type=kind, default=default, help=explained)


def parse_own(
    parser: argparse.ArgumentParser, argv: list[str], limits: OptionLimits, models: str
) -> tuple[argparse.Namespace, list[str]]:
    """(the server's own options, the arguments that are left).

    Exits with one message on invalid ones; `models` says what --model may be.
    """
    options, rest = parser.parse_known_args(argv)
    if not options.model:
        parser.error(f"--model is missing; set it to {models}")
    for name, (_, least, _) in limits.items():
        if (value := getattr(options, name.replace("-", "_"))) < least:
            parser.error(f"--{name}={value} is too small; set {least} or more")
    return options, rest
