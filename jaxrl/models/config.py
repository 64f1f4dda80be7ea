"""The architecture of a decoder: frozen dataclasses describe the layers of every family."""

import dataclasses
import functools
from collections.abc import Sequence
from typing import Any, ClassVar, Protocol, runtime_checkable

import jax.numpy as jnp

from jaxrl.config.choices import ONE_LABEL
from jaxrl.config.keys import RunConfig
from jaxrl.config.remat import parse_remat
from jaxrl.kernels.attention_spec import AttentionSpec
from jaxrl.kernels.choice import check_kernels
from jaxrl.models.layer_runs import layer_runs
from jaxrl.models.mla_config import MLAConfig
from jaxrl.models.rope_config import LONG_ROPE, PLAIN_ROPE, Rope
from jaxrl.models.shared_kv import SharedKV
from jaxrl.models.state_mixers import GatedDeltaNetConfig, ShortConvConfig
from sharding import Rules

# Names in files of a layer's norms: before and after the mixer, before and after the ffn.
NormNames = tuple[str | None, str | None, str | None, str | None]
# Names in files of an MLP, and of its matrices; the gate's is empty in one without.
MLPNames = tuple[str, str, str, str]
MLP_NAMES: MLPNames = ("mlp", "gate_proj", "up_proj", "down_proj")
PLAIN_MLP_NAMES: MLPNames = ("mlp", "", "c_fc", "c_proj")
PRE_NORMS: NormNames = ("input_layernorm", None, "post_attention_layernorm", None)
POST_NORMS: NormNames = (None, "post_attention_layernorm", None, "post_feedforward_layernorm")
BOTH_NORMS: NormNames = (
    "input_layernorm",
    "post_attention_layernorm",
    "pre_feedforward_layernorm",
    "post_feedforward_layernorm",
)


@dataclasses.dataclass(frozen=True)
class LoRA:
    """Low-rank adapters of linear layers (https://arxiv.org/abs/2106.09685): W x + scale B A x."""

    rank: int
    alpha: float
    rslora: bool = False  # https://arxiv.org/abs/2312.03732
    dora: bool = False  # https://arxiv.org/abs/2402.09353
    targets: tuple[str, ...] = ()  # `target_name` of the layers: "q_proj", ...
    pissa: bool = (
        False  # A and B start at the principal part of W: https://arxiv.org/abs/2404.02948
    )
    # Adapters of `rank` next to each other, one per token; some of them may have magnitudes (dora).
    n_stacked: int = 0  # 0 = one adapter for all tokens

    @property
    def scale(self) -> float:
        return self.alpha / (self.rank**0.5 if self.rslora else self.rank)


@runtime_checkable
class LinearOptions(Protocol):
    """The entries of a model's config that linear layers of the model dimension take."""

    @property
    def D(self) -> int: ...

    @property
    def lora(self) -> LoRA | None: ...

    @property
    def base_dtype(self) -> str: ...


def target_name(layer: str) -> str:
    """The name by which adapters choose a layer: its last part, and two of a shared expert.

    So "gate_proj" is one of the experts, or of a dense layer, and "shared_expert.gate_proj" is not.
    Experts next to an MLP are not part of it, and have two parts too: "experts.gate_proj". So have
    the layers of Gemma 4's tower: "q_proj.linear".
    """
    parts = layer.split(".")
    two = {"shared_expert", "shared_experts"} & set(parts) or parts[0] == "experts"
    two = two or parts[-1] == "linear"
    return ".".join(parts[-2 if two else -1 :])


