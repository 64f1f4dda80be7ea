"""Responses that outlive a weight update: generation of groups in flight, through any engine."""

import contextlib
import dataclasses
from collections.abc import Callable, Iterable

import numpy as np

from jaxrl.engine.api import Engine, Request
from jaxrl.rollout.generate import Decode, Response, append_generated
from jaxrl.rollout.schedule.buffer import PromptGroup
from jaxrl.types import Tree

# The request that samples all tokens of a response, from its first.
MakeRequest = Callable[[PromptGroup, Response], Request]


class ResponseStream:
    """The unfinished responses of groups, in the engine or waiting for it.

    A response continues under new weights with the tokens that it has. Its KV is computed again,
    or kept with `keep_kv`. The random number of a token depends on its position only, so a
    response has the same samples however often it is interrupted.
    """

    def __init__(
        self,
        engine: Engine,
        make_request: MakeRequest,
        *,
        stop: tuple[str, ...],
        decode: Decode,
        keep_kv: bool = False,
    ):
        self.engine, self.make_request = engine, make_request
        self.stop, self.decode, self.keep_kv = stop, decode, keep_kv
        self._in_engine: dict[int, tuple[PromptGroup, Response]] = {}  # by slot
        self._version: int | None = None

    @property
    def n_running(self) -> int:
        """Responses in the engine."""
        return len(self._in_engine)

    def resume(self, version: int, groups: Iterable[PromptGroup]) -> None:
        """Continues the unfinished responses of the groups under the weights of `version`."""
        if version != self._version and not self.keep_kv:
            self.release()
        self._version = version
        self.engine.set_version(version)
        for group in groups:
            self.submit(group)

    def submit(self, group: PromptGroup) -> None:
        """Queues the unfinished responses of a group, except those in the engine."""
        running = {id(response) for _, response in self._in_engine.values()}
        for response in group.responses:
            if not response.finish and id(response) not in running:
                request = continued(self.make_request(group, response), response)
                self._in_engine[self.engine.submit(request)] = group, response

    def dispatch(self, params: Tree) -> list[PromptGroup]:
        """Runs one dispatch of the engine. Returns the groups that it completed."""
        completed = []
        for generated in self.engine.generate(params):
            group, response = self._in_engine[generated.slot]
            append_generated(response, generated, self.stop, self.decode)
            if response.finish:
                del self._in_engine[generated.slot]
                if not generated.finish:
                    self.engine.free(generated.slot)
                if group.complete:
                    completed.append(group)
        return completed

    def release(self) -> None:
        """Frees the slots of all responses; `resume` computes their KV again."""
        for slot in self._in_engine:
            with contextlib.suppress(KeyError):  # the engine no longer has it
                self.engine.free(slot)
        self._in_engine.clear()


def continued(request: Request, response: Response) -> Request:
    """The request for the rest of a response."""
    n = len(response.tokens)
    if not n:
        return request
    tokens = np.concatenate([request.tokens, np.array(response.tokens, np.int32)])
    return dataclasses.replace(request, tokens=tokens, max_tokens=request.max_tokens - n)
