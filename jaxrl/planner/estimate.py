"""Formulas for the memory and step time of a run, which rank the candidates of a search.

Their constants are fitted to the compiled plans of docs/plans: the memory of an update is 0.9 to
1.4 times that of the plan, the time of training 0.6 to 1.0 times the serial one.
"""

import dataclasses
import functools
import math

from jaxrl.config.remat import parse_remat
from jaxrl.engine.device.kv_pool import n_state_slots
from jaxrl.learner.requirements import full_kl_in_loss
from jaxrl.learner.xla import WITH_SPARSE_CORES
from jaxrl.models.config import DecoderConfig, MLPConfig, MoEConfig
from jaxrl.models.flops import score_features
from jaxrl.planner.chips import CHIPS, DEVICE_KINDS, Chip
from jaxrl.planner.judge_estimate import judge_bytes, judge_seconds
from jaxrl.planner.sizes import CandidateSettings, Job, Sizes, model_sizes
from jaxrl.planner.tower import tower_bytes
from jaxrl.planner.traffic import (
    RULE_BACKWARD,
    copied_features,
    kept_rule_features,
    rule_seconds,
    rule_work_bytes,
)

# Of the products of a forward pass, in backward; other policies recompute whole layers.
RECOMPUTED_FRACTION = {"mlp": 0.15, "dots": 0.02, "none": 0.0}
HEAD_CHUNK = 1024  # tokens whose logits exist at one time
WORK_ARRAYS = 2.5  # activations of a layer while it is computed, in inputs and outputs of products
# With learner.xla=overlap, SparseCores run the collectives of these chips.
SPARSE_CORE_CHIPS = [CHIPS[DEVICE_KINDS[kind]].name for kind in WITH_SPARSE_CORES]
EXPOSED = 0.1  # part of a collective that kernels which take as long do not cover


@dataclasses.dataclass(frozen=True)
class MemoryEstimate:
    """Bytes per device, without KV pages."""

    update: float  # at the peak of training
    rollout: float  # state that stays on the device, and the weights of the rollout

    @property
    def peak(self) -> float:
        return max(self.update, self.rollout)


def estimate_memory(job: Job, settings: CandidateSettings) -> MemoryEstimate:
    """Memory of training and of the rollout.

    Weights, optimizer state, master weights and gradients, all sharded; activations that backward
    keeps of each layer; one gathered layer and its gradient, with learner.mlp_chunk the products of
    a chunk only; a chunk of logits and the head's gradient; the vision tower. Of the update of the
    policy and that of a critic, the one that needs more.
    """
    cfg, offload = job.cfg, settings.offload
    policy = model_sizes(job, "policy", settings)
    state, work = policy.held_bytes, _work_bytes(policy, settings)
    optimizer = policy.optimizer_bytes
    if job.keeps_reference and ("reference" not in offload or full_kl_in_loss(cfg)):
        state += sum(model_sizes(job, role, settings).held_bytes for role in job.teachers)
    if job.has_reward_model and "reward_model" not in offload:
        state += model_sizes(job, "reward_model", settings).held_bytes
    if job.has_critic:
        critic = model_sizes(job, "critic", settings)
        optimizer += critic.optimizer_bytes
        update = _work_bytes(critic, settings)
        if "critic" in offload:
            update += critic.held_bytes
        else:
            state += critic.held_bytes
        work = max(work, update)
    if job.tower is not None:
        held, in_update = tower_bytes(job, job.tower, policy, settings)
        state, work = state + held, work + in_update
    state += ("optimizer" not in offload) * optimizer
    judge = judge_bytes(job, settings) if job.has_judge else 0.0
    state += ("judge" not in offload) * judge
    made = ("judge" in offload) * judge
    copy = policy.rollout_copy * policy.rollout_bytes
    if job.rollout_copies(settings.mesh, settings.rollout_tensor):
        made = max(made, copy - policy.held_bytes * ("policy" in offload))
    if policy.expanded_bytes and policy.stacked:  # decode copies stacks in nf4 to another layout
        made += copy
    return MemoryEstimate(state + work, state + made)