@dataclasses.dataclass(frozen=True)
class AttentionConfig:
    """Grouped-query attention of one layer: N query heads, K kv heads, H head dim."""

    N: int
    K: int
    H: int
    rope: Rope = PLAIN_ROPE
    window: int = 0  # visible keys including the token's own; 0 = all
    qkv_bias: bool = False
    o_bias: bool = False
    qkv_fused: bool = False  # one projection of queries, keys and values
    qk_norm: bool = False  # of every head of queries and keys, before the rotation
    joint_norm: bool = False  # the norm of queries is one of all heads, and so is that of keys
    norm_weights: bool = True  # of the norms of queries and keys
    v_norm: bool = False  # of every head of values, without weights
    gate: bool = False  # the output is multiplied by sigmoid(gate)
    gate_in_q: bool = True  # the gate is a second half of q_proj, not of gate_proj
    sinks: bool = False  # a logit of every head in its softmax, without a value
    k_eq_v: bool = False  # values are the keys before their norm and rotation: no v_proj
    shared: SharedKV | None = None  # keys and values that several layers use
    # In files: the output projection, and the norms of queries and of keys.
    names: tuple[str, str, str] = ("o_proj", "q_norm", "k_norm")
    scale: float | None = None  # of the scores; None: H ** -0.5
    softcap: float | None = None  # of the scores
    whole_images: bool = False  # the tokens of an image see each other

    def spec(self, rules: Rules) -> AttentionSpec:
        return AttentionSpec(self.score_scale, self.softcap, rules, self.whole_images)

    @property
    def score_scale(self) -> float:
        return self.H**-0.5 if self.scale is None else self.scale

    @property
    def head_features(self) -> int:
        """Features of all query heads and kv heads."""
        return (self.N + self.K) * self.H

    @property
    def reads_kv(self) -> bool:
        """Whether the keys and values are those of an earlier layer, which has their pages."""
        return self.shared is not None and self.shared.reads

    @property
    def weight_rows(self) -> int:
        """Rows of D weights that a token is multiplied with."""
        n_kv = 0 if self.reads_kv else 2 - self.k_eq_v
        return (2 + self.gate) * self.N * self.H + n_kv * self.K * self.H

    @property
    def kind(self) -> "AttentionConfig":
        """The same without the values that may differ between layers with equal parameters."""
        names = ("rotary", "interleaved", "query_growth", "mrope_section", "mrope_chunked")
        rope = Rope(**{name: getattr(self.rope, name) for name in names})
        if self.rope.query_growth:
            rope = dataclasses.replace(rope, original_len=self.rope.original_len)
        return dataclasses.replace(self, rope=rope, window=0)


@dataclasses.dataclass(frozen=True)
class ClampedGLU:
    """g sigmoid(alpha g) (u + 1) with the gate g at most `limit`, and u in [-limit, limit]."""

    limit: float = 7.0
    alpha: float = 1.702


@dataclasses.dataclass(frozen=True)
class MLPConfig:
    """Feed-forward network of one layer, F wide, with a gate in most families."""

    F: int
    act: str = "silu"  # key of ACTIVATIONS in layers/mlp.py
    bias: bool = False
    gated: bool = True  # act(gate) * up, not act(up)
    fused: bool = False  # one projection of gate and up
    names: MLPNames = MLP_NAMES
    clipped: bool = False  # inputs and outputs of its linear layers have limits

    @property
    def n_matrices(self) -> int:
        """Matrices of F x D weights."""
        return 2 + self.gated

    @property
    def active_features(self) -> int:
        """Width of what one token uses."""
        return self.F

    @property
    def dense_features(self) -> int:
        """Width of what every token uses."""
        return self.F

    @property
    def gate_rows(self) -> int:
        """Rows of D weights that choose or scale the network of a token."""
        return 0


@dataclasses.dataclass(frozen=True)
class RouterConfig:
    """Choice of the top_k experts of a token, and their weights (layers/router.py)."""

    top_k: int
    score: str = "softmax"  # of an expert's logit: "softmax" over all experts | "sigmoid"
    norm: bool = True  # normalize the weights of a token's experts to sum to 1
    correction: bool = False  # a bias of every expert, which counts in the choice only
    n_groups: int = 1  # of experts next to each other; a token chooses in top_groups of them
    top_groups: int = 1
    scale: float = 1.0  # of the weights
    learned_scales: bool = False  # reads the normalized, scaled residual; every expert has a scale


@dataclasses.dataclass(frozen=True)
class MoEConfig:
    """Mixture of E experts of one layer, each F wide; a token uses top_k of them.

    Next to them there may be a shared expert, which every token uses.
    """

    E: int
    router: RouterConfig
    F: int
    act: str | ClampedGLU = "silu"
    bias: bool = False  # of the router's logits and of every expert's products
    shared_F: int = 0  # width of the shared expert; 0 = none
    shared_gate: bool = True  # the shared expert's output is multiplied by a sigmoid of its gate
    shared_name: str = ""  # in files; "": mlp.shared_expert, or its plural without a gate
    names: str = "qwen3_moe"  # of the tensors in files: key of HF_NAMES in layers/moe.py
    # Names of norms of the experts' input, of their output, and of the shared expert's output.
    norms: tuple[str | None, str | None, str | None] = (None, None, None)
    n_matrices: ClassVar[int] = 3  # of every expert

    @property
    def top_k(self) -> int:
        """Experts of a token, without the shared one."""
        return self.router.top_k

    @property
    def active_features(self) -> int:
        """Width of what one token uses."""
        return self.top_k * self.F + self.shared_F

    @property
    def dense_features(self) -> int:
        """Width of what every token uses."""
        return self.shared_F

    @property
    def gate_rows(self) -> int:
        """Rows of D weights that choose or scale the network of a token."""
        return self.E + bool(self.shared_F and self.shared_gate)


