import numpy as np
import pytest

from tests.api.api_cases import (
    Client,
    arguments,
    encoded,
    loaded,
    loss_sum,
    prompt_logprobs,
    sampled,
    serving,
)

pytestmark = pytest.mark.thorough  # they compile an engine and updates

RNG = np.random.default_rng(0)
PROMPT = [5, 6, 7, 8]


def sequence(n: int):
    """A datum of cross_entropy with random tokens, targets and weights."""
    tokens, targets = (RNG.integers(3, 272, n) for _ in range(2))
    return tokens, {"target_tokens": targets, "weights": RNG.random(n).astype(np.float32)}


DATA = [sequence(n) for n in (5, 70, 20, 33)]  # more than one micro-batch of 128 tokens
OTHERS = [sequence(n) for n in (11, 40)]


@pytest.fixture(scope="module")
def opened(model_folder, tmp_path_factory):
    return loaded(arguments(model_folder, tmp_path_factory.mktemp("run")))


@pytest.fixture(scope="module")
def base(opened):
    with serving(*opened) as address:
        yield address


@pytest.fixture(scope="module")
def client(base):
    return Client(base, "tml-alice").open()


def trained(client: Client, number: int) -> tuple[str, list[bytes]]:
    """(model, results of two steps, and of a sample after each) of a client."""
    model, found = client.create(number), []
    for step in range(2):
        calls = client.train(model, "cross_entropy", DATA), client.step(model)
        found += [client.wait(call).content for call in calls]
        sampler = client.sampler(model, 10 * number + step)
        future = client.sample(sampler, 0, PROMPT, num_samples=3, prompt_logprobs=True)
        found.append(client.wait(future).content)
    return model, found


def test_results_do_not_depend_on_who_else_is_served(base, client):
    _, alone = trained(client, 0)
    other = Client(base, "tml-bob").open()
    model = other.create(0, rank=2, train_unembed=False)
    futures = []
    for i in range(4):
        futures += [other.train(model, "cross_entropy", OTHERS), other.step(model)]
        sampler = other.sampler(model, i)
        futures += [other.sample(sampler, 0, PROMPT * 3, num_samples=4)]
        if i == 1:
            _, together = trained(client, 1)
    for future in futures:
        other.wait(future)
    assert together == alone


def test_ranks_and_losses_are_mixed_in_one_dispatch(client):
    # Calls of a model are the same alone as next to other models, losses and options.
    data = [sequence(20)]
    rl = [(tokens, rest | {"advantages": rest["weights"]}) for tokens, rest in data]
    for _, tensors in rl:
        tensors["logprobs"] = -5 * tensors.pop("weights")
    kinds = [("cross_entropy", data, 4), ("ppo", rl, 2), ("cispo", rl, 1)]

    def results(number: int, *, wait: bool) -> list[bytes]:
        models = [client.create(number + i, rank=rank) for i, (*_, rank) in enumerate(kinds)]
        futures = []
        for model, (loss, tensors, _) in zip(models, kinds, strict=True):
            for future in client.train(model, loss, tensors), client.step(model):
                futures.append(future)
                if wait:
                    client.wait(future)
            futures.append(client.train(model, loss, tensors, forward_only=True))
        return [client.wait(future).content for future in futures]

    assert results(110, wait=True) == results(120, wait=False)


def test_calls_of_two_give_the_gradient_of_one_call_of_four(client):
    one, two = client.create(2), client.create(3)
    whole = loss_sum(client.wait(client.train(one, "cross_entropy", DATA)))
    halves = [
        loss_sum(client.wait(client.train(two, "cross_entropy", part)))
        for part in (DATA[:2], DATA[2:])
    ]
    assert sum(halves) == pytest.approx(whole, rel=1e-6)
    norms = [
        client.wait(client.step(model)).json()["metrics"]["optim/grad_norm"] for model in (one, two)
    ]
    assert norms[1] == pytest.approx(norms[0], rel=1e-6)
    after = [
        loss_sum(client.wait(client.train(model, "cross_entropy", DATA, forward_only=True)))
        for model in (one, two)
    ]
    assert after[1] == pytest.approx(after[0], rel=1e-6)
    assert after[0] < whole


def test_a_saved_state_continues_with_the_same_numbers_after_a_restart(opened, tmp_path):
    options, run, model = opened
    options.run_dir = tmp_path
    with serving(options, run, model) as address:
        client = Client(address, "tml-carol").open()
        name = client.create(0)
        for _ in range(2):
            client.train(name, "cross_entropy", DATA)
            client.wait(client.step(name))
        path = client.wait(client.model_call("save_weights", name, path="s1")).json()["path"]
        client.train(name, "cross_entropy", DATA)
        future = client.step(name)
        expected = client.wait(future).json()
    with serving(options, run, model) as address:
        client = Client(address, "tml-carol", client.session)
        assert client.wait(future).json() == expected
        lost = client.send("optim_step", {"model_id": name, "seq_id": 99, "adam_params": {}})
        assert lost.status_code == 422 and "with its last checkpoint" in lost.text
        body = {"session_id": client.session, "model_seq_id": 1, "path": path, "optimizer": True}
        client.wait(client.call("load_weights", body))
        loaded = f"{client.session}:train:1"
        client.train(loaded, "cross_entropy", DATA)
        assert client.wait(client.step(loaded)).json() == expected
        # From weights only, the same gradient takes another step.
        body |= {"model_seq_id": 2, "optimizer": False}
        client.wait(client.call("load_weights", body))
        fresh = f"{client.session}:train:2"
        client.train(fresh, "cross_entropy", DATA)
        assert client.wait(client.step(fresh)).json() == expected
        losses = [
            loss_sum(client.wait(client.train(one, "cross_entropy", DATA, forward_only=True)))
            for one in (loaded, fresh)
        ]
        assert losses[0] != losses[1]


