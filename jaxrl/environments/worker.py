"""The process that starts episodes: python -m jaxrl.environments.worker FD.

It imports the environment once and forks one process per episode. A fork takes a millisecond and
shares what was imported. Neither process imports JAX, and each may be killed at any time: whatever
an episode does, at worst its own process ends.
"""

import contextlib
import functools
import math
import os
import signal
import sys
from collections.abc import Callable
from typing import Any, NoReturn, SupportsFloat

from jaxrl.config.plugins import load_plugin
from jaxrl.config.user_code import error_text, exception_text, user_frames
from jaxrl.data.images.references import encoded_url, mark_parts
from jaxrl.environments.agent import AgentProgram
from jaxrl.environments.api import (
    AGENTS,
    BUILT_IN,
    COMMAND_KEY,
    KEY,
    VERIFIERS_KEY,
    Environment,
    EnvironmentFactory,
    StepLimits,
    Turn,
)
from jaxrl.environments.command import CommandAgent
from jaxrl.environments.messages import write_turn
from jaxrl.environments.tools import environment_tools, offered_schemas, run_calls
from jaxrl.environments.verifiers import VerifiersAgent
from jaxrl.json_text import Message
from jaxrl.rewards.calls import check_score
from jaxrl.subprocesses.channel import WorkerChannel
from jaxrl.subprocesses.process import connect, time_limit
from jaxrl.tool_calls.calls import ParsedTurn
from jaxrl.tool_calls.chat_message import as_message

RunProgram = Callable[[WorkerChannel], NoReturn]


def main(fd: int) -> None:
    """Loads the environment, reports {"tools"} or {"error"}, then starts and ends episodes.

    ("start",), followed by the episode's socket, is answered with {"pid"} or {"error"}.
    ("end", pid) kills that process and its children. Returns when the parent closes the socket.
    """
    channel = connect(fd)
    running: set[int] = set()
    try:
        key, spec, limits = channel.receive()
        try:
            run, tools = load_program(key, spec, limits)
        except BaseException as error:
            text = str(error) if isinstance(error, ValueError) else error_text(error)
            channel.send({"error": text})
            return
        sys.stdout.flush()  # otherwise every episode would print the buffered output
        channel.send({"tools": tools})
        while True:
            serve_request(channel, run, running)
    except (EOFError, OSError):  # the parent closed the socket or is gone
        return
    finally:
        for pid in running:
            kill(pid)


def load_program(
    key: str, spec: str, limits: StepLimits
) -> tuple[RunProgram, list[dict[str, Any]]]:
    """(what an episode's process runs, the tools that the environment offers)."""
    if key != KEY:
        kinds = {COMMAND_KEY: CommandAgent, VERIFIERS_KEY: VerifiersAgent}
        agent = kinds[key](spec) if key in kinds else load_plugin(spec, built_in=AGENTS, key=key)
        if key not in kinds and spec.partition("?")[0] in AGENTS:
            agent = agent()
        return functools.partial(run_agent, agent=AgentProgram(agent, spec)), []
    factory = load_plugin(spec, built_in=BUILT_IN, key=key)
    tools = check_factory(factory, spec)
    return functools.partial(run_episode, factory=factory, limits=limits), tools


def serve_request(channel: WorkerChannel, run: RunProgram, running: set[int]) -> None:
    """Starts or ends an episode, as the parent's next message says."""
    verb, *arguments = channel.receive()
    if verb == "end":
        if arguments[0] in running:  # else a fork server before this one started it
            running.remove(arguments[0])
            kill(arguments[0])
        return
    episode = WorkerChannel(channel.receive_socket())
    try:
        pid = os.fork()
    except OSError as error:
        episode.close()
        channel.send({"error": f"an episode's process cannot be started: {error}"})
        return
    if pid == 0:
        channel.close()
        run(episode)
    episode.close()
    running.add(pid)
    # The process leads a group before anybody knows it: killing the fork server's group must not
    # end it.
    with contextlib.suppress(OSError):  # it has ended, or has done so itself
        os.setpgid(pid, pid)
    channel.send({"pid": pid})


def check_factory(factory: EnvironmentFactory, name: str) -> list[dict[str, Any]]:
    """Creates an environment and discards it. Returns the schemas of its tools.

    Raises ValueError if it cannot be created or a tool is invalid.
    """
    try:
        return offered_schemas(environment_tools(factory()), [])
    except Exception as error:
        raise ValueError(
            f"{KEY} {name!r} cannot be created ({exception_text(error)}); change its "
            f"options{user_frames(error)}"
        ) from error


