"""Forward pass over a paged KV cache: rows of new tokens, or prefill mixed with decode."""

import dataclasses
from collections.abc import Iterable
from typing import Any

import jax
import jax.numpy as jnp
from flax import struct
from jaxtyping import Array, Float, Int

from jaxrl import types
from jaxrl.kernels.attention_spec import AttentionSpec
from jaxrl.kernels.gated_delta import gated_delta_outputs, gated_delta_step
from jaxrl.kernels.gated_delta.convolution import identity
from jaxrl.kernels.gated_delta.pool import (
    SlotRows,
    pool_causal_conv,
    pool_gated_delta,
    step_causal_conv,
)
from jaxrl.kernels.paged_attention import paged_attention, write_pages
from jaxrl.models.decoder import Decoder
from jaxrl.models.draft_states import keep_drafts
from jaxrl.models.image_features import ImageFeatures, check_paged_images
from jaxrl.models.kv_cache import DraftInputs, KVCache, StateCache, of_layer
from jaxrl.models.layers.gated_delta_net import queries_and_keys
from jaxrl.models.layers.mla import LatentHeads
from jaxrl.models.layers.router import RouterLoad
from jaxrl.models.shared_kv import SharedKV
from sharding import Rules

DECODE_SCOPE = "decode_rows"  # named scope of decode attention, by which the planner finds it


@struct.dataclass
class PrefillSlots:
    """The slots of rows of prefill, for models with a state (kernels/gated_delta/pool.py)."""

    sources: types.Array  # int32 [R], of the state before each row
    targets: types.Array  # int32 [R], of the state after it


# int32 [n, C] by window, of the layers with that window; under 0 of all others. Column c of row b
# is the pool page of the row's positions [c * page_len, (c + 1) * page_len). Negative entries p are
# not written: -1 is a page that no layer of the table sees, others are the page -2 - p.
PageTables = dict[int, types.Array]
RowSlots = jax.Array | PrefillSlots | None  # int32 [B] in decode; None for models without states


def forward_paged(
    model: Decoder,
    tokens: Int[Array, "B T"],
    positions: Int[Array, "B T"],
    cache: KVCache,
    page_tables: PageTables,
    slots: RowSlots = None,
    *,
    features: ImageFeatures | None = None,
    rotary: Int[Array, "B T *axes"] | None = None,
    ahead: Int[Array, "B T"] | None = None,
    rules: Rules,
    implementation: str | None = None,
) -> tuple[Float[Array, "B T D"], KVCache]:
    """Hidden states of new tokens, whose keys are written to the cache first.

    A position of -1 marks padding: nothing is written for it and its output is meaningless. Models
    with a state need the `slots` of the rows.

    Several tokens of a sequence may also be consecutive rows of one token each that share one row
    of the tables: matrix products then run as in decode, and attention reads a block of keys once
    for all of them.

    `features` are those of images. `rotary` are the positions that rotate queries and keys if they
    are not `positions`, the index in the sequence: by axis in a row with images, and the index plus
    the delta of the sequence after them (mrope.py). `ahead` are the last positions that tokens see,
    of a model in which those of an image see each other: all of an image are new.
    """
    return forward_routed(
        model,
        tokens,
        positions,
        cache,
        page_tables,
        slots,
        features=features,
        rotary=rotary,
        ahead=ahead,
        rules=rules,
        implementation=implementation,
    )[:2]


def forward_routed(
    model: Decoder,
    tokens: Int[Array, "B T"],
    positions: Int[Array, "B T"],
    cache: KVCache,
    page_tables: PageTables,
    slots: RowSlots = None,
    *,
    features: ImageFeatures | None = None,
    rotary: Int[Array, "B T *axes"] | None = None,
    ahead: Int[Array, "B T"] | None = None,
    rules: Rules,
    implementation: str | None = None,
) -> tuple[Float[Array, "B T D"], KVCache, RouterLoad | None]:
    """`forward_paged` and the router load of a mixture of experts (None for a dense model)."""
    check_paged_images(model.cfg, features, rotary, ahead)
    positions_of_row = positions.reshape(len(page_tables[0]), -1)
    group = TokenGroup.new(page_tables, positions_of_row, slots, cache.page_len, ahead)
    paged = PagedRows([group], rules, implementation, model.cfg.gated_delta)
    rotary = positions if rotary is None else rotary
    return model(tokens, rotary, paged, cache, live=positions >= 0, rules=rules, features=features)


