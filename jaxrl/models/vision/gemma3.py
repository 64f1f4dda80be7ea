"""The tower of Gemma 3, SigLIP (https://arxiv.org/abs/2303.15343), and its projector.

All images have one size. The projector takes the mean of the features of k x k patches, an RMSNorm
and a matrix. Definition: transformers' model types `siglip_vision_model` and `gemma3`.
"""

from typing import Any

from jaxrl.models.families import entries
from jaxrl.models.families.fields import ConfigJson
from jaxrl.models.files.hf_entries import wrong
from jaxrl.models.vision.config import (
    ImageAttentionConfig,
    MergerConfig,
    NormConfig,
    TowerConfig,
    TowerNames,
)
from jaxrl.models.vision.qwen3_vl import activation_name, head_size, plain_mlp

DEFAULTS: dict[str, Any] = dict(
    hidden_size=768,
    intermediate_size=3072,
    num_hidden_layers=12,
    num_attention_heads=12,
    num_channels=3,
    image_size=224,
    patch_size=16,
    hidden_act="gelu_pytorch_tanh",
    layer_norm_eps=1e-6,
)
TOKENS = 256  # transformers' default of mm_tokens_per_image
TEXT_WIDTH = 2304  # its default of hidden_size in text_config
VISION_TYPES = ("siglip_vision_model",)
ENTRIES = entries.Entries(
    classes=(),
    read=frozenset({*DEFAULTS, "model_type"}),
    neutral=frozenset({"vision_use_head"}),  # gemma3 does not read the output of the head
)
TOWER = "vision_tower."
NAMES = TowerNames(
    patch=f"{TOWER}embeddings.patch_embedding",
    table=f"{TOWER}embeddings.position_embedding.weight",
    block=f"{TOWER}encoder.layers.",
    norms=("layer_norm1", None, "layer_norm2", None),
    qkv=("self_attn.q_proj", "self_attn.k_proj", "self_attn.v_proj"),
    out="self_attn.out_proj",
    final_norm=f"{TOWER}post_layernorm",
    merger="multi_modal_projector.",
)


def from_hf(config: ConfigJson) -> TowerConfig:
    """Raises ValueError for images that are no whole patches or no whole tokens."""
    c = DEFAULTS | dict(config["vision_config"])
    size, patch, n = c["image_size"], c["patch_size"], config.get("mm_tokens_per_image", TOKENS)
    if type(n) is not int or n < 1:
        raise wrong("mm_tokens_per_image", n, "an integer above 0")
    table, side = size // patch, int(n**0.5)
    if size % patch or side**2 != n or table % side:
        raise ValueError(
            f"an image of {size} pixels, patches of {patch} and mm_tokens_per_image={n} give no "
            "square of tokens with whole patches; use the model's own config.json"
        )
    D, N, eps = c["hidden_size"], c["num_attention_heads"], float(c["layer_norm_eps"])
    return TowerConfig(
        "gemma3",
        L=c["num_hidden_layers"],
        D=D,
        attn=ImageAttentionConfig(N, head_size(D, N)),
        ffn=plain_mlp(c, "fc1", "fc2"),
        out_D=(config.get("text_config") or {}).get("hidden_size", TEXT_WIDTH),
        patch=patch,
        patch_shape=(c["num_channels"], patch, patch),
        merge=table // side,
        merger=MergerConfig(
            "mean",
            "mm_soft_emb_norm",
            ("mm_input_projection_weight",),
            norm=NormConfig(rms=True, eps=eps, unit_offset=True),
            transposed=True,
        ),
        names=NAMES,
        norm=NormConfig(eps=eps),
        positions="fixed",
        table=table,
        rows_first=True,
    )


def to_hf(cfg: TowerConfig) -> dict[str, Any]:
    vision = dict(
        model_type="siglip_vision_model",
        hidden_size=cfg.D,
        intermediate_size=cfg.ffn.F,
        num_hidden_layers=cfg.L,
        num_attention_heads=cfg.attn.N,
        num_channels=cfg.patch_shape[0],
        image_size=cfg.table * cfg.patch,
        patch_size=cfg.patch,
        hidden_act=activation_name(cfg),
        layer_norm_eps=cfg.norm.eps,
        vision_use_head=False,
    )
    tokens = (cfg.table // cfg.merge) ** 2
    return dict(vision_config=vision, mm_tokens_per_image=tokens)
