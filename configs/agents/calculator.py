"""An agent with a calculator: the model writes <calc>12 * 34</calc> and reads its result.

It needs the package openai. jaxrl.environments.builtin.calculator is the same task as an
environment.
"""

from typing import Any

import openai
import openai.resources.chat  # openai imports it at the first use: in the process of every episode

from jaxrl.environments.builtin.calculator import Calculator, evaluate
from jaxrl.rewards.verifiers.last_number import last_number

MAX_TURNS = 3


async def agent(
    base_url: str, api_key: str, task: dict[str, Any], *, call_reward: float = 0.0
) -> dict[str, float]:
    """Plays one episode; returns its reward, whether it is `right`, and the number of calls.

    The reward is 1 if the last number of the answer is right, and `call_reward` more if a call
    could be evaluated.
    """
    client = openai.AsyncOpenAI(base_url=base_url, api_key=api_key)
    # Instructions, one example and the question; `Any`: openai has a type per role.
    messages: list[Any] = [*Calculator(examples=1).reset(task)]
    extra, right, calls = 0.0, 0.0, 0
    for _ in range(MAX_TURNS):
        reply = await client.chat.completions.create(
            model="policy", messages=messages, stop="</calc>"
        )
        text = reply.choices[0].message.content or ""
        messages.append({"role": "assistant", "content": text})
        _, call, expression = text.partition("<calc>")
        if not call:  # the answer
            right = last_number("", text, task["answer"])
            break
        try:
            result, extra = evaluate(expression), call_reward
        except (ValueError, ArithmeticError, SyntaxError, RecursionError) as error:
            result = f"error: {error}"
        calls += 1
        messages.append({"role": "user", "content": f"<result>{result}</result>"})
    return {"reward": right + extra, "right": right, "calls": calls}