def step_seconds(job: Job, settings: CandidateSettings, memory: MemoryEstimate) -> float:
    """Time of a training step.

    Compute of each pass over the weights, or all-gathers of the weights if these take longer, and
    the part of the shorter that is not covered; reduction of gradients, covered except on TPU
    without SparseCores; activations all-reduced over tensor, exchanged over sequence, and sent to
    experts; gradients reduced over replicas, and with ZeRO weights gathered from them; offloaded
    state moved to the device and back. The rollout is that of `rollout_seconds`.
    """
    cfg, host_rate = job.cfg, job.machine.chip.host_bytes_per_s
    policy = model_sizes(job, "policy", settings)
    scored = job.scores_policy + job.scores_values
    seconds = _passes_seconds(job, policy, settings, scored, cfg.learner.epochs)
    if job.scores_reference:
        seconds += sum(
            _passes_seconds(job, model_sizes(job, role, settings), settings, 1, 0)
            for role in job.teachers
        ) / len(job.teachers)  # each reads its rows: equal shares
    if job.has_reward_model:
        seconds += _passes_seconds(job, model_sizes(job, "reward_model", settings), settings, 1, 0)
    if job.has_critic:
        critic, epochs = model_sizes(job, "critic", settings), cfg.critic_run.learner.epochs
        seconds += _passes_seconds(job, critic, settings, 1, epochs)
    if not job.workload:
        seconds += rollout_seconds(job, policy, free_bytes(job, settings, memory))
    if job.has_judge:
        seconds += judge_seconds(job, settings)
    if settings.zero:  # the updated weights of the other replicas
        seconds += cfg.updates_per_step * _collective_seconds(
            job.machine.chip,
            policy.trained * policy.item_bytes,
            policy.replica,
            len(job.machine.devices),
        )
    if "optimizer" in settings.offload:
        seconds += 2 * policy.optimizer_bytes * cfg.updates_per_step / host_rate
    if "gradients" in settings.offload:
        seconds += policy.gradient_bytes * cfg.updates_per_step / host_rate
    # The critic is read for values, and read and written for updates; the policy is written before
    # the rollout and read after it.
    moved = {"reference": (job.teachers, 1), "reward_model": (("reward_model",), 1)}
    moved |= {"critic": (("critic",), 3), "policy": (("policy",), 2), "judge": (("judge",), 1)}
    for roles, times in (moved[name] for name in settings.offload if name in moved):
        held = sum(model_sizes(job, role, settings).held_bytes for role in roles)
        seconds += times * held / host_rate
    return seconds


def _work_bytes(sizes: Sizes, settings: CandidateSettings) -> float:
    """Gradients, temporaries and offloaded optimizer state on the device during an update.

    The larger of a micro-batch's and of the optimizer step's, which has one part of the offloaded
    state at a time. With the sums of gradients in host memory, the gradient of a micro-batch takes
    the place of activations layer by layer.
    """
    update, sums = _update_bytes(sizes, settings), sizes.gradient_bytes
    accumulate, state = sums + update, 0.0
    if "gradients" in settings.offload:
        accumulate, sums = max(update, sizes.trained * sizes.item_bytes), sums / sizes.step_parts
    if "optimizer" in settings.offload:
        state = sizes.optimizer_bytes / sizes.step_parts
    return max(accumulate, sums + state)


