"""Pairs of answers to one prompt of which one is preferred.

A row, whatever file it comes from, has one of these forms; other columns are ignored.

  chosen, rejected    two lists of {role, content}, whole conversations that end with an answer
  prompt | question | problem | instruction    a string or a list of messages, and beside it
  chosen, rejected    two strings (or lists of one message): the answers
  margin              optional: by how much, for reward models
"""

import dataclasses
import itertools
import math
from collections.abc import Sequence
from typing import Any

import numpy as np

from jaxrl.config.keys import DataConfig
from jaxrl.data.chat import ChatRenderer
from jaxrl.data.demonstrations import PROMPT_COLUMNS, Messages, check_kept, demonstration
from jaxrl.data.prompts import as_messages, columns, source_of
from jaxrl.data.tables import read_rows
from jaxrl.types import Demonstration


@dataclasses.dataclass(frozen=True)
class Pair:
    """Two answers to one prompt; `id` is its row in the data set. Only the last turn of each is learnt."""

    id: int
    chosen: Demonstration
    rejected: Demonstration
    margin: float = 0.0  # by how much, as the row's column `margin` says


def load_pairs(
    sources: Sequence[str],
    *,
    renderer: ChatRenderer,
    data: DataConfig,
    stop: Sequence[int],
    limit: int = 0,
) -> list[Pair]:
    """All pairs of the sources in order, at most `limit` (0 = all).

    `stop` are the tokens that end an answer. A pair of which one is longer than max_prompt_len +
    max_response_len tokens is left out with data.filter_overlong_prompts, else raises ValueError, as a row
    without the columns does and sources without any row.
    """
    pairs: list[Pair] = []
    dropped = 0
    rows = itertools.chain.from_iterable(read_rows(source) for source in sources)
    for number, (place, row) in enumerate(rows):
        source = source_of(row)
        chosen, rejected = (
            _answer(number, messages, source, renderer, stop)
            for messages in conversations(row, place)
        )
        n_tokens = max(len(d.prompt_tokens) + len(d.tokens) for d in (chosen, rejected))
        if n_tokens <= data.max_len:
            pairs.append(Pair(number, chosen, rejected, margin_of(row, place)))
        elif data.filter_overlong_prompts:
            dropped += 1
        else:
            raise ValueError(
                f"{place} has an answer of {n_tokens} tokens with its prompt, data.max_prompt_len + "
                f"data.max_response_len is {data.max_len}; raise them, or set "
                "data.filter_overlong_prompts=True to leave such pairs out"
            )
        if len(pairs) == limit > 0:
            break
    check_kept("pairs", len(pairs), dropped, sources, data)
    return pairs


def conversations(row: dict[str, Any], place: str) -> tuple[Messages, Messages]:
    """(chosen, rejected), each with the prompt before it.

    Raises ValueError, naming the place, where the row has not the columns, an answer is not the
    assistant's, or both are the same.
    """
    if row.get("chosen") is None or row.get("rejected") is None:
        raise ValueError(
            f"{place} has the columns {columns(row)}; needed are chosen and rejected, as conversations or "
            f"as answers to a prompt ({', '.join(PROMPT_COLUMNS)})"
        )
    name = next((name for name in PROMPT_COLUMNS if row.get(name) is not None), None)
    prompt = as_messages(row[name], name, place) if name else ()
    chosen, rejected = (_whole(prompt, row[side], side, place) for side in ("chosen", "rejected"))
    if chosen == rejected:
        raise ValueError(f"{place}: chosen and rejected are the same; leave such rows out")
    return chosen, rejected


def margin_of(row: dict[str, Any], place: str) -> float:
    """The number in the column `margin`, 0 without one. Raises ValueError, naming the place, for anything else."""
    margin = row.get("margin")
    if margin is None:
        return 0.0
    if not isinstance(margin, int | float) or not math.isfinite(margin):
        raise ValueError(
            f"{place}: margin={margin!r} is no number; leave the column out, or mend the row"
        )
    return float(margin)


def _whole(prompt: Messages, value: Any, side: str, place: str) -> Messages:
    if isinstance(value, str):
        said: Messages = ({"role": "assistant", "content": value},)
    else:
        said = as_messages(value, side, place)
    messages = said if said[: len(prompt)] == prompt else (*prompt, *said)
    if len(messages) < 2 or messages[-1]["role"] != "assistant":
        raise ValueError(
            f"{place}: {side} is no answer to a prompt; it must end with a turn of the assistant, and "
            f"without earlier turns there must be a column {' or '.join(PROMPT_COLUMNS)}"
        )
    return messages


def _answer(
    number: int, messages: Messages, source: str, renderer: ChatRenderer, stop: Sequence[int]
) -> Demonstration:
    tokens, loss_mask = renderer.render_turns(messages, stop)[-1]
    last_turn = np.zeros_like(loss_mask)
    last_turn[np.flatnonzero(~loss_mask)[-1] + 1 :] = True
    return demonstration(number, tokens, last_turn, source=source)
