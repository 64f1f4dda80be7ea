"""The states of layers during speculative decoding.

A state cannot go back to an earlier token. So the pass that verifies draft tokens computes their
outputs and leaves the states of sequences as they are, but keeps what the layers would have put
into them. When the accepted tokens are known, the states of all layers advance over these alone.
"""

import dataclasses
import functools
from typing import Any

import jax
import jax.numpy as jnp
from jaxtyping import Array, Bool, Int

from jaxrl.kernels.gated_delta import gated_delta_step
from jaxrl.kernels.gated_delta.pool import advance_tails
from jaxrl.models.kv_cache import DraftInputs, KVCache, StateCache
from sharding import Rules


def start_drafts(cache: KVCache, n_rows: int, n_tokens: int, rules: Rules) -> KVCache:
    """The cache for a pass that verifies `n_tokens` of each row; layers fill its `drafts`.

    A cache without states stays as it is.
    """
    if cache.states is None:
        return cache
    states = cache.states
    if isinstance(states.v, list):
        drafts = DraftInputs(*([[None] * len(states.v)] * 6))
        return dataclasses.replace(cache, drafts=drafts)
    L, (N, V) = states.v.shape[0], states.v.shape[3:]
    specs, dtype = _draft_specs(rules), states.v.dtype

    def empty(spec: jax.P, *shape: int, dtype=dtype) -> jax.Array:
        spec = jax.P(None, *spec)
        return jnp.zeros((L, n_rows, n_tokens, *shape), dtype, out_sharding=spec)

    if states.qk is None:
        drafts = DraftInputs(None, empty(specs.v, N, V), None, None, None, None)
        return dataclasses.replace(cache, drafts=drafts)
    K, two_D = states.qk.shape[3:]
    drafts = DraftInputs(
        qk=empty(specs.qk, K, two_D),
        v=empty(specs.v, N, V),
        k=empty(specs.k, K, two_D // 2),
        values=empty(specs.values, N, V),
        g=empty(specs.g, N, dtype=jnp.float32),
        beta=empty(specs.beta, N),
    )
    return dataclasses.replace(cache, drafts=drafts)


def keep_drafts(
    drafts: DraftInputs, new: DraftInputs, layer: Int[Array, ""] | None, rules: Rules
) -> DraftInputs:
    """The drafts with the inputs of a layer; those in a list have this layer only."""
    if layer is None:
        return DraftInputs(*([value] for value in vars(new).values()))

    def put(all_layers: jax.Array, one: jax.Array, spec: jax.P) -> jax.Array:
        one = jax.reshard(one.astype(all_layers.dtype), spec)
        return jax.lax.dynamic_update_index_in_dim(all_layers, one, layer, 0)

    specs = vars(_draft_specs(rules))
    parts = [(part, getattr(new, name), specs[name]) for name, part in vars(drafts).items()]
    return DraftInputs(*(None if part[0] is None else put(*part) for part in parts))


def accept_drafts(
    cache: KVCache,
    slots: Int[Array, "B"] | None,
    accepted: Bool[Array, "B W"],
    rules: Rules,
    step: str,
) -> KVCache:
    """The cache with the states after the `accepted` tokens, which come first in each row.

    `step` is the implementation of `gated_delta_step`. A cache without states stays as it is.
    """
    if cache.states is None or cache.drafts is None:
        return cache
    assert slots is not None
    drafts, states = cache.drafts, cache.states
    advance = functools.partial(_advance, slots=slots, accepted=accepted, rules=rules, step=step)
    if not isinstance(states.v, list):
        layers = jnp.arange(states.v.shape[0])
        states, _ = jax.lax.scan(lambda s, xs: (advance(s, *xs), None), states, (drafts, layers))
        return dataclasses.replace(cache, states=states, drafts=None)
    cache = dataclasses.replace(cache, drafts=None)
    for i, pool in enumerate(states.v):
        if pool is not None:
            own = cache.layer(i)
            inputs = jax.tree.map(lambda of, i=i: of[i], drafts, is_leaf=_is_list)
            own = dataclasses.replace(own, states=advance(own.states, inputs, None))
            cache = cache.with_layer(i, own)
    return cache


def _advance(
    states: StateCache,
    inputs: DraftInputs,
    layer: jax.Array | None,
    *,
    slots: jax.Array,
    accepted: jax.Array,
    rules: Rules,
    step: str,
) -> StateCache:
    """The states of a layer after the accepted tokens."""
    pools, first = states.layer_slots(layer, rules)
    how: Any = dict(slots=slots + first, live=accepted, rules=rules)
    qk, state = None, None
    if pools.state is not None:
        k = inputs.k  # also in place of the queries, as outputs are not needed
        _, state = gated_delta_step(
            k, k, inputs.values, inputs.g, inputs.beta, pools.state, implementation=step, **how
        )
        qk = advance_tails(inputs.qk, pools.qk, **how)
    v = advance_tails(inputs.v, pools.v, **how)
    return states.with_slots(StateCache(qk, v, state), rules)


def _draft_specs(rules: Rules) -> DraftInputs:
    """The sharding of a layer's inputs."""
    heads, gates = rules.spec("batch", None, "heads", None), rules.spec("batch", None, "heads")
    return DraftInputs(qk=heads, v=heads, k=heads, values=heads, g=gates, beta=gates)


def _is_list(value: object) -> bool:
    return isinstance(value, list)
