"""The towers of Qwen3-VL, with deepstack (https://arxiv.org/abs/2511.21631), and of Qwen3.5.

Learned positions are stretched over the image, and heads are rotated by row and column as well.
Definition: transformers' model types `qwen3_vl_vision` and `qwen3_5_vision`.
"""

from typing import Any

from jaxrl.models.config import MLPConfig
from jaxrl.models.families import entries
from jaxrl.models.families.fields import ACTIVATIONS, ConfigJson, read_activation
from jaxrl.models.files.hf_config import ADVICE
from jaxrl.models.vision.config import ImageAttentionConfig, MergerConfig, TowerConfig, TowerNames

DEFAULTS: dict[str, Any] = dict(
    depth=27,
    hidden_size=1152,
    hidden_act="gelu_pytorch_tanh",
    intermediate_size=4304,
    num_heads=16,
    in_channels=3,
    patch_size=16,
    spatial_merge_size=2,
    temporal_patch_size=2,
    out_hidden_size=3584,
    num_position_embeddings=2304,
)
DEEPSTACK = (8, 16, 24)  # transformers' default for Qwen3-VL
ROPE = frozenset({"rope_parameters", "rope_theta"})
DEEPSTACK_FAMILIES = ("qwen3_vl", "qwen3_vl_moe")
FAMILIES = (*DEEPSTACK_FAMILIES, "qwen3_5", "qwen3_5_moe")
VISION_TYPES = (*FAMILIES, *(f"{name}_vision" for name in FAMILIES))
ENTRIES = entries.Entries(
    classes=(),
    read=frozenset({*DEFAULTS, "deepstack_visual_indexes", "model_type"}) | ROPE,
)
NORMS = ("norm1", None, "norm2", None)
PREFIX = "model.visual."
NAMES = TowerNames(
    patch=f"{PREFIX}patch_embed.proj",
    table=f"{PREFIX}pos_embed.weight",
    block=f"{PREFIX}blocks.",
    norms=NORMS,
    qkv=("attn.qkv",),
    out="attn.proj",
    merger=f"{PREFIX}merger.",
    deepstack=f"{PREFIX}deepstack_merger_list.",
)
DEFAULT_THETA = 10_000.0


def from_hf(config: ConfigJson) -> TowerConfig:
    """Raises ValueError for positions that are no square."""
    c = DEFAULTS | dict(config["vision_config"])
    family = config["model_type"]
    has_deepstack = family in DEEPSTACK_FAMILIES
    deepstack = c.get("deepstack_visual_indexes", DEEPSTACK if has_deepstack else ())
    if deepstack and not has_deepstack:
        raise ValueError(
            f"deepstack_visual_indexes is {list(deepstack)}, which transformers ignores in "
            f"{family} models; remove it from vision_config"
        )
    n_positions = c["num_position_embeddings"]
    table = int(n_positions**0.5)
    if table**2 != n_positions:
        raise ValueError(
            f"num_position_embeddings is {n_positions}, which is not a square; use the model's "
            "own config.json"
        )
    return TowerConfig(
        family,
        L=c["depth"],
        D=c["hidden_size"],
        attn=read_attention(c),
        ffn=plain_mlp(c, "linear_fc1", "linear_fc2"),
        out_D=c["out_hidden_size"],
        patch=c["patch_size"],
        patch_shape=image_and_frames(c),
        merge=c["spatial_merge_size"],
        merger=MergerConfig("mlp", "norm", ("linear_fc1", "linear_fc2")),
        names=NAMES,
        positions="stretched",
        table=table,
        deepstack=tuple(deepstack),
    )


def plain_mlp(c: ConfigJson, up: str, down: str) -> MLPConfig:
    """The MLP of a block, without a gate."""
    act = read_activation(c, "hidden_act")
    names = ("mlp", "", up, down)
    return MLPConfig(c["intermediate_size"], act, bias=True, gated=False, names=names)


def image_and_frames(c: ConfigJson) -> tuple[int, int, int, int]:
    """The shape of a patch; an image is repeated to a number of frames."""
    return c["in_channels"], c["temporal_patch_size"], c["patch_size"], c["patch_size"]


def read_attention(c: ConfigJson) -> ImageAttentionConfig:
    """Attention with rotated heads. Raises ValueError if heads do not divide the features."""
    N = c["num_heads"]
    return ImageAttentionConfig(N, head_size(c["hidden_size"], N), theta=read_theta(c))


def head_size(D: int, N: int) -> int:
    """Features of a head. Raises ValueError unless the heads divide the features."""
    if D % N:
        raise ValueError(f"{D} features do not divide over {N} heads; {ADVICE}")
    return D // N


def read_theta(c: ConfigJson, default: float = DEFAULT_THETA) -> float:
    """The base of the rotation. Raises ValueError for a rotation of another kind."""
    rope = dict(c.get("rope_parameters") or {})
    theta = rope.pop("rope_theta", c.get("rope_theta", default))
    kind = rope.pop("rope_type", rope.pop("type", "axial"))
    if kind not in ("axial", "default") or rope:  # transformers takes "default" as "axial"
        raise ValueError(
            f"rope_parameters of vision_config have the type {kind!r} and the entries "
            f"{sorted(rope)}; only rope_theta and the type 'axial' are supported"
        )
    return float(theta)


def to_hf(cfg: TowerConfig) -> dict[str, Any]:
    deepstack = dict(deepstack_visual_indexes=list(cfg.deepstack))
    vision = qwen_json(cfg) | dict(num_position_embeddings=cfg.table**2)
    return dict(vision_config=vision | (deepstack if cfg.family in DEEPSTACK_FAMILIES else {}))


def qwen_json(cfg: TowerConfig) -> dict[str, Any]:
    """The entries of vision_config that Qwen's towers share."""
    channels, frames, patch, _ = cfg.patch_shape
    return dict(
        model_type=f"{cfg.family}_vision",
        depth=cfg.L,
        hidden_size=cfg.D,
        hidden_act=activation_name(cfg),
        intermediate_size=cfg.ffn.F,
        num_heads=cfg.attn.N,
        in_channels=channels,
        patch_size=patch,
        spatial_merge_size=cfg.merge,
        temporal_patch_size=frames,
        out_hidden_size=cfg.out_D,
        rope_parameters=dict(rope_type="axial", rope_theta=cfg.attn.theta),
    )


def activation_name(cfg: TowerConfig) -> str:
    return next(theirs for theirs, ours in ACTIVATIONS.items() if ours == cfg.ffn.act)
