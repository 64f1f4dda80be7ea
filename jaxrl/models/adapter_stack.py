"""Several adapters of one base model, of which every token uses its own, or none.

The A and B of all adapters are next to each other along the rank: A is [n * rank, in] and B is
[out, n * rank]. A x is computed for all of them, in one product for all tokens of a batch, and set
to zero where another adapter's rows are. So a batch may mix adapters, as in Punica
(https://arxiv.org/abs/2310.18547) and S-LoRA (https://arxiv.org/abs/2311.03285), with plain matrix
products instead of their gathered ones: the cost grows with n * rank, and is small as long as that
is small against the width of the model.
"""

import jax
import jax.numpy as jnp
from flax import nnx
from jaxtyping import Array, Int

from jaxrl.models.decoder import Decoder
from jaxrl.models.layers.linear import Adapter


def has_stack(model: Decoder) -> bool:
    """Whether the model has several adapters."""
    return model.cfg.lora is not None and model.cfg.lora.n_stacked > 0


def choose_adapters(model: Decoder, ids: Int[Array, "B T"] | None) -> Decoder:
    """The model for tokens [B, T] that use these adapters: 0 = none, i = the i-th.

    The model itself if it has no stack of adapters.
    """
    if not has_stack(model):
        return model
    assert ids is not None, "a model with a stack of adapters needs the adapter of every token"
    if model.cfg.stacked:  # a scan takes the leading axis of every array
        ids = jnp.broadcast_to(ids, (model.cfg.L, *ids.shape))

    def with_ids(adapter: Adapter) -> Adapter:
        new = jax.tree.map(lambda leaf: leaf, adapter)
        new.ids = nnx.data(ids)
        return new

    def is_adapter(node: object) -> bool:
        return isinstance(node, Adapter)

    return jax.tree.map(
        lambda node: with_ids(node) if is_adapter(node) else node, model, is_leaf=is_adapter
    )
