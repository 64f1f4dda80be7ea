"""Demonstrations for SFT: conversations whose assistant turns are learned, or plain text.

A row of any file type has one of these forms; other columns are named at the start.

  messages | conversations    a list of {role, content}; the assistant turns are learned, with their
                              tool_calls, except those with weight, train or loss_mask 0
  a prompt: prompt | question | problem | instruction | query | input, a string or messages, with
  its completion: response | completion | output | answer, a string or messages

  text       plain text, all of it is learned; only if the row has neither of the above

  system     optional: the system message
  history    optional: the turns before a prompt that is text, [[question, answer], ...]
  tools      optional: the tools that the chat template offers to the model
"""

import dataclasses
import functools
from collections.abc import Collection, Mapping, Sequence
from typing import Any

import numpy as np

from jaxrl.config.choices import (
    COMPLETION_COLUMNS,
    CONVERSATION_COLUMNS,
    PROMPT_COLUMNS,
    TEXT_COLUMN,
)
from jaxrl.config.keys import DataConfig
from jaxrl.data.chat.encoding import ChatRenderer, Tools
from jaxrl.data.chat.row_messages import (
    as_messages,
    check_text_only,
    columns_of_prompt,
    columns_of_text,
    not_learned,
    prompt_of,
    tools_of,
    with_system,
)
from jaxrl.data.chat.turns import MaskedTokens, render_turns
from jaxrl.data.images.placeholders import Placeholders
from jaxrl.data.images.reader import ImageReader, read_images
from jaxrl.data.images.references import IMAGE_COLUMNS, ImageReference, mark_images
from jaxrl.data.items import ItemMaker, Reading, Usage
from jaxrl.data.prompts import source_of
from jaxrl.data.sources import columns
from jaxrl.data.sources.rows import Dropped, SourceRow
from jaxrl.data.teacher_columns import read_teacher_tokens
from jaxrl.json_text import Message
from jaxrl.types import Demonstration, ImageInput, TrainingSample

GIVEN_COLUMNS = tuple(name for name in PROMPT_COLUMNS if name not in CONVERSATION_COLUMNS)

Conversation = tuple[Message, ...]


def demonstration_maker(
    renderer: ChatRenderer,
    data: DataConfig,
    *,
    stop: Sequence[int],
    images: ImageReader | None = None,
    top_k: int = 0,
) -> ItemMaker[Demonstration]:
    """Makes the demonstrations of rows. `stop` are the tokens that end an answer.

    `images` reads the images of rows for the model; None refuses rows with images. `top_k` most
    likely ids of a teacher are read from data.teacher_logprobs.

    A conversation over max_prompt_len + max_response_len tokens is dropped with
    data.filter_overlong_prompts, loses its end with data.truncation="right", and raises ValueError
    otherwise. So do rows without the required columns.
    """
    make = functools.partial(
        make_demonstrations, renderer=renderer, data=data, stop=stop, images=images, top_k=top_k
    )
    usage = Usage(functools.partial(_reading_with, data.teacher_logprobs))
    return ItemMaker("demonstrations", max_len_text(data), data.columns, make, usage)


def _reading_with(teacher: str, row: Mapping[str, Any]) -> Reading:
    """The columns of a row that are read, that of the teacher included."""
    reading = _reading(row)
    return dataclasses.replace(reading, columns=[*reading.columns, teacher])


def _reading(row: Mapping[str, Any]) -> Reading:
    """The columns that conversation() reads."""
    if column := columns.first(row, CONVERSATION_COLUMNS):
        names = [n for n in columns_of_prompt(row, column) if n != "history"]
        return Reading([*names, *IMAGE_COLUMNS], learns=True)
    if is_text(row):
        return Reading([TEXT_COLUMN], note="text has no turns, so all of its tokens are learned")
    prompt = columns_of_prompt(row, columns.first(row, GIVEN_COLUMNS))
    return Reading([*prompt, completion_column(row), *IMAGE_COLUMNS], learns=True)


def _mark(row: Mapping[str, Any], place: str) -> tuple[dict[str, Any], list[ImageReference]]:
    """The row with the places of the images of its conversation, and the images."""
    if column := columns.first(row, CONVERSATION_COLUMNS):
        return mark_images(row, [column], place)
    if is_text(row):
        return mark_images(row, [TEXT_COLUMN], place)
    prompt = columns_of_text(row, columns.first(row, GIVEN_COLUMNS))
    return mark_images(row, [*prompt, completion_column(row)], place)


def max_len_text(data: DataConfig) -> str:
    """The limit of prompt and response together, with its keys."""
    return f"data.max_prompt_len + data.max_response_len = {data.max_len}"


