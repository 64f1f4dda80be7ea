"""The server on several devices."""

import numpy as np
import pytest

from tests.api.api_cases import Client, arguments, loaded, loss_sum, sampled, serving

pytestmark = pytest.mark.thorough  # they compile two engines and updates

RNG = np.random.default_rng(0)
DATA = [
    (RNG.integers(3, 272, n), {"target_tokens": RNG.integers(3, 272, n)}) for n in (5, 70, 20, 33)
]


def results(argv):
    """(losses, norms of gradients, greedy tokens) of a client with two models."""
    with serving(*loaded(argv)) as address:
        client = Client(address, "tml-alice").open()
        models = [client.create(0), client.create(1, rank=2, train_unembed=False)]
        losses, steps = [], []
        for _ in range(2):
            losses += [client.train(model, "cross_entropy", DATA) for model in models]
            steps += [client.step(model) for model in models]
        sampler = client.sampler(models[0], 0)
        future = client.sample(sampler, 0, [5, 6, 7], sampling_params={"temperature": 0.0})
        return (
            [loss_sum(client.wait(one)) for one in losses],
            [client.wait(one).json()["metrics"]["optim/grad_norm"] for one in steps],
            [tokens for tokens, _, _ in sampled(client.wait(future))],
        )


def test_two_devices_give_the_results_of_one(model_folder, tmp_path):
    one = results(arguments(model_folder, tmp_path / "one"))
    two = results(arguments(model_folder, tmp_path / "two", "--config.mesh.fsdp=2"))
    assert two[0] == pytest.approx(one[0], rel=1e-5)
    assert two[1] == pytest.approx(one[1], rel=1e-4)
    assert two[2] == one[2]
