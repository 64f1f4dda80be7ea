"""Vision towers: a transformer over the patches of images, and its projector to the decoder.

B rows, P patches, D features of the tower, N heads, H head dim, F tokens of the decoder. A row has
the patches of several images one after the other (patches.py). Attention is within an image, or
within windows of it, and has no causal mask.
"""

import functools
import math
from collections.abc import Callable, Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from flax import nnx
from jax.ad_checkpoint import checkpoint_name
from jaxtyping import Array, Float, Int

from jaxrl.config.remat import parse_remat
from jaxrl.kernels.attention.segments import attention_in_segments
from jaxrl.kernels.attention_spec import AttentionSpec
from jaxrl.models.layers.attention import prevent_norm_fusion
from jaxrl.models.layers.linear import Linear, MakeParam, apply_linears, make_spec
from jaxrl.models.layers.mlp import MLP
from jaxrl.models.layers.norms import LayerNorm, RMSNorm
from jaxrl.models.layers.rope import Rotation, rotate
from jaxrl.models.remat import layer_input, loop_remat, recompute
from jaxrl.models.vision.config import ImageAttentionConfig, TowerConfig
from jaxrl.models.vision.patches import PatchRows
from jaxrl.models.vision.projector import MeanMerger, MLPMerger, image_norm
from sharding import Rules, gather_matrix


class TowerBlock(nnx.Module):
    """x + attention(norm(x)), then x + mlp(norm(x)); of some families, outputs have norms too."""

    def __init__(self, make: MakeParam, cfg: TowerConfig):
        def norm(name: str | None) -> RMSNorm | LayerNorm | None:
            return None if name is None else image_norm(make, name, cfg.D, cfg.norm)

        before, after, before_mlp, after_mlp = cfg.names.norms
        self.attn_norm, self.post_attn_norm = norm(before), norm(after)
        self.mlp_norm, self.post_mlp_norm = norm(before_mlp), norm(after_mlp)
        self.attn = ImageAttention(make, cfg)
        self.mlp = MLP(make, cfg.options(cfg.names.block), cfg.ffn)

    def __call__(
        self,
        x: Float[Array, "B P D"],
        segments: Int[Array, "B P"],
        places: Int[Array, "B P 2"] | None,
        rules: Rules,
    ) -> Float[Array, "B P D"]:
        assert self.attn_norm is not None
        assert self.mlp_norm is not None
        h = self.attn(self.attn_norm(x), segments, places, rules)
        x = x + (h if self.post_attn_norm is None else self.post_attn_norm(h))
        h = self.mlp(self.mlp_norm(x), rules)
        return x + (h if self.post_mlp_norm is None else self.post_mlp_norm(h))


class ImageAttention(nnx.Module):
    """Multi-head attention within segments; heads are rotated by the row and column of patches."""

    def __init__(self, make: MakeParam, cfg: TowerConfig):
        attn, D = cfg.attn, cfg.D
        options: Any = dict(bias=attn.bias, lora=cfg.options(cfg.names.block).lora)
        options["clipped"] = attn.clipped
        N, H = attn.N, attn.H
        fused = len(cfg.names.qkv) == 1
        shape, axes = (N, 3 * H if fused else H, D), ("heads", None, "w_embed")
        blocks = (H, H, H) if fused else ()
        self.cfg = attn
        self.qkv = nnx.List(
            [
                Linear(make, name, "BTD,NHD->BTNH", shape, axes, blocks=blocks, **options)
                for name in cfg.names.qkv
            ]
        )
        axes = ("w_embed", "heads", None)
        self.out = Linear(make, cfg.names.out, "BTNH,DNH->BTD", (D, N, H), axes, **options)
        q, k = attn.qk_norms or (None, None)
        normed = attn.qk_norms is not None
        self.q_norm = image_norm(make, q, H, cfg.norm) if normed else None
        self.k_norm = image_norm(make, k, H, cfg.norm) if normed else None
        self.v_norm = image_norm(make, None, H, cfg.norm) if normed else None

    def __call__(
        self,
        x: Float[Array, "B P D"],
        segments: Int[Array, "B P"],
        places: Int[Array, "B P 2"] | None,
        rules: Rules,
    ) -> Float[Array, "B P D"]:
        parts = checkpoint_name(apply_linears(x, *self.qkv, rules=rules), "qkv")
        q, k, v = parts if len(parts) == 3 else jnp.split(parts[0], 3, axis=-1)
        if self.q_norm is not None and self.k_norm is not None and self.v_norm is not None:
            q, k, v = (prevent_norm_fusion(one) for one in (q, k, v))
            q, k, v = self.q_norm(q), self.k_norm(k), self.v_norm(v)
        if places is not None:
            q, k = (rotate_in_plane(one, places, self.cfg) for one in (q, k))
        spec = AttentionSpec(self.cfg.score_scale, None, rules)
        out = attention_in_segments(q, k, v, spec=spec, segments=segments)
        return checkpoint_name(self.out(out, rules), "o")


