"""The package `tinker` against the server, in an environment of its choice."""

import os
import subprocess

import pytest
from PIL import Image

from tests.api.api_cases import arguments, loaded, serving
from tests.data.images.pictures import encoded

PYTHON = os.environ.get("JAXRL_TINKER_PYTHON", "")
WITHOUT = "set JAXRL_TINKER_PYTHON to a Python with the package tinker"
pytestmark = [pytest.mark.thorough, pytest.mark.skipif(not PYTHON, reason=WITHOUT)]

SYNC = """
import sys, numpy as np, tinker
from tinker import types
service = tinker.ServiceClient(base_url=sys.argv[1], api_key="tml-sync")
model = service.create_lora_training_client(base_model="tiny", rank=4, seed=0).result()
rng = np.random.default_rng(0)
def datum(n):
    inputs = {"target_tokens": rng.integers(3, 272, n), "weights": np.ones(n, np.float32)}
    return types.Datum(types.ModelInput.from_ints(rng.integers(3, 272, n).tolist()), inputs)
data = [datum(n) for n in (5, 33, 20)]
losses = []
for _ in range(3):
    result = model.forward_backward(data, "cross_entropy")
    step = model.optim_step(types.AdamParams(learning_rate=0.01))
    result = result.result()
    losses.append(result.metrics["loss:sum"])
    logprobs = np.concatenate([out["logprobs"].to_numpy() for out in result.loss_fn_outputs])
    assert abs(logprobs.sum() + losses[-1]) < 1e-3
    assert step.result().metrics["optim/grad_norm"] > 0
assert losses[2] < losses[1] < losses[0]
sampler = model.save_weights_and_get_sampling_client().result()
prompt = types.ModelInput.from_ints([5, 6, 7, 8])
params = types.SamplingParams(max_tokens=5, stop=[], seed=1)
first, again = (
    sampler.sample(prompt, 2, params, include_prompt_logprobs=True, topk_prompt_logprobs=2,
                   topk_sample_logprobs=3).result()
    for _ in range(2)
)
assert [s.tokens for s in first.sequences] == [s.tokens for s in again.sequences]
assert [len(s.tokens) for s in first.sequences] == [5, 5]
assert len(first.sequences[0].topk_logprobs[0]) == 3 and first.topk_prompt_logprobs[0] is None
assert sampler.compute_logprobs(prompt).result() == first.prompt_logprobs
path = model.save_state("one").result().path
loaded = service.create_training_client_from_state_with_optimizer(path).result()
one, two = (m.forward(data, "cross_entropy").result().metrics for m in (model, loaded))
assert one == two
try:
    loaded.optim_step(types.AdamParams()).result()
except tinker.RequestFailedError as error:
    assert "there is no gradient" in str(error)
else:
    raise AssertionError
stranger = tinker.ServiceClient(base_url=sys.argv[1], api_key="tml-stranger")
try:
    stranger.create_sampling_client(model_path=path).result()
except tinker.NotFoundError:
    print("passed")
"""

ASYNC = """
import asyncio, sys, numpy as np, tinker
from tinker import types
async def main():
    service = tinker.ServiceClient(base_url=sys.argv[1], api_key="tml-async")
    models = await asyncio.gather(*(
        service.create_lora_training_client(base_model="tiny", rank=r, seed=0) for r in (4, 2)
    ))
    n, rng = 9, np.random.default_rng(0)
    inputs = {
        "target_tokens": rng.integers(3, 272, n),
        "logprobs": -np.ones(n, np.float32) * 5,
        "advantages": rng.standard_normal(n).astype(np.float32),
    }
    datum = types.Datum(types.ModelInput.from_ints(rng.integers(3, 272, n).tolist()), inputs)
    pending = [m.forward_backward([datum], "ppo") for m in models]
    steps = [m.optim_step(types.AdamParams(learning_rate=0.01)) for m in models]
    assert [len((await p).loss_fn_outputs) for p in pending] == [1, 1]
    await asyncio.gather(*steps)
    samplers = [await m.save_weights_and_get_sampling_client() for m in models]
    prompt, params = types.ModelInput.from_ints([5, 6]), types.SamplingParams(max_tokens=4)
    found = await asyncio.gather(*(s.sample(prompt, 3, params) for s in samplers * 3))
    assert [len(f.sequences) for f in found] == [3] * 6
    print("passed")
asyncio.run(main())
"""


IMAGES = """
import sys, numpy as np, tinker
from tinker import types
service = tinker.ServiceClient(base_url=sys.argv[1], api_key="tml-images")
model = service.create_lora_training_client(base_model="tiny", rank=4, seed=0).result()
image = open(sys.argv[2], "rb").read()
def chunks(n_tokens, *more):
    return [
        types.EncodedTextChunk(tokens=[20, 3]),
        types.ImageChunk(data=image, format="png", expected_tokens=n_tokens),
        types.EncodedTextChunk(tokens=[5, 30, *more]),
    ]
weights = np.array([0.0] * 9 + [1.0] * 3, np.float32)
inputs = {"target_tokens": np.array([0] * 9 + [40, 41, 42]), "weights": weights}
datum = types.Datum(types.ModelInput(chunks=chunks(6, 40, 41)), inputs)
losses = []
for _ in range(2):
    found = model.forward_backward([datum], "cross_entropy")
    model.optim_step(types.AdamParams(learning_rate=0.01)).result()
    losses.append(found.result().metrics["loss:sum"])
assert losses[1] < losses[0]
sampler = model.save_weights_and_get_sampling_client().result()
params = types.SamplingParams(max_tokens=3, stop=[], seed=1)
found = sampler.sample(types.ModelInput(chunks=chunks(6)), 2, params).result()
assert [len(s.tokens) for s in found.sequences] == [3, 3]
try:
    sampler.sample(types.ModelInput(chunks=chunks(5)), 1, params).result()
except tinker.BadRequestError as error:
    assert "expected_tokens=5" in str(error)
    print("passed")
"""


@pytest.fixture(scope="module")
def base(model_folder, tmp_path_factory):
    with serving(*loaded(arguments(model_folder, tmp_path_factory.mktemp("run")))) as address:
        yield address


@pytest.mark.parametrize("script", [SYNC, ASYNC], ids=["sync", "async"])
def test_the_client_trains_and_samples(base, script, tmp_path):
    run(script, base, tmp_path)


def test_the_client_trains_and_samples_with_images(vlm, tmp_path):
    (tmp_path / "image.png").write_bytes(encoded(Image.new("RGB", (24, 16), "red")))
    options = arguments(vlm, tmp_path / "run", "--config.data.images=True")
    with serving(*loaded(options)) as address:
        run(IMAGES, address, tmp_path, "image.png")


def run(script, address, folder, *more):
    done = subprocess.run(
        [PYTHON, "-W", "ignore", "-c", script, address, *more],
        capture_output=True,
        text=True,
        timeout=240,
        cwd=folder,
    )
    assert done.returncode == 0, done.stderr[-3000:]
    assert "passed" in done.stdout
