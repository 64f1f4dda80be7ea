"""The schedule 1F1B: gradients of any function of layers, and memory, with tiny stages."""

import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from jaxrl.models.pipeline_1f1b import gradients_1f1b
from sharding import PIPELINE, make_mesh

L, D, T = 8, 4, 8
RANKS = 2


def stage(layers, scales, x, added, ids):
    """x + tanh(scale (x w + id + a)), layer by layer; the sum per layer is that of the squares."""

    more = ids[..., None] if added is None else ids[..., None] + added

    @jax.checkpoint
    def layer(x, layer):
        w, scale = layer
        y = jnp.tanh(scale * (x @ w + more))
        return x + y, jnp.sum(y * y, axis=(0, 1, 2))

    return jax.lax.scan(layer, x, (layers, scales))


def objective(top, hidden, mask):
    """(loss, sums [2])."""
    loss = jnp.sum(jnp.sin(hidden @ top) * mask)
    return loss, jax.lax.stop_gradient(jnp.stack([loss, jnp.sum(mask)]))


def inputs(n_micro: int):
    draw = np.random.default_rng(0).standard_normal
    rows = n_micro * RANKS
    return dict(
        layers=(0.5 * draw((L, D, D))).astype(np.float32),
        scales=draw(L).astype(np.float32),
        top=draw(D).astype(np.float32),
        x=draw((rows, T, D)).astype(np.float32),
        added=draw((rows, T, D)).astype(np.float32),
        ids=draw((rows, T)).astype(np.float32),
        mask=(draw((rows, T)) > 0).astype(np.float32),
        load_gradient=draw(L).astype(np.float32),
    )


@jax.jit
def without_stages(a):
    """(gradients of layers, top, x and what is added; sums; load) on one device."""

    def total(layers, top, x, added):
        hidden, load = stage(layers, a["scales"], x, added, a["ids"])
        loss, sums = objective(top, hidden, a["mask"])
        return loss + load @ a["load_gradient"], (sums, load)

    run = jax.grad(total, argnums=(0, 1, 2, 3), has_aux=True)
    grads, (sums, load) = run(a["layers"], a["top"], a["x"], a["added"])
    layers, top, *of_rows = grads
    x, added = (g.reshape(RANKS, -1, T, D).swapaxes(0, 1) for g in of_rows)
    return layers, top, x, added, sums, load


@functools.partial(
    jax.jit,
    compiler_options={
        "xla_backend_optimization_level": 0,
        "xla_llvm_disable_expensive_passes": True,
    },
)
def with_stages(a):
    def by_micro_batch(x):  # the rows of a rank are adjacent
        x = jnp.reshape(x, (RANKS, -1, T, D), out_sharding=PIPELINE.spec("batch", None, None, None))
        return jax.reshard(x.swapaxes(0, 1), PIPELINE.spec(None, "batch", "time", None))

    found = gradients_1f1b(
        stage,
        objective,
        a["layers"],
        a["scales"],
        a["top"],
        by_micro_batch(a["x"]),
        jax.tree.map(by_micro_batch, a["added"]),
        (a["ids"],),
        a["mask"],
        zero_sums=jnp.zeros(2),
        load_gradient=a["load_gradient"],
        rules=PIPELINE,
    )
    return found.layers, found.top, found.x, found.added, found.sums, found.load


def assert_gradients(n_stages: int, n_micro: int):
    arrays = inputs(n_micro)
    with jax.set_mesh(make_mesh()):
        want = jax.device_get(without_stages(arrays))
    with jax.set_mesh(make_mesh(None, stage=n_stages, fsdp=RANKS)):
        got = jax.device_get(with_stages(arrays))
    for a, b in zip(got, want, strict=True):
        np.testing.assert_allclose(a, b, rtol=2e-5, atol=2e-5)


def test_stages_have_the_gradients_of_one_device():
    assert_gradients(n_stages=2, n_micro=5)


@pytest.mark.thorough
@pytest.mark.parametrize("n_micro", [1, 3, 9])
def test_four_stages_have_them_with_fewer_and_more_micro_batches_than_stages(n_micro):
    assert_gradients(n_stages=4, n_micro=n_micro)


@pytest.mark.thorough
def test_activations_do_not_grow_with_the_number_of_micro_batches():
    """GPipe keeps four arrays of every micro-batch here, the inputs of a stage's layers."""
    temporaries = []
    for n_micro in (8, 40):
        with jax.set_mesh(make_mesh(None, stage=2, fsdp=RANKS)):
            memory = (
                with_stages.lower(inputs(n_micro) | dict(added=None)).compile().memory_analysis()
            )
        assert memory is not None
        temporaries.append(memory.temp_size_in_bytes)
    of_micro_batch = T * D * 4  # one array, per device
    growth = (temporaries[1] - temporaries[0]) / 32
    assert growth < 1.5 * of_micro_batch, (growth, of_micro_batch)
