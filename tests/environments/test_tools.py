"""Tests of jaxrl/environments: tools.py, functions.py and the tools of calculator.py."""

import time

import pytest

from jaxrl.config.keys import EnvConfig
from jaxrl.environments import tools as tools_module
from jaxrl.environments.api import StepLimits, Tool
from jaxrl.environments.builtin.calculator import CalculatorTool
from jaxrl.environments.builtin.functions import Functions
from jaxrl.environments.pool import EnvironmentPool
from jaxrl.environments.tools import COUNTS, run_calls
from jaxrl.tool_calls.calls import MalformedCall, ParsedTurn, ToolCall

SHOP = '''
import asyncio
import json
import sys
import time

from jaxrl.environments.api import Tool, ToolResult

LOOKUP = {
    "type": "function",
    "function": {
        "name": "lookup",
        "parameters": {
            "type": "object",
            "properties": {"item": {"type": "string"}},
            "required": ["item"],
        },
    },
}
FREE = {"name": "free", "parameters": {"type": "object", "additionalProperties": True}}


def hours() -> str:
    """Opening hours."""
    return "9 to 5"


class Shop:
    """Tools of every kind, and some that misbehave."""

    def __init__(self):
        self.n_bought = 0
        self.tools = [hours, self.buy, LOOKUP, self.misbehave, Tool(FREE, self.anything)]

    def reset(self, prompt):
        return None

    async def buy(self, item: str, count: int = 1) -> ToolResult:
        """Buy an item.

        Args:
            item: Its name.
            count: How many.
        """
        await asyncio.sleep(0)
        self.n_bought += count
        return ToolResult({"bought": self.n_bought}, 0.25, self.n_bought > 9, {"bought": count})

    def lookup(self, item):
        return 3.5

    def anything(self, **arguments):
        return sorted(arguments)

    def misbehave(self, how: str):
        """Misbehave.

        Args:
            how: In which way.
        """
        if how == "raise":
            raise KeyError("cheese")
        if how == "exit":
            sys.exit("bye")
        if how == "hang":
            while True:
                try:
                    time.sleep(1000)
                except Exception:
                    pass
        if how == "hang in C":
            9 ** 9 ** 9
        return {"long": "x" * 99, "surrogate": chr(0xDCFF), "object": Shop, "none": None}[how]

    def step(self, completion):
        return f"You wrote {completion}.", 0.0, False


class NoMethod(Shop):
    def __init__(self):
        self.tools = [{"name": "fly"}]


class Twice(Shop):
    def __init__(self):
        self.tools = [hours, hours]


class Undescribed(Shop):
    def __init__(self):
        self.tools = [lambda x: x]


def add(a: int, b: int) -> int:
    """Add two integers.

    Args:
        a: The first.
        b: The second.
    """
    return a + b
'''


@pytest.fixture(scope="module")
def shop(tmp_path_factory):
    path = tmp_path_factory.mktemp("tools") / "shop.py"
    path.write_text(SHOP)
    return path


@pytest.fixture(scope="module")
def pool(shop):
    cfg = EnvConfig(
        name=f"{shop}:Shop",
        timeout_s=20.0,
        tool_timeout_s=0.5,
        max_calls_per_turn=4,
        max_result_chars=20,
    )
    with EnvironmentPool(cfg) as pool:
        yield pool


def collect(pool, episode):
    deadline = time.monotonic() + 60
    while time.monotonic() < deadline:
        for number, turn in pool.collect(0.1):
            assert number == episode
            return turn
    raise AssertionError("no answer")


def start(pool, **fields):
    prompt = {"messages": [], "answer": "5", "source": "s", "extra": {}, "tools": [], "seed": 7}
    episode = pool.start(prompt | fields)
    return episode, collect(pool, episode)


def call(pool, episode, *attempts):
    """The result of a turn with the attempts: (name, arguments), or the text of a malformed one."""
    found = [
        MalformedCall(attempt, "not valid JSON", f"id{i}")
        if isinstance(attempt, str)
        else ToolCall(*attempt, f"id{i}")
        for i, attempt in enumerate(attempts)
    ]
    pool.step(episode, ParsedTurn("", tuple(found)))
    return collect(pool, episode)


