"""Tests of jaxrl/environments/agents/nemo_gym.py, client.py and jaxrl/data/sources/nemo_gym.py.

The server has the contract of a resources server of nemo_gym 0.5.1, with sessions in cookies.
"""

import contextlib
import http.server
import itertools
import json
import threading

import pytest

from jaxrl.data.sources.rows import number_rows
from jaxrl.environments.agent import agent_turn
from jaxrl.environments.agents.nemo_gym import NemoGymAgent

TOOL = {
    "type": "function",
    "name": "add",
    "parameters": {"type": "object", "properties": {"by": {"type": "integer"}}},
    "strict": True,
}
PARTS = [{"type": "input_text", "text": text} for text in ("To ", "five.")]
ROW = {
    "responses_create_params": {
        "input": [
            {"role": "developer", "content": "Count."},
            {"role": "user", "content": PARTS},
        ],
        "tools": [TOOL],
    },
    "expected": 5,
}


class Handler(http.server.BaseHTTPRequestHandler):
    """A counter per session, and a model with scripted turns at /v1."""

    def do_POST(self):
        body = json.loads(self.rfile.read(int(self.headers["Content-Length"])))
        self.server.bodies.append((self.path, body))  # pyright: ignore
        status, answer, cookie = self.respond(self.path.rpartition("/"), body)
        self.send_response(status)
        if cookie:
            self.send_header("Set-Cookie", f"session={cookie}; Path=/")
        self.end_headers()
        self.wfile.write(json.dumps(answer).encode())

    def respond(self, path, body):
        server: Server = self.server  # pyright: ignore
        if path[0] == "/v1":
            assert self.headers["Authorization"] == "Bearer key"
            turn = server.turns.pop(0)
            return (400, {"error": turn}, "") if "code" in turn else (200, turn, "")
        if path[2] == "seed_session":
            session = f"s{next(server.numbers)}"
            server.counts[session] = 0
            return 200, {}, session
        if path[2] == "reset":
            return 200, {"observation": "0 of 2", "info": {}}, "game"
        if path[2] == "step":
            assert self.headers["Cookie"] == "session=game"
            return 200, server.steps.pop(0), ""
        session = self.headers["Cookie"].partition("=")[2]
        if path[2] == "add":
            if type(body.get("by")) is not int:
                return 422, {"detail": "by is no integer"}, ""
            server.counts[session] += body["by"]
            return 200, {"count": server.counts[session]}, ""
        assert path[2] == "verify" and body["response"]["object"] == "response"
        right = server.counts[session] == body["expected"]
        verdict = body | {"reward": float(right), "right": right, "note": "x"}
        return (200, verdict, "") if server.verifies else (500, "no verdict", "")

    def log_message(self, *args):
        pass


class Server(http.server.ThreadingHTTPServer):
    def __init__(self, turns, verifies):
        super().__init__(("127.0.0.1", 0), Handler)
        self.turns, self.verifies, self.bodies = list(turns), verifies, []
        self.numbers, self.counts = itertools.count(), {}
        self.steps = [
            {"observation": None, "reward": 0.5, "info": {"tool_outputs": [RESULT]}},
            {"observation": "2 of 2", "reward": 1, "terminated": True},
        ]


def turn(*items, **fields):
    return {"object": "response", "incomplete_details": None, "output": list(items)} | fields


def call(name, arguments, number=0):
    return {
        "type": "function_call",
        "name": name,
        "arguments": arguments,
        "call_id": f"call_{number}",
    }


ANSWER = {"type": "message", "role": "assistant", "content": []}
RESULT = {"call_id": "call_0", "output": '{"count": 2}'}
FULL = {"code": "context_length_exceeded", "message": "full"}


def play(*turns, row=ROW, verifies=True, **options):
    """(result of an episode, what the server was sent)."""
    server = Server(turns, verifies)
    with contextlib.closing(server.socket):
        threading.Thread(target=server.serve_forever, args=(0.01,), daemon=True).start()
        url = f"http://127.0.0.1:{server.server_port}"
        try:
            agent = NemoGymAgent(url=url, **options)
            return agent(f"{url}/v1", "key", {"extra": {"nemo_gym": row}}), server.bodies
        finally:
            server.shutdown()


