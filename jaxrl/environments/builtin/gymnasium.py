"""Gymnasium games with observations that print as text and actions that can be written as text."""

import importlib
import re
from typing import Any

from jaxrl.config.packages import install_advice
from jaxrl.environments.api import StepResult
from jaxrl.json_text import Message

_NUMBER = re.compile(r"-?\d+")


class TextGame:
    """gymnasium.make(id, **options): the model reads observations as text and writes an action.

    Discrete actions: the last number in the turn is the action. An invalid one gets an explanation,
    costs a turn and counts in env/invalid. Text actions: the full turn is the action. `imports`
    names a module that registers the game. The prompt's messages come first, as instructions.
    Raises ImportError without gymnasium, ValueError for other action spaces.
    """

    def __init__(self, id: str, *, imports: str = "", **options: Any):
        try:
            gym = importlib.import_module("gymnasium")
        except ImportError as error:
            raise ImportError(f"{error}; {install_advice('gymnasium')}") from error
        if imports:
            importlib.import_module(imports)
        self.game = gym.make(id, **options)
        self.actions = self.game.action_space
        if not isinstance(self.actions, gym.spaces.Discrete | gym.spaces.Text):
            raise ValueError(
                f"the action space of {id} is {self.actions}, which text cannot express; use a "
                "game with Discrete or Text actions"
            )
        self.discrete = isinstance(self.actions, gym.spaces.Discrete)

    def reset(self, prompt: dict[str, Any]) -> list[Message]:
        observation, _ = self.game.reset(seed=prompt["seed"])
        return [*prompt["messages"], {"role": "user", "content": str(observation)}]

    def step(self, completion: str) -> StepResult:
        action = completion
        if self.discrete:
            found = _NUMBER.findall(completion)
            first, last = int(self.actions.start), int(self.actions.start + self.actions.n) - 1
            if not found or not first <= int(found[-1]) <= last:
                hint = f"That is no action. Write a number from {first} to {last}."
                return hint, 0.0, False, {"invalid": 1}
            action = int(found[-1])
        observation, reward, terminated, truncated, _ = self.game.step(action)
        return str(observation), float(reward), bool(terminated or truncated)
