"""Turns that the model writes: the record of their tokens, and their life in an engine."""

import contextlib
import dataclasses
from collections.abc import Callable, Sequence
from typing import Any

import numpy as np

from jaxrl.data.images.placed import PlacedTokens, prompt_tokens
from jaxrl.data.routing import given_tokens, join_experts
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


class Response:
    """A response that is being generated. It has the fields of `Rollout`.

    The tokens of dispatches stay in arrays until a list is read, which a response of a single turn
    seldom needs before it ends.
    """

    def __init__(
        self,
        prompt: Prompt,
        sample: int,
        *,
        support: Sequence[TokenSets] = (),
        experts: Sequence[np.ndarray] = (),
        finish: str = "",
        **lists: Sequence[Any],
    ):
        """`lists` are those of FIELDS, all or none, of a response that has tokens."""
        self.prompt, self.sample = prompt, sample
        self.support = list(support)  # [] if not recorded
        self.experts = list(experts)  # the same
        self.finish = finish  # "" while unfinished
        self._lists: dict[str, list[Any]] = {name: list(lists.get(name, ())) for name in FIELDS}
        self._new: list[Generated] = []  # not in the lists yet
        # The prompt and tokens after it, up to the last image that was given; None: the prompt
        self._with_images: PlacedTokens | None = None

    @property
    def tokens(self) -> list[int]:
        return self._read()["tokens"]

    @property
    def logp(self) -> list[float]:
        return self._read()["logp"]

    @property
    def behavior_logp(self) -> list[float]:
        return self._read()["behavior_logp"]

    @property
    def versions(self) -> list[int]:
        return self._read()["versions"]

    @property
    def loss_mask(self) -> list[bool]:
        return self._read()["loss_mask"]

    @property
    def placed(self) -> PlacedTokens:
        """The tokens of prompt and response with all images."""
        found = self._with_images or prompt_tokens(self.prompt)
        after = len(found) - len(self.prompt.tokens)
        return found.then(PlacedTokens(np.array(self.tokens[after:], np.int32)))

    @property
    def ended(self) -> bool:
        return bool(self.finish)

    def append(self, generated: Generated) -> None:
        """Appends the tokens of one dispatch."""
        self._new.append(generated)
        if generated.support is not None:
            self.support.append(generated.support)
        if generated.experts is not None:
            self.experts.append(generated.experts)
        self.finish = generated.finish

    def append_given(self, given: PlacedTokens) -> None:
        """Appends tokens that the model did not sample. They have the version before them."""
        if given.images:
            self._with_images = self.placed.then(given)
        n, lists = len(given), self._read()
        lists["tokens"] += given.tokens.tolist()
        lists["logp"] += [0.0] * n
        lists["behavior_logp"] += [0.0] * n
        lists["versions"] += lists["versions"][-1:] * n
        lists["loss_mask"] += [False] * n
        self.support.append(unrestricted(n))
        self.experts += given_tokens(self.experts, n)

    def extend(self, turn: "Response") -> None:
        """Appends the tokens of a turn."""
        own, new = self._read(), turn._read()
        for name in FIELDS:
            own[name] += new[name]
        n = len(turn.tokens)
        self.support.append(join(turn.support, n) if turn.support else unrestricted(n))
        self.experts += [join_experts(turn.experts, n)] if turn.experts else []

    def cut(self, n: int) -> None:
        """Removes all tokens after the first `n`."""
        for values in self._read().values():
            del values[n:]
        if self.support:
            self.support = [join(self.support, n)]
        if self.experts:
            self.experts = [join_experts(self.experts, n)]

    def freeze(self, decode: Decode, episode: Episode | None = None) -> Rollout:
        """The rollout of the response, whose tokens are then arrays."""
        placed = self.placed if self.prompt.images or self._with_images else None
        arrays: dict[str, Any] = self._arrays()
        return Rollout(
            prompt=self.prompt,
            sample=self.sample,
            **arrays,
            support=join(self.support, len(arrays["tokens"])) if self.support else None,
            experts=join_experts(self.experts, len(arrays["tokens"])) if self.experts else None,
            finish=self.finish,
            images=placed.images if placed else (),
            axis_positions=placed.axis_positions if placed else None,
            text=decode(arrays["tokens"]),
            episode=episode,
        )

    def _arrays(self) -> dict[str, np.ndarray]:
        """FIELDS as arrays, without making lists of the tokens of dispatches."""
        parts = {name: [np.array(self._lists[name], dtype)] for name, dtype in FIELDS.items()}
        for new in self._new:
            for name, values in _fields(new).items():
                parts[name].append(values)
        return {name: np.concatenate(found) for name, found in parts.items()}

    def _read(self) -> dict[str, list[Any]]:
        """The lists, with all tokens."""
        for new in self._new:
            for name, values in _fields(new).items():
                self._lists[name] += values.tolist()
        self._new.clear()
        return self._lists


def _fields(new: Generated) -> dict[str, np.ndarray]:
    """FIELDS of the tokens of one dispatch."""
    n = len(new.tokens)
    return {
        "tokens": new.tokens,
        "logp": new.logp,
        "behavior_logp": new.behavior_logp,
        "versions": np.full(n, new.version, np.int32),
        "loss_mask": np.ones(n, np.bool_),
    }


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
            response = turn.response
            self.n_tokens += len(generated.tokens)
            response.append(generated)
            if turn.stop:
                self._stop_at_text(turn, len(generated.tokens))
            if response.finish:
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

    def _stop_at_text(self, turn: ActiveTurn[O], n_new: int) -> None:
        """Ends a response at the token that completes a stop string, if one of the last does."""
        response = turn.response
        n_old = len(response.tokens) - n_new
        end = stop_string_end(response.tokens, n_old, turn.stop, self.decode)
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
