"""The interface of an environment: tools, a game or a simulated user. One object is one episode.

class Echo:
    def reset(self, prompt):
        return prompt["messages"]

    def step(self, completion):
        done = "done" in completion
        return f"You wrote {completion!r}. Continue.", float(done), done
"""

import dataclasses
from collections.abc import Callable, Sequence
from typing import Any, Protocol, runtime_checkable

from jaxrl.json_text import Message
from jaxrl.tool_calls.calls import ParsedTurn

Observation = str | list[Message]
Number = float | int
# (observation, reward, done) or (observation, reward, done, counts)
StepResult = tuple[Observation, Number, bool] | tuple[Observation, Number, bool, dict[str, Number]]

KEY, AGENT_KEY, COMMAND_KEY = "env.name", "env.agent", "env.command"
VERIFIERS_KEY = "env.verifiers"
# Codes of the endpoint's errors that end an episode without a failure
CONTEXT_CODE, TURNS_CODE = "context_length_exceeded", "too_many_turns"
BUILT_IN = {
    "calculator": "jaxrl.environments.builtin.calculator:Calculator",
    "calculator_tool": "jaxrl.environments.builtin.calculator:CalculatorTool",
    "functions": "jaxrl.environments.builtin.functions:Functions",
    "guess_number": "jaxrl.environments.builtin.guess_number:GuessNumber",
    "gymnasium": "jaxrl.environments.builtin.gymnasium:TextGame",
    "mcp": "jaxrl.environments.builtin.mcp:McpTools",
    "openenv": "jaxrl.environments.builtin.openenv:OpenEnv",
    "retry": "jaxrl.environments.builtin.retry:Retry",
}
AGENTS = {  # classes, whose objects are agents
    "harbor": "jaxrl.environments.agents.harbor:HarborAgent",
    "nemo_gym": "jaxrl.environments.agents.nemo_gym:NemoGymAgent",
}


@runtime_checkable
class Environment(Protocol):
    """One episode. Each gets a new object in a separate process, with the options of env.name.

    One more object is created at startup: it reports wrong options early, and every episode shares
    what it imports or loads.
    """

    def reset(self, prompt: dict[str, Any]) -> list[Message] | None:
        """The conversation that the model completes first; None = the prompt's messages.

        `prompt` has messages, answer, source, extra and tools, as in data.train, and a seed. It is
        the same for all samples of a prompt in a step and changes every step. Take all randomness
        from it, so that a resumed run repeats the same episodes. A message with images has a list
        of OpenAI's content parts as its content, with the images as data: URLs.
        """
        ...

    def step(self, completion: str) -> StepResult:
        """(observation, reward, done) or (observation, reward, done, counts) after a model turn.

        The observation is what the model reads next: messages, or text, which becomes one user
        message. The content of a message is text, or a list of content parts of text and images, as
        in data.train. It is ignored if the episode is done. Rewards are summed over the episode,
        and so are the numbers in `counts`: {"calls": 1} is logged as env/calls.
        """
        ...


@dataclasses.dataclass(frozen=True)
class Tool:
    """A tool with another schema than its function's."""

    schema: dict[str, Any]  # {"type": "function", "function": {...}}, as in OpenAI's API
    run: Callable[..., Any]  # called with the arguments by name


@dataclasses.dataclass(frozen=True)
class ToolResult:
    """A tool's result with more than text or another JSON value."""

    content: Any  # text, content parts with images, or another JSON value
    reward: Number = 0.0
    done: bool = False
    counts: dict[str, Number] = dataclasses.field(default_factory=dict)


@runtime_checkable
class ToolEnvironment(Protocol):
    """An environment whose tools the model calls through the chat template.

    The tools of `reset`'s conversation are rendered by the template. A turn with tool calls runs
    them, and their results are the next observation; `step` gets the turns without a call. A tool
    is a function or method with type hints and a docstring with "Args:", a schema with the name of
    a method of the environment, or a `Tool`.
    """

    @property
    def tools(self) -> Sequence[Callable[..., Any] | dict[str, Any] | Tool]: ...


@dataclasses.dataclass(frozen=True)
class Turn:
    """The validated result of `reset` or `step`."""

    messages: list[Message] | None = None  # None after reset: the prompt's messages
    reward: float = 0.0
    done: bool = False
    counts: dict[str, float] = dataclasses.field(default_factory=dict)
    error: str = ""  # why there is no result
    rewarded: bool = True  # False: an agent ended without returning a reward
    tools: list[dict[str, Any]] = dataclasses.field(default_factory=list)  # after reset: offered
    images: list[str] = dataclasses.field(default_factory=list)  # of the messages: files, data URLs


@dataclasses.dataclass(frozen=True)
class StepLimits:
    """Limits of resets and steps."""

    timeout_s: float  # of a reset or step, without its tool calls
    tool_timeout_s: float  # of a tool call
    calls_per_turn: int
    result_chars: int  # of a tool's result

    def seconds(self, argument: dict[str, Any] | str | ParsedTurn) -> float:
        """Seconds for what an episode's process is sent: a prompt, or a turn of the model."""
        n_calls = len(argument.attempts) if isinstance(argument, ParsedTurn) else 0
        return self.timeout_s + min(n_calls, self.calls_per_turn) * self.tool_timeout_s


EnvironmentFactory = Callable[[], Environment]
