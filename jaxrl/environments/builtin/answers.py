"""Environments in which the model calls tools and then answers."""

from typing import Any

from jaxrl.environments.api import StepResult
from jaxrl.environments.judge import Judge
from jaxrl.json_text import Message


class Answers:
    """Base of environments whose tools do the work: a turn without a call is the answer.

    `reward` is a function as in reward.functions that scores the answer; "" leaves that to the
    reward functions of the run, which read the whole episode. `system` is a system message for
    prompts without one.
    """

    def __init__(self, *, reward: str, system: str):
        self.judge, self.system = Judge(reward) if reward else None, system

    def reset(self, prompt: dict[str, Any]) -> list[Message] | None:
        self.prompt = prompt
        if not self.system or any(m["role"] == "system" for m in prompt["messages"]):
            return None
        return [{"role": "system", "content": self.system}, *prompt["messages"]]

    def step(self, completion: str) -> StepResult:
        score = self.judge.score(self.prompt, completion) if self.judge else 0.0
        return "", score, True