def make_demonstrations(
    rows: Sequence[SourceRow],
    dropped: Dropped,
    *,
    renderer: ChatRenderer,
    data: DataConfig,
    stop: Sequence[int],
    images: ImageReader | None = None,
    top_k: int = 0,
) -> list[Demonstration]:
    """The demonstrations of the rows; what is left out goes to `dropped`."""
    found: list[Demonstration] = []
    rows, every = read_images(rows, images, _mark, dropped)
    for row, inputs in zip(rows, every, strict=True):
        if is_text(row.columns):
            if inputs:
                raise ValueError(
                    f"{row.place}: plain text ({TEXT_COLUMN}) with images is not supported; write "
                    "the row as messages"
                )
            rendered = [rendered_text(row, renderer, stop)]
        else:
            messages, given = conversation(row.columns, row.place)
            tools = tools_of(row.columns, row.place)
            rendered = rendered_turns(messages, renderer, stop, tools, row.place, given=given)
        if data.teacher_logprobs and len(rendered) > 1:
            raise ValueError(
                f"{row.place}: the chat template shows its turns as {len(rendered)} sequences, "
                "whose tokens data.teacher_logprobs cannot name; write one row for each"
            )
        for tokens, loss_mask in rendered:
            shown: Sequence[ImageInput] = ()
            if places := renderer.images:
                tokens, loss_mask, shown = expand_images(
                    tokens, loss_mask, inputs, places, row.place
                )
            teacher = None
            if data.teacher_logprobs:
                teacher = read_teacher_tokens(
                    row.columns,
                    data.teacher_logprobs,
                    tokens,
                    loss_mask,
                    k=top_k,
                    n_vocab=len(renderer.tokenizer),
                    place=row.place,
                )
            if len(tokens) > data.max_len:
                if data.filter_overlong_prompts:
                    dropped.lengths.append(len(tokens))
                    continue
                if places:
                    places.check_cut(tokens, np.arange(data.max_len), row.place)
                tokens, loss_mask = _truncate(tokens, loss_mask, row.place, data)
            source = source_of(row.columns)
            made = demonstration(row.number, tokens, loss_mask, source=source)
            if teacher is not None:
                made = dataclasses.replace(
                    made, teacher=teacher[len(made.prompt_tokens) : len(tokens)]
                )
            found.append(
                dataclasses.replace(
                    made,
                    **(places.fields(tokens, shown) if places else {}),
                )
            )
    return found


def expand_images(
    tokens: np.ndarray,
    loss_mask: np.ndarray,
    inputs: Sequence[ImageInput],
    places: Placeholders,
    row_place: str,
) -> tuple[np.ndarray, np.ndarray, Sequence[ImageInput]]:
    """(tokens with all tokens of the images, their loss mask, the images of this sequence).

    A sequence that ends before the last turn has the first images only. The tokens of an image are
    never learned.
    """
    shown = inputs[: int((tokens == places.token).sum())]
    try:
        expanded = places.expand(tokens, shown)
    except ValueError as error:
        raise ValueError(f"{row_place}: {error}") from error
    mask = np.repeat(loss_mask, places.n_each(tokens, shown))
    return expanded, mask & (expanded != places.token), shown


def rendered_turns(
    messages: Conversation,
    renderer: ChatRenderer,
    stop: Sequence[int],
    tools: Tools,
    place: str,
    *,
    given: Collection[int],
) -> list[MaskedTokens]:
    """render_turns() of a row. The message of a ValueError begins with its place."""
    try:
        renderer.check_text(messages)
        return render_turns(renderer, messages, stop, tools, given=given)
    except ValueError as error:
        raise ValueError(f"{place}: {error}") from error


def is_text(row: Mapping[str, Any]) -> bool:
    """Whether a row is plain text: without a conversation, and without a prompt's completion."""
    if columns.first(row, CONVERSATION_COLUMNS) or not isinstance(row.get(TEXT_COLUMN), str):
        return False
    return not (columns.first(row, GIVEN_COLUMNS) and completion_column(row))


def rendered_text(row: SourceRow, renderer: ChatRenderer, stop: Sequence[int]) -> MaskedTokens:
    """(tokens, loss mask) of plain text: all learned, with a stop token at the end.

    The chat template is not applied. Raises ValueError for empty text, and for special tokens in it
    as `ChatRenderer.check_text`.
    """
    text = row.columns[TEXT_COLUMN]
    if not text.strip():
        raise ValueError(f"{row.place}: text is empty; remove the row")
    message = {"role": "user", "content": text}
    try:
        renderer.check_text(
            [message],
            "If it is rendered by the chat template, set data.special_tokens=token to read it as "
            "such. ",
        )
    except ValueError as error:
        raise ValueError(f"{row.place}: {error}") from error
    [tokens] = renderer.tokenize([renderer.hidden([message])[0]["content"]])
    start = renderer.tokenizer("", add_special_tokens=True)["input_ids"][:1]
    start = [i for i in start if i == renderer.tokenizer.bos_token_id and i != tokens[0]]
    stops = sorted(stop, key=lambda i: i != renderer.tokenizer.eos_token_id)
    end = [] if tokens[-1] in stop else stops[:1]
    tokens = np.array([*start, *tokens.tolist(), *end], np.int32)
    return tokens, np.arange(len(tokens)) >= len(start)