@dataclasses.dataclass(frozen=True)
class LayerConfig:
    """One residual block: what mixes tokens, and what is applied to each of them."""

    mixer: AttentionConfig | MLAConfig | GatedDeltaNetConfig | ShortConvConfig
    ffn: MLPConfig | MoEConfig
    norms: NormNames = PRE_NORMS
    parallel: bool = False  # mixer and ffn have the same input, and its norm
    scalar: bool = False  # the output is multiplied by a number of the file, which is not trained

    @property
    def kind(self) -> "LayerConfig":
        """Equal for layers that can be stacked: same parameters and same computation."""
        return dataclasses.replace(self, mixer=self.mixer.kind)


@dataclasses.dataclass(frozen=True)
class DecoderConfig:
    """D model, V vocabulary, and a description of every layer."""

    family: str  # key of FAMILIES in models/files/hf_config.py: "llama", "qwen2", ...
    D: int
    V: int
    layers: tuple[LayerConfig, ...]
    norm_eps: float = 1e-6
    unit_offset: bool = False  # norms scale by 1 + w (Gemma)
    layer_norm: bool = False  # norms subtract the mean
    norm_bias: bool = False  # layer_norm: with a bias
    norm_rounds_last: bool = False  # norms scale by w before they round
    final_norm: str = "model.norm"  # its name in files
    final_unit_offset: bool | None = None  # unit_offset of the final norm, if it differs
    post_norm_eps: float | None = None  # of norms after the mixer and the ffn, if it differs
    embed_norm: bool = False  # the embedding is normalized, without weights
    heads: tuple[str, ...] = ("vocab",)  # "vocab": logits; "score": values or labels per token
    labels: tuple[str, ...] = ONE_LABEL  # names of the outputs of the head "score"
    tied: bool = False  # the unembedding is the embedding
    logit_softcap: float | None = None
    logit_scale: float = 1.0  # of the input of the heads
    embed_scale: float = 1.0
    residual_scale: float = 1.0  # of what a layer's mixer and ffn add
    max_len: int = 2048
    input_P: int = 0  # features of the inputs of each layer by token (layers/layer_inputs.py)
    input_V: int = 0  # tokens that have them
    input_pad: int = 0  # the token whose inputs those of images have
    dense_F: int = 0  # intermediate_size of a file in which every layer has experts; unused
    grouped_matmul: str = "auto"  # implementation of the experts' matmuls; see kernels/
    gated_delta: str = "auto"  # implementation of decode steps of gated DeltaNet; see kernels/
    lora: LoRA | None = None  # adapters, next to the base weights
    base_dtype: str = ""  # of frozen matrices: "" (the model's) | "int8" | "nf4"
    tower: Any = None  # TowerConfig of a vision tower that is trained; None: it is not a part
    stacked: bool = False  # equal layers are stacked on a leading axis and scanned, else a list

    def __hash__(self) -> int:
        """Reads few fields: the hash of all layers takes longer than a formula of the planner."""
        return hash((self.family, self.D, self.V, self.L, self.stacked, self.base_dtype))

    @property
    def L(self) -> int:
        return len(self.layers)

    @property
    def context_len(self) -> int:
        """Tokens of the longest sequence that the model supports."""
        mixers = self.paged_layers
        if any(mixer.rope.kind == "dynamic" for mixer in mixers):
            return self.max_len  # longer ones change the frequencies
        if lens := [mixer.rope.original_len for mixer in mixers if mixer.rope.kind == LONG_ROPE]:
            return min(self.max_len, *lens)
        whole = [mixer for mixer in mixers if not mixer.window] or mixers
        yarn = [mixer.rope for mixer in whole if mixer.rope.kind == "yarn"]
        return max([self.max_len, *(int(rope.original_len * rope.factor) for rope in yarn)])

    @property
    def attention_layers(self) -> list[AttentionConfig]:
        """The attention of the layers that have one, in order."""
        return [layer.mixer for layer in self.layers if isinstance(layer.mixer, AttentionConfig)]

    @property
    def paged_layers(self) -> list[AttentionConfig | MLAConfig]:
        """The mixers with KV pages, in order."""
        kinds = (AttentionConfig, MLAConfig)
        return [layer.mixer for layer in self.layers if isinstance(layer.mixer, kinds)]

    @functools.cached_property
    def delta_layers(self) -> list[GatedDeltaNetConfig]:
        """The gated DeltaNet of the layers that have one, in order."""
        return [
            layer.mixer for layer in self.layers if isinstance(layer.mixer, GatedDeltaNetConfig)
        ]

    @functools.cached_property
    def state_layers(self) -> list[GatedDeltaNetConfig | ShortConvConfig]:
        """The mixers with a state of constant size, in order."""
        kinds = (GatedDeltaNetConfig, ShortConvConfig)
        return [layer.mixer for layer in self.layers if isinstance(layer.mixer, kinds)]

    @functools.cached_property
    def expert_layers(self) -> list[MoEConfig]:
        """The mixtures of experts in order of the layers; none in a dense model."""
        return [layer.ffn for layer in self.layers if isinstance(layer.ffn, MoEConfig)]

    @property
    def runs(self) -> tuple[tuple[range, ...], ...]:
        """The layers as runs of a repeating period; see `layer_runs`."""
        return layer_runs(tuple(layer.kind for layer in self.layers))

    @property
    def n_periods(self) -> int:
        """Repetitions of the period of all layers, which a pipeline divides; 1 if none repeats."""
        return len(self.runs[0][0]) if len(self.runs) == 1 else 1

    def window(self, layer: int) -> int:
        return self.layers[layer].mixer.window


