"""JSON from outside: every reader of it bounds its depth, and no other reader may appear."""

import ast
import contextlib
import json
import pathlib
import pickle
import socket

import numpy as np
import pytest

from jaxrl.config.saved import from_json
from jaxrl.environments.api import Turn
from jaxrl.environments.messages import read_turn, write_turn
from jaxrl.environments.worker import checked_messages
from jaxrl.http.body import parse_json as parse_body
from jaxrl.http.errors import RequestError
from jaxrl.json_text import MAX_DEPTH, json_size, parse_json, parse_json_values, parse_object
from jaxrl.rollout.agents.chat import parse_chat, parse_reward
from jaxrl.rollout.agents.episode import AgentEpisode, AgentLimits
from jaxrl.runtime.folder_lock import UNKNOWN, read_lock
from jaxrl.serve.structured.tool_output import ToolOutput
from jaxrl.serve.structured.tools import ToolUse
from jaxrl.subprocesses.channel import Channel, ProtocolError, WorkerChannel
from jaxrl.tool_calls.chat_message import as_message, parse_or_none
from jaxrl.tool_calls.formats import FORMATS
from jaxrl.tool_calls.parser import parse_turn
from jaxrl.tracking.json_lines import parse_line
from jaxrl.types import Prompt

ROOT = pathlib.Path(__file__).parents[2]
# The only places that may read JSON without the limits of jaxrl/json_text.py.
PLAIN_READERS = {
    "jaxrl/json_text.py": "the reader itself",
    "jaxrl/config/saved.py": "a config may hold infinite numbers; its own check of the depth",
    "jaxrl/data/sources/files.py": "rows of a dataset, with its own errors",
    "jaxrl/checkpoint": "files that a run wrote, with its own errors",
    "jaxrl/report/page.py": "its own values",
    "jaxrl/rewards/sandbox": "a protocol between two of our own processes",
}
DEEP = {
    "open arrays": "[" * 3000,
    "arrays": "[" * 100_000 + "]" * 100_000,
    "objects": '{"a":' * 3000 + "1" + "}" * 3000,
    "one level too deep": "[" * (MAX_DEPTH + 1) + "]" * (MAX_DEPTH + 1),
}


def nested(depth):
    value = {}
    for _ in range(depth - 1):
        value = {"a": value}
    return value


def plain_readers(path):
    """Lines with json.load, json.loads or a decoder of the standard library."""
    source = path.read_text()
    for node in ast.walk(ast.parse(source)) if "json" in source else ():
        match node:
            case ast.Attribute(ast.Name("json"), "load" | "loads" | "JSONDecoder"):
                yield node.lineno
            case ast.ImportFrom(module="json"):
                yield node.lineno


def test_json_is_read_by_the_one_reader():
    files = [path.relative_to(ROOT) for path in ROOT.glob("jaxrl/**/*.py")]
    outside = [f for f in files if not any(map(f.is_relative_to, PLAIN_READERS))]
    assert len(outside) > 300
    found = [f"{file}:{line}" for file in outside for line in plain_readers(ROOT / file)]
    assert not found, "read it with jaxrl.json_text.parse_json"


def tool_message(arguments):
    call = {"function": {"name": "f", "arguments": arguments}}
    return {"role": "assistant", "content": "", "tool_calls": [call]}


@pytest.mark.parametrize("text", DEEP.values(), ids=DEEP)
def test_every_reader_of_text_rejects_deep_json_with_its_own_error(text, tmp_path):
    with pytest.raises(ValueError, match=r"nested|not an object|deep"):
        parse_object(text.encode(), "config.json", "save it again")
    with pytest.raises(ValueError, match=r"config\.json of the run folder is not"):
        from_json(text)
    with pytest.raises(ValueError, match="nested"):
        parse_json_values(text)
    with pytest.raises(RequestError, match="nested more than 32 deep") as rejected:
        parse_body(text.encode(), max_values=1 << 20)
    assert rejected.value.status == 400
    with pytest.raises(ValueError, match=r"the tool call .*nested more than .*; correct the row"):
        as_message(tool_message(text))
    assert parse_or_none(text) is None
    assert parse_line(text.encode()) is None
    lock = tmp_path / "lock"
    lock.write_text(text)
    assert read_lock(lock).holder == UNKNOWN


@pytest.mark.parametrize("text", DEEP.values(), ids=DEEP)
def test_deep_arguments_of_the_model_are_a_malformed_call(text):
    call = json.dumps({"name": "f", "arguments": text})
    (attempt,) = parse_turn(f"<tool_call>{call}</tool_call>", FORMATS["hermes"]).malformed
    assert "nested more than" in attempt.reason
    (attempt,) = parse_turn(f"[TOOL_CALLS]f[ARGS]{text}", FORMATS["mistral"]).malformed
    assert "nested more than" in attempt.reason
    output = ToolOutput(ToolUse((), "required", parallel=True))
    assert output.add(text, ended=True).content == text


