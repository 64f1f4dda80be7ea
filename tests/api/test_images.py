"""Images in model inputs: what a server refuses, and the numbers of training and sampling."""

import re

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from PIL import Image

from jaxrl.api.images import ImageChunk, place_chunks
from jaxrl.api.wire import as_bytes, read_fields
from jaxrl.data.images.mrope import mrope_positions, text_positions
from jaxrl.data.images.placeholders import Placeholders
from jaxrl.data.images.reader import ImageReader
from jaxrl.http.errors import RequestError
from jaxrl.models.image_features import ImageFeatures
from jaxrl.models.lora import without_adapters
from jaxrl.models.packed import forward_packed
from jaxrl.types import ImageInput
from scripts.make_tiny_vlm import SPECIAL, write_tiny_vlm
from tests.api.api_cases import Client, arguments, loaded, loss_sum, sampled, serving
from tests.data.images.pictures import encoded

START, PAD, END = range(SPECIAL.index("<|vision_start|>"), len(SPECIAL))
RED, BLUE = (
    ImageChunk(encoded(Image.new("RGB", size, color)), "png", n)
    for color, size, n in ((("red"), (24, 16), 6), ("blue", (16, 16), 4))
)


class Reader(ImageReader):
    """Every image has six tokens."""

    def __init__(self):
        self.placeholders = Placeholders("<image>", "<image>", PAD, merge=2)

    def read_references(self, references, place):
        if b"damaged" in references[0]:
            raise ValueError(f"{place}: image 1 is damaged")
        load = lambda: np.zeros(0)  # noqa: E731
        return [ImageInput((1, 4, 6), 6, str(i), load) for i, _ in enumerate(references)]


TEXT = np.arange(20, 23, dtype=np.int32)


def test_images_are_at_their_tokens():
    found = place_chunks([TEXT, RED, RED, TEXT], Reader(), "datum 0", "data")
    assert found.tokens.tolist() == [20, 21, 22, *[PAD] * 12, 20, 21, 22]
    assert [placed.start for placed in found.images] == [3, 9]
    grids = [(1, 4, 6)] * 2
    want, _ = mrope_positions(found.tokens, grids, image_token=PAD, merge=2)
    np.testing.assert_array_equal(found.axis_positions, want)
    assert place_chunks([TEXT, TEXT], None, "", "").tokens.tolist() == [*TEXT, *TEXT]


@pytest.mark.parametrize(
    ("chunks", "reader", "words"),
    [
        ([RED], None, "reads none; start it with a vision-language model and --config.data.images"),
        ([TEXT, BLUE], Reader(), "image 1 has 6 tokens, and expected_tokens=4"),
        ([ImageChunk(RED.data, "jpeg")], Reader(), "image 1 is not in its format 'jpeg'; send png"),
        ([ImageChunk(RED.data, "webp")], Reader(), "is not in its format 'webp'"),
        ([np.array([PAD], np.int32)], Reader(), f"has the token {PAD} in its text"),
        ([ImageChunk(RED.data + b"damaged", "png")], Reader(), "datum 0: image 1 is damaged"),
    ],
)
def test_what_cannot_be_used_is_refused(chunks, reader, words):
    with pytest.raises(RequestError, match=re.escape(words)) as failed:
        place_chunks(chunks, reader, "datum 0", "data")
    assert failed.value.status == 400


@pytest.fixture(scope="module")
def vlm(tmp_path_factory):
    folder = tmp_path_factory.mktemp("vlm") / "model"
    write_tiny_vlm(folder, width=32, n_layers=2)
    return folder


@pytest.fixture(scope="module")
def opened(vlm, tmp_path_factory):
    run_dir = tmp_path_factory.mktemp("run")
    return loaded(arguments(vlm, run_dir, "--config.data.images=True"))


@pytest.fixture(scope="module")
def client(opened):
    with serving(*opened) as address:
        yield Client(address, "tml-alice").open()


RNG = np.random.default_rng(0)


def datum(*images: ImageChunk, n: int = 9):
    """A model input with images, and the tensors of cross_entropy: images have no weight."""
    chunks, targets, weights = [], [], []
    for image in images:
        chunks += [np.array([20, START], np.int32), image, np.array([END], np.int32)]
        targets += [0] * (3 + image.expected_tokens)
    weights = [0.0] * len(targets) + [1.0] * n
    chunks.append(RNG.integers(20, 200, n, np.int32))
    targets += RNG.integers(20, 200, n).tolist()
    return chunks, {"target_tokens": targets, "weights": np.array(weights, np.float32)}


def logprobs(response) -> np.ndarray:
    """Those of all sequences of a result of forward_backward."""
    [record] = [value for number, value in read_fields(response.content) if number == 2]
    [entry] = [value for number, value in read_fields(as_bytes(record)) if number == 2]
    batched = dict(read_fields(as_bytes(dict(read_fields(as_bytes(entry)))[2])))
    return np.frombuffer(as_bytes(batched[1]), np.float32)


