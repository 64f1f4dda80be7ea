"""An agent: a function that plays one episode with the model over an OpenAI-compatible endpoint.

async def agent(base_url, api_key, task):
    client = openai.AsyncOpenAI(base_url=base_url, api_key=api_key)
    reply = await client.chat.completions.create(model="policy", messages=task["messages"])
    return float(task["answer"] in reply.choices[0].message.content)
"""

import asyncio
import inspect
import math
import os
from collections.abc import Awaitable, Callable, Mapping
from typing import Any, SupportsFloat

from jaxrl.environments.api import AGENT_KEY, Turn
from jaxrl.rewards.calls import check_score

# (base URL, API key, task) -> reward, numbers by name, or None; or an awaitable of one of them
AgentFunction = Callable[[str, str, dict[str, Any]], Any]
LOOPBACK = "127.0.0.1"


class AgentProgram:
    """Calls the function for one episode in this process.

    OPENAI_BASE_URL, OPENAI_API_KEY, ANTHROPIC_BASE_URL and ANTHROPIC_API_KEY are set too, for
    programs that read them. Raises ValueError if the function cannot be called with
    (base_url, api_key, task).
    """

    def __init__(self, function: AgentFunction, spec: str):
        try:
            inspect.signature(function).bind("", "", {})
        except (TypeError, ValueError) as error:  # ValueError: unknown options
            raise ValueError(
                f"{AGENT_KEY} {spec!r} cannot be called with (base_url, api_key, task): {error}; "
                "write async def agent(base_url, api_key, task), and check the options after '?'"
            ) from error
        self._function = function

    def run(self, task: dict[str, Any]) -> Turn:
        """The result of an episode. Raises what the function raises.

        `task` has base_url, api_key and what the function gets as its task.
        """
        base_url, api_key = task.pop("base_url"), task.pop("api_key")
        os.environ |= {"OPENAI_BASE_URL": base_url, "OPENAI_API_KEY": api_key}
        root = base_url.removesuffix("/v1")  # Anthropic's clients append it
        os.environ |= {"ANTHROPIC_BASE_URL": root, "ANTHROPIC_API_KEY": api_key}
        for name in ("NO_PROXY", "no_proxy"):  # the endpoint is on this machine
            os.environ[name] = ",".join(filter(None, [os.environ.get(name), LOOPBACK]))
        value = self._function(base_url, api_key, task)
        if inspect.isawaitable(value):
            value = asyncio.run(_result(value))
        return agent_turn(value)


async def _result(value: Awaitable[Any]) -> Any:
    return await value


def agent_turn(value: Any) -> Turn:
    """Validates what an agent returned. Raises TypeError or ValueError."""
    numbers = value if isinstance(value, Mapping) else {} if value is None else {"reward": value}
    if not all(isinstance(n, SupportsFloat) and not isinstance(n, str) for n in numbers.values()):
        raise TypeError(
            f"the agent returned {value!r:.200}; return the reward, a dict of numbers with the key "
            "'reward', or None"
        )
    counts = {str(name): float(number) for name, number in numbers.items()}
    if not all(map(math.isfinite, counts.values())):
        raise ValueError(f"the agent returned {value!r:.200}; return finite numbers")
    rewarded, reward = "reward" in counts, counts.pop("reward", 0.0)
    check_score(reward, "the agent")
    return Turn([], reward, done=True, counts=counts, rewarded=rewarded)
