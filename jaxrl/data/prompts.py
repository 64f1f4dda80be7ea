"""Prompts of RL from the rows of a dataset: columns, chat template, length limit.

A row of any file type has one of these forms. Other columns reach the reward in extra_info.

verl's schema                                   plain
  prompt        list of {role, content}           a prompt: the first of PROMPT_COLUMNS that the
  reward_model  {style, ground_truth}               row has; a string is one user message
  data_source   optional, groups the metrics      an answer: the first of TRUTH_COLUMNS
  ability       optional                          data_source, ability, extra_info: optional
  extra_info    optional, passed to the reward

Both may be mixed (question + reward_model, prompt + label). The column `tools` has the tools that
the chat template offers to the model (jaxrl/data/chat/row_messages.py), and `images` its images
(jaxrl/data/images/references.py). Rewards get an answer as it is in the row: a string, a number, a
list or a dict; without one, if no reward needs it, "".
"""

import functools
import json
from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np

from jaxrl.config.choices import PROMPT_COLUMNS, TRUTH_COLUMNS
from jaxrl.config.keys import DataConfig
from jaxrl.data.chat.dialects import ends_with_answer
from jaxrl.data.chat.encoding import ChatRenderer, Tools
from jaxrl.data.chat.row_messages import (
    as_messages,
    check_text_only,
    columns_of_prompt,
    columns_of_text,
    prompt_of,
    tools_of,
)
from jaxrl.data.images.placeholders import Placeholders, n_images
from jaxrl.data.images.reader import ImageReader, read_images
from jaxrl.data.images.references import IMAGE_COLUMNS, ImageReference, mark_images
from jaxrl.data.items import ItemMaker, Reading, Usage
from jaxrl.data.sources import columns
from jaxrl.data.sources.rows import Dropped, SourceRow
from jaxrl.json_text import Message
from jaxrl.types import ImageInput, Prompt

_NOT_EXTRA = ("data_source", "extra_info", "tools", *IMAGE_COLUMNS)
_IF_RENDERED = "If the prompts are already rendered, set data.rendered_prompts=True. "


def prompt_maker(
    renderer: ChatRenderer,
    data: DataConfig,
    *,
    answer_for: str = "",
    images: ImageReader | None = None,
) -> ItemMaker[Prompt]:
    """Makes one prompt of each row; those over data.max_prompt_len are dropped or truncated.

    `answer_for` has the names of the reward functions that need an answer; "" allows rows without.
    `images` reads the images of rows for the model; None refuses rows with images.
    """
    make = functools.partial(
        make_prompts, renderer=renderer, data=data, answer_for=answer_for, images=images
    )
    limit = f"data.max_prompt_len = {data.max_prompt_len}"
    return ItemMaker("prompts", limit, data.columns, make, Usage(_reading))


def _reading(row: Mapping[str, Any]) -> Reading:
    """The columns that make_prompts() reads."""
    column, others = _prompt_column(row)
    note = ""
    if others:
        note = f"{others[0]} ends with an answer, so {column} is the prompt"
    elif ends_with_answer(row[column]):
        note = f"{column} ends with an answer, which is cut off"
    names = [*columns_of_prompt(row, column), *others[:1], *TRUTH_COLUMNS, "extra_info"]
    names += IMAGE_COLUMNS
    return Reading(names, passes_rest=True, note=note)


def _prompt_column(row: Mapping[str, Any]) -> tuple[str, list[str]]:
    """(column of the prompt or "", prompt columns before it, which end with an answer)."""
    names = [name for name in PROMPT_COLUMNS if row.get(name) is not None]
    questions = (i for i, n in enumerate(names) if row[n] and not ends_with_answer(row[n]))
    at = next(questions, 0)
    column = names[at] if names else ""
    return column, [name for name in names[:at] if ends_with_answer(row[name])]


def make_prompts(
    rows: Sequence[SourceRow],
    dropped: Dropped,
    *,
    renderer: ChatRenderer,
    data: DataConfig,
    answer_for: str = "",
    images: ImageReader | None = None,
) -> list[Prompt]:
    """The prompts of the rows, rendered together; what is left out goes to `dropped`."""
    prompts = []
    rows, found = read_images(rows, images, _mark, dropped)
    asked = [question_of(row.columns, row.place) for row in rows]
    offered = [tools_of(row.columns, row.place) for row in rows]
    rendered = _tokens(rows, asked, offered, renderer, data)
    for row, (question, messages), tools, tokens, inputs in zip(
        rows, asked, offered, rendered, found, strict=True
    ):
        if renderer.images:
            tokens = _expand(tokens, inputs, renderer.images, row.place)
        if len(tokens) > data.max_prompt_len and data.filter_overlong_prompts:
            dropped.lengths.append(len(tokens))
            continue
        kept = _truncate(tokens, row.number, data)
        if renderer.images:
            renderer.images.check_cut(tokens, kept, row.place)
        tokens, truth = tokens[kept], _truth_column(row, answer_for)
        prompts.append(
            Prompt(
                id=row.number,
                messages=messages,
                tokens=tokens,
                answer=_answer(row, truth),
                source=source_of(row.columns),
                extra=_extra(row.columns, used=(question, truth)),
                is_text=isinstance(row.columns[question], str),
                tools=tools,
                **(renderer.images.fields(tokens, inputs) if renderer.images else {}),
            )
        )
    return prompts


def _mark(row: Mapping[str, Any], place: str) -> tuple[dict[str, Any], list[ImageReference]]:
    """The row with the places of the images of its prompt, and the images."""
    return mark_images(row, columns_of_text(row, _prompt_column(row)[0]), place)


