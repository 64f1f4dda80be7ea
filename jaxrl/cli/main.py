"""jaxrl COMMAND ARGUMENTS: starts one of the programs of jaxrl."""

import difflib
import importlib.metadata
import os
import sys
from collections.abc import Sequence

from jaxrl.cli.commands import COMMANDS

COMPLETION = "completion"
HELP_COMMAND = "`jaxrl --help` lists the commands"


def main() -> int:
    """Runs the command of sys.argv. Exit status: that of the program, 1 if there is no such one."""
    return run(sys.argv[1:])


def run(words: Sequence[str]) -> int:
    """Replaces this process by the program, or prints what the words request."""
    name, *arguments = words or ["--help"]
    if name in ("-h", "--help", "help"):
        print(help_text())
    elif name == "--version":
        print(f"jaxrl {importlib.metadata.version('jaxrl')}")
    elif name == COMPLETION:
        # The keys of a run take 0.2 s to import.
        return importlib.import_module("jaxrl.cli.completion").run(arguments)
    elif name in COMMANDS:
        module = COMMANDS[name].module
        os.execv(sys.executable, [sys.executable, "-m", module, *arguments])
    else:
        print(f"error: {unknown(name, arguments)}", file=sys.stderr)
        return 1
    return 0


def help_text() -> str:
    """A line per command."""
    summaries = {name: command.summary for name, command in COMMANDS.items()}
    summaries[COMPLETION] = "print the completion script of bash or zsh"
    width = max(map(len, summaries))
    return "\n".join(
        [
            "usage: jaxrl COMMAND [ARGUMENTS]",
            "",
            "Reinforcement learning for language models in JAX.",
            "",
            *(f"  {name:<{width}}  {summary}" for name, summary in summaries.items()),
            "",
            "`jaxrl COMMAND --help` prints the arguments of a command, `jaxrl --version` the",
            "version. `python -m jaxrl.train` is the same program as `jaxrl train`.",
        ]
    )


def unknown(name: str, arguments: Sequence[str]) -> str:
    """The message for a first word that is not a command."""
    if name.startswith("-"):
        words = " ".join(("jaxrl train", name, *arguments))
        return f"no command is given before {name}; did you mean `{words}`? {HELP_COMMAND}"
    near = difflib.get_close_matches(name.replace("_", "-"), (*COMMANDS, COMPLETION), 1, 0.5)
    hint = f"did you mean {near[0]}? " if near else ""
    return f"there is no command {name}; {hint}{HELP_COMMAND}"
