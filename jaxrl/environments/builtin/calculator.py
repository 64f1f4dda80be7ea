"""A calculator tool, called as <calc>12 * 34</calc> or by a tool call of the chat template."""

import ast
import operator
from collections.abc import Callable
from typing import Any

from jaxrl.environments.api import StepResult, ToolResult
from jaxrl.json_text import Message
from jaxrl.rewards.verifiers.extraction import last_between
from jaxrl.rewards.verifiers.last_number import last_number

_OPERATORS: dict[type, Callable[[Any, Any], Any]] = {
    ast.Add: operator.add,
    ast.Sub: operator.sub,
    ast.Mult: operator.mul,
    ast.Div: operator.truediv,
    ast.FloorDiv: operator.floordiv,
    ast.Mod: operator.mod,
}
_MAX_CHARS = 200  # of an expression
_INSTRUCTIONS = (
    "First write what is to be calculated, as in <calc>12 * 34</calc>. You are told its result. "
    "Then answer with the result alone."
)


def _example(question: str, call: str, result: str) -> list[Message]:
    texts = (question, f"<calc>{call}</calc>", f"<result>{result}</result>", result)
    roles = ("user", "assistant", "user", "assistant")
    return [{"role": role, "content": text} for role, text in zip(roles, texts, strict=True)]


_SOLVED = (
    ("What is 31 * 12?", "31 * 12", "372"),
    ("What is 45 + 17?", "45 + 17", "62"),
    ("What is 90 - 26?", "90 - 26", "64"),
)
_TOOL_INSTRUCTIONS = "Calculate with the tool first. Then answer with the result alone."


def _tool_example(i: int, question: str, expression: str, result: str) -> list[Message]:
    function = {"name": "calculate", "arguments": {"expression": expression}}
    call = {"id": f"sample{i:03d}", "type": "function", "function": function}
    return [
        {"role": "user", "content": question},
        {"role": "assistant", "content": "", "tool_calls": [call]},
        {"role": "tool", "content": result, "name": "calculate", "tool_call_id": call["id"]},
        {"role": "assistant", "content": result},
    ]


class Calculator:
    """Evaluates calls of the tool; a turn without a call is the answer and ends the episode.

    The reward is 1 if the last number of the answer is the prompt's answer, else 0. `call_reward`
    is added for the first valid call only, so further calls do not pay. `examples` puts up to three
    solved examples before the question: small models do not call the tool without them.
    """

    def __init__(
        self, *, call_reward: float = 0.0, examples: int = 0, instructions: str = _INSTRUCTIONS
    ):
        self.call_reward, self.instructions = call_reward, instructions
        self.examples = [message for solved in _SOLVED[:examples] for message in _example(*solved)]

    def reset(self, prompt: dict[str, Any]) -> list[Message]:
        self.answer = prompt["answer"]
        system = {"role": "system", "content": self.instructions}
        return [system, *self.examples, *prompt["messages"]]

    def step(self, completion: str) -> StepResult:
        call = last_between(completion, "<calc>", "</calc>")
        if call is None:
            return "", last_number("", completion, self.answer), True
        try:
            result, reward = evaluate(call), self.call_reward
            self.call_reward = 0.0
        except (ValueError, ArithmeticError, SyntaxError, RecursionError) as error:
            result, reward = f"error: {error}", 0.0
        return f"<result>{result}</result>", reward, False, {"calls": 1}


class CalculatorTool:
    """The same tool, offered through the chat template as the function `calculate`.

    Options, rewards and the answer are as in `Calculator`.
    """

    def __init__(
        self,
        *,
        call_reward: float = 0.0,
        examples: int = 0,
        instructions: str = _TOOL_INSTRUCTIONS,
    ):
        self.call_reward, self.instructions = call_reward, instructions
        solved = enumerate(_SOLVED[:examples])
        self.examples = [m for i, texts in solved for m in _tool_example(i, *texts)]
        self.tools = [self.calculate]

    def reset(self, prompt: dict[str, Any]) -> list[Message]:
        self.answer = prompt["answer"]
        system = {"role": "system", "content": self.instructions}
        return [system, *self.examples, *prompt["messages"]]

    def calculate(self, expression: str) -> ToolResult:
        """Evaluate an arithmetic expression.

        Args:
            expression: For example 12 * (3 + 4).
        """
        result, reward = evaluate(expression), self.call_reward
        self.call_reward = 0.0
        return ToolResult(result, reward)

    def step(self, completion: str) -> StepResult:
        return "", last_number("", completion, self.answer), True


def evaluate(expression: str) -> str:
    """The value of +, -, *, /, //, % and parentheses over numbers. Raises ValueError otherwise."""
    if len(expression) > _MAX_CHARS:
        raise ValueError(f"an expression may have {_MAX_CHARS} characters")
    value = _value(ast.parse(expression.strip(), mode="eval").body)
    return str(int(value)) if value == int(value) else f"{value:.10g}"


def _value(node: ast.expr) -> int | float:
    value = node.value if isinstance(node, ast.Constant) else None
    if isinstance(value, int | float) and not isinstance(value, bool):
        return value
    if isinstance(node, ast.UnaryOp) and isinstance(node.op, ast.USub):
        return -_value(node.operand)
    if isinstance(node, ast.BinOp) and type(node.op) in _OPERATORS:
        return _OPERATORS[type(node.op)](_value(node.left), _value(node.right))
    raise ValueError("only numbers, + - * / // % and brackets")
