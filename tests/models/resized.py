"""Decoders of tests with other sizes."""

import dataclasses
from typing import Any

from jaxrl.models.config import DecoderConfig, MoEConfig, uniform_decoder

MODEL_FIELDS = {field.name for field in dataclasses.fields(DecoderConfig)} - {"layers"}


def resized(cfg: DecoderConfig, **changes: Any) -> DecoderConfig:
    """The decoder with changed arguments of `uniform_decoder`."""
    mixer, ffn = cfg.layers[0].mixer, cfg.layers[0].ffn
    mixers = [layer.mixer for layer in cfg.layers]
    found = {name: getattr(cfg, name) for name in MODEL_FIELDS} | dict(
        L=cfg.L,
        N=mixer.N,
        K=mixer.K,
        H=mixer.H,
        rope=next((one.rope for one in mixers if not one.window), mixer.rope),
        local_rope=next((one.rope for one in mixers if one.window), None),
        windows=windows(cfg) if "L" not in changes else (),
        qkv_bias=mixer.qkv_bias,
        o_bias=mixer.o_bias,
        qk_norm=mixer.qk_norm,
        attn_scale=mixer.scale,
        attn_softcap=mixer.softcap,
        qkv_fused=mixer.qkv_fused,
        joint_norm=mixer.joint_norm,
        norms=cfg.layers[0].norms,
        parallel=cfg.layers[0].parallel,
        act=ffn.act,
    )
    if isinstance(ffn, MoEConfig):
        experts = dict(E=ffn.E, top_k=ffn.top_k, F_expert=ffn.F, shared_F=ffn.shared_F)
        found |= dict(F=found.pop("dense_F"), norm_topk=ffn.router.norm, **experts)
    else:
        found |= dict(F=ffn.F, mlp_bias=ffn.bias, mlp_gated=ffn.gated, mlp_fused=ffn.fused)
    return uniform_decoder(**(found | changes))


def windows(cfg: DecoderConfig) -> tuple[int, ...]:
    """The window of every layer; 0 = none."""
    return tuple(layer.mixer.window for layer in cfg.layers)
