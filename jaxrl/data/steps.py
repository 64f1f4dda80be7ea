"""Answers with a label of each step, for process reward models.

A row of any file type has TRL's form; other columns are named at the start.

  prompt | question | problem | instruction | query | input    a string or messages
  completions    the steps of the answer, a list of strings
  labels         as many labels: true and false, or numbers from 0 (wrong) to 1 (right)
  system, history, tools    optional, as in jaxrl/data/demonstrations.py

The answer is one assistant turn: the steps, joined by reward_model.step_separator. The label of a
step belongs to the last token of the separator after it, that of the last step to the last token of
the turn.
"""

import dataclasses
import functools
from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np

from jaxrl.config.keys import DataConfig
from jaxrl.data.chat.encoding import ChatRenderer
from jaxrl.data.chat.row_messages import check_text_only, columns_of_prompt, prompt_of, tools_of
from jaxrl.data.demonstrations import GIVEN_COLUMNS, max_len_text, rendered_turns
from jaxrl.data.items import ItemMaker, Reading, Usage
from jaxrl.data.prompts import source_of
from jaxrl.data.sources import columns
from jaxrl.data.sources.rows import Dropped, SourceRow
from jaxrl.data.token_text import TokenTexts
from jaxrl.types import Demonstration

STEPS, LABELS = "completions", "labels"


@dataclasses.dataclass(frozen=True)
class LabelledSteps:
    """An answer and the labels of its steps."""

    id: int  # row in the dataset
    completion: Demonstration  # its loss mask marks the last token of each step
    labels: np.ndarray  # float32 [n_steps], from 0 to 1


class StepFinder:
    """Finds the steps of an answer in its tokens."""

    def __init__(self, renderer: ChatRenderer, separator: str):
        self._texts, self._separator = TokenTexts(renderer), separator.encode()
        added = renderer.tokenizer.added_tokens_decoder
        self._special = {i for i, token in added.items() if token.special}

    def ends(self, tokens: np.ndarray) -> list[int]:
        """`step_ends` of the tokens; special tokens have no text."""
        pieces = [b"" if t in self._special else self._texts[t].bytes for t in tokens.tolist()]
        return step_ends(pieces, self._separator)


def step_ends(tokens: Sequence[bytes], separator: bytes) -> list[int]:
    """Index of the last token of each step, ascending; at least one.

    A step ends with the token that completes its separator, the last one with the last token. White
    space between two separators, or after the last one, is no step.
    """
    text, token_ends = b"".join(tokens), np.cumsum([len(token) for token in tokens])
    found, start = [], 0
    while (at := text.find(separator, start)) >= 0:
        end = at + len(separator)
        if text[start:at].strip():
            found.append(int(np.searchsorted(token_ends, end)))
        start = end
    if text[start:].strip() or not found:
        found.append(len(tokens) - 1)
    return list(dict.fromkeys(found))


def step_maker(
    renderer: ChatRenderer, data: DataConfig, *, stop: Sequence[int], separator: str
) -> ItemMaker[LabelledSteps]:
    """Makes the answers of rows. `stop` are the tokens that end an answer.

    An answer over max_prompt_len + max_response_len tokens is dropped with
    data.filter_overlong_prompts and raises ValueError otherwise. So do rows without the required
    columns, with another number of labels than steps, and steps that the separator does not find.
    """
    make = functools.partial(
        make_labelled_steps,
        renderer=renderer,
        data=data,
        stop=stop,
        separator=separator,
        finder=StepFinder(renderer, separator),
    )
    return ItemMaker("answers", max_len_text(data), data.columns, make, Usage(_reading))


def _reading(row: Mapping[str, Any]) -> Reading:
    return Reading([*columns_of_prompt(row, columns.first(row, GIVEN_COLUMNS)), STEPS, LABELS])


def make_labelled_steps(
    rows: Sequence[SourceRow],
    dropped: Dropped,
    *,
    renderer: ChatRenderer,
    data: DataConfig,
    stop: Sequence[int],
    separator: str,
    finder: StepFinder,
) -> list[LabelledSteps]:
    """The answers of the rows; what is left out goes to `dropped`."""
    found = []
    for row in rows:
        check_text_only(row.columns, row.place)
        prompt, steps, labels = prompt_and_steps(row.columns, row.place)
        messages = (*prompt, {"role": "assistant", "content": separator.join(steps)})
        tools, given = tools_of(row.columns, row.place), range(len(prompt))
        [(tokens, mask)] = rendered_turns(messages, renderer, stop, tools, row.place, given=given)
        if len(tokens) > data.max_len:
            if not data.filter_overlong_prompts:
                raise ValueError(
                    f"{row.place} has {len(tokens)} tokens in prompt and steps, "
                    f"{max_len_text(data)}; raise them, or set data.filter_overlong_prompts=True "
                    "to drop such rows"
                )
            dropped.lengths.append(len(tokens))
            continue
        of_answer = np.flatnonzero(mask)
        ends = of_answer[finder.ends(tokens[of_answer])]
        if len(ends) != len(labels):
            raise ValueError(
                f"{row.place} has {len(labels)} steps, but joined by "
                f"reward_model.step_separator={separator!r} they are {len(ends)}; set one that no "
                "step contains and that is a token or several by itself, or correct the row"
            )
        found.append(
            LabelledSteps(row.number, _demonstration(row, tokens, ends), np.array(labels, "f4"))
        )
    return found


def prompt_and_steps(
    row: Mapping[str, Any], place: str
) -> tuple[tuple[dict[str, Any], ...], list[str], list[float]]:
    """(messages of the prompt, steps, labels) of a row. Raises ValueError with the place."""
    steps, labels = row.get(STEPS), row.get(LABELS)
    prompt = prompt_of(row, place, GIVEN_COLUMNS)
    if prompt is None or not isinstance(steps, list) or not isinstance(labels, list):
        raise ValueError(
            f"{place} has the columns {columns.names(row)}; reward_model.objective='steps' needs a "
            f"prompt ({', '.join(GIVEN_COLUMNS)}), the list of steps {STEPS} and the list {LABELS};"
            " set data.columns, for example to completions:NAME,labels:NAME"
        )
    if prompt[-1]["role"] == "assistant":
        raise ValueError(f"{place}: the prompt ends with an assistant turn; end it with a question")
    if len(steps) != len(labels) or not steps:
        raise ValueError(
            f"{place} has {len(steps)} {STEPS} and {len(labels)} {LABELS}; give each step one label"
        )
    for i, step in enumerate(steps):
        if not isinstance(step, str) or not step.strip():
            raise ValueError(f"{place}: step {i + 1} is {step!r:.80}, not a text; correct it")
    for i, label in enumerate(labels):
        if not isinstance(label, bool | int | float) or not 0 <= label <= 1:
            raise ValueError(
                f"{place}: the label of step {i + 1} is {label!r:.80}; give true or false, or a "
                "number from 0 to 1"
            )
    return tuple(prompt), steps, [float(label) for label in labels]


def _demonstration(row: SourceRow, tokens: np.ndarray, ends: np.ndarray) -> Demonstration:
    """The answer, split before the last token of its first step."""
    mask = np.zeros(len(tokens), bool)
    mask[ends] = True
    first = int(ends[0])
    return Demonstration(
        id=row.number,
        prompt_tokens=tokens[:first],
        tokens=tokens[first:],
        loss_mask=mask[first:],
        source=source_of(row.columns),
    )
