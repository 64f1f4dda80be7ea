"""Compiles a run's programs and reads memory and cost from the compiled modules."""

import dataclasses
import math
import time
from collections.abc import Callable, Mapping, Sequence
from types import MappingProxyType

import jax

from jaxrl.config.keys import RunConfig
from jaxrl.kernels.attention.online_softmax import BLOCK
from jaxrl.kernels.logprob import grouped_chunks
from jaxrl.layout import training_rules
from jaxrl.learner.loss import logprob_chunk
from jaxrl.learner.programs import Lower
from jaxrl.learner.xla import SPARSE_CORES, WITH_SPARSE_CORES, check_options, compiler_options
from jaxrl.models.paged import DECODE_SCOPE
from jaxrl.planner.compiled.cost import Cost, TripCounts, program_cost
from jaxrl.planner.compiled.hlo import HloShape
from jaxrl.planner.compiled.kernels import (
    KernelCosts,
    KernelWork,
    attention_work,
    cudnn_work,
    delta_step_work,
    grouped_tpu_work,
    grouped_work,
    paged_work,
)
from jaxrl.planner.judge import PREFIX as JUDGE
from jaxrl.planner.programs import Lengths, RunPrograms
from jaxrl.planner.topology import Topology

DECODES = ("decode", f"{JUDGE}decode")


@dataclasses.dataclass(frozen=True)
class Program:
    """Memory and cost of one compiled program on one device."""

    argument_bytes: int
    temp_bytes: int
    output_bytes: int
    alias_bytes: int  # of the output, in donated arguments
    code_bytes: int
    host_bytes: int  # of host memory per device: arguments, temporaries and new outputs
    cost: Cost
    compile_s: float
    counted_state: tuple[str, ...]  # as in PlannedProgram

    @property
    def footprint_bytes(self) -> int:
        """Memory while it runs: arguments, temporaries, new outputs and code."""
        new = max(self.output_bytes - self.alias_bytes, 0)
        return self.argument_bytes + self.temp_bytes + new + self.code_bytes


class ProgramTooLarge(ValueError):
    """A program that needs more memory by itself than the device has."""


def compile_programs(
    programs: RunPrograms,
    lengths: Lengths,
    machine: Topology,
    on_start: Callable[[str], None] = lambda name: None,
    known: Mapping[str, Program] = MappingProxyType({}),
) -> dict[str, Program]:
    """Compiles all programs for `machine`, and one that several roles call only once.

    `known` are the programs of the same run with another `learner.xla`; those that do not read it
    are reused.

    Raises ProgramTooLarge if the compiler runs out of device memory, ValueError if it does not know
    an option.
    """
    check_options(programs.cfg.learner.xla)
    cfg = programs.cfg
    compiled: dict[str, Program] = {}
    kind = machine.devices[0].device_kind
    chosen = compiler_options(cfg.learner.xla, machine.platform, kind)
    options = {name: on for name, on in machine.compiler_options.items() if name not in chosen}
    for name, program in programs.table.items():
        if program.row is None and name in known:
            compiled[name] = known[name]
            continue
        if program.same_as:
            compiled[name] = dataclasses.replace(
                compiled[program.same_as], compile_s=0.0, counted_state=program.counted_state
            )
            continue
        on_start(f"compiling {name}")
        start = time.perf_counter()
        executable = _compile(name, program.lower, options)
        seconds = time.perf_counter() - start
        memory, text = executable.memory_analysis(), executable.as_text()
        assert memory is not None and text is not None, "CPU, GPU and TPU backends have both"
        read = program.lengths or lengths
        trips = trip_counts(name, programs, read)
        kernels = kernel_costs(name, programs, read, machine.chip.l2_bytes)
        compiled[name] = Program(
            argument_bytes=memory.argument_size_in_bytes,
            temp_bytes=memory.temp_size_in_bytes,
            output_bytes=memory.output_size_in_bytes,
            alias_bytes=memory.alias_size_in_bytes,
            code_bytes=memory.generated_code_size_in_bytes,
            host_bytes=memory.host_argument_size_in_bytes
            + memory.host_temp_size_in_bytes
            + memory.host_output_size_in_bytes
            - memory.host_alias_size_in_bytes,
            cost=program_cost(text, trips, kernels),
            compile_s=seconds,
            counted_state=program.counted_state,
        )
    return compiled


def machine_note(cfg: RunConfig, machine: Topology) -> str:
    """Assumptions of a plan about the machine, and parts that it does not use; "" if neither."""
    kind = machine.devices[0].device_kind if machine.platform == "tpu" else ""
    could = kind in WITH_SPARSE_CORES and len(machine.devices) > 1
    if could and not set(SPARSE_CORES) & set(compiler_options(cfg.learner.xla, "tpu", kind)):
        return "every collective waits: set learner.xla=overlap to run them on the SparseCores"
    return machine.note


