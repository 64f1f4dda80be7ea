"""The process that makes environments: python -m jaxrl.environments.worker FD.

It imports the environment once and forks a process for every episode, which costs a millisecond and shares what was
imported. Neither imports JAX; each may be killed at any moment, and whatever an episode does, at worst its own process ends.
"""

import contextlib
import math
import os
import signal
import sys
from collections.abc import Callable
from multiprocessing import reduction
from multiprocessing.connection import Connection
from typing import Any, SupportsFloat

from jaxrl.environments.api import BUILT_IN, Environment, Make, Message, Turn
from jaxrl.workers.functions import load_function

_GRACE_S = 5.0  # the parent's time limit comes first; this one ends an episode that lost its parent
_MAX_ERROR = 500  # characters


def main(fd: int) -> None:
    """Loads the environment, reports "ready" or the error, then starts and ends episodes until the socket closes.

    ("start",) with the episode's socket is answered with its process id; ("end", id) kills it and its children.
    """
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    connection = Connection(fd)
    alive: set[int] = set()
    try:
        name, timeout_s = connection.recv()
        try:
            make = load_function(name, BUILT_IN, "env.name", of_others=())
            make_first(make, name)
        except BaseException as error:
            connection.send(str(error) or type(error).__name__)
            return
        sys.stdout.flush()  # what waits there would be printed by every episode
        connection.send("ready")
        while True:
            verb, *arguments = connection.recv()
            if verb == "end":
                if arguments[0] in alive:  # else an earlier process like this one made it
                    alive.remove(arguments[0])
                    end(arguments[0])
                continue
            own = Connection(reduction.recv_handle(connection))
            if (pid := os.fork()) == 0:
                connection.close()
                episode(own, make, timeout_s)
            own.close()
            alive.add(pid)
            connection.send(pid)
    except (EOFError, OSError):  # the parent closed the socket or is gone
        return
    finally:
        for pid in alive:
            end(pid)


def make_first(make: Make, name: str) -> None:
    """Makes an environment that is not used. Raises ValueError where that fails."""
    try:
        make()
    except Exception as error:
        raise ValueError(
            f"env.name {name!r} cannot be made ({type(error).__name__}: {error}); change its options"
        ) from error


def end(pid: int) -> None:
    """Kills an episode's process and its children. It cannot be another's id: it is waited for only here."""
    with contextlib.suppress(ProcessLookupError, PermissionError):  # it has no group of its own yet
        os.killpg(pid, signal.SIGKILL)
    os.kill(pid, signal.SIGKILL)
    os.waitpid(pid, 0)


def episode(connection: Connection, make: Make, timeout_s: float) -> None:
    """Answers reset and steps of one episode until the socket closes, then ends the process."""
    os.setsid()
    environment = None
    try:
        while True:
            argument = connection.recv()
            # SIGALRM's default action ends the process even inside C code
            signal.setitimer(signal.ITIMER_REAL, timeout_s + _GRACE_S)
            if environment is None:
                environment, turn = begin(make, argument)
            else:
                turn = answer(lambda act=environment.step, said=argument: stepped(act(said)))
            signal.setitimer(signal.ITIMER_REAL, 0)
            connection.send(turn)
    except (EOFError, OSError):
        pass
    finally:
        sys.stdout.flush()
        os._exit(0)


def begin(make: Make, prompt: dict[str, Any]) -> tuple[Environment | None, Turn]:
    """A new environment and what its reset answered."""
    made: list[Environment] = []

    def reset() -> Turn:
        made.append(make())
        said = made[0].reset(prompt)
        return Turn(messages=None if said is None else checked_messages(said, "reset"))

    turn = answer(reset)
    return (made[0] if made else None), turn


def answer(call: Callable[[], Turn]) -> Turn:
    try:
        return call()
    except BaseException as error:  # the user's code may raise anything, SystemExit too
        return Turn(error=f"{type(error).__name__}: {error}"[:_MAX_ERROR])


def stepped(value: Any) -> Turn:
    """What step returned, checked. Raises TypeError or ValueError."""
    if not isinstance(value, tuple) or len(value) not in (3, 4):
        raise TypeError(f"step returned {value!r}; return (observation, reward, done)")
    observation, reward, done, counts = (*value, {})[:4]
    if not isinstance(reward, SupportsFloat) or not math.isfinite(reward):
        raise ValueError(f"step returned the reward {reward!r}; return a finite number")
    if not isinstance(done, bool):
        raise TypeError(f"step returned done={done!r}; return True or False")
    numbers = {str(k): float(v) for k, v in dict(counts).items()}
    if not all(map(math.isfinite, numbers.values())):
        raise ValueError(f"step returned the counts {counts!r}; return finite numbers")
    messages = [] if done else checked_messages(observation, "step")
    return Turn(messages, float(reward), done, numbers)


def checked_messages(value: Any, verb: str) -> list[Message]:
    if isinstance(value, str):
        return [{"role": "user", "content": value}]
    texts = isinstance(value, list | tuple) and all(
        isinstance(m, dict) and isinstance(m.get("role"), str) and isinstance(m.get("content"), str)
        for m in value
    )
    if not texts or not value:
        raise TypeError(
            f"{verb} returned {value!r:.200}; return a text or a list of messages {{role, content}}"
        )
    return [{"role": m["role"], "content": m["content"]} for m in value]


if __name__ == "__main__":
    main(int(sys.argv[1]))
