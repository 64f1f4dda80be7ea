"""Image files: where they are read from, their limits, and their pixels."""

import base64
import binascii
import io
import re
from pathlib import Path
from typing import Any

from jaxrl.json_text import shown

FORMATS = ("PNG", "JPEG", "WEBP", "GIF", "BMP", "TIFF")
_MODES = ("1", "L", "LA", "P", "PA", "RGB", "RGBA", "CMYK", "YCbCr")  # 8 bits per channel at most
_NETWORK = re.compile(r"(?!file:|data:)[A-Za-z][\w+.-]*://")
_DATA_URL = re.compile(r"data:[^,]*;base64\s*,", re.IGNORECASE)

PREVIEW_SIZE = 256  # pixels of the longer side

ImageSource = bytes | Path  # an encoded image, or the file that has it


class UnusableImageError(ValueError):
    """An image that is missing, damaged, too large, or of a form that models do not read."""


def find_source(reference: bytes | str, root: str) -> ImageSource:
    """The encoded image that a row names: its bytes, a data: URL, or a file below `root`.

    Raises ValueError for a file outside of data.image_root and for an address of the network.
    """
    if isinstance(reference, bytes):
        return reference
    if reference[:5].lower() == "data:":
        return _decode_url(reference)
    if _NETWORK.match(reference):
        raise ValueError(
            f"the image {shown(reference)} is an address, and images are not read over the "
            "network; download the images, set data.image_root to their folder, and name the files"
        )
    name = reference.removeprefix("file://")
    if not root:
        raise ValueError(
            f"the image {shown(reference)} is a file; set data.image_root to the folder of the "
            "images. Only files below it are read"
        )
    folder = Path(root).expanduser().resolve()
    try:
        path = (folder / name).resolve()
        is_file = path.is_file()
    except (OSError, ValueError) as error:  # names that no file can have
        raise UnusableImageError(f"the image {shown(reference)} is not a file name") from error
    if not path.is_relative_to(folder):
        raise ValueError(
            f"the image {shown(reference)} is outside of data.image_root = {folder}; set "
            "data.image_root to a folder that has all images"
        )
    if not is_file:
        raise UnusableImageError(f"there is no image {path}")
    return path


def read_source(source: ImageSource) -> bytes:
    """The bytes of an encoded image."""
    try:
        return source if isinstance(source, bytes) else source.read_bytes()
    except OSError as error:
        raise UnusableImageError(f"{source} cannot be read ({error.strerror})") from error


def decode(encoded: bytes, name: str, max_pixels: int) -> Any:
    """The RGB image (PIL) in the bytes of a file, turned as its EXIF entry says.

    Transparent pixels are white. `name` is for messages. Raises UnusableImageError for an image
    that cannot be decoded, has more than `max_pixels` pixels, none, several frames, or channels of
    more than 8 bits.
    """
    from PIL import Image, ImageOps  # an extra: only images need it

    try:
        image = Image.open(io.BytesIO(encoded), formats=FORMATS)
        _check_form(image, name, max_pixels)
        image.load()
        return _rgb(ImageOps.exif_transpose(image))
    except UnusableImageError:
        raise
    except Image.DecompressionBombError as error:
        raise UnusableImageError(f"{name} has more than {max_pixels} pixels ({error})") from error
    except Image.UnidentifiedImageError as error:
        what = "is damaged, or no " + ", ".join(FORMATS) if encoded else "has no bytes"
        raise UnusableImageError(f"{name} {what}") from error
    except Exception as error:  # decoders raise many types
        reason = " ".join(str(error).split())[:200] or type(error).__name__
        raise UnusableImageError(f"{name} cannot be decoded ({reason})") from error


def preview(source: ImageSource, name: str, max_pixels: int) -> bytes:
    """A small JPEG of an image, for people. Raises UnusableImageError, as `decode`."""
    image = decode(read_source(source), name, max_pixels)
    image.thumbnail((PREVIEW_SIZE, PREVIEW_SIZE))
    file = io.BytesIO()
    image.save(file, "JPEG", quality=90)
    return file.getvalue()


def data_url(encoded: bytes) -> str:
    """A data: URL of the bytes of an image file."""
    from PIL import Image

    kind = Image.open(io.BytesIO(encoded), formats=FORMATS).get_format_mimetype()
    return f"data:{kind};base64,{base64.b64encode(encoded).decode()}"


def _check_form(image: Any, name: str, max_pixels: int) -> None:
    """Raises UnusableImageError for what the header of a file says, before memory is used."""
    width, height = image.size
    if width * height > max_pixels:
        raise UnusableImageError(
            f"{name} has {width} x {height} pixels, more than data.max_image_pixels = {max_pixels}"
        )
    if not width * height:
        raise UnusableImageError(f"{name} has {width} x {height} pixels")
    # A photo of some phones (MPO) has further pictures of the same scene after it
    if getattr(image, "is_animated", False) and image.format != "MPO":
        raise UnusableImageError(f"{name} has several frames; save one of them as an image")
    if image.mode not in _MODES:
        raise UnusableImageError(
            f"{name} has pixels of the mode {image.mode}, not of 8 bits per channel; convert it"
        )


def _rgb(image: Any) -> Any:
    """The image in RGB, on a white background where it is transparent."""
    from PIL import Image

    if not image.has_transparency_data:
        return image.convert("RGB")
    image = image.convert("RGBA")
    white = Image.new("RGBA", image.size, "white")
    return Image.alpha_composite(white, image).convert("RGB")


def _decode_url(url: str) -> bytes:
    """The bytes in a data: URL."""
    if not (head := _DATA_URL.match(url)):
        raise UnusableImageError(f"the image {shown(url)} is not of the form data:...;base64,...")
    try:
        return base64.b64decode("".join(url[head.end() :].split()), validate=True)
    except (binascii.Error, ValueError) as error:
        raise UnusableImageError(f"the image {shown(url)} is not base64 ({error})") from error
