"""The step of the gated delta rule: kernels emulated against plain XLA, and compiled for chips that
are not attached."""

import functools
import math
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from jaxrl.kernels.gated_delta import gated_delta_step
from jaxrl.kernels.gated_delta.step import gated_delta_step_xla
from jaxrl.kernels.gated_delta.step_gpu import gated_delta_step_gpu
from jaxrl.kernels.gated_delta.step_tpu import gated_delta_step_tpu
from jaxrl.planner.compiled.cost import program_cost
from jaxrl.planner.topology import topology
from sharding import DECODE, make_mesh
from tests.kernels.abstract_arrays import abstract


def problem(T, *, heads=(2, 4), D=16, V=32):
    """Three sequences of which all, half and none of the tokens are live."""
    random, (K, N) = np.random.default_rng(T), heads
    q, k = random.standard_normal((2, 3, T, K, D)) / D**0.5
    v, state = random.standard_normal((3, T, N, V)), random.standard_normal((3, N, D, V))
    g, beta = random.uniform(-2, 0, (3, T, N)), random.uniform(0, 1, (3, T, N))
    live = np.arange(T) < np.array([[T], [T // 2], [0]])
    return [jnp.asarray(a, jnp.float32) for a in (q, k, v, g, beta)] + [
        jnp.asarray(live),
        jnp.asarray(state, jnp.float32),
    ]


@pytest.mark.thorough
@pytest.mark.parametrize("T", [1, 3])
@pytest.mark.parametrize("kernel", [gated_delta_step_tpu, gated_delta_step_gpu])
def test_kernels_give_the_outputs_and_states_of_plain_xla(kernel, T):
    args = problem(T)
    got = jax.jit(functools.partial(kernel, interpret=True))(*args)
    want = jax.jit(gated_delta_step_xla)(*args)
    for a, b in zip(got, want, strict=True):
        np.testing.assert_allclose(a, b, rtol=1e-5, atol=1e-5)


@pytest.mark.parametrize(
    ("implementation", "message"),
    [
        ("triton", "runs on gpu"),
        ("mosaic", "runs on tpu"),
        ("other", "set one of auto, mosaic, triton, xla"),
    ],
)
def test_a_kernel_that_does_not_run_here_is_rejected(one_device, implementation, message):
    q, k, v, g, beta, live, state = problem(1)
    how: Any = dict(live=live, rules=DECODE, implementation=implementation)
    with pytest.raises((NotImplementedError, ValueError), match=message):
        gated_delta_step(q, k, v, g, beta, state, **how)


@pytest.mark.parametrize(
    ("chips", "compiler", "T"),
    [
        ("v5p:2x2x2", "libtpu", 1),
        ("h100:8", "jax_cuda13_plugin", 1),
        pytest.param("v5e:2x4", "libtpu", 4, marks=pytest.mark.thorough),
        pytest.param("h100:8", "jax_cuda13_plugin", 4, marks=pytest.mark.thorough),
    ],
)
def test_a_step_moves_the_state_once_in_and_once_out(chips, compiler, T):
    """Qwen3.5 9B with its heads on two devices; the bytes of the compiled program."""
    pytest.importorskip(compiler, reason="the compiler is not installed")
    mesh, (B, K, N, D) = make_mesh(topology(chips).devices, fsdp=4, tensor=2), (64, 16, 32, 128)
    with jax.set_mesh(mesh):
        array = functools.partial(abstract, mesh)
        heads, gates = (DECODE.spec(None, None, "heads", *none) for none in ([None], []))
        q, v = (array((B, T, n, D), jnp.bfloat16, heads) for n in (K, N))
        g = array((B, T, N), jnp.float32, gates)
        state = array((B, N, D, D), jnp.float32, DECODE.spec(None, "heads"))
        live = array((B, T), jnp.bool_, jax.P())
        step = jax.jit(functools.partial(gated_delta_step, rules=DECODE), donate_argnums=5)
        compiled = step.lower(q, q, v, g, g, state, live=live).compile()
    tokens = 2 * B * T * (2 * K + 2 * N) * D + 2 * 4 * B * T * N
    moved = (2 * 4 * math.prod(state.shape) + tokens) / 2
    assert program_cost(compiled.as_text() or "").bytes_accessed < 1.15 * moved
