"""Logprobs of given tokens, and of the most likely alternatives at each position."""

import dataclasses
import functools

import jax
import jax.numpy as jnp
import numpy as np
from jaxtyping import Array, Float, Int

from jaxrl.engine.device.adjustments import N_TOP
from jaxrl.models.adapter_stack import choose_adapters
from jaxrl.models.decoder import Decoder
from jaxrl.models.packed import forward_packed
from sharding import Rules

CHUNK = 128  # tokens whose logits exist at one time


@dataclasses.dataclass(frozen=True)
class Scores:
    """Logprobs of all tokens but the first, which has no context."""

    logp: np.ndarray  # float32 [n_tokens - 1]
    top: np.ndarray  # int32 [n_tokens - 1, n_top], most likely first
    top_logp: np.ndarray  # float32 [n_tokens - 1, n_top]

    def pairs(self) -> list[list[tuple[int, float]]]:
        """(token id, logprob) of the most likely tokens at each position."""
        rows = zip(self.top.tolist(), self.top_logp.tolist(), strict=True)
        return [list(zip(*row, strict=True)) for row in rows]


def score(
    params: Decoder, tokens: np.ndarray, *, temperature: float, rules: Rules, adapter: int = 0
) -> Scores:
    """Scores tokens by softmax(logits / temperature), with temperature 1 for 0, as the engine does.

    `adapter` is that of the request. Compiles one program per length bucket (128, 256, 512, ...
    tokens) on first use.
    """
    n = len(tokens)
    row = np.zeros((1, max(CHUNK, 1 << (n - 1).bit_length())), np.int32)
    row[0, :n] = tokens
    scale = np.float32(temperature or 1.0)
    chosen = np.int32(adapter)
    scored = jax.device_get(score_row(params, row, np.int32(n), scale, chosen, rules=rules))
    return Scores(*(column[: n - 1] for column in scored))


@functools.partial(jax.jit, static_argnames="rules")
def score_row(
    params: Decoder,
    tokens: Int[Array, "1 T"],
    n_tokens: Int[Array, ""],
    temperature: Float[Array, ""],
    adapter: Int[Array, ""],
    *,
    rules: Rules,
) -> tuple[Float[Array, "T"], Int[Array, "T n_top"], Float[Array, "T n_top"]]:
    """The fields of Scores; index t is about the token after tokens[:, t]."""
    positions = jnp.arange(tokens.shape[1])[None]
    segments = (positions < n_tokens).astype(jnp.int32)
    params = choose_adapters(params, jnp.broadcast_to(adapter, tokens.shape))
    hidden = forward_packed(params, tokens, segments, positions, rules=rules)
    targets = jnp.roll(tokens[0], -1)

    def chunk(part):
        hidden, targets = part
        head = choose_adapters(params, jnp.broadcast_to(adapter, (1, len(targets))))
        logits = jax.reshard(head.logits(hidden[None], rules)[0], jax.P())
        logp = jax.nn.log_softmax(logits / temperature)
        top_logp, top = jax.lax.top_k(logp, min(N_TOP, logp.shape[1]))
        return jnp.take_along_axis(logp, targets[:, None], axis=1)[:, 0], top, top_logp

    parts = hidden[0].reshape(-1, CHUNK, hidden.shape[-1]), targets.reshape(-1, CHUNK)
    columns = jax.lax.map(chunk, parts)
    return jax.tree.map(lambda column: column.reshape(-1, *column.shape[2:]), columns)
