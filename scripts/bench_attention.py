"""Training attention on the attached device: every kernel that supports a shape, timed and checked.

    python scripts/bench_attention.py
    python scripts/bench_attention.py --shapes 2x8192:28/4/128:packed 1x32768:12/2/128:full:4096

A shape is ROWSxTOKENS:HEADS/KV_HEADS/WIDTH:KIND, and may end with :WINDOW. KIND is "full" (one
segment per row), "packed" (segments of about 2,000 tokens) or "shared" (responses to prompts of 512
tokens, which the row has once each). Run it first on a new kind of device: it says which value of
`config.model.attention` is the fastest for each shape, and whether "auto" takes it. Without
--shapes it takes those of the models that the configs train, or on CPU a tiny one.

Times are of one layer. TFLOP/s count 2 products per visible pair of query and key forward and 5
backward, whatever a kernel computes; the share is of the chip's peak rate. The error is the largest
difference from the reference, in the output and the gradients of q, k and v, relative to the
largest number, for one row of the same kind with at most 1,024 tokens. An error above 2 %, or no
kernel for a shape, makes the exit status 1. Format of a line:

    NAME  forward MS ms RATE TFLOP/s SHARE %  with backward MS ms RATE TFLOP/s SHARE %  error E
"""

import argparse
import dataclasses
import functools
import itertools
import re
import statistics
import sys
import time
from collections.abc import Callable, Iterator
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from jaxrl.kernels.attention import IMPLEMENTATIONS, attention, attention_defaults
from jaxrl.kernels.attention_spec import AttentionSpec
from jaxrl.kernels.choice import ONLY_ON
from jaxrl.kernels.visibility import Visibility
from jaxrl.planner.chips import chip_of
from jaxrl.runtime.start import set_gpu_memory
from sharding import TRAIN, make_mesh

HEADS = ("12/2/128", "28/4/128", "32/8/128")  # of Qwen2.5 1.5B and 7B, and of Llama 3.1 8B
ROWS = ("4x4096", "1x8192", "1x16384", "1x32768")
KINDS = ("packed", "full", "shared")
SHAPES = tuple(f"{rows}:{heads}:{kind}" for heads in HEADS for rows in ROWS for kind in KINDS)
ON_CPU = ("1x256:4/2/64:packed",)
SEGMENT_LEN, PROMPT_LEN = 2048, 512  # tokens: the median of a segment, and of a shared prompt
CHECKED_LEN = 1024  # tokens of the row that is compared with the reference
TOLERANCE = 0.02  # a few roundings to bfloat16 of the largest number
FORWARD, BACKWARD = 2, 5  # products per pair of query and key


@dataclasses.dataclass(frozen=True)
class Shape:
    """Rows of one call of attention."""

    n_rows: int
    n_tokens: int  # per row
    heads: tuple[int, int, int]  # query heads, kv heads, width
    kind: str
    window: int = 0

    @classmethod
    def of(cls, text: str) -> "Shape":
        form = rf"(\d+)x(\d+):(\d+)/(\d+)/(\d+):({'|'.join(KINDS)})(?::(\d+))?"
        match = re.fullmatch(form, text)
        if match is None or int(match[3]) % int(match[4]):
            raise argparse.ArgumentTypeError(
                f"{text!r} is not ROWSxTOKENS:HEADS/KV_HEADS/WIDTH:KIND[:WINDOW], with HEADS a "
                f"multiple of KV_HEADS and KIND one of {', '.join(KINDS)}"
            )
        n_rows, n_tokens, *heads = (int(match[i]) for i in range(1, 6))
        N, K, H = heads
        return cls(n_rows, n_tokens, (N, K, H), match[6], int(match[7] or 0))

    def checked(self) -> "Shape":
        """The row that is compared with the reference."""
        return dataclasses.replace(self, n_rows=1, n_tokens=min(self.n_tokens, CHECKED_LEN))


