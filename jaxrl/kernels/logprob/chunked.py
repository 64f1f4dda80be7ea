"""Logprob, entropy, KL and support mass of the unembedding without a [tokens, vocab] array.

Masked tokens are moved to the end, and the loops stop before them. The forward pass iterates over
chunks of tokens: a row's softmax is one sum over the vocabulary, as in the engine. The backward
pass knows every token's normalizer, so it also splits the vocabulary: it processes several chunks
of tokens against vocabulary blocks and updates the large dW fewer times, with the memory of one
chunk.

n tokens of this device, c per chunk, r per block in the backward pass, v vocabulary of this device,
D model. Hidden states xs and weights ws are tuples of one or two: h and W, and with an adapter of
the unembedding also l = scale A h and B; the logits are Σ x wᵀ over the pairs.
"""

import dataclasses
import functools
import math
from typing import Any

import jax
import jax.numpy as jnp
from flax import struct
from jax import lax
from jaxtyping import Array, Float

from jaxrl.kernels.bits import row_sum
from jaxrl.kernels.logprob import divergence
from jaxrl.kernels.logprob.reference import head_logits
from jaxrl.kernels.logprob.softmax import softmax_moments, softmax_parts, vocab_sum
from sharding import Rules


@dataclasses.dataclass(frozen=True)
class Head:
    """Static parameters of an unembedding: how logits are computed and how the work is split."""

    temperature: float
    softcap: float | None
    chunk: int  # tokens whose logits exist at one time
    rules: Rules
    with_entropy: bool
    with_kl: bool
    with_support: bool
    n_grouped: int = 4  # chunks of tokens per step of the backward pass
    one_pass: bool = False  # the forward pass reads the logits once where it can
    beta: float = 1.0  # of the divergence from the reference (divergence.py); 1: KL(p | q)
    with_ids: bool = False  # the logprobs of further ids

    def logits(self, xs, ws):
        (x, *low), (w, *b) = xs, ws
        change = (low[0], b[0]) if low else None
        return head_logits(x, w, temperature=self.temperature, softcap=self.softcap, change=change)

    def logits_slope(self, logits):
        """d logits / d (Σ x wᵀ), from the final logits."""
        if self.softcap is None:
            return 1.0 / self.temperature
        capped = logits * (self.temperature / self.softcap)
        return (1.0 - capped * capped) / self.temperature

    def specs(self, n_pairs: int, n_ref: int) -> tuple:
        """PartitionSpecs of [B, T, k], [B, T], xs, ws, targets, keep, reference, support, ids."""
        tokens = self.rules.spec("batch", "time")
        rows, weight = self.rules.spec("batch", "time", None), self.rules.spec("vocab", "w_embed")
        weights = (weight, self.rules.spec("vocab", None))[:n_pairs]
        reference, support = (rows, weight)[:n_ref], (rows,) * self.with_support
        ids = (rows,) * self.with_ids
        return rows, tokens, (rows,) * n_pairs, weights, tokens, tokens, reference, support, ids

    @property
    def mixes(self) -> bool:
        """Whether the divergence is from a mixture, whose gradient needs one more sum."""
        return self.with_kl and 0.0 < self.beta < 1.0

    @property
    def single_pass(self) -> bool:
        """Whether maximum, sum and entropy are one reduction; KL and supports need the weights."""
        return self.one_pass and self.with_entropy and not (self.with_kl or self.with_support)

    @property
    def vocab_axes(self) -> tuple[str, ...]:
        return self._used_axes("vocab")

    @property
    def token_axes(self) -> tuple[str, ...]:
        return self._used_axes("batch") + self._used_axes("time")

    @property
    def weight_axes(self) -> tuple[str, ...]:
        return self._used_axes("w_embed")

    def _used_axes(self, logical: str) -> tuple[str, ...]:
        """The mesh axes of a rule with more than one device, inside shard_map.

        A collective over one device is not free: on CPU it copies its argument, here the whole
        unembedding.
        """
        return tuple(axis for axis in self.rules.mesh_axes(logical) if lax.axis_size(axis) > 1)


