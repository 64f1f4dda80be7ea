"""Logprob, entropy and KL of the unembedding without ever holding [tokens, vocab].

Forward walks over chunks of tokens: a row's softmax is one plain sum over the vocabulary, as in the
engine. Backward knows the normaliser of every token, so it walks over blocks of the vocabulary: each
block of dW is written once, and only the small dh accumulates.

n tokens of this device, c of a chunk, v vocabulary of this device, D model.
"""

import dataclasses
import functools
import math

import jax
import jax.numpy as jnp
from jax import lax
from jaxtyping import Array, Float, Int

from jaxrl.kernels.bits import row_sum, settle
from jaxrl.kernels.logprob.reference import head_logits
from sharding import Rules


@dataclasses.dataclass(frozen=True)
class Head:
    """What is static about an unembedding: how logits come about, and how the work is cut."""

    temperature: float
    softcap: float | None
    chunk: int  # tokens whose logits exist at one time
    rules: Rules
    with_entropy: bool
    with_kl: bool

    def logits(self, x, w):
        return head_logits(x, w, temperature=self.temperature, softcap=self.softcap)

    def logits_slope(self, logits):
        """d logits / d (h Wᵀ), of the finished logits."""
        if self.softcap is None:
            return 1.0 / self.temperature
        capped = logits * (self.temperature / self.softcap)
        return (1.0 - capped * capped) / self.temperature

    @property
    def vocab_axes(self) -> tuple[str, ...]:
        return _names(self.rules.vocab)

    @property
    def token_axes(self) -> tuple[str, ...]:
        return _names(self.rules.batch) + _names(self.rules.time)

    @property
    def weight_axes(self) -> tuple[str, ...]:
        return _names(self.rules.w_embed)


def _names(axis) -> tuple[str, ...]:
    """The mesh axes of a rule that have more than one device, inside shard_map. A collective over one
    device is not free: on CPU it copies its argument, which here is the whole unembedding."""
    names = () if axis is None else (axis,) if isinstance(axis, str) else tuple(axis)
    return tuple(name for name in names if lax.axis_size(name) > 1)


def token_logp(logits: Float[Array, "B V"], token: Int[Array, "B"]) -> Float[Array, "B"]:
    """log softmax(logits)[token] = l[token] - max l - log Σ exp(l - max l).

    The engine calls this on the logits it sampled from (divided by the temperature already), so that
    its logprobs and the trainer's are the same arithmetic.
    """
    logits = settle(logits)
    top = jnp.max(logits, axis=-1)
    total = row_sum(jnp.exp(logits - top[..., None]))
    chosen = jnp.take_along_axis(logits, token[..., None], axis=-1)[..., 0]
    return chosen - top - jnp.log(total)


@functools.partial(jax.custom_vjp, nondiff_argnums=(0,))
def chunked_logprob(head: Head, hidden, unembed, targets, ref):
    """(logp, entropy, kl), each float32 [B, T]; zeros for what `head` leaves out."""
    return _forward(head, hidden, unembed, targets, ref)[0]


def _forward(head: Head, hidden, unembed, targets, ref):
    rules = head.rules
    tokens, rows = rules.spec("batch", "time"), rules.spec("batch", "time", None)
    weight = rules.spec("vocab", "w_embed")
    local = jax.shard_map(
        functools.partial(_local_forward, head),
        in_specs=(rows, weight, tokens, (rows, weight)[: len(ref)]),
        out_specs=((tokens,) * 3, (tokens,) * 2),
        check_vma=False,
    )
    out, norms = local(hidden, unembed, targets, ref)
    return out, (hidden, unembed, targets, ref, out, norms)


def _backward(head: Head, saved, grads):
    rules = head.rules
    hidden, unembed, targets, ref, out, norms = saved
    tokens, rows = rules.spec("batch", "time"), rules.spec("batch", "time", None)
    weight = rules.spec("vocab", "w_embed")
    local = jax.shard_map(
        functools.partial(_local_backward, head),
        in_specs=(
            rows,
            weight,
            tokens,
            (rows, weight)[: len(ref)],
            (tokens,) * 3,
            (tokens,) * 2,
            (tokens,) * 3,
        ),
        out_specs=(rows, weight),
        check_vma=False,
    )
    dx, dw = local(hidden, unembed, targets, ref, out, norms, tuple(grads))
    return dx, dw, None, jax.tree.map(jnp.zeros_like, ref)


chunked_logprob.defvjp(_forward, _backward)


def _local_forward(head: Head, x, w, y, ref):
    """This device's tokens, chunk by chunk -> ((logp, entropy, kl), (norm, ref_norm)), all [b, t]."""
    shape = y.shape
    n = y.size
    w = _gather(head, w)
    n_chunks = math.ceil(n / head.chunk)
    c = max(math.ceil(n / n_chunks), 2)  # a product with one row takes another path on CPU

    def cut(a):  # [b, t, ...] -> [chunks, c, ...]
        flat = a.reshape((n, *a.shape[2:]))
        flat = jnp.pad(flat, ((0, n_chunks * c - n),) + ((0, 0),) * (flat.ndim - 1))
        return flat.reshape((n_chunks, c, *flat.shape[1:]))

    ref_x, ref_w = (cut(ref[0]), _gather(head, ref[1])) if head.with_kl else (None, None)

    def stats(chunk):
        x, y, ref_x = chunk
        return _chunk_stats(head, x, y, w, ref_x, ref_w)

    out = lax.map(stats, (cut(x), cut(y), ref_x))
    logp, entropy, kl, norm, ref_norm = (a.reshape(-1)[:n].reshape(shape) for a in out)
    return (logp, entropy, kl), (norm, ref_norm)


