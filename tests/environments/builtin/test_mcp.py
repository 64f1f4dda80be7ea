"""Tests of jaxrl/environments/builtin/mcp.py with servers of the package mcp, by stdio and HTTP."""

import os
import socket
import subprocess
import sys
import time

import pytest

from jaxrl.config.keys import EnvConfig
from jaxrl.environments.builtin.mcp import McpTools
from jaxrl.environments.pool import EnvironmentPool
from jaxrl.tool_calls.calls import ParsedTurn, ToolCall
from tests.environments.test_tools import collect

SERVER = """
import os
import sys
import time

from mcp.server import MCPServer

server = MCPServer("shop")
seen = []


@server.tool()
def add(a: int, b: int) -> int:
    '''Add two integers.'''
    return a + b


@server.tool()
def remember(word: str) -> str:
    '''Remember a word.'''
    seen.append(word)
    return f"{' '.join(seen)} {os.getpid()}"


@server.tool()
def fail(how: str) -> str:
    '''Fail.'''
    if how == "slow":
        time.sleep(1000)
    if how == "die":
        os._exit(3)
    raise ValueError("out of cheese")


@server.tool()
def secret() -> str:
    '''A variable of the environment.'''
    return os.environ.get("SECRET", "unset")


if sys.argv[1:] == ["silent"]:
    time.sleep(1000)
if sys.argv[1:]:
    server.run("streamable-http", port=int(sys.argv[1]))
server.run()
"""

pytestmark = pytest.mark.thorough


@pytest.fixture(scope="module")
def server(tmp_path_factory):
    """Path of a server's program; skips the tests without the package."""
    pytest.importorskip("mcp")
    path = tmp_path_factory.mktemp("mcp") / "server.py"
    path.write_text(SERVER)
    return path


@pytest.fixture
def url(server):
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
    process = subprocess.Popen([sys.executable, str(server), str(port)])
    deadline = time.monotonic() + 60
    while time.monotonic() < deadline:
        with socket.socket() as probe:
            if probe.connect_ex(("127.0.0.1", port)) == 0:
                break
        time.sleep(0.1)
    yield f"http://127.0.0.1:{port}/mcp", process
    process.kill()
    process.wait()


def start(pool):
    prompt = {"messages": [], "answer": "5", "source": "s", "extra": {}, "tools": [], "seed": 7}
    episode = pool.start(prompt)
    assert not collect(pool, episode).error
    return episode


def call(pool, episode, *calls):
    """(texts of the results, counts other than 0) of a turn with calls (name, arguments)."""
    pool.step(episode, ParsedTurn("", tuple(ToolCall(*c, f"id{i}") for i, c in enumerate(calls))))
    turn = collect(pool, episode)
    assert not turn.error
    return [m["content"] for m in turn.messages], {k: v for k, v in turn.counts.items() if v}


def pool_of(name, **keys):
    return EnvironmentPool(EnvConfig(name=name, workers=4, tool_timeout_s=120.0, **keys))


def is_running(pid):
    try:
        os.kill(pid, 0)
    except ProcessLookupError:
        return False
    return True


def test_a_server_on_stdio_per_episode(server):
    with pool_of(f"mcp?command={sys.executable} {server}&reward=last_number") as pool:
        names = [tool["function"]["name"] for tool in pool.tools]
        assert names == ["add", "remember", "fail", "secret"]
        assert pool.tools[0]["function"]["description"] == "Add two integers."
        first, second = start(pool), start(pool)
        texts, counts = call(pool, first, ("add", {"a": 2, "b": 3}), ("remember", {"word": "x"}))
        assert texts[0] == "5" and counts == {"calls": 2.0}
        pid = int(texts[1].split()[1])
        assert call(pool, first, ("remember", {"word": "y"}))[0] == [f"x y {pid}"]
        assert call(pool, second, ("remember", {"word": "z"}))[0][0].startswith("z ")
        texts, counts = call(pool, first, ("fail", {"how": "raise"}), ("add", {"a": "2"}))
        assert "executing tool fail" in texts[0] and texts[1].startswith(
            "error: wrong arguments of add"
        )
        assert counts == {"calls": 2.0, "tool_errors": 1.0, "invalid_arguments": 1.0}
        assert call(pool, first, ("secret", {}))[0] == ["unset"]
        pool.step(first, "It is 5.")
        turn = collect(pool, first)
        assert (turn.reward, turn.done) == (1.0, True)
        pool.end(first)
        deadline = time.monotonic() + 20
        while is_running(pid) and time.monotonic() < deadline:
            time.sleep(0.05)
        assert not is_running(pid)


def test_a_slow_or_dead_server_is_an_observation(server):
    with pool_of(f"mcp?command={sys.executable} {server}") as pool:
        episode = start(pool)
        texts, counts = call(pool, episode, ("fail", {"how": "die"}), ("add", {"a": 1, "b": 2}))
        assert all("the MCP server failed" in text for text in texts)
        assert counts == {"calls": 2.0, "tool_errors": 2.0}
    cfg = EnvConfig(name=f"mcp?command={sys.executable} {server}", tool_timeout_s=8.0)
    with EnvironmentPool(cfg) as pool:
        episode = start(pool)
        texts, counts = call(pool, episode, ("fail", {"how": "slow"}))
        assert texts == ["error: fail took more than 8 s and was stopped"]
        assert counts == {"calls": 1.0, "tool_timeouts": 1.0}


def test_a_server_over_http_serves_all_episodes(url):
    address, process = url
    with pool_of(f"mcp?url={address}&only=add,remember") as pool:
        assert [tool["function"]["name"] for tool in pool.tools] == ["add", "remember"]
        first, second = start(pool), start(pool)
        assert call(pool, first, ("remember", {"word": "x"}))[0][0].startswith("x ")
        assert call(pool, second, ("remember", {"word": "y"}))[0][0].startswith("x y ")
        process.kill()
        process.wait()
        texts, counts = call(pool, first, ("add", {"a": 1, "b": 2}))
        assert "the MCP server failed" in texts[0] and counts["tool_errors"] == 1.0
    with pytest.raises(ValueError, match=r"cannot be used .* start it by hand"):
        pool_of(f"mcp?url={address}")


def test_a_variable_of_the_environment_is_passed_on_demand(server, monkeypatch):
    monkeypatch.setenv("SECRET", "42")
    with pool_of(f"mcp?command={sys.executable} {server}&pass_env=SECRET") as pool:
        assert call(pool, start(pool), ("secret", {}))[0] == ["42"]


def test_a_server_that_cannot_be_used_is_an_error_at_the_start(server, monkeypatch):
    with pytest.raises(ValueError, match="no_such_program is no program on PATH"):
        pool_of("mcp?command=no_such_program x")
    with pytest.raises(ValueError, match=r"cannot be used .* start it by hand"):
        pool_of(f"mcp?command={sys.executable} -c pass")
    with pytest.raises(ValueError, match="set one of the two"):
        pool_of("mcp")
    with pytest.raises(ValueError, match="the server has no tool 'fly'; it has add, remember"):
        pool_of(f"mcp?command={sys.executable} {server}&only=fly")
    with pytest.raises(ValueError, match="the variable NOT_SET is not set"):
        pool_of(f"mcp?command={sys.executable} {server}&pass_env=NOT_SET")
    monkeypatch.setattr("jaxrl.environments.builtin.mcp._START_TIMEOUT_S", 2.0)
    with pytest.raises(ConnectionError, match="no answer within 2 s"):
        McpTools(command=f"{sys.executable} {server} silent")
