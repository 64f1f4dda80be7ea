"""A client for chat completions of a judge."""

import asyncio
import concurrent.futures
import dataclasses
import functools

from jaxrl.http.client import JsonSender, RequestFailed
from jaxrl.json_text import Json, parse_json

_MAX_SHOWN = 200  # characters of a reply in an error message
_MAX_BYTES = 4 << 20  # of a reply


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
        self._sender = JsonSender(api_key=api_key, max_bytes=_MAX_BYTES)
        self._timeout_s = timeout_s
        self._threads = concurrent.futures.ThreadPoolExecutor(concurrency, "judge")

    async def send(self, body: Json) -> bytes:
        """The body of the reply. Raises RequestFailed."""
        send = functools.partial(self._sender.send, self._url, body, timeout_s=self._timeout_s)
        try:  # a slow name server is not in the sender's time limit
            return await asyncio.wait_for(
                asyncio.get_running_loop().run_in_executor(self._threads, send), self._timeout_s
            )
        except TimeoutError as error:
            reason = f"{self._url} sent no reply within {self._timeout_s:g} s"
            raise RequestFailed("timeout", reason) from error


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


def _count(usage: object, name: str) -> int:
    """A number of tokens; 0 if the server does not say."""
    value = usage.get(name) if isinstance(usage, dict) else None
    return value if type(value) is int and value >= 0 else 0
