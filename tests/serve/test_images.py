"""Images in chat completions: the engine's answers, what is refused, servers without images."""

import base64
import contextlib
import dataclasses

import jax
import jax.numpy as jnp
import numpy as np
import openai
import pytest
from PIL import Image

from jaxrl.config.keys import SamplingConfig
from jaxrl.models.config import LoRA
from jaxrl.models.files.adapter import load_with_adapters, open_adapter, save_adapter
from jaxrl.models.files.hf_load import model_config
from jaxrl.models.files.hf_save import convert_model
from jaxrl.models.lora import combine, split
from jaxrl.models.vision.towers import folder_tower, with_trained_tower
from jaxrl.rollout.request_images import request_images
from jaxrl.serve.model import open_model
from scripts.make_tiny_vlm import write_tiny_vlm
from sharding import TRAIN, make_mesh
from tests.data.images.pictures import encoded
from tests.models.vision.tiny_gemma import write_tiny_gemma
from tests.serve.serve_cases import KEY, arguments, direct, metric, serving, wait_until

RED, BLUE = (255, 0, 0), (0, 0, 255)


@pytest.fixture(scope="module")
def vlm(tmp_path_factory):
    folder = tmp_path_factory.mktemp("vlm") / "model"
    write_tiny_vlm(folder, width=32, n_layers=1)
    return folder


@pytest.fixture(scope="module")
def gemma(tmp_path_factory):
    return write_tiny_gemma(tmp_path_factory.mktemp("gemma") / "model")


@pytest.fixture(scope="module")
def served(vlm):
    with serving(arguments(vlm, "--config.data.images=True")) as served:
        yield served


def picture(color, size=(24, 16)) -> dict:
    data = base64.b64encode(encoded(Image.new("RGB", size, color))).decode()
    return {"type": "image_url", "image_url": {"url": f"data:image/png;base64,{data}"}}


def ask(served, *parts, **more):
    content = [{"type": "text", "text": part} if isinstance(part, str) else part for part in parts]
    options = dict(model="tiny", max_tokens=12, temperature=0, logprobs=True) | more
    return served.client.chat.completions.create(
        messages=[{"role": "user", "content": content}], **options
    ).choices


@pytest.mark.thorough
@pytest.mark.parametrize("model", ["vlm", "gemma"])
def test_answers_to_images_are_the_engines(request, model):
    with contextlib.ExitStack() as stack:
        if model == "vlm":
            served = request.getfixturevalue("served")
        else:
            folder = request.getfixturevalue(model)
            served = stack.enter_context(serving(arguments(folder, "--config.data.images=True")))
        assert_answers_are_the_engines(served)


def assert_answers_are_the_engines(served):
    found = [ask(served, picture(color), "What?", n=2)[0] for color in (RED, BLUE, RED)]
    logps = [[token.logprob for token in choice.logprobs.content] for choice in found]
    assert logps[0] == logps[2] != logps[1]
    model = open_model(served.run, max_len=1024)
    messages = [{"role": "user", "content": [picture(BLUE), {"type": "text", "text": "What?"}]}]
    marked, images = model.images.read_messages(messages)
    places = model.renderer.images
    tokens = places.expand(model.renderer.render(marked), images)
    features = request_images(places.place(tokens, images), model.encoders[0])
    how = dict(max_tokens=12, sampling=SamplingConfig(temperature=0.0), images=features)
    assert logps[1] == direct(model, [tokens], **how)[0][1]


@pytest.mark.thorough
def test_an_adapter_of_the_tower_answers_as_the_merged_model(vlm, tmp_path):
    """Base and adapter have features of an image that are kept apart, and so are their prefixes."""
    adapter, merged = tmp_path / "adapter", tmp_path / "merged"
    decoder = with_trained_tower(model_config(vlm), folder_tower(vlm), "none")
    targets = ("q_proj", "model.visual.blocks.attn.qkv", "model.visual.merger.linear_fc2")
    decoder = dataclasses.replace(decoder, lora=LoRA(2, 8.0, targets=targets))
    with jax.set_mesh(make_mesh()):
        model = load_with_adapters(vlm, TRAIN, decoder, jnp.float32, seed=0)
        trained, frozen = split(model)
        model = combine(jax.tree.map(lambda a: a + 0.3, trained), frozen)
        save_adapter(adapter, model, base=str(vlm), source=vlm)
    convert_model(vlm, merged, adapter=open_adapter(adapter, decoder))

    def answers(folder, names, *options):
        with serving(arguments(folder, "--config.data.images=True", *options)) as served:
            found = [ask(served, picture(RED), "What?", model=name)[0] for name in names]
        return [[token.logprob for token in choice.logprobs.content] for choice in found]

    base, adapted, again, base_again = answers(
        vlm, ("tiny", "tower", "tower", "tiny"), f"--adapter=tower={adapter}"
    )
    [expected] = answers(merged, ("tiny",))
    assert base == base_again and adapted == again
    np.testing.assert_allclose(adapted, expected, atol=2e-4)
    assert np.abs(np.subtract(adapted, base)).max() > 0.01
    with (
        pytest.raises(ValueError, match=r"outside of the language model.*data\.images=True"),
        serving(arguments(vlm, f"--adapter=tower={adapter}")),
    ):
        pass


@pytest.mark.thorough
@pytest.mark.parametrize(
    ("parts", "words"),
    [
        (({"type": "image_url", "image_url": {"url": "http://a/b.png"}},), "over the network"),
        (({"type": "image_url", "image_url": {"url": "/etc/passwd"}},), "data.image_root"),
        (
            ({"type": "image_url", "image_url": {"url": "data:image/png;base64,aGVsbG8="}},),
            "image 1 is damaged",
        ),
        (("<|image_pad|>",), "image tokens"),
        (({"type": "input_audio", "input_audio": {}},), "other content is not supported"),
    ],
)
def test_unusable_images_are_refused(served, parts, words):
    with pytest.raises(openai.BadRequestError, match=words):
        ask(served, *parts)
    wait_until(lambda: metric(served, "jaxrl_running") == 0)
    assert ask(served, "Still here?")


@pytest.mark.thorough
def test_a_server_without_images_says_how_to_read_them(vlm):
    with (
        serving(arguments(vlm)) as served,
        pytest.raises(openai.BadRequestError, match=r"--config\.data\.images=True"),
    ):
        ask(served, picture(RED))


@pytest.mark.thorough
def test_a_message_has_the_image_of_the_chat_completion(served):
    anthropic = pytest.importorskip("anthropic")
    url = picture(BLUE)["image_url"]["url"]
    source = {"type": "base64", "media_type": "image/png", "data": url.partition(",")[2]}
    content = [{"type": "image", "source": source}, {"type": "text", "text": "What?"}]
    client = anthropic.Anthropic(base_url=served.base, api_key=KEY, max_retries=0)
    message = client.messages.create(
        model="tiny",
        max_tokens=12,
        messages=[{"role": "user", "content": content}],
        extra_body={"temperature": 0},
    )
    [choice] = ask(served, picture(BLUE), "What?")
    assert "".join(block.text for block in message.content) == choice.message.content


@pytest.mark.thorough
def test_a_response_has_the_image_of_the_chat_completion(served):
    image = {"type": "input_image", "image_url": picture(BLUE)["image_url"]["url"]}
    content = [image, {"type": "input_text", "text": "What?"}]
    response = served.client.responses.create(
        model="tiny",
        input=[{"role": "user", "content": content}],
        max_output_tokens=12,
        temperature=0,
    )
    [choice] = ask(served, picture(BLUE), "What?")
    assert response.output_text == choice.message.content