def test_values_that_were_not_json_have_the_same_limits():
    for deep in (nested(3000), [[[nested(3000)]]], ([nested(MAX_DEPTH)],)):
        with pytest.raises(ValueError, match="nested more than 64 deep"):
            json_size(deep)
        with pytest.raises(ValueError, match=r"nested more than 64 deep; correct the row"):
            as_message(tool_message({"a": deep}))
    endless = {}
    endless["a"] = endless
    with pytest.raises(ValueError, match="nested more than 64 deep; correct the row"):
        as_message(tool_message(endless))
    shared = []
    for _ in range(60):  # 2 ** 60 values
        shared = [shared, shared]
    with pytest.raises(ValueError, match="larger than 1000 characters"):
        json_size(shared, max_size=1000)
    json_size(nested(MAX_DEPTH))
    assert as_message(tool_message(nested(MAX_DEPTH)))


def exchanged(content):
    """The trainer's view of a worker that writes these bytes as a message."""
    ours, theirs = socket.socketpair()
    with contextlib.closing(Channel(ours)) as channel, theirs:
        theirs.sendall(len(content).to_bytes(8, "big") + content)
        return channel.receive()


@pytest.mark.parametrize(
    "text", ["[" * 3000, '{"a":' * 3000 + "1" + "}" * 3000, "[1e400]", "[NaN]"]
)
def test_hostile_json_from_the_socket_of_an_environment_is_a_protocol_error(text):
    with pytest.raises(ProtocolError, match="is not JSON"):
        exchanged(text.encode())
    turn = {
        "messages": [tool_message(text)],
        "reward": 0.0,
        "done": False,
        "counts": {},
        "error": "",
        "rewarded": True,
        "tools": [],
        "images": [],
    }
    with pytest.raises(ProtocolError, match=r"the tool call .*'f'"):
        read_turn(exchanged(json.dumps(turn).encode()))


def test_the_deepest_arguments_of_an_environment_reach_the_trainer():
    messages, _ = checked_messages([tool_message(json.dumps(nested(MAX_DEPTH)))], "step")
    ours, theirs = socket.socketpair()
    channel, worker = Channel(ours), WorkerChannel(theirs)
    with contextlib.closing(channel), contextlib.closing(worker):
        worker.send(write_turn(Turn(messages)))
        assert read_turn(channel.receive()).messages == messages
    assert pickle.loads(pickle.dumps(messages)) == messages


def test_a_file_with_a_byte_order_mark_is_read():
    assert parse_object(b'\xef\xbb\xbf{"a": 1}', "config.json", "") == {"a": 1}
    assert parse_json("[1e308, -1e-400]") == [1e308, 0.0]


ARGUMENTS = json.dumps({"a": ["x" * 1000] * 1000})
LARGE = {  # large requests of an agent without any text
    "arguments": {"messages": [tool_message(ARGUMENTS)]},
    "names": {"messages": [{"role": "user", "content": "", "name": "x" * 1_000_000}]},
    "reasoning": {"messages": [{"role": "user", "content": "", "reasoning": "x" * 1_000_000}]},
    "many messages": {"messages": [{"role": "user", "content": ""}] * 15_000},
}


@pytest.mark.parametrize("case", LARGE)
def test_the_size_of_an_agents_request_counts_all_of_its_fields(case):
    request = parse_chat(json.dumps(LARGE[case]).encode())
    assert request.size > 90_000
    limits = AgentLimits(context_len=1000, max_turns=3, timeout_s=0.0, needs_reward=False)
    prompt = Prompt(0, request.messages[:1], np.zeros(1, np.int32), "")
    episode = AgentEpisode(prompt, 0, seed=0, limits=limits)
    with pytest.raises(RequestError, match=r"is 1000 tokens .* characters; shorten"):
        episode.place_turn(request)


@pytest.mark.parametrize(
    "tools", [[{"name": "f", "description": "x" * 200_000}], [{"name": "f"}] * 600]
)
def test_the_tools_of_an_agent_are_bounded(tools):
    with pytest.raises(RequestError) as rejected:
        parse_chat(json.dumps({"messages": [tool_message("")], "tools": tools}).encode())
    assert rejected.value.body()["error"]["param"] == "tools"


@pytest.mark.parametrize("number", ["1e999", "9" * 400, "-" + "9" * 400, "NaN", "true"])
def test_a_reward_that_is_no_float_is_an_error_of_the_request(number):
    with pytest.raises(RequestError) as rejected:
        parse_reward(f'{{"reward": {number}}}'.encode())
    assert rejected.value.status == 400
    assert parse_reward(b'{"reward": 10000000000000000000000}') == {"reward": 1e22}
