"""The operations that have kernels, at small shapes, each with its reference."""

import dataclasses
import functools
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from jaxrl.kernels import attention as packed
from jaxrl.kernels import gated_delta as delta
from jaxrl.kernels import grouped_matmul as grouped
from jaxrl.kernels import paged_attention as paged
from jaxrl.kernels import ring_attention as ring
from jaxrl.kernels.attention.limits import unsupported_gpu
from jaxrl.kernels.attention_spec import AttentionSpec
from jaxrl.kernels.choice import ONLY_ON, Defaults
from jaxrl.kernels.cpu import native, ops
from jaxrl.kernels.logprob import token_scores
from jaxrl.kernels.logprob.reference import logprob_reference
from jaxrl.kernels.matmul import matmuls
from sharding import DECODE, RING, TRAIN, make_mesh

T, HEADS, KV_HEADS, WIDTH = 256, 4, 2, 128  # of attention: kernels of every platform take them
PAGE_LEN = 64
REFERENCE = "reference"
VALUE_TOLERANCE = {"cpu": 1e-4, "gpu": 2**-6, "tpu": 2**-6}  # of the largest number of the result


@dataclasses.dataclass(frozen=True)
class Operation:
    """One operation: its implementations on this platform, and inputs to compare them with."""

    name: str
    chosen: str
    reason: str
    implementations: Sequence[str]
    inputs: tuple[jax.Array, ...]
    function: Callable[[str], Callable]  # name -> function of the inputs
    has_gradient: bool = True
    n_devices: int = 1  # that share the rows

    def compute(self, name: str) -> Any:
        """Outputs of an implementation, and gradients; the reference computes in float32."""
        function, inputs = self.function(name), self.inputs
        if name == REFERENCE:
            inputs = jax.tree.map(_widened, inputs)
        program = functools.partial(_with_gradients, function) if self.has_gradient else function
        precision = "highest" if name == REFERENCE else None
        with (
            jax.set_mesh(make_mesh(sequence=self.n_devices)),
            jax.default_matmul_precision(precision),
        ):
            return jax.device_get(jax.jit(program)(*inputs))

    def error(self, name: str, expected: Any) -> float:
        """Largest difference from `expected`, as a part of its largest number; NaN if one is."""
        found = self.compute(name)
        pairs = zip(jax.tree.leaves(found), jax.tree.leaves(expected), strict=True)
        errors = [
            np.abs(np.asarray(a, np.float32) - b).max() / max(np.abs(b).max(), 1e-9)
            for a, b in pairs
        ]
        return float(np.max(errors))


def _widened(a: jax.Array) -> jax.Array:
    return a.astype(jnp.float32) if a.dtype == jnp.bfloat16 else a


def _with_gradients(function: Callable, *inputs: jax.Array) -> Any:
    """Outputs, and the gradients of a weighted sum of them."""

    def loss(*inputs: jax.Array) -> tuple[jax.Array, Any]:
        out = function(*inputs)
        sums = jax.tree.leaves(jax.tree.map(_weighted_sum, out))
        return jnp.sum(jnp.stack(sums)), out

    grads, out = jax.grad(loss, argnums=tuple(range(len(inputs))), has_aux=True)(*inputs)
    return out, grads


def _weighted_sum(out: jax.Array) -> jax.Array:
    weights = jnp.cos(jnp.arange(out.size, dtype=jnp.float32)).reshape(out.shape)
    weights = jax.reshard(weights, jax.typeof(out).sharding)
    return jnp.sum(out.astype(jnp.float32) * weights)


def operations(platform: str) -> Iterator[Operation]:
    """All operations, with inputs in the dtype of runs on this platform."""
    dtype = jnp.dtype(jnp.float32 if platform == "cpu" else jnp.bfloat16)
    with jax.set_mesh(make_mesh()):
        made = [make(platform, dtype) for make in ON_ONE_DEVICE]
    yield from made
    if jax.device_count() > 1:
        yield ring_operation(platform, dtype)


def _normal(dtype: jnp.dtype, *shapes: tuple[int, ...]) -> list[jax.Array]:
    keys = jax.random.split(jax.random.key(0), len(shapes))
    return [jax.random.normal(key, shape, dtype) for key, shape in zip(keys, shapes, strict=True)]


def _usable(names: Sequence[str], platform: str) -> list[str]:
    """The implementations that run on the attached devices."""
    found = [n for n in names if n != REFERENCE and ONLY_ON.get(n, platform) == platform]
    return [n for n in found if n != "cudnn" or not unsupported_gpu()]


