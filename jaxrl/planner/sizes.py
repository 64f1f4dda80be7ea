"""Inputs of a plan's formulas: the run, the settings, and sizes per device."""

import collections
import dataclasses
import functools
import math
from collections.abc import Mapping

import jax
import jax.numpy as jnp

from jaxrl.config.keys import LearnerConfig, RunConfig
from jaxrl.config.teachers import model_teachers
from jaxrl.engine.device.kv_pool import window_page_counts
from jaxrl.learner.optimizer import Optimizer, make_optimizer
from jaxrl.learner.requirements import needs_policy_logp, needs_ref, needs_ref_scores, shares_base
from jaxrl.learner.state import init_opt_state
from jaxrl.models.config import DecoderConfig, for_platform
from jaxrl.models.decoder import decoder_specs
from jaxrl.models.kv_cache import page_bytes, page_rules, slot_bytes
from jaxrl.models.layers.stored import Axes
from jaxrl.models.lora import split, with_adapters
from jaxrl.models.spec import count_params, is_spec, map_specs
from jaxrl.models.vision.config import TowerConfig
from jaxrl.planner.programs import Lengths, OfflineWorkload
from jaxrl.planner.rollout_devices import sides
from jaxrl.planner.topology import Topology
from jaxrl.planner.traffic import expanded_bytes
from jaxrl.types import Tree
from sharding import DECODE, abstract_mesh, bytes_per_device


@dataclasses.dataclass(frozen=True)
class Job:
    """A run to plan: its models, the average sequence, and the machine.

    `role_decoders`, `workload` and `tower` are as in `run_programs`.
    """

    cfg: RunConfig
    decoder: DecoderConfig
    machine: Topology
    lengths: Lengths
    role_decoders: Mapping[str, DecoderConfig] = dataclasses.field(default_factory=dict)
    workload: OfflineWorkload | None = None
    tower: TowerConfig | None = None
    _facts: dict[str, "ModelFacts"] = dataclasses.field(
        default_factory=dict, init=False, repr=False, compare=False
    )

    @property
    def n_sequences(self) -> int:
        """Sequences of a training step."""
        offline = self.workload
        per_prompt = offline.responses_per_example if offline else self.cfg.rollout.n
        return self.cfg.data.prompts_per_step * per_prompt

    @property
    def scores_policy(self) -> bool:
        return self.workload.scores_policy if self.workload else needs_policy_logp(self.cfg)

    @property
    def scores_reference(self) -> bool:
        return self.workload.has_reference if self.workload else needs_ref_scores(self.cfg)

    @property
    def keeps_reference(self) -> bool:
        """Whether a reference model has its own copy of the weights."""
        has_one = self.workload.has_reference if self.workload else needs_ref(self.cfg)
        return has_one and not shares_base(self.cfg)

    @property
    def teachers(self) -> tuple[str, ...]:
        """Roles of the models that score as references; "teacher" is the reference itself."""
        further = () if self.workload else tuple(model_teachers(self.cfg.algorithm))
        return ("teacher", *further[1:])

    @property
    def has_critic(self) -> bool:
        """Whether values come from a separate critic."""
        return not self.workload and self.cfg.has_critic and not self.cfg.critic.shared

    @property
    def scores_values(self) -> bool:
        """Whether a value head on the policy's backbone is scored before the update."""
        if self.workload:
            return "score" in self.workload.heads
        return self.cfg.has_critic and self.cfg.critic.shared

    @property
    def has_reward_model(self) -> bool:
        return not self.workload and bool(self.cfg.reward_model.path)

    @property
    def has_judge(self) -> bool:
        """Whether a judge is a separate model on the devices."""
        return not self.workload and bool(self.cfg.reward.judge.path)

    @property
    def idle_roles(self) -> tuple[str, ...]:
        """Roles whose weights learner.offload can keep in host memory between uses."""
        there = {
            "reference": self.keeps_reference,
            "critic": self.has_critic,
            "reward_model": self.has_reward_model,
            "judge": self.has_judge,
        }
        return tuple(role for role in there if there[role])

    @property
    def models(self) -> tuple[DecoderConfig, ...]:
        """The shapes of all models of the run."""
        return self.decoder, *self.role_decoders.values()

    def model(self, role: str) -> DecoderConfig:
        """The shape of the model of a role; the policy's by default."""
        return self.role_decoders.get(role, self.decoder)

    def facts(self, role: str) -> "ModelFacts":
        """Sizes of a role's model that all candidates share; computed once."""
        if role not in self._facts:
            self._facts[role] = _model_facts(self, role)
        return self._facts[role]

    def rollout_copies(self, mesh: Mapping[str, int], rollout_tensor: int) -> bool:
        """Whether the rollout reads a copy of the weights of training on this mesh.

        It has merged adapters, another dtype, or replicas that are sharded differently.
        """
        cfg, rollout = self.cfg, self.cfg.rollout
        if self.workload:
            return False
        dtype = self.facts("policy").dtype
        quantized = rollout.dtype == "int8" and cfg.lora.base_dtype == "auto"
        if quantized or rollout.dtype not in ("auto", "int8", dtype.name):
            return True
        if cfg.lora.merge and cfg.lora.rank:
            return True
        size = collections.defaultdict(lambda: 1, mesh)
        split = size["fsdp"] * size["sequence"] * size["stage"] > 1
        tensor, expert = rollout_tensor or rollout.tensor, rollout.expert
        split |= tensor not in (0, size["tensor"]) or expert not in (0, size["expert"])
        return split and rollout.layout == "replicas"


