"""A command as an agent: any program that calls the model over the run's endpoint."""

import json
import os
import pathlib
import shutil
import subprocess
import tempfile
from typing import Any

from jaxrl.config.agent_command import PLACEHOLDER, command_words
from jaxrl.json_text import parse_json
from jaxrl.tool_calls.chat_message import content_text

_OUTPUT_CHARS = 2000  # of a failed program that are shown
_LINE_BYTES = 1 << 16  # of the output's end that are read


class CommandAgent:
    """Runs a command for one episode; an agent function (base_url, api_key, task).

    Placeholders in the words are replaced by PLACEHOLDERS, after the command was split into words:
    no text of a prompt is read by a shell. The program inherits the environment variables that
    `AgentProgram` sets, and JAXRL_TASK, the path of the task's file. Raises ValueError for a
    command that cannot be run, also if its program does not exist on this machine.
    """

    def __init__(self, command: str):
        self._words = command_words(command)
        if shutil.which(self._words[0]) is None:
            raise ValueError(
                f"env.command: there is no program {self._words[0]!r} on this machine; install it, "
                "or give its path"
            )
        # Episodes that are killed leave their folders to it; it is deleted when this process ends.
        self._folders = tempfile.TemporaryDirectory(prefix="jaxrl-agents-")

    def __call__(self, base_url: str, api_key: str, task: dict[str, Any]) -> dict[str, Any] | None:
        """The numbers of the last line that the program prints, if it is a JSON object with reward.

        Raises RuntimeError with the end of its output if it fails.
        """
        with tempfile.TemporaryDirectory(dir=self._folders.name) as folder:
            path, output = pathlib.Path(folder, "task.json"), pathlib.Path(folder, "output.txt")
            path.write_text(json.dumps(task))
            empty = pathlib.Path(folder, "work")
            empty.mkdir()
            values = {
                "base_url": base_url,
                "api_key": api_key,
                "prompt": content_text(task["messages"][-1]["content"]),
                "task": str(path),
                "seed": str(task["seed"]),
                "folder": str(empty),
            }
            words = [PLACEHOLDER.sub(lambda m: values[m[1]], word) for word in self._words]
            with output.open("wb") as file:
                status = subprocess.run(
                    words,
                    env=os.environ | {"JAXRL_TASK": str(path)},
                    stdin=subprocess.DEVNULL,
                    stdout=file,
                    stderr=subprocess.STDOUT,
                ).returncode
            return _result(status, _end(output))


def _end(path: pathlib.Path) -> str:
    with path.open("rb") as file:
        file.seek(max(path.stat().st_size - _LINE_BYTES, 0))
        return file.read().decode(errors="replace").strip()


def _result(status: int, output: str) -> dict[str, Any] | None:
    """The numbers that the program printed last. Raises RuntimeError if it failed."""
    if status:
        how = f"signal {-status}" if status < 0 else f"exit status {status}"
        raise RuntimeError(f"the command failed with {how}: {output[-_OUTPUT_CHARS:]}")
    last = output.rpartition("\n")[2]
    try:
        numbers = parse_json(last)
    except ValueError:
        return None
    return numbers if isinstance(numbers, dict) and "reward" in numbers else None
