"""The tower of Gemma 4 and its projector.

Norms are before and after attention and the MLP; queries, keys and values are normalized, and
positions are learned by row and by column. A token is the mean of k x k patches. In E2B and E4B
the linear layers of blocks have limits. Definition: transformers' model type `gemma4_vision`.
"""

from typing import Any

from jaxrl.models.config import BOTH_NORMS, MLPConfig
from jaxrl.models.families import entries
from jaxrl.models.families.fields import ConfigJson, read_activation
from jaxrl.models.vision.config import (
    ImageAttentionConfig,
    MergerConfig,
    NormConfig,
    TowerConfig,
    TowerNames,
)
from jaxrl.models.vision.qwen3_vl import ROPE, activation_name, read_theta

DEFAULTS: dict[str, Any] = dict(
    hidden_size=768,
    intermediate_size=3072,
    num_hidden_layers=16,
    num_attention_heads=12,
    num_key_value_heads=12,
    head_dim=64,
    hidden_activation="gelu_pytorch_tanh",
    rms_norm_eps=1e-6,
    pooling_kernel_size=3,
    patch_size=16,
    position_embedding_size=10 * 1024,
    use_clipped_linears=False,
)
DEFAULT_THETA = 100.0
TEXT_WIDTH = 2304  # transformers' default of hidden_size in text_config
VISION_TYPES = ("gemma4_vision",)
ENTRIES = entries.Entries(
    classes=(),
    read=frozenset({*DEFAULTS, "standardize", "model_type"}) | ROPE,
    # the number of tokens is the image processor's; transformers reads no global_head_dim here
    neutral=frozenset({"max_position_embeddings", "default_output_length", "global_head_dim"}),
)
# The parts of the projector are in both folders of names.
PREFIX, TOWER = "model.", "vision_tower."
MLP_NAMES = ("mlp", "gate_proj.linear", "up_proj.linear", "down_proj.linear")
NAMES = TowerNames(
    patch=f"{PREFIX}{TOWER}patch_embedder.input_proj",
    table=f"{PREFIX}{TOWER}patch_embedder.position_embedding_table",
    block=f"{PREFIX}{TOWER}encoder.layers.",
    norms=BOTH_NORMS,
    qkv=("self_attn.q_proj.linear", "self_attn.k_proj.linear", "self_attn.v_proj.linear"),
    out="self_attn.o_proj.linear",
    merger=PREFIX,
)
STANDARD = (f"{TOWER}std_bias", f"{TOWER}std_scale")


def from_hf(config: ConfigJson) -> TowerConfig:
    """Raises ValueError for fewer heads of keys and values than of queries."""
    c = DEFAULTS | dict(config["vision_config"])
    N, D, patch = c["num_attention_heads"], c["hidden_size"], c["patch_size"]
    if (K := c["num_key_value_heads"]) != N:
        raise ValueError(
            f"num_key_value_heads of vision_config is {K}, and only that of {N} query heads is "
            "supported; use a model with as many"
        )
    norm = NormConfig(rms=True, eps=float(c["rms_norm_eps"]), round_last=True)
    clipped, act = c["use_clipped_linears"], read_activation(c, "hidden_activation")
    return TowerConfig(
        "gemma4",
        L=c["num_hidden_layers"],
        D=D,
        attn=ImageAttentionConfig(
            N,
            c["head_dim"],
            bias=False,
            theta=read_theta(c, DEFAULT_THETA),
            by_halves=True,
            qk_norms=("self_attn.q_norm", "self_attn.k_norm"),
            scale=1.0,
            clipped=clipped,
        ),
        ffn=MLPConfig(c["intermediate_size"], act, clipped=clipped, names=MLP_NAMES),
        out_D=(config.get("text_config") or {}).get("hidden_size", TEXT_WIDTH),
        patch=patch,
        patch_shape=(3 * patch**2,),
        merge=c["pooling_kernel_size"],
        merger=MergerConfig(
            "mean",
            None,
            ("embed_vision.embedding_projection",),
            norm=norm,
            scale=D**0.5,
            standard=STANDARD if c.get("standardize") else None,
        ),
        names=NAMES,
        norm=norm,
        positions="axes",
        table=c["position_embedding_size"],
        rows_first=True,
        patch_bias=False,
        center=0.5,
        gain=2.0,
    )


def to_hf(cfg: TowerConfig) -> dict[str, Any]:
    vision = dict(
        model_type="gemma4_vision",
        hidden_size=cfg.D,
        intermediate_size=cfg.ffn.F,
        num_hidden_layers=cfg.L,
        num_attention_heads=cfg.attn.N,
        num_key_value_heads=cfg.attn.N,
        head_dim=cfg.attn.H,
        hidden_activation=activation_name(cfg),
        rms_norm_eps=cfg.norm.eps,
        rope_parameters=dict(rope_type="axial", rope_theta=cfg.attn.theta),
        pooling_kernel_size=cfg.merge,
        patch_size=cfg.patch,
        position_embedding_size=cfg.table,
        standardize=cfg.merger.standard is not None,
        use_clipped_linears=cfg.attn.clipped,
    )
    return dict(vision_config=vision)
