"""Options of the rewards `judge` and `judge_pairs`, which the keys of reward.judge set."""

import dataclasses
import functools
import inspect
from collections.abc import Awaitable, Callable
from typing import Any

from jaxrl.rewards.model_judge.verdicts import JudgeServer


@dataclasses.dataclass(frozen=True)
class JudgeOptions:
    """The texts that a judge reads, how its requests are sent, and the price of its tokens."""

    url: str
    model: str
    rubric: str
    reference: str = ""
    thinking: bool = False
    explain: bool = True
    temperature: float = 0.0
    max_tokens: int = 1024
    request_s: float = 60.0
    attempts: int = 3
    requests: int = 16
    api_key_env: str = ""
    cache: str = ""  # folder; "" = none
    cache_name: str = ""  # of the server in the cache; "" = url
    prompt_price: float = 0.0
    completion_price: float = 0.0

    @property
    def server(self) -> JudgeServer:
        names = [field.name for field in dataclasses.fields(JudgeServer)]
        return JudgeServer(**{name: getattr(self, name) for name in names})

    @property
    def request(self) -> dict[str, Any]:
        """The arguments of `request_body` and `pair_body` that are options."""
        names = ("model", "explain", "temperature", "max_tokens")
        return {name: getattr(self, name) for name in names}


@dataclasses.dataclass(frozen=True)
class PairOptions(JudgeOptions):
    """Those of comparisons, too."""

    opponents: int = 0
    against: str = "group"
    swap: bool = True


def takes_options[R](
    schema: type[JudgeOptions],
) -> Callable[[Callable[..., Awaitable[R]]], Callable[..., Awaitable[R]]]:
    """Makes an async function with one argument `options` a function with the schema's fields.

    They are keyword-only arguments, and its signature has them: the options after the "?" of a
    reward are checked against it.
    """
    declared = inspect.signature(schema).parameters

    def decorate(function: Callable[..., Awaitable[R]]) -> Callable[..., Awaitable[R]]:
        @functools.wraps(function)
        async def call(*arguments: Any, **keywords: Any) -> R:
            own = {name: keywords.pop(name) for name in declared if name in keywords}
            return await function(*arguments, **keywords, options=schema(**own))

        signature = inspect.signature(function)
        others = [p for name, p in signature.parameters.items() if name != "options"]
        own = [p.replace(kind=p.KEYWORD_ONLY) for p in declared.values()]
        del vars(call)["__wrapped__"]  # whose source has other arguments
        vars(call)["__signature__"] = signature.replace(parameters=[*others, *own])
        return call

    return decorate