def test_an_episode_calls_the_tools_of_its_session_and_is_verified():
    first = turn(call("add", '{"by": 2}'), call("add", '{"by": 3}', 1))
    result, bodies = play(first, turn(ANSWER, id="last"))
    assert result == {"reward": 1.0, "right": True, "calls": 2}
    assert agent_turn(result).reward == 1.0
    assert [path for path, _ in bodies] == [
        "/seed_session",
        "/v1/responses",
        "/add",
        "/add",
        "/v1/responses",
        "/verify",
    ]
    outputs = [
        *first["output"],
        {"type": "function_call_output", "call_id": "call_0", "output": '{"count": 2}'},
        {"type": "function_call_output", "call_id": "call_1", "output": '{"count": 5}'},
    ]
    params = ROW["responses_create_params"]
    assert bodies[0][1] == ROW
    assert bodies[4][1] == {"model": "policy"} | params | {"input": params["input"] + outputs}
    assert bodies[5][1] == ROW | {"response": turn(*outputs, ANSWER, id="last")}


@pytest.mark.parametrize(
    "name, arguments, output",
    [
        ("add", '{"by": "x"}', '{"detail": "by is no integer"}'),
        ("add", "{", "Invalid tool call arguments"),
        ("verify", "{}", "There is no tool verify"),
    ],
)
def test_a_wrong_call_has_the_reason_as_its_result(name, arguments, output):
    result, bodies = play(turn(call(name, arguments)), turn(ANSWER))
    assert result["reward"] == 0.0
    assert output in bodies[-1][1]["response"]["output"][1]["output"]


@pytest.mark.parametrize(
    "last",
    [FULL, {"code": "too_many_turns", "message": ""}, turn(ANSWER, incomplete_details={"x": 1})],
)
def test_an_episode_that_is_cut_off_is_verified(last):
    assert play(turn(call("add", '{"by": 5}')), last)[0]["reward"] == 1.0


def test_a_game_sums_the_rewards_of_its_steps():
    first = turn(call("add", '{"by": 2}'))
    result, bodies = play(first, turn(ANSWER), agent="gymnasium")
    assert result == {"reward": 1.5}
    paths = [path.rpartition("/")[2] for path, _ in bodies]
    assert paths == ["reset", "responses", "step", "responses", "step"]
    shown = [*ROW["responses_create_params"]["input"], {"role": "user", "content": "0 of 2"}]
    output = {"type": "function_call_output", **RESULT}
    assert bodies[1][1]["input"] == shown and bodies[2][1] == ROW | {"response": first}
    assert bodies[3][1]["input"] == [*shown, *first["output"], output]
    assert play(first, FULL, agent="gymnasium")[0] == {"reward": 0.5}
    with pytest.raises(ValueError, match="agent='x' of NeMo Gym is not known"):
        NemoGymAgent(url="", agent="x")


def test_failures_are_named():
    with pytest.raises(RuntimeError, match=r"/verify answered with status 500: .*no verdict"):
        play(turn(ANSWER), verifies=False)
    with pytest.raises(RuntimeError, match="the endpoint refused a request: no such field"):
        play({"code": None, "message": "no such field"})
    with pytest.raises(RuntimeError, match=r"does not fit in data\.max_prompt_len"):
        play(FULL)
    with pytest.raises(ValueError, match=r"needs rows of data\.train='nemo_gym:FILE\.jsonl'"):
        play(row=None)
    agent = NemoGymAgent(url="http://127.0.0.1:9")
    with pytest.raises(ConnectionError, match=r"127\.0\.0\.1:9/seed_session does not answer"):
        agent("http://127.0.0.1:9/v1", "key", {"extra": {"nemo_gym": ROW}})


def test_rows_are_a_data_source(tmp_path):
    path = tmp_path / "rows.jsonl"
    text = {"responses_create_params": {"input": "Hi.", "instructions": "Be brief."}}
    path.write_text("\n".join(map(json.dumps, [ROW, text])))
    first, second = (row.columns for row in number_rows([f"nemo_gym:{path}"], ()))
    assert first["prompt"] == [
        {"role": "system", "content": "Count."},
        {"role": "user", "content": "To five."},
    ]
    assert first["extra_info"] == {"nemo_gym": ROW}
    assert [message["content"] for message in second["prompt"]] == ["Be brief.", "Hi."]
    for row, words in (
        ({"question": "x"}, r"rows\.jsonl:1 has no responses_create_params"),
        ({"responses_create_params": {"input": [{"type": "item"}]}}, "is no message of text"),
    ):
        path.write_text(json.dumps(row))
        with pytest.raises(ValueError, match=words):
            list(number_rows([f"nemo_gym:{path}"], ()))