def token_logp(
    chosen: Float[Array, "B"], top: Float[Array, "B"], weights: Float[Array, "B V"]
) -> Float[Array, "B"]:
    """log softmax(l)[token] = l[token] - max l - log Σ exp(l - max l).

    Arguments: chosen = l[token], top = max l and weights = exp(l - max l). The engine calls this
    with the logits that it sampled from, divided by the temperature, so its logprobs and the
    trainer's share one arithmetic.
    """
    return chosen - top - jnp.log(row_sum(weights))


@functools.partial(jax.custom_vjp, nondiff_argnums=(0,))
def chunked_logprob(head: Head, xs, ws, targets, keep, ref, support, ids):
    """(logp, entropy, kl, log_mass), float32 [B, T]; zeros for masked tokens, disabled outputs.

    `ref` is (hidden, unembed) of the reference, or () without one. `support` are bitsets [B, T, W]
    of the vocabulary (data/support.py) in a tuple, or (). `ids` are int32 [B, T, k] in a tuple,
    whose logprobs [B, T, k] are a fifth output, or ().
    """
    return _forward(head, xs, ws, targets, keep, ref, support, ids)[0]


def _forward(head: Head, xs, ws, targets, keep, ref, support, ids):
    rows, tokens, *inputs = head.specs(len(xs), len(ref))
    local = jax.shard_map(
        functools.partial(_local_forward, head),
        in_specs=tuple(inputs),
        out_specs=((tokens,) * 4 + (rows,) * len(ids), (tokens,) * (2 + head.mixes)),
        check_vma=False,
    )
    out, norms = local(xs, ws, targets, keep, ref, support, ids)
    return out, (xs, ws, targets, keep, ref, support, ids, out[:4], norms)


def _backward(head: Head, saved, grads):
    xs, ws, targets, keep, ref, support, ids, out, norms = saved
    row, tokens, *specs = head.specs(len(xs), len(ref))
    rows, weights = specs[:2]
    of_ids = (row,) * len(ids)
    local = jax.shard_map(
        functools.partial(_local_backward, head),
        in_specs=(*specs, (tokens,) * 4, (tokens,) * len(norms), (tokens,) * 4 + of_ids),
        out_specs=(rows, weights),
        check_vma=False,
    )
    dxs, dws = local(xs, ws, targets, keep, ref, support, ids, out, norms, tuple(grads))
    return dxs, dws, None, None, jax.tree.map(jnp.zeros_like, ref), None, None


chunked_logprob.defvjp(_forward, _backward)


