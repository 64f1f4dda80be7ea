"""Loads prompts from data sources: columns, chat template, length limit.

A row of any file type has one of these forms. Other columns reach the reward in extra_info.

verl's schema                                   plain
  prompt        list of {role, content}           prompt | messages | question | problem: the first
  reward_model  {style, ground_truth}               that the row has; a string is one user message
  data_source   optional, groups the metrics      answer: string, number, or any JSON value
  ability       optional                          data_source, ability, extra_info: optional
  extra_info    optional, passed to the reward

Both may be mixed (question + reward_model, prompt + answer). The column `tools` has the tools that
the chat template offers to the model (jaxrl/data/messages.py). Rewards get an answer as it is in
the row: a string, a number, a list or a dict. A source may also be a task in jaxrl/data/tasks.py.
"""

import dataclasses
import itertools
import json
import logging
from collections.abc import Iterator, Sequence
from typing import Any

import numpy as np

from jaxrl.config.keys import DataConfig
from jaxrl.data.chat import ChatRenderer
from jaxrl.data.messages import as_messages, check_text_only, tools_of
from jaxrl.data.tables import read_rows
from jaxrl.data.tasks import make_questions
from jaxrl.types import Message, Prompt

_PROMPT_COLUMNS = ("prompt", "messages", "question", "problem")
# The columns with a meaning here.
_COLUMNS = {*_PROMPT_COLUMNS, "reward_model", "answer", "data_source", "extra_info", "tools"}
_TASK_PREFIXES = ("task:", "reasoning_gym:")
_CHUNK = 1024  # rows rendered together

logger = logging.getLogger(__name__)


@dataclasses.dataclass(frozen=True)
class _Example:
    """A parsed row, before the chat template."""

    messages: tuple[Message, ...]
    answer: Any
    source: str
    extra: dict[str, Any]
    is_text: bool
    tools: tuple[dict[str, Any], ...] = ()


def load_prompts(
    sources: Sequence[str], *, renderer: ChatRenderer, data: DataConfig, limit: int = 0
) -> list[Prompt]:
    """All prompts of the sources in order, at most `limit` (0 = all).

    A prompt's id is its row index over the concatenated sources, including dropped rows. Prompts
    longer than data.max_prompt_len are dropped or truncated. Raises ValueError for rows without the
    required columns, for an overlong prompt with both filtering and truncation off, and if no
    prompt remains.
    """
    prompts: list[Prompt] = []
    dropped: list[int] = []  # lengths
    rows = enumerate(itertools.chain.from_iterable(_examples(source) for source in sources))
    for chunk in itertools.batched(rows, _CHUNK):
        rendered = renderer.render_all(
            [example.messages for _, example in chunk], [example.tools for _, example in chunk]
        )
        for (row, example), tokens in zip(chunk, rendered, strict=True):
            if len(tokens) > data.max_prompt_len and data.filter_overlong_prompts:
                dropped.append(len(tokens))
                continue
            tokens = _truncate(tokens, row, data)
            prompts.append(
                Prompt(
                    id=row,
                    messages=example.messages,
                    tokens=tokens,
                    answer=example.answer,
                    source=example.source,
                    extra=example.extra,
                    is_text=example.is_text,
                )
            )
        if limit and len(prompts) >= limit:
            break
    if dropped:
        logger.warning(
            "%d of %d prompts are longer than data.max_prompt_len = %d tokens and were dropped",
            len(dropped),
            len(dropped) + len(prompts),
            data.max_prompt_len,
        )
    if not prompts:
        raise ValueError(_no_prompts(sources, dropped, data))
    return prompts[:limit] if limit else prompts


def _examples(source: str) -> Iterator[_Example]:
    if source.startswith(_TASK_PREFIXES):
        for q in make_questions(source):
            messages = ({"role": "user", "content": q.text},)
            yield _Example(
                messages=messages, answer=q.answer, source=q.source, extra=q.extra, is_text=True
            )
        return
    for place, row in read_rows(source):
        prompt, is_text = _messages(row, place)
        yield _Example(
            messages=prompt,
            answer=_answer(row, place),
            source=source_of(row),
            extra=_extra(row),
            is_text=is_text,
            tools=tools_of(row, place),
        )


def _messages(row: dict[str, Any], place: str) -> tuple[tuple[Message, ...], bool]:
    """The messages of the prompt, and whether the row has text for them."""
    check_text_only(row, place)
    column = next((name for name in _PROMPT_COLUMNS if row.get(name) is not None), None)
    if column is None:
        raise ValueError(_missing(row, place))
    return as_messages(row[column], column, place), isinstance(row[column], str)


def _answer(row: dict[str, Any], place: str) -> Any:
    """verl's ground truth or the answer: any value that JSON can express."""
    reward_model = row.get("reward_model")
    value = reward_model.get("ground_truth") if isinstance(reward_model, dict) else None
    if value is None:
        value = row.get("answer")
    if value is None:
        raise ValueError(_missing(row, place))
    try:
        json.dumps(value)
    except (TypeError, ValueError) as error:
        raise ValueError(
            f"{place} has an answer that JSON cannot express ({error}); store text, numbers, "
            "lists or dicts with text as keys"
        ) from error
    return value


def _missing(row: dict[str, Any], place: str) -> str:
    return (
        f"{place} has the columns {columns(row)}; required are a prompt "
        f"({', '.join(_PROMPT_COLUMNS)}) and an answer (reward_model with ground_truth, or "
        "answer); rename the columns or convert the file as scripts/prepare_gsm8k.py does"
    )


def columns(row: dict[str, Any]) -> str:
    """Names of the non-empty columns of a row."""
    return ", ".join(name for name, value in row.items() if value is not None) or "none"


def source_of(row: dict[str, Any]) -> str:
    """verl's data_source, which groups the metrics."""
    return str(row.get("data_source") or "default")


def _extra(row: dict[str, Any]) -> dict[str, Any]:
    """The columns without a meaning above, then those of extra_info, which win."""
    extra = row.get("extra_info")
    other = {k: v for k, v in row.items() if v is not None and k not in _COLUMNS}
    return other | (extra if isinstance(extra, dict) else {})


def _truncate(tokens: np.ndarray, row: int, data: DataConfig) -> np.ndarray:
    """At most max_prompt_len tokens; data.truncation names the side that is dropped.

    Raises ValueError for an overlong prompt if truncation is "error".
    """
    limit, excess = data.max_prompt_len, len(tokens) - data.max_prompt_len
    if excess <= 0:
        return tokens
    if data.truncation == "left":
        return tokens[excess:]
    if data.truncation == "right":
        return tokens[:limit]
    if data.truncation == "middle":
        head = limit // 2
        return np.concatenate([tokens[:head], tokens[head + excess :]])
    raise ValueError(
        f"prompt {row} has {len(tokens)} tokens, data.max_prompt_len is {limit}; raise it, set "
        "data.filter_overlong_prompts=True to drop such prompts, or set data.truncation to 'left', "
        "'right' or 'middle'"
    )


def _no_prompts(sources: Sequence[str], dropped: list[int], data: DataConfig) -> str:
    names = ", ".join(sources) or "an empty list of sources"
    if not dropped:
        return f"no prompts in {names}; set data.train (or data.val) to files that have some"
    return (
        f"all {len(dropped)} prompts of {names} are longer than data.max_prompt_len = "
        f"{data.max_prompt_len} tokens (the shortest has {min(dropped)}); raise it"
    )
