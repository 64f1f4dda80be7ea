"""A client for chat completions that tells the ways apart in which a judge fails."""

import asyncio
import concurrent.futures
import dataclasses
import http.client
import json
import urllib.error
import urllib.request
from typing import Literal

from jaxrl.json_text import Json, parse_json
from jaxrl.rewards.verifiers.remote import may_pass

Kind = Literal["timeout", "unreachable", "status", "refusal", "invalid"]

_MAX_SHOWN = 200  # characters of a reply in an error message
_MAX_BYTES = 4 << 20  # of a reply


class RequestFailed(Exception):
    """A request without a verdict: what kind of failure, and whether it may pass."""

    def __init__(self, kind: Kind, reason: str, *, final: bool = False):
        super().__init__(f"{kind}: {reason}")
        self.kind, self.final = kind, final


@dataclasses.dataclass(frozen=True)
class JudgeReply:
    """The first choice of a chat completion, and its tokens."""

    content: str | None
    refusal: str  # why the model refuses; "" if it does not
    truncated: bool  # at max_tokens
    prompt_tokens: int
    completion_tokens: int

    def text(self) -> str:
        """The content. Raises RequestFailed if it is refused, truncated or missing."""
        if self.refusal:
            raise RequestFailed("refusal", f"the judge refuses: {self.refusal!r:.{_MAX_SHOWN}}")
        if self.truncated:
            raise RequestFailed(
                "invalid",
                f"the verdict is truncated after {self.completion_tokens} tokens; raise "
                "reward.judge.max_verdict_len",
            )
        if self.content is None:
            raise RequestFailed("invalid", "the reply has no text")
        return self.content


class ChatClient:
    """Sends chat completions from an event loop, at most `concurrency` at a time."""

    def __init__(self, url: str, api_key: str, *, timeout_s: float, concurrency: int):
        self._url = f"{url.rstrip('/')}/chat/completions"
        self._headers = {"Content-Type": "application/json"}
        if api_key:
            self._headers["Authorization"] = f"Bearer {api_key}"
        self._timeout_s = timeout_s
        self._threads = concurrent.futures.ThreadPoolExecutor(concurrency, "judge")

    async def send(self, body: Json) -> bytes:
        """The body of the reply. Raises RequestFailed."""
        loop = asyncio.get_running_loop()
        try:  # the socket's limit is for each read: a slow server may send byte by byte
            return await asyncio.wait_for(
                loop.run_in_executor(self._threads, self._post, body), self._timeout_s
            )
        except TimeoutError as error:
            raise RequestFailed("timeout", f"no reply within {self._timeout_s:g} s") from error
        except (OSError, http.client.HTTPException) as error:
            raise RequestFailed("unreachable", f"{self._url}: {error}") from error

    def _post(self, body: Json) -> bytes:
        request = urllib.request.Request(self._url, json.dumps(body).encode(), self._headers)
        try:
            with urllib.request.urlopen(request, timeout=self._timeout_s) as response:
                return response.read(_MAX_BYTES)
        except urllib.error.HTTPError as error:
            reason = f"status {error.code} {error.reason} {_message(error)}".strip()
            raise RequestFailed(
                "status", f"{self._url} returned {reason}", final=not may_pass(error.code)
            ) from error
        except urllib.error.URLError as error:  # urllib wraps the time-out of a connection
            if isinstance(error.reason, TimeoutError):
                raise error.reason from error
            raise


def read_reply(body: bytes) -> JudgeReply:
    """Reads a chat completion. Raises RequestFailed for another body."""
    try:
        value = parse_json(body)
        choice = value["choices"][0]
        message, finish = choice["message"], choice.get("finish_reason")
        content, refusal = message.get("content"), message.get("refusal")
    except (ValueError, LookupError, TypeError, AttributeError) as error:
        start = body[:_MAX_SHOWN]
        raise RequestFailed("invalid", f"the reply is no chat completion: {start!r}") from error
    if not refusal and finish == "content_filter":
        refusal = finish
    usage = value.get("usage")
    return JudgeReply(
        content if isinstance(content, str) else None,
        str(refusal or ""),
        finish == "length",
        _count(usage, "prompt_tokens"),
        _count(usage, "completion_tokens"),
    )


def _message(error: urllib.error.HTTPError) -> str:
    """The message of an error in OpenAI's format, or the start of its body."""
    try:
        body = error.read(_MAX_BYTES)
        message = parse_json(body)["error"]["message"]
    except (OSError, http.client.HTTPException):
        return ""
    except (ValueError, LookupError, TypeError):
        message = body.decode(errors="replace")
    return f"({str(message)[:_MAX_SHOWN]})" if message else ""


def _count(usage: object, name: str) -> int:
    """A number of tokens; 0 if the server does not say."""
    value = usage.get(name) if isinstance(usage, dict) else None
    return value if type(value) is int and value >= 0 else 0