def _local_forward(head: Head, xs, ws, y, keep, ref, support, ids):
    """Local tokens, chunk by chunk -> ((logp, entropy, kl, log_mass), (norm, ref_norm)), [b, t].

    The logprobs of `ids` are added to the first tuple, the centre of a mixture to the second.
    """
    n = y.size
    c = max(
        math.ceil(n / math.ceil(n / head.chunk)), 2
    )  # XLA on CPU uses another algorithm for one row
    kept = Kept.of(keep, c)
    ref_x, ref_w = ref or (xs[0], ws[0])  # a stand-in that nothing reads
    rows = [kept.rows(a) for a in (y, ref_x, *xs)]
    ws, ref_w = (gather_weight(head, ws[0]), *ws[1:]), gather_weight(head, ref_w)

    def chunk(i, carry):
        out, *chosen = carry
        y, ref_x, *xs = (_slice(a, i, c) for a in rows)
        bits = [kept.block(each, i, c) for each in support]
        logits = head.logits(xs, ws)
        stats = _chunk_stats(head, logits, y, ref_x, ref_w, *bits)
        out = lax.dynamic_update_slice(out, jnp.stack(stats), (0, i * c))
        for j, each in enumerate(ids):
            picked = _pick_ids(head, logits, kept.block(each, i, c)) - stats[4][:, None]
            chosen[j] = lax.dynamic_update_slice(chosen[j], picked, (i * c, 0))
        return out, *chosen

    n_rows = len(kept.order)
    out = jnp.zeros((6 + head.mixes, n_rows), jnp.float32)
    chosen = [jnp.zeros((n_rows, each.shape[-1]), jnp.float32) for each in ids]
    out, *chosen = lax.fori_loop(0, -(-kept.count // c), chunk, (out, *chosen))
    logp, entropy, kl, log_mass, *norms = (kept.back(a, keep) for a in out)
    return (logp, entropy, kl, log_mass, *(kept.back(a, keep) for a in chosen)), tuple(norms)


def _members(bits, start, size: int):
    """bool [c, size]: whether the ids from `start` on are in the supports [c, W]."""
    bits = jnp.pad(bits, ((0, 0), (0, 2)))  # a slice past the last word would be moved back
    words = lax.dynamic_slice_in_dim(bits, start // 32, size // 32 + 2, axis=1)
    each = (words[:, :, None] >> jnp.arange(32, dtype=jnp.uint32)) & 1
    flat = each.reshape(len(bits), -1)
    return lax.dynamic_slice_in_dim(flat, start % 32, size, axis=1) > 0


def vocab_start(head: Head, v: int):
    """The first token id of this device's shard of the vocabulary, of `v` ids."""
    return lax.axis_index(head.vocab_axes) * v if head.vocab_axes else 0


@struct.dataclass
class Kept:
    """The unmasked tokens of a device, moved to the front and padded to whole blocks."""

    order: Any  # int32 [n'], token index of each row; n (out of range) at padding
    count: Any  # int32 [], unmasked tokens

    @classmethod
    def of(cls, keep, block: int):
        flat = keep.reshape(-1)
        order = jnp.argsort(~flat, stable=True).astype(jnp.int32)
        count = jnp.sum(flat, dtype=jnp.int32)
        order = jnp.where(jnp.arange(flat.size) < count, order, flat.size)
        padding = ((0, -flat.size % block),)
        return cls(jnp.pad(order, padding, constant_values=flat.size), count)

    def rows(self, a):
        """[b, t, ...] -> [n', ...], zeros in padding rows."""
        flat = a.reshape((-1, *a.shape[2:]))
        return flat.at[self.order].get(mode="fill", fill_value=0)

    def block(self, a, i, size: int):
        """Rows i * size, ... of `rows(a)`, without the others."""
        flat = a.reshape((-1, *a.shape[2:]))
        return flat.at[_slice(self.order, i, size)].get(mode="fill", fill_value=0)

    def back(self, a, like):
        """[n', ...] -> [b, t, ...], zeros at masked tokens."""
        out = jnp.zeros((like.size, *a.shape[1:]), a.dtype)
        return out.at[self.order].set(a, mode="drop").reshape(*like.shape, *a.shape[1:])


def _slice(a, i, size: int):
    return lax.dynamic_slice_in_dim(a, i * size, size)


def _chunk_stats(head: Head, logits, y, ref_x, ref_w, bits=None):
    """logp, entropy, kl, log_mass, norm, ref_norm and, of a mixture, its centre; [c] each."""
    axes = head.vocab_axes
    if head.single_pass:
        return _single_pass_stats(head, logits, y)
    top, total, e = softmax_parts(logits, axes)
    logp = pick(head, logits, y) - top - jnp.log(total)
    norm = top + jnp.log(total)
    zero = jnp.zeros_like(logp)
    entropy = kl = log_mass = ref_norm = zero
    centre = []
    if head.with_entropy:
        entropy = jnp.log(total) - vocab_sum(e * (logits - top[:, None]), axes) / total
    if head.with_kl:
        ref_logits = head.logits([ref_x], [ref_w])
        ref_top, ref_total, _ = softmax_parts(ref_logits, axes)
        ref_norm = ref_top + jnp.log(ref_total)
        logq = ref_logits - ref_norm[:, None]
        if head.beta == 1.0:
            kl = vocab_sum(e * ((logits - norm[:, None]) - logq), axes) / total
        else:
            both = logits - norm[:, None], logq, head.beta
            kl = vocab_sum(divergence.terms(*both), axes)
            centre = [vocab_sum(divergence.centre_terms(*both), axes)] if head.mixes else []
    if bits is not None:
        v = logits.shape[1]
        members = _members(bits, vocab_start(head, v), v)
        log_mass = jnp.log(vocab_sum(jnp.where(members, e, 0.0), axes)) - jnp.log(total)
    return logp, entropy, kl, log_mass, norm, ref_norm, *centre


def _single_pass_stats(head: Head, logits, y):
    """`_chunk_stats` of logprob and entropy alone."""
    top, total, weighted = softmax_moments(logits, head.vocab_axes)
    logp = pick(head, logits, y) - top - jnp.log(total)
    zero = jnp.zeros_like(logp)
    return logp, jnp.log(total) - weighted / total, zero, zero, top + jnp.log(total), zero


def pick(head: Head, logits, y):
    """logits[i, y[i]], from the device whose vocabulary shard contains y[i]."""
    v = logits.shape[1]
    if not head.vocab_axes:
        return jnp.take_along_axis(logits, y[:, None], axis=1)[:, 0]
    local = y - vocab_start(head, v)
    here = (local >= 0) & (local < v)
    chosen = jnp.take_along_axis(logits, jnp.clip(local, 0, v - 1)[:, None], axis=1)[:, 0]
    return lax.psum(jnp.where(here, chosen, 0.0), head.vocab_axes)


def _pick_ids(head: Head, logits, ids):
    """logits[i, ids[i, j]], [c, k], each from the device whose shard contains the id."""
    v = logits.shape[1]
    if not head.vocab_axes:
        return jnp.take_along_axis(logits, ids, axis=1)
    local = ids - vocab_start(head, v)
    here = (local >= 0) & (local < v)
    chosen = jnp.take_along_axis(logits, jnp.clip(local, 0, v - 1), axis=1)
    return lax.psum(jnp.where(here, chosen, 0.0), head.vocab_axes)


def _local_backward(head: Head, xs, ws, y, keep, ref, support, ids, out, norms, grads):
    """Gradients of xs and ws on one device.

    dl = g_logp (1[y] - p) - g_entropy p (log p + entropy) + g_kl p (log p - log q - kl)
    + g_mass p (1[support] / mass - 1) + Σ_j g_j (1[ids_j] - p), then dh = dl W and dW = dlᵀ h, in
    blocks of several chunks of tokens times vocabulary blocks. Other divergences: divergence.py.
    """
    *grads, grads_of_ids = grads if ids else (*grads, ())
    r = min(head.n_grouped * head.chunk, y.size)
    kept = Kept.of(keep, r)
    ref_x, ref_w = ref or (xs[0], ws[0])  # a stand-in that nothing reads
    dtypes = [[a.dtype for a in arrays] for arrays in (xs, ws)]
    ws, ref_w = (gather_weight(head, ws[0]), *ws[1:]), gather_weight(head, ref_w)
    v = len(ws[0])
    first = vocab_start(head, v)
    y = y - first
    columns = [kept.rows(a)[:, None] for a in (y, *out, *norms, *grads)]
    rows = [kept.rows(a) for a in (ref_x, *xs)]
    size = _block_size(v, r, head.chunk)
    n_blocks, rest = divmod(v, size)

    def block_of_tokens(i, carry):
        ref_x, *xs = (_slice(a, i, r) for a in rows)
        bits = [kept.block(each, i, r) for each in support]
        part = [_slice(a, i, r) for a in columns]
        chosen = [(kept.block(a, i, r) - first, kept.block(grads_of_ids, i, r)) for a in ids]

        def add(start, size, dxs, dws):
            blocks = [lax.dynamic_slice_in_dim(w, start, size) for w in ws]
            ref_block = lax.dynamic_slice_in_dim(ref_w, start, size)
            members = [_members(each, first + start, size) for each in bits]
            d = _logits_gradient(head, xs, ref_x, part, blocks, ref_block, start, chosen, *members)
            pairs = zip(dws, xs, strict=True)
            dws = [_add_rows(dw, _dot(d, x, 0, 0), start) for dw, x in pairs]
            pairs = zip(dxs, blocks, strict=True)
            return [dx + _dot(d, block, 1, 0) for dx, block in pairs], dws

        dx_all, dws = carry
        dxs = [jnp.zeros((r, w.shape[1]), jnp.float32) for w in ws]
        dxs, dws = lax.fori_loop(0, n_blocks, lambda j, c: add(j * size, size, *c), (dxs, dws))
        if rest:
            dxs, dws = add(v - rest, rest, dxs, dws)
        pairs = zip(dx_all, dxs, strict=True)
        return [lax.dynamic_update_slice(old, dx, (i * r, 0)) for old, dx in pairs], dws

    carry = [[jnp.zeros((n, w.shape[1]), jnp.float32) for w in ws] for n in (len(kept.order), v)]
    dxs, dws = lax.fori_loop(0, -(-kept.count // r), block_of_tokens, tuple(carry))
    if head.vocab_axes:
        dxs = [lax.psum(dx, head.vocab_axes) for dx in dxs]
    dws = [_scatter(head, dws[0]), *(_sum_tokens(head, dw) for dw in dws[1:])]
    dxs, dws = (
        [a.astype(dtype) for a, dtype in zip(arrays, wanted, strict=True)]
        for arrays, wanted in zip((dxs, dws), dtypes, strict=True)
    )
    return tuple(kept.back(dx, keep) for dx in dxs), tuple(dws)


def _logits_gradient(head: Head, xs, ref_x, part, blocks, ref_block, start, chosen, members=None):
    """dl [r, size] of one block of tokens and vocabulary, in the dtype of the hidden states.

    `chosen` has (ids relative to the shard, their gradient), [r, k] each, if there are some.
    """
    y, _, entropy, kl, log_mass, norm, ref_norm, *rest = part
    *centre, g_logp, g_entropy, g_kl, g_mass = rest
    logits = head.logits(xs, blocks)
    logp = logits - norm
    p = jnp.exp(logp)
    d = g_logp * ((start + jnp.arange(len(blocks[0])))[None, :] == y) - g_logp * p
    if head.with_entropy:
        d -= g_entropy * p * (logp + entropy)
    if head.with_kl:
        logq = head.logits([ref_x], [ref_block]) - ref_norm
        if head.beta == 1.0:
            d += g_kl * p * (logp - logq - kl)
        else:
            centre = centre[0] if centre else kl
            d += g_kl * divergence.logits_gradient(logp, logq, centre, head.beta)
    if members is not None:
        d += g_mass * p * (jnp.where(members, jnp.exp(-log_mass), 0.0) - 1.0)
    for ids, grads in chosen:
        d = _add_columns(d - jnp.sum(grads, axis=1, keepdims=True) * p, grads, ids - start)
    return (d * head.logits_slope(logits)).astype(xs[0].dtype)


def _add_columns(total, values, columns):
    """`total` [r, size] with values [r, k] added in these columns; others are on other blocks."""
    inside = (columns >= 0) & (columns < total.shape[1])
    columns = jnp.where(inside, columns, total.shape[1])  # negative ones would count from the end
    return total.at[jnp.arange(len(total))[:, None], columns].add(values, mode="drop")


def _dot(a, b, a_dim: int, b_dim: int):
    dims = (((a_dim,), (b_dim,)), ((), ()))
    return lax.dot_general(a, b, dims, preferred_element_type=jnp.float32)


def _add_rows(total, rows, start):
    old = lax.dynamic_slice_in_dim(total, start, len(rows))
    return lax.dynamic_update_slice_in_dim(total, old + rows, start, 0)


def _block_size(v: int, r: int, chunk: int) -> int:
    """Vocabulary per block such that r x block is about chunk x v; a multiple of 128."""
    if r <= chunk:
        return v
    return min(max(v * chunk // r // 128 * 128, 128), v)


def gather_weight(head: Head, w):
    """A weight with its `w_embed` shards all-gathered along the model dimension."""
    if not head.weight_axes:
        return w
    return lax.all_gather(w, head.weight_axes, axis=1, tiled=True)


def _sum_tokens(head: Head, dw):
    """The gradient of a weight without `w_embed` shards, summed over the devices' tokens."""
    return lax.psum(dw, head.token_axes) if head.token_axes else dw


def _scatter(head: Head, dw):
    """dW summed over the devices that hold other tokens, reduced to this device's shard."""
    over = [a for a in head.token_axes if a not in head.weight_axes]
    inside = bool(head.weight_axes) and set(head.weight_axes) <= set(head.token_axes)
    if inside:  # scatter first: the sums over other devices are then smaller
        dw = lax.psum_scatter(dw, head.weight_axes, scatter_dimension=1, tiled=True)
    dw = lax.psum(dw, over) if over else dw
    if inside or not head.weight_axes:
        return dw
    width = dw.shape[1] // lax.axis_size(head.weight_axes)
    return lax.dynamic_slice_in_dim(dw, lax.axis_index(head.weight_axes) * width, width, 1)
