"""Tests of prompts with images: their places, tokens and files, and rows that are refused."""

import base64
import dataclasses
import io
import logging

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest
from PIL import Image

from jaxrl.data.content import content
from jaxrl.data.images.references import IMAGE
from tests.data.images.pictures import encoded, picture

WIDE, TALL = encoded(picture(24, 8)), encoded(picture(16, 32), "JPEG")  # 3 and 8 tokens
PAD = 269


def write(tmp_path, *rows):
    path = str(tmp_path / "a.parquet")
    pq.write_table(pa.Table.from_pylist([{"answer": "x", **row} for row in rows]), path)
    return path


def user(content):
    return [{"role": "user", "content": content}]


def counts(prompt):
    """Lengths of the runs of placeholders in the prompt."""
    edges = np.flatnonzero(np.diff(np.concatenate([[0], prompt.tokens == PAD, [0]])))
    return (edges[1::2] - edges[::2]).tolist()


def url(data):
    return f"data:image/png;base64,{base64.b64encode(data).decode()}"


ROWS = {
    "verl: bytes": {
        "prompt": user("<image>A <image>B"),
        "images": [{"bytes": WIDE, "path": "a.png"}, {"bytes": TALL, "path": None}],
    },
    "verl: files": {
        "prompt": user("<image>A <image>B"),
        "images": [{"image": "wide.png"}, {"image": "file://{root}/in/tall.jpg"}],
    },
    "paths": {"question": "<image>A <image>B", "images": ["wide.png", "in/tall.jpg"]},
    "TRL: content parts": {
        "prompt": user(
            [
                {"type": "image", "text": None},
                {"type": "text", "text": "A "},
                {"type": "image", "text": None},
                {"type": "text", "text": "B"},
            ]
        ),
        "images": [WIDE, TALL],
    },
    "own images": {
        "prompt": user(
            [
                {"type": "image", "image": "wide.png", "text": None},
                {"type": "text", "image": None, "text": "A "},
                {"type": "image", "image": "in/tall.jpg", "text": None},
                {"type": "text", "image": None, "text": "B"},
            ]
        )
    },
    "OpenAI": {
        "prompt": user(
            [
                {"type": "image_url", "image_url": {"url": url(WIDE), "detail": "auto"}},
                {"type": "text", "text": "A "},
                {"type": "image_url", "image_url": {"url": url(TALL), "detail": None}},
                {"type": "text", "text": "B"},
            ]
        )
    },
}


@pytest.mark.parametrize("row", ROWS.values(), ids=ROWS.keys())
def test_images_of_every_form_become_placeholders_in_their_places(load, tmp_path, row):
    (tmp_path / "in").mkdir()
    (tmp_path / "wide.png").write_bytes(WIDE)
    (tmp_path / "in" / "tall.jpg").write_bytes(TALL)
    if "file://" in str(row):
        row = {**row, "images": [row["images"][0], {"image": f"file://{tmp_path}/in/tall.jpg"}]}
    [prompt] = load(write(tmp_path, row), image_root=str(tmp_path))
    # 24 x 8 pixels are 6 x 2 patches of 4, merged by 2 x 2; 16 x 32 pixels are 4 x 8 patches
    assert [placed.image.grid for placed in prompt.images] == [(1, 2, 6), (1, 8, 4)]
    assert [placed.image.n_tokens for placed in prompt.images] == counts(prompt) == [3, 8]
    assert prompt.messages == ({"role": "user", "content": f"{IMAGE}A {IMAGE}B"},)
    first = np.flatnonzero(prompt.tokens == PAD)[0]
    assert prompt.tokens[first - 1] == 267 and prompt.tokens[first + 3] == 268
    assert "images" not in prompt.extra
    assert prompt.images[0].image.patches.shape == (12, 3 * 2 * 4 * 4)


def test_images_without_places_are_before_the_first_question(load, tmp_path):
    turns = [{"role": "system", "content": "Look."}, {"role": "user", "content": "A?"}]
    [prompt] = load(write(tmp_path, {"prompt": turns, "image": WIDE}))
    assert prompt.messages[1]["content"] == f"{IMAGE}A?"
    assert counts(prompt) == [3]


def test_rows_without_images_are_text_also_with_the_word_image(load, tmp_path):
    [prompt] = load(write(tmp_path, {"prompt": user("What is <image> in HTML?")}))
    assert prompt.messages[0]["content"] == "What is <image> in HTML?" and prompt.images == ()


@pytest.mark.parametrize(
    "row, message",
    [
        ({"prompt": user("<image>"), "images": [WIDE, WIDE]}, "1 places of images .* has 2 images"),
        ({"prompt": user("<image><image>"), "images": [WIDE]}, "2 places of .* has 1 images"),
        ({"prompt": user("<image>"), "images": []}, "1 places of .* images has 0 images"),
        ({"prompt": user([{"type": "image"}])}, "1 places of .* images or image has 0 images"),
        (
            {"prompt": user("A"), "images": [WIDE], "image": WIDE},
            "images in the columns images and",
        ),
        ({"prompt": user("<image>"), "images": [{"path": "a.png"}]}, "set data.image_root to the"),
        ({"prompt": user("<image>"), "images": ["http://a.b/c.png"]}, "not read over the network"),
        (
            {"prompt": user("<image>"), "images": [{"image": WIDE, "max_pixels": 9}]},
            "max_pixels=9, which is not read",
        ),
        ({"prompt": user("<image><|image_pad|>"), "images": [WIDE]}, "contains '<|image_pad|>'"),
        ({"prompt": user("<|image_pad|>")}, "contains '<|image_pad|>'"),
        ({"prompt": user([{"type": "video"}])}, "content part of the type video"),
        ({"prompt": user("A"), "videos": ["a.mp4"]}, "a value in the column videos"),
    ],
)
@pytest.mark.parametrize("mode", ["error", "token"])
def test_a_row_whose_images_are_not_understood_is_refused(load, tmp_path, row, message, mode):
    message = message.replace("|", r"\|")
    with pytest.raises(ValueError, match=rf"a\.parquet:1\b.*{message}"):
        load(write(tmp_path, row), special_tokens=mode)


