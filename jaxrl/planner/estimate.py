"""Formulas for the memory and step time of a run, which rank the candidates of a search."""

import collections
import dataclasses
import functools
import math
from collections.abc import Mapping

import jax
import jax.numpy as jnp

from jaxrl.config.keys import LearnerConfig, RunConfig
from jaxrl.config.remat import parse_remat
from jaxrl.learner.optimizer import make_optimizer
from jaxrl.learner.requirements import full_kl_in_loss, needs_old_logp, needs_ref, needs_ref_logp
from jaxrl.learner.state import init_opt_state
from jaxrl.models.config import DecoderConfig, for_platform
from jaxrl.models.decoder import decoder_specs
from jaxrl.models.lora import split, with_adapters
from jaxrl.models.spec import count_params, is_spec, map_specs
from jaxrl.planner.programs import Lengths, OfflineWorkload, shares_base
from jaxrl.planner.topology import Chip, Topology
from sharding import bytes_per_device

# Of the products of a forward pass, in backward; other policies recompute whole layers.
RECOMPUTED_FRACTION = {"mlp": 0.15, "dots": 0.02, "none": 0.0}
HEAD_CHUNK = 1024  # tokens whose logits exist at one time


@dataclasses.dataclass(frozen=True)
class Job:
    """A run to plan: its models, the average sequence, and the machine.

    `role_decoders` and `workload` are as in `run_programs`.
    """

    cfg: RunConfig
    decoder: DecoderConfig
    machine: Topology
    lengths: Lengths
    role_decoders: Mapping[str, DecoderConfig] = dataclasses.field(default_factory=dict)
    workload: OfflineWorkload | None = None

    @property
    def n_sequences(self) -> int:
        """Sequences of a training step."""
        offline = self.workload
        per_prompt = offline.responses_per_example if offline else self.cfg.rollout.n
        return self.cfg.data.prompts_per_step * per_prompt

    @property
    def scores_policy(self) -> bool:
        return self.workload.scores_policy if self.workload else needs_old_logp(self.cfg)

    @property
    def scores_reference(self) -> bool:
        return self.workload.has_reference if self.workload else needs_ref_logp(self.cfg)

    @property
    def keeps_reference(self) -> bool:
        """Whether a reference model has its own copy of the weights."""
        has_one = self.workload.has_reference if self.workload else needs_ref(self.cfg)
        return has_one and not shares_base(self.cfg)

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
    def idle_roles(self) -> tuple[str, ...]:
        """Roles whose weights learner.offload can keep in host memory between uses."""
        there = {
            "reference": self.keeps_reference,
            "critic": self.has_critic,
            "reward_model": self.has_reward_model,
        }
        return tuple(role for role in there if there[role])

    @property
    def models(self) -> tuple[DecoderConfig, ...]:
        """The shapes of all models of the run."""
        return self.decoder, *self.role_decoders.values()

    def model(self, role: str) -> DecoderConfig:
        """The shape of the model of a role; the policy's by default."""
        return self.role_decoders.get(role, self.decoder)


@dataclasses.dataclass(frozen=True)
class Settings:
    """What a candidate chooses."""

    mesh: Mapping[str, int]
    tokens: int  # token budget of a data-parallel rank
    remat: str  # config.learner.remat
    offload: tuple[str, ...] = ()


def memory_bytes(job: Job, settings: Settings) -> float:
    """Peak per device, without KV pages.

    Weights, optimizer state, master weights and gradients, all sharded; activations that backward
    keeps of each layer; one gathered layer and its gradient; a chunk of logits and the head's
    gradient. Of the update of the policy and that of a critic, the one that needs more.
    """
    cfg, offload = job.cfg, settings.offload
    policy = _sizes(job, "policy", settings)
    state, optimizer = policy.held_bytes, policy.optimizer_bytes
    work = 4 * policy.trained + _update_bytes(policy, settings)  # with gradients
    if job.keeps_reference and ("reference" not in offload or full_kl_in_loss(cfg)):
        state += _sizes(job, "teacher", settings).held_bytes
    if job.has_reward_model and "reward_model" not in offload:
        state += _sizes(job, "reward_model", settings).held_bytes
    if job.has_critic:
        critic = _sizes(job, "critic", settings)
        optimizer += critic.optimizer_bytes
        update = 4 * critic.trained + _update_bytes(critic, settings)
        if "critic" in offload:
            update += critic.held_bytes
        else:
            state += critic.held_bytes
        work = max(work, update)
    copies = policy.fsdp > 1 and cfg.rollout.layout == "replicas"
    if not job.workload and (copies or cfg.lora.merge):
        work = max(work, policy.rollout_copy * policy.item_bytes)
    return state + (max(work, optimizer) if "optimizer" in offload else optimizer + work)


