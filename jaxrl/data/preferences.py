"""Preference pairs: two answers to one prompt, one of them preferred.

A row of any file type has one of these forms; other columns are named at the start.

  chosen, rejected    two lists of {role, content}: conversations that end with an answer
  prompt | question | problem | instruction | query | input    a string or messages, with
  chosen, rejected    two strings (or lists of one message): the answers
  prompt, completion, one answer and whether it is desirable (true or false), for KTO
  label
  margin              optional: how much better `chosen` is, for reward models
  system, history     optional, as in jaxrl/data/demonstrations.py
  images | image      optional: images of the prompt, or of both conversations

Conversations may repeat the prompt of their row: with a system message before it, after earlier
turns, or with other white space.
"""

import dataclasses
import functools
import math
from collections.abc import Mapping, Sequence
from typing import Any

from jaxrl.config.choices import PAIR_COLUMNS
from jaxrl.config.keys import DataConfig
from jaxrl.data.chat.dialects import role_of
from jaxrl.data.chat.encoding import ChatRenderer, Tools
from jaxrl.data.chat.row_messages import (
    check_text_only,
    columns_of_prompt,
    columns_of_text,
    prompt_of,
    tools_of,
    with_system,
)
from jaxrl.data.demonstrations import (
    GIVEN_COLUMNS,
    Conversation,
    check_turn_order,
    completion_column,
    completion_of,
    demonstration,
    expand_images,
    max_len_text,
    rendered_turns,
)
from jaxrl.data.images.placeholders import n_images
from jaxrl.data.images.reader import ImageReader, read_images
from jaxrl.data.images.references import IMAGE_COLUMNS, ImageReference, mark_images
from jaxrl.data.items import ItemMaker, Reading, Usage
from jaxrl.data.prompts import source_of
from jaxrl.data.sources import columns
from jaxrl.data.sources.rows import Dropped, SourceRow
from jaxrl.json_text import Message
from jaxrl.types import Demonstration, ImageInput

LABEL = "label"
_SIDES = ("chosen", "rejected")


@dataclasses.dataclass(frozen=True)
class Labelled:
    """One answer to a prompt, and whether it is desirable. Only its last turn is in the loss."""

    id: int  # row in the dataset
    completion: Demonstration
    desirable: bool


@dataclasses.dataclass(frozen=True)
class Pair:
    """Two answers to one prompt. Only the last turn of each is in the loss."""

    id: int  # row in the dataset
    chosen: Demonstration
    rejected: Demonstration
    margin: float = 0.0  # the row's column `margin`


def pair_maker(
    renderer: ChatRenderer,
    data: DataConfig,
    *,
    stop: Sequence[int],
    takes_labels: bool = False,
    images: ImageReader | None = None,
) -> ItemMaker[Pair | Labelled]:
    """Makes the pairs of rows. `stop` are the tokens that end an answer.

    With `takes_labels` a row may have one answer with a label instead; else that is refused.
    `images` reads the images of rows for the model; None refuses rows with images.

    A pair with a conversation over max_prompt_len + max_response_len tokens is dropped with
    data.filter_overlong_prompts and raises ValueError otherwise. So do rows without the required
    columns.
    """
    make = functools.partial(
        make_pairs,
        renderer=renderer,
        data=data,
        stop=stop,
        takes_labels=takes_labels,
        images=images,
    )
    return ItemMaker("pairs", max_len_text(data), data.columns, make, Usage(_reading))


def _reading(row: Mapping[str, Any]) -> Reading:
    """The columns that make_pairs() reads."""
    prompt = columns_of_prompt(row, columns.first(row, GIVEN_COLUMNS))
    if is_labelled(row):
        note = "each answer is learned by its label, without a pair"
        names = [*prompt, completion_column(row), LABEL, *IMAGE_COLUMNS]
        return Reading(names, note=note)
    return Reading([*prompt, *PAIR_COLUMNS, *IMAGE_COLUMNS])


def make_pairs(
    rows: Sequence[SourceRow],
    dropped: Dropped,
    *,
    renderer: ChatRenderer,
    data: DataConfig,
    stop: Sequence[int],
    takes_labels: bool,
    images: ImageReader | None = None,
) -> list[Pair | Labelled]:
    """The pairs of the rows; what is left out goes to `dropped`."""
    pairs: list[Pair | Labelled] = []
    rows, every = read_images(rows, images, _mark, dropped)
    for row, inputs in zip(rows, every, strict=True):
        tools = tools_of(row.columns, row.place)
        labelled = is_labelled(row.columns)
        if labelled and not takes_labels:
            raise ValueError(
                f"{row.place} has one answer with a label, which only KTO and APO-zero learn "
                "from; run jaxrl.dpo with preference.loss='kto' or 'apo_zero_unpaired', or give "
                "pairs: the columns chosen and rejected"
            )
        sides = labelled_answer if labelled else conversations
        answers = [
            _answer(row, messages, renderer, stop, tools, inputs)
            for messages in sides(row.columns, row.place)
        ]
        n_tokens = max(len(d.prompt_tokens) + len(d.tokens) for d in answers)
        if n_tokens <= data.max_len and labelled:
            pairs.append(Labelled(row.number, answers[0], bool(row.columns[LABEL])))
        elif n_tokens <= data.max_len:
            chosen, rejected = answers
            pairs.append(Pair(row.number, chosen, rejected, margin_of(row.columns, row.place)))
        elif data.filter_overlong_prompts:
            dropped.lengths.append(n_tokens)
        else:
            raise ValueError(
                f"{row.place} has {n_tokens} tokens in prompt and answer, data.max_prompt_len + "
                f"data.max_response_len is {data.max_len}; raise them, or set "
                "data.filter_overlong_prompts=True to drop such pairs"
            )
    return pairs