def kill(pid: int) -> None:
    """Kills an episode's process and its children.

    The id cannot have been reused: only this function waits for the process.
    """
    with contextlib.suppress(ProcessLookupError, PermissionError):  # it has no process group yet
        os.killpg(pid, signal.SIGKILL)
    os.kill(pid, signal.SIGKILL)
    os.waitpid(pid, 0)


def run_agent(channel: WorkerChannel, agent: AgentProgram) -> NoReturn:
    """Runs an agent with the task that the socket sends, sends its result, and ends the process.

    The parent limits its time.
    """
    os.setpgid(0, 0)
    with contextlib.suppress(EOFError, OSError):
        task = channel.receive()
        answer(channel, turn_or_error(lambda: agent.run(task)))
    sys.stdout.flush()
    os._exit(0)


def run_episode(
    channel: WorkerChannel, factory: EnvironmentFactory, limits: StepLimits
) -> NoReturn:
    """Answers reset and steps of one episode until the socket closes, then ends the process."""
    os.setpgid(0, 0)
    episode = RunningEpisode(factory, limits)
    try:
        while True:
            argument = channel.receive()
            with time_limit(limits.seconds(argument)):
                turn = turn_or_error(functools.partial(episode.handle, argument))
            answer(channel, turn)
    except (EOFError, OSError):
        pass
    finally:
        sys.stdout.flush()
        os._exit(0)


def answer(channel: WorkerChannel, turn: Turn) -> None:
    """Sends the turn, or an error if it is too long."""
    try:
        channel.send(write_turn(turn))
    except ValueError as error:
        channel.send(write_turn(Turn(error=error_text(error))))


class RunningEpisode:
    """The environment of an episode and the tools that it offers. All methods may raise."""

    def __init__(self, factory: EnvironmentFactory, limits: StepLimits):
        self.factory, self.limits = factory, limits
        self.environment: Environment | None = None

    def handle(self, argument: dict[str, Any] | str | ParsedTurn) -> Turn:
        """The result of a reset with a prompt, of a step, or of the tool calls of a turn."""
        if isinstance(argument, dict):
            return self.reset(argument)
        assert self.environment is not None  # a reset that fails ends the episode
        if isinstance(argument, ParsedTurn):
            return checked_step(run_calls(argument, self.tools, self.offered, self.limits))
        return checked_step(self.environment.step(argument))

    def reset(self, prompt: dict[str, Any]) -> Turn:
        self.environment = self.factory()
        messages = self.environment.reset(prompt)
        self.tools = environment_tools(self.environment)
        self.offered = offered_schemas(self.tools, prompt.get("tools", []))
        if messages is None:
            return Turn(tools=self.offered)
        checked, images = checked_messages(messages, "reset")
        return Turn(checked, tools=self.offered, images=images)


def turn_or_error(call: Callable[[], Turn]) -> Turn:
    try:
        return call()
    except BaseException as error:  # the user's code may raise anything, SystemExit too
        return Turn(error=error_text(error))


def checked_step(value: Any) -> Turn:
    """Validates what step returned. Raises TypeError or ValueError."""
    if not isinstance(value, tuple) or len(value) not in (3, 4):
        raise TypeError(
            f"step returned {value!r}; return (observation, reward, done) or "
            "(observation, reward, done, counts)"
        )
    observation, reward, done, counts = (*value, {})[:4]
    if not isinstance(reward, SupportsFloat):
        raise ValueError(f"step returned the reward {reward!r}; return a finite number")
    check_score(float(reward), "step")
    if not isinstance(done, bool):
        raise TypeError(f"step returned done={done!r}; return True or False")
    numbers = {str(k): float(v) for k, v in dict(counts).items()}
    if not all(map(math.isfinite, numbers.values())):
        raise ValueError(f"step returned the counts {counts!r}; return finite numbers")
    messages, images = ([], []) if done else checked_messages(observation, "step")
    return Turn(messages, float(reward), done, numbers, images=images)


def checked_messages(value: Any, verb: str) -> tuple[list[Message], list[str]]:
    """(the messages that `verb` returned with IMAGE at the places of images, these images).

    A string becomes one user message. Raises TypeError or ValueError.
    """
    if isinstance(value, str):
        value = [{"role": "user", "content": value}]
    marked, images = mark_parts(list(value) if isinstance(value, list | tuple) else [], verb)
    messages = [as_message(m) for m in marked]
    valid = [m for m in messages if m is not None]
    if not valid or len(valid) < len(messages):
        raise TypeError(
            f"{verb} returned {value!r:.200}; return a string or a list of messages "
            "{role, content}"
        )
    return valid, [one if isinstance(one, str) else encoded_url(one) for one in images]


if __name__ == "__main__":
    main(int(sys.argv[1]))
