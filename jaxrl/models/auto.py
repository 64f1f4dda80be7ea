"""What "auto" means for a model on a platform."""

import dataclasses

import jax.numpy as jnp

from jaxrl.config.keys import RunConfig
from jaxrl.models.config import DecoderConfig


def for_platform(
    cfg: RunConfig, decoder: DecoderConfig, platform: str
) -> tuple[jnp.dtype, DecoderConfig]:
    """(dtype of weights and activations, decoder with its layers as a list or stacked, and its heads and
    experts' kernel as configured)."""
    dtype, layers = cfg.model.dtype, cfg.model.layers
    if dtype == "auto":
        dtype = "float32" if platform == "cpu" else "bfloat16"
    if layers == "auto":
        layers = "stacked" if platform == "tpu" or cfg.mesh.stage != 1 else "list"
    heads = ("vocab", "score") if cfg.critic.shared else ("vocab",)
    return jnp.dtype(dtype), dataclasses.replace(
        decoder,
        heads=heads,
        stacked=layers == "stacked",
        grouped_matmul=cfg.model.grouped_matmul,
    )
