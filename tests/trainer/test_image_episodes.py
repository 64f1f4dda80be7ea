"""Tests of episodes with images: their tokens, places, positions and logprobs."""

import json
from pathlib import Path

import numpy as np
import pytest
from PIL import Image

from jaxrl.config.keys import AlgorithmConfig, DataConfig, EnvConfig, SamplingConfig
from jaxrl.config.resolve import resolve
from jaxrl.data.chat.encoding import ChatRenderer
from jaxrl.data.images.mrope import mrope_positions
from jaxrl.data.images.reader import ImageReader
from jaxrl.data.images.references import IMAGE
from jaxrl.data.tokenizer import load_tokenizer
from jaxrl.environments.pool import EnvironmentPool
from jaxrl.evaluate import evaluate, read
from jaxrl.learner.image_encoder import EncodedImage, ImageEncoder
from jaxrl.rollout.loop import generate
from jaxrl.rollout.multi_turn import EnvironmentRunner, EpisodeLimits
from jaxrl.rollout.request_images import EpisodeImages
from jaxrl.train import train
from jaxrl.trainer.phases.mini_batches import to_sample
from jaxrl.trainer.phases.parts import sampled_parts
from jaxrl.types import Prompt
from tests.data.images.pictures import encoded
from tests.trainer.test_images import values
from tests.trainer.test_multi_turn import EOS, Scripted, ids

FRAMES = '''
import base64
import io

from PIL import Image


def frame(n, width=16):
    file = io.BytesIO()
    Image.new("RGB", (width, 16), (60 * n, 0, 0)).save(file, "PNG")
    return file.getvalue()


class Frames:
    """Shows a wider picture after every turn; the first turns get it in different forms."""

    def __init__(self, *, turns=3, broken=False):
        self.n, self.turns, self.broken = 0, turns, broken

    def reset(self, prompt):
        if prompt["answer"] == "as it is":
            return None
        return [{"role": "system", "content": "Look."}, *prompt["messages"]]

    def step(self, completion):
        self.n += 1
        image = b"no picture" if self.broken else frame(self.n, 16 + 8 * self.n)
        part = {"type": "image", "bytes": image}
        if self.n == 2:
            part = {"type": "image", "base64": base64.b64encode(image).decode()}
        parts = [{"type": "text", "text": "Now:"}, part]
        return [{"role": "user", "content": parts}], 0.5, self.n == self.turns
'''
RED = encoded(Image.new("RGB", (24, 16), (255, 0, 0)))


class NoFeatures(ImageEncoder):
    """Features that are zeros, without a tower."""

    def __init__(self):
        self.read = []

    def encode(self, images):
        self.read += [image.digest for image in images]
        return [EncodedImage(np.zeros((image.n_tokens, 8), np.float32)) for image in images]


@pytest.fixture(scope="module")
def frames(tmp_path_factory):
    """The file of an environment, as env.name has it."""
    path = tmp_path_factory.mktemp("frames") / "frames.py"
    path.write_text(FRAMES)
    return str(path)


@pytest.fixture(scope="module")
def reader(vlm):
    return ImageReader(vlm, load_tokenizer(vlm), DataConfig(images=True))


def play(reader, vlm, name, *, answer="", turns=("ab", "c", "d")):
    """(rollout, requests, digests that were encoded) of an episode with scripted turns.

    Without a reader the prompt has no image, and the run reads text.
    """
    places = None if reader is None else reader.placeholders
    renderer, encoder = ChatRenderer(load_tokenizer(vlm), images=places), NoFeatures()
    message = {"role": "user", "content": IMAGE * (reader is not None) + "What?"}
    given = () if reader is None else reader.read_references([RED], "row")
    placed = renderer.place_images(renderer.render([message]), given)
    engine = Scripted([[[*ids(renderer, t), EOS] for t in turns]])
    with EnvironmentPool(EnvConfig(name=name, workers=1)) as pool:
        runner = EnvironmentRunner(
            engine,
            pool,
            renderer,
            (EOS,),
            sampling=SamplingConfig(),
            limits=EpisodeLimits(prompt_len=99, max_tokens=400, max_turns=4),
            images=None if reader is None else EpisodeImages(reader, encoder),
        )
        prompt = Prompt(0, (message,), answer=answer, **placed.fields)
        [rollout], _ = generate(runner, None, [prompt], n=1, seed=0, version=0)
    return rollout, engine.requests, encoder.read


