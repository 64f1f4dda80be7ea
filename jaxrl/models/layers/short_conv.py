"""Gated short convolution: a layer whose memory of a sequence is its last few tokens."""

from typing import Any

import jax
import jax.numpy as jnp
from flax import nnx
from jax.ad_checkpoint import checkpoint_name

from jaxrl.models.config import DecoderConfig
from jaxrl.models.layers.linear import Linear, MakeParam
from jaxrl.models.layers.row_ops import LayerPlace, RowOps
from jaxrl.models.state_mixers import ShortConvConfig
from sharding import Rules


class ShortConv(nnx.Module):
    """Wo (c * conv(b * x)) with b, c, x = Wi h, as in LFM2 (https://arxiv.org/abs/2511.23404).

    The convolution is causal and depthwise. Features are in blocks, which are sharded as heads are.
    The caller passes the operations on rows, as for attention.
    """

    def __init__(self, make: MakeParam, cfg: DecoderConfig, mixer: ShortConvConfig):
        options: Any = dict(bias=mixer.bias, lora=cfg.lora, base_dtype=cfg.base_dtype)
        N, H = mixer.N, mixer.H
        # Of one block: its b, its c, its x. In files, all b are first, then all c, then all x.
        self.into = Linear(
            make,
            "conv.in_proj",
            "BTD,NCD->BTNC",
            (N, 3 * H, cfg.D),
            ("heads", None, "w_embed"),
            blocks=(H, H, H),
            **options,
        )
        self.o = Linear(
            make,
            "conv.out_proj",
            "BTNH,DNH->BTD",
            (cfg.D, N, H),
            ("w_embed", "heads", None),
            **options,
        )
        taps, axes = (N, H, mixer.conv_len), ("heads", None, None)
        file_shape = (N * H, 1, mixer.conv_len)
        self.conv = nnx.data(make("conv.conv.weight", taps, axes, hf_shape=file_shape))
        bias = dict(init="zeros", hf_shape=(N * H,))
        self.bias = nnx.data(
            make("conv.conv.bias", taps[:2], axes[:2], **bias) if mixer.bias else None
        )

    def __call__(self, x, positions, place: LayerPlace, window, rows: RowOps, state, rules: Rules):
        b, c, h = jnp.split(checkpoint_name(self.into(x, rules), "qkv"), 3, axis=-1)
        w = jax.reshard(self.conv, rules.gathered("heads", None, None))
        out, state = rows.convolve(b * h, w, place.cache, state)
        if self.bias is not None:
            out = out + jax.reshard(self.bias, rules.gathered("heads", None))
        return checkpoint_name(self.o(c * out, rules), "o"), state
