"""Responses that outlive a weight update: generation of groups in flight, through any engine."""

import contextlib
from collections.abc import Callable, Iterable
from typing import Protocol, runtime_checkable

from jaxrl.engine.api import Request, RequestEngine
from jaxrl.rewards.arguments import Decode
from jaxrl.rollout.generate import Response, append_generated, continued, to_rollout
from jaxrl.rollout.schedule.buffer import PromptGroup
from jaxrl.types import Prompt, Tree

# The request that samples all tokens of a response, from its first.
MakeRequest = Callable[[PromptGroup, Response], Request]


@runtime_checkable
class GroupStream(Protocol):
    """Generates the responses or episodes of groups, which outlive weight updates."""

    engine: RequestEngine

    @property
    def n_running(self) -> int:
        """Responses or episodes that have not ended."""
        ...

    def responses(self, prompt: Prompt) -> list[Response]:
        """The responses of a new group."""
        ...

    def resume(self, version: int, groups: Iterable[PromptGroup]) -> None:
        """Continues these groups under the weights of `version`, and starts new ones."""
        ...

    def dispatch(self, params: Tree) -> list[PromptGroup]:
        """Runs one dispatch of the engine. Returns the groups that now have their rollouts."""
        ...

    def release(self) -> None:
        """Frees all slots of the engine; `resume` computes the KV again."""
        ...

    def take_metrics(self) -> dict[str, float]:
        """Metrics of the time since the last call."""
        ...


class ResponseStream:
    """The unfinished responses of groups, in the engine or waiting for it.

    A response continues under new weights with the tokens that it has. Its KV is computed again,
    or kept with `keep_kv`. The random number of a token depends on its position only, so a
    response has the same samples however often it is interrupted.
    """

    def __init__(
        self,
        engine: RequestEngine,
        make_request: MakeRequest,
        *,
        n: int,
        stop: tuple[str, ...],
        decode: Decode,
        keep_kv: bool = False,
    ):
        self.engine, self.make_request = engine, make_request
        self.n, self.stop, self.decode, self.keep_kv = n, stop, decode, keep_kv
        self._in_engine: dict[int, tuple[PromptGroup, Response]] = {}  # by slot
        self._version: int | None = None

    @property
    def n_running(self) -> int:
        """Responses in the engine."""
        return len(self._in_engine)

    def responses(self, prompt: Prompt) -> list[Response]:
        """`n` responses without tokens."""
        return [Response(prompt, sample) for sample in range(self.n)]

    def resume(self, version: int, groups: Iterable[PromptGroup]) -> None:
        """Continues the unfinished responses of the groups under the weights of `version`."""
        if version != self._version and not self.keep_kv:
            self.release()
        self._version = version
        self.engine.set_version(version)
        for group in groups:
            self.submit(group)
            self._complete(group)

    def submit(self, group: PromptGroup) -> None:
        """Queues the unfinished responses of a group, except those in the engine."""
        running = {id(response) for _, response in self._in_engine.values()}
        for response in group.responses:
            if not response.finish and id(response) not in running:
                request = continued(self.make_request(group, response), response.tokens)
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
                if self._complete(group):
                    completed.append(group)
        return completed

    def release(self) -> None:
        """Frees the slots of all responses; `resume` computes their KV again."""
        for slot in self._in_engine:
            with contextlib.suppress(KeyError):  # the engine no longer has it
                self.engine.free(slot)
        self._in_engine.clear()

    def take_metrics(self) -> dict[str, float]:
        """None."""
        return {}

    def _complete(self, group: PromptGroup) -> bool:
        """Whether all responses of the group have ended; it then has their rollouts."""
        if group.rollouts is None and all(response.finish for response in group.responses):
            group.rollouts = [to_rollout(response, self.decode) for response in group.responses]
        return group.rollouts is not None
