"""Fixtures: folders of models with images, whose tokenizer has the tokens of images."""

import json
import shutil

import pytest

from jaxrl.config.keys import DataConfig
from jaxrl.data.chat.encoding import ChatRenderer
from jaxrl.data.images.reader import ImageReader
from jaxrl.data.items import load_items
from jaxrl.data.prompts import prompt_maker
from jaxrl.data.tokenizer import load_tokenizer
from tests.data.images.pictures import QWEN, QWEN_CONFIG, QWEN_IMAGE, TEMPLATE, TOKENS


@pytest.fixture(scope="session")
def make_folder(tokenizer_folder, tmp_path_factory):
    def make(config, processor):
        folder = tmp_path_factory.mktemp("model")
        shutil.copytree(tokenizer_folder, folder, dirs_exist_ok=True)
        tokenizer = load_tokenizer(folder)
        tokenizer.add_special_tokens({"additional_special_tokens": TOKENS})
        tokenizer.save_pretrained(folder)
        (folder / "config.json").write_text(json.dumps(config))
        (folder / "preprocessor_config.json").write_text(json.dumps(processor))
        return folder

    return make


@pytest.fixture(scope="session")
def qwen_folder(make_folder):
    return make_folder(QWEN_CONFIG, QWEN)


@pytest.fixture(scope="session")
def template(tmp_path_factory):
    path = tmp_path_factory.mktemp("template") / "images.jinja"
    path.write_text(TEMPLATE.replace("IMAGE", QWEN_IMAGE))
    return str(path)


@pytest.fixture
def load(qwen_folder, template):
    """load(source, **data): its prompts, read for a model of Qwen's family."""
    tokenizer = load_tokenizer(qwen_folder)

    def load(*sources, **options):
        mode = options.get("special_tokens", "error")
        data = DataConfig(**options)
        reader = ImageReader(qwen_folder, tokenizer, data)
        renderer = ChatRenderer(
            tokenizer, template=template, special_tokens=mode, images=reader.placeholders
        )
        return load_items(sources, prompt_maker(renderer, data, images=reader))

    return load