def forward_mixed(
    model: Decoder,
    prefill_tokens: Int[Array, "R T"],
    prefill_positions: Int[Array, "R T"],
    prefill_tables: PageTables,
    tokens: Int[Array, "B"],
    positions: Int[Array, "B"],
    page_tables: PageTables,
    cache: KVCache,
    prefill_slots: PrefillSlots | None = None,
    slots: Int[Array, "B"] | None = None,
    *,
    features: ImageFeatures | None = None,
    prefill_rotary: Int[Array, "R T *axes"] | None = None,
    rotary: Int[Array, "B"] | None = None,
    rules: Rules,
    implementation: str | None = None,
) -> tuple[Float[Array, "B 1 D"], KVCache, RouterLoad | None]:
    """`forward_routed` of R rows of prefill and B rows of decode; the decode hidden states.

    The router load is of all tokens, as one row with those of decode last. Weights are read once
    for all of them, as one row of R * T + B tokens. Only attention treats them separately.
    `features` are those of images in the rows of prefill; see `forward_paged` for `rotary`.
    """
    check_paged_images(model.cfg, features, prefill_rotary)
    n_prefill = prefill_tokens.size
    row = jnp.concatenate([prefill_tokens.reshape(-1), tokens])[None]
    group_positions = jnp.concatenate([prefill_positions.reshape(-1), positions])[None]
    groups = [
        TokenGroup.new(prefill_tables, prefill_positions, prefill_slots, cache.page_len),
        TokenGroup.new(page_tables, positions[:, None], slots, cache.page_len),
    ]
    paged = PagedRows(groups, rules, implementation, model.cfg.gated_delta)
    if prefill_rotary is not None or rotary is not None:
        parts = (prefill_positions, prefill_rotary), (positions[:, None], rotary)
        turned = jnp.concatenate([_by_axis(*part) for part in parts])[None]
    else:
        turned = group_positions
    hidden, cache, load = model(
        row,
        turned,
        paged,
        cache,
        live=group_positions >= 0,
        rules=rules,
        features=None if features is None else features.in_row(n_decode=len(tokens)),
    )
    return jnp.swapaxes(hidden[:, n_prefill:], 0, 1), cache, load


def _by_axis(positions: Int[Array, "n t"], rotary: Int[Array, "..."] | None) -> Int[Array, "m 3"]:
    """The positions by axis of a group of tokens, three equal ones where there is one."""
    found = positions if rotary is None else rotary
    if found.ndim == 3:
        return found.reshape(-1, 3)
    return jnp.repeat(found.reshape(-1, 1), 3, axis=1)


@dataclasses.dataclass(frozen=True)
class TokenGroup:
    """New tokens of n sequences or rows, t of each."""

    pages: dict[int, jax.Array]  # int32 [n * C] by window, the pages to read; see `table`
    written: dict[int, jax.Array]  # int32 [n, t] by window, positions to write; -1 = none
    positions: jax.Array  # int32 [n, t]
    slots: RowSlots
    ahead: jax.Array | None = None  # int32 [n, t], last visible positions; None: their own

    def table(self, flat: jax.Array) -> jax.Array:
        """[n, C] of one of `pages`.

        They are flat up to here: the layout assignment of the TPU compiler changed the layout of
        tables in loops over layers back and forth, and did not end for Gemma 4 E4B.
        """
        return flat.reshape(len(self.positions), -1)

    @classmethod
    def new(
        cls,
        tables: PageTables,
        positions: jax.Array,
        slots: RowSlots,
        page_len: int,
        ahead: jax.Array | None = None,
    ) -> "TokenGroup":
        """The tokens at these positions of the rows of the page tables."""
        column = jnp.maximum(positions, 0) // page_len
        pages, written = {}, {}
        for window, table in tables.items():
            entry = jnp.take_along_axis(table, column, axis=1)
            written[window] = jnp.where(entry >= 0, positions, -1)
            pages[window] = jnp.where(table >= 0, table, jnp.maximum(-2 - table, 0))
        # Without a barrier XLA computes them, or their shape, again in every layer.
        pages = jax.lax.optimization_barrier({w: t.reshape(-1) for w, t in pages.items()})
        return cls(pages, written, positions, slots, ahead)


def pad_features(x: jax.Array, missing: int) -> jax.Array:
    """The array with `missing` more features, which are zero."""
    return jnp.pad(x, ((0, 0),) * (x.ndim - 1) + ((0, missing),)) if missing else x


