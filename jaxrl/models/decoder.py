"""Decoder-only transformer: Flax NNX modules, used as plain pytrees.

B rows, T tokens, D model, N heads, K kv heads, H head dim, F feed-forward, V vocabulary, L layers.
Training and rollout call the same `Decoder`; they differ only in the `RowOps` they pass.
Each layer has the parameters and the computation that its `LayerConfig` describes.
"""

import dataclasses
import functools
from typing import Any

import jax
import jax.numpy as jnp
from flax import nnx
from jax.typing import DTypeLike
from jaxtyping import Array, Float, Int

from jaxrl.kernels.matmul import matmul
from jaxrl.models.config import DecoderConfig
from jaxrl.models.image_features import ImageFeatures, PackedPatches
from jaxrl.models.layer_loop import run_layers
from jaxrl.models.layers.block import Layer
from jaxrl.models.layers.layer_inputs import LayerInputs
from jaxrl.models.layers.linear import make_spec
from jaxrl.models.layers.norms import RMSNorm, make_norm
from jaxrl.models.layers.router import Live, RouterLoad
from jaxrl.models.layers.row_ops import RowOps
from jaxrl.models.layers.tables import table_adapters
from jaxrl.models.spec import init_params, is_spec
from jaxrl.models.vision.tower import Tower
from sharding import Rules, gather_matrix


