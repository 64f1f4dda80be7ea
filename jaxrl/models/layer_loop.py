"""The layers of a decoder in order: a scan over stacked ones, a loop over a list."""

import dataclasses
import functools
from collections.abc import Callable, Sequence
from typing import Any

import jax
import jax.numpy as jnp
from jaxtyping import Array, Float, Int

from jaxrl.config.remat import parse_remat
from jaxrl.models.cache_layout import cache_places
from jaxrl.models.config import DecoderConfig
from jaxrl.models.kv_cache import KVCache
from jaxrl.models.layer_places import layer_place, stacked_places, with_deep, with_inputs
from jaxrl.models.layers.block import Layer
from jaxrl.models.layers.experts import ExpertMatrix
from jaxrl.models.layers.moe import MoE, keeps_stack
from jaxrl.models.layers.router import Live, RouterLoad
from jaxrl.models.layers.row_ops import LayerPlace, RowOps
from jaxrl.models.remat import finish_gradients, layer_input, loop_remat, recompute, scan_remat
from jaxrl.models.router_replay import with_experts
from jaxrl.models.shared_kv import KeptKV
from sharding import Rules


def run_layers(
    cfg: DecoderConfig,
    model_layers: Any,
    x: Float[Array, "B T D"],
    positions: Int[Array, "B T *axes"],
    rows: RowOps,
    state: KVCache | KeptKV | None,
    experts: Int[Array, "L B T k"] | None,
    *,
    inputs: Float[Array, "L B T P"] | None,
    deep: Float[Array, "n B T D"] | None,
    live: Live,
    rules: Rules,
    remat: str,
) -> tuple[Float[Array, "B T D"], KVCache | KeptKV | None, RouterLoad | None]:
    """Runs all layers in order: a scan over stacked layers, a loop over a list.

    `state` passes from layer to layer; as a scan carry it is updated in place. In a list, `attend`
    gets each layer's part as the cache of a model of one layer. `remat` is config.learner.remat
    (jaxrl/config/remat.py). `deep` is added after each of the first n layers.
    """
    if cfg.stacked:
        layers, places = stacked_layers(cfg, model_layers, rules)
        places = places if inputs is None else with_inputs(cfg, places, inputs)
        places = places if experts is None else with_experts(cfg, places, experts)
        return scan_layers(
            cfg,
            layers,
            places,
            x,
            positions,
            rows,
            state,
            deep=deep,
            keep_experts=isinstance(state, KVCache) and keeps_stack(rules),
            live=live,
            rules=rules,
            remat=remat,
        )
    places = [layer_place(cfg, i, inputs) for i in range(cfg.L)]
    places = places if experts is None else with_experts(cfg, places, experts)
    places = places if deep is None else with_deep(places, deep)
    caches = [place.layer for place in cache_places(cfg)]

    def step(policy: str) -> Callable:
        layer_fn = _layer_fn(live, positions, rows, rules, policy)
        # Layers with the same window are traced and lowered once; XLA inlines the calls.
        layer_fn = jax.jit(layer_fn, static_argnames="window")

        def one(carry, layer: Layer, i: int):
            x, state = carry
            if cfg.lora is None:  # otherwise frozen weights would get gradients
                x, layer = finish_gradients(x, layer)
            own = None if state is None else state.layer(caches[i])
            x, own, load = layer_fn(layer, x, places[i], cfg.window(i), own)
            return (x, None if state is None else state.with_layer(caches[i], own)), load

        return one

    (x, state), loads = loop_remat(step, (x, state), list(model_layers), parse_remat(remat))
    loads = [load for load in loads if load is not None]
    return x, state, jax.tree.map(lambda *of: jnp.stack(of), *loads) if loads else None


def stacked_layers(cfg: DecoderConfig, layers: Any, rules: Rules) -> tuple[Any, list[LayerPlace]]:
    """(stacked layers with their leading axes sharded, one LayerPlace for each stack)."""

    def shard_layers(param: jax.Array) -> jax.Array:
        spec = jax.typeof(param).sharding.spec
        return jax.reshard(param, jax.P(*rules.spec("layers"), *spec[1:]))

    return jax.tree.map(shard_layers, layers), stacked_places(cfg)


