"""An agent with a shell for the task folders of Harbor, whose own verifier scores."""

import shutil
import subprocess
import tempfile
from pathlib import Path
from typing import Any

from jaxrl.data.sources.harbor import read_task
from jaxrl.environments.agents.client import ModelClient
from jaxrl.environments.agents.harbor_root import TIMED_OUT, TaskRoot
from jaxrl.environments.api import AGENT_KEY
from jaxrl.json_text import parse_json

_TOOL = {
    "type": "function",
    "function": {
        "name": "bash",
        "description": "Run a shell command on the computer of the task. Every call starts "
        "in the working folder; processes end with the call.",
        "parameters": {
            "type": "object",
            "properties": {"command": {"type": "string", "description": "The command."}},
            "required": ["command"],
        },
    },
}


class HarborAgent:
    """Plays a task of a "harbor:" source; an agent function (base_url, api_key, task).

    The model has the tool `bash`, each of whose calls takes at most `command_s` seconds, and reads
    `output_chars` of what it prints. A turn without a call ends the episode, as do a truncated
    turn, the last of env.max_turns and a full context; it is verified in any case. Raises
    ValueError if this machine has no namespaces for the commands.
    """

    def __init__(
        self, *, command_s: float = 60.0, output_chars: int = 2000, reward: str = "reward"
    ):
        self._command_s, self._output_chars, self._reward = command_s, output_chars, reward
        # Episodes that are killed leave their folders to it; it is deleted when this process ends.
        self._folders = tempfile.TemporaryDirectory(prefix="jaxrl-harbor-")
        check_namespaces()

    def __call__(self, base_url: str, api_key: str, task: dict[str, Any]) -> dict[str, float]:
        """The numbers of the verifier, its number `reward` as the reward, and the calls.

        Raises RuntimeError if the verifier or the endpoint fails.
        """
        folder = task["extra"].get("harbor")
        if not isinstance(folder, str):
            raise ValueError(f"{AGENT_KEY}='harbor' needs rows of data.train='harbor:FOLDER'")
        with tempfile.TemporaryDirectory(dir=self._folders.name) as place:
            root = TaskRoot(read_task(Path(folder)), Path(place))
            calls = self._converse(task["messages"], ModelClient(base_url, api_key), root)
            numbers = root.verify()
        if self._reward not in numbers:
            raise RuntimeError(
                f"{folder}: the verifier wrote {', '.join(numbers)}, and not {self._reward!r}; "
                f"set {AGENT_KEY}='harbor?reward=NAME'"
            )
        reward = numbers.pop(self._reward)
        return numbers | {"reward": reward, "calls": float(calls)}

    def _converse(self, messages: list[dict[str, Any]], model: ModelClient, root: TaskRoot) -> int:
        """The number of calls of the episode."""
        messages, n_calls = list(messages), 0
        while reply := model.turn("chat/completions", {"messages": messages, "tools": [_TOOL]}):
            [choice] = reply["choices"]
            messages.append(choice["message"])
            calls = choice["message"].get("tool_calls") or []
            if not calls or choice["finish_reason"] == "length":
                break
            n_calls += len(calls)
            for call in calls:
                text = self._result(call["function"], root)
                messages.append({"role": "tool", "tool_call_id": call["id"], "content": text})
        return n_calls

    def _result(self, call: dict[str, str], root: TaskRoot) -> str:
        try:
            arguments = parse_json(call["arguments"])
        except ValueError as error:
            return f"error: {error}"
        match call["name"], arguments:
            case "bash", {"command": str(command)}:
                status, output = root.run(command, self._command_s)
            case _:
                return 'error: call bash with {"command": "..."}'
        if len(output) > self._output_chars:
            half = self._output_chars // 2
            output = f"{output[:half]}\n[...]\n{output[-half:]}"
        if status == TIMED_OUT:
            return f"{output}\n[stopped after {self._command_s:g} s]"
        return f"{output}\n[exit status {status}]" if status else output


def check_namespaces() -> None:
    """Raises ValueError if no command can run in namespaces here."""
    words = ["unshare", "--user", "--map-root-user", "--mount", "--pid", "--fork", "true"]
    if shutil.which(words[0]) is None:
        raise ValueError(f"{AGENT_KEY}='harbor' needs the program unshare (util-linux, Linux only)")
    done = subprocess.run(words, capture_output=True, text=True)
    if done.returncode:
        raise ValueError(
            f"{AGENT_KEY}='harbor': no namespaces for the commands of tasks "
            f"({done.stderr.strip()}); allow unprivileged user namespaces on this machine"
        )
