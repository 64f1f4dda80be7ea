"""Plain Python functions as tools, with an answer that a reward function judges."""

from collections.abc import Callable
from typing import Any

from jaxrl.environments.api import KEY, Message, StepResult
from jaxrl.environments.judge import Judge
from jaxrl.workers.plugins import load_plugin


class Functions:
    """Offers functions to the model; a turn without a call is the answer and ends the episode.

    `names` are import paths, "package.module:function" or "path/to/file.py:function", joined by
    commas. `reward` is a function as in reward.functions that scores the answer; "" leaves that to
    the reward functions of the run, which read the whole episode. `system` is a system message for
    prompts without one.
    """

    def __init__(self, names: str, *, reward: str = "", system: str = ""):
        self.tools: list[Callable[..., Any]] = [
            load_plugin(name, built_in={}, key=KEY) for name in names.split(",") if name
        ]
        if not self.tools:
            raise ValueError("names is empty; set it to the import paths of functions")
        self.judge, self.system = Judge(reward) if reward else None, system

    def reset(self, prompt: dict[str, Any]) -> list[Message] | None:
        self.prompt = prompt
        return with_system(prompt["messages"], self.system)

    def step(self, completion: str) -> StepResult:
        score = self.judge.score(self.prompt, completion) if self.judge else 0.0
        return "", score, True


def with_system(messages: list[Message], system: str) -> list[Message] | None:
    """The messages after a system message; None, the prompt's, if none is to be added."""
    if not system or any(m["role"] == "system" for m in messages):
        return None
    return [{"role": "system", "content": system}, *messages]
