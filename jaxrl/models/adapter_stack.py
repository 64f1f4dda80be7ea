"""Several adapters of one base model, of which every token uses its own, or none.

The A and B of all adapters are next to each other along the rank: A is [n * rank, in] and B is
[out, n * rank]. A x is computed for all of them, in one product for all tokens of a batch, and set
to zero where another adapter's rows are. So a batch may mix adapters, as in Punica
(https://arxiv.org/abs/2310.18547) and S-LoRA (https://arxiv.org/abs/2311.03285), with plain matrix
products instead of their gathered ones: the cost grows with n * rank, and is small as long as that
is small against the width of the model. Experts do the same in their grouped products, and the
embedding table with the columns of A that its tokens read. The magnitudes of DoRA are divided by
the norms of their weights in advance (`with_gains`): a token's outputs are multiplied by its row.
"""

import functools

import jax
import jax.numpy as jnp
from flax import nnx
from jaxtyping import Array, Int

from jaxrl.models.decoder import Decoder
from jaxrl.models.layers.linear import Adapter, Linear
from jaxrl.models.layers.tables import EmbeddingAdapter
from jaxrl.types import Tree
from sharding import Rules


def has_stack(model: Decoder) -> bool:
    """Whether the model has several adapters."""
    return model.cfg.lora is not None and model.cfg.lora.n_stacked > 0


def choose_adapters(model: Decoder, ids: Int[Array, "B T"] | None) -> Decoder:
    """The model for tokens [B, T] that use these adapters: 0 = none, i = the i-th.

    The model itself if it has no stack of adapters. Logits of other tokens need another choice.
    """
    if not has_stack(model):
        return model
    assert ids is not None, "a model with a stack of adapters needs the adapter of every token"
    new = jax.tree.map(lambda leaf: leaf, model)
    new.layers = nnx.data(_with_ids(model.layers, ids, stacked=model.cfg.stacked))
    new.lora = nnx.data(_with_ids(model.lora, ids))
    return new


def with_gains(model: Decoder, index: int, single: Decoder, rules: Rules) -> Decoder:
    """The model whose adapter `index`, from 1, has the gains of the DoRA adapter of `single`.

    `single` is the same base with this adapter only.
    """
    new = jax.tree.map(lambda leaf: leaf, model)
    for linear, own in zip(_linears(new), _linears(single), strict=True):
        if own.lora is not None:
            assert linear.lora is not None
            gains = _with_gain(linear.lora.gains, index, own, rules, model.cfg.stacked)
            linear.lora.gains = nnx.data(gains)
    return new


@functools.partial(jax.jit, static_argnames=("rules", "stacked"))
def _with_gain(
    gains: jax.Array, index: int | Int[Array, ""], linear: Linear, rules: Rules, stacked: bool
) -> jax.Array:
    """The gains with row `index` that of the adapter of `linear`."""

    def of_layer(linear: Linear) -> jax.Array:
        return linear.gain(rules)

    gain = jax.lax.map(of_layer, linear) if stacked else of_layer(linear)
    row = (slice(None), index) if stacked else index
    out = jax.typeof(gains).sharding.spec
    lead = 2 if stacked else 1
    gain = jax.reshard(gain, jax.P(*out[: lead - 1], *out[lead:]))
    return gains.at[row].set(gain, out_sharding=out)


def _linears(model: Decoder) -> list[Linear]:
    """The linear layers, in order."""

    def is_linear(node: object) -> bool:
        return isinstance(node, Linear)

    return [node for node in jax.tree.leaves(model, is_leaf=is_linear) if is_linear(node)]


def _with_ids(part: Tree, ids: jax.Array, *, stacked: bool = False) -> Tree:
    """A part of the model whose adapters have these ids; with a leading axis if it is stacked."""

    def is_adapter(node: object) -> bool:
        return isinstance(node, Adapter | EmbeddingAdapter)

    def with_ids(node):
        if not is_adapter(node):
            return node
        new = jax.tree.map(lambda leaf: leaf, node)
        n_layers = node.a.shape[:1] if stacked else ()  # a scan takes it from every array
        new.ids = nnx.data(jnp.broadcast_to(ids, (*n_layers, *ids.shape)))
        return new

    return jax.tree.map(with_ids, part, is_leaf=is_adapter)