def test_tools_of_every_kind_are_offered_and_run_in_order(pool):
    names = [tool["function"]["name"] for tool in pool.tools]
    assert names == ["hours", "buy", "lookup", "misbehave", "free"]
    episode, first = start(pool)
    assert first.tools == pool.tools and first.messages is None
    turn = call(
        pool,
        episode,
        ("hours", {}),
        ("buy", {"item": "tea", "count": 2}),
        ("lookup", {"item": "tea"}),
        ("free", {"b": 1, "a": 2}),
    )
    assert turn.messages == [
        {"role": "tool", "content": text, "tool_call_id": f"id{i}", "name": name}
        for i, (name, text) in enumerate(
            [
                ("hours", "9 to 5"),
                ("buy", '{"bought": 2}'),
                ("lookup", "3.5"),
                ("free", '["a", "b"]'),
            ]
        )
    ]
    assert (turn.reward, turn.done, turn.error) == (0.25, False, "")
    assert turn.counts == dict.fromkeys(COUNTS, 0.0) | {"calls": 4.0, "bought": 2.0}
    pool.step(episode, "hello")  # a turn without a call
    assert collect(pool, episode).messages == [{"role": "user", "content": "You wrote hello."}]
    assert call(pool, episode, ("buy", {"item": "tea", "count": 8})).done  # the state is kept


@pytest.mark.parametrize(
    ("attempt", "text", "count"),
    [
        ("{", "error: malformed tool call: not valid JSON", "malformed_calls"),
        (("fly", {}), "there is no tool 'fly'; the tools are hours, buy, lookup", "unknown_tools"),
        (("buy", {}), "wrong arguments of buy: 'item' is a required", "invalid_arguments"),
        (("buy", {"item": "x", "count": "2"}), "count: '2' is not of type", "invalid_arguments"),
        (("misbehave", {"how": "raise"}), "error: KeyError: 'cheese'", "tool_errors"),
        (("misbehave", {"how": "exit"}), "error: SystemExit: bye", "tool_errors"),
        (("misbehave", {"how": "hang"}), "took more than 0.5 s and was stopped", "tool_timeouts"),
    ],
)
def test_a_call_that_fails_is_an_observation_and_is_counted(pool, attempt, text, count):
    episode, _ = start(pool)
    turn = call(pool, episode, attempt, ("hours", {}))
    failed, fine = turn.messages
    assert text in failed["content"] and fine["content"] == "9 to 5"
    assert turn.counts == dict.fromkeys(COUNTS, 0.0) | {"calls": 2.0, count: 1.0}
    assert not turn.error and not turn.done


def test_calls_beyond_the_limit_are_not_run(pool):
    episode, _ = start(pool)
    turn = call(pool, episode, *[("buy", {"item": "tea"})] * 6)
    assert [m["content"] for m in turn.messages[3:]] == [
        '{"bought": 4}',
        *["error: a turn may have 4 tool calls"] * 2,
    ]
    assert (turn.counts["excess_calls"], turn.counts["bought"], turn.reward) == (2.0, 4.0, 1.0)


def test_results_of_any_type_become_text_of_limited_length(pool):
    episode, _ = start(pool)
    hows = ("long", "surrogate", "object", "none")
    turn = call(pool, episode, *[("misbehave", {"how": how}) for how in hows])
    texts = [m["content"] for m in turn.messages]
    assert texts[0] == "x" * 20 + "... (79 more characters)"
    assert texts[1] == "?" and texts[2].startswith('"<class') and texts[3] == "null"


def test_a_tool_that_hangs_in_c_ends_only_its_episode(shop):
    cfg = EnvConfig(name=f"{shop}:Shop", timeout_s=0.5, tool_timeout_s=0.5)
    with EnvironmentPool(cfg) as pool:
        episode, _ = start(pool)
        turn = call(pool, episode, ("misbehave", {"how": "hang in C"}))
        assert "no answer within 1 s" in turn.error
        assert not start(pool)[1].error


def test_a_row_selects_the_tools_that_are_offered(pool):
    by_name = {tool["function"]["name"]: tool for tool in pool.tools}
    episode, first = start(pool, tools=[by_name["hours"]])
    assert first.tools == [by_name["hours"]]
    turn = call(pool, episode, ("lookup", {"item": "tea"}))
    assert turn.messages[0]["content"] == "error: there is no tool 'lookup'; the tools are hours"
    fly = {"type": "function", "function": {"name": "fly"}}
    _, failed = start(pool, tools=[fly])
    assert "the environment has no fly; it has hours, buy" in failed.error


@pytest.mark.parametrize(
    ("name", "reason"),
    [
        ("NoMethod", "NoMethod has no method of that name"),
        ("Twice", "two tools have the same name: hours, hours"),
        ("Undescribed", "cannot be described to the model"),
    ],
)
@pytest.mark.thorough
def test_an_invalid_tool_is_refused_at_the_start(shop, name, reason):
    with pytest.raises(ValueError, match=reason):
        EnvironmentPool(EnvConfig(name=f"{shop}:{name}"))


