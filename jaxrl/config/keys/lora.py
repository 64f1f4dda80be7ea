"""Keys of low-rank adapters."""

import dataclasses

from jaxrl.config.choices import ADAPTER_INITS, BASE_DTYPES
from jaxrl.config.schema import key


@dataclasses.dataclass(frozen=True)
class LoRAConfig:
    rank: int = key(
        0, "Rank of the adapters of linear layers; 0 = no adapters, all weights are trained", ge=0
    )
    alpha: float = key(16.0, "Scale of the adapters: alpha / rank, or alpha / sqrt(rank)", gt=0)
    rslora: bool = key(
        False, "Scale by alpha / sqrt(rank) (rank-stabilized LoRA) instead of alpha / rank"
    )
    dora: bool = key(
        False,
        "Train the magnitude of every output's weights separately from their direction "
        "(weight-decomposed LoRA, DoRA)",
    )
    init: str = key(
        "default",
        "Start of new adapters: default (A is random, B is zero) or pissa (the principal singular "
        "values and vectors of the weight). The model is the base at the start with both",
        choices=ADAPTER_INITS,
    )
    target_modules: tuple[str, ...] = key(
        ("all-linear",),
        "Linear layers with adapters: all-linear, names such as q_proj, or regular expressions "
        "over names such as self_attn.q_proj. all-linear leaves out the experts of a mixture of "
        "experts: name their projections too, such as gate_proj, up_proj and down_proj. It also "
        "leaves out the embedding table and the unembedding, embed_tokens and lm_head, and "
        "shared_expert_gate",
    )
    exclude_modules: tuple[str, ...] = key(
        (), "Names or regular expressions of linear layers without adapters"
    )
    merge: bool = key(
        False,
        "The engine reads W + scale B A, computed once per update: decoding is as fast as without "
        "adapters, for a copy of the adapted weights and logprobs that differ in rounding. False = "
        "the engine reads base and adapters from training's arrays",
    )
    base_dtype: str = key(
        "auto",
        "Storage of the frozen matrices of the layers: auto (model.dtype), int8 with a scale per "
        "output, or nf4, 4-bit NormalFloat in blocks of 64 (QLoRA)",
        choices=BASE_DTYPES,
    )
    path: str = key(
        "",
        "Folder of an adapter in PEFT's format to continue from; its rank, alpha and target "
        "modules must be those of this section; '' = new adapters, which start at zero",
    )
