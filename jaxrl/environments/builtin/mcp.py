"""The tools of an MCP server (modelcontextprotocol.io), over stdio or streamable HTTP."""

import asyncio
import contextlib
import functools
import importlib
import json
import os
import shlex
import shutil
import sys
from typing import Any

from jaxrl.config.packages import install_advice
from jaxrl.environments.api import Tool
from jaxrl.environments.builtin.answers import Answers

_START_TIMEOUT_S = 30.0
# The server has a separate session, so it is not killed with the episode's process group. It gets
# SIGKILL (9) when that process ends (PR_SET_PDEATHSIG, 1), even if it hangs. Linux only.
_EXEC = (
    "import ctypes, os, sys; libc = ctypes.CDLL(None); "
    "sys.platform == 'linux' and libc.prctl(1, 9); os.execvp(sys.argv[1], sys.argv[1:])"
)


class McpTools(Answers):
    """Offers the tools of a server; a turn without a call is the answer and ends the episode.

    `command` starts a server on stdio, one per episode; `url` is the endpoint of a running one.
    `only` selects tools by name, joined by commas. `pass_env` names environment variables that the
    command needs beyond PATH, HOME and the like. `reward` and `system` are as in `Answers`.
    Raises ImportError without the package mcp, ValueError or ConnectionError if the server cannot
    be used.
    """

    def __init__(
        self,
        *,
        command: str = "",
        url: str = "",
        only: str = "",
        pass_env: str = "",
        reward: str = "",
        system: str = "",
    ):
        if bool(command) == bool(url):
            raise ValueError(f"command={command!r} and url={url!r}: set one of the two")
        super().__init__(reward=reward, system=system)
        self._server = command, url, pass_env
        self._stack = contextlib.ExitStack()  # of the connection, from the first call on
        self._portal: Any = None
        self._client: Any = None
        schemas = list_tools(*self._server)
        names = only.split(",") if only else list(schemas)
        if missing := [name for name in names if name not in schemas]:
            raise ValueError(
                f"only={only!r}: the server has no tool {missing[0]!r}; it has {', '.join(schemas)}"
            )
        self.tools = [Tool(schemas[name], functools.partial(self._call, name)) for name in names]

    def _call(self, tool: str, /, **arguments: Any) -> str:
        """The text of a tool's result.

        Raises ConnectionError if the server fails, RuntimeError if the tool reports an error.
        """
        try:
            client = self._client or self._connect()
            result = self._wait(client.call_tool, tool, arguments)
        except Exception as error:
            raise ConnectionError(f"the MCP server failed ({_reason(error)})") from error
        return _text(result)

    def _connect(self) -> Any:
        """The client, connected in a thread that ends with the process."""
        if self._portal is None:
            portal = importlib.import_module("anyio.from_thread").start_blocking_portal()
            self._portal = self._stack.enter_context(portal)
        connection = self._portal.wrap_async_context_manager(_client(*self._server))
        self._client = self._stack.enter_context(connection)
        return self._client

    def _wait(self, function: Any, *arguments: Any) -> Any:
        """The result of an async function, which is cancelled if the wait is interrupted."""
        future = self._portal.start_task_soon(function, *arguments)
        try:
            return future.result()
        except BaseException:
            future.cancel()
            raise


@functools.cache  # once in the process that forks the episodes
def list_tools(command: str, url: str, pass_env: str) -> dict[str, dict[str, Any]]:
    """The schemas of a server's tools by name. Raises ConnectionError if it does not answer."""
    client = _client(command, url, pass_env)
    try:
        tools = asyncio.run(_list(client))
    except Exception as error:
        reason = _reason(error)
        if isinstance(error, TimeoutError):
            reason = f"no answer within {_START_TIMEOUT_S:g} s"
        raise ConnectionError(
            f"the MCP server {command or url!r} cannot be used ({reason}); start it by hand to see "
            "why"
        ) from error
    if not tools:
        raise ValueError(f"the MCP server {command or url!r} has no tools")
    return {
        tool.name: {
            "type": "function",
            "function": {
                "name": tool.name,
                "description": tool.description or "",
                "parameters": tool.input_schema,
            },
        }
        for tool in tools
    }


async def _list(client: Any) -> list[Any]:
    tools, cursor = [], None
    async with asyncio.timeout(_START_TIMEOUT_S), client:
        while True:
            page = await client.list_tools(cursor=cursor)
            tools += page.tools
            cursor = page.next_cursor
            if not cursor:
                return tools


def _client(command: str, url: str, pass_env: str) -> Any:
    """A client that is not connected yet."""
    try:
        mcp = importlib.import_module("mcp")
    except ImportError as error:
        raise ImportError(f"{error}; {install_advice('mcp')}") from error
    if url:
        return mcp.Client(url)
    words = shlex.split(command)
    if not shutil.which(words[0]):
        raise ValueError(f"command={command!r}: {words[0]} is no program on PATH")
    names = [name for name in pass_env.split(",") if name]
    if missing := [name for name in names if name not in os.environ]:
        raise ValueError(f"pass_env={pass_env!r}: the variable {missing[0]} is not set")
    return mcp.Client(
        mcp.StdioServerParameters(
            command=sys.executable,
            args=["-I", "-S", "-c", _EXEC, *words],
            env={name: os.environ[name] for name in names},
        )
    )


def _text(result: Any) -> str:
    """The text of a tool's result. Raises RuntimeError if the tool reports an error."""
    parts = [c.text if c.type == "text" else f"[{c.type}]" for c in result.content]
    if not parts and result.structured_content is not None:
        parts = [json.dumps(result.structured_content, ensure_ascii=False)]
    text = "\n".join(parts)
    if result.is_error:
        raise RuntimeError(text)
    return text


def _reason(error: BaseException) -> str:
    """Type and message of the first exception in a group of them."""
    while isinstance(error, BaseExceptionGroup):
        error = error.exceptions[0]
    with contextlib.suppress(Exception):
        return f"{type(error).__name__}: {error}"
    return type(error).__name__
