"""Hashes of datasets: whether a resumed run, or another process, has the same data."""

import json
from collections.abc import Iterator, Mapping, Sequence

from jaxrl.data.digest import digest
from jaxrl.data.preferences import Labelled, Pair
from jaxrl.data.ratings import RatedAnswer
from jaxrl.data.steps import LabelledSteps
from jaxrl.types import Demonstration, PlacedImage, Prompt

# One training item
Item = Prompt | Demonstration | Pair | Labelled | LabelledSteps | RatedAnswer
Content = dict[str, str]  # "rows" and "tokens" -> hash

_RENDERING = (
    "the chat template, data.template_kwargs, data.today, data.system_prompt or the tokenizer"
)


def content(items: Sequence[Item]) -> Content:
    """Hashes of the rows of a dataset and of their tokens.

    Demonstrations and pairs do not keep their text. Their "rows" is "".
    """
    has_rows = any(isinstance(item, Prompt) for item in items)
    return {
        "rows": digest(part for item in items for part in _row(item)) if has_rows else "",
        "tokens": digest(part for item in items for part in _tokens(item)),
    }


def check_content(saved: Mapping[str, Content], now: Mapping[str, Content]) -> None:
    """Raises ValueError if a dataset differs from that of a checkpoint.

    Both map data.train, data.val and data.demonstrations to the content of the dataset.
    """
    lines = [
        f"  {key}: {_change(saved[key], found)}"
        for key, found in now.items()
        if saved.get(key, found) != found
    ]
    if lines:
        raise ValueError(
            "the data differ from those of the checkpoint:\n"
            + "\n".join(lines)
            + "\nRestore what has changed to resume this run. To train on the new data, start a "
            "run from its weights in another run_dir"
        )


def _change(before: Content, now: Content) -> str:
    if before["rows"] != now["rows"]:
        return "the rows have changed, though not their number"
    if now["rows"]:
        return f"the rows are the same, but not their tokens: {_RENDERING} has changed"
    return f"the tokens have changed: the rows, {_RENDERING} has changed"


def _row(item: Item) -> Iterator[bytes]:
    """The fields of an item that rewards and environments read."""
    if isinstance(item, Prompt):
        yield item.answer_text.encode()
        yield item.source.encode()
        yield json.dumps([item.messages, item.extra], default=str, sort_keys=True).encode()


def _tokens(item: Item) -> Iterator[bytes]:
    """The tokens of an item, and the mask of those that are trained on."""
    if isinstance(item, Pair):
        yield from (*_tokens(item.chosen), *_tokens(item.rejected), repr(item.margin).encode())
    elif isinstance(item, Labelled):
        yield from (*_tokens(item.completion), repr(item.desirable).encode())
    elif isinstance(item, LabelledSteps):
        yield from (*_tokens(item.completion), item.labels.tobytes())
    elif isinstance(item, RatedAnswer):
        yield from (*_tokens(item.completion), item.ratings.tobytes())
    elif isinstance(item, Demonstration):
        arrays = item.prompt_tokens, item.tokens, item.loss_mask
        yield from (*(array.tobytes() for array in arrays), item.source.encode())
        yield from _digests(item.images)
    else:
        yield item.tokens.tobytes()
        yield from _digests(item.images)


def _digests(images: Sequence[PlacedImage]) -> Iterator[bytes]:
    return (placed.image.digest.encode() for placed in images)