@dataclasses.dataclass(frozen=True)
class PagedRows:
    """Operations between new tokens and the tokens in the cache.

    The groups' tokens are concatenated. In every layer, the keys of all groups are written before
    any attends.
    """

    groups: list[TokenGroup]
    rules: Rules
    implementation: str | None  # of paged attention
    step: str  # implementation of gated_delta_step

    @property
    def heads_first(self) -> bool:
        return False

    def attend(self, q, k, v, spec: AttentionSpec, window, index, state: KVCache, sinks=None):
        """Without pages of values, the keys are the values.

        Pages may be wider than heads (cache_layout.py); the other features are zeros.
        """
        k_pages, v_pages, first = state.layer_pages(index, self.rules)
        width, missing = q.shape[-1], k_pages.shape[-1] - q.shape[-1]
        q = pad_features(q, missing)
        k, v = (x if x is None else pad_features(x, missing) for x in (k, v))
        for group, keys, values in self._new_tokens(k, v):
            k_pages, v_pages = write_pages(
                k_pages,
                v_pages,
                keys,
                values,
                group.table(of_layer(group.pages, window, index, state) + first),
                of_layer(group.written, window, index, state),
                rules=self.rules,
            )
        outs = []
        for group, group_q in zip(self.groups, self._by_group(q, "heads"), strict=True):
            decodes = group.positions.shape[1] == 1
            with jax.named_scope(DECODE_SCOPE if decodes else "prefill_rows"):
                out = paged_attention(
                    group_q,
                    k_pages,
                    v_pages,
                    spec=spec,
                    page_table=group.table(of_layer(group.pages, window, index, state) + first),
                    positions=group.positions,
                    window=window,
                    sinks=sinks,
                    ahead=group.ahead if spec.whole_images else None,
                    implementation=self.implementation,
                )
            outs.append(out)
        out = self._joined(outs, q.shape)[..., :width]
        return out, state.with_pages(k_pages, v_pages, self.rules)

    def attend_latent(self, q, latent, heads: LatentHeads, window, index, state: KVCache):
        """Attention to the latents: their mean and that of rotated keys, which is left out."""
        rules = dataclasses.replace(self.rules, kv_heads=None)
        rows, spec = dataclasses.replace(self, rules=rules), heads.cfg.spec(rules)
        out, state = rows.attend(heads.absorb(q), latent, None, spec, window, index, state)
        return heads.values(out[..., : heads.cfg.latent]), state

    def share(self, k, v, shared: SharedKV, state: KVCache):
        return k, v, state  # later layers read the pages of the layer that has them

    def delta(self, qk, v, g, beta, conv, index, state: KVCache):
        assert state.states is not None
        if state.drafts is not None:
            return self._verify_delta(qk, v, g, beta, conv, index, state)
        pools, first = state.states.layer_slots(index, self.rules)
        outs = []
        for group, *tokens in zip(
            self.groups, *(self._by_group(a, "heads") for a in (qk, v, g, beta)), strict=True
        ):
            live = group.positions >= 0
            if isinstance(group.slots, PrefillSlots):
                sources, targets = group.slots.sources + first, group.slots.targets + first
                out, pools = self._prefill_delta(
                    tokens, conv, SlotRows(sources, targets, live), pools
                )
            else:
                out, pools = self._step_delta(tokens, conv, group.slots + first, live, pools)
            outs.append(out)
        states = state.states.with_slots(pools, self.rules)
        return self._joined(outs, v.shape), dataclasses.replace(state, states=states)

    def _prefill_delta(self, tokens, conv, slots: SlotRows, pools: StateCache):
        (qk, v, g, beta), how = tokens, dict[str, Any](slots=slots, rules=self.rules)
        qk, qk_tails = pool_causal_conv(qk, conv[0], pools.qk, **how)
        v, v_tails = pool_causal_conv(v, conv[1], pools.v, **how)
        out, states = pool_gated_delta(*queries_and_keys(qk), v, g, beta, pools.state, **how)
        return out, StateCache(qk_tails, v_tails, states)

    def _step_delta(self, tokens, conv, slots, live, pools: StateCache):
        (qk, v, g, beta), how = tokens, dict[str, Any](slots=slots, live=live, rules=self.rules)
        qk, qk_tails = step_causal_conv(qk, conv[0], pools.qk, **how)
        v, v_tails = step_causal_conv(v, conv[1], pools.v, **how)
        q, k = queries_and_keys(qk)
        how["implementation"] = self.step
        out, states = gated_delta_step(q, k, v, g, beta, pools.state, **how)
        return out, StateCache(qk_tails, v_tails, states)

    def _verify_delta(self, qk, v, g, beta, conv, index, state: KVCache):
        """The outputs at draft tokens, with their inputs in place of the states after them."""
        assert state.states is not None and state.drafts is not None
        pools, first = state.states.layer_slots(index, self.rules)
        (group,), shape = self.groups, v.shape
        assert group.slots is not None and not isinstance(group.slots, PrefillSlots)
        qk, v, g, beta = (self._by_group(a, "heads")[0] for a in (qk, v, g, beta))
        how = dict[str, Any](slots=group.slots + first, live=group.positions >= 0, rules=self.rules)
        q, k = queries_and_keys(step_causal_conv(qk, conv[0], pools.qk, **how)[0])
        values, _ = step_causal_conv(v, conv[1], pools.v, **how)
        out = gated_delta_outputs(
            q, k, values, g, beta, pools.state, implementation=self.step, **how
        )
        inputs = DraftInputs(qk, v, k, values, g, beta)
        drafts = keep_drafts(state.drafts, inputs, index, self.rules)
        return self._joined([out], shape), dataclasses.replace(state, drafts=drafts)

    def convolve(self, x, w, index, state: KVCache):
        assert state.states is not None
        pools, first = state.states.layer_slots(index, self.rules)
        how, tails, outs = dict[str, Any](rules=self.rules, activation=identity), pools.v, []
        by_group = self._by_group(x, "heads")
        for group, tokens in zip(self.groups, by_group, strict=True):
            live = group.positions >= 0
            if isinstance(group.slots, PrefillSlots):
                rows = SlotRows(group.slots.sources + first, group.slots.targets + first, live)
                out, tails = pool_causal_conv(tokens, w, tails, slots=rows, **how)
            else:
                assert group.slots is not None
                slots = group.slots + first
                out, tails = step_causal_conv(tokens, w, tails, slots=slots, live=live, **how)
            outs.append(out)
        if state.drafts is not None:  # which advance the tails when they are accepted
            inputs = DraftInputs(None, by_group[0], None, None, None, None)
            drafts = keep_drafts(state.drafts, inputs, index, self.rules)
            return self._joined(outs, x.shape), dataclasses.replace(state, drafts=drafts)
        states = state.states.with_slots(StateCache(None, tails, None), self.rules)
        return self._joined(outs, x.shape), dataclasses.replace(state, states=states)

    def _new_tokens(self, k, v) -> Iterable[tuple[TokenGroup, jax.Array, jax.Array | None]]:
        """Each group with its keys and values; none if they are in the pages already."""
        if k is None:
            return ()
        keys = self._by_group(k, "kv_heads")
        values = [None] * len(keys) if v is None else self._by_group(v, "kv_heads")
        return zip(self.groups, keys, values, strict=True)

    def _by_group(self, x: jax.Array, heads: str) -> list[jax.Array]:
        """The tokens of each group, by sequence."""
        sizes = [group.positions.size for group in self.groups]
        ends = [sum(sizes[: i + 1]) for i in range(len(sizes) - 1)]
        pieces = jnp.split(x, ends, axis=1) if ends else [x]
        pairs = zip(pieces, self.groups, strict=True)
        return [_reshape_rows(a, group.positions.shape, heads, self.rules) for a, group in pairs]

    def _joined(self, outs: list[jax.Array], shape: tuple[int, ...]) -> jax.Array:
        """The outputs of the groups as rows of the given shape."""
        if len(outs) > 1:
            flat = [
                _reshape_rows(o, (1, o.shape[0] * o.shape[1]), "heads", self.rules) for o in outs
            ]
            outs = [jnp.concatenate(flat, axis=1)]
        return _reshape_rows(outs[0], shape[:2], "heads", self.rules)


def _reshape_rows(x: jax.Array, shape: tuple[int, ...], heads: str, rules: Rules) -> jax.Array:
    if x.shape[:2] == shape:
        return x
    out = rules.spec("batch", "time", heads, *(None,) * (x.ndim - 3))
    return jnp.reshape(x, (*shape, *x.shape[2:]), out_sharding=out)
