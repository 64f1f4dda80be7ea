"""Adapters of the embedding table and of the unembedding, which are not layers."""

import dataclasses
from typing import Any

import jax
import jax.numpy as jnp
from flax import nnx
from jaxtyping import Array, Float, Int

from jaxrl.kernels.matmul import matmul
from jaxrl.models.config import DecoderConfig, LoRA
from jaxrl.models.layers.linear import Adapter, own_part
from jaxrl.models.layers.stored import MakeParam
from sharding import Rules, gather_matrix

# Targets of adapters that are not linear layers of a transformer layer, by their attributes in
# Decoder. The names are those of config.lora.target_modules and of PEFT.
TABLES = {"embed": "embed_tokens", "lm_head": "lm_head"}


class HeadAdapter(Adapter):
    """The low-rank change of the unembedding, W + scale B A: A is [rank, D], B is [V, rank]."""

    def low(self, hidden: Float[Array, "B T D"], rules: Rules) -> Float[Array, "B T R"]:
        """scale A h. Its product with B is computed with the logits, a part of them at a time."""
        a = gather_matrix(self.a, rules, self.a_axes, 1)
        low = matmul(hidden, a, out_sharding=rules.spec("batch", "time", None))
        low = own_part(low, self.ids, self.n_stacked)
        return low * jnp.asarray(self.scale, low.dtype)


class EmbeddingAdapter(nnx.Module):
    """The low-rank change of the embedding table, W + scale (B A)ᵀ: A is [rank, V], B is [D, rank].

    As in PEFT, A starts at zero and B at standard normal values. A token reads a column of A. With
    `n_stacked` it has several adapters along the rank, as `Adapter` has.
    """

    def __init__(self, make: MakeParam, name: str, lora: LoRA, V: int, D: int):
        self.scale, self.n_out, self.m = lora.scale, 1, None
        self.n_stacked = lora.n_stacked
        self.ids: Int[Array, "B T"] | None = nnx.data(None)
        self.a_axes, self.b_axes = (None, "vocab"), ("w_embed", None)
        a, b = f"{name}.lora_embedding_A", f"{name}.lora_embedding_B"
        rank = lora.rank * max(lora.n_stacked, 1)
        self.a = nnx.data(make(a, (rank, V), self.a_axes, init="zeros"))
        self.b = nnx.data(make(b, (D, rank), self.b_axes, init="unit_normal"))

    def rows(self, tokens: Int[Array, "B T"], rules: Rules) -> Float[Array, "B T D"]:
        """The change of the rows of these tokens."""
        a = jax.reshard(self.a, rules.gathered(None, "vocab")).T
        low = a.at[tokens].get(out_sharding=rules.spec("batch", "time", None))
        low = own_part(low, self.ids, self.n_stacked)
        b = gather_matrix(self.b, rules, self.b_axes, 1)
        change = matmul(low, b, out_sharding=rules.spec("batch", "time", "embed"))
        return change * jnp.asarray(self.scale, change.dtype)

    def factors(self) -> tuple[jax.Array, jax.Array]:
        """(Bᵀ, Aᵀ): the change of the table [V, D] is scale times the second times the first."""
        return self.b.T, self.a.T


def table_adapters(make: MakeParam, cfg: DecoderConfig) -> dict[str, Any]:
    """The adapters of the embedding table and of the unembedding, by attribute; None without.

    Raises ValueError for a model or a kind of adapters that has none.
    """
    found: dict[str, Any] = dict.fromkeys(TABLES)
    lora = cfg.lora
    named = [] if lora is None else [name for name in TABLES.values() if name in lora.targets]
    if lora is None or not named:
        return found
    _check(cfg, lora, " and ".join(named))
    if "embed_tokens" in named:
        found["embed"] = EmbeddingAdapter(make, "model.embed_tokens", lora, cfg.V, cfg.D)
    if "lm_head" in named and "vocab" in cfg.heads:
        shape = cfg.V, cfg.D
        axes = "vocab", "w_embed"
        plain = dataclasses.replace(lora, dora=False)  # of a stack, the DoRA ones are elsewhere
        found["lm_head"] = HeadAdapter(make, "lm_head", plain, shape, axes, n_out=1, hf_shape=shape)
    return found


def _check(cfg: DecoderConfig, lora: LoRA, names: str) -> None:
    wrong = ""
    if cfg.tied:
        wrong = (
            f"this {cfg.family} model ties its embedding table and its unembedding in one array, "
            "into which separate adapters cannot be merged"
        )
    elif lora.dora and not lora.n_stacked:
        wrong = "they have no magnitudes (DoRA); set config.lora.dora=False"
    elif lora.pissa:
        wrong = "they have no principal start (PiSSA); set config.lora.init='default'"
    if wrong:
        raise ValueError(
            f"adapters of {names}: {wrong}, or leave {names} out of config.lora.target_modules"
        )
