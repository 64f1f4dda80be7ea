"""Images in model inputs: what a server refuses, and the numbers of training and sampling."""

import re

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from PIL import Image

from jaxrl.api.__main__ import with_tower
from jaxrl.api.adapters import AdapterChoice
from jaxrl.api.images import ImageChunk, place_chunks
from jaxrl.api.lanes import pack_lanes
from jaxrl.api.losses import read_samples
from jaxrl.api.messages import Datum
from jaxrl.api.wire import as_bytes, read_fields
from jaxrl.data.images.mrope import mrope_positions, text_positions
from jaxrl.data.images.placeholders import Placeholders
from jaxrl.data.images.reader import ImageReader
from jaxrl.http.errors import RequestError
from jaxrl.learner.image_patches import TowerInputs
from jaxrl.learner.loss import score_tokens
from jaxrl.models.files.safetensors import read_header
from jaxrl.models.image_features import ImageFeatures
from jaxrl.models.lora import add_adapters, combine, split, without_adapters
from jaxrl.models.packed import forward_packed
from jaxrl.types import ImageInput
from scripts.make_tiny_vlm import SPECIAL
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
    losses, _ = train(client, model, data)
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


def train(client: Client, model: str, data, steps: int = 3) -> tuple[list[float], list[float]]:
    """(losses, norms of gradients) of steps."""
    losses, norms = [], []
    for _ in range(steps):
        losses.append(loss_sum(client.wait(client.train(model, "cross_entropy", data))))
        norms.append(client.wait(client.step(model)).json()["metrics"]["optim/grad_norm"])
    return losses, norms


@pytest.mark.thorough
def test_adapters_of_the_tower_are_trained_and_sampled(vlm, tmp_path):
    """Samples have the features of the trained tower."""
    argv = arguments(vlm, tmp_path, "--config.data.images=True", "--train-vision")
    opened = loaded(argv)
    with serving(*opened) as address:
        client = Client(address, "tml-alice").open()
        data = [datum(RED), datum(n=30), datum(BLUE, RED), datum(n=100)]  # more than one lane
        model = client.create(0)
        losses, norms = train(client, model, data)
        loss, norm = expected_gradient(opened, data)
        assert losses[0] == pytest.approx(loss, rel=1e-5)
        assert norms[0] == pytest.approx(norm, rel=1e-4)
        assert losses[2] < losses[1] < losses[0]
        check_samples(client, model)


@pytest.mark.slow
def test_a_saved_tower_continues_where_towers_are_trained(vlm, tmp_path):
    argv = arguments(vlm, tmp_path, "--config.data.images=True", "--train-vision")
    data = [datum(RED), datum(BLUE, RED)]
    with serving(*loaded(argv)) as address:
        client = Client(address, "tml-alice").open()
        model = client.create(0)
        train(client, model, data, steps=2)
        train(client, model, [datum(n=30)], steps=1)  # text alone
        saved = client.wait(client.model_call("save_weights", model, path="one")).json()["path"]
        body = {"session_id": client.session, "model_seq_id": 1, "path": saved, "optimizer": True}
        future = client.call("load_weights", body)
        client.wait(future)
        one, two = (
            client.wait(client.train(m, "cross_entropy", data, forward_only=True)).content
            for m in (model, future["model_id"])
        )
        assert one == two
    names = {name for file in tmp_path.rglob("adapter/*.safetensors") for name in read_header(file)}
    assert any("visual.blocks.0.attn.qkv" in name for name in names)
    assert any("visual.merger" in name for name in names)
    with serving(*loaded([one for one in argv if one != "--train-vision"])) as address:
        client = Client(address, "tml-alice").open()
        failure = client.failure(client.call("load_weights", body | {"session_id": client.session}))
        assert "start the server with --train-vision" in failure["error"]


def expected_gradient(opened, data) -> tuple[float, float]:
    """(loss, norm of the gradient) of new adapters, a sequence at a time, without lanes."""
    options, run, model = opened
    rules, total, loss = model.layout.rules, None, 0.0
    with jax.set_mesh(model.mesh):
        base = with_tower(without_adapters(model.params), model)
        lora = AdapterChoice(4, train_unembed=False).lora(base.cfg, options.max_rank)
        trained, frozen = split(add_adapters(base, lora, seed=0, rules=rules, dtype=jnp.float32))

        def negative(trained, batch):
            whole = combine(trained, frozen)
            logp = score_tokens(whole, batch, cfg=run, rules=rules, remat="none")[0]
            return -jnp.sum(logp * batch.mask * batch.advantages)

        gradient = jax.jit(jax.value_and_grad(negative))
        for chunks, tensors in data:
            tensors = {name: np.asarray(values) for name, values in tensors.items()}
            given = [Datum(tuple(chunks), tensors)]
            limits = dict(n_vocab=model.engine.cfg.V, max_len=128, reader=model.images)
            samples = read_samples("cross_entropy", given, **limits)
            [lane] = pack_lanes(samples, [tensors["target_tokens"]], run, n_ranks=1)
            batch = lane.batch
            if batch.images is not None:
                batch = TowerInputs(model.encoders[0]).put(batch, rules)
            value, found = gradient(trained, jax.tree.map(jnp.asarray, batch))
            loss += float(value)
            total = found if total is None else jax.tree.map(jnp.add, total, found)
        return loss, float(optax.tree.norm(total))


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
