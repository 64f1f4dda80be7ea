"""Keys of sampling, of the engine and of validation."""

import dataclasses

from jaxrl.config.choices import ENGINES, KV_DTYPES, ROLLOUT_DTYPES, ROLLOUT_LAYOUTS
from jaxrl.config.schema import key


@dataclasses.dataclass(frozen=True)
class SamplingConfig:
    temperature: float = key(1.0, "Divisor of the logits; 0 = greedy", ge=0)
    top_k: int = key(0, "Sample from the k most likely tokens only; 0 = off", ge=0)
    top_p: float = key(
        1.0,
        "Sample from the smallest set of most likely tokens with this total probability; 1 = off",
        gt=0,
        le=1,
    )
    min_p: float = key(
        0.0,
        "Sample only tokens with at least this fraction of the highest probability; 0 = off",
        ge=0,
        le=1,
    )
    stop: tuple[str, ...] = key(
        (), "Strings that end a response, in addition to the end-of-sequence token"
    )
    stop_token_ids: tuple[int, ...] = key(
        (),
        "Token ids that end a response, in addition to the tokenizer's and the checkpoint's",
        ge=0,
    )

    @property
    def filters(self) -> dict[str, int | float]:
        """The keys that truncate the distribution, with their values."""
        filters = {"top_k": (self.top_k, 0), "top_p": (self.top_p, 1), "min_p": (self.min_p, 0)}
        return {name: value for name, (value, off) in filters.items() if value != off}


@dataclasses.dataclass(frozen=True)
class RolloutConfig:
    n: int = key(8, "Samples per prompt (the group of GRPO)", ge=1)
    engines: str = key(
        "auto",
        "With several processes: process = one engine per process, on a copy of the weights over "
        "its own devices; mesh = one engine over the whole mesh; auto = process if an engine "
        "replica (with layout = training: the devices of mesh.stage, mesh.sequence and "
        "mesh.tensor) fits inside one process",
        choices=ENGINES,
    )
    layout: str = key(
        "replicas",
        "Device layout of the engine. replicas = data-parallel replicas, each with the whole "
        "weights sharded over its `tensor` and `expert` devices and with its own sequences; "
        "weights that training shards differently are copied for the time of the rollout. training "
        "= the sharding of training: no copy, but all devices decode all sequences and gather the "
        "weights in every step",
        choices=ROLLOUT_LAYOUTS,
    )
    tensor: int = key(
        0, "layout = replicas: tensor-parallel devices of a replica; 0 = mesh.tensor", ge=0
    )
    expert: int = key(
        0, "layout = replicas: expert-parallel devices of a replica; 0 = mesh.expert", ge=0
    )
    dtype: str = key(
        "auto",
        "Dtype of the engine's weights; auto = the model's dtype, any other makes a copy. int8 = "
        "layer matrices in int8 with one scale per output, everything else as in the model",
        choices=ROLLOUT_DTYPES,
    )
    sampling: SamplingConfig = dataclasses.field(default_factory=SamplingConfig)
    max_num_seqs: int = key(64, "Maximum sequences decoded together by one engine replica", ge=1)
    max_num_batched_tokens: int = key(
        2048,
        "Prefill token budget per dispatch of a replica, rounded down to 128, 512, 2048, ...; "
        "longer prompts are chunked and interleaved with decode",
        ge=1,
    )
    page_len: int = key(64, "Tokens per KV page", ge=1)
    n_pages: int = key(
        0,
        "KV pages per replica, of which layers with a sliding window have fewer; 0 = sized from "
        "memory_utilization, or for max_num_seqs sequences of maximum length if the device does "
        "not report its memory",
        ge=0,
    )
    state_snapshots: int = key(
        0,
        "Models with gated DeltaNet: states per replica that are kept after prompts and ended "
        "sequences, for later requests with the same prefix, next to one state for each of "
        "max_num_seqs; 0 = half of max_num_seqs",
        ge=0,
    )
    memory_utilization: float = key(
        0.85,
        "Fraction of device memory for weights, optimizer, programs and KV pages together; on "
        "GPUs at most the part that JAX takes (XLA_CLIENT_MEM_FRACTION, 0.92)",
        gt=0,
        le=1,
    )
    spec_tokens: int = key(
        0,
        "N-gram speculative decoding: draft tokens per sequence and decode step, which the model "
        "verifies in one pass; samples do not change; 0 = off",
        ge=0,
    )
    spec_ngram: int = key(
        3,
        "N-gram speculative decoding: maximum number of last tokens to look up earlier in the "
        "sequence; the longest match wins",
        ge=1,
    )
    steps_per_dispatch: int = key(
        32, "Maximum decode steps in one dispatch of the compiled loop", ge=1
    )
    cuda_graph: bool = key(
        False,
        "NVIDIA GPUs: run the decode loop of a dispatch as one CUDA graph, without the host "
        "between its steps, if a replica has one device. `python -m jaxrl.doctor` checks that the "
        "driver does it right; samples do not change",
    )
    kv_dtype: str = key(
        "auto",
        "Dtype of the KV pages; auto = as the engine's activations. int8 and fp8 (e4m3) store "
        "one scale per token and head",
        choices=KV_DTYPES,
    )
    release_kv: bool = key(
        False,
        "Free the KV pages after the rollouts of a step and allocate them again for the next: "
        "scoring and updates get their memory. Samples do not change",
    )
    prefix_cache: bool = key(
        True,
        "Prefix caching: keep the KV pages of finished sequences for later requests with the same "
        "prefix, until they are evicted or the weights change; false = only concurrent sequences "
        "share pages",
    )


@dataclasses.dataclass(frozen=True)
class EvalConfig:
    before_train: bool = key(True, "Validate before the first step")
    every: int = key(0, "Steps between validations; 0 = only before and after training", ge=0)
    n: int = key(1, "Samples per validation prompt", ge=1)
    k: tuple[int, ...] = key((1,), "Values of k for which pass@k is measured, each at most n", ge=1)
    pass_reward: float = key(1.0, "Minimum reward with which a sample passes")
    judge_labels: str = key(
        "",
        "File of labelled responses: jaxrl.evaluate compares the verdicts of the reward judge with "
        "their labels, and samples no model; '' = off",
    )
    sampling: SamplingConfig = dataclasses.field(
        default_factory=lambda: SamplingConfig(temperature=0.0)
    )
