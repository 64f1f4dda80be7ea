"""The tower of Qwen2.5-VL, whose attention is over windows in most blocks.

Source: https://arxiv.org/abs/2502.13923; transformers' model type `qwen2_5_vl_vision`.
"""

from typing import Any

from jaxrl.models.config import MLPConfig
from jaxrl.models.families import entries
from jaxrl.models.families.fields import ConfigJson, read_activation
from jaxrl.models.vision import qwen3_vl
from jaxrl.models.vision.config import MergerConfig, NormConfig, TowerConfig, TowerNames

DEFAULTS: dict[str, Any] = dict(
    depth=32,
    hidden_size=3584,
    hidden_act="silu",
    intermediate_size=3420,
    num_heads=16,
    in_channels=3,
    patch_size=14,
    spatial_merge_size=2,
    temporal_patch_size=2,
    window_size=112,
    out_hidden_size=3584,
    fullatt_block_indexes=(7, 15, 23, 31),
)
VISION_TYPES = ("qwen2_5_vl", "qwen2_5_vl_vision")
ENTRIES = entries.Entries(
    classes=(),
    read=frozenset({*DEFAULTS, "model_type"}) | qwen3_vl.ROPE,
    # of the positions of videos; names that transformers does not read
    neutral=frozenset({"tokens_per_second", "spatial_patch_size"}),
    neutral_at={"in_chans": (3,)},
)
RMS = NormConfig(rms=True)
PREFIX = "visual."
NAMES = TowerNames(
    patch=f"{PREFIX}patch_embed.proj",
    table=None,
    block=f"{PREFIX}blocks.",
    norms=qwen3_vl.NORMS,
    qkv=("attn.qkv",),
    out="attn.proj",
    merger=f"{PREFIX}merger.",
)


def from_hf(config: ConfigJson) -> TowerConfig:
    """Raises ValueError for windows that are no whole tokens."""
    c = DEFAULTS | dict(config["vision_config"])
    size, token = c["window_size"], c["patch_size"] * c["spatial_merge_size"]
    if size < token or size % token:
        raise ValueError(
            f"window_size is {size} pixels, no multiple of the {token} of a token; use the "
            "model's own config.json"
        )
    return TowerConfig(
        "qwen2_5_vl",
        L=c["depth"],
        D=c["hidden_size"],
        attn=qwen3_vl.read_attention(c),
        ffn=MLPConfig(c["intermediate_size"], read_activation(c, "hidden_act"), bias=True),
        out_D=c["out_hidden_size"],
        patch=c["patch_size"],
        patch_shape=qwen3_vl.image_and_frames(c),
        merge=c["spatial_merge_size"],
        merger=MergerConfig("mlp", "ln_q", ("mlp.0", "mlp.2"), norm=RMS),
        names=NAMES,
        norm=RMS,
        patch_bias=False,
        window=size // token,
        full_layers=tuple(c["fullatt_block_indexes"]),
    )


def to_hf(cfg: TowerConfig) -> dict[str, Any]:
    pixels = cfg.window * cfg.merge * cfg.patch
    own = dict(window_size=pixels, fullatt_block_indexes=list(cfg.full_layers))
    return dict(vision_config=qwen3_vl.qwen_json(cfg) | own)