def _queries(dtype: jnp.dtype) -> list[jax.Array]:
    """Queries, keys, values of two rows."""
    return _normal(dtype, *((2, T, heads, WIDTH) for heads in (HEADS, KV_HEADS, KV_HEADS)))


def _segments() -> np.ndarray:
    """Two sequences and padding, and one sequence."""
    segments = np.ones((2, T), np.int32)
    segments[0, 150:], segments[0, 240:] = 2, 0
    return segments


def attention_operation(platform: str, dtype: jnp.dtype) -> Operation:
    q, k, v = _queries(dtype)
    spec = AttentionSpec(WIDTH**-0.5, rules=TRAIN)
    chosen = packed.attention_defaults(q, spec=spec, window=0, shared=False)[platform]

    def function(name: str) -> Callable:
        how = {"spec": spec, "segments": jnp.asarray(_segments()), "window": 0}
        return functools.partial(packed.attention, implementation=name, **how)

    names = _usable([*packed.IMPLEMENTATIONS], platform)
    return Operation("training attention", *chosen, names, (q, k, v), function)


def ring_operation(platform: str, dtype: jnp.dtype) -> Operation:
    """Attention of rows that are sharded over two devices."""
    spec = AttentionSpec(WIDTH**-0.5, rules=RING)
    with jax.set_mesh(make_mesh(sequence=2)):
        shardings = [RING.spec("batch", "time", h, None) for h in ("heads", "kv_heads", "kv_heads")]
        arrays = zip(_queries(dtype), shardings, strict=True)
        inputs = tuple(jax.device_put(np.asarray(a), sharding) for a, sharding in arrays)
    chosen = ring.ring_defaults(inputs[0], T // 2)[platform]

    def function(name: str) -> Callable:
        def attend(q: jax.Array, k: jax.Array, v: jax.Array) -> jax.Array:
            segments = jax.reshard(jnp.asarray(_segments()), RING.spec("batch", "time"))
            return ring.ring_attention(
                q, k, v, spec=spec, segments=segments, window=0, implementation=name
            )

        return attend

    names = _usable([*ring.IMPLEMENTATIONS], platform)
    return Operation("ring attention", *chosen, names, inputs, function, n_devices=2)


def paged_operation(platform: str, dtype: jnp.dtype) -> Operation:
    """Decode, and prefill of a chunk, over pages in no order."""
    q, k, v = _queries(dtype)
    n_columns = T // PAGE_LEN
    table = jnp.asarray(np.random.default_rng(0).permutation(2 * n_columns), jnp.int32)
    table = table.reshape(2, n_columns)
    pool = jnp.zeros((2 * n_columns, KV_HEADS, PAGE_LEN, WIDTH), dtype)
    places = jnp.tile(jnp.arange(T), (2, 1))
    pages = jax.jit(functools.partial(paged.write_pages, rules=DECODE))(
        pool, pool, k, v, table, places
    )
    chosen: Defaults = paged.paged_defaults(pages[0], table)
    spec = AttentionSpec(WIDTH**-0.5, rules=DECODE)

    def function(name: str) -> Callable:
        attend = functools.partial(
            paged.paged_attention, spec=spec, page_table=table, window=0, implementation=name
        )

        def both(q: jax.Array, *pages: jax.Array) -> tuple[jax.Array, jax.Array]:
            last, chunk = jnp.array([[T - 1], [70]]), jnp.tile(jnp.arange(100, 132), (2, 1))
            return (
                attend(q[:, :1], *pages, positions=last),
                attend(q[:, :32], *pages, positions=chunk),
            )

        return both

    names = _usable([*paged.IMPLEMENTATIONS], platform)
    inputs = (q, *pages)
    return Operation("paged attention", *chosen[platform], names, inputs, function, False)


def _delta_inputs(dtype: jnp.dtype, n_tokens: int) -> tuple[jax.Array, ...]:
    """Queries, keys and values of one key head and two value heads, decays, rates, states."""
    q, k = _normal(dtype, *[(2, n_tokens, 1, WIDTH)] * 2)
    v, g, beta = _normal(dtype, (2, n_tokens, 2, WIDTH), *[(2, n_tokens, 2)] * 2)
    (states,) = _normal(jnp.dtype(jnp.float32), (3, 2, WIDTH, WIDTH))
    q, k = (a * WIDTH**-0.5 for a in (q, k))
    return q, k, v, -jnp.abs(g), jax.nn.sigmoid(beta), states


def delta_operation(platform: str, dtype: jnp.dtype) -> Operation:
    """Gated DeltaNet of training and prefill."""
    *tokens, _ = _delta_inputs(dtype, 128)
    segments = jnp.asarray(_segments()[:, :128])

    def function(name: str) -> Callable:
        rule = functools.partial(delta.gated_delta, segments=segments, rules=TRAIN)
        return lambda *tokens: rule(*tokens, implementation=name)[0]

    reason = "plain XLA, the only one"
    return Operation("gated DeltaNet", "chunked", reason, ["chunked"], tuple(tokens), function)


def delta_step_operation(platform: str, dtype: jnp.dtype) -> Operation:
    """A decode step of gated DeltaNet."""
    inputs, slots = _delta_inputs(dtype, 1), jnp.array([2, 1])
    chosen = delta.step_defaults(1, WIDTH, WIDTH)[platform]

    def function(name: str) -> Callable:
        def step(*inputs: jax.Array) -> tuple[jax.Array, jax.Array]:
            q, k, v, g, beta, states = inputs
            live = jnp.ones((2, 1), bool)
            if name == REFERENCE:
                return delta.gated_delta(
                    q,
                    k,
                    v,
                    g,
                    beta,
                    segments=live.astype(jnp.int32),
                    rules=DECODE,
                    state=states[slots],
                    implementation=name,
                )
            out, states = delta.gated_delta_step(
                q,
                k,
                v,
                g,
                beta,
                states,
                slots=slots,
                live=live,
                rules=DECODE,
                implementation=name,
            )
            return out, states[slots]

        return step

    names = _usable([*delta.STEPS], platform)
    return Operation("gated DeltaNet decode", *chosen, names, inputs, function, False)


def experts_operation(platform: str, dtype: jnp.dtype) -> Operation:
    x, w = _normal(dtype, (200, 128), (4, 256, 128))
    sizes = jnp.array([70, 0, 100, 25])

    def function(name: str) -> Callable:
        multiply = functools.partial(grouped.grouped_matmul, implementation=name)
        whole = jax.P()  # as the layer calls it: with the arrays of one device
        local = jax.shard_map(multiply, in_specs=whole, out_specs=whole, check_vma=False)
        return lambda x, w: local(x, w, sizes)

    names = _usable([*grouped.IMPLEMENTATIONS], platform)
    return Operation("products of experts", *grouped.DEFAULTS[platform], names, (x, w), function)


def logprob_operation(platform: str, dtype: jnp.dtype) -> Operation:
    hidden, unembed = _normal(dtype, (2, 64, 128), (512, 128))
    targets = jax.random.randint(jax.random.key(1), (2, 64), 0, 512)

    def function(name: str) -> Callable:
        if name == REFERENCE:
            score = functools.partial(logprob_reference, temperature=1.0, softcap=None)
            return lambda hidden, unembed: score(hidden, unembed, targets, hidden, unembed)[:2]
        score = functools.partial(token_scores, temperature=1.0, chunk=32, rules=TRAIN)
        return lambda hidden, unembed: score(hidden, unembed, targets)[:2]

    reason = "plain XLA in chunks of tokens, the only one"
    return Operation("logprobs", "chunked", reason, ["chunked"], (hidden, unembed), function)


def decode_product_operation(platform: str, dtype: jnp.dtype) -> Operation:
    """Products of one token per row."""
    x, w = _normal(dtype, (4, 1, 128), (256, 128))
    is_native = ops.supports_skinny_matmul(x, w)
    if is_native:
        chosen = ("native", "C kernels at memory bandwidth, with the bits of XLA")
    elif platform == "cpu" and not native.is_available():
        chosen = ("xla", "no C compiler built the faster kernels; install one, or set CC")
    else:
        chosen = ("xla", "XLA's own")

    def function(name: str) -> Callable:
        return lambda x, w: matmuls(x, [w], out_shardings=[jax.P()], implementation=name)

    names = ["native", "xla"] if is_native else ["xla"]
    return Operation("decode products", *chosen, names, (x, w), function, False)


ON_ONE_DEVICE = (
    attention_operation,
    paged_operation,
    delta_operation,
    delta_step_operation,
    experts_operation,
    logprob_operation,
    decode_product_operation,
)