def _expand(
    tokens: np.ndarray, inputs: Sequence[ImageInput], images: Placeholders, place: str
) -> np.ndarray:
    """The tokens with all tokens of the images. The message of a ValueError has the place."""
    try:
        return images.expand(tokens, inputs)
    except ValueError as error:
        raise ValueError(f"{place}: {error}") from error


def question_of(row: dict[str, Any], place: str) -> tuple[str, tuple[Message, ...]]:
    """(column of the prompt, its messages), which never end with an assistant turn.

    If the first prompt column ends with an answer, another one that does not is used, with its
    system message. Else `messages` lose their last turn. Raises ValueError with the place for a
    `prompt` that ends with an answer, and for a row without a prompt.
    """
    check_text_only(row, place)
    column, others = _prompt_column(row)
    if not column:
        raise ValueError(
            f"{place} has the columns {columns.names(row)}; required is a prompt "
            f"({', '.join(PROMPT_COLUMNS)}); set data.columns, for example to prompt:NAME"
        )
    messages = prompt_of(row, place, (column,))
    assert messages is not None
    if others and messages[0]["role"] != "system":
        whole = as_messages(row[others[0]], others[0], place)
        messages = (*(m for m in whole if m["role"] == "system"), *messages)
    whole = messages
    while messages and messages[-1]["role"] == "assistant" and column == "messages":
        messages = messages[:-1]
    is_cut = len(messages) < len(whole)
    if not messages or messages[-1]["role"] in ("assistant", "system" if is_cut else "assistant"):
        raise ValueError(
            f"{place}: {column} has no question at its end; end it with a user turn or a tool's "
            "result. Remove an answer there: a prompt is not continued, and may not contain it"
        )
    return column, messages


def _tokens(
    rows: Sequence[SourceRow],
    asked: Sequence[tuple[str, tuple[Message, ...]]],
    offered: Sequence[Tools],
    renderer: ChatRenderer,
    data: DataConfig,
) -> list[np.ndarray]:
    """The tokens of the prompts of the rows, rendered unless data.rendered_prompts."""
    if data.rendered_prompts:
        return renderer.tokenize(
            [_rendered(*one, row) for one, row in zip(asked, rows, strict=True)]
        )
    for (_, messages), row in zip(asked, rows, strict=True):
        try:
            renderer.check_text(messages, _IF_RENDERED)
        except ValueError as error:
            raise ValueError(f"{row.place}: {error}") from error
    return renderer.render_all([messages for _, messages in asked], offered)


def _rendered(column: str, messages: Sequence[Message], row: SourceRow) -> str:
    """The text of a prompt that is already rendered."""
    is_one = isinstance(row.columns[column], str) and len(messages) == 1
    if not is_one or row.columns.get("tools") or n_images(messages):
        raise ValueError(
            f"{row.place}: {column} is not only text, so it is not rendered yet: the row has "
            "messages, a system message, history, tools or images. Set "
            "data.rendered_prompts=False, or write the prompt as text"
        )
    return messages[0]["content"]


def _truth_column(row: SourceRow, answer_for: str) -> str:
    """The column of the answer, or "". Raises ValueError if there is none and the rewards need it.

    verl's reward_model counts if it has a ground_truth.
    """
    reward_model = row.columns.get("reward_model")
    has_truth = isinstance(reward_model, dict) and reward_model.get("ground_truth") is not None
    column = columns.first(row.columns, TRUTH_COLUMNS if has_truth else TRUTH_COLUMNS[1:])
    if not column and answer_for:
        raise ValueError(
            f"{row.place} has the columns {columns.names(row.columns)}; {answer_for} needs an "
            f"answer (reward_model with ground_truth, {', '.join(TRUTH_COLUMNS[1:])}); set "
            "data.columns, for example to answer:NAME, or rewards that need no answer"
        )
    return column


def _answer(row: SourceRow, column: str) -> Any:
    """verl's ground truth or the answer: any value that JSON can express; "" without a column."""
    if not column:
        return ""
    value = row.columns[column]
    if column == "reward_model":
        value = value["ground_truth"]
    try:
        json.dumps(value)
    except (TypeError, ValueError) as error:
        raise ValueError(
            f"{row.place} has an answer that JSON cannot express ({error}); store text, numbers, "
            "lists or dicts with text as keys"
        ) from error
    return value


def source_of(row: dict[str, Any]) -> str:
    """verl's data_source, which groups the metrics."""
    return str(row.get("data_source") or "default")


def _extra(row: dict[str, Any], used: tuple[str, str]) -> dict[str, Any]:
    """The columns without a meaning for the prompt, then the columns of extra_info, which win."""
    extra, known = row.get("extra_info"), {*used, *_NOT_EXTRA}
    if isinstance(row.get("reward_model"), dict):
        known.add("reward_model")  # verl's ground truth and its style
    other = {k: v for k, v in row.items() if v is not None and k not in known}
    return other | (extra if isinstance(extra, dict) else {})


def _truncate(tokens: np.ndarray, row: int, data: DataConfig) -> np.ndarray:
    """The indices of max_prompt_len tokens; data.truncation names the side that is dropped.

    Raises ValueError for an overlong prompt if truncation is "error".
    """
    limit, excess = data.max_prompt_len, len(tokens) - data.max_prompt_len
    places = np.arange(len(tokens))
    if excess <= 0:
        return places
    if data.truncation == "left":
        return places[excess:]
    if data.truncation == "right":
        return places[:limit]
    if data.truncation == "middle":
        head = limit // 2
        return np.concatenate([places[:head], places[head + excess :]])
    raise ValueError(
        f"prompt {row} has {len(tokens)} tokens, data.max_prompt_len is {limit}; raise it, set "
        "data.filter_overlong_prompts=True to drop such prompts, or set data.truncation to 'left', "
        "'right' or 'middle'"
    )
