"""Vision towers: a transformer over the patches of images, and its projector to the decoder.

B rows, P patches, D features of the tower, N heads, H head dim, F tokens of the decoder. A row has
the patches of several images one after the other (patches.py). Attention is within an image, or
within windows of it, and has no causal mask.
"""

import functools
from collections.abc import Callable, Sequence
from typing import Any

import jax
import jax.numpy as jnp
from flax import nnx
from jax.ad_checkpoint import checkpoint_name
from jaxtyping import Array, Float, Int

from jaxrl.config.remat import parse_remat
from jaxrl.kernels.attention.segments import attention_in_segments
from jaxrl.kernels.attention_spec import AttentionSpec
from jaxrl.models.layers.linear import Linear, MakeParam, apply_linears, make_spec
from jaxrl.models.layers.mlp import ACTIVATIONS, MLP
from jaxrl.models.layers.norms import LayerNorm, RMSNorm
from jaxrl.models.layers.rope import Rotation, rotate
from jaxrl.models.remat import layer_input, loop_remat, recompute
from jaxrl.models.vision.config import TowerConfig
from jaxrl.models.vision.patches import PatchRows
from sharding import Rules, gather_matrix


class Block(nnx.Module):
    """x + attention(norm(x)), then x + mlp(norm(x))."""

    def __init__(self, make: MakeParam, cfg: TowerConfig, part: str):
        options = cfg.options(part)
        self.attn_norm, self.mlp_norm = (_norm(make, name, cfg, cfg.D) for name in cfg.names.norms)
        self.attn = ImageAttention(make, cfg, part)
        self.mlp = MLP(make, options, cfg.ffn)

    def __call__(
        self,
        x: Float[Array, "B P D"],
        segments: Int[Array, "B P"],
        places: Int[Array, "B P 2"] | None,
        rules: Rules,
    ) -> Float[Array, "B P D"]:
        x = x + self.attn(self.attn_norm(x), segments, places, rules)
        return x + self.mlp(self.mlp_norm(x), rules)


class ImageAttention(nnx.Module):
    """Multi-head attention within segments; heads are rotated by the row and column of patches."""

    def __init__(self, make: MakeParam, cfg: TowerConfig, part: str):
        options: Any = dict(bias=True, lora=cfg.options(part).lora)
        N, H, D = cfg.N, cfg.H, cfg.D
        self.theta, self.H = cfg.theta, H
        fused = len(cfg.names.qkv) == 1
        into, axes = (3 * H if fused else H), ("heads", None, "w_embed")
        if fused:
            options["blocks"] = (H, H, H)
        self.qkv = nnx.List(
            [
                Linear(make, name, "BTD,NHD->BTNH", (N, into, D), axes, **options)
                for name in cfg.names.qkv
            ]
        )
        options["blocks"] = ()
        axes = ("w_embed", "heads", None)
        self.out = Linear(make, cfg.names.out, "BTNH,DNH->BTD", (D, N, H), axes, **options)

    def __call__(
        self,
        x: Float[Array, "B P D"],
        segments: Int[Array, "B P"],
        places: Int[Array, "B P 2"] | None,
        rules: Rules,
    ) -> Float[Array, "B P D"]:
        parts = checkpoint_name(apply_linears(x, *self.qkv, rules=rules), "qkv")
        q, k, v = parts if len(parts) == 3 else jnp.split(parts[0], 3, axis=-1)
        if self.theta is not None and places is not None:
            q, k = (rotate_in_plane(one, places, self.theta) for one in (q, k))
        spec = AttentionSpec(self.H**-0.5, None, rules)
        out = attention_in_segments(q, k, v, spec=spec, segments=segments)
        return checkpoint_name(self.out(out, rules), "o")


