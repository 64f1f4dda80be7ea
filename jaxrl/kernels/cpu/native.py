"""The C kernels of this folder: compiled by the machine's C compiler at their first use, kept in the user's cache.

They add up in the order of XLA's products, so that a row gets the bits that it has among many others, as in
training. Where there is no compiler, or the bits of a shape differ, XLA does the product.
"""

import ctypes
import functools
import hashlib
import logging
import os
import pathlib
import platform
import subprocess
import tempfile
from collections.abc import Callable, Sequence

import jax
import jax.numpy as jnp
import numpy as np
from jaxtyping import Array, Float, Int, Int8

from jaxrl.kernels.attention.blocks import BLOCK, Softmax, add_block, pad_axis, start
from jaxrl.kernels.attention_spec import AttentionSpec
from jaxrl.kernels.quantized import Quantized
from sharding import target_platform

log = logging.getLogger(__name__)

SOURCE = pathlib.Path(__file__).with_name("native.c")
FLAGS = ("-O3", "-march=native", "-fno-trapping-math", "-fPIC", "-shared")
HANDLERS = ("skinny_matmul", "paged_attention")
MAX_ROWS = 64
MAX_WEIGHTS = 4
MAX_HEAD_DIM = 256


@functools.cache
def ready() -> bool:
    """Whether the kernels are there; says so once."""
    try:
        library = ctypes.CDLL(str(_compiled()))
    except (OSError, subprocess.CalledProcessError) as problem:
        detail = getattr(problem, "stderr", None) or problem
        log.info("native kernels: none, XLA's products instead; %s", detail)
        return False
    for name in HANDLERS:
        handler = jax.ffi.pycapsule(getattr(library, name))
        jax.ffi.register_ffi_target(f"jaxrl_{name}", handler, platform="cpu")
    log.info("native kernels: used for decoding")
    return True


def takes_rows(x: Float[Array, "B T I"], w: Float[Array, "O I"] | Int8[Array, "O I"]) -> bool:
    """Whether `skinny_matmul` takes the product of one token a row with this weight."""
    return (
        target_platform() == "cpu"
        and x.dtype == w.dtype == jnp.float32
        and x.shape[0] <= MAX_ROWS
        and x.shape[1] == 1
        and jax.sharding.get_abstract_mesh().size == 1
        and ready()
        and _product_agrees(*w.shape)
    )


def skinny_matmul(
    x: Float[Array, "B I"], *weights: Float[Array, "_ I"]
) -> Sequence[Float[Array, "B _"]]:
    """x wᵀ of float32 with each of up to MAX_WEIGHTS weights [out, in], for at most MAX_ROWS rows."""
    return _call("skinny_matmul", [(x.shape[0], w.shape[0]) for w in weights], x, *weights)


