"""The images that a row names, and their places in its messages.

    images, image               columns: one image, or a list of them (verl, TRL)
    <image>                     in a text: the next image of the column (verl)
    {"type": "image"}           a content part: the next image of the column (TRL), or its own one
    {"type": "image_url"}       OpenAI's content part, with its own image

Images of a column without places in the text are before the first question, as TRL has them.
"""

import base64
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any

from jaxrl.data.chat.dialects import role_of
from jaxrl.json_text import shown

IMAGE = "\ufdd1"  # in a message's text; a code point that Unicode reserves for such uses
IMAGE_COLUMNS = ("images", "image")
_PLACE = "<image>"
_PARTS = ("image", "image_url", "input_image")
_VALUES = ("bytes", "image", "image_url", "url", "base64", "path")  # the first is the image
_NEUTRAL = ("type", "path")
_AUTO = ("detail", "auto")  # OpenAI's default

ImageReference = bytes | str  # an encoded image; the name of a file, or a URL


def mark_images(
    row: Mapping[str, Any], names: Sequence[str], place: str
) -> tuple[dict[str, Any], list[ImageReference]]:
    """(the row with IMAGE at the places of its images, these images in order).

    `names` are the columns of its messages, in order. The row loses the columns of images. Raises
    ValueError with the place if there are more or fewer places than images.
    """
    try:
        column, given = _column(row)
        own: list[ImageReference | None] = []
        texts = {name: row[name] for name in names if row.get(name) is not None}
        marked = {name: _map_content(v, lambda c: _joined(c, own)) for name, v in texts.items()}
        if not own:
            marked, own = _mark_text(marked, column, len(given))
        images = _filled(own, column, given)
    except ValueError as error:
        raise ValueError(f"{place}: {error}") from error
    return {k: v for k, v in row.items() if k not in IMAGE_COLUMNS} | marked, images


def mark_parts(messages: Any, place: str) -> tuple[Any, list[ImageReference]]:
    """(messages with IMAGE at the places of their content parts of images, these images in order).

    Raises ValueError with the place for a part without an image.
    """
    own: list[ImageReference | None] = []
    try:
        marked = _map_content(messages, lambda content: _joined(content, own))
        images = [image for image in own if image is not None]
        if len(images) < len(own):
            raise ValueError(
                "a content part of an image has no image; add it as image, image_url, url, path, "
                "base64 or bytes"
            )
    except ValueError as error:
        raise ValueError(f"{place}: {error}") from error
    return marked, images


def has_images(content: Any) -> bool:
    """Whether a value is a list of content parts, text and at least one image."""
    parts = content if isinstance(content, list) else []
    kinds = {part.get("type") if isinstance(part, Mapping) else None for part in parts}
    return not kinds.isdisjoint(_PARTS) and kinds <= {"text", *_PARTS}


def encoded_url(encoded: bytes) -> str:
    """The bytes of an image file as a data: URL."""
    return "data:;base64," + base64.b64encode(encoded).decode()


def _column(row: Mapping[str, Any]) -> tuple[str, list[ImageReference]]:
    """(name of the column of images, its images); "" if the row has no such column."""
    names = [name for name in IMAGE_COLUMNS if name in row]
    full = [name for name in names if row[name]]
    if len(full) > 1:
        raise ValueError(f"it has images in the columns {' and '.join(full)}; remove one of them")
    name = "".join(full or names[:1])
    value = row[name] if full else []
    values = value if isinstance(value, list) else [value]
    return name, [_reference(value) for value in values]


