"""Games of Gymnasium whose observations can be read and whose actions can be written."""

import importlib
import re
from typing import Any

_NUMBER = re.compile(r"-?\d+")


class TextGame:
    """gymnasium.make(id, **options): the model reads each observation as text and writes an action.

    Of Discrete actions it is the last number that the model wrote; anything else that is no action is said so, costs a turn
    and counts as env/invalid. Of Text actions it is all that the model wrote. `imports` names a module that registers the
    game. The prompt's messages come first, as the instructions.
    """

    def __init__(self, id: str, *, imports: str = "", **options: Any):
        try:
            gym = importlib.import_module("gymnasium")
        except ImportError as error:
            raise ImportError(f"{error}; install the extra jaxrl[gymnasium]") from error
        if imports:
            importlib.import_module(imports)
        self.game = gym.make(id, **options)
        self.actions = self.game.action_space
        if not isinstance(self.actions, gym.spaces.Discrete | gym.spaces.Text):
            raise ValueError(
                f"the actions of {id} are {self.actions}, which no text says; they must be Discrete or Text"
            )
        self.discrete = isinstance(self.actions, gym.spaces.Discrete)

    def reset(self, prompt: dict[str, Any]) -> list[dict[str, str]]:
        observation, _ = self.game.reset(seed=prompt["seed"])
        return [*prompt["messages"], {"role": "user", "content": str(observation)}]

    def step(self, completion: str) -> tuple:
        action = completion
        if self.discrete:
            found = _NUMBER.findall(completion)
            first, last = int(self.actions.start), int(self.actions.start + self.actions.n) - 1
            if not found or not first <= int(found[-1]) <= last:
                words = f"That is no action. Write a number from {first} to {last}."
                return words, 0.0, False, {"invalid": 1}
            action = int(found[-1])
        observation, reward, ended, cut, _ = self.game.step(action)
        return str(observation), float(reward), bool(ended or cut)