def _mark(row: Mapping[str, Any], place: str) -> tuple[dict[str, Any], list[ImageReference]]:
    """The row with the places of the images of its conversations, and the images of each."""
    prompt = columns_of_text(row, columns.first(row, GIVEN_COLUMNS))
    sides = [completion_column(row)] if is_labelled(row) else list(_SIDES)
    whole = [side for side in sides if _is_whole(row.get(side))]  # they repeat the prompt, if any
    texts = [[side] if side in whole else [*prompt, side] for side in sides]
    texts += [prompt] * bool(whole and row.get(prompt[-1]))
    marked = [mark_images(row, names, place) for names in texts]
    first, references = marked[0]
    if any(images != references for _, images in marked):
        raise ValueError(
            f"{place}: {', '.join(sides)} and the prompt have different images; the images of a "
            "pair are those of its prompt. Correct or remove the row"
        )
    changed = {name: own[name] for own, _ in marked for name in own if own[name] != row.get(name)}
    return first | changed, references


def _is_whole(value: Any) -> bool:
    """Whether the value of a side is a conversation, with its question."""
    return isinstance(value, list) and any(role_of(m) == "user" for m in value)


def conversations(row: dict[str, Any], place: str) -> tuple[Conversation, Conversation]:
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
    chosen, rejected = (_conversation(prompt, row, side, place) for side in _SIDES)
    if _are_equal(chosen[:-1], rejected[:-1]):
        rejected = (*chosen[:-1], rejected[-1])  # one prompt, also in its white space
    if chosen == rejected:
        raise ValueError(f"{place}: chosen and rejected are equal; remove such rows")
    return chosen, rejected


def is_labelled(row: Mapping[str, Any]) -> bool:
    """Whether a row has one answer with a label, and no pair."""
    has_pair = any(row.get(name) is not None for name in _SIDES)
    return not has_pair and row.get(LABEL) is not None and bool(completion_column(row))


def labelled_answer(row: dict[str, Any], place: str) -> list[Conversation]:
    """The prompt with the answer of a row with a label.

    Raises ValueError with the place for another label than true and false, and as `conversations`.
    """
    check_text_only(row, place)
    if row[LABEL] not in (True, False):
        raise ValueError(
            f"{place}: label={row[LABEL]!r:.80} is neither true (a desirable answer) nor false; "
            "correct it"
        )
    prompt = prompt_of(row, place, GIVEN_COLUMNS) or ()
    return [_conversation(prompt, row, completion_column(row), place)]


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


def _conversation(prompt: Conversation, row: dict[str, Any], side: str, place: str) -> Conversation:
    """The conversation of a side: its own one, or the prompt with its completion."""
    answer = completion_of(row[side], side, place)
    is_whole = any(m["role"] == "user" for m in answer)
    if answer[-1]["role"] != "assistant" or not (is_whole or prompt):
        raise ValueError(
            f"{place}: {side} is not an answer to a prompt; end it with an assistant turn, and add "
            f"earlier turns or a column {' or '.join(GIVEN_COLUMNS)}"
        )
    if is_whole and not prompt:
        return with_system(answer, row, place)
    if is_whole and _repeats(answer, prompt):
        return _with_system_of(prompt, answer, side, place)
    if is_whole and prompt[-1]["role"] != "assistant":
        raise ValueError(
            f"{place}: {side} is a conversation with other questions than the prompt, so that both "
            "together would ask twice; remove the prompt's column, or leave only the answers in "
            "chosen and rejected"
        )
    check_turn_order(prompt, answer, side, place)
    return (*prompt, *answer)


def _repeats(answer: Conversation, prompt: Conversation) -> bool:
    """Whether the turns of the prompt begin the conversation, or are those before its answer."""
    given = [m for m in prompt if m["role"] != "system"]
    turns = [m for m in answer if m["role"] != "system"]
    return any(
        _are_equal(given, part) for part in (turns[: len(given)], turns[-1 - len(given) : -1])
    )


def _are_equal(a: Sequence[Message], b: Sequence[Message]) -> bool:
    """Whether both have the same turns, apart from white space."""
    first, second = ([(m["role"], m["content"].split()) for m in part] for part in (a, b))
    return first == second


def _with_system_of(
    prompt: Conversation, answer: Conversation, side: str, place: str
) -> Conversation:
    """The conversation with the system message of the prompt that it repeats."""
    systems, own = ([m for m in part if m["role"] == "system"] for part in (prompt, answer))
    if systems and own and not _are_equal(systems, own):
        raise ValueError(
            f"{place}: the prompt and {side} have different system messages; remove one of them"
        )
    return answer if own else (*systems, *answer)


def _answer(
    row: SourceRow,
    messages: Conversation,
    renderer: ChatRenderer,
    stop: Sequence[int],
    tools: Tools,
    images: Sequence[ImageInput],
) -> Demonstration:
    """A conversation whose last turn is learned. Raises ValueError for an image in that turn."""
    given, fields = range(len(messages) - 1), {}
    if images and n_images(messages[-1:]):
        raise ValueError(f"{row.place}: an answer has an image; only prompts have images")
    [(tokens, mask)] = rendered_turns(messages, renderer, stop, tools, row.place, given=given)
    if places := renderer.images:
        tokens, mask, images = expand_images(tokens, mask, images, places, row.place)
        fields = places.fields(tokens, images)
    found = demonstration(row.number, tokens, mask, source=source_of(row.columns))
    return dataclasses.replace(found, **fields)