def test_sampling_uses_the_trained_weights(client):
    model = client.create(4)
    target = [*PROMPT[1:], 9]
    datum = PROMPT, {"target_tokens": np.array(target)}
    for _ in range(30):
        client.train(model, "cross_entropy", [datum])
        client.wait(client.step(model, learning_rate=0.01))
    sampler = client.sampler(model, 40)
    greedy = client.sample(sampler, 0, PROMPT, sampling_params={"temperature": 0.0})
    [(tokens, _, _)] = sampled(client.wait(greedy))
    assert tokens[0] == 9
    scored = client.sample(sampler, 1, [*PROMPT, 9], prompt_logprobs=True)
    logp = prompt_logprobs(client.wait(scored))
    trained_on = client.wait(client.train(model, "cross_entropy", [datum], forward_only=True))
    assert np.isnan(logp[0])
    assert -logp[1:].sum() == pytest.approx(loss_sum(trained_on), rel=1e-5)


def test_an_inflight_sampler_has_the_newest_weights(client):
    def published(number: int) -> str:
        fields = {"kind": "inflight", "sampling_session_seq_id": number}
        saved = client.model_call("save_weights_for_sampler", model, **fields)
        return client.wait(saved).json()["sampling_session_id"]

    def logprobs(sampler: str, seq_id: int) -> list[float]:
        future = client.sample(sampler, seq_id, PROMPT, prompt_logprobs=True)
        return prompt_logprobs(client.wait(future))[1:].tolist()

    model = client.create(7)
    first = published(70)
    before = logprobs(first, 0)
    client.train(model, "cross_entropy", DATA)
    client.step(model)
    assert logprobs(first, 1) == before
    second = published(71)
    assert logprobs(first, 2) == logprobs(second, 0) != before


def test_stops_end_a_sample(client):
    body = {"session_id": client.session, "sampling_session_seq_id": 50, "base_model": "tiny"}
    sampler = client.call("create_sampling_session", body)["sampling_session_id"]
    long = {"max_tokens": 20, "temperature": 0.0, "stop": []}
    [(tokens, logprobs, reason)] = sampled(
        client.wait(client.sample(sampler, 0, PROMPT, sampling_params=long))
    )
    assert (len(tokens), len(logprobs), reason) == (20, 20, 1)
    at = {"stop": [tokens[4]]}
    [(stopped, _, reason)] = sampled(
        client.wait(client.sample(sampler, 1, PROMPT, sampling_params=long | at))
    )
    first = tokens.index(tokens[4])
    assert (stopped, reason) == (tokens[: first + 1], 0)


ADAM = {"learning_rate": 0.1}


@pytest.mark.parametrize(
    ("path", "body", "status", "message"),
    [
        ("optim_step", {"model_id": "MODEL", "seq_id": 50}, 400, "only adam_params"),
        ("optim_step", {"model_id": "x", "seq_id": 1, "adam_params": {}}, 404, "there is no model"),
        (
            "optim_step",
            {"model_id": "MODEL", "seq_id": 50, "adam_params": {"lr": 1.0}},
            400,
            "unknown field lr",
        ),
        (
            "create_model",
            {"session_id": "SESSION", "model_seq_id": 90, "base_model": "tiny"},
            400,
            "send lora_config",
        ),
        ("save_weights_external", {"model_id": "MODEL"}, 400, "is not supported"),
        (
            "save_weights",
            {"model_id": "MODEL", "seq_id": 50, "path": "../x"},
            400,
            "letters, digits",
        ),
        ("retrieve_future", {"request_id": "none"}, 410, "send it again"),
        ("session_heartbeat", {"session_id": "none"}, 404, "there is no session"),
        ("create_custom_loss", {}, 404, "Not Found"),
    ],
)
def test_a_wrong_request_is_named(client, path, body, status, message):
    model = f"{client.session}:train:0"
    names = {"MODEL": model, "SESSION": client.session}
    body = {
        key: names.get(value, value) if isinstance(value, str) else value
        for key, value in body.items()
    }
    response = client.send(path, body)
    assert response.status_code == status, response.text
    assert message in response.text


def test_a_step_without_a_gradient_fails_and_the_model_can_be_used(client):
    model = client.create(5)
    failed = client.failure(client.step(model))
    assert failed["category"] == "user" and "there is no gradient" in failed["error"]
    client.train(model, "cross_entropy", DATA[:1])
    assert "metrics" in client.wait(client.step(model)).json()


def test_another_client_finds_nothing(base, client):
    model = client.create(6)
    sampler = client.sampler(model, 60)
    future = client.train(model, "cross_entropy", DATA[:1])
    client.wait(future)
    thief = Client(base, "tml-eve").open()
    call = {"model_id": model, "seq_id": 70, "adam_params": ADAM}
    prompt = {"chunks": [{"type": "encoded_text", "tokens": PROMPT}]}
    sample = {"sampling_session_id": sampler, "seq_id": 9, "prompt": prompt}
    for path, body in (
        ("optim_step", call),
        ("get_info", call),
        ("save_weights", call | {"path": "stolen"}),
        ("asample", sample),
        ("forward_backward", encoded(model, 70, "cross_entropy", DATA[:1])),
        ("session_heartbeat", {"session_id": client.session}),
    ):
        assert thief.send(path, body).status_code == 404, path
    assert thief.send("retrieve_future", {"request_id": future["request_id"]}).status_code == 410
    assert Client(base, "").send("create_session", {}).status_code == 401
