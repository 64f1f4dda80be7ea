"""The turns of the model in a sequence, and the state of the environment before each of them."""

import dataclasses
import hashlib
import itertools
import json
from collections.abc import Iterator

import numpy as np

from jaxrl.json_text import Message
from jaxrl.types import Rollout


@dataclasses.dataclass(frozen=True)
class TokenRun:
    """Response tokens that the model sampled, or that others wrote before its next turn.

    `messages` is the turn of the model, or the messages of the others; () for tokens of the chat
    template alone.
    """

    start: int
    end: int
    sampled: bool
    messages: tuple[Message, ...]


def token_runs(rollout: Rollout) -> Iterator[TokenRun]:
    """The runs of a sequence, in order: turns and the observations between them.

    The turns of the model and the messages between them are matched with the runs in order. An
    observation after the last turn has no tokens and is left out.
    """
    messages, mask = rollout.completion_messages, rollout.loss_mask
    places = (i for i, message in enumerate(messages) if message["role"] == "assistant")
    edges = np.flatnonzero(np.diff(mask)) + 1
    at = -1  # index of the last turn of the model
    for start, end in itertools.pairwise([0, *edges.tolist(), len(mask)]):
        if start == end:  # no tokens
            return
        if mask[start]:
            at = next(places, at)
            yield TokenRun(start, end, True, messages[at : at + 1] if at >= 0 else ())
        else:
            others = itertools.takewhile(lambda m: m["role"] != "assistant", messages[at + 1 :])
            yield TokenRun(start, end, False, tuple(others))


def observation_roles(rollout: Rollout) -> np.ndarray:
    """str [response_len]: the role of the messages of each token's observation.

    "" at tokens that the model sampled, and if the messages of an observation have several roles or
    are not known.
    """
    found = np.full(len(rollout.tokens), "", object)
    for run in token_runs(rollout):
        roles = {message["role"] for message in run.messages}
        if not run.sampled and len(roles) == 1:
            found[run.start : run.end] = roles.pop()
    return found.astype(str)


def anchor_states(rollout: Rollout) -> list[bytes]:
    """A hash of the state that each turn of the model answers, in order.

    It is the observation before the turn, messages and images; before the first turn, the
    conversation so far. Turns with equal hashes answered the same state: GiGPO's anchor states
    (section 4.2, https://arxiv.org/abs/2505.10978).
    """
    n_prompt, found = len(rollout.prompt.tokens), []
    before, first = rollout.prompt_messages, 0  # of the next turn: its messages, its first token
    for run in token_runs(rollout):
        if run.sampled:
            images = [
                placed.image.digest
                for placed in rollout.images
                if first <= placed.start < n_prompt + run.start
            ]
            found.append(_digest(before, images))
            before, first = (), n_prompt + run.end
        else:
            before = run.messages
    return found


def _digest(messages: tuple[Message, ...], images: list[str]) -> bytes:
    text = json.dumps([[_state(m) for m in messages], images], sort_keys=True)
    return hashlib.sha256(text.encode()).digest()


def _state(message: Message) -> Message:
    """A message without the ids of calls, which differ between equal states."""
    return {name: value for name, value in message.items() if name != "tool_call_id"}