class Decoder(nnx.Module):
    """Embedding, L layers, final norm and the heads of its config.

    Stacked layers are one `Layer` if all are equal, else one for each place of a repeating period
    (`layer_runs`), in a list.

    A vision tower is a part of it if it is trained (`cfg.tower`); `encode_images` runs it.

    Heads are the unembedding ("vocab") and a linear map to one number ("score": a value or a
    reward). `decoder_specs` builds its parameter table.
    """

    def __init__(self, cfg: DecoderConfig):
        top = make_spec("")
        self.cfg = cfg
        self.layers: Any

        def table(name: str) -> Any:
            return top(name, (cfg.V, cfg.D), ("vocab", "w_embed"), hf_shape=(cfg.V, cfg.D))

        self.embed = nnx.data(table("model.embed_tokens.weight"))
        if cfg.stacked:
            stacks = [
                Layer(make_spec("model.layers.{layer}.", place), cfg, cfg.layers[place.start])
                for run in cfg.runs
                for place in run
            ]
            self.layers = nnx.List(stacks) if len(stacks) > 1 else stacks[0]
        else:
            self.layers = nnx.List(
                [
                    Layer(make_spec(f"model.layers.{i}."), cfg, layer)
                    for i, layer in enumerate(cfg.layers)
                ]
            )
        self.norm = make_norm(top, cfg.final_norm, cfg, unit_offset=cfg.final_unit_offset)
        without = RMSNorm(top, None, cfg.D, eps=cfg.norm_eps, unit_offset=False)
        self.embed_norm = without if cfg.embed_norm else None
        self.layer_inputs = LayerInputs(top, cfg) if cfg.input_P else None
        untied = "vocab" in cfg.heads and not cfg.tied
        self.lm_head = nnx.data(table("lm_head.weight") if untied else None)
        self.lora = nnx.data(table_adapters(top, cfg))  # of embed and lm_head, by these names
        # Its adapters are among those of the whole model.
        tower = None if cfg.tower is None else Tower(dataclasses.replace(cfg.tower, lora=cfg.lora))
        self.tower = nnx.data(tower)
        self.score = nnx.data(
            top("score.weight", (len(cfg.labels), cfg.D), (None, "w_embed"), init="zeros")
            if "score" in cfg.heads
            else None
        )

    @property
    def unembed(self) -> jax.Array:
        """[V, D]: the lm_head, or the embedding if tied; ValueError without the "vocab" head."""
        if "vocab" not in self.cfg.heads:
            raise ValueError(
                f"this {self.cfg.family} model has the heads {self.cfg.heads} and so no logits; "
                "load it with heads=('vocab',)"
            )
        return self.embed if self.lm_head is None else self.lm_head

    def __call__(
        self,
        tokens: Int[Array, "B T"],
        positions: Int[Array, "B T *axes"],
        rows: RowOps,
        state: Any = None,
        *,
        live: Live,
        rules: Rules,
        remat: str = "none",
        experts: Int[Array, "L B T k"] | None = None,
        features: ImageFeatures | None = None,
    ) -> tuple[Float[Array, "B T D"], Any, RouterLoad | None]:
        """(final hidden states, state after the last layer, router load with layers first).

        `state` is passed through `attend`: the KV cache in rollout. `live` is not
        zero at tokens that are not padding; the load of a mixture of experts counts these as often
        as it says, and is None for a dense model. `experts` are those to replay, of the layers with
        experts. `features` are those of images, whose positions may be [B, T, 3].
        """
        x = self.embed_tokens(tokens, rules)
        x = x if features is None else features.insert(x, rules)
        inputs = None
        if self.layer_inputs is not None:
            pad = self.cfg.input_pad
            own = tokens if features is None else features.with_token(tokens, pad, rules)
            inputs = self.layer_inputs(own, x, rules)
        x = jax.reshard(x, rules.residual_spec(x.shape))
        x, state, load = run_layers(
            self.cfg,
            self.layers,
            x,
            positions,
            rows,
            state,
            experts,
            inputs=inputs,
            deep=None if features is None else features.deep_sums(x.dtype, rules),
            live=live,
            rules=rules,
            remat=remat,
        )
        return jax.reshard(self.finish(x), rules.spec("batch", "time", "embed")), state, load

    def finish(self, x: Float[Array, "B T D"]) -> Float[Array, "B T D"]:
        """The input of the heads, of the output of the last layer."""
        x, scale = self.norm(x), self.cfg.logit_scale
        return x if scale == 1 else x * jnp.asarray(scale, x.dtype)

    def encode_images(self, images: PackedPatches, rules: Rules, remat: str) -> ImageFeatures:
        """The features of a micro-batch's images by the tower that is trained with the model.

        With more patches than tokens each block is recomputed: its arrays would need more memory
        than those of the decoder, for which `remat` was chosen.
        """
        assert self.tower is not None, "patches are inputs of a model with a tower"
        B, P, _ = images.rows.patches.shape
        remat = remat if images.index.size >= B * P else "full"
        out, deep = self.tower(images.rows, rules=rules, remat=remat)
        return images.features(out, deep, rules)

    def embed_tokens(self, tokens: Int[Array, "B T"], rules: Rules) -> Float[Array, "B T D"]:
        """Input of the first layer."""
        table = gather_matrix(self.embed, rules, ("vocab", "w_embed"), 1)
        x = table.at[tokens].get(out_sharding=rules.spec("batch", "time", "embed"))
        if (adapter := self.lora["embed"]) is not None:
            x = x + adapter.rows(tokens, rules)
        x = x if self.embed_norm is None else self.embed_norm(x)
        return x * jnp.asarray(self.cfg.embed_scale, x.dtype)

    def logits(self, hidden: Float[Array, "B T D"], rules: Rules) -> Float[Array, "B T V"]:
        """float32 logits, soft-capped if the family does so."""
        w = jax.reshard(self.unembed, rules.gathered("vocab", "w_embed"))
        out = rules.spec("batch", "time", "vocab")
        logits = matmul(hidden, w, out_sharding=out, dtype=jnp.float32)
        if (change := self.head_change(hidden, rules)) is not None:
            low, b = change
            b = jax.reshard(b, rules.gathered("vocab", None))
            logits = logits + matmul(low, b, out_sharding=out, dtype=jnp.float32)
        cap = self.cfg.logit_softcap
        return logits if cap is None else cap * jnp.tanh(logits / cap)

    def head_change(
        self, hidden: Float[Array, "B T D"], rules: Rules
    ) -> tuple[Float[Array, "B T R"], Float[Array, "V R"]] | None:
        """(l, B) of an adapter of the unembedding, which adds l Bᵀ to the logits; None without."""
        adapter = self.lora["lm_head"]
        return None if adapter is None else (adapter.low(hidden, rules), adapter.b)

    def scores(self, hidden: Float[Array, "B T D"], rules: Rules) -> Float[Array, "B T ..."]:
        """float32 [B, T] from the head "score", or [B, T, K] if it has several labels."""
        if self.score is None:
            raise ValueError(
                f"this {self.cfg.family} model has the heads {self.cfg.heads} and so no scores; "
                "load it with heads=('score',)"
            )
        w = gather_matrix(self.score, rules, (None, "w_embed"), 1)
        out = rules.spec("batch", "time", None)
        found = matmul(hidden, w, out_sharding=out, dtype=jnp.float32)
        return found if len(self.cfg.labels) > 1 else found[..., 0]


@functools.cache
def decoder_specs(cfg: DecoderConfig) -> Decoder:
    """The model as a tree of ParamSpecs, read by init, sharding, import and export.

    All callers share one tree per config: change none in place.
    """
    return Decoder(cfg)


def with_heads(model: Decoder, heads: tuple[str, ...]) -> Decoder:
    """The same arrays, restricted to these heads."""
    return restrict(model, dataclasses.replace(model.cfg, heads=heads))


def restrict(model: Decoder, cfg: DecoderConfig) -> Decoder:
    """The same arrays as a model of `cfg`, which has a part of the model's parameters."""
    leaves = dict(jax.tree_util.tree_leaves_with_path(model))
    specs = decoder_specs(cfg)
    return jax.tree.map_with_path(lambda path, _: leaves[path], specs, is_leaf=is_spec)


def init_model(
    cfg: DecoderConfig, *, seed: int, rules: Rules, dtype: DTypeLike = jnp.float32
) -> Decoder:
    """A randomly initialized model on the current mesh."""
    return init_params(jax.random.key(seed), decoder_specs(cfg), rules, dtype)