@dataclasses.dataclass(frozen=True)
class ModelFacts:
    """A role's model and what is known of it without the settings of a candidate."""

    cfg: RunConfig  # the run of a critic or reward model, which has its own learner
    decoder: DecoderConfig
    dtype: jnp.dtype  # of weights and activations
    stacked: bool
    params: int
    stored_bytes: float  # of a parameter
    rollout_bytes: float  # of a parameter in the engine
    expanded_bytes: float  # that a product moves for a parameter in nf4
    optimizer_bytes: float  # of a trained parameter
    adapters: Mapping[Axes, int]  # parameters by logical axes
    steps_by_layer: bool
    sequence_bytes: int  # of the KV pages of a sequence of maximum length
    slot_bytes: int  # of the state of a sequence


@dataclasses.dataclass(frozen=True)
class CandidateSettings:
    """The settings of a candidate."""

    mesh: Mapping[str, int]
    tokens: int  # token budget of a data-parallel rank
    remat: str  # config.learner.remat
    offload: tuple[str, ...] = ()
    zero: int = 0  # config.learner.zero
    mlp_chunk: int = 0  # config.learner.mlp_chunk
    pipeline_schedule: str = "gpipe"  # config.learner.pipeline_schedule
    rollout_tensor: int = 0  # config.rollout.tensor; 0 = the config's
    release_kv: bool = False  # config.rollout.release_kv


def settings_of(job: Job) -> CandidateSettings:
    """The settings of the config."""
    cfg, learner = job.cfg, job.cfg.learner
    n_training = len(sides(cfg, job.machine)[0])
    mesh = abstract_mesh(n_training, **dataclasses.asdict(cfg.mesh))
    return CandidateSettings(
        dict(mesh.shape),
        learner.token_budget,
        learner.remat,
        offload=learner.offload,
        zero=learner.zero,
        mlp_chunk=learner.mlp_chunk,
        pipeline_schedule=learner.pipeline_schedule,
        rollout_tensor=cfg.rollout.tensor,
        release_kv=cfg.rollout.release_kv,
    )