def _compile(name: str, lower: Lower, options: Mapping[str, bool]) -> jax.stages.Compiled:
    try:
        return lower().compile(dict(options) or None)
    except jax.errors.JaxRuntimeError as error:
        if "RESOURCE_EXHAUSTED" not in str(error):
            raise
        detail = str(error).partition("Ran out of memory ")[2].partition(". HLO")[0]
        raise ProgramTooLarge(
            f"does not fit: the compiler cannot place {name} on the device ({detail or error}); "
            "lower learner.token_budget or rollout.max_num_batched_tokens, or shard over more "
            "devices"
        ) from error


def trip_counts(program: str, programs: RunPrograms, lengths: Lengths) -> TripCounts:
    """Trip counts of loops with data-dependent bounds, for sequences of `lengths`.

    Training attention: a query attends on average to half of its segment and to its own block of
    keys; ring attention splits these into as many parts as there are chunks. Decode: the keys of
    the prompt and half the response, one step. Prefill: half the prompt. Logprobs: all tokens of
    a device.
    """
    segment = _segment_len(program, programs, lengths)
    chunks = _scored_tokens(program, programs.cfg) / logprob_chunk(programs.cfg)
    grouped = grouped_chunks()
    n_places = _ring_size(program, programs)

    def trips(op_name: str) -> float | None:
        if "further_ranges" in op_name:  # the call before the loop counts for all visible keys
            return 0.0
        if "paged_attention" in op_name:
            return float(math.ceil(_paged_keys(program, op_name, lengths) / BLOCK))
        if "ring_attention" in op_name:  # one chunk of keys at a time; each device has two
            return segment / 2 / BLOCK / (2 * n_places) + 0.5
        if "cudnn_attention" in op_name:  # the call before the loop counts for all segments
            return 0.0
        if "attention" in op_name:
            return segment / 2 / BLOCK + 1
        if "logprob" in op_name:
            return float(math.ceil(chunks / grouped if "transpose" in op_name else chunks))
        if program in DECODES:
            return 1.0
        return None

    return trips


def kernel_costs(
    program: str, programs: RunPrograms, lengths: Lengths, l2_bytes: float = 0.0
) -> KernelCosts:
    """Work of kernels; in training a query attends on average to half of its segment.

    Each call of a ring has a part of the row's keys. `l2_bytes` is the size of the chip's L2 cache.
    """
    n_places = _ring_size(program, programs)

    def work(
        op_name: str, operands: Sequence[HloShape], results: Sequence[HloShape]
    ) -> KernelWork | None:
        paged = paged_work(op_name, operands, results, keys=_paged_keys(program, op_name, lengths))
        keys = _segment_len(program, programs, lengths) / 2
        keys /= n_places if "ring_attention" in op_name else 1
        packed = attention_work(op_name, operands, results, keys=keys, l2_cache_bytes=l2_bytes)
        cudnn = cudnn_work(op_name, operands, results, keys=keys)
        grouped = grouped_work(op_name, operands, results, l2_cache_bytes=l2_bytes)
        step = delta_step_work(op_name, operands, results)
        grouped_tpu = grouped_tpu_work(op_name, operands, results)
        return paged or packed or cudnn or step or grouped or grouped_tpu

    return work


def _scored_tokens(program: str, cfg: RunConfig) -> float:
    """Tokens of a device whose logprobs one call computes, on the mesh of training."""
    rows, row_len = cfg.learner.shapes[-1]
    policy, reference = cfg.score.token_budget, cfg.ref.token_budget
    budgets = {"score": policy, "student": policy, "reference": reference}
    n_joined = max(budgets.get(program, 0) // cfg.learner.token_budget, 1)
    return n_joined * rows * row_len / training_rules(cfg).n_shards("time")


def _ring_size(program: str, programs: RunPrograms) -> int:
    """Places of the ring that shares a row, if attention is a ring."""
    if row := programs.table[program].row:
        with row.on_mesh():
            return row.rules.ring_size
    return training_rules(programs.cfg).ring_size


def _paged_keys(program: str, op_name: str, lengths: Lengths) -> float:
    """Average keys that a row attends to in its pages.

    In decode, the prompt and half the response; in prefill, half the prompt.
    """
    decodes = program in DECODES or DECODE_SCOPE in op_name  # draft tokens belong to one row
    return lengths.prompt + lengths.response / 2 if decodes else lengths.prompt / 2


def _segment_len(program: str, programs: RunPrograms, lengths: Lengths) -> int:
    """Tokens of an average segment of a packed row."""
    row = programs.table[program].row
    cfg = programs.cfg if row is None else row.cfg
    return min(lengths.prompt + lengths.response, cfg.learner.shapes[-1][1])
