"""Fixtures: folders of models with images, whose tokenizer has the tokens of images."""

import json
import shutil

import pytest

from jaxrl.config.keys import DataConfig
from jaxrl.data.chat.encoding import ChatRenderer
from jaxrl.data.images.reader import ImageReader
from jaxrl.data.items import load_items
from jaxrl.data.preferences import pair_maker
from jaxrl.data.prompts import prompt_maker
from jaxrl.data.streaming import ItemStream
from jaxrl.data.tokenizer import load_tokenizer
from scripts.make_tiny_vlm import TEMPLATE
from tests.data.images.pictures import QWEN, QWEN_CONFIG, QWEN_IMAGE, TOKENS


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
def open_data(qwen_folder, template):
    """open_data(**data): (config of the data, renderer, reader) of a model of Qwen's family."""
    tokenizer = load_tokenizer(qwen_folder)

    def open_(**options):
        data = DataConfig(**options)
        reader = ImageReader(qwen_folder, tokenizer, data)
        renderer = ChatRenderer(
            tokenizer,
            template=template,
            special_tokens=data.special_tokens,
            images=reader.placeholders,
        )
        return data, renderer, reader

    return open_


@pytest.fixture
def make_maker(open_data):
    """make_maker(**data): the maker of prompts."""

    def make(**options):
        data, renderer, reader = open_data(**options)
        return prompt_maker(renderer, data, images=reader)

    return make


@pytest.fixture
def load(make_maker):
    return lambda *sources, **options: load_items(sources, make_maker(**options))


@pytest.fixture
def load_pairs(open_data):
    def load(*sources, **options):
        data, renderer, reader = open_data(**options)
        maker = pair_maker(renderer, data, stop=(2,), takes_labels=True, images=reader)
        return load_items(sources, maker)

    return load


@pytest.fixture
def load_stream(make_maker):
    def load(*sources, **options):
        return ItemStream(sources, make_maker(**options), shuffle=False, buffer=2, seed=0)

    return load
