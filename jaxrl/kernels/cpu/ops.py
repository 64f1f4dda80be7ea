"""The C kernels as JAX operations, and the checks that decide if they replace XLA's.

A kernel is used only if it gives XLA's bits for the shape, checked once per shape at compile time.
"""

import functools
import logging
from collections.abc import Callable, Sequence

import jax
import jax.numpy as jnp
import numpy as np
from jaxtyping import Array, Float, Int, Int8

from jaxrl.kernels.attention.online_softmax import BLOCK, Softmax, add_block, init_softmax, pad_axis
from jaxrl.kernels.attention_spec import AttentionSpec
from jaxrl.kernels.cpu import native
from jaxrl.kernels.quantized import Quantized
from sharding import target_platform

log = logging.getLogger(__name__)

MAX_ROWS = 64
MAX_WEIGHTS = 4
MAX_HEAD_DIM = 256


def supports_skinny_matmul(
    x: Float[Array, "B T I"], w: Float[Array, "O I"] | Int8[Array, "O I"]
) -> bool:
    """Whether `skinny_matmul` computes the product of one token per row with this weight."""
    return (
        target_platform() == "cpu"
        and x.dtype == w.dtype == jnp.float32
        and x.shape[0] <= MAX_ROWS
        and x.shape[1] == 1
        and w.shape[0] > 1
        and jax.sharding.get_abstract_mesh().size == 1
        and native.is_available()
        and matmul_bits_match(*w.shape)
    )


def skinny_matmul(
    x: Float[Array, "B I"], *weights: Float[Array, "_ I"]
) -> Sequence[Float[Array, "B _"]]:
    """x wᵀ in float32 for up to MAX_WEIGHTS weights [out, in] and at most MAX_ROWS rows."""
    return _call("skinny_matmul", [(x.shape[0], w.shape[0]) for w in weights], x, *weights)


def supports_paged_attention(q: Float[Array, "B K M H"], pages: jax.Array | Quantized) -> bool:
    """Whether `paged_attention` supports these queries (few tokens per sequence) and pages."""
    H = pages.shape[3]
    return (
        target_platform() == "cpu"
        and q.dtype == pages.dtype == jnp.float32
        and q.shape[2] <= MAX_ROWS
        and H % 16 == 0
        and H <= MAX_HEAD_DIM
        and native.is_available()
        and _attention_bits_match(q.shape[2], H)
    )


def paged_attention(
    q: Float[Array, "B K M H"],
    k_pages: Float[Array, "P K page H"],
    v_pages: Float[Array, "P K page H"],
    page_table: Int[Array, "B C"],
    first: Int[Array, "B M"],
    last: Int[Array, "B M"],
    scale: float,
) -> Softmax:
    """Softmax state of q kᵀ * scale over positions first..last of each sequence's pages.

    `online_softmax.normalize` turns it into the mean. Rows with last = -1 keep the initial state.
    """
    args = q, k_pages, v_pages, page_table, first, last, jnp.float32(scale)
    shapes = q.shape[:3], q.shape[:3], q.shape
    max_score, denominator, numerator = _call("paged_attention", shapes, *args)
    return Softmax(max_score=max_score, denominator=denominator, numerator=numerator)


def _call(name: str, shapes: Sequence[tuple[int, ...]], *args: jax.Array) -> Sequence[jax.Array]:
    results = [jax.ShapeDtypeStruct(shape, jnp.float32) for shape in shapes]
    return jax.ffi.ffi_call(f"jaxrl_{name}", results)(*args)


@functools.cache
def matmul_bits_match(n_out: int, n_in: int) -> bool:
    """Whether XLA sums products of many rows with an [out, in] weight in `skinny_matmul`'s order.

    That depends on the processor and on the number of outputs; beyond 1024 only their remainder
    modulo 1024 matters. 256 rows, as in training: fewer may be summed in another order.
    """
    n_out = min(n_out, 1024 + n_out % 1024)
    x, w = _random(256, n_in), _random(n_out, n_in)

    def with_xla(x, w):
        return jnp.einsum("BI,OI->BO", x, w)

    return _bits_match(lambda x, w: skinny_matmul(x, w)[0], with_xla, (x[:3], w), (x, w))


@functools.cache
def _attention_bits_match(M: int, H: int) -> bool:
    """Whether XLA sums attention over key blocks in the order of the kernel."""
    n_keys = 3 * BLOCK
    q, k, v = (_random(1, 1, n, H) for n in (M, n_keys, n_keys))
    last = np.arange(n_keys - M, n_keys, dtype=np.int32)[None]
    first, table = np.zeros_like(last), np.zeros((1, 1), np.int32)
    scale = 8.0  # softmax weights of all magnitudes

    def with_xla(q, k, v):
        v = pad_axis(v, 3, BLOCK)

        def add(j, state):
            k_block, v_block = (
                jax.lax.dynamic_slice_in_dim(x, j * BLOCK, BLOCK, 2) for x in (k, v)
            )
            visible = j * BLOCK + np.arange(BLOCK) <= last[:, None, :, None]
            return add_block(state, q, k_block, v_block, visible, AttentionSpec(scale))

        state = init_softmax(q.shape[:3], H + -H % BLOCK)
        state = jax.lax.fori_loop(0, n_keys // BLOCK, add, state)
        return _concatenate(state.max_score, state.denominator, state.numerator[..., :H])

    def ours(q, k, v, table, first, last):
        state = paged_attention(q, k, v, table, first, last, scale)
        return _concatenate(state.max_score, state.denominator, state.numerator)

    return _bits_match(ours, with_xla, (q, k, v, table, first, last), (q, k, v))


def _concatenate(*parts: jax.Array) -> Float[Array, "n"]:
    return jnp.concatenate([part.reshape(-1) for part in parts])


def _bits_match(kernel: Callable, with_xla: Callable, args: tuple, xla_args: tuple) -> bool:
    """Whether the first rows of both results are bitwise equal."""
    no_mesh = jax.sharding.AbstractMesh((), ())  # whatever mesh the program is compiled for
    with jax.ensure_compile_time_eval(), jax.sharding.use_abstract_mesh(no_mesh):
        ours, many = np.asarray(jax.jit(kernel)(*args)), np.asarray(jax.jit(with_xla)(*xla_args))
    same = np.array_equal(ours, many[: len(ours)])
    if not same:
        log.info("native CPU kernels: not used for %s, where XLA sums in another order", many.shape)
    return same


def _random(*shape: int) -> np.ndarray:
    return np.random.default_rng(0).random(shape, np.float32) - 0.5
