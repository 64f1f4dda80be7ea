"""Tests of jaxrl/data/images/decoding.py."""

import io
import struct
import zlib

import numpy as np
import pytest
from PIL import Image

from jaxrl.data.images.decoding import UnusableImageError, decode, find_source
from tests.data.images.pictures import encoded, picture

LIMIT = 1000


def png_header(width, height):
    """A PNG file that says its size and has no pixels."""
    sizes = b"IHDR" + struct.pack(">IIBBBBB", width, height, 8, 2, 0, 0, 0)
    chunks = (sizes, b"IDAT" + zlib.compress(b""), b"IEND")
    sums = (struct.pack(">I", zlib.crc32(chunk)) for chunk in chunks)
    parts = (struct.pack(">I", len(c) - 4) + c + s for c, s in zip(chunks, sums, strict=True))
    return b"\x89PNG\r\n\x1a\n" + b"".join(parts)


def frames(form):
    file = io.BytesIO()
    pictures = [picture(8, 8, seed) for seed in range(2)]
    pictures[0].save(file, form, save_all=True, append_images=pictures[1:])
    return file.getvalue()


@pytest.mark.parametrize(
    "data, message",
    [
        (b"", "has no bytes"),
        (b"hello", "is damaged, or no PNG, JPEG"),
        (encoded(picture(8, 8))[:-40], "is damaged|cannot be decoded"),
        (png_header(0, 8), "is damaged|has 0 x 8"),
        (png_header(25, 41), "has 25 x 41 pixels, more than data.max_image_pixels = 1000"),
        (png_header(60_000, 60_000), "has more than 1000 pixels"),
        (png_header(25, 40), "cannot be decoded"),
        (frames("GIF"), "has several frames"),
        (frames("WEBP"), "has several frames"),
        (frames("TIFF"), "has several frames"),
        (encoded(Image.new("I;16", (8, 8))), "has pixels of the mode I;16"),
    ],
)
def test_an_image_that_models_cannot_read_is_refused(data, message):
    with pytest.raises(UnusableImageError, match=f"a.png ({message})"):
        decode(data, "a.png", LIMIT)


def test_the_first_picture_of_a_phones_photo_is_read():
    alone = decode(encoded(picture(8, 8), "JPEG"), "a.jpg", LIMIT)
    np.testing.assert_array_equal(decode(frames("MPO"), "a.jpg", LIMIT), alone)


def test_photos_are_turned_and_transparent_pixels_are_white():
    exif = Image.Exif()
    exif[0x0112] = 6  # turned by 90 degrees to the right
    turned = decode(encoded(picture(4, 6), exif=exif), "a.png", LIMIT)
    np.testing.assert_array_equal(turned, np.rot90(np.asarray(picture(4, 6)), -1))
    clear = decode(encoded(Image.new("RGBA", (2, 2), (255, 0, 0, 0))), "a.png", LIMIT)
    assert clear.mode == "RGB" and clear.getpixel((0, 0)) == (255, 255, 255)
    half = decode(encoded(Image.new("LA", (2, 2), (0, 128))), "a.png", LIMIT)
    assert half.getpixel((0, 0)) == (127, 127, 127)  # 255 * (1 - 128 / 255)


@pytest.mark.parametrize(
    "url, message",
    [
        ("data:image/png,abc", "not of the form data"),
        ("data:image/png;base64,a!b", "not base64"),
        ("a\0b.png", "not a file name"),
        ("none.png", "there is no image"),
    ],
)
def test_a_reference_that_names_no_image_is_unusable(tmp_path, url, message):
    with pytest.raises(UnusableImageError, match=message):
        find_source(url, str(tmp_path))


@pytest.mark.thorough
@pytest.mark.parametrize("form", ["PNG", "JPEG", "WEBP", "GIF", "BMP", "TIFF"])
def test_damaged_bytes_are_one_error_or_an_image(form):
    whole = np.frombuffer(encoded(picture(16, 12), form), np.uint8)
    random = np.random.default_rng(0)
    for _ in range(300):
        damaged = whole.copy()
        places = random.integers(0, len(whole), random.integers(1, 5))
        damaged[places] = random.integers(0, 256, len(places))
        try:
            image = decode(damaged[: random.integers(1, len(whole) + 1)].tobytes(), "a", LIMIT)
        except UnusableImageError:
            continue
        assert image.mode == "RGB" and image.width * image.height <= LIMIT
