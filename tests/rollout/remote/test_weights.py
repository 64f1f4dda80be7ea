"""Tests of jaxrl/rollout/remote/weights.py: shards and changes of weights, bit for bit."""

import dataclasses

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from jaxrl.config.keys import RunConfig
from jaxrl.layout import worker_layout
from jaxrl.models.config import uniform_decoder
from jaxrl.models.decoder import init_model
from jaxrl.rollout.remote import weights
from jaxrl.rollout.remote.weights import LoadedWeights, RemoteWeights, change, to_bits
from jaxrl.rollout.remote.work import model_digest
from sharding import make_mesh
from sharding.rules import TRAIN

TINY = uniform_decoder("llama", L=1, D=16, N=2, K=1, H=8, F=16, V=64, tied=True, max_len=64)


class Store:
    """An object store that counts bytes."""

    def __init__(self):
        self.objects = []

    def put(self, pieces):
        self.objects.append(list(pieces))
        return len(self.objects) - 1

    def get(self, references):
        return [self.objects[i] for i in references]


def same_bits(tree, other):
    pairs = zip(jax.tree.leaves(tree), jax.tree.leaves(other), strict=True)
    return all(a.dtype == b.dtype and a.tobytes() == b.tobytes() for a, b in pairs)


def stepped(array):
    """The array with every 50th element changed."""
    host = np.array(array)
    host.reshape(-1)[::50] += 1
    return jax.device_put(host, array.sharding)


@pytest.mark.parametrize("dtype", [np.uint8, np.uint16, np.uint32])
@pytest.mark.parametrize("n", [1, 65_536, 200_000])
def test_a_change_turns_old_bits_into_new_ones(dtype, n):
    random = np.random.default_rng(n)
    old = random.integers(0, 200, n).astype(dtype)
    new = np.where(random.random(n) < 0.02, old + 1, old).astype(dtype)
    new[-1] += 1
    found = change(old, new)
    assert np.array_equal(found.apply(old), new)
    assert len(found.values) == np.count_nonzero(old != new)


def test_a_change_compares_bits_and_not_values():
    old = np.array([0.0, np.nan, 1.0], jnp.bfloat16)
    new = np.array([-0.0, np.nan, 1.0], jnp.bfloat16)
    found = change(to_bits(old), to_bits(new))
    assert found.values.tolist() == [0x8000]  # the sign of zero; NaN has the same bits


@pytest.mark.parametrize("delta", [False, True])
@pytest.mark.parametrize("rollout_dtype", ["bfloat16", "int8"])
def test_workers_get_the_bits_of_every_version(monkeypatch, one_device, delta, rollout_dtype):
    monkeypatch.setattr(weights, "SHARD_BYTES", 1000)
    cfg = RunConfig()
    cfg = dataclasses.replace(cfg, rollout=dataclasses.replace(cfg.rollout, dtype=rollout_dtype))
    mesh, dtype = make_mesh(), jnp.dtype("bfloat16")
    layout, store = worker_layout(cfg, TINY, dtype, mesh), Store()
    params = init_model(TINY, seed=0, rules=TRAIN, dtype=dtype)
    remote = RemoteWeights(layout, store.put, delta=delta)
    abstract = layout.abstract_weights(TINY, mesh)
    worker, late = (LoadedWeights(abstract, keep_bits=delta) for _ in range(2))
    loaded, sizes = None, []
    for step in range(3):
        version = remote.send(params)
        assert version.number == step and remote.send(params) is version
        tree = worker.load(version.update(loaded), store.get)
        loaded = version.number
        wanted = layout.prepare(params)
        assert same_bits(tree, wanted) and model_digest(tree) == model_digest(abstract)
        sizes.append(remote.take_metrics()["weights/published_bytes"])
        params = jax.tree.map(stepped, params)
    assert len(store.objects) > 3  # several shards per version
    if delta:
        assert max(sizes[1:]) < 0.5 * sizes[0]
    assert same_bits(late.load(version.update(None), store.get), wanted)
    if delta:  # a worker that missed a version gets all bits
        assert version.update(0).shards == version.update(None).shards
        assert version.update(1).shards != version.update(None).shards