@dataclasses.dataclass(frozen=True)
class Sizes:
    """Mesh sizes, and parameters of a model per device. Parameters are counts, not bytes.

    In a pipeline a device has the layers of its stage, and the embeddings.
    """

    decoder: DecoderConfig
    stage: int
    tensor: int
    sequence: int
    expert: int
    replica: int
    fsdp: int  # devices that shard the weights by FSDP: fsdp x sequence
    ranks: int  # data-parallel ranks
    tokens: int  # token budget of a rank
    row: int  # tokens of a row
    kept_calls: int  # calls of all layers whose activations backward has at one time
    item_bytes: int  # of a weight in its product
    stored_bytes: float  # of a weight in memory, on average
    rollout_bytes: float  # the same in the engine
    expanded_bytes: float  # that a product moves for a parameter in nf4
    optimizer_bytes: float  # of the optimizer state, per device
    gradient_bytes: float  # of the sums over micro-batches, per device
    step_parts: int  # parts of an optimizer step with state in host memory: layers, or 1
    active_params: int | float  # used by one token
    head: int  # parameters of the unembedding
    gathered: float  # per device with all FSDP shards
    held: float  # per device, sharded
    trained: float  # that an update changes: all, or adapters
    adapters: float  # trained next to frozen weights
    layer: float  # of one gathered layer
    mlp: float  # of the MLP of one gathered layer
    mlp_chunk: int  # tokens of a chunk of an MLP, 0: all
    residual: int  # devices that shard the residual stream of the same tokens
    stacked: bool  # whether the layers are stacked
    rollout_copy: float  # per device
    sequence_bytes: float  # of the KV pages of a sequence of maximum length, per device
    slot_bytes: float  # of the state of a sequence, per device
    n_replicas: int  # of the rollout engine; 1 if it uses the training layout

    @property
    def local_tokens(self) -> float:
        return self.tokens / self.sequence

    @property
    def n_layers(self) -> float:
        """Layers of a device."""
        return self.decoder.L / self.stage

    @property
    def calls(self) -> int:
        """Forward passes through the layers of a device per micro-batch: ticks of a pipeline."""
        return n_ticks(self.tokens // self.row, self.stage)

    @property
    def call_tokens(self) -> float:
        """Tokens of a device in such a pass: one row in a pipeline, else all."""
        return (self.tokens if self.stage == 1 else self.row) / self.sequence

    @property
    def n_chunks(self) -> int:
        """Chunks of tokens of an MLP."""
        return math.ceil(self.call_tokens / self.mlp_chunk) if self.mlp_chunk else 1

    @property
    def held_bytes(self) -> float:
        """Weights of the compute dtype on a device, with adapters."""
        return self.held * self.stored_bytes + self.adapters * self.item_bytes


def _model_facts(job: Job, role: str) -> ModelFacts:
    runs = {
        "critic": job.cfg.critic_run,
        "reward_model": job.cfg.reward_model_run,
        "judge": job.cfg.judge_run,
    }
    cfg, decoder = runs.get(role, job.cfg), dataclasses.replace(job.model(role), tower=None)
    # Adapters are chosen by the names of the tower too, which is no part of what a token reads.
    whole = dataclasses.replace(decoder, tower=job.decoder.tower)
    adapted = dataclasses.replace(with_adapters(cfg.lora, whole), tower=None)
    dtype, placed = for_platform(cfg, adapted, job.machine.platform)
    in_engine = adapted
    if cfg.rollout.dtype == "int8" and not adapted.base_dtype:
        in_engine = dataclasses.replace(adapted, base_dtype="int8")
    return ModelFacts(
        cfg=cfg,
        decoder=decoder,
        dtype=dtype,
        stacked=placed.stacked,
        params=n_params(dataclasses.replace(decoder, stacked=True)),
        stored_bytes=stored_bytes_per_param(adapted, dtype),
        rollout_bytes=stored_bytes_per_param(in_engine, dtype),
        expanded_bytes=expanded_bytes(adapted, job.machine.platform),
        optimizer_bytes=optimizer_bytes_per_param(cfg.learner, adapted, dtype),
        adapters=adapter_params(adapted),
        steps_by_layer=steps_by_layer(cfg.learner, placed),
        sequence_bytes=_sequence_bytes(cfg, decoder, dtype, job.machine.platform),
        slot_bytes=slot_bytes(decoder, dtype),
    )


def model_sizes(job: Job, role: str, settings: CandidateSettings) -> Sizes:
    """The sizes of the model of a role. Critic and reward model may have their own token budget."""
    budgets = {
        "critic": job.cfg.critic.token_budget,
        "reward_model": job.cfg.reward_model.token_budget,
    }
    facts = job.facts(role)
    cfg, d, params, head = facts.cfg, facts.decoder, facts.params, facts.decoder.V * facts.decoder.D
    size = collections.defaultdict(lambda: 1, settings.mesh)
    tp, s, e, stage = size["tensor"], size["sequence"], size["expert"], size["stage"]
    experts, active, mlps = _ffw_params(d)
    ends = head * (1 if d.tied else 2) / tp
    layer = (((params - experts) + experts / e) / tp - ends) / d.L
    gathered = layer * d.L / stage + ends
    n_replicas, rollout_copy, kv_shards = 1, gathered, tp
    if cfg.rollout.layout == "replicas":
        group = settings.rollout_tensor or cfg.rollout.tensor or tp, cfg.rollout.expert or e
        n_replicas = max(len(job.machine.devices) // math.prod(group), 1)
        rollout_copy = ((params - experts) + experts / group[1]) / group[0]
        kv_shards = group[0]
    page_shards = 1 if page_rules(d, DECODE).kv_heads is None else kv_shards
    held = gathered / (size["fsdp"] * s)
    shards = collections.defaultdict(lambda: tp, w_embed=size["fsdp"] * s, experts=e, layers=stage)
    counts = facts.adapters.items()
    adapters = math.fsum(n / math.prod(shards[axis] for axis in axes if axis) for axes, n in counts)
    trained, tokens = adapters or held, budgets.get(role) or settings.tokens
    row = max(cfg.learner.row_lens)
    # Replicas that share the optimizer state, and the gradients.
    sharing, summing = (size["replica"] if settings.zero >= level else 1 for level in (1, 2))
    return Sizes(
        decoder=d,
        stage=stage,
        tensor=tp,
        sequence=s,
        expert=e,
        replica=size["replica"],
        fsdp=size["fsdp"] * s,
        ranks=size["replica"] * size["fsdp"] * e,
        tokens=tokens,
        row=row,
        kept_calls=n_kept(settings.pipeline_schedule, tokens // row, stage),
        item_bytes=facts.dtype.itemsize,
        stored_bytes=facts.stored_bytes,
        rollout_bytes=facts.rollout_bytes,
        expanded_bytes=facts.expanded_bytes,
        optimizer_bytes=trained * facts.optimizer_bytes / sharing,
        gradient_bytes=4 * trained / summing,
        step_parts=d.L if stage == 1 and facts.steps_by_layer else 1,
        active_params=params - experts + active,
        head=head,
        gathered=gathered,
        held=held,
        trained=trained,
        adapters=adapters,
        layer=layer,
        mlp=(experts / e + mlps) / d.L / tp,
        mlp_chunk=settings.mlp_chunk,
        residual=tp if cfg.learner.shard_residual else 1,
        stacked=facts.stacked or stage > 1,
        rollout_copy=rollout_copy,
        sequence_bytes=facts.sequence_bytes / page_shards,
        slot_bytes=facts.slot_bytes / kv_shards,
        n_replicas=n_replicas,
    )


@functools.cache
def _ffw_params(d: DecoderConfig) -> tuple[int, int, int]:
    """Parameters of all layers: (experts, the experts of one token, MLPs that every token uses)."""
    experts = sum(3 * ffn.E * ffn.F * d.D for ffn in d.expert_layers)
    active = sum(3 * ffn.top_k * ffn.F * d.D for ffn in d.expert_layers)
    mlps = sum(layer.ffn.n_matrices * layer.ffn.dense_features * d.D for layer in d.layers)
    return experts, active, mlps


def _sequence_bytes(cfg: RunConfig, d: DecoderConfig, dtype: jnp.dtype, platform: str) -> int:
    """Bytes of the KV pages of a sequence of maximum length, over all devices."""
    page_len = cfg.rollout.page_len
    counts = {0: math.ceil(cfg.engine_len / page_len)}
    counts |= window_page_counts(d, cfg.rollout, cfg.engine_len)
    pages = page_bytes(d, page_len, dtype, counts, platform=platform)
    return sum(counts[window] * n for window, n in pages.items())


def n_ticks(rows: int, stages: int) -> int:
    """Ticks of a pipeline: forward passes through a stage; 1 without stages."""
    return 1 if stages == 1 else rows + stages - 1


def n_kept(schedule: str, rows: int, stages: int) -> int:
    """Ticks whose activations are kept: all with GPipe, 2 S - 1 with 1F1B."""
    if schedule == "gpipe" or stages == 1:
        return n_ticks(rows, stages)
    return 2 * stages - 1


@functools.cache
def optimizer_bytes_per_param(
    learner: LearnerConfig, decoder: DecoderConfig, dtype: jnp.dtype
) -> float:
    """Mean bytes of moments, master weights and moving average per trained parameter."""
    specs = decoder_specs(dataclasses.replace(decoder, stacked=True, base_dtype=""))
    optimizer = _optimizer(learner, specs)
    params = map_specs(lambda spec: jax.ShapeDtypeStruct(spec.shape, dtype), specs)
    state = jax.eval_shape(lambda params: init_opt_state(params, optimizer), params)
    return bytes_per_device(state) / count_params(split(specs)[0])


@functools.cache
def steps_by_layer(learner: LearnerConfig, decoder: DecoderConfig) -> bool:
    """Whether an optimizer step with state in host memory runs layer by layer."""
    return _optimizer(learner, decoder_specs(decoder)).recipe is not None


def _optimizer(learner: LearnerConfig, specs: Tree) -> Optimizer:
    learner = dataclasses.replace(learner, lr_schedule="constant", zero=0)  # without a mesh
    return make_optimizer(learner, 0, split(specs)[0])


@functools.cache
def adapter_params(decoder: DecoderConfig) -> Mapping[Axes, int]:
    """Trained parameters of adapters by their logical axes; none without adapters."""
    if decoder.lora is None:
        return {}
    specs = decoder_specs(dataclasses.replace(decoder, stacked=True, base_dtype=""))
    counts = collections.Counter()
    for spec in jax.tree.leaves(split(specs)[0], is_leaf=is_spec):
        counts[spec.axes] += math.prod(spec.shape)
    return counts


@functools.cache
def stored_bytes_per_param(decoder: DecoderConfig, dtype: jnp.dtype) -> float:
    """Mean bytes of a weight: the dtype's size, or less if the frozen ones are quantized."""
    base = dataclasses.replace(decoder, stacked=True, lora=None)
    leaves = jax.tree.leaves(decoder_specs(base), is_leaf=is_spec)
    stored = sum(math.prod(s.shape) * jnp.dtype(s.dtype or dtype).itemsize for s in leaves)
    return stored / n_params(dataclasses.replace(base, base_dtype=""))


@functools.cache
def n_params(decoder: DecoderConfig) -> int:
    return count_params(decoder_specs(decoder))
