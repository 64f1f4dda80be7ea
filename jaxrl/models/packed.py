"""The decoder on packed rows, for training and scoring."""

import jax
from jaxtyping import Array, Float, Int

from jaxrl.kernels.attention import attention
from jaxrl.kernels.ring_attention import ring_attention
from jaxrl.kernels.visibility import Visibility
from jaxrl.models.decoder import Attend, Decoder, scan_layers, stacked_layers
from jaxrl.models.layers.linear import Linear
from jaxrl.models.layers.moe import RouterLoad
from jaxrl.models.pipeline import run_stages
from sharding import Rules


def forward_packed(
    model: Decoder,
    tokens: Int[Array, "B T"],
    segments: Int[Array, "B T"],
    positions: Int[Array, "B T"],
    *,
    rules: Rules,
    remat: str = "none",
    implementation: str | None = None,
    matmul_dtype: str = "auto",
) -> Float[Array, "B T D"]:
    """Final hidden states of packed rows; a token attends causally within its own segment.

    Under rules with `ring`, rows are in zig-zag order (sharding/order.py). Rules that shard layers
    run them as a pipeline (pipeline.py).
    """
    return forward_routed(
        model,
        tokens,
        segments,
        positions,
        rules=rules,
        remat=remat,
        implementation=implementation,
        matmul_dtype=matmul_dtype,
    )[0]


def forward_routed(
    model: Decoder,
    tokens: Int[Array, "B T"],
    segments: Int[Array, "B T"],
    positions: Int[Array, "B T"],
    *,
    until: Int[Array, "B T"] | None = None,
    copies: Int[Array, "B T"] | None = None,
    rules: Rules,
    remat: str = "none",
    implementation: str | None = None,
    matmul_dtype: str = "auto",
) -> tuple[Float[Array, "B T D"], RouterLoad | None]:
    """`forward_packed` and the router load of a mixture of experts (None for a dense model).

    With `until`, the last place of the row that sees each token, segments share prefixes
    (kernels/visibility.py). The load counts a token as often as `copies` says, or once.
    `matmul_dtype` "int8" or "fp8" quantizes the products of linear layers
    (kernels/quantized_matmul.py), except those of experts and adapters.
    """
    model, cfg = with_matmul_dtype(model, matmul_dtype), model.cfg
    attend_rows = ring_attention if rules.ring else attention

    visibility = None if until is None else Visibility(until, positions)
    weights = segments > 0 if copies is None else copies

    def attend_to(segments, visibility, rules: Rules) -> Attend:
        spec = cfg.attention_spec(rules)

        def attend(q, k, v, window, layer_index, state):
            out = attend_rows(
                q,
                k,
                v,
                spec=spec,
                segments=segments,
                window=window,
                visibility=visibility,
                implementation=implementation,
            )
            return out, state

        return attend

    if rules.layers is None:
        attend = attend_to(segments, visibility, rules)
        hidden, _, load = model(tokens, positions, attend, live=weights, rules=rules, remat=remat)
        return hidden, load
    inside = rules.in_stage()

    def stage(layers, x, positions, segments, visibility):
        attend, live = attend_to(segments, visibility, inside), segments > 0
        x, _, _ = scan_layers(
            cfg, layers, x, positions, attend, None, live=live, rules=inside, remat=remat
        )
        return x

    x = model.embed_tokens(tokens, rules)
    layers = stacked_layers(model, rules)
    rows = positions, segments, visibility
    return model.norm(run_stages(stage, layers, x, rows, rules=rules)), None


def with_matmul_dtype(model: Decoder, dtype: str) -> Decoder:
    """The same arrays, whose linear layers have products of this dtype; "auto" is that of x."""
    if dtype == "auto":
        return model

    def changed(node: object) -> object:
        if not isinstance(node, Linear):
            return node
        new = jax.tree.map(lambda leaf: leaf, node)
        new.matmul_dtype = dtype
        return new

    return jax.tree.map(changed, model, is_leaf=lambda node: isinstance(node, Linear))
