"""The architecture of a decoder: one frozen dataclass describes every family."""

import dataclasses

import jax.numpy as jnp

from jaxrl.config.keys import RunConfig
from jaxrl.config.remat import parse_remat
from jaxrl.kernels.attention_spec import AttentionSpec
from jaxrl.kernels.choice import check_kernels
from sharding import Rules

ROPE_KINDS = ("default", "linear", "dynamic", "llama3", "yarn")


@dataclasses.dataclass(frozen=True)
class Rope:
    """Rotary embedding of one kind of layer: base period and frequency scaling."""

    theta: float = 10_000.0
    kind: str = "default"  # one of ROPE_KINDS
    factor: float = 1.0
    low_freq_factor: float = 1.0  # llama3
    high_freq_factor: float = 4.0  # llama3
    original_len: int = 8192  # llama3 and yarn: tokens of the sequences before the extension
    beta_fast: float = 32.0  # yarn
    beta_slow: float = 1.0  # yarn
    truncate: bool = True  # yarn: the transition begins and ends at whole feature pairs
    attention_factor: float = 1.0  # of rotated queries and of rotated keys


@dataclasses.dataclass(frozen=True)
class LoRA:
    """Low-rank adapters of linear layers (https://arxiv.org/abs/2106.09685): W x + scale B A x."""

    rank: int
    alpha: float
    rslora: bool = False  # https://arxiv.org/abs/2312.03732
    dora: bool = False  # https://arxiv.org/abs/2402.09353
    targets: tuple[str, ...] = ()  # last parts of the names of the layers: "q_proj", ...
    pissa: bool = (
        False  # A and B start at the principal part of W: https://arxiv.org/abs/2404.02948
    )
    # Adapters of `rank` next to each other, one per token; some of them may have magnitudes (dora).
    n_stacked: int = 0  # 0 = one adapter for all tokens

    @property
    def scale(self) -> float:
        return self.alpha / (self.rank**0.5 if self.rslora else self.rank)


@dataclasses.dataclass(frozen=True)
class DecoderConfig:
    """L layers, D model, N query heads, K kv heads, H head dim, F feed-forward, V vocabulary."""

    family: str  # key of FAMILIES in models/files/hf_config.py: "llama", "qwen2", ...
    L: int
    D: int
    N: int
    K: int
    H: int
    F: int
    V: int
    E: int = 0  # experts; 0 = a dense model
    top_k: int = 0  # experts per token
    F_expert: int = 0  # feed-forward width of one expert
    norm_topk: bool = True  # normalize the weights of a token's experts to sum to 1
    norm_eps: float = 1e-6
    rope: Rope = Rope()
    local_rope: Rope | None = None  # of layers with a window, if it differs (Gemma 3)
    windows: tuple[int, ...] = ()  # per layer: visible keys including the token's own; 0 = all
    heads: tuple[str, ...] = ("vocab",)  # "vocab": logits; "score": one number per token
    tied: bool = False  # the unembedding is the embedding
    qkv_bias: bool = False
    o_bias: bool = False
    mlp_bias: bool = False
    qk_norm: bool = False
    post_norms: bool = False  # second norm after attention and after the MLP (Gemma)
    unit_offset: bool = False  # norms scale by 1 + w (Gemma)
    act: str = "silu"  # "silu" | "gelu_tanh"
    attn_scale: float | None = None  # None: H ** -0.5
    attn_softcap: float | None = None
    logit_softcap: float | None = None
    embed_scale: float = 1.0
    max_len: int = 2048
    grouped_matmul: str = "auto"  # implementation of the experts' matmuls; see kernels/
    lora: LoRA | None = None  # adapters, next to the base weights
    base_dtype: str = ""  # of frozen matrices: "" (the model's) | "int8" | "nf4"
    stacked: bool = False  # layers are stacked on a leading axis and scanned (TPU), else a list

    @property
    def context_len(self) -> int:
        """Tokens of the longest sequence that the model supports."""
        if "dynamic" in (self.rope.kind, (self.local_rope or self.rope).kind):
            return self.max_len  # longer ones change the frequencies
        extended = self.rope.original_len * self.rope.factor if self.rope.kind == "yarn" else 0
        return max(self.max_len, int(extended))

    @property
    def scale(self) -> float:
        return self.H**-0.5 if self.attn_scale is None else self.attn_scale

    def attention_spec(self, rules: Rules) -> AttentionSpec:
        return AttentionSpec(self.scale, self.attn_softcap, rules)

    def window(self, layer: int) -> int:
        return self.windows[layer] if self.windows else 0

    def layer_rope(self, layer: int) -> Rope:
        return self.local_rope if self.local_rope and self.window(layer) else self.rope


def for_platform(
    cfg: RunConfig, decoder: DecoderConfig, platform: str
) -> tuple[jnp.dtype, DecoderConfig]:
    """(dtype of weights and activations, decoder with its runtime fields), with "auto" resolved.

    "auto" is float32 on CPU and bfloat16 elsewhere; layers are stacked on TPU, in pipelines and
    with activations in host memory, else a list. Raises ValueError for a kernel of another
    platform.
    """
    kernels = ("attention", "paged_attention", "grouped_matmul")
    check_kernels({f"config.model.{key}": getattr(cfg.model, key) for key in kernels}, platform)
    dtype, layers = cfg.model.dtype, cfg.model.layers
    if dtype == "auto":
        dtype = "float32" if platform == "cpu" else "bfloat16"
    if layers == "auto":
        scanned = platform == "tpu" or cfg.mesh.stage != 1
        layers = "stacked" if scanned or parse_remat(cfg.learner.remat).offloads else "list"
    heads = ("vocab", "score") if cfg.critic.shared else ("vocab",)
    return jnp.dtype(dtype), dataclasses.replace(
        decoder, heads=heads, stacked=layers == "stacked", grouped_matmul=cfg.model.grouped_matmul
    )