def step_seconds(job: Job, settings: Settings) -> float:
    """Time of a training step.

    Compute of each pass over the weights, or all-gathers of the weights if these take longer;
    activations all-reduced over tensor, exchanged over sequence, and sent to experts; gradients
    reduced over replicas; offloaded state moved to the device and back. Decode reads the weights at
    every step, either its own copy or gathered ones.
    """
    cfg, host_rate = job.cfg, job.machine.chip.host_bytes_per_s
    policy = _sizes(job, "policy", settings)
    scored = job.scores_policy + job.scores_values
    seconds = _passes_seconds(job, policy, settings, scored, cfg.learner.epochs)
    if job.scores_reference:
        seconds += _passes_seconds(job, _sizes(job, "teacher", settings), settings, 1, 0)
    if job.has_reward_model:
        seconds += _passes_seconds(job, _sizes(job, "reward_model", settings), settings, 1, 0)
    if job.has_critic:
        critic, epochs = _sizes(job, "critic", settings), cfg.critic_run.learner.epochs
        seconds += _passes_seconds(job, critic, settings, 1, epochs)
    if not job.workload:
        seconds += _rollout_seconds(job, policy)
    if "optimizer" in settings.offload:
        seconds += 2 * policy.optimizer_bytes * cfg.updates_per_step / host_rate
    # The critic is read for values, and read and written for updates.
    moved = {"reference": ("teacher", 1), "reward_model": ("reward_model", 1)}
    moved |= {"critic": ("critic", 3)}
    for role, times in (moved[name] for name in settings.offload if name in moved):
        seconds += times * _sizes(job, role, settings).held_bytes / host_rate
    return seconds


@dataclasses.dataclass(frozen=True)
class _Sizes:
    """Mesh sizes, and parameters of a model per device. Parameters are counts, not bytes."""

    decoder: DecoderConfig
    tensor: int
    sequence: int
    expert: int
    replica: int
    fsdp: int  # devices that shard the weights by FSDP: fsdp x sequence
    ranks: int  # data-parallel ranks
    tokens: int  # token budget of a rank
    item_bytes: int  # of a weight in its product
    stored_bytes: float  # of a weight in memory, on average
    optimizer_bytes: float  # of the optimizer state, per device
    active_params: int | float  # used by one token
    head: int  # parameters of the unembedding
    gathered: float  # per device with all FSDP shards
    held: float  # per device, sharded
    trained: float  # of these, what an update changes
    layer: float  # of one gathered layer
    rollout_copy: float  # per device
    n_replicas: int  # of the rollout engine; 1 if it uses the training layout

    @property
    def local_tokens(self) -> float:
        return self.tokens / self.sequence

    @property
    def held_bytes(self) -> float:
        """Weights of the compute dtype on a device."""
        return self.held * self.stored_bytes


