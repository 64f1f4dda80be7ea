"""Turns that the model writes: the record of their tokens, and their life in an engine."""

import contextlib
import dataclasses
from collections.abc import Callable, Sequence
from typing import Any

import numpy as np

from jaxrl.data.support import join, unrestricted
from jaxrl.engine.api import Generated, Request, RequestEngine
from jaxrl.types import Decode, Episode, Prompt, Rollout, TokenSets, Tree

FIELDS = {  # the lists with one element per token, and their dtypes in a rollout
    "tokens": np.int32,
    "logp": np.float32,
    "behavior_logp": np.float32,
    "versions": np.int32,
    "loss_mask": np.bool_,
}


@dataclasses.dataclass(eq=False)
class Response:
    """A response that is being generated. It has the fields of `Rollout`."""

    prompt: Prompt
    sample: int
    tokens: list[int] = dataclasses.field(default_factory=list)
    logp: list[float] = dataclasses.field(default_factory=list)
    behavior_logp: list[float] = dataclasses.field(default_factory=list)
    versions: list[int] = dataclasses.field(default_factory=list)
    loss_mask: list[bool] = dataclasses.field(default_factory=list)
    support: list[TokenSets] = dataclasses.field(default_factory=list)  # [] if not recorded
    finish: str = ""  # "" while unfinished

    @property
    def ended(self) -> bool:
        return bool(self.finish)

    def append(self, generated: Generated) -> None:
        """Appends the tokens of one dispatch."""
        n = len(generated.tokens)
        self.tokens += generated.tokens.tolist()
        self.logp += generated.logp.tolist()
        self.behavior_logp += generated.behavior_logp.tolist()
        self.versions += [generated.version] * n
        self.loss_mask += [True] * n
        if generated.support is not None:
            self.support.append(generated.support)
        self.finish = generated.finish

    def append_given(self, tokens: Sequence[int]) -> None:
        """Appends tokens that the model did not sample. They have the version before them."""
        n = len(tokens)
        self.tokens += tokens
        self.logp += [0.0] * n
        self.behavior_logp += [0.0] * n
        self.versions += self.versions[-1:] * n
        self.loss_mask += [False] * n
        self.support.append(unrestricted(n))

    def extend(self, turn: "Response") -> None:
        """Appends the tokens of a turn."""
        for name in FIELDS:
            getattr(self, name).extend(getattr(turn, name))
        n = len(turn.tokens)
        self.support.append(join(turn.support, n) if turn.support else unrestricted(n))

    def cut(self, n: int) -> None:
        """Removes all tokens after the first `n`."""
        for name in FIELDS:
            del getattr(self, name)[n:]
        if self.support:
            self.support = [join(self.support, n)]

    def freeze(self, decode: Decode, episode: Episode | None = None) -> Rollout:
        """The rollout of the response, whose tokens are then arrays."""
        arrays: dict[str, Any] = {
            name: np.array(getattr(self, name), dtype) for name, dtype in FIELDS.items()
        }
        return Rollout(
            prompt=self.prompt,
            sample=self.sample,
            **arrays,
            support=join(self.support, len(self.tokens)) if self.support else None,
            finish=self.finish,
            text=decode(arrays["tokens"]),
            episode=episode,
        )


@dataclasses.dataclass(eq=False)
class ActiveTurn[O]:
    """A turn that the model writes. A response of a single turn is one, too."""

    owner: O
    request: Request  # for all tokens of the turn
    response: Response  # the tokens that it has
    stop: tuple[str, ...]  # strings that end it


class ActiveTurns[O]:
    """The turns in an engine, and those that were taken out of it while weights change.

    A paused turn continues with the tokens that it has. The random number of a token depends on its
    position only, so it has the same samples however often it is paused.
    """

    def __init__(self, engine: RequestEngine, decode: Decode):
        self.engine, self.decode = engine, decode
        self.in_engine: dict[int, ActiveTurn[O]] = {}  # by slot
        self.paused: list[ActiveTurn[O]] = []
        self.n_tokens = 0  # that the engine has sampled for them

    @property
    def all(self) -> list[ActiveTurn[O]]:
        """The turns that have not ended."""
        return [*self.in_engine.values(), *self.paused]

    def submit(self, turn: ActiveTurn[O]) -> None:
        """Queues a turn, or the rest of it. Raises ValueError if it can never fit the engine."""
        request = continued(turn.request, turn.response.tokens)
        self.in_engine[self.engine.submit(request)] = turn

    def dispatch(self, params: Tree) -> list[ActiveTurn[O]]:
        """Runs one dispatch of the engine. Returns the turns that ended."""
        ended = []
        for generated in self.engine.generate(params):
            turn = self.in_engine[generated.slot]
            self.n_tokens += len(generated.tokens)
            self._append(turn, generated)
            if turn.response.ended:
                del self.in_engine[generated.slot]
                if not generated.finish:
                    self.engine.free(generated.slot)
                ended.append(turn)
        return ended

    def pause(self) -> None:
        """Takes all turns out of the engine."""
        self.paused += [self._remove(slot) for slot in list(self.in_engine)]

    def resume(self) -> None:
        """Queues the paused turns again, for the same weights or others."""
        paused, self.paused = self.paused, []
        for turn in paused:
            self.submit(turn)

    def cancel(self, chosen: Callable[[O], bool]) -> list[ActiveTurn[O]]:
        """Cancels the turns of the chosen owners, paused or not, and returns them."""
        cancelled = [turn for turn in self.paused if chosen(turn.owner)]
        self.paused = [turn for turn in self.paused if turn not in cancelled]
        slots = [slot for slot, turn in self.in_engine.items() if chosen(turn.owner)]
        return cancelled + [self._remove(slot) for slot in slots]

    def _remove(self, slot: int) -> ActiveTurn[O]:
        with contextlib.suppress(KeyError):  # the engine no longer has it
            self.engine.free(slot)
        return self.in_engine.pop(slot)

    def _append(self, turn: ActiveTurn[O], generated: Generated) -> None:
        """Appends the tokens of one dispatch, up to the token that completes a stop string."""
        response = turn.response
        n_old = len(response.tokens)
        response.append(generated)
        end = stop_string_end(response.tokens, n_old, turn.stop, self.decode) if turn.stop else None
        if end is not None:
            response.cut(end)
            response.finish = "stop"


def continued(request: Request, sampled: Sequence[int]) -> Request:
    """The request for the rest of a response, after the tokens that it has."""
    if not sampled:
        return request
    tokens = np.concatenate([request.tokens, np.array(sampled, np.int32)])
    return dataclasses.replace(request, tokens=tokens, max_tokens=request.max_tokens - len(sampled))


def stop_string_end(
    tokens: Sequence[int], n_old: int, stop: tuple[str, ...], decode: Decode
) -> int | None:
    """The number of tokens whose text first contains a stop string, None if there is none.

    The first `n_old` tokens are known to contain none.
    """
    # A string that ends after n_old starts at most its length in bytes, as tokens, before it.
    first = max(n_old - max(len(s.encode()) for s in stop), 0)

    def stops(end: int) -> bool:
        text = decode(np.asarray(tokens[first:end], np.int32))
        return any(s in text for s in stop)

    if not stops(len(tokens)):
        return None
    return next(end for end in range(n_old + 1, len(tokens) + 1) if stops(end))
