"""Tests of jaxrl/data/images/processing.py."""

import json

import numpy as np
import pytest
import transformers

from jaxrl.data.chat.encoding import ChatRenderer
from jaxrl.data.images.processing import ImageProcessor
from jaxrl.data.images.references import IMAGE
from jaxrl.data.tokenizer import load_tokenizer
from scripts.make_tiny_vlm import TEMPLATE
from tests.data.images import pictures
from tests.data.images.pictures import encoded, picture

WIDE = encoded(picture(25, 9))


def processor(folder, **options):
    return ImageProcessor(folder, options, max_pixels=10**6)


def test_qwens_patches_are_those_of_its_processor(qwen_folder):
    image = processor(qwen_folder).image(WIDE, "a.png")
    theirs = transformers.AutoImageProcessor.from_pretrained(qwen_folder, backend="pil")(
        picture(25, 9), return_tensors="np"
    )
    # 25 x 9 pixels become 24 x 8: 6 x 2 patches of 4, in blocks of 2 x 2
    assert (image.grid, image.n_tokens) == ((1, 2, 6), 3)
    np.testing.assert_array_equal(image.patches, theirs["pixel_values"])
    resized = picture(25, 9).resize((24, 8), resample=3)  # bicubic
    pixels = (np.asarray(resized, np.float32) / 255 - 0.5) / 0.5
    second = image.patches[1].reshape(3, 2, 4, 4)  # the patch to the right, twice in time
    np.testing.assert_allclose(second[:, 1], pixels[:4, 4:8].transpose(2, 0, 1), atol=1e-6)
    below = image.patches[2].reshape(3, 2, 4, 4)
    np.testing.assert_allclose(below[:, 0], pixels[4:8, :4].transpose(2, 0, 1), atol=1e-6)


def test_gemma3s_patches_are_rows_of_its_convolution(make_folder):
    folder = make_folder(pictures.GEMMA3_CONFIG, pictures.GEMMA3)
    image = processor(folder).image(WIDE, "a.png")
    assert (image.grid, image.n_tokens) == ((1, 4, 4), 4)
    resized = picture(25, 9).resize((16, 16), resample=2)  # bilinear
    pixels = (np.asarray(resized, np.float32) / 255 - 0.5) / 0.5
    patch = image.patches[1 * 4 + 2].reshape(3, 4, 4)  # row 1, column 2
    np.testing.assert_allclose(patch, pixels[4:8, 8:12].transpose(2, 0, 1), atol=1e-6)


def test_gemma4s_patches_are_without_padding(make_folder):
    folder = make_folder(pictures.GEMMA4_CONFIG, pictures.GEMMA4)
    image = processor(folder).image(WIDE, "a.png")
    # 70 * 4 patches of 16 pixels: scale (4480 / 225) ** 0.5 = 4.46, so 111.5 x 40.2 -> 104 x 40
    assert (image.grid, image.n_tokens) == ((1, 10, 26), 65)
    assert image.patches.shape == (260, 4 * 4 * 3)
    pixels = np.asarray(picture(25, 9).resize((104, 40), resample=3), np.float32) / 255
    patch = image.patches[2 * 26 + 3].reshape(4, 4, 3)  # row 2, column 3
    np.testing.assert_allclose(patch, pixels[8:12, 12:16], atol=1e-6)


@pytest.mark.parametrize(
    "config, settings, rendered, framed",
    [
        (pictures.GEMMA3_CONFIG, pictures.GEMMA3, "<|vision_start|>", "\n\n{}\n\n"),
        (pictures.GEMMA4_CONFIG, pictures.GEMMA4, "<|image_pad|>", "{}"),
    ],
    ids=["gemma3", "gemma4"],
)
def test_gemmas_images_are_framed(make_folder, tmp_path, config, settings, rendered, framed):
    folder = make_folder(config, settings)
    (tmp_path / "t.jinja").write_text(TEMPLATE.replace("IMAGE", rendered))
    tokenizer = load_tokenizer(folder)
    places = processor(folder).placeholders(tokenizer)
    renderer = ChatRenderer(tokenizer, template=str(tmp_path / "t.jinja"), images=places)
    text = renderer.text([{"role": "user", "content": f"a {IMAGE} b"}])
    assert f"a {framed.format(pictures.QWEN_IMAGE)} b" in text
    assert renderer.tokenize([text])[0].tolist().count(269) == 1