@dataclasses.dataclass(frozen=True)
class Problem:
    """Arguments of attention, and the pairs of query and key that it needs."""

    arrays: tuple[jax.Array, ...]  # q, k, v and the gradient of the output
    segments: jax.Array
    visibility: Visibility | None
    n_pairs: int  # per head


def main(argv: list[str] | None = None) -> int:
    args = parse_args(argv)
    set_gpu_memory()  # before JAX starts
    device = jax.devices()[0]
    chip = chip_of(device.device_kind)
    peak = chip.rate("bf16") if chip else 0.0
    shapes = args.shapes or [
        Shape.of(text) for text in (ON_CPU if device.platform == "cpu" else SHAPES)
    ]
    print(f"{device.device_kind}, jax {jax.__version__}")
    with jax.set_mesh(make_mesh([device])):
        return max([bench(shape, args.calls, peak) for shape in shapes])


def bench(shape: Shape, n_calls: int, peak: float) -> int:
    """Prints the lines of a shape; returns 1 if a kernel is wrong or none supports it, else 0."""
    N, K, H = shape.heads
    window = f", window {shape.window}" if shape.window else ""
    print(f"\n{shape.n_rows} x {shape.n_tokens} tokens, {N}/{K} heads of {H}, {shape.kind}{window}")
    problem, checked = make_problem(shape), make_problem(shape.checked())
    with jax.default_matmul_precision("highest"):
        want = run("reference", shape, checked)(*checked.arrays)
    seconds, wrong = {}, False
    for name in kernels():
        try:
            off = largest_error(run(name, shape, checked)(*checked.arrays), want)
            times = [
                measure(call, problem.arrays, n_calls)
                for call in (run(name, shape, problem, forward=True), run(name, shape, problem))
            ]
        except (NotImplementedError, jax.errors.JaxRuntimeError) as error:
            print(f"{name:10} does not run: {str(error).splitlines()[0]}")
            continue
        right = off <= TOLERANCE  # not so if it is nan
        forward, both = map(
            functools.partial(rate, shape, problem.n_pairs, peak), times, (False, True)
        )
        print(
            f"{name:10} forward {forward}  with backward {both}  error {off:.1e}"
            + "  WRONG" * (not right)
        )
        wrong |= not right
        if right:
            seconds[name] = times[1]
    if not seconds:
        print("no kernel is right for this shape")
        return 1
    print(conclusion(seconds, automatic(shape, problem)))
    return int(wrong)


def conclusion(seconds: dict[str, float], auto: str) -> str:
    """The fastest kernel, and whether "auto" takes it."""
    fastest = min(seconds, key=seconds.__getitem__)
    if fastest == auto:
        return f"fastest: {fastest}, which 'auto' takes"
    times = f", {seconds[auto] / seconds[fastest]:.2f} times as long" if auto in seconds else ""
    return f"fastest: config.model.attention={fastest!r}; 'auto' takes {auto!r}{times}"


def kernels() -> Iterator[str]:
    """The kernels of this platform, without the reference."""
    here = jax.default_backend()
    return (
        name for name in IMPLEMENTATIONS if name != "reference" and ONLY_ON.get(name, here) == here
    )


def automatic(shape: Shape, problem: Problem) -> str:
    """The kernel of "auto"."""
    defaults = attention_defaults(
        problem.arrays[0],
        spec=AttentionSpec(1.0),
        window=shape.window,
        shared=problem.visibility is not None,
    )
    return defaults[jax.default_backend()][0]


def run(name: str, shape: Shape, problem: Problem, *, forward: bool = False) -> Callable[..., Any]:
    """A compiled program: the output, and unless `forward` the gradients of q, k and v."""

    def attend(q, k, v):
        return attention(
            q,
            k,
            v,
            spec=AttentionSpec(shape.heads[2] ** -0.5),
            segments=problem.segments,
            window=shape.window,
            visibility=problem.visibility,
            implementation=name,
        )

    def with_gradients(q, k, v, d_out):
        out, pull = jax.vjp(attend, q, k, v)
        return out, *pull(d_out)

    return jax.jit((lambda q, k, v, _: attend(q, k, v)) if forward else with_gradients)