def test_plain_functions_with_a_reward(shop):
    prompt = {"messages": [{"role": "user", "content": "2 + 3?"}], "answer": "5", "source": "s"}
    prompt |= {"extra": {}, "seed": 1}
    game = Functions(f"{shop}:add,{shop}:hours", reward="last_number", system="Use tools.")
    assert [tool.__name__ for tool in game.tools] == ["add", "hours"]
    assert game.reset(prompt) == [
        {"role": "system", "content": "Use tools."},
        *prompt["messages"],
    ]
    assert game.step("It is 5.") == ("", 1.0, True) and game.step("6")[1] == 0.0
    assert Functions(f"{shop}:add").reset(prompt) is None
    with pytest.raises(ValueError, match="names is empty"):
        Functions("")


def test_the_calculator_as_a_tool():
    question = {"role": "user", "content": "12 * 34?"}
    prompt = {"messages": [question], "answer": "408"}
    game = CalculatorTool(call_reward=0.25, examples=2)
    first = game.reset(prompt)
    roles = ["user", "assistant", "tool", "assistant"]
    assert [m["role"] for m in first] == ["system", *roles, *roles, "user"]
    for _, asking, result, answer in zip(*(iter(first[1:-1]),) * 4, strict=True):
        (made,) = asking["tool_calls"]
        assert result["tool_call_id"] == made["id"]
        found = CalculatorTool().calculate(**made["function"]["arguments"])
        assert found.content == result["content"] == answer["content"]
    result = game.calculate("12 * 34")
    assert (result.content, result.reward) == ("408", 0.25)
    assert game.calculate("1 + 1").reward == 0  # only the first call adds reward
    with pytest.raises(ValueError):
        game.calculate("__import__('os')")
    assert game.step("It is 408.") == ("", 1.0, True) and game.step("409")[1] == 0.0


BOMB = {f"d{i}": {"allOf": [{"$ref": f"#/$defs/d{i + 1}"}] * 2} for i in range(30)} | {"d30": {}}
SLOW = {  # (schema of an argument, value): hours of matching
    "pattern": ({"pattern": "^(a+)+$"}, "a" * 50 + "b"),
    "name": ({"patternProperties": {"^(a+)+$": True}}, {"a" * 50 + "b": 1}),
    "equal items": ({"uniqueItems": True}, [{"a": i} for i in range(20_000)]),
    "references": ({"$ref": "#/$defs/d0"}, 1),
}


@pytest.mark.parametrize("case", SLOW)
def test_a_schema_that_takes_too_long_is_a_wrong_argument(case, monkeypatch):
    monkeypatch.setattr(tools_module, "CHECK_CPU_S", 0.2)
    schema, value = SLOW[case]
    parameters = {"type": "object", "properties": {"a": schema}, "$defs": BOMB}
    function = {"name": "find", "parameters": parameters}
    tool = Tool({"type": "function", "function": function}, lambda **_: "found")
    limits = StepLimits(timeout_s=60.0, tool_timeout_s=60.0, calls_per_turn=4, result_chars=100)
    turn = ParsedTurn(attempts=(ToolCall("find", {"a": value}, "c0"), ToolCall("find", {}, "c1")))
    messages, _, _, counts = run_calls(turn, {"find": tool}, [tool.schema], limits)
    assert "comparison with the schema of the tool takes over 0.2 s" in messages[0]["content"]
    assert (messages[1]["content"], counts["invalid_arguments"]) == ("found", 1)


def test_a_result_with_images_stays_a_list_of_content_parts():
    picture = {"type": "image", "path": "a.png"}
    results = [
        [{"type": "text", "text": "abcdef"}, picture, {"type": "text", "text": "ghijklm"}],
        [{"type": "text", "text": "ab"}],  # without an image it is a JSON value like any other
        [picture, 3],
    ]
    schema = {"type": "function", "function": {"name": "show", "parameters": {"type": "object"}}}
    tool = Tool(schema, lambda: results.pop(0))
    limits = StepLimits(1.0, 1.0, calls_per_turn=3, result_chars=10)
    turn = ParsedTurn(attempts=tuple(ToolCall("show", {}, f"call{i}") for i in range(3)))
    messages, *_ = run_calls(turn, {"show": tool}, [schema], limits)
    assert messages[0]["content"] == [
        {"type": "text", "text": "abcdef"},
        picture,
        {"type": "text", "text": "ghij... (3 more characters)"},
    ]
    assert messages[1]["content"].startswith('[{"type": ')
    assert messages[2]["content"].startswith('[{"type": ')