def uniform_decoder(
    family: str,
    *,
    L: int,
    D: int,
    N: int,
    K: int,
    H: int,
    F: int,
    V: int,
    E: int = 0,
    top_k: int = 0,
    F_expert: int = 0,
    norm_topk: bool = True,
    shared_F: int = 0,
    rope: Rope = PLAIN_ROPE,
    local_rope: Rope | None = None,
    windows: Sequence[int] = (),
    qkv_bias: bool = False,
    o_bias: bool = False,
    mlp_bias: bool = False,
    qkv_fused: bool = False,
    qk_norm: bool = False,
    joint_norm: bool = False,
    mlp_fused: bool = False,
    mlp_gated: bool = True,
    norms: NormNames = PRE_NORMS,
    parallel: bool = False,
    act: str = "silu",
    attn_scale: float | None = None,
    attn_softcap: float | None = None,
    whole_images: bool = False,
    **model: Any,
) -> DecoderConfig:
    """L layers that differ in their windows only, and in the rotary embedding of those with one.

    Args:
      F: width of the MLPs; with E experts per layer, those have the width F_expert.
      shared_F: width of a shared expert next to them; 0 = none.
      local_rope: of layers with a window, if it differs (Gemma 3).
      windows: of each layer; () = no layer has one.
      model: the fields that DecoderConfig has for all layers.
    """
    names = MLP_NAMES if mlp_gated else PLAIN_MLP_NAMES
    ffn: MLPConfig | MoEConfig = MLPConfig(F, act, mlp_bias, mlp_gated, mlp_fused, names)
    if E:
        router = RouterConfig(top_k, norm=norm_topk)
        ffn = MoEConfig(E, router, F_expert, act, shared_F=shared_F, names=family)
        model["dense_F"] = F
    layers = []
    for window in windows or (0,) * L:
        mixer = AttentionConfig(
            N=N,
            K=K,
            H=H,
            rope=local_rope if local_rope and window else rope,
            window=window,
            qkv_bias=qkv_bias,
            o_bias=o_bias,
            qkv_fused=qkv_fused,
            qk_norm=qk_norm,
            joint_norm=joint_norm,
            scale=attn_scale,
            softcap=attn_softcap,
            whole_images=whole_images,
        )
        layers.append(LayerConfig(mixer, ffn, norms, parallel))
    return DecoderConfig(family, D, V, tuple(layers), **model)


def for_platform(
    cfg: RunConfig, decoder: DecoderConfig, platform: str
) -> tuple[jnp.dtype, DecoderConfig]:
    """(dtype of weights and activations, decoder with its runtime fields), with "auto" resolved.

    "auto" is float32 on CPU and bfloat16 elsewhere; layers are stacked on TPU, in pipelines and
    with activations in host memory, else a list. Raises ValueError for a kernel of another
    platform.
    """
    kernels = ("attention", "paged_attention", "gated_delta", "grouped_matmul")
    check_kernels({f"config.model.{key}": getattr(cfg.model, key) for key in kernels}, platform)
    dtype, layers = cfg.model.dtype, cfg.model.layers
    if dtype == "auto":
        dtype = "float32" if platform == "cpu" else "bfloat16"
    if layers == "auto":
        scanned = platform == "tpu" or cfg.mesh.stage != 1
        layers = "stacked" if scanned or parse_remat(cfg.learner.remat).offloads else "list"
    heads = ("vocab", "score") if cfg.critic.shared else ("vocab",)
    return jnp.dtype(dtype), dataclasses.replace(
        decoder,
        heads=heads,
        stacked=layers == "stacked",
        grouped_matmul=cfg.model.grouped_matmul,
        gated_delta=cfg.model.gated_delta,
    )
