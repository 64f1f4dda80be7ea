"""Rated answers: a prompt, an answer, and numbers that rate it, for reward models.

A row has the columns of a demonstration (jaxrl/data/demonstrations.py) without images, and a number
in some of the columns of reward_model.attributes, such as those of HelpSteer: helpfulness,
correctness, ... An attribute that is missing or null is not learned in that row.
"""

import dataclasses
import functools
import math
from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np

from jaxrl.config.choices import CONVERSATION_COLUMNS
from jaxrl.config.keys import DataConfig
from jaxrl.data.chat.encoding import ChatRenderer
from jaxrl.data.chat.row_messages import columns_of_prompt, tools_of
from jaxrl.data.demonstrations import (
    GIVEN_COLUMNS,
    completion_column,
    conversation,
    demonstration,
    max_len_text,
    rendered_turns,
)
from jaxrl.data.items import ItemMaker, Reading, Usage
from jaxrl.data.prompts import source_of
from jaxrl.data.sources import columns
from jaxrl.data.sources.rows import Dropped, SourceRow
from jaxrl.types import Demonstration


@dataclasses.dataclass(frozen=True)
class RatedAnswer:
    """An answer and its ratings."""

    id: int  # row in the dataset
    completion: Demonstration
    ratings: np.ndarray  # float32 [n_attributes], NaN where the row has none


def rating_maker(
    renderer: ChatRenderer, data: DataConfig, *, stop: Sequence[int], attributes: Sequence[str]
) -> ItemMaker[RatedAnswer]:
    """Makes the rated answers of rows. `stop` are the tokens that end an answer.

    An answer over max_prompt_len + max_response_len tokens is dropped with
    data.filter_overlong_prompts and raises ValueError otherwise. So do rows without an answer,
    without any rating, and with ratings that are not numbers.
    """
    make = functools.partial(
        make_ratings, renderer=renderer, data=data, stop=stop, attributes=attributes
    )
    usage = Usage(functools.partial(_reading, attributes))
    return ItemMaker("rated answers", max_len_text(data), data.columns, make, usage)


def _reading(attributes: Sequence[str], row: Mapping[str, Any]) -> Reading:
    if column := columns.first(row, CONVERSATION_COLUMNS):
        return Reading([*columns_of_prompt(row, column), *attributes])
    prompt = columns_of_prompt(row, columns.first(row, GIVEN_COLUMNS))
    return Reading([*prompt, completion_column(row), *attributes])


def make_ratings(
    rows: Sequence[SourceRow],
    dropped: Dropped,
    *,
    renderer: ChatRenderer,
    data: DataConfig,
    stop: Sequence[int],
    attributes: Sequence[str],
) -> list[RatedAnswer]:
    """The rated answers of the rows; what is left out goes to `dropped`."""
    found = []
    for row in rows:
        ratings = ratings_of(row.columns, attributes, row.place)
        messages, _ = conversation(row.columns, row.place)
        if messages[-1]["role"] != "assistant":
            raise ValueError(
                f"{row.place} ends with a turn of the {messages[-1]['role']}; end it with the "
                "answer that the ratings are about"
            )
        tools, given = tools_of(row.columns, row.place), range(len(messages) - 1)
        [(tokens, mask)] = rendered_turns(messages, renderer, stop, tools, row.place, given=given)
        if len(tokens) <= data.max_len:
            made = demonstration(row.number, tokens, mask, source=source_of(row.columns))
            found.append(RatedAnswer(row.number, made, ratings))
        elif data.filter_overlong_prompts:
            dropped.lengths.append(len(tokens))
        else:
            raise ValueError(
                f"{row.place} has {len(tokens)} tokens in prompt and answer, {max_len_text(data)}; "
                "raise them, or set data.filter_overlong_prompts=True to drop such rows"
            )
    return found


def ratings_of(row: Mapping[str, Any], attributes: Sequence[str], place: str) -> np.ndarray:
    """float32 [n_attributes], NaN for those that are missing. Raises ValueError with the place."""
    values = [row.get(name) for name in attributes]
    for name, value in zip(attributes, values, strict=True):
        is_number = isinstance(value, bool | int | float) and math.isfinite(value)
        if value is not None and not is_number:
            raise ValueError(
                f"{place}: {name} is {value!r:.80}; give a number, or null for an attribute that "
                "is not rated"
            )
    if all(value is None for value in values):
        raise ValueError(
            f"{place} has the columns {columns.names(row)} and none of reward_model.attributes="
            f"{tuple(attributes)}; correct the names, map them with data.columns, or remove the row"
        )
    return np.array([math.nan if value is None else value for value in values], np.float32)