def demonstration(
    number: int, tokens: np.ndarray, loss_mask: np.ndarray, *, source: str = "default"
) -> Demonstration:
    """A rendered conversation, split before the first token that is in the loss."""
    first = max(int(loss_mask.argmax()), 1)  # the first token of a sequence has no predecessor
    return Demonstration(
        id=number,
        prompt_tokens=tokens[:first],
        tokens=tokens[first:],
        loss_mask=loss_mask[first:],
        source=source,
    )


def to_sample(
    demonstration: Demonstration, advantage: float | np.ndarray | None = None
) -> TrainingSample:
    """The sequence of a demonstration, with an advantage of all or of each of its loss tokens."""
    d, advantages = demonstration, None
    if advantage is not None:
        advantages = np.zeros(len(d.tokens), np.float32)
        advantages[d.loss_mask] = advantage
    return TrainingSample(
        prompt_tokens=d.prompt_tokens,
        tokens=d.tokens,
        loss_mask=d.loss_mask,
        advantages=advantages,
        prompt_id=d.id,
        images=d.images,
        axis_positions=d.axis_positions,
        teacher=d.teacher,
    )


def conversation(row: dict[str, Any], place: str) -> tuple[Conversation, Collection[int]]:
    """(messages of a row, indices of those that are given and not learned).

    Raises ValueError with the place if the columns or the assistant turns are missing.
    """
    check_text_only(row, place)
    if column := columns.first(row, CONVERSATION_COLUMNS):
        messages = as_messages(row[column], column, place)
        excluded = not_learned(row[column], place)
        _check_learned(messages, excluded, column, place)
        complete = with_system(messages, row, place)
        n_added = len(complete) - len(messages)
        return complete, frozenset(i + n_added for i in excluded)
    prompt = prompt_of(row, place, GIVEN_COLUMNS)
    answer = completion_column(row)
    if prompt is None or not answer:
        raise ValueError(
            f"{place} has the columns {columns.names(row)}; required are messages, or a prompt "
            f"({', '.join(GIVEN_COLUMNS)}) and a completion as text or messages "
            f"({', '.join(COMPLETION_COLUMNS)}), or plain text ({TEXT_COLUMN}); set data.columns, "
            "for example to prompt:NAME,completion:NAME"
        )
    completion = completion_of(row[answer], answer, place)
    excluded = not_learned(row[answer], place)
    _check_learned(completion, excluded, answer, place)
    check_turn_order(prompt, completion, answer, place)
    given = {*range(len(prompt)), *(len(prompt) + i for i in excluded)}
    return (*prompt, *completion), given


def completion_column(row: Mapping[str, Any]) -> str:
    """The column of the completion; "" if the row has none that is text or messages."""
    names = (n for n in COMPLETION_COLUMNS if isinstance(row.get(n), str | list))
    return next(names, "")


def completion_of(value: Any, column: str, place: str) -> Conversation:
    """The messages of a completion; text is one assistant turn."""
    if isinstance(value, str):
        return ({"role": "assistant", "content": value},)
    return as_messages(value, column, place)


def check_turn_order(
    prompt: Conversation, completion: Conversation, column: str, place: str
) -> None:
    """Raises ValueError if an assistant turn would follow another one, or a question a question."""
    last, first = prompt[-1]["role"], completion[0]["role"]
    if last == first and first in ("assistant", "user"):
        raise ValueError(
            f"{place}: the prompt ends with a turn of the {last}, and {column} begins with one; "
            "remove one of them: the prompt ends with the question, and the answer follows it"
        )


def _check_learned(
    messages: Conversation, excluded: Collection[int], column: str, place: str
) -> None:
    if not any(m["role"] == "assistant" and i not in excluded for i, m in enumerate(messages)):
        which = "no assistant turn whose weight is not 0" if excluded else "no assistant turn"
        raise ValueError(f"{place}: {column} has {which} to learn; add one or remove the row")


def _truncate(
    tokens: np.ndarray, loss_mask: np.ndarray, place: str, data: DataConfig
) -> tuple[np.ndarray, np.ndarray]:
    if data.truncation != "right" or not loss_mask[: data.max_len].any():
        raise ValueError(
            f"{place} has {len(tokens)} tokens, data.max_prompt_len + data.max_response_len is "
            f"{data.max_len}; raise them, set data.filter_overlong_prompts=True to drop such "
            "rows, or data.truncation='right' to drop their ends (not if the prompt fills all)"
        )
    return tokens[: data.max_len], loss_mask[: data.max_len]