def scan_layers(
    cfg: DecoderConfig,
    layers: Any,
    places: list[LayerPlace],
    x: Float[Array, "B T D"],
    positions: Int[Array, "B T *axes"],
    rows: RowOps,
    state: Any,
    *,
    deep: Float[Array, "n B T D"] | None = None,
    keep_experts: bool = False,
    live: Live,
    rules: Rules,
    remat: str,
    in_loop: bool = False,
) -> tuple[Float[Array, "B T D"], Any, RouterLoad | None]:
    """`run_layers` over all or some of the layers of `stacked_layers`.

    Every run of layers is a scan over the repetitions of its period; layers with `deep` sums are
    one before it.

    `in_loop`: the same layers run several times, in a loop. Their weights are gathered every time.

    `keep_experts`: the scans read the experts' matrices of all layers in place, and slice the rest.
    A slice that a custom call reads is a copy: in decode, of every expert of a layer, also of those
    without a token.
    """
    stacks = [layers] if isinstance(layers, Layer) else list(layers)
    sizes = [jax.tree.leaves(place)[0].shape[0] for place in places]  # fewer in a pipeline stage
    loads, start, first = [], 0, 0
    for run in cfg.runs:
        period = slice(first, first := first + len(run))
        chosen, experts = stacks[period], [None] * len(run)
        if keep_experts:
            chosen, experts = zip(*map(_without_experts, chosen), strict=True)
        layer_fn = functools.partial(_layer_fn, live, positions, rows, rules, in_loop=in_loop)
        for own in _deep_parts(tuple(zip(chosen, places[period], strict=True)), start, deep):
            stop = start + len(run) * len(jax.tree.leaves(own[0][1])[0])
            (x, state), load = scan_remat(
                functools.partial(_period_step, cfg, run, experts, layer_fn),
                (x, state),
                own,
                parse_remat(remat).ranges(sum(sizes), start, stop),
                period=len(run),
            )
            loads, start = [*loads, *([] if load is None else [load])], stop
    return x, state, jax.tree.map(lambda *of: jnp.concatenate(of), *loads) if loads else None


def _deep_parts(
    stacks: tuple[tuple[Layer, LayerPlace], ...], start: int, deep: Float[Array, "n B T D"] | None
) -> list[tuple[tuple[Layer, LayerPlace], ...]]:
    """The stacks of a run that begins with layer `start`: its layers with `deep` sums, the rest.

    Raises NotImplementedError if they end within a period.
    """
    n, n_steps = len(stacks), len(jax.tree.leaves(stacks[0][1])[0])
    n_deep = 0 if deep is None else min(max(len(deep) - start, 0), n * n_steps)
    if not n_deep or deep is None:
        return [stacks]
    if n_deep % n:
        raise NotImplementedError(
            f"deepstack features of {n_deep} layers divide the {n} layers that this model repeats; "
            "set config.model.layers='list'"
        )

    def steps(begin: int, end: int) -> tuple[tuple[Layer, LayerPlace], ...]:
        return jax.tree.map(lambda a: a[begin:end], stacks)

    sums = deep[start : start + n_deep]
    first = tuple(
        (layer, dataclasses.replace(place, deep=sums[i::n]))
        for i, (layer, place) in enumerate(steps(0, n_deep // n))
    )
    return [first] if n_deep == n * n_steps else [first, steps(n_deep // n, n_steps)]


def _period_step(
    cfg: DecoderConfig,
    run: tuple[range, ...],
    experts: Sequence[dict[str, ExpertMatrix] | None],
    layer_fn: Callable[..., Callable],
    policy: str,
) -> Callable:
    """The body of a scan over the repetitions of a run's period."""

    def body(carry, period):
        (x, state), loads = carry, []
        for layers, matrices, (layer, place) in zip(run, experts, period, strict=True):
            if matrices is not None:
                index = (place.index - layers.start) // layers.step
                layer = _with_experts(layer, matrices, index)
            static = place.window is None
            window = cfg.window(layers.start) if static else place.window
            if len(run) > 1 and cfg.lora is None:  # a scan of one layer finishes them by itself
                x, layer = finish_gradients(x, layer)
            pool = cache_places(cfg)[layers.start].pool
            own = None if state is None else state.pool(pool)
            x, own, load = layer_fn(policy, static)(layer, x, place, window, own)
            state = None if state is None else state.with_pool(pool, own)
            loads += [] if load is None else [load]
        stacked = jax.tree.map(lambda *of: jnp.stack(of), *loads) if loads else None
        return (x, state), stacked

    return body


def _without_experts(layers: Layer) -> tuple[Layer, dict[str, ExpertMatrix] | None]:
    """(stacked layers without the matrices of their experts, these matrices if there are any)."""
    if not isinstance(layers.mlp, MoE):
        return layers, None
    new = jax.tree.map(lambda leaf: leaf, layers)
    new.mlp, experts = layers.mlp.take_stack()
    return new, experts


def _with_experts(layer: Layer, experts: dict[str, ExpertMatrix], index: Int[Array, ""]) -> Layer:
    """The layer `index`, whose experts are in the stack of all layers."""
    assert isinstance(layer.mlp, MoE)
    new = jax.tree.map(lambda leaf: leaf, layer)
    new.mlp = layer.mlp.with_stack(experts, index)
    return new


def _layer_fn(
    live,
    positions,
    rows: RowOps,
    rules: Rules,
    policy: str,
    static_window: bool = True,
    *,
    in_loop: bool = False,
):
    def layer_fn(layer: Layer, x, place: LayerPlace, window, state):
        x = layer_input(x, policy)
        if in_loop:
            # XLA otherwise gathers the weights of all layers before the loop. Outside this
            # function, the barrier would be a copy of all weights per iteration for backward.
            layer, x = jax.lax.optimization_barrier((layer, x))
        return layer(x, live, positions, place, window, rows, state, rules)

    # A window that is a Python int stays static: 0 means "none" only there.
    return recompute(layer_fn, policy, static_argnums=(3,) if static_window else ())
