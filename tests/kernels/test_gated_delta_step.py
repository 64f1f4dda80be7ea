"""The step of the gated delta rule: kernels emulated against plain XLA, and compiled for chips that
are not attached."""

import functools
import math
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.experimental.pallas import tpu as pltpu

from jaxrl.kernels.gated_delta import gated_delta_outputs, gated_delta_step, step_tpu
from jaxrl.kernels.gated_delta.step import gated_delta_step_xla
from jaxrl.kernels.gated_delta.step_gpu import gated_delta_step_gpu
from jaxrl.kernels.gated_delta.step_tpu import gated_delta_step_tpu
from jaxrl.planner.compiled.cost import program_cost
from jaxrl.planner.compiled.kernels import delta_step_work
from jaxrl.planner.topology import topology
from sharding import DECODE, TRAIN, make_mesh
from tests.kernels.abstract_arrays import abstract

SLOTS = jnp.array([3, 1, 0, 0])  # of a pool of five states


def problem(T, *, heads=(2, 4), D=16, V=32):
    """Four sequences of which all, half and none of the tokens are live; the others are zeros."""
    random, (K, N), B = np.random.default_rng(T), heads, len(SLOTS)
    q, k = random.standard_normal((2, B, T, K, D)) / D**0.5
    v, states = random.standard_normal((B, T, N, V)), random.standard_normal((5, N, D, V))
    g, beta = random.uniform(-2, 0, (B, T, N)), random.uniform(0, 1, (B, T, N))
    live = np.arange(T) < np.array([[T], [T // 2], [0], [0]])
    states[0] = 0
    tokens = [np.where(live.reshape(B, T, *(1,) * (a.ndim - 2)), a, 0) for a in (q, k, v, g, beta)]
    return [jnp.asarray(a, jnp.float32) for a in (*tokens, states)], jnp.asarray(live)


TPU = functools.partial(gated_delta_step_tpu, interpret=True)
# With the memories and copies of a TPU: a copy arrives only when it is waited for.
TPU_COPIES = functools.partial(
    gated_delta_step_tpu, interpret=pltpu.InterpretParams(dma_execution_mode="on_wait")
)
GPU = functools.partial(gated_delta_step_gpu, interpret=True)


@pytest.mark.thorough
@pytest.mark.parametrize("T", [1, 3])
@pytest.mark.parametrize("kernel", [TPU, TPU_COPIES, GPU])
def test_kernels_give_the_outputs_and_states_of_plain_xla(kernel, T, monkeypatch):
    """Slot 0 is read and written by two rows, and on TPU by two programs of each."""
    monkeypatch.setattr(step_tpu, "MAX_HEADS", 2)
    (*tokens, states), _ = problem(T)
    got = jax.jit(kernel)(*tokens, states, SLOTS)
    want = jax.jit(gated_delta_step_xla)(*tokens, states, SLOTS)
    for a, b in zip(got, want, strict=True):
        np.testing.assert_allclose(a, b, rtol=1e-5, atol=1e-5)
    unchanged = np.array([0, 2, 4])
    np.testing.assert_array_equal(got[1][unchanged], states[unchanged])
    out, pool = jax.jit(functools.partial(kernel, writes=False))(*tokens, states, SLOTS)
    np.testing.assert_allclose(out, got[0], rtol=1e-5, atol=1e-6)
    assert pool is None


def test_some_of_the_verified_tokens_are_accepted(one_device):
    """The states are those of the accepted tokens alone, and the outputs those of all."""
    (*tokens, states), live = problem(3)
    step = jax.jit(functools.partial(gated_delta_step, slots=SLOTS, rules=DECODE))
    verify = jax.jit(functools.partial(gated_delta_outputs, slots=SLOTS, rules=DECODE))
    want, after_all = step(*tokens, states, live=live)
    out = verify(*tokens, states, live=live)
    np.testing.assert_allclose(out, want, rtol=1e-5, atol=1e-6)
    accepted = jnp.arange(3) < jnp.array([[2], [0], [0], [0]])
    _, after = step(*tokens, states, live=accepted)
    kept = np.array([0, 1, 2, 4])
    np.testing.assert_array_equal(after[kept], states[kept])
    _, k, v, g, beta = (np.asarray(a[0], np.float64) for a in tokens)
    state = np.asarray(states[3], np.float64)  # [N, D, V]; two value heads for each of key
    for t in range(2):
        key, state = np.repeat(k[t], 2, axis=0), np.exp(g[t])[:, None, None] * state
        change = beta[t][:, None] * (v[t] - np.einsum("NDV,ND->NV", state, key))
        state = state + key[:, :, None] * change[:, None]
    np.testing.assert_allclose(after[3], state, rtol=1e-4, atol=1e-5)
    assert np.abs(after_all[3] - state).max() > 1e-2


@pytest.mark.parametrize("T", [1, pytest.param(3, marks=pytest.mark.thorough)])
def test_padding_of_any_value_changes_no_slot(one_device, T):
    (*tokens, states), live = problem(T)
    step = jax.jit(functools.partial(gated_delta_step, slots=SLOTS, live=live, rules=DECODE))
    want = step(*tokens, states)
    at = live.reshape(len(SLOTS), T, 1)
    nan = [jnp.where(at if a.ndim == 3 else at[..., None], a, jnp.nan) for a in tokens]
    out, after = step(*nan, states)
    np.testing.assert_array_equal(out, want[0])
    np.testing.assert_array_equal(out[~live], 0)
    np.testing.assert_array_equal(after, want[1])
    unchanged = np.array([0, 2, 4])
    np.testing.assert_array_equal(after[unchanged], states[unchanged])
    assert not np.array_equal(after[3], states[3])


@pytest.mark.parametrize(
    ("implementation", "message"),
    [
        ("triton", "runs on gpu"),
        ("mosaic", "runs on tpu"),
        ("other", "set one of auto, mosaic, triton, xla"),
    ],
)
def test_a_kernel_that_does_not_run_here_is_rejected(one_device, implementation, message):
    (q, k, v, g, beta, states), live = problem(1)
    how: Any = dict(slots=SLOTS, live=live, rules=DECODE, implementation=implementation)
    with pytest.raises((NotImplementedError, ValueError), match=message):
        gated_delta_step(q, k, v, g, beta, states, **how)


def test_sharded_rows_are_refused():
    """Otherwise each device would write the states of some rows only."""
    (q, k, v, g, beta, states), live = problem(1)
    mesh = make_mesh(jax.devices()[:2], fsdp=2)
    with jax.set_mesh(mesh), pytest.raises(ValueError, match=r"pass rules.in_replica\(\)"):
        gated_delta_step(q, k, v, g, beta, states, slots=SLOTS, live=live, rules=TRAIN)


@pytest.mark.parametrize(
    ("chips", "compiler", "T"),
    [
        ("v5p:2x2x2", "libtpu", 1),
        ("h100:8", "jax_cuda13_plugin", 1),
        pytest.param("v5e:2x4", "libtpu", 4, marks=pytest.mark.thorough),
        pytest.param("h100:8", "jax_cuda13_plugin", 4, marks=pytest.mark.thorough),
    ],
)
def test_a_step_moves_each_state_once_in_and_once_out(chips, compiler, T):
    """Qwen3.5 9B with its heads on two devices; the bytes of one layer of the compiled loop."""
    pytest.importorskip(compiler, reason="the compiler is not installed")
    mesh, (B, K, N, D) = make_mesh(topology(chips).devices, fsdp=4, tensor=2), (64, 16, 32, 128)
    compiled, pool_bytes = compiled_layers(mesh, (B, T, K, N, D), None)
    tokens = 2 * B * T * (2 * K + 2 * N) * D + 2 * 4 * B * T * N
    moved = (2 * 4 * B * N * D * D + tokens) / 2
    cost = program_cost(compiled.as_text() or "", kernels=delta_step_work)
    assert moved < cost.bytes_accessed < 1.15 * moved
    memory: Any = compiled.memory_analysis()
    assert memory.alias_size_in_bytes == pool_bytes / 2
    assert memory.temp_size_in_bytes < moved / 16  # no copy of the states of the rows


@pytest.mark.parametrize(
    ("chips", "compiler", "T"),
    [
        ("cpu", "jax", 1),
        pytest.param("cpu", "jax", 4, marks=pytest.mark.thorough),
        pytest.param("v5p:2x2x2", "libtpu", 4, marks=pytest.mark.thorough),
        pytest.param("h100:8", "jax_cuda13_plugin", 1, marks=pytest.mark.thorough),
        pytest.param("h100:8", "jax_cuda13_plugin", 4, marks=pytest.mark.thorough),
    ],
)
def test_plain_xla_does_not_copy_the_pool(chips, compiler, T):
    pytest.importorskip(compiler, reason="the compiler is not installed")
    devices = jax.devices() if chips == "cpu" else topology(chips).devices
    compiled, pool_bytes = compiled_layers(make_mesh(devices, fsdp=8), (8, T, 4, 8, 128), "xla")
    memory: Any = compiled.memory_analysis()
    assert memory.alias_size_in_bytes == pool_bytes
    assert memory.temp_size_in_bytes < pool_bytes / 2


def compiled_layers(mesh, sizes, implementation, *, L=3):
    """A loop of steps over the layers of a donated pool [L, S, N, D, V], and the pool's bytes.

    The number of layers is not known to the compiler. The pool has three states per row and layer.
    """
    (B, T, K, N, D), S = sizes, 3 * sizes[0]
    layers, layer = DECODE.spec(None, None, "heads"), DECODE.spec(None, "heads")

    def step(pools, q, k, v, g, beta, slots, live, n_layers):
        def body(carry):
            i, _, pools = carry
            flat = jnp.reshape(pools, (-1, *pools.shape[2:]), out_sharding=layer)
            how: Any = dict(live=live, rules=DECODE, implementation=implementation)
            out, flat = gated_delta_step(q, k, v, g, beta, flat, slots=slots + i * S, **how)
            return i + 1, out, jnp.reshape(flat, pools.shape, out_sharding=layers)

        return jax.lax.while_loop(lambda carry: carry[0] < n_layers, body, (0, v, pools))

    with jax.set_mesh(mesh):
        array = functools.partial(abstract, mesh)
        heads, gates = (DECODE.spec(None, None, "heads", *none) for none in ([None], []))
        q, v = (array((B, T, n, D), jnp.bfloat16, heads) for n in (K, N))
        g, live = array((B, T, N), jnp.float32, gates), array((B, T), jnp.bool_, jax.P())
        pools = array((L, S, N, D, D), jnp.float32, layers)
        slots, n_layers = array((B,), jnp.int32, jax.P()), array((), jnp.int32, jax.P())
        lowered = jax.jit(step, donate_argnums=0).lower(pools, q, q, v, g, g, slots, live, n_layers)
        return lowered.compile(), 4 * math.prod(pools.shape)
