"""Preference pairs: two answers to one prompt, one of them preferred.

A row of any file type has one of these forms; other columns are ignored.

  chosen, rejected    two lists of {role, content}: conversations that end with an answer
  prompt | question | problem | instruction | query | input    a string or messages, with
  chosen, rejected    two strings (or lists of one message): the answers
  margin              optional: how much better `chosen` is, for reward models
"""

import dataclasses
import functools
import math
from collections.abc import Sequence
from typing import Any

from jaxrl.config.keys import DataConfig
from jaxrl.data.chat.encoding import ChatRenderer, Tools
from jaxrl.data.chat.messages import as_messages, check_text_only, prompt_of, tools_of
from jaxrl.data.demonstrations import (
    GIVEN_COLUMNS,
    Messages,
    demonstration,
    max_len_text,
    rendered_turns,
)
from jaxrl.data.items import ItemMaker
from jaxrl.data.prompts import source_of
from jaxrl.data.sources import columns
from jaxrl.data.sources.rows import Row
from jaxrl.types import Demonstration


@dataclasses.dataclass(frozen=True)
class Pair:
    """Two answers to one prompt. Only the last turn of each is in the loss."""

    id: int  # row in the dataset
    chosen: Demonstration
    rejected: Demonstration
    margin: float = 0.0  # the row's column `margin`


def pair_maker(renderer: ChatRenderer, data: DataConfig, *, stop: Sequence[int]) -> ItemMaker[Pair]:
    """Makes the pairs of rows. `stop` are the tokens that end an answer.

    A pair with a conversation over max_prompt_len + max_response_len tokens is dropped with
    data.filter_overlong_prompts and raises ValueError otherwise. So do rows without the required
    columns.
    """
    make = functools.partial(make_pairs, renderer=renderer, data=data, stop=stop)
    return ItemMaker("pairs", max_len_text(data), data.columns, make)


def make_pairs(
    rows: Sequence[Row],
    dropped: list[int],
    *,
    renderer: ChatRenderer,
    data: DataConfig,
    stop: Sequence[int],
) -> list[Pair]:
    """The pairs of the rows; the lengths of dropped ones go to `dropped`."""
    pairs: list[Pair] = []
    for row in rows:
        tools = tools_of(row.columns, row.place)
        chosen, rejected = (
            _answer(row, messages, renderer, stop, tools)
            for messages in conversations(row.columns, row.place)
        )
        n_tokens = max(len(d.prompt_tokens) + len(d.tokens) for d in (chosen, rejected))
        if n_tokens <= data.max_len:
            pairs.append(Pair(row.number, chosen, rejected, margin_of(row.columns, row.place)))
        elif data.filter_overlong_prompts:
            dropped.append(n_tokens)
        else:
            raise ValueError(
                f"{row.place} has {n_tokens} tokens in prompt and answer, data.max_prompt_len + "
                f"data.max_response_len is {data.max_len}; raise them, or set "
                "data.filter_overlong_prompts=True to drop such pairs"
            )
    return pairs


def conversations(row: dict[str, Any], place: str) -> tuple[Messages, Messages]:
    """(chosen, rejected), each including the prompt.

    Raises ValueError with the place if the columns are missing, an answer is not an assistant turn,
    or both are equal.
    """
    check_text_only(row, place)
    if row.get("chosen") is None or row.get("rejected") is None:
        raise ValueError(
            f"{place} has the columns {columns.names(row)}; required are chosen and rejected, as "
            f"conversations or as answers to a prompt ({', '.join(GIVEN_COLUMNS)}); set "
            "data.columns, for example to chosen:NAME,rejected:NAME"
        )
    prompt = prompt_of(row, place, GIVEN_COLUMNS) or ()
    chosen, rejected = (
        _with_prompt(prompt, row[side], side, place) for side in ("chosen", "rejected")
    )
    if chosen == rejected:
        raise ValueError(f"{place}: chosen and rejected are equal; remove such rows")
    return chosen, rejected


def margin_of(row: dict[str, Any], place: str) -> float:
    """The number in the column `margin`, 0 without one. Raises ValueError for anything else."""
    margin = row.get("margin")
    if margin is None:
        return 0.0
    if not isinstance(margin, int | float) or not math.isfinite(margin):
        raise ValueError(
            f"{place}: margin={margin!r} is not a finite number; correct it or remove the column"
        )
    return float(margin)


def _with_prompt(prompt: Messages, value: Any, side: str, place: str) -> Messages:
    if isinstance(value, str):
        answer: Messages = ({"role": "assistant", "content": value},)
    else:
        answer = as_messages(value, side, place)
    messages = answer if answer[: len(prompt)] == prompt else (*prompt, *answer)
    if len(messages) < 2 or messages[-1]["role"] != "assistant":
        raise ValueError(
            f"{place}: {side} is not an answer to a prompt; end it with an assistant turn, and add "
            f"earlier turns or a column {' or '.join(GIVEN_COLUMNS)}"
        )
    return messages


def _answer(
    row: Row, messages: Messages, renderer: ChatRenderer, stop: Sequence[int], tools: Tools
) -> Demonstration:
    """A conversation whose last turn is learned."""
    n_given = len(messages) - 1
    [(tokens, mask)] = rendered_turns(messages, renderer, stop, tools, row.place, n_given=n_given)
    return demonstration(row.number, tokens, mask, source=source_of(row.columns))