def reference(model, chunks, targets) -> np.ndarray:
    """Logprobs of the targets by the packed model with the features of the encoder."""
    read = [chunk for chunk in chunks if isinstance(chunk, ImageChunk)]
    placed = place_chunks(chunks, model.images, "datum 0", "data")
    with jax.set_mesh(model.mesh):
        images = model.encoders[0].encode([one.image for one in placed.images])
        n = len(placed.tokens)
        rows, deep = np.zeros((1, n, 32), np.float32), np.zeros((1, n, 1, 32), np.float32)
        for one, image, chunk in zip(placed.images, images, read, strict=True):
            at = slice(one.start, one.start + chunk.expected_tokens)
            rows[0, at], deep[0, at] = image.rows, image.deep
        features = ImageFeatures(rows, (placed.tokens == PAD)[None], deep)
        features = jax.tree.map(jnp.asarray, features)
        axes = text_positions(n) if placed.axis_positions is None else placed.axis_positions
        base, rules = without_adapters(model.params), model.layout.rules
        hidden = forward_packed(
            base,
            jnp.asarray(placed.tokens)[None],
            jnp.ones((1, n), jnp.int32),
            jnp.arange(n, dtype=jnp.int32)[None],
            features=features,
            axis_positions=jnp.asarray(axes.T)[None],
            rules=rules,
        )
        logp = jax.nn.log_softmax(base.logits(hidden, rules))[0]
        return np.asarray(logp)[np.arange(n), targets]


@pytest.mark.thorough
def test_a_call_with_images_has_the_logprobs_of_the_model(opened, client):
    """In one lane, and alone; new adapters are the base model."""
    model, data = client.create(0), [datum(RED), datum(n=30), datum(BLUE, RED), datum(BLUE)]
    together = client.wait(client.train(model, "cross_entropy", data, forward_only=True))
    want = [reference(opened[2], chunks, t["target_tokens"]) for chunks, t in data]
    np.testing.assert_allclose(logprobs(together), np.concatenate(want), atol=2e-5)
    alone = [
        client.wait(client.train(model, "cross_entropy", [d], forward_only=True)) for d in data
    ]
    np.testing.assert_allclose(np.concatenate(list(map(logprobs, alone))), logprobs(together), 1e-5)


@pytest.mark.thorough
def test_training_with_images_and_samples_have_one_model(client):
    """The logprobs of sampled tokens are those that training computes, after steps with images."""
    model, data = client.create(1), [datum(RED), datum(BLUE), datum(BLUE, RED, n=70), datum(n=60)]
    losses = []
    for _ in range(3):
        losses.append(client.train(model, "cross_entropy", data))
        client.wait(client.step(model))
    losses = [loss_sum(client.wait(future)) for future in losses]
    assert losses[2] < losses[1] < losses[0]
    check_samples(client, model)


@pytest.mark.thorough
def test_all_weights_of_the_language_model_are_trained_with_images(vlm, tmp_path):
    argv = arguments(vlm, tmp_path, "--config.data.images=True", "--full")
    argv = [one for one in argv if not one.startswith(("--max-models", "--slots"))]
    with serving(*loaded(argv)) as address:
        client = Client(address, "tml-alice").open()
        model, data = client.create(0, rank=0), [datum(RED), datum(BLUE)]
        losses = []
        for _ in range(2):
            losses.append(loss_sum(client.wait(client.train(model, "cross_entropy", data))))
            client.wait(client.step(model, learning_rate=1e-3))
        assert losses[1] < losses[0]
        check_samples(client, model)


def check_samples(client: Client, model: str) -> None:
    """Sampled tokens have the logprobs of training, which depend on the image of the prompt."""
    sampler, found = client.sampler(model, 0), []
    for i, image in enumerate((RED, BLUE)):
        chunks = [[20, START], image, [END, 30, 31]]
        answers = client.wait(client.sample(sampler, i, chunks, num_samples=2))
        (tokens, logp, _), _ = sampled(answers)
        n = 5 + image.expected_tokens
        given = [*chunks[:-1], [*chunks[-1], *tokens[:-1]]]
        targets = [0] * (n - 1) + tokens
        tensors = {"target_tokens": targets}
        forward = client.train(model, "cross_entropy", [(given, tensors)], forward_only=True)
        scored = logprobs(client.wait(forward))[n - 1 :]
        np.testing.assert_allclose(scored, logp, atol=2e-4)
        assert PAD not in tokens
        found.append(logp)
    assert found[0] != found[1]


@pytest.mark.thorough
def test_requests_with_images_that_cannot_be_used_fail_alone(client):
    model = client.create(2)
    wrong = ImageChunk(RED.data, "png", 5)
    chunks, tensors = datum(RED)
    chunks[1] = wrong
    body = {"session_id": client.session, "base_model": "tiny", "sampling_session_seq_id": 9}
    sampler = client.call("create_sampling_session", body)["sampling_session_id"]
    with pytest.raises(AssertionError, match="image 1 has 6 tokens, and expected_tokens=5"):
        client.train(model, "cross_entropy", [(chunks, tensors)])
    with pytest.raises(AssertionError, match="image 1 has 6 tokens, and expected_tokens=5"):
        client.sample(sampler, 0, [[20], wrong, [21]])
    with pytest.raises(AssertionError, match="logprobs of a prompt with images are not supported"):
        client.sample(sampler, 0, [[20], RED, [21]], prompt_logprobs=True)
    pointer = {"type": "image_asset_pointer", "format": "png", "location": "http://x/y.png"}
    body = {"sampling_session_id": sampler, "seq_id": 1, "prompt": {"chunks": [pointer]}}
    with pytest.raises(AssertionError, match="send the image as an ImageChunk"):
        client.call("asample", body)
    client.wait(client.train(model, "cross_entropy", [datum(RED)]))
