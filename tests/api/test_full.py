"""Training of all weights, for one client at a time."""

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest

from jaxrl.api.lanes import pack_lanes
from jaxrl.api.losses import read_samples
from jaxrl.api.messages import Datum
from jaxrl.learner.loss import score_tokens
from tests.api.api_cases import Client, arguments, loaded, loss_sum, sampled, serving

pytestmark = pytest.mark.thorough  # they compile an engine and updates

PROMPT = [5, 6, 7, 8]
TARGETS = [6, 7, 8, 9]
DATA = [(PROMPT, {"target_tokens": np.array(TARGETS)})]


@pytest.fixture(scope="module")
def opened(model_folder, tmp_path_factory):
    argv = arguments(model_folder, tmp_path_factory.mktemp("run"), "--full")
    return loaded([one for one in argv if not one.startswith(("--max-models", "--slots"))])


@pytest.fixture(scope="module")
def base(opened):
    with serving(*opened) as address:
        yield address


def create(client: Client, number: int, **fields):
    body = {"session_id": client.session, "model_seq_id": number, "base_model": "tiny"}
    return client.send("create_model", body | fields)


def greedy(client: Client, sampler: str, seq_id: int):
    future = client.sample(sampler, seq_id, PROMPT, sampling_params={"temperature": 0.0})
    return sampled(client.wait(future))


def expected_gradient(opened) -> tuple[float, float]:
    """(loss, norm of the gradient) of DATA with the base model, without the server's programs."""
    _, run, model = opened
    [(tokens, tensors)] = DATA
    data = [Datum((np.array(tokens, np.int32),), tensors)]
    samples = read_samples("cross_entropy", data, n_vocab=272, max_len=128)
    [lane] = pack_lanes(samples, [np.array(TARGETS)], run, n_ranks=1)

    batch = jax.tree.map(jnp.asarray, lane.batch)

    def loss(params):
        logp = score_tokens(params, batch, cfg=run, rules=model.layout.rules, remat="none")[0]
        return -jnp.sum(jnp.where(batch.mask > 0, logp, 0.0))

    with jax.set_mesh(model.mesh):
        value, gradient = jax.jit(jax.value_and_grad(loss))(model.params)
        return float(value), float(optax.tree.norm(gradient))


def test_one_client_trains_all_weights_and_samples_from_them(opened, base):
    client = Client(base, "tml-alice").open()
    model = client.wait(create(client, 0).json()).json()["model_id"]
    info = client.call("get_info", {"model_id": model})
    assert (info["is_lora"], info["lora_rank"]) == (False, None)
    other = Client(base, "tml-bob").open()
    refused = other.failure(create(other, 0, lora_config={"rank": 0}).json())
    assert refused["category"] == "user" and "one is in training" in refused["error"]

    body = {"session_id": client.session, "sampling_session_seq_id": 1, "base_model": "tiny"}
    of_base = client.call("create_sampling_session", body)["sampling_session_id"]
    before = greedy(client, of_base, 0)
    first = client.train(model, "cross_entropy", DATA)
    step = client.step(model, learning_rate=1e-3)
    loss, norm = expected_gradient(opened)
    assert loss_sum(client.wait(first)) == pytest.approx(loss, rel=1e-5)
    metrics = client.wait(step).json()["metrics"]
    assert metrics["optim/grad_norm"] == pytest.approx(norm, rel=1e-5)
    for _ in range(20):
        client.train(model, "cross_entropy", DATA)
        client.wait(client.step(model, learning_rate=1e-3))
    assert greedy(client, client.sampler(model, 2), 0)[0][0][0] == 9
    assert greedy(client, of_base, 1) == before  # its weights are another folder's

    saved = client.wait(client.model_call("save_weights", model)).json()["path"]
    found = []
    for _ in range(2):  # the second time from the saved weights and moments
        client.train(model, "cross_entropy", DATA)
        client.wait(client.step(model))
        found.append(client.wait(client.train(model, "cross_entropy", DATA)).content)
        client.wait(client.model_call("load_weights", model, path=saved, optimizer=True))
    assert found[0] == found[1]


def test_an_adapter_is_refused(base):
    client = Client(base, "tml-carol").open()
    response = create(client, 0, lora_config={"rank": 4})
    assert response.status_code == 400 and "trains all weights (--full)" in response.text
