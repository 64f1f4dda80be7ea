"""Tests of jaxrl/environments/builtin/openenv.py, with a server and client like those of OpenEnv
0.10.0: one session of /ws per episode."""

import json
import sys
import types

import pytest

from jaxrl.environments.builtin import openenv
from jaxrl.environments.builtin.openenv import OpenEnv, read_schema, text_field

URL = "http://127.0.0.1:8000/"
TEXT = {"properties": {"message": {"type": "string"}, "metadata": {"type": "object"}}}
NUMBER = {"properties": {"row": {"type": "integer"}, "column": {"type": "integer"}}}
ERROR = {"type": "missing", "loc": ["row"], "msg": "Field required", "url": "https://pydantic.dev"}
INVALID = {"message": "Invalid message", "code": "VALIDATION_ERROR", "errors": [ERROR]}


class Session:
    """Answers with the next of `answers`, and keeps what it is sent."""

    def __init__(self, answers):
        self.answers, self.sent = list(answers), []

    def send(self, text):
        self.sent.append(json.loads(text))

    def recv(self):
        return json.dumps(self.answers.pop(0))

    def close(self):
        self.sent.append("close")


class Full(Session):
    """Is closed by the server, which has sent the reason."""

    def send(self, text):
        raise ConnectionError


def observed(reward=None, done=False, **observation):
    data = {"observation": observation, "reward": reward, "done": done}
    return {"type": "observation", "data": data}


def failed(**data):
    return {"type": "error", "data": data}


@pytest.fixture
def server(monkeypatch):
    """Makes an environment whose server has a schema of actions and these answers."""

    def make(schema, *answers, refused=(), **options):
        session, addresses = Session(answers), []
        sessions = [*refused, session]

        def connect(address, **_):
            addresses.append(address)
            return sessions[len(addresses) - 1]

        for name, key, value in [
            ("sync.client", "connect", connect),
            ("exceptions", "ConnectionClosed", ConnectionError),
        ]:
            package = types.ModuleType(f"websockets.{name}")
            package.__dict__[key] = value
            monkeypatch.setitem(sys.modules, f"websockets.{name}", package)
        monkeypatch.setattr(openenv, "read_schema", lambda url: schema)
        environment = OpenEnv(url=URL, **options)
        first = environment.reset({"messages": [{"role": "user", "content": "Play."}], "seed": 7})
        assert addresses == ["ws://127.0.0.1:8000/ws"] * len(sessions)
        return environment, session, first

    return make


def test_a_turn_is_the_text_of_an_action(server):
    environment, session, first = server(
        TEXT, observed(hint="Go."), observed(0.5, hint="é"), observed(2, True), observation="hint"
    )
    assert first == [{"role": "user", "content": "Play."}, {"role": "user", "content": "Go."}]
    assert environment.step("left") == ("é", 0.5, False)
    with pytest.raises(RuntimeError, match=r"no field 'hint' but \[\]"):
        environment.step("right")
    assert session.sent == [
        {"type": "reset", "data": {"seed": 7}},
        {"type": "step", "data": {"message": "left"}},
        {"type": "step", "data": {"message": "right"}},
    ]


def test_a_turn_is_the_json_of_an_action_with_several_fields(server):
    environment, session, first = server(
        NUMBER, observed(board=[1]), failed(**INVALID), observed(1, True, board=[2]), seed=False
    )
    assert first[-1]["content"] == '{"board": [1]}'
    observation, reward, done, counts = environment.step('{"row": "a"}')
    assert observation == "That is no action: row: Field required" and (reward, done, counts) == (
        0.0,
        False,
        {"invalid": 1},
    )
    for text in ("left", "[1]", '{"row": }', "} {"):
        assert environment.step(text)[3] == {"invalid": 1}  # never sent
    action = '{"row": 1, "column": 2}'
    assert environment.step(f"I play {action}.") == ('{"board": [2]}', 1.0, True)
    sent = [{"type": "reset", "data": {}}, {"type": "step", "data": {"row": "a"}}]
    assert session.sent == [*sent, {"type": "step", "data": json.loads(action)}]


def test_a_reset_waits_for_a_session_of_a_server_that_has_none_free(server, monkeypatch):
    waits = []
    monkeypatch.setattr(openenv.time, "sleep", waits.append)
    full = failed(message="8 of 8 sessions", code="CAPACITY_REACHED", max_sessions=8)
    refused = [Full([full]), Session([full])]  # the connection may be closed before the reset
    _, session, first = server(TEXT, observed(hint="Go."), refused=refused)
    assert first[-1]["content"] == '{"hint": "Go."}' and len(waits) == 2
    assert [one.sent[-1] for one in refused] == ["close", "close"]
    assert session.sent == [{"type": "reset", "data": {"seed": 7}}]


@pytest.mark.parametrize(
    "answer, words",
    [
        (failed(message="out of cheese", code="EXECUTION_ERROR"), "failed: out of cheese"),
        ({"type": "state", "data": {}}, "sent"),
        ([1], r"sent \[1\]"),
        ({"type": "observation", "data": {"reward": 1}}, "sent"),
    ],
)
def test_an_answer_that_is_no_observation_fails_the_episode(server, answer, words):
    environment, _, _ = server(TEXT, observed(), answer)
    with pytest.raises(RuntimeError, match=words):
        environment.step("left")


def test_the_field_of_an_action_that_is_text_is_found():
    assert text_field(TEXT) == "message" and text_field(NUMBER) == ""
    assert text_field({"properties": {}}) == ""


def test_a_server_that_does_not_answer_is_an_error_at_the_start():
    with pytest.raises(ValueError, match="start the server, and set url=http://HOST:PORT"):
        read_schema("http://127.0.0.1:9")


def test_the_missing_package_is_named(monkeypatch):
    monkeypatch.setitem(sys.modules, "websockets.sync.client", None)
    with pytest.raises(ImportError, match="uv pip install websockets"):
        OpenEnv(url=URL)