def _chunk_stats(head: Head, x, y, w, ref_x, ref_w):
    logits = head.logits(x, w)
    top, total, e = _softmax_parts(head, logits)
    logp = _pick(head, logits, y) - top - jnp.log(total)
    norm = top + jnp.log(total)
    zero = jnp.zeros_like(logp)
    entropy = kl = ref_norm = zero
    if head.with_entropy:
        entropy = jnp.log(total) - _vocab_sum(head, e * (logits - top[:, None])) / total
    if head.with_kl:
        ref_logits = head.logits(ref_x, ref_w)
        ref_top, ref_total, _ = _softmax_parts(head, ref_logits)
        ref_norm = ref_top + jnp.log(ref_total)
        gap = (logits - norm[:, None]) - (ref_logits - ref_norm[:, None])
        kl = _vocab_sum(head, e * gap) / total
    return logp, entropy, kl, norm, ref_norm


def _softmax_parts(head: Head, logits):
    """(max [c], Σ exp(l - max) [c], exp(l - max) [c, v]), max and sum over the whole vocabulary."""
    top = jnp.max(logits, axis=-1)
    if head.vocab_axes:
        top = lax.pmax(top, head.vocab_axes)
    e = jnp.exp(logits - top[:, None])
    return top, _vocab_sum(head, e), e


def _vocab_sum(head: Head, values):
    total = row_sum(values)
    return lax.psum(total, head.vocab_axes) if head.vocab_axes else total


def _pick(head: Head, logits, y):
    """logits[i, y[i]], from the device whose vocabulary has y[i]."""
    v = logits.shape[1]
    if not head.vocab_axes:
        return jnp.take_along_axis(logits, y[:, None], axis=1)[:, 0]
    local = y - lax.axis_index(head.vocab_axes) * v
    here = (local >= 0) & (local < v)
    chosen = jnp.take_along_axis(logits, jnp.clip(local, 0, v - 1)[:, None], axis=1)[:, 0]
    return lax.psum(jnp.where(here, chosen, 0.0), head.vocab_axes)


def _local_backward(head: Head, x, w, y, ref, out, norms, grads):
    """dl = g_logp (1[y] - p) - g_entropy p (log p + entropy) + g_kl p (log p - log q - kl), then
    dh = dl W and dW = dlᵀ h, block by block of the vocabulary."""
    b, t, D = x.shape
    n = b * t
    w, x = _gather(head, w), x.reshape(n, D)
    v = w.shape[0]
    if head.with_kl:
        ref_x, ref_w = ref[0].reshape(n, -1), _gather(head, ref[1])

    def column(a):
        return a.reshape(n, 1)

    _, entropy, kl = map(column, out)
    norm, ref_norm = map(column, norms)
    g_logp, g_entropy, g_kl = map(column, grads)
    first = lax.axis_index(head.vocab_axes) * v if head.vocab_axes else 0
    y = column(y) - first

    def block_grads(start, size):
        w_block = lax.dynamic_slice_in_dim(w, start, size)
        logits = head.logits(x, w_block)
        logp = logits - norm
        p = jnp.exp(logp)
        hit = (start + jnp.arange(size))[None, :] == y
        d = g_logp * (hit - p)
        if head.with_entropy:
            d -= g_entropy * p * (logp + entropy)
        if head.with_kl:
            ref_block = lax.dynamic_slice_in_dim(ref_w, start, size)
            d += g_kl * p * (logp - (head.logits(ref_x, ref_block) - ref_norm) - kl)
        d = (d * head.logits_slope(logits)).astype(x.dtype)
        dx = lax.dot_general(
            d, w_block, (((1,), (0,)), ((), ())), preferred_element_type=jnp.float32
        )
        dw = lax.dot_general(d, x, (((0,), (0,)), ((), ())), preferred_element_type=jnp.float32)
        return dx, dw

    def body(i, carry):
        dx, dw = carry
        dx_block, dw_block = block_grads(i * size, size)
        return dx + dx_block, lax.dynamic_update_slice_in_dim(dw, dw_block, i * size, 0)

    size = _block_size(v, n, head.chunk)
    n_blocks, rest = divmod(v, size)
    carry = jnp.zeros((n, D), jnp.float32), jnp.zeros((v, D), jnp.float32)
    dx, dw = lax.fori_loop(0, n_blocks, body, carry)
    if rest:
        dx_block, dw_block = block_grads(v - rest, rest)
        dx, dw = dx + dx_block, lax.dynamic_update_slice_in_dim(dw, dw_block, v - rest, 0)
    if head.vocab_axes:
        dx = lax.psum(dx, head.vocab_axes)
    return dx.astype(x.dtype).reshape(b, t, D), _scatter(head, dw).astype(w.dtype)


def _block_size(v: int, n: int, chunk: int) -> int:
    """Vocabulary per block, so that n x block is what chunk x v was; multiples of 128."""
    if n <= chunk:
        return v
    return min(max(v * chunk // n // 128 * 128, 128), v)


def _gather(head: Head, w):
    """The whole model dimension of a weight whose shards lie on the `w_embed` axes."""
    if not head.weight_axes:
        return w
    return lax.all_gather(w, head.weight_axes, axis=1, tiled=True)


def _scatter(head: Head, dw):
    """Sums dW over the devices that hold other tokens, and keeps this device's shard of it."""
    over = [a for a in head.token_axes if a not in head.weight_axes]
    dw = lax.psum(dw, over) if over else dw
    if not head.weight_axes:
        return dw
    if set(head.weight_axes) <= set(head.token_axes):
        return lax.psum_scatter(dw, head.weight_axes, scatter_dimension=1, tiled=True)
    width = dw.shape[1] // lax.axis_size(head.weight_axes)
    return lax.dynamic_slice_in_dim(dw, lax.axis_index(head.weight_axes) * width, width, 1)
