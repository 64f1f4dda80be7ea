"""Demonstrations for SFT: conversations whose assistant turns are learned.

A row of any file type has one of these forms; other columns are ignored.

  messages       a list of {role, content}; the assistant turns are learned, with their tool_calls
  tools          optional: the tools that the chat template offers to the model
  prompt | question | problem | instruction    a string or a list of messages, together with
  response | completion | output | answer      a string: the assistant's answer
"""

import itertools
import logging
from collections.abc import Sequence
from typing import Any

import numpy as np

from jaxrl.config.keys import DataConfig
from jaxrl.data.chat import ChatRenderer
from jaxrl.data.messages import as_messages, check_text_only, tools_of
from jaxrl.data.prompts import columns, source_of
from jaxrl.data.tables import read_rows
from jaxrl.types import Demonstration, Message, TrainingSample

PROMPT_COLUMNS = ("prompt", "question", "problem", "instruction")
ANSWER_COLUMNS = ("response", "completion", "output", "answer")

logger = logging.getLogger(__name__)

Messages = tuple[Message, ...]


def load_demonstrations(
    sources: Sequence[str],
    *,
    renderer: ChatRenderer,
    data: DataConfig,
    stop: Sequence[int],
    limit: int = 0,
) -> list[Demonstration]:
    """All demonstrations of the sources in order, at most `limit` (0 = all).

    `stop` are the tokens that end an answer. A conversation over max_prompt_len + max_response_len
    tokens is dropped with data.filter_overlong_prompts, loses its end with data.truncation="right",
    and raises ValueError otherwise. So do rows without the required columns and empty sources.
    """
    found: list[Demonstration] = []
    dropped = 0
    rows = itertools.chain.from_iterable(read_rows(source) for source in sources)
    for number, (place, row) in enumerate(rows):
        messages = conversation(row, place)
        for tokens, loss_mask in renderer.render_turns(messages, stop, tools_of(row, place)):
            if len(tokens) > data.max_len:
                if data.filter_overlong_prompts:
                    dropped += 1
                    continue
                tokens, loss_mask = _truncate(tokens, loss_mask, place, data)
            found.append(demonstration(number, tokens, loss_mask, source=source_of(row)))
        if limit and len(found) >= limit:
            break
    check_kept("demonstrations", len(found), dropped, sources, data)
    return found[:limit] if limit else found


def check_kept(
    what: str, n_kept: int, n_dropped: int, sources: Sequence[str], data: DataConfig
) -> None:
    """Logs how many rows were dropped as too long. Raises ValueError if none remains."""
    if n_dropped:
        logger.warning("%d %s of over %d tokens were dropped", n_dropped, what, data.max_len)
    if not n_kept:
        raise ValueError(
            f"no {what} in {', '.join(sources) or 'an empty list of sources'}"
            + (f": all {n_dropped} are longer than {data.max_len} tokens" if n_dropped else "")
            + "; set data.train (or data.val) to files that have some"
        )


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


def to_sample(demonstration: Demonstration, advantage: float | None = None) -> TrainingSample:
    """The sequence of a demonstration, with the same advantage at every response token."""
    d = demonstration
    advantages = None if advantage is None else np.full(len(d.tokens), advantage, np.float32)
    return TrainingSample(
        prompt_tokens=d.prompt_tokens,
        tokens=d.tokens,
        loss_mask=d.loss_mask,
        advantages=advantages,
        prompt_id=d.id,
    )


def conversation(row: dict[str, Any], place: str) -> Messages:
    """The messages of a row, including the assistant turns.

    Raises ValueError with the place if the columns or the assistant turns are missing.
    """
    check_text_only(row, place)
    if row.get("messages") is not None:
        messages = as_messages(row["messages"], "messages", place)
        if not any(m["role"] == "assistant" for m in messages):
            raise ValueError(
                f"{place}: messages has no assistant turn to learn; add one or remove the row"
            )
        return messages
    prompt = next((name for name in PROMPT_COLUMNS if row.get(name) is not None), None)
    answer = next((name for name in ANSWER_COLUMNS if isinstance(row.get(name), str)), None)
    if prompt is None or answer is None:
        raise ValueError(
            f"{place} has the columns {columns(row)}; required are messages, or a prompt "
            f"({', '.join(PROMPT_COLUMNS)}) and an answer as text ({', '.join(ANSWER_COLUMNS)})"
        )
    completion = {"role": "assistant", "content": row[answer]}
    return (*as_messages(row[prompt], prompt, place), completion)


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
