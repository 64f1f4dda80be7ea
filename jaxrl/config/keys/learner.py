"""Keys of the update, of the critic and of preference losses."""

import dataclasses

from jaxrl.config.choices import (
    AGGREGATIONS,
    F_DIVERGENCES,
    IPO_REDUCTIONS,
    LR_SCHEDULES,
    MATMUL_DTYPES,
    MOMENT_DTYPES,
    OFFLOADS,
    PIPELINE_SCHEDULES,
    PREFERENCE_LOSSES,
    PREFERENCE_TERMS,
    REFERENCE_FREE_LOSSES,
    ROUTER_REPLAYS,
    SEQUENCE_PARALLELS,
    SHARED_PREFIXES,
)
from jaxrl.config.keys.devices import RoleConfig
from jaxrl.config.schema import key


@dataclasses.dataclass(frozen=True)
class LearnerConfig:
    mini_batch_prompts: int = key(
        0, "Prompts per optimizer step (global); 0 = data.prompts_per_step", ge=0
    )
    epochs: int = key(1, "Passes over the rollouts of a step", ge=1)
    token_budget: int = key(
        8192, "Tokens per micro-batch and data-parallel rank, including padding", ge=1
    )
    buckets: tuple[int, ...] = key(
        (),
        "Allowed row lengths in tokens, ascending multiples of segment_align; () = token_budget "
        "only",
        ge=1,
    )
    halvings: int = key(
        2,
        "Number of smaller micro-batch shapes for the end of a mini-batch, each with half the rows "
        "of the one before (or half the length of a single row). Each shape is compiled",
        ge=0,
    )
    segment_align: int = key(64, "Packed sequences start at multiples of this many tokens", ge=1)
    shared_prefixes: str = key(
        "auto",
        "Compute the common prefix of sequences once per row, in multiples of segment_align: the "
        "prompt of a group, the common turns of conversations; auto = if the attention kernel "
        "supports it (all but cudnn do)",
        choices=SHARED_PREFIXES,
    )
    sequence_parallel: str = key(
        "ulysses",
        "Attention over rows sharded by mesh.sequence: ulysses = all-to-all between tokens and "
        "heads, ring = keys and values pass from device to device",
        choices=SEQUENCE_PARALLELS,
    )
    ulysses_size: int = key(
        1,
        "sequence_parallel = ring: neighbours that exchange tokens for heads, as Ulysses does, and "
        "form one place of the ring; must divide mesh.sequence and the kv heads of a tensor shard",
        ge=1,
    )
    pipeline_schedule: str = key(
        "gpipe",
        "Order of the micro-batches of mesh.stage in updates: gpipe = all forward, then all "
        "backward; 1f1b = one forward, one backward: the activations of at most 2 mesh.stage - 1 "
        "rows are kept, at the same idle time",
        choices=PIPELINE_SCHEDULES,
    )
    shard_residual: bool = key(
        True,
        "Shard the tokens of the residual stream over mesh.tensor between matrix products "
        "(Megatron's sequence parallelism): reduce-scatter and all-gather instead of all-reduce",
    )
    remat: str = key(
        "full",
        "Activations recomputed in backward: full = whole layers, offload = the same with layer "
        "inputs in host memory, attention = all but the attention kernel, mlp = all but attention "
        "and the gate and up products, dots = all but attention and matrix products, none. "
        "full?first=8 = only the first 8 layers; full?group=4 = 4 layers together",
    )
    matmul_dtype: str = key(
        "auto",
        "Dtype of the products of attention and MLPs in updates and scoring: auto (model.dtype), "
        "int8 or fp8, quantized per token and output; needs the extra qwix. Weights, optimizer, "
        "logits and losses keep their dtypes",
        choices=MATMUL_DTYPES,
    )
    offload: tuple[str, ...] = key(
        (),
        "State kept in host memory between uses: optimizer (moments and master weights), gradients "
        "(their float32 sums, between micro-batches), and the weights of policy (during rollouts "
        "that read a copy), reference, critic (a separate one), reward_model and judge (whose KV "
        "pages are freed, too). Frees device memory at the cost of transfers in every use",
        choices=OFFLOADS,
    )
    zero: int = key(
        0,
        "Training state that replicas (mesh.replica) share instead of holding a copy each: 1 = "
        "optimizer state (ZeRO-1), 2 = also the gradients summed over micro-batches (ZeRO-2). "
        "mesh.fsdp shards weights, state and gradients in any case",
        ge=0,
        le=2,
    )
    mlp_chunk: int = key(
        0,
        "Tokens of a device whose MLP is computed at one time, in updates and scoring; backward "
        "computes it again, chunk by chunk. For long rows. 0 = all tokens of a micro-batch",
        ge=0,
    )
    logprob_chunk: int = key(
        0,
        "Tokens whose logits are in memory at one time; 0 = 256 on CPU, 1024 elsewhere",
        ge=0,
    )
    router_aux_coef: float = key(
        0.0,
        "Weight of the load-balancing loss of a mixture of experts; above 0, every update counts "
        "expert loads in one more forward pass",
        ge=0,
    )
    router_bias_rate: float = key(
        0.0,
        "Change of an expert's correction bias per optimizer step, up if it had fewer tokens than "
        "the mean and down if it had more: balances experts without a loss. Only for models whose "
        "router has this bias (e_score_correction_bias, as in GLM-4.5); 0 = it stays as loaded",
        ge=0,
    )
    router_replay: str = key(
        "auto",
        "Experts of a mixture of experts in scoring and updates: R3 = those that the engine chose "
        "when it sampled a token; R2 = those that the policy chose when the old logprobs were "
        "scored; off = those that the router chooses; auto = R3 if rollout and training compute "
        "the model in different ways (other devices, dtypes, kernels or weights), else off",
        choices=ROUTER_REPLAYS,
    )
    xla: tuple[str, ...] = key(
        (),
        "Compiler options for scoring and updates: named sets (overlap, prefetch, combine; see "
        "docs/how_to/planner.md) and single options as 'xla_option=value'",
    )
    optimizer: str = key(
        "adamw",
        "adamw, adafactor, lion, muon, sgd, or an optax optimizer as 'package.module:function'; "
        "with options, 'muon?scale=shape' or 'optax:adabelief?b1=0.95'",
    )
    moment_dtype: str = key(
        "float32",
        "Dtype of the moments of adamw, lion and muon between steps: bfloat16 halves them, int8 "
        "quantizes blocks of 16 x 16 numbers",
        choices=MOMENT_DTYPES,
    )
    master_weights: bool = key(
        True,
        "Keep float32 weights of bfloat16 parameters (4 bytes each) and round the parameters from "
        "them; False updates the parameters themselves, with stochastic rounding",
    )
    lr: float = key(1e-6, "Peak learning rate", ge=0)
    lr_factors: tuple[str, ...] = key(
        (),
        "Factors of the learning rate by parameter: 'REGEX=FACTOR' over Hugging Face tensor names, "
        "of which the first that is found counts; 0 freezes",
    )
    lr_layer_decay: float = key(
        1.0,
        "Factor of the learning rate from each layer to the one below: the last layer has lr times "
        "this, the embedding the least",
        gt=0,
        le=1,
    )
    lr_schedule: str = key("constant", "Learning rate schedule after warm-up", choices=LR_SCHEDULES)
    warmup_steps: int = key(0, "Optimizer steps of linear warm-up", ge=0)
    min_lr_ratio: float = key(0.0, "Final learning rate divided by the peak", ge=0, le=1)
    b1: float = key(0.9, "AdamW beta 1", ge=0, le=1)
    b2: float = key(0.999, "AdamW beta 2", ge=0, le=1)
    eps: float = key(1e-8, "AdamW epsilon", gt=0)
    weight_decay: float = key(0.01, "Decoupled weight decay, for matrices only", ge=0)
    weight_decays: tuple[str, ...] = key(
        (),
        "Weight decay by parameter instead: 'REGEX=DECAY' over Hugging Face tensor names, of which "
        "the first that is found counts",
    )
    clip_norm: float = key(1.0, "Maximum global gradient norm; 0 = no clipping", ge=0)
    ema: float = key(
        0.0,
        "Decay per optimizer step of a float32 moving average of the weights, exported to hf_ema; "
        "0 = none",
        ge=0,
        le=1,
    )

    @property
    def replays(self) -> bool:
        """Whether updates replay experts."""
        return self.router_replay in ("R2", "R3")

    @property
    def row_lens(self) -> tuple[int, ...]:
        """Row lengths a micro-batch may have, ascending."""
        return self.buckets or (self.token_budget,)

    @property
    def shapes(self) -> tuple[tuple[int, int], ...]:
        """(rows per data-parallel rank, row length) of the micro-batch shapes, the largest last."""
        shapes = set()
        for row_len in self.row_lens:
            shape = max(self.token_budget // row_len, 1), row_len
            for _ in range(self.halvings + 1):
                shapes.add(shape)
                rows, length = shape
                if rows > 1:
                    shape = rows // 2, length
                elif len(self.row_lens) == 1 and length % (2 * self.segment_align) == 0:
                    shape = 1, length // 2
        return tuple(sorted(shapes, key=lambda shape: (shape[0] * shape[1], shape[1])))


@dataclasses.dataclass(frozen=True)
class CriticConfig:
    """The critic of algorithm.advantage = gae; all other settings are the learner's."""

    path: str = key(
        "",
        "Backbone, in any form that model.path accepts: a language model (its value head starts at "
        "zero) or a sequence classifier with one label, with the policy's tokenizer; '' = "
        "model.path",
    )
    shared: bool = key(
        False,
        "Put the value head on the policy's backbone and train it in the policy's update; then "
        "only loss_coef and value_clip of this section may be set",
    )
    loss_coef: float = key(
        0.1, "shared: weight of the value loss relative to the policy loss", gt=0
    )
    value_clip: float = key(
        0.5,
        "Maximum change of a value from that before the step; beyond it the gradient is zero; 0 = "
        "no clipping",
        ge=0,
    )
    aggregation: str = key(
        "auto",
        "Reduction of token losses to one number; auto = algorithm.aggregation",
        choices=("auto", *AGGREGATIONS),
    )
    warmup_steps: int = key(0, "First steps in which only the critic is trained", ge=0)
    lr: float = key(1e-5, "Peak learning rate", ge=0)
    weight_decay: float = key(0.01, "Decoupled weight decay, for matrices only", ge=0)
    epochs: int = key(0, "Passes over the rollouts of a step; 0 = learner.epochs", ge=0)
    remat: str = key("", "Activations recomputed in backward; '' = learner.remat")
    token_budget: int = key(
        0,
        "Tokens per micro-batch and data-parallel rank of the critic, in scoring and updates; 0 = "
        "learner.token_budget",
        ge=0,
    )
    mesh: RoleConfig = dataclasses.field(default_factory=RoleConfig)


@dataclasses.dataclass(frozen=True)
class PreferenceConfig:
    loss: str = key("dpo", "Loss over preference pairs", choices=PREFERENCE_LOSSES)
    more_losses: tuple[str, ...] = key(
        (),
        "Losses added to preference.loss, such as bco_pair and sft (MPO); sft is the negative log "
        "likelihood of chosen answers, a mean over tokens",
        choices=PREFERENCE_TERMS,
    )
    loss_weights: tuple[float, ...] = key(
        (), "Weights of preference.loss and of each of preference.more_losses; () = 1 each", gt=0
    )
    beta: float = key(
        0.1,
        "Strength of the constraint to the reference model (ipo: tau; simpo, cpo: scale of the "
        "logprobs; orpo: weight of the odds ratio)",
        gt=0,
    )
    label_smoothing: float = key(
        0.0,
        "Assumed probability that a pair's labels are swapped: dpo (cDPO), robust (below 0.5), "
        "exo_pair (above 0), aot, aot_unpaired, simpo, cpo",
        ge=0,
        le=0.5,
    )
    ipo_reduction: str = key(
        "sum",
        "ipo, cpo_ipo: log ratio of an answer as the sum over its tokens (the paper's equation) or "
        "as their mean (the paper's experiments according to TRL, and TRL's ipo)",
        choices=IPO_REDUCTIONS,
    )
    f_divergence: str = key(
        "reverse_kl",
        "Divergence from the reference model that beta weights: f-DPO, for losses of a difference "
        "of log ratios",
        choices=F_DIVERGENCES,
    )
    f_alpha: float = key(0.5, "f_divergence=alpha: its exponent; 1 is the reverse KL", gt=0)
    ld_alpha: float = key(
        1.0,
        "Weight of the tokens beyond the length of the shorter answer of a pair: LD-DPO; 1 = off, "
        "0 = they do not count",
        ge=0,
        le=1,
    )
    weighted: bool = key(
        False,
        "Weight each pair by how likely both of its answers are under the policy (WPO)",
    )
    alphapo_alpha: float = key(
        0.0,
        "simpo, cpo: exponent of the reward (1 - p^-alpha) / alpha in place of log p (AlphaPO); "
        "0 = log p",
    )
    simpo_gamma: float = key(0.5, "simpo: margin between the scaled mean logprobs", ge=0)
    cpo_alpha: float = key(
        1.0, "cpo, cpo_hinge, cpo_ipo: weight of the term of chosen answers", ge=0
    )
    discopop_tau: float = key(0.05, "discopop: temperature of the modulation", gt=0)
    chosen_weight: float = key(1.0, "kto, bco, apo_zero_unpaired: weight of chosen answers", gt=0)
    rejected_weight: float = key(
        1.0, "kto, bco, apo_zero_unpaired: weight of rejected answers", gt=0
    )
    margin_weight: float = key(
        0.0,
        "Reward models: factor of the column `margin`, by which the chosen answer's score must "
        "exceed the other; 0 = the column is not read",
        ge=0,
    )
    center_coef: float = key(
        0.0,
        "Reward models: coefficient of (score of chosen + score of rejected)² in the loss, which "
        "centers scores at 0",
        ge=0,
    )

    @property
    def names(self) -> tuple[str, ...]:
        """The losses of the sum."""
        return (self.loss, *self.more_losses)

    @property
    def terms(self) -> tuple[tuple[str, float], ...]:
        """Each loss of the sum and its weight."""
        weights = self.loss_weights or (1.0,) * len(self.names)
        return tuple(zip(self.names, weights, strict=True))

    @property
    def has_reference(self) -> bool:
        return not set(self.names) <= set(REFERENCE_FREE_LOSSES)
