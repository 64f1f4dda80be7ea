"""The command of env.command: its words, and the placeholders in them."""

import re
import shlex

PLACEHOLDERS = {
    "base_url": "address of the endpoint, for clients of OpenAI's API",
    "api_key": "key of the episode",
    "prompt": "text of the last message of the prompt",
    "task": "path of a JSON file with messages, answer, source, extra and seed",
    "seed": "of the episode",
    "folder": "path of an empty folder, which is deleted after the episode",
}
PLACEHOLDER = re.compile(r"\{(\w+)\}")


def command_words(command: str) -> list[str]:
    """The words of a command, without a shell. Raises ValueError for one that cannot be run."""
    try:
        words = shlex.split(command)
    except ValueError as error:
        raise ValueError(
            f"env.command={command!r} has an open quote or escape; close it"
        ) from error
    if not words:
        raise ValueError("env.command has no word; set it to a program and its arguments")
    if unknown := sorted(set(PLACEHOLDER.findall(command)) - set(PLACEHOLDERS)):
        known = ", ".join(f"{{{name}}}" for name in PLACEHOLDERS)
        raise ValueError(
            f"env.command has {{{unknown[0]}}}, which is not known; use {known}, or let the "
            "program read the file {task}"
        )
    return words