def reads_pages(q: Float[Array, "B K M H"], pages: jax.Array | Quantized) -> bool:
    """Whether `paged_attention` takes these queries, of one or a few tokens a sequence, and pages [P, K, page, H]."""
    H = pages.shape[3]
    return (
        target_platform() == "cpu"
        and q.dtype == pages.dtype == jnp.float32
        and q.shape[2] <= MAX_ROWS
        and H % 16 == 0
        and H <= MAX_HEAD_DIM
        and ready()
        and _pages_agree(q.shape[2], H)
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
    """The mean of the values at positions first..last of each sequence's pages by softmax(q kᵀ * scale), to be
    finished; of a row whose last is -1 as at its start."""
    args = q, k_pages, v_pages, page_table, first, last, jnp.float32(scale)
    shapes = q.shape[:3], q.shape[:3], q.shape
    top, total, mixed = _call("paged_attention", shapes, *args)
    return Softmax(top=top, total=total, mixed=mixed)


def _call(name: str, shapes: Sequence[tuple[int, ...]], *args: jax.Array) -> Sequence[jax.Array]:
    results = [jax.ShapeDtypeStruct(shape, jnp.float32) for shape in shapes]
    return jax.ffi.ffi_call(f"jaxrl_{name}", results)(*args)


def _compiled() -> pathlib.Path:
    """The shared library for these sources, compiler and processor."""
    compiler = os.environ.get("CC", "cc")
    sources = [path.read_text() for path in sorted(SOURCE.parent.glob("*.[ch]"))]
    processor = _processor()
    flags = (*FLAGS, *(["-DWIDE"] if _is_wide(processor) else ["-mtune=generic"]))
    parts = (*sources, compiler, *flags, jax.__version__, *processor.values())
    name = f"native-{hashlib.sha256(''.join(parts).encode()).hexdigest()[:16]}.so"
    cache = os.environ.get("XDG_CACHE_HOME") or pathlib.Path.home() / ".cache"
    folder = pathlib.Path(cache) / "jaxrl"
    folder.mkdir(parents=True, exist_ok=True)
    if not (folder / name).exists():
        with tempfile.TemporaryDirectory(dir=folder) as scratch:
            made = pathlib.Path(scratch) / name
            include = ("-I", jax.ffi.include_dir())
            command = [compiler, *flags, *include, str(SOURCE), "-o", str(made)]
            subprocess.run(command, check=True, capture_output=True, text=True)
            made.rename(folder / name)  # at once: other processes may do the same
    return folder / name


def _processor() -> dict[str, str]:
    """What -march=native depends on."""
    names = ("vendor_id", "cpu family", "flags", "Features")
    try:
        lines = pathlib.Path("/proc/cpuinfo").read_text().split("\n\n")[0].splitlines()
    except OSError:
        return {"machine": platform.machine()}
    named = (line.partition(":") for line in lines)
    return {name.strip(): value.strip() for name, _, value in named if name.strip() in names}


def _is_wide(processor: dict[str, str]) -> bool:
    """Whether vectors of AVX-512 are computed whole. AMD's processors before family 26 (Zen 5) compute them in halves."""
    if "avx512f" not in processor.get("flags", "").split():
        return False
    return "AMD" not in processor["vendor_id"] or int(processor["cpu family"]) >= 26


@functools.cache
def _product_agrees(n_out: int, n_in: int) -> bool:
    """Whether XLA adds up products of many rows with an [out, in] weight as `skinny_matmul` does. It depends on the
    number of outputs, of which beyond some the rest by 1024 matters at most."""
    n_out = min(n_out, 1024 + n_out % 1024)
    x, w = _numbers(64, n_in), _numbers(n_out, n_in)

    def by_xla(x, w):
        return jnp.einsum("BI,OI->BO", x, w)

    return _agree(lambda x, w: skinny_matmul(x, w)[0], by_xla, (x[:3], w), (x, w))


@functools.cache
def _pages_agree(M: int, H: int) -> bool:
    """Likewise attention over blocks of keys, as training forms it (attention/blocks.py)."""
    n_keys = 3 * BLOCK
    q, k, v = (_numbers(1, 1, n, H) for n in (M, n_keys, n_keys))
    last = np.arange(n_keys - M, n_keys, dtype=np.int32)[None]
    first, table = np.zeros_like(last), np.zeros((1, 1), np.int32)
    scale = 8.0  # weights of all sizes

    def by_xla(q, k, v):
        v = pad_axis(v, 3, BLOCK)

        def add(j, state):
            k_block, v_block = (
                jax.lax.dynamic_slice_in_dim(x, j * BLOCK, BLOCK, 2) for x in (k, v)
            )
            seen = j * BLOCK + np.arange(BLOCK) <= last[:, None, :, None]
            return add_block(state, q, k_block, v_block, seen, AttentionSpec(scale))

        state = start(q.shape[:3], H + -H % BLOCK)
        state = jax.lax.fori_loop(0, n_keys // BLOCK, add, state)
        return _joined(state.top, state.total, state.mixed[..., :H])

    def ours(q, k, v, table, first, last):
        state = paged_attention(q, k, v, table, first, last, scale)
        return _joined(state.top, state.total, state.mixed)

    return _agree(ours, by_xla, (q, k, v, table, first, last), (q, k, v))


def _joined(*parts: jax.Array) -> Float[Array, "n"]:
    return jnp.concatenate([part.reshape(-1) for part in parts])


def _agree(kernel: Callable, by_xla: Callable, args: tuple, xla_args: tuple) -> bool:
    """Whether the first rows of both results are the same, bit for bit."""
    here = jax.sharding.AbstractMesh((), ())  # whatever mesh the program is compiled for
    with jax.ensure_compile_time_eval(), jax.sharding.use_abstract_mesh(here):
        ours, many = np.asarray(jax.jit(kernel)(*args)), np.asarray(jax.jit(by_xla)(*xla_args))
    same = np.array_equal(ours, many[: len(ours)])
    if not same:
        log.info("native kernels: not for %s, where XLA adds up in another order", many.shape)
    return same


def _numbers(*shape: int) -> np.ndarray:
    return np.random.default_rng(0).random(shape, np.float32) - 0.5