def _update_bytes(sizes: Sizes, settings: CandidateSettings) -> float:
    """Activations and other temporaries of an update."""
    d, tp, wide, local = sizes.decoder, sizes.tensor, sizes.item_bytes, sizes.call_tokens
    stream = d.D / sizes.residual
    chunked = sizes.n_chunks > 1
    kept = kept_features(
        d,
        tensor=tp,
        expert=sizes.expert,
        stream=stream,
        stacked=sizes.stacked,
        keeps_mlp=not chunked,
    )
    kept["offload"] = 2 * stream / sizes.n_layers  # inputs of the present layer and of the next
    layers = sum(
        part.n_layers * kept[part.policy]
        if part.group == 1
        else part.n_layers / part.group * stream + part.group * kept[part.policy]
        for part in parse_remat(settings.remat).ranges(d.L // sizes.stage)
    )
    chunk = 4 * min(HEAD_CHUNK, local) * d.V / tp
    # Weights below adapters have no gradients. Those of the micro-batch take the place of the
    # unembedding's, in float32, and of the activations.
    has_gradients = not sizes.adapters
    head = 4 * has_gradients * sizes.head / tp
    work = max(local * wide * sizes.kept_calls * layers + head, sizes.trained * wide)
    work += local * wide * WORK_ARRAYS * _product_features(d, tp, sizes.expert)
    work += rule_work_bytes(d, local, tp)
    if chunked:  # products of the other chunks are absent; gradients are summed in float32
        absent = local - local / sizes.n_chunks
        products = WORK_ARRAYS * _ffw_products(d, sizes.expert)[1] / tp
        work += 4 * sizes.mlp - absent * wide * products
    if sizes.stage > 1:  # the rows before and after all stages; 1F1B's sums of a stage
        work += 2 * sizes.calls * local * wide * stream
        work += 4 * sizes.trained * (settings.pipeline_schedule != "gpipe")
    if sizes.fsdp > 1:
        work += wide * sizes.head / tp
    return work + (2 + has_gradients) * sizes.layer * wide + chunk


def kept_features(
    d: DecoderConfig,
    *,
    tensor: int,
    expert: int,
    stream: int | float,
    stacked: bool,
    keeps_mlp: bool = True,
) -> dict[str, int | float]:
    """Features per token that backward keeps of a layer, per device, by remat policy.

    `stream` are those of the layer's input. Without `keeps_mlp` those of the MLP are computed
    again, in chunks (learner.mlp_chunk). A loop over stacked layers keeps every intermediate array
    of "none"; in a list, the compiler computes those between two products again.
    """
    outputs = score_features(d) + kept_rule_features(d)
    attention = outputs / d.L / tensor
    projected, ffw = (features / tensor for features in _ffw_products(d, expert))
    every = _product_features(d, tensor, expert)
    if not keeps_mlp:
        every, projected = every - ffw, 0.0
    return {
        "full": stream,
        "offload": stream,  # in host memory
        "attention": stream + attention,
        "mlp": stream + attention + projected,
        "dots": 2 * stream + 2 * _head_features(d) / tensor + projected,
        "none": stream + (3 if stacked else 1) * every,
    }


def _product_features(d: DecoderConfig, tensor: int, expert: int) -> float:
    """Features per token of the inputs and outputs of a layer's products, per device."""
    return 2 * d.D + (2 * _head_features(d) + _ffw_products(d, expert)[1]) / tensor


@functools.cache
def _head_features(d: DecoderConfig) -> float:
    """Features of the heads of a layer, on average."""
    return sum(layer.mixer.head_features for layer in d.layers) / d.L


@functools.cache
def _ffw_products(d: DecoderConfig, expert: int) -> tuple[float, float]:
    """Features per token of the feed-forward part of a layer, on average.

    (outputs of the first products, all inputs and outputs of products within the part): gate and
    up, then their product too; without a gate, up, then its activation too.
    """

    def features(ffn: MLPConfig | MoEConfig) -> tuple[int, int]:
        first, every = ((n * ffn.dense_features) for n in (ffn.n_matrices - 1, ffn.n_matrices))
        if isinstance(ffn, MoEConfig):  # and a token's copies, one per expert, in and out
            copies = expert * ffn.top_k
            first += copies * 2 * (ffn.F + d.D)
            every += copies * (3 * ffn.F + 2 * d.D)
        return first, every

    first, every = zip(*(features(layer.ffn) for layer in d.layers), strict=True)
    return sum(first) / d.L, sum(every) / d.L


@functools.cache
def _active_features(d: DecoderConfig) -> int:
    """Features of the feed-forward parts of all layers that a token uses, in every matrix."""
    return sum(layer.ffn.n_matrices * layer.ffn.active_features for layer in d.layers)


def _recompute_seconds(
    remat: str,
    n_layers: int,
    *,
    compute: float,
    attention: float,
    mlp: float,
    other: float,
    copies: float,
) -> float:
    """Time that backward takes for recomputed layers, of a micro-batch.

    Args:
      compute: time of the products of a forward pass; `attention` is their part in attention.
      mlp: time of the products of MLPs if they are computed in chunks, always recomputed; else 0.
      other: time of the collectives of activations.
      copies: time to copy all layer inputs to host memory and back, as if nothing overlapped.
    """
    seconds = {name: share * compute + mlp for name, share in RECOMPUTED_FRACTION.items()}
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


def _passes_seconds(
    job: Job, sizes: Sizes, settings: CandidateSettings, scored: int, epochs: int
) -> float:
    """Time of `scored` forward passes over all tokens of a step, and of `epochs` updates.

    In a pipeline every stage computes in every tick, its layers for one row, and sends the row on.
    """
    chip, d = job.machine.chip, sizes.decoder
    tp, s, e, wide = sizes.tensor, sizes.sequence, sizes.expert, sizes.item_bytes
    seq_len = job.lengths.prompt + job.lengths.response
    attention = 2 * 2 * score_features(d) * seq_len / 2
    in_layers = 2 * (sizes.active_params - sizes.head * (1 if d.tied else 2)) + attention
    local = sizes.calls * sizes.call_tokens / sizes.stage  # tokens, each in all layers
    rate = tp * chip.rate("f32" if wide == 4 else "bf16")
    rule = local * rule_seconds(d, rate, tp * chip.memory_bytes_per_s)
    copies = local * wide * copied_features(d, e, tp) / chip.memory_bytes_per_s
    products = (local * in_layers + sizes.local_tokens / sizes.stage * 2 * sizes.head) / rate
    expanded = sizes.calls * sizes.gathered * sizes.expanded_bytes / chip.memory_bytes_per_s
    compute = products + copies + rule + expanded
    gathered = _gathered_params(sizes, settings) * wide
    gather = _collective_seconds(chip, gathered, sizes.fsdp, sizes.fsdp * e * tp)
    activations = (
        d.L
        * local
        * wide
        * (
            _collective_seconds(chip, 2 * 2 * d.D, tp, tp)
            + _collective_seconds(chip, 2 * _head_features(d) / tp, s, s * tp)
            + _collective_seconds(chip, 2 * e * d.D, e, e * s * tp)
        )
    )
    if sizes.stage > 1:
        sent = sizes.calls * sizes.call_tokens * wide * d.D / sizes.residual
        activations += sent / _rate(chip, len(job.machine.devices))
    forward = _overlapped(compute, gather) + activations
    recompute = _recompute_seconds(
        settings.remat,
        d.L // sizes.stage,
        compute=compute,
        attention=local * attention / rate + rule,
        mlp=local * 2 * d.D * _active_features(d) / rate if sizes.n_chunks > 1 else 0.0,
        other=activations,
        copies=2 * d.L * local * wide * d.D / chip.host_bytes_per_s,
    )
    # Frozen weights have no gradient: backward computes and sends about half as much. The rule of
    # gated DeltaNet is computed again under every policy.
    passes = 1 if job.cfg.lora.rank else 2
    backward = passes * (products + copies) + (1 + RULE_BACKWARD) * rule + recompute + expanded
    reduced = 0.0
    if sizes.fsdp > 1 and passes > 1:
        layers = sizes.calls * sizes.layer * sizes.n_layers * wide
        reduced = _collective_seconds(chip, layers, sizes.fsdp, sizes.fsdp * e * tp)
        # Every device sums whole gradients of tables: one in float32, one in the weights' dtype.
        tables = 2 * (4 + wide) * sizes.head / tp
        activations += _collective_seconds(chip, tables, sizes.fsdp, sizes.fsdp * e * tp)
    if _covers_reductions(job):
        backward = _overlapped(backward, gather + reduced)
    else:
        backward = _overlapped(backward, gather) + reduced
    backward += activations
    if sizes.n_chunks > 1:  # every chunk reads and writes float32 sums of the weights' gradients
        sums = sizes.calls * sizes.n_layers * sizes.n_chunks * sizes.mlp
        backward += 2 * 4 * sums / chip.memory_bytes_per_s
    gradients = 2 * 4 * sizes.trained
    backward += _collective_seconds(chip, gradients, sizes.replica, len(job.machine.devices))
    # The gradient of a micro-batch is written and read, and its sum read and written in float32.
    backward += (2 * wide + 2 * 4) * sizes.trained / chip.memory_bytes_per_s
    if "gradients" in settings.offload:  # the sums, to the device and back
        backward += 2 * sizes.gradient_bytes / chip.host_bytes_per_s
    trained = job.n_sequences + job.cfg.data.demonstrations_per_step
    micro_batches = math.ceil(trained * seq_len / (sizes.ranks * sizes.tokens))
    return micro_batches * (scored * forward + epochs * (forward + backward))


def _gathered_params(sizes: Sizes, settings: CandidateSettings) -> float:
    """Parameters of a device that a forward pass gathers: layers in every tick of a pipeline.

    With 1F1B the unembedding is gathered in every tick, too.
    """
    layers = sizes.layer * sizes.n_layers
    ticks = sizes.calls if settings.pipeline_schedule != "gpipe" else 1
    return sizes.calls * layers + ticks * (sizes.gathered - layers)


def _overlapped(compute: float, transfer: float) -> float:
    """Time of kernels and collectives that overlap, of which a part is not covered."""
    return max(compute, transfer) + EXPOSED * min(compute, transfer)


def _covers_reductions(job: Job) -> bool:
    """Whether compilers schedule the reduction of gradients while kernels run."""
    if job.machine.platform != "tpu":
        return True
    return job.machine.chip.name in SPARSE_CORE_CHIPS and "overlap" in job.cfg.learner.xla


def free_bytes(job: Job, settings: CandidateSettings, memory: MemoryEstimate) -> float:
    """Memory of a device that the run leaves to KV pages."""
    released = job.cfg.rollout.release_kv or settings.release_kv
    usable = job.machine.chip.usable_bytes(job.cfg.rollout.memory_utilization)
    return usable - (memory.rollout if released else memory.peak)


def rollout_seconds(job: Job, sizes: Sizes, free: float) -> float:
    """Time in which all decode steps of a training step read the weights and the cache.

    `free` bytes hold the slots of states and the pages. As in a plan, a sequence has all pages that
    it may need, and those that do not fit at the same time wait for others to end. Decode reads the
    keys and values of sequences of average length; it reads and writes a state per sequence.
    """
    chip, cfg = job.machine.chip, job.cfg.rollout
    slots = n_state_slots(sizes.decoder, cfg) * sizes.slot_bytes
    fitting = max(int((free - slots) // max(sizes.sequence_bytes, 1)), 1)
    together = min(fitting, cfg.max_num_seqs, math.ceil(job.n_sequences / sizes.n_replicas))
    waves = math.ceil(job.n_sequences / (together * sizes.n_replicas))
    moved = sizes.rollout_bytes + sizes.expanded_bytes
    weights = sizes.rollout_copy * moved / chip.memory_bytes_per_s
    filled = (job.lengths.prompt + job.lengths.response) / job.cfg.data.max_len
    cache = together * (filled * sizes.sequence_bytes + 2 * sizes.slot_bytes)
    if cfg.layout != "replicas":
        spread = sizes.fsdp * sizes.expert * sizes.tensor
        gathered = sizes.gathered * sizes.item_bytes
        weights = max(weights, _collective_seconds(chip, gathered, sizes.fsdp, spread))
    return waves * job.lengths.response * (weights + cache / chip.memory_bytes_per_s)


def _collective_seconds(chip: Chip, n_bytes: int | float, n: int, spread: int) -> float:
    """Time for n devices to exchange so many bytes; `spread` is from the first to the last."""
    return n_bytes * (n - 1) / n / _rate(chip, spread)


def _rate(chip: Chip, spread: int) -> float:
    """Bytes per second between devices of which the last is `spread` devices after the first."""
    slow = chip.node and spread > chip.node
    return chip.network_bytes_per_s if slow else chip.link_bytes_per_s