def rotate_in_plane(
    x: Float[Array, "B P N H"], places: Int[Array, "B P 2"], cfg: ImageAttentionConfig
) -> Float[Array, "B P N H"]:
    """Rotates half of the feature pairs by the row of a patch, and half of them by its column.

    A pair is (x[i], x[i + H/2]), and the first half of the pairs have the row. With `by_halves`,
    the two halves of x are rotated as heads of H/2, the first one by the column.
    """
    *rest, H = x.shape
    half = H // 2
    inv_freq = np.float32(cfg.theta) ** (-np.arange(0, half, 2, dtype=np.float32) / half)
    row, column = places[..., 0], places[..., 1]
    if cfg.by_halves:
        parts, order = jnp.split(x, 2, axis=-1), (column, row)
    else:
        pairs = jnp.split(x.reshape(*rest, 2, half), 2, axis=-1)
        parts, order = [one.reshape(*rest, half) for one in pairs], (row, column)
    turned = [rotate(one, at, Rotation(inv_freq)) for one, at in zip(parts, order, strict=True)]
    if not cfg.by_halves:
        turned = [one.reshape(*rest, 2, half // 2) for one in turned]
    return jnp.concatenate(turned, axis=-1).reshape(x.shape)


class Tower(nnx.Module):
    """Embedding of patches and positions, L blocks, the projector and those of deepstack.

    `tower_specs` builds its parameter table.
    """

    def __init__(self, cfg: TowerConfig):
        names, top = cfg.names, make_spec("")
        self.cfg = cfg
        patch = in_file_shape(top, f"{names.patch}.weight", (cfg.D, *cfg.patch_shape))
        shape, axes = (cfg.D, cfg.patch_features), ("w_embed", None)
        options: Any = dict(bias=cfg.patch_bias)
        self.patch = Linear(patch, names.patch, "BTC,DC->BTD", shape, axes, **options)
        n, axes = math.prod(cfg.table_shape[:-1]), (None, "w_embed")
        shape = cfg.table_shape
        name = names.table
        made = None if name is None else top(name, (n, cfg.D), axes, hf_shape=shape)
        self.table = nnx.data(made)
        self.blocks = nnx.List(
            [TowerBlock(make_spec(_numbered(names.block, i)), cfg) for i in range(cfg.L)]
        )
        last = names.final_norm
        self.final_norm = None if last is None else image_norm(top, last, cfg.D, cfg.norm)
        merger = MeanMerger if cfg.merger.kind == "mean" else MLPMerger
        self.merger = merger(make_spec(names.merger), cfg, names.merger)
        part = names.deepstack
        self.deepstack = nnx.List(
            [
                MLPMerger(make_spec(_numbered(part, i)), cfg, part, joined=True)
                for i in range(len(cfg.deepstack))
            ]
        )

    def __call__(
        self, rows: PatchRows, *, rules: Rules, remat: str = "none"
    ) -> tuple[Float[Array, "B F O"], tuple[Float[Array, "B F O"], ...]]:
        """(features of the tokens of all images, those for the decoder's first layers).

        The tokens of a row are those of its images, one after the other; the tokens of padding
        follow. `remat` is config.learner.remat (jaxrl/config/remat.py).
        """
        rows = jax.tree.map(lambda a: jax.reshard(a, rules.spec("batch", "time")), rows)
        x = self.embed_patches(rows, rules)
        x, outputs = self._run_blocks(x, rows, rules, remat)
        mergers = dict(zip(self.cfg.deepstack, self.deepstack, strict=True))
        deep = [self._in_order(mergers[i](outputs[i], rules), rows, rules) for i in sorted(mergers)]
        x = x if self.final_norm is None else self.final_norm(x)
        return self._in_order(self.merger(x, rules), rows, rules), tuple(deep)

    def embed_patches(self, rows: PatchRows, rules: Rules) -> Float[Array, "B P D"]:
        """Input of the first block: patches, and the weighted mean of learned positions."""
        w: Any = self.patch.w  # never quantized
        x = self.patch(rows.patches.astype(w.dtype), rules)
        if self.table is None:
            return x
        table = gather_matrix(self.table, rules, (None, "w_embed"), 1).astype(jnp.float32)
        out = rules.spec("batch", "time", None, "embed")
        found = table.at[rows.taps].get(out_sharding=out) * rows.weights[..., None]
        return x + jax.reshard(found.sum(2).astype(x.dtype), jax.typeof(x).sharding.spec)

    def _run_blocks(
        self, x: Float[Array, "B P D"], rows: PatchRows, rules: Rules, remat: str
    ) -> tuple[Float[Array, "B P D"], Sequence[Any]]:
        """(output of the last block, outputs of all blocks that deepstack reads)."""
        cfg = self.cfg

        def step(policy: str) -> Callable:
            def run(x, block: TowerBlock, segments, places):
                return block(layer_input(x, policy), segments, places, rules)

            run = jax.jit(recompute(run, policy))  # blocks of equal shapes are traced once

            def one(carry, block: TowerBlock, i: int):
                segments = rows.segments if cfg.sees_image(i) else rows.windows
                x = run(carry[0], block, segments, rows.places)
                return (x, None), x if i in cfg.deepstack else None

            return one

        (x, _), outputs = loop_remat(step, (x, None), list(self.blocks), parse_remat(remat))
        return x, outputs

    def _in_order(
        self, x: Float[Array, "B F O"], rows: PatchRows, rules: Rules
    ) -> Float[Array, "B F O"]:
        """Tokens in the order of the decoder's placeholders."""
        if rows.order is None:
            return x
        whole, by_row = rules.spec("batch", None, "embed"), rules.spec("batch", None)
        ordered = jax.shard_map(
            lambda x, order: jnp.take_along_axis(x, order[..., None], axis=1),
            in_specs=(whole, by_row),
            out_specs=whole,
        )(jax.reshard(x, whole), jax.reshard(rows.order, by_row))
        return jax.reshard(ordered, rules.spec("batch", "time", "embed"))


def _numbered(name: str, i: int) -> str:
    """The name of the i-th part, before its own parts."""
    return f"{name}{i}."


def in_file_shape(make: MakeParam, name: str, hf_shape: tuple[int, ...]) -> MakeParam:
    """`make`, which gives the parameter of this name another shape in files."""

    def make_part(part, shape, axes, **options) -> Any:
        if part == name:
            options["hf_shape"] = hf_shape
        return make(part, shape, axes, **options)

    return make_part


@functools.cache
def tower_specs(cfg: TowerConfig) -> Tower:
    """The tower as a tree of ParamSpecs. All callers share one tree per config."""
    return Tower(cfg)