def test_requests_of_later_turns_have_all_images_so_far(reader, vlm, frames):
    rollout, requests, _ = play(reader, vlm, f"{frames}:Frames")
    assert rollout.finish == "stop", rollout.episode.error
    assert [len(request.images) for request in requests] == [1, 2, 3]
    token = reader.placeholders.token
    for request in requests:
        of_images = np.zeros(len(request.tokens), bool)
        for image in request.images:
            of_images[image.start : image.start + len(image.rows)] = True
        np.testing.assert_array_equal(of_images, request.tokens == token)
    # 24 x 16 pixels of the row, then 24 and 32: 4 x 4 patches of 2 x 2 make 6, 6 and 8 tokens
    assert [placed.image.n_tokens for placed in rollout.images] == [6, 6, 8]
    assert rollout.images[0].image.digest == rollout.prompt.images[0].image.digest
    assert len({placed.image.digest for placed in rollout.images}) == 3
    assert rollout.completion_messages[1] == {"role": "user", "content": f"Now:{IMAGE}"}


def test_a_training_sample_has_the_images_of_all_turns(reader, vlm, frames):
    rollout, requests, _ = play(reader, vlm, f"{frames}:Frames")
    sample, token = to_sample(rollout), reader.placeholders.token
    assert [p.start for p in sample.images] == [p.start for p in requests[-1].images]
    sequence = np.concatenate([sample.prompt_tokens, sample.tokens])
    grids = [placed.image.grid for placed in sample.images]
    expected, _ = mrope_positions(sequence, grids, image_token=token, merge=2)
    np.testing.assert_array_equal(sample.axis_positions, expected)
    assert sample.loss_mask.sum() == len("ab" + "c" + "d") + 3
    assert not sample.loss_mask[sample.tokens == token].any()
    [learned] = sampled_parts([sample], "row", AlgorithmConfig(parts=("observations",)))
    expected = ~sample.loss_mask & (sample.tokens != token)
    np.testing.assert_array_equal(learned.parts > 0, expected)


def test_a_prompt_as_it_is_keeps_its_images(reader, vlm, frames):
    rollout, _, read = play(reader, vlm, f"{frames}:Frames?turns=1", answer="as it is")
    assert len(rollout.images) == 1 and read == [rollout.images[0].image.digest]
    assert rollout.axis_positions.shape == (3, len(rollout.prompt.tokens) + len(rollout.tokens))


def test_an_image_that_cannot_be_used_ends_its_episode(reader, vlm, frames):
    rollout, *_ = play(reader, vlm, f"{frames}:Frames?broken=True")
    assert rollout.finish == "error" and "image 1 is damaged" in rollout.episode.error
    rollout, *_ = play(None, vlm, f"{frames}:Frames")
    assert rollout.finish == "error" and "set data.images=True" in rollout.episode.error


@pytest.mark.thorough
@pytest.mark.parametrize("mode", ["sync", "partial"])
def test_logprobs_are_the_engines_and_evaluation_is_validation(image_config, frames, mode):
    image_config.env.name = f"{frames}:Frames"
    image_config.reward.functions = ("environment",)
    image_config.schedule.mode = mode
    image_config.learner.lr = 1e-12  # weights that change would differ, too
    image_config.data.max_prompt_len = 96
    image_config.data.max_response_len = 160
    image_config.rollout.sampling.stop = ("a", "e", "i", "o", "u", "0", "1", "2", " ")
    assert train(resolve(image_config))
    gaps = values(image_config.run_dir, "mismatch/logp_diff_max")
    assert len(gaps) == 2 and max(gaps) < 1e-4
    assert max(values(image_config.run_dir, "env/turns")) > 1.5
    assert min(values(image_config.run_dir, "rollout/prefix_hit_rate")) > 0.3
    if mode == "sync":
        assert evaluate(read([f"--model={image_config.run_dir}"]))
        found = json.loads(Path(image_config.run_dir, "evaluation", "summary.json").read_text())
        validated = values(image_config.run_dir, "val/reward")[-1]
        assert found["results"]["all"]["reward"] == pytest.approx(validated, abs=1e-7)