def _sizes(job: Job, role: str, settings: Settings) -> _Sizes:
    """The sizes of the model of a role. Critic and reward model may have their own token budget."""
    runs = {"critic": job.cfg.critic_run, "reward_model": job.cfg.reward_model_run}
    budgets = {
        "critic": job.cfg.critic.token_budget,
        "reward_model": job.cfg.reward_model.token_budget,
    }
    cfg, d = runs.get(role, job.cfg), job.model(role)
    size = collections.defaultdict(lambda: 1, settings.mesh)
    tp, s, e = size["tensor"], size["sequence"], size["expert"]
    params, head = n_params(dataclasses.replace(d, stacked=True)), d.V * d.D
    experts = 3 * d.L * d.E * d.F_expert * d.D
    gathered = ((params - experts) + experts / e) / tp
    n_replicas, rollout_copy = 1, gathered
    if cfg.rollout.layout == "replicas":
        group = cfg.rollout.tensor or tp, cfg.rollout.expert or e
        n_replicas = max(len(job.machine.devices) // math.prod(group), 1)
        rollout_copy = ((params - experts) + experts / group[1]) / group[0]
    dtype = for_platform(cfg, d, job.machine.platform)[0]
    held = gathered / (size["fsdp"] * s)
    adapted = with_adapters(cfg.lora, d)
    return _Sizes(
        decoder=d,
        tensor=tp,
        sequence=s,
        expert=e,
        replica=size["replica"],
        fsdp=size["fsdp"] * s,
        ranks=size["replica"] * size["fsdp"] * e,
        tokens=budgets.get(role) or settings.tokens,
        item_bytes=dtype.itemsize,
        stored_bytes=stored_bytes_per_param(adapted, dtype),
        optimizer_bytes=held * optimizer_bytes_per_param(cfg.learner, adapted, dtype),
        active_params=params - experts * (1 - d.top_k / d.E if d.E else 0),
        head=head,
        gathered=gathered,
        held=held,
        trained=held * trained_fraction(adapted),
        layer=(gathered - head * (1 if d.tied else 2) / tp) / d.L,
        rollout_copy=rollout_copy,
        n_replicas=n_replicas,
    )


def _update_bytes(sizes: _Sizes, settings: Settings) -> float:
    """Activations and other temporaries of an update."""
    d, tp, wide, local = sizes.decoder, sizes.tensor, sizes.item_bytes, sizes.local_tokens
    ffw = sizes.expert * d.top_k * (d.F_expert + d.D) if d.E else d.F
    dots = 2 * d.D + (2 * (d.N + d.K) * d.H + 3 * ffw) / tp
    attention = d.N * d.H / tp
    kept = {
        "full": d.D,
        "offload": 2 * d.D / d.L,  # the inputs of the present layer and of the next
        "attention": d.D + attention,
        "mlp": d.D + attention + 2 * ffw / tp,
        "dots": d.D + dots,
        "none": d.D + 3 * dots,
    }
    layers = sum(
        part.n_layers * kept[part.policy]
        if part.group == 1
        else part.n_layers / part.group * d.D + part.group * kept[part.policy]
        for part in parse_remat(settings.remat).ranges(d.L)
    )
    chunk = 3 * 4 * min(HEAD_CHUNK, local) * d.V / tp
    work = local * wide * (layers + 4 * dots) + 3 * sizes.layer * wide + chunk
    return work + 2 * 4 * sizes.head / tp


def _recompute_seconds(
    remat: str, n_layers: int, *, compute: float, attention: float, other: float, copies: float
) -> float:
    """Time that backward takes for recomputed layers, of a micro-batch.

    Args:
      compute: time of the products of a forward pass; `attention` is their part in attention.
      other: time of the collectives of activations.
      copies: time to copy all layer inputs to host memory and back, as if nothing overlapped.
    """
    seconds = {name: share * compute for name, share in RECOMPUTED_FRACTION.items()}
    seconds |= {"full": compute + other, "attention": compute - attention + other}
    seconds["offload"] = seconds["full"] + copies
    total = 0.0
    for part in parse_remat(remat).ranges(n_layers):
        share = part.n_layers / n_layers
        if part.group > 1:  # groups are recomputed, and the layers in them
            total += share * seconds["full"]
            seconds["offload"] = seconds["full"] + copies / part.group
        total += share * seconds[part.policy]
    return total


def _passes_seconds(job: Job, sizes: _Sizes, settings: Settings, scored: int, epochs: int) -> float:
    """Time of `scored` forward passes over all tokens of a step, and of `epochs` updates."""
    chip, d = job.machine.chip, sizes.decoder
    tp, s, e, wide = sizes.tensor, sizes.sequence, sizes.expert, sizes.item_bytes
    seq_len, local = job.lengths.prompt + job.lengths.response, sizes.local_tokens
    attention = 2 * 2 * d.L * d.N * d.H * seq_len / 2
    # of a forward pass
    flops = local * (2 * (sizes.active_params - sizes.head * (not d.tied)) + attention) / tp
    rate = chip.rate("f32" if wide == 4 else "bf16")
    compute = flops / rate
    gather = _collective_seconds(chip, sizes.gathered * wide, sizes.fsdp, sizes.fsdp * e * tp)
    activations = (
        d.L
        * local
        * wide
        * (
            _collective_seconds(chip, 2 * 2 * d.D, tp, tp)
            + _collective_seconds(chip, 2 * (d.N + d.K) * d.H / tp, s, s * tp)
            + _collective_seconds(chip, 2 * e * d.D, e, e * s * tp)
        )
    )
    forward = max(compute, gather) + activations
    recompute = _recompute_seconds(
        settings.remat,
        d.L,
        compute=compute,
        attention=local * attention / tp / rate,
        other=activations,
        copies=2 * d.L * local * wide * d.D / chip.host_bytes_per_s,
    )
    # Frozen weights have no gradient: backward computes and sends about half as much.
    passes = 1 if job.cfg.lora.rank else 2
    backward = max(passes * compute + recompute, (sizes.fsdp > 1) * passes * gather) + activations
    gradients = 2 * 4 * sizes.trained
    backward += _collective_seconds(chip, gradients, sizes.replica, len(job.machine.devices))
    micro_batches = math.ceil(job.n_sequences * seq_len / (sizes.ranks * sizes.tokens))
    return micro_batches * (scored * forward + epochs * (forward + backward))


def _rollout_seconds(job: Job, sizes: _Sizes) -> float:
    chip, slots = job.machine.chip, job.cfg.rollout.max_num_seqs * sizes.n_replicas
    decode_steps = math.ceil(job.n_sequences / slots) * job.lengths.response
    read = sizes.rollout_copy * sizes.item_bytes / chip.memory_bytes_per_s
    if sizes.n_replicas > 1:
        return decode_steps * read
    spread = sizes.fsdp * sizes.expert * sizes.tensor
    gather = _collective_seconds(chip, sizes.gathered * sizes.item_bytes, sizes.fsdp, spread)
    return decode_steps * max(read, gather)


def _collective_seconds(chip: Chip, n_bytes: int | float, n: int, spread: int) -> float:
    """Time for n devices to exchange so many bytes; `spread` is from the first to the last."""
    slow = chip.node and spread > chip.node
    rate = chip.network_bytes_per_s if slow else chip.link_bytes_per_s
    return n_bytes * (n - 1) / n / rate


@functools.cache
def optimizer_bytes_per_param(
    learner: LearnerConfig, decoder: DecoderConfig, dtype: jnp.dtype
) -> float:
    """Mean bytes of moments, master weights and moving average per parameter of the model."""
    specs = decoder_specs(dataclasses.replace(decoder, stacked=True, base_dtype=""))
    learner = dataclasses.replace(learner, lr_schedule="constant")
    optimizer = make_optimizer(learner, 0, split(specs)[0])
    params = map_specs(lambda spec: jax.ShapeDtypeStruct(spec.shape, dtype), specs)
    state = jax.eval_shape(lambda params: init_opt_state(params, optimizer), params)
    return bytes_per_device(state) / count_params(specs)


@functools.cache
def trained_fraction(decoder: DecoderConfig) -> float:
    """Share of the parameters that an update changes."""
    specs = decoder_specs(dataclasses.replace(decoder, stacked=True, base_dtype=""))
    return count_params(split(specs)[0]) / count_params(specs)


@functools.cache
def stored_bytes_per_param(decoder: DecoderConfig, dtype: jnp.dtype) -> float:
    """Mean bytes of a weight: those of the dtype, or less if the frozen ones are quantized."""
    base = dataclasses.replace(decoder, stacked=True, lora=None)
    leaves = jax.tree.leaves(decoder_specs(base), is_leaf=is_spec)
    stored = sum(math.prod(s.shape) * jnp.dtype(s.dtype or dtype).itemsize for s in leaves)
    return stored / n_params(dataclasses.replace(base, base_dtype=""))


@functools.cache
def n_params(decoder: DecoderConfig) -> int:
    return count_params(decoder_specs(decoder))