def _reference(value: Any) -> ImageReference:
    """The image in a value of a column or of a content part."""
    if isinstance(value, bytes | bytearray) or (isinstance(value, str) and value):
        return value if isinstance(value, str) else bytes(value)
    entries = (
        {k: v for k, v in value.items() if v is not None} if isinstance(value, Mapping) else {}
    )
    name = next((name for name in _VALUES if name in entries), "")
    if not name:
        raise ValueError(
            f"an image is {shown(value)}; it is bytes, a file name, a data: URL, or an object with "
            "bytes or path"
        )
    unread = [k for k in entries if k not in (*_NEUTRAL, name) and (k, entries[k]) != _AUTO]
    if unread:
        raise ValueError(
            f"an image has {unread[0]}={shown(entries[unread[0]])}, which is not read; remove it. "
            "data.image_kwargs sets the sizes of all images"
        )
    inner = entries[name]
    return _reference("data:;base64," + inner if name == "base64" else inner)


def _map_content(value: Any, change: Callable[[Any], Any]) -> Any:
    """A text, messages or pairs of texts with changed contents."""
    if isinstance(value, str):
        return change(value)
    if not isinstance(value, list):
        return value
    return [_map_message(message, change) for message in value]


def _map_message(message: Any, change: Callable[[Any], Any]) -> Any:
    if isinstance(message, Mapping):  # ShareGPT has the content in `value`
        keys = [key for key in ("content", "value") if message.get(key) is not None]
        return {**message, **{key: change(message[key]) for key in keys}}
    return [change(text) for text in message] if isinstance(message, list) else message


def _joined(content: Any, own: list[ImageReference | None]) -> Any:
    """The text of a content, with IMAGE for its image parts, whose images are added to `own`."""
    if isinstance(content, str):
        return content.replace(IMAGE, "\N{REPLACEMENT CHARACTER}")
    if not isinstance(content, list):
        return content
    parts = [_joined_part(part, own) for part in content]
    is_text = all(isinstance(part, str) for part in parts)
    return "".join(parts) if is_text else content  # other parts are refused where messages are read


def _joined_part(part: Any, own: list[ImageReference | None]) -> Any:
    kind = part.get("type") if isinstance(part, Mapping) else None
    if kind == "text":
        return _joined(part.get("text"), own)
    if kind not in _PARTS:
        return part
    has_own = any(part.get(name) is not None for name in _VALUES)
    own.append(_reference({k: v for k, v in part.items() if k != "text"}) if has_own else None)
    return IMAGE


def _mark_text(
    texts: dict[str, Any], column: str, n_given: int
) -> tuple[dict[str, Any], list[ImageReference | None]]:
    """(the texts with IMAGE for every <image>, None for each); unchanged without a column."""
    if not column:
        return texts, []
    found: list[ImageReference | None] = []

    def mark(text: Any) -> Any:
        if not isinstance(text, str):
            return text
        found.extend([None] * text.count(_PLACE))
        return text.replace(_PLACE, IMAGE)

    marked = {name: _map_content(value, mark) for name, value in texts.items()}
    if found or not n_given:
        return marked, found
    return _mark_first(texts, n_given), [None] * n_given


def _mark_first(texts: dict[str, Any], n: int) -> dict[str, Any]:
    """The texts with n images before the first question."""
    for name, value in texts.items():
        if isinstance(value, str):
            return {**texts, name: IMAGE * n + value}
        for i, message in enumerate(value if isinstance(value, list) else ()):
            if isinstance(message, Mapping) and role_of(message) == "user":
                first = _map_message(message, lambda content: IMAGE * n + content)
                return {**texts, name: [*value[:i], first, *value[i + 1 :]]}
    raise ValueError(f"it has {n} images, and no turn of the user to place them in; add {_PLACE}")


def _filled(
    own: Sequence[ImageReference | None], column: str, given: Sequence[ImageReference]
) -> list[ImageReference]:
    """The images at the places: their own, or the next of the column."""
    n_places = sum(image is None for image in own)
    if n_places != len(given):
        raise ValueError(
            f"the messages have {n_places} places of images ({_PLACE}, or content parts without an "
            f"image), and the column {column or ' or '.join(IMAGE_COLUMNS)} has {len(given)} "
            "images; correct the row"
        )
    rest: Iterator[ImageReference] = iter(given)
    return [next(rest) if image is None else image for image in own]
