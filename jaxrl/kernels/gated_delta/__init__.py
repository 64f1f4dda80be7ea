"""Gated DeltaNet (https://arxiv.org/abs/2412.06464) over packed rows, and its convolution."""

import functools
import math
from collections.abc import Callable

import jax
import jax.numpy as jnp
from jaxtyping import Array, Bool, Float, Int

from jaxrl.kernels.choice import Defaults, Implementations, choose
from jaxrl.kernels.gated_delta.chunked import CHUNK, gated_delta_chunked
from jaxrl.kernels.gated_delta.convolution import convolve
from jaxrl.kernels.gated_delta.limits import unsupported_by_mosaic, unsupported_by_triton
from jaxrl.kernels.gated_delta.reference import gated_delta_reference
from jaxrl.kernels.gated_delta.runs import parent_chunks
from jaxrl.kernels.gated_delta.sharding import check_heads, shard_heads
from jaxrl.kernels.gated_delta.step import gated_delta_step_xla
from jaxrl.kernels.visibility import Visibility
from sharding import Rules

IMPLEMENTATIONS = {"chunked": gated_delta_chunked, "reference": gated_delta_reference}
STEPS: Implementations = {
    "mosaic": "jaxrl.kernels.gated_delta.step_tpu:gated_delta_step_tpu",
    "triton": "jaxrl.kernels.gated_delta.step_gpu:gated_delta_step_gpu",
    "xla": gated_delta_step_xla,
}
DEFAULTS: Defaults = {
    "cpu": ("xla", "plain XLA"),
    "gpu": ("triton", "a Pallas kernel that reads the state once"),
    "tpu": ("mosaic", "a Pallas kernel that reads the state once"),
}


def gated_delta(
    q: Float[Array, "B T K D"],
    k: Float[Array, "B T K D"],
    v: Float[Array, "B T N V"],
    g: Float[Array, "B T N"],
    beta: Float[Array, "B T N"],
    *,
    segments: Int[Array, "B T"],
    rules: Rules,
    state: Float[Array, "B N D V"] | None = None,
    visibility: Visibility | None = None,
    align: int = CHUNK,
    implementation: str = "chunked",
) -> tuple[Float[Array, "B T N V"], Float[Array, "B N D V"]]:
    """Outputs, and the float32 state after the last token of each row.

    S_t = exp(g_t) S_{t-1} + beta_t k_t (v_t - exp(g_t) k_tᵀ S_{t-1}); o_t = D^-0.5 S_tᵀ q_t, where
    q and k are l2-normalized, g <= 0, and head K serves N / K heads of v. Every segment starts with
    zeros, but the first of a row with `state` if there is one. Padding (segment 0) gives zeros and
    does not change the state.

    With `visibility` segments share prefixes (kernels/visibility.py): they start with the state
    after the token before them. They must begin at, and share, multiples of `align` tokens.

    `rules` are those of whole rows (rows.py). Raises ValueError if heads do not divide over the
    devices that share them.
    """
    check_heads(v.shape[2], rules)
    heads, gates = rules.spec("batch", None, "heads", None), rules.spec("batch", None, "heads")
    rows, states = rules.spec("batch", None), rules.spec("batch", "heads", None, None)
    if state is None:
        shape = (len(v), v.shape[2], k.shape[3], v.shape[3])
        state = jnp.zeros(shape, jnp.float32, out_sharding=states)
    chunk = _chunk_len(visibility, v.shape[1], align)

    def local(q, k, v, g, beta, segments, state, visibility):
        parents = _parents(visibility, chunk)
        return IMPLEMENTATIONS[implementation](q, k, v, g, beta, segments, state, parents)

    specs = (heads, heads, heads, gates, gates, rows, states, rows)
    args = (q, k, v, g, beta, segments, state, visibility)
    with jax.named_scope("gated_delta"):
        return shard_heads(local, args, specs, (heads, states))


def gated_delta_step(
    q: Float[Array, "B T K D"],
    k: Float[Array, "B T K D"],
    v: Float[Array, "B T N V"],
    g: Float[Array, "B T N"],
    beta: Float[Array, "B T N"],
    states: Float[Array, "S N D V"],
    *,
    slots: Int[Array, "B"],
    live: Bool[Array, "B T"],
    rules: Rules,
    implementation: str | None = None,
) -> tuple[Float[Array, "B T N V"], Float[Array, "S N D V"]]:
    """`gated_delta` of the next tokens of B sequences, and the pool with their new states.

    Sequence b continues from the float32 state `states[slots[b]]`, and its new state replaces it.
    Slots differ, except that rows of padding, without live tokens, may share one (slot 0 of zeros).
    A pool that is donated, or carried by a loop, is updated in place. If it is also read after the
    call, XLA copies all of it.

    T is small: 1 in decode, a few with draft tokens. Tokens that are not `live`, which follow the
    others, give zeros and do not change the state.

    `implementation` is config.model.gated_delta; None or "auto" selects by backend. Raises
    ValueError if rows are sharded, because each device must write the states of all of them.
    """
    step = _choose_step(implementation, v.shape[1], k.shape[3], v.shape[3])
    return _apply_step(step, (q, k, v, g, beta, states, slots, live), rules)


