"""The interface of an environment: a tool, a game or a simulated user. One object is one episode.

class Echo:
    def reset(self, prompt):
        return prompt["messages"]

    def step(self, completion):
        done = "done" in completion
        return f"You wrote {completion!r}. Continue.", float(done), done
"""

import dataclasses
from collections.abc import Callable
from typing import Any, Protocol

Message = dict[str, str]  # role, content
Observation = str | list[Message]
Number = float | int
# (observation, reward, done) or (observation, reward, done, counts)
StepResult = tuple[Observation, Number, bool] | tuple[Observation, Number, bool, dict[str, Number]]

KEY, AGENT_KEY = "env.name", "env.agent"
BUILT_IN = {
    "calculator": "jaxrl.environments.calculator:Calculator",
    "guess_number": "jaxrl.environments.guess_number:GuessNumber",
    "gymnasium": "jaxrl.environments.gymnasium:TextGame",
    "retry": "jaxrl.environments.retry:Retry",
}


class Environment(Protocol):
    """One episode. Each gets a new object in a separate process, with the options of env.name.

    One more object is created at startup: it reports wrong options early, and every episode shares
    what it imports or loads.
    """

    def reset(self, prompt: dict[str, Any]) -> list[Message] | None:
        """The conversation that the model completes first; None = the prompt's messages.

        `prompt` has messages, answer, source and extra, as in data.train, and a seed. The seed is
        the same for all samples of a prompt in a step and changes every step. Take all randomness
        from it, so that a resumed run repeats the same episodes.
        """
        ...

    def step(self, completion: str) -> StepResult:
        """(observation, reward, done) or (observation, reward, done, counts) after a model turn.

        The observation is what the model reads next: messages, or text, which becomes one user
        message. It is ignored if the episode is done. Rewards are summed over the episode, and so
        are the numbers in `counts`: {"calls": 1} is logged as env/calls.
        """
        ...


@dataclasses.dataclass(frozen=True)
class Turn:
    """The validated result of `reset` or `step`."""

    messages: list[Message] | None = None  # None after reset: the prompt's messages
    reward: float = 0.0
    done: bool = False
    counts: dict[str, float] = dataclasses.field(default_factory=dict)
    error: str = ""  # why there is no result
    rewarded: bool = True  # False: an agent ended without returning a reward


EnvironmentFactory = Callable[[], Environment]
