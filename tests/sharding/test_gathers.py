"""Tests of gathers in sharding/collectives.py; tests/test_collectives.py counts collectives."""

import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from sharding import (
    DECODE,
    PIPELINE,
    REPLICAS,
    RING,
    TRAIN,
    ULYSSES,
    collectives,
    gather_rows,
    gather_shards,
    make_mesh,
)
from tests.marks import graded


@pytest.mark.parametrize(
    ("rules", "sizes"),
    graded(
        [
            (TRAIN, dict(replica=2, fsdp=2, tensor=2)),
            (TRAIN, dict(fsdp=2, expert=2, tensor=2)),
            (ULYSSES, dict(fsdp=2, sequence=2, tensor=2)),
            (RING, dict(replica=2, fsdp=2, sequence=2)),
            (PIPELINE, dict(fsdp=2, stage=2, tensor=2)),
            (DECODE, dict(fsdp=4, tensor=2)),
            (REPLICAS, dict(replica=2, tensor=4)),
        ],
        default=[(TRAIN, dict(replica=2, fsdp=2, tensor=2))],
    ),
)
def test_rows_of_a_sharded_table_are_those_of_the_table_and_so_is_its_gradient(rules, sizes):
    """And no device has the whole table [40, 24], nor its gradient."""
    rng = np.random.default_rng(0)
    table = rng.normal(size=(40, 24)).astype(np.float32)
    tokens, weights = rng.integers(0, 40, (8, 4)), rng.normal(size=(8, 4, 24)).astype(np.float32)
    expected = np.zeros_like(table)
    np.add.at(expected, tokens, weights)

    def weighted_sum(table, tokens, weights):
        rows = gather_rows(table, tokens, rules, ("vocab", "w_embed"))
        return jnp.sum(rows * weights), rows

    with jax.set_mesh(make_mesh(**sizes)):
        args = (
            jax.device_put(table, rules.spec("vocab", "w_embed")),
            jax.device_put(tokens, rules.spec("batch", "time")),
            jax.device_put(weights, rules.spec("batch", "time", None)),
        )
        program = jax.jit(jax.grad(weighted_sum, has_aux=True)).lower(*args).compile()
        gradient, rows = program(*args)
        assert "f32[40,24]" not in program.as_text()
    np.testing.assert_array_equal(rows, table[tokens])
    np.testing.assert_allclose(gradient, expected, rtol=0, atol=1e-6)


@pytest.mark.parametrize("dim", [0, 1, 2])
def test_shards_are_joined_alike_on_all_platforms(dim, monkeypatch):
    whole = np.arange(8 * 16 * 24, dtype=np.float32).reshape(8, 16, 24)
    spec = jax.P(*[None] * dim, ("fsdp", "sequence"))

    def joined(platform):
        monkeypatch.setattr(collectives, "target_platform", lambda: platform)
        gather = functools.partial(gather_shards, axes=("fsdp", "sequence"), dim=dim)
        mapped = jax.shard_map(gather, in_specs=spec, out_specs=jax.P(None), check_vma=False)
        return np.asarray(jax.jit(mapped)(jax.device_put(whole, spec)))

    with jax.set_mesh(make_mesh(fsdp=4, sequence=2)):
        for platform in ("cpu", "gpu"):
            np.testing.assert_array_equal(joined(platform), whole)