def test_only_files_below_the_root_are_read(load, tmp_path):
    inside = tmp_path / "inside"
    inside.mkdir()
    (tmp_path / "secret.png").write_bytes(WIDE)
    (inside / "link.png").symlink_to(tmp_path / "secret.png")
    for name in ("../secret.png", str(tmp_path / "secret.png"), "link.png"):
        path = write(tmp_path, {"question": "<image>", "images": [name]})
        with pytest.raises(ValueError, match=r"a\.parquet:1: .* outside of data.image_root"):
            load(path, image_root=str(inside), on_error="drop")


def test_unusable_images_stop_the_run_or_are_dropped_and_counted(load, tmp_path, caplog):
    (tmp_path / "text.png").write_text("no image")
    good = {"question": "<image>", "images": [{"bytes": WIDE, "path": None}]}
    names = {"missing.png": "there is no image", "text.png": r"text\.png is damaged, or no PNG"}
    for name, message in names.items():
        rows = [good, {"question": "<image>", "images": [{"bytes": None, "path": name}]}]
        path = write(tmp_path, *rows)
        with pytest.raises(ValueError, match=rf"a\.parquet:2: .*{message}.*data.on_error=drop"):
            load(path, image_root=str(tmp_path))
        with caplog.at_level(logging.WARNING):
            assert [p.id for p in load(path, image_root=str(tmp_path), on_error="drop")] == [0]
        assert "1 of 2 prompts have images that cannot be used" in caplog.text
    with pytest.raises(ValueError, match=r"no prompts of .* 1 have wrong images \(the first: "):
        load(write(tmp_path, rows[1]), image_root=str(tmp_path), on_error="drop")


def test_the_length_limit_counts_all_tokens_of_images(load, tmp_path):
    path = write(
        tmp_path,
        {"question": "<image>", "images": [WIDE]},
        {"question": "<image>", "images": [TALL]},
    )
    short, long = (len(p.tokens) for p in load(path))
    assert long - short == 8 - 3
    assert [p.id for p in load(path, max_prompt_len=long - 1)] == [0]


def test_a_truncation_that_cuts_an_image_or_its_frame_is_refused(load, tmp_path):
    row = {"question": "A long question <image> with a long end", "images": [TALL]}
    options = {"filter_overlong_prompts": False, "truncation": "left"}
    [whole] = load(write(tmp_path, row))
    after = len(whole.tokens) - np.flatnonzero(whole.tokens == 267)[0]
    [kept] = load(write(tmp_path, row), max_prompt_len=int(after), **options)
    np.testing.assert_array_equal(kept.tokens, whole.tokens[-after:])
    with pytest.raises(ValueError, match=r"a\.parquet:1: .* would cut an image"):
        load(write(tmp_path, row), max_prompt_len=int(after) - 1, **options)


def test_the_content_of_images_is_part_of_the_datas_hash(load, tmp_path):
    [prompt] = load(write(tmp_path, {"question": "<image>", "images": [WIDE]}))
    [other] = load(write(tmp_path, {"question": "<image>", "images": [encoded(picture(24, 8, 1))]}))
    np.testing.assert_array_equal(prompt.tokens, other.tokens)
    assert content([prompt])["tokens"] != content([other])["tokens"]
    assert content([prompt])["rows"] == content([other])["rows"]


def test_a_file_that_changes_during_the_run_is_an_error(load, tmp_path):
    (tmp_path / "a.png").write_bytes(WIDE)
    path = write(tmp_path, {"question": "<image>", "images": ["a.png"]})
    [placed] = load(path, image_root=str(tmp_path))[0].images
    image = placed.image
    assert image == dataclasses.replace(image, load=lambda: image.patches)
    (tmp_path / "a.png").write_bytes(encoded(picture(24, 8, 1)))
    with pytest.raises(ValueError, match=r"a\.png has changed"):
        _ = image.patches


def test_streamed_rows_with_unusable_images_are_dropped(load_stream, tmp_path, caplog):
    rows = [{"question": f"<image>{i}", "images": [WIDE if i % 2 else b"x"]} for i in range(6)]
    stream = load_stream(write(tmp_path, *rows), on_error="drop")
    assert [prompt.id for prompt in stream.take(4)] == [1, 3, 5, 1]
    assert "a row was dropped (3 so far): " in caplog.text
    none = load_stream(write(tmp_path, rows[0], rows[2]), on_error="drop")
    with pytest.raises(ValueError, match="have wrong images"):
        none.take(1)


def test_a_mapped_column_has_the_images_and_the_root_is_a_folder(load, tmp_path):
    path = write(tmp_path, {"question": "<image>", "pictures": [WIDE]})
    [prompt] = load(path, columns=("images:pictures",))
    assert counts(prompt) == [3]
    with pytest.raises(ValueError, match=r"data\.image_root = .*none is not a folder"):
        load(path, image_root=str(tmp_path / "none"))


def test_previews_are_small_jpegs(load, tmp_path):
    [prompt] = load(write(tmp_path, {"prompt": user("?"), "images": [encoded(picture(24, 600))]}))
    shown = Image.open(io.BytesIO(prompt.images[0].image.preview()))
    assert shown.format == "JPEG" and shown.size == (10, 256)  # 24 x 256 / 600 is 10.2