def measure(call: Callable[..., Any], arrays: tuple[jax.Array, ...], n_calls: int) -> float:
    """Seconds of a call: the median of three rounds of `n_calls` calls each, after one round."""

    def round_s() -> float:
        start = time.perf_counter()
        for _ in range(n_calls):
            results = call(*arrays)
        jax.block_until_ready(results)
        return (time.perf_counter() - start) / n_calls

    jax.block_until_ready(call(*arrays))  # compiles
    return statistics.median(round_s() for _ in range(3))


def rate(shape: Shape, n_pairs: int, peak: float, seconds: float, backward: bool) -> str:
    """The time, and the rate of the products that the shape needs."""
    N, _, H = shape.heads
    products = FORWARD + (BACKWARD if backward else 0)
    per_s = 2 * products * n_pairs * N * H / seconds
    share = f" {100 * per_s / peak:5.1f} %" if peak else ""  # of an unknown chip there is none
    return f"{1e3 * seconds:9.3f} ms {per_s / 1e12:7.2f} TFLOP/s{share}"


def largest_error(got: tuple[jax.Array, ...], want: tuple[jax.Array, ...]) -> float:
    """Largest difference, relative to the largest number of each array."""
    pairs = [[np.asarray(x, np.float32) for x in both] for both in zip(got, want, strict=True)]
    return max(float(np.abs(a - b).max() / np.abs(b).max()) for a, b in pairs)


def make_problem(shape: Shape) -> Problem:
    """Random numbers in bfloat16, and the rows of a shape; both are the same in every run."""
    N, K, H = shape.heads
    rows = [make_row(shape, i) for i in range(shape.n_rows)]
    segments, until, positions = (np.stack(x).astype(np.int32) for x in zip(*rows, strict=True))
    keys = jax.random.split(jax.random.key(0), 4)
    heads = ("heads", "kv_heads", "kv_heads", "heads")
    arrays = tuple(
        jax.reshard(
            jax.random.normal(key, (shape.n_rows, shape.n_tokens, n, H), jnp.bfloat16),
            TRAIN.spec("batch", "time", axis, None),
        )
        for key, n, axis in zip(keys, (N, K, K, N), heads, strict=True)
    )
    shared = Visibility(jnp.asarray(until), jnp.asarray(positions))
    return Problem(
        arrays,
        jnp.asarray(segments),
        shared if shape.kind == "shared" else None,
        count_pairs(shape, positions),
    )


def count_pairs(shape: Shape, positions: np.ndarray) -> int:
    """Pairs of a query and a key that it sees: those before it in its sequence and window."""
    return int(np.minimum(positions + 1, shape.window or shape.n_tokens).sum(dtype=np.int64))


def make_row(shape: Shape, seed: int) -> tuple[np.ndarray, ...]:
    """(segments, last place that sees each token, positions) of a row without padding."""
    T = shape.n_tokens
    segments, until, positions = np.ones(T, int), np.full(T, T - 1), np.arange(T)
    if shape.kind == "full":
        return segments, until, positions
    prompt = min(PROMPT_LEN, T // 4) if shape.kind == "shared" else 0
    start, rng = prompt, np.random.default_rng(seed)
    for number in itertools.count(2):
        if start == T:
            return segments, until, positions
        # Whole blocks of 64 tokens, as the packing of a run aligns segments.
        median = min(SEGMENT_LEN, T / 4)
        length = 64 * max(1, round(median * rng.lognormal(sigma=0.6) / 64))
        end = min(start + length, T)
        segments[start:end], until[start:end] = number, end - 1
        positions[start:end] = prompt + np.arange(end - start)
        start = end
    raise AssertionError("a row ends")


def parse_args(argv: list[str] | None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    parser.add_argument("--shapes", nargs="+", type=Shape.of, default=[], help="see the docstring")
    parser.add_argument("--calls", type=int, default=10, help="calls of a timed round")
    return parser.parse_args(argv)


if __name__ == "__main__":
    sys.exit(main())