def test_settings_that_the_model_does_not_have_are_refused(make_folder, qwen_folder):
    small = processor(qwen_folder, max_pixels=128, min_pixels=64).image(WIDE, "a.png")
    assert small.n_tokens == 2  # 25 x 9 pixels -> 8 x 16
    with pytest.raises(ValueError, match=r"image_kwargs.max_soft_tokens is not read .* max_pixels"):
        processor(qwen_folder, max_soft_tokens=70)
    for name, value, message in (
        ("patch_size", 8, "patch_size=8, and its config.json has vision_config.patch_size=4"),
        ("do_resize", False, "has do_resize=False; only True"),
    ):
        with pytest.raises(ValueError, match=message):
            processor(make_folder(pictures.QWEN_CONFIG, {**pictures.QWEN, name: value}))
    with pytest.raises(ValueError, match="min_pixels=64 and max_pixels=32; set both"):
        processor(qwen_folder, max_pixels=32)
    with pytest.raises(ValueError, match=r"size.height=16, .* vision_config.image_size=32"):
        tower = {"patch_size": 4, "image_size": 32}
        config = {**pictures.GEMMA3_CONFIG, "vision_config": tower}
        processor(make_folder(config, pictures.GEMMA3))
    with pytest.raises(ValueError, match="has do_pan_and_scan=True; only False"):
        settings = {**pictures.GEMMA3, "do_pan_and_scan": True}
        processor(make_folder(pictures.GEMMA3_CONFIG, settings))
    folder = make_folder({"model_type": "qwen3"}, pictures.QWEN)
    with pytest.raises(ValueError, match="of the type 'qwen3', which reads text only"):
        processor(folder)
    (folder / "config.json").write_text(json.dumps(pictures.QWEN_CONFIG))
    (folder / "preprocessor_config.json").unlink()
    with pytest.raises(ValueError, match=r"cannot be loaded .* copy preprocessor_config.json"):
        processor(folder)


def test_an_extreme_ratio_of_sides_is_an_unusable_image(qwen_folder):
    with pytest.raises(ValueError, match=r"a.png has 500 x 1 pixels, which .* refuses"):
        processor(qwen_folder).image(encoded(picture(500, 1)), "a.png")


def test_gemma3s_tokens_are_those_of_transformers(make_folder, tmp_path):
    folder = make_folder(pictures.GEMMA3_CONFIG, pictures.GEMMA3)
    (tmp_path / "t.jinja").write_text(TEMPLATE.replace("IMAGE", "<|vision_start|>"))
    tokenizer = load_tokenizer(folder)
    ours = processor(folder)
    places = ours.placeholders(tokenizer)
    renderer = ChatRenderer(tokenizer, template=str(tmp_path / "t.jinja"), images=places)
    [tokens] = renderer.render_all([[{"role": "user", "content": f"a\n{IMAGE} b{IMAGE}"}]])
    images = [ours.image(WIDE, "a.png")] * 2

    tokenizer.boi_token, tokenizer.boi_token_id = "<|vision_start|>", 267
    tokenizer.eoi_token, tokenizer.eoi_token_id = "<|vision_end|>", 268
    tokenizer.image_token, tokenizer.image_token_id = "<|image_pad|>", 269
    theirs = transformers.Gemma3Processor(
        transformers.AutoImageProcessor.from_pretrained(folder, backend="pil"),
        tokenizer,
        image_seq_length=4,
    )
    text = (
        "<|im_start|>user\na\n<|vision_start|> b<|vision_start|><|im_end|>\n<|im_start|>assistant\n"
    )
    found = theirs(images=[picture(25, 9)] * 2, text=text)
    assert places.expand(tokens, images).tolist() == found["input_ids"][0]