def rotate_in_plane(
    x: Float[Array, "B P N H"], places: Int[Array, "B P 2"], theta: float
) -> Float[Array, "B P N H"]:
    """Rotates the first half of the feature pairs by the row of a patch, the others by its column.

    A pair is (x[i], x[i + H/2]); both halves of the pairs have the frequencies of a head of H/2.
    """
    *rest, H = x.shape
    half = H // 2
    inv_freq = 1.0 / theta ** (jnp.arange(0, half, 2, dtype=jnp.float32) / half)
    row, column = jnp.split(x.reshape(*rest, 2, half), 2, axis=-1)
    turned = [
        rotate(pairs.reshape(*rest, half), places[..., axis], Rotation(inv_freq))
        for axis, pairs in enumerate((row, column))
    ]
    parts = [one.reshape(*rest, 2, half // 2) for one in turned]
    return jnp.concatenate(parts, axis=-1).reshape(x.shape)


class Merger(nnx.Module):
    """The features of merge x merge patches as one token of the decoder (`MergerConfig`).

    The norm is one of each patch, or `joined` one of all patches of a token.
    """

    def __init__(self, make: MakeParam, cfg: TowerConfig, part: str, *, joined: bool = False):
        merger, D = cfg.merger, cfg.merged_D
        self.n, self.joined, self.mean = cfg.merge**2, joined, merger.kind == "mean"
        name = cfg.names.merger_norm
        if merger.rms:
            how = dict(eps=cfg.eps, unit_offset=merger.unit_offset)
            self.norm = RMSNorm(make, name, cfg.D, **how)
        else:
            self.norm = LayerNorm(make, name, D if joined else cfg.D, eps=cfg.eps, bias=True)
        self.linears, self.w = nnx.List([]), nnx.data(None)
        if self.mean:
            shape, axes = (cfg.D, cfg.out_D), (None, "w_embed")
            self.w = nnx.data(make(merger.names[0], shape, axes))
            return
        options: Any = dict(bias=True, lora=cfg.options(part).lora)
        first, second = merger.names
        self.linears = nnx.List(
            [
                Linear(make, first, "BTD,FD->BTF", (D, D), ("ffw", "w_embed"), **options),
                Linear(make, second, "BTF,DF->BTD", (cfg.out_D, D), ("w_embed", "ffw"), **options),
            ]
        )

    def __call__(self, x: Float[Array, "B P D"], rules: Rules) -> Float[Array, "B F O"]:
        out = rules.spec("batch", "time", "embed")
        if self.mean:
            pooled = self.norm(self._groups(x, rules).astype(jnp.float32).mean(2).astype(x.dtype))
            w = jax.reshard(self.w, rules.gathered(None, "w_embed"))
            return jnp.einsum("BTD,DO->BTO", pooled, w, out_sharding=out)
        x = x if self.joined else self.norm(x)
        groups = self._groups(x, rules)
        flat = (*groups.shape[:2], groups.shape[2] * groups.shape[3])
        x = jnp.reshape(groups, flat, out_sharding=out)
        x = self.norm(x) if self.joined else x
        first, second = self.linears
        return jax.reshard(second(ACTIVATIONS["gelu"](first(x, rules)), rules), out)

    def _groups(self, x: Float[Array, "B P D"], rules: Rules) -> Float[Array, "B F n D"]:
        """The patches of each token."""
        B, P, D = x.shape
        out = rules.spec("batch", "time", None, "embed")
        x = jax.reshard(x, rules.spec("batch", "time", "embed"))
        return jnp.reshape(x, (B, P // self.n, self.n, D), out_sharding=out)


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
        table = (cfg.table**2, cfg.D)
        made = top(f"{names.table}.weight", table, (None, "w_embed"), hf_shape=table)
        self.table = nnx.data(made if cfg.table else None)
        self.blocks = nnx.List(
            [Block(make_spec(_numbered(names.block, i)), cfg, names.block) for i in range(cfg.L)]
        )
        self.final_norm = names.final_norm and _norm(top, names.final_norm, cfg, cfg.D)
        self.merger = Merger(make_spec(names.merger), cfg, names.merger)
        self.deepstack = nnx.List(
            [
                Merger(make_spec(_numbered(names.deepstack, i)), cfg, names.deepstack, joined=True)
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
        x = self.embed_patches(rows, rules)
        x, outputs = self._run_blocks(x, rows, rules, remat)
        mergers = dict(zip(self.cfg.deepstack, self.deepstack, strict=True))
        deep = [self._in_order(mergers[i](outputs[i], rules), rows, rules) for i in sorted(mergers)]
        x = x if self.final_norm is None else self.final_norm(x)
        return self._in_order(self.merger(x, rules), rows, rules), tuple(deep)

    def embed_patches(self, rows: PatchRows, rules: Rules) -> Float[Array, "B P D"]:
        """Input of the first block: patches, and the weighted mean of learned positions."""
        x = self.patch(rows.patches.astype(self.patch.w.dtype), rules)
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
            def run(x, block: Block, segments, places):
                return block(layer_input(x, policy), segments, places, rules)

            run = jax.jit(recompute(run, policy))  # blocks of equal shapes are traced once

            def one(carry, block: Block, i: int):
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
        whole = jax.reshard(x, rules.spec("batch", None, "embed"))
        ordered = jnp.take_along_axis(whole, rows.order[..., None], axis=1)
        return jax.reshard(ordered, rules.spec("batch", "time", "embed"))


def _numbered(name: str, i: int) -> str:
    """The name of the i-th part, before its own parts."""
    return f"{name}{i}."


def _norm(make: MakeParam, name: str, cfg: TowerConfig, dim: int) -> RMSNorm | LayerNorm:
    if cfg.rms:
        return RMSNorm(make, name, dim, eps=cfg.eps, unit_offset=False)
    return LayerNorm(make, name, dim, eps=cfg.eps, bias=True)


def in_file_shape(make: MakeParam, name: str, hf_shape: tuple[int, ...]) -> MakeParam:
    """`make`, which gives the parameter of this name another shape in files."""

    def make_part(part, shape, axes, **options) -> Any:
        return make(
            part, shape, axes, **options | (dict(hf_shape=hf_shape) if part == name else {})
        )

    return make_part


@functools.cache
def tower_specs(cfg: TowerConfig) -> Tower:
    """The tower as a tree of ParamSpecs. All callers share one tree per config."""
    return Tower(cfg)
