"""What a model acts in: a tool, a game, a user. One object is one episode.

class Echo:
    def reset(self, prompt):
        return prompt["messages"]

    def step(self, completion):
        return f"You said {completion!r}. Go on.", float("done" in completion), "done" in completion
"""

import dataclasses
from collections.abc import Callable
from typing import Any, Protocol

Message = dict[str, str]  # role, content

BUILT_IN = {
    "calculator": "jaxrl.environments.calculator:Calculator",
    "guess_number": "jaxrl.environments.guess_number:GuessNumber",
    "gymnasium": "jaxrl.environments.gymnasium:TextGame",
    "retry": "jaxrl.environments.retry:Retry",
}


class Environment(Protocol):
    """Made anew for every episode, in a process of its own, with the options behind the '?' of env.name. One more is
    made at the start: a wrong option is said then, and what it imports or loads is there for all."""

    def reset(self, prompt: dict[str, Any]) -> list[Message] | None:
        """The conversation that the model answers first; None = the prompt's own.

        `prompt` has messages, answer, source and extra, as data.train gives them, and a seed: the same for all
        samples of a prompt in a step, and another in the next. Chance must come from it alone, so that a
        resumed run sees the same.
        """
        ...

    def step(self, completion: str) -> tuple:
        """(observation, reward, done), or (observation, reward, done, counts), after a turn of the model.

        The observation is what the model reads next: messages, or a text, which is one message of the user.
        It does not count where the episode is done. Rewards are added up over the episode, and so are the
        numbers in `counts`, {"calls": 1}, which are logged as env/calls.
        """
        ...


@dataclasses.dataclass(frozen=True)
class Turn:
    """What an environment answered, checked."""

    messages: list[Message] | None = None  # None: of reset, the prompt's own
    reward: float = 0.0
    done: bool = False
    counts: dict[str, float] = dataclasses.field(default_factory=dict)
    error: str = ""  # why there is no answer


Make = Callable[[], Environment]