def gated_delta_outputs(
    q: Float[Array, "B T K D"],
    k: Float[Array, "B T K D"],
    v: Float[Array, "B T N V"],
    g: Float[Array, "B T N"],
    beta: Float[Array, "B T N"],
    states: Float[Array, "S N D V"],
    *,
    slots: Int[Array, "B"],
    live: Bool[Array, "B T"],
    rules: Rules,
    implementation: str | None = None,
) -> Float[Array, "B T N V"]:
    """The outputs of `gated_delta_step`, which leaves the pool as it is.

    For draft tokens: `gated_delta_step` of those that are accepted then gives their state.
    """
    step = _choose_step(implementation, v.shape[1], k.shape[3], v.shape[3])
    args = (q, k, v, g, beta, states, slots, live)
    return _apply_step(functools.partial(step, writes=False), args, rules)[0]


def _apply_step(step: Callable, args: tuple, rules: Rules) -> tuple:
    """`step` on each device's heads, without the tokens that are not live."""
    v = args[2]
    if rules.n_shards("batch") > 1:
        raise ValueError(
            f"the rows of a step are sharded over {' x '.join(rules.mesh_axes('batch'))}, and each "
            "device has the states of all rows; pass rules.in_replica()"
        )
    check_heads(v.shape[2], rules)
    heads, gates = rules.spec("batch", None, "heads", None), rules.spec("batch", None, "heads")
    rows, pool = rules.spec("batch"), rules.spec(None, "heads", None, None)

    def local(q, k, v, g, beta, states, slots, live):
        def mask(a):
            """Zeros in place of tokens that are not live: they add nothing and keep the state."""
            return jnp.where(jnp.expand_dims(live, range(2, a.ndim)), a, 0)

        out, states = step(*map(mask, (q, k, v, g, beta)), states, slots)
        return out.astype(v.dtype), states

    specs = (heads, heads, heads, gates, gates, pool, rows, rules.spec("batch", None))
    with jax.named_scope("gated_delta_step"):
        return shard_heads(local, args, specs, (heads, pool))


def _choose_step(implementation: str | None, T: int, D: int, V: int) -> Callable:
    return choose(
        "config.model.gated_delta",
        implementation,
        implementations=STEPS,
        defaults=step_defaults(T, D, V),
    )


def step_defaults(T: int, D: int, V: int) -> Defaults:
    """The implementation for each backend, for a step of T tokens and states [D, V]."""
    defaults = DEFAULTS
    if why := unsupported_by_triton(T, D, V):
        reason = f"plain XLA, because 'triton' does not support {why}"
        defaults = defaults | {"gpu": ("xla", reason)}
    if why := unsupported_by_mosaic(T, D, V):
        reason = f"plain XLA, because 'mosaic' does not support {why}"
        defaults = defaults | {"tpu": ("xla", reason)}
    return defaults


def causal_conv(
    x: Float[Array, "B T N H"],
    w: Float[Array, "N2 H W"],
    *,
    segments: Int[Array, "B T"],
    rules: Rules,
    tail: Float[Array, "B W1 N H"] | None = None,
    visibility: Visibility | None = None,
    align: int = CHUNK,
    activation: Callable = jax.nn.silu,
) -> tuple[Float[Array, "B T N H"], Float[Array, "B W1 N H"]]:
    """The activated causal depthwise convolution, and the last W - 1 tokens of each row.

    y_t = sum over s of w[..., W - 1 - s] x_{t - s}, over the tokens of t's segment, or of its path
    with `visibility`. `tail` [B, W - 1, N, H] has the tokens before the row's first segment, which
    then begins at place 0. Padding gives zeros and leaves the tail as it is. Heads of `w` are
    repeated to those of `x`. The other arguments are those of `gated_delta`.
    """
    heads, rows = rules.spec("batch", None, "heads", None), rules.spec("batch", None)
    weights = rules.spec("heads", None, None)
    if (copies := x.shape[2] // w.shape[0]) > 1:
        w = jnp.repeat(jax.reshard(w, jax.P()), copies, axis=0)
    chunk = _chunk_len(visibility, x.shape[1], align)
    if visibility is not None and chunk < w.shape[-1] - 1:
        raise ValueError(
            f"shared prefixes of multiples of {align} tokens are shorter than the convolution of "
            f"{w.shape[-1]} tokens; set config.learner.segment_align to a multiple of {CHUNK}"
        )

    def local(x, w, segments, tail, visibility):
        return convolve(x, w, segments, tail, _parents(visibility, chunk), activation)

    specs, args = (heads, weights, rows, heads, rows), (x, w, segments, tail, visibility)
    with jax.named_scope("causal_conv"):
        return shard_heads(local, args, specs, (heads, heads))


def _parents(visibility: Visibility | None, chunk: int) -> jax.Array | None:
    return None if visibility is None else parent_chunks(visibility, chunk)


def _chunk_len(visibility: Visibility | None, row_len: int, align: int) -> int:
    """Tokens of a chunk that segments with shared prefixes begin at multiples of."""
    chunk = math.gcd(align, CHUNK)
    if visibility is not None and row_len % chunk:
        raise ValueError(
            f"a row of {row_len} tokens with shared prefixes is not a multiple of {chunk}; set "
            "config.learner.buckets to multiples of config.learner.segment_align"
        )
    return chunk
