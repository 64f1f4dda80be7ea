"""Newton-Schulz iterations against NumPy, on one device and sharded over a mesh."""

# Unions in the types of optax and jax, without the fields that are read here.
# pyright: reportArgumentType=false
# pyright: reportCallIssue=false

import re

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import NamedSharding

from jaxrl.learner.optimizers.newton_schulz import newton_schulz, orthogonalize
from jaxrl.models.spec import ParamSpec
from sharding import TRAIN, make_mesh
from tests.learner.optimizers.twins import numpy_newton_schulz

# Stacked heads, a stacked matrix of the same layout, experts, and a matrix alone.
SPECS = [
    ParamSpec((3, 4, 8, 16), ("layers", "heads", None, "w_embed"), "normal", "{layer}", (32, 16)),
    ParamSpec((3, 32, 16), ("layers", "ffw", "w_embed"), "normal", "{layer}", (32, 16)),
    ParamSpec((3, 16, 4, 8), ("layers", "w_embed", "heads", None), "normal", "{layer}", (16, 32)),
    ParamSpec(
        (3, 4, 32, 16),
        ("layers", "experts", "ffw", "w_embed"),
        "normal",
        "{layer}.{expert}",
        (32, 16),
    ),
    ParamSpec((32, 16), ("ffw", "w_embed"), "normal", "one", (32, 16)),
]
COLLECTIVES = r"(all-to-all|all-gather|all-reduce|reduce-scatter|collective-permute)(?:-start)?\("


def arrays() -> list[np.ndarray]:
    rng = np.random.default_rng(0)
    return [rng.standard_normal(spec.shape).astype(np.float32) for spec in SPECS]


@pytest.mark.parametrize("shape", [(8, 24), (24, 8)])
def test_the_iteration_is_that_of_the_reference_and_flattens_the_spectrum(shape):
    x = np.random.default_rng(1).standard_normal(shape).astype(np.float32)
    got = np.asarray(newton_schulz(jnp.asarray(x), 5))
    np.testing.assert_allclose(got, numpy_newton_schulz(x, 5), rtol=0, atol=1e-5)
    singular = np.linalg.svd(got, compute_uv=False)
    assert singular.min() > 0.6 and singular.max() < 1.3


def sharded(mesh):
    return [
        jax.device_put(a, NamedSharding(mesh, TRAIN.spec(*spec.axes)))
        for a, spec in zip(arrays(), SPECS, strict=True)
    ]


def run(values):
    return orthogonalize(values, SPECS, steps=5, dtype=jnp.float32)


def test_every_matrix_of_stacked_layers_heads_and_experts_is_orthogonalized_alone():
    for got, x, spec in zip(run(list(map(jnp.asarray, arrays()))), arrays(), SPECS, strict=True):
        lead = spec.stacked_shape
        rows = x.reshape(*lead, *spec.hf_shape)
        want = np.stack([numpy_newton_schulz(rows[i], 5) for i in np.ndindex(lead)])
        np.testing.assert_allclose(got, want.reshape(x.shape), rtol=0, atol=1e-5)


MESHES = [dict(replica=2, fsdp=2, tensor=2), dict(fsdp=2, expert=2, tensor=2), dict(fsdp=8)]


@pytest.mark.parametrize(
    "sizes", [MESHES[0], *[pytest.param(m, marks=pytest.mark.thorough) for m in MESHES[1:]]]
)
def test_a_mesh_changes_no_number_and_moves_each_group_once_there_and_back(sizes):
    mesh = make_mesh(**sizes)
    with jax.set_mesh(mesh):
        values = sharded(mesh)
        program = jax.jit(run).lower(values).compile()
        got = program(values)
    for one, value, want in zip(got, values, run(list(map(jnp.asarray, arrays()))), strict=True):
        assert one.sharding == value.sharding
        np.testing.assert_allclose(jax.device_get(one), want, rtol=0, atol=5e-6)  # order of sums
    found = re.findall(COLLECTIVES, program.as_text())
    # Three groups (rows x columns over tensor x fsdp, columns x rows, experts) exchange over each
    # axis that shards them, there and back; copies over replicas gather the result once.
    axes = (sizes.get("fsdp", 1) > 1) + (sizes.get("tensor", 1) > 1)
    assert found.count("all-to-all") == 2 * axes * 3, found
    copied = 3 if "replica" in sizes else 2 if "expert" in sizes else 0  # groups
    assert found.count("all-gather") == copied, found
    assert len(found) == found.count("all-to-all") + found.count("all-gather"), found
