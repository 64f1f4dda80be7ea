"""Cost of one call of a compiled program on a device: FLOPs, memory traffic, collectives.

XLA's own cost analysis counts the body of a loop once; this one multiplies by the trip count.
"""

import collections
import dataclasses
import math
import re
from collections.abc import Callable, Sequence

import numpy as np

from jaxrl.planner.compiled.hlo import Computation, HloShape, Instruction, Module, flops_of, parse
from jaxrl.planner.compiled.kernels import KernelCosts
from jaxrl.planner.compiled.timeline import Collective, HloDone, HloStart, HloStep, Kernel, Loop

# op_name of a loop with a data-dependent bound -> trip count, or None if unknown
TripCounts = Callable[[str], float | None]
COLLECTIVES = (
    "all-gather",
    "all-reduce",
    "reduce-scatter",
    "all-to-all",
    "ragged-all-to-all",
    "collective-permute",
    "collective-broadcast",
)
FREE_OPCODES = {
    "parameter", "constant", "tuple", "get-tuple-element", "bitcast", "after-all", "partition-id",
    "replica-id", "opt-barrier", "domain", "copy-done", "iota", "custom-call-start",
}  # fmt: skip
CALL_OPCODES = ("call", "async-start", "call-start", "custom-call-update")


@dataclasses.dataclass
class Cost:
    """Cost per device and call.

    `flops` count matrix products and convolutions, including kernels, by operand dtype.
    """

    flops: dict[str, float] = dataclasses.field(
        default_factory=lambda: collections.defaultdict(float)
    )
    bytes_accessed: float = 0.0  # of HBM
    l2_bytes: float = 0.0  # that kernels read again from a cache that holds them
    estimated_cycles: float = 0.0  # of a TPU core by its compiler, of the kernels that have some
    host_bytes: float = 0.0  # copied from or to host memory
    collectives: list[Collective] = dataclasses.field(default_factory=list)
    unknown_loops: list[str] = dataclasses.field(default_factory=list)  # counted once
    steps: list[HloStep] = dataclasses.field(default_factory=list)  # in scheduled order

    @property
    def total_flops(self) -> float:
        return float(sum(self.flops.values()))

    def collectives_by_kind(self) -> dict[str, dict[str, int]]:
        """{kind: {"count", "bytes"}}, summed over all executions in one call."""
        totals: dict[str, dict[str, float]] = {}
        for one in self.collectives:
            entry = totals.setdefault(one.kind, {"count": 0, "bytes": 0})
            entry["count"] += one.times
            entry["bytes"] += one.times * one.bytes
        return {kind: {n: round(v) for n, v in totals[kind].items()} for kind in sorted(totals)}


def program_cost(
    text: str,
    trips: TripCounts = lambda op_name: None,
    kernels: KernelCosts = lambda op_name, operands, results: None,
) -> Cost:
    """The cost of `compiled.as_text()`.

    `trips` gives the trip counts of loops with data-dependent bounds; unknown loops count once.
    `kernels` gives the work of custom calls; unknown ones read their operands and write their
    results. A conditional counts as its cheapest branch, plus the collectives of all branches.
    """
    visitor = _CostVisitor(parse(text), trips, kernels)
    visitor.cost.steps = visitor.computation(visitor.module.entry, 1.0)
    return visitor.cost


@dataclasses.dataclass
class _Work:
    """The work of one kernel, and the collectives inside it."""

    bytes: float  # of HBM
    cycles: float  # as in Kernel
    flops: dict[str, float] = dataclasses.field(
        default_factory=lambda: collections.defaultdict(float)
    )
    l2_bytes: float = 0.0
    attention: bool = False  # as in Kernel
    steps: list[HloStep] = dataclasses.field(default_factory=list)


class _CostVisitor:
    """Sums the cost of computations from the entry down, multiplied by trip counts."""

    def __init__(self, module: Module, trips: TripCounts, kernels: KernelCosts):
        self.module, self.trips, self.kernels, self.cost = module, trips, kernels, Cost()

    def computation(self, name: str, times: float) -> list[HloStep]:
        """Adds the cost of a computation that runs so many times; returns one execution's steps."""
        inside = self.module.computations[name]
        steps: list[HloStep] = []
        for one in inside.instructions.values():
            if one.opcode == "while":
                steps.append(self._loop(one, inside, times))
            elif one.opcode == "conditional":
                steps += self._conditional(one, times)
            elif one.opcode in CALL_OPCODES:
                steps += _started(one, self.computation(_called(one, inside), times))
            elif one.opcode in ("fusion", "fusion-start"):
                work = _Work(self._fusion_bytes(one, inside), one.estimated_cycles)
                self._fused(one.called("calls") or "", times, work)
                steps += [*work.steps, self._kernel(work, times)]
            elif kind := _kind(one):
                steps += self._collective(kind, one, inside, times)
            elif one.opcode.endswith("-done"):
                steps.append(HloDone(one.operands[0]))
            elif one.opcode not in FREE_OPCODES and not one.opcode.endswith("-update"):
                work = _Work(_bytes(one, inside), one.estimated_cycles)
                self._instruction(one, inside, work)
                self.cost.host_bytes += times * _host_bytes(one, inside)
                steps.append(self._kernel(work, times))
        return steps

    def _kernel(self, work: _Work, times: float) -> Kernel:
        """Adds the work of a kernel that runs so many times."""
        for dtype, flops in work.flops.items():
            self.cost.flops[dtype] += times * flops
        self.cost.bytes_accessed += times * work.bytes
        self.cost.l2_bytes += times * work.l2_bytes
        self.cost.estimated_cycles += times * work.cycles
        return Kernel(dict(work.flops), work.bytes, work.cycles, work.attention)

    def _loop(self, loop: Instruction, inside: Computation, times: float) -> Loop:
        trips = self.module.trip_count(loop, inside)
        if trips is None:
            trips = self.trips(loop.op_name)
        if trips is None:
            self.cost.unknown_loops.append(loop.op_name)
            trips = 1
        body = loop.called("body") or ""
        return Loop(float(trips), self.computation(body, times * trips))

    def _conditional(self, one: Instruction, times: float) -> list[HloStep]:
        names = one.called_list("branch_computations")
        names = names or [one.called(f"{side}_computation") or "" for side in ("true", "false")]
        branches = []
        for name in names:
            visitor = _CostVisitor(self.module, self.trips, self.kernels)
            visitor.cost.steps = visitor.computation(name, times)
            branches.append(visitor.cost)
        cheapest = min(branches, key=lambda cost: (cost.total_flops, cost.bytes_accessed))
        for dtype, flops in cheapest.flops.items():
            self.cost.flops[dtype] += flops
        self.cost.bytes_accessed += cheapest.bytes_accessed
        self.cost.l2_bytes += cheapest.l2_bytes
        self.cost.estimated_cycles += cheapest.estimated_cycles
        for branch in branches:
            self.cost.collectives += branch.collectives
            self.cost.unknown_loops += branch.unknown_loops
        return cheapest.steps

    def _fused(self, name: str, times: float, work: _Work) -> None:
        """Adds FLOPs and collectives inside a fusion; `_fusion_bytes` has its memory traffic.

        On TPU an asynchronous collective appears in every fusion that it overlaps with; it counts
        in the one that starts it. A reduce-scatter is an all-reduce fused with its slices.
        """
        inside = self.module.computations[name]
        targets = {one.target for one in inside.instructions.values()}
        starts, ends = ("AsyncCollective" + end in targets for end in ("Start", "Done"))
        continues = name.startswith("async_collective") or ends
        for one in inside.instructions.values():
            if one.opcode == "fusion":
                self._fused(one.called("calls") or "", times, work)
            elif (kind := _kind(one)) and (starts or not continues):
                kind = "reduce-scatter" if "all-reduce-scatter" in name else kind
                found = self._collective(kind, one, inside, times)
                work.steps += found[:1] if starts else found
            elif kind and ends:
                work.steps.append(HloDone(one.channel))
            elif not kind:
                self._instruction(one, inside, work)
                self.cost.host_bytes += times * _host_bytes(one, inside)

    def _collective(
        self, kind: str, one: Instruction, inside: Computation, times: float
    ) -> list[HloStep]:
        """Adds a collective; returns its start, and its end unless another instruction waits."""
        members = replica_group(one.attributes)
        n = len(members)
        if n < 2:
            return []
        size = sum(_operand_bytes(one, inside))
        collective = Collective(
            kind=kind,
            bytes=size * n if kind == "all-gather" else size,
            n_devices=n,
            spread=max(members) - min(members),
            times=times,
            shapes=one.shapes,
            op_name=one.op_name,
        )
        self.cost.collectives.append(collective)
        self.cost.bytes_accessed += times * _bytes(one, inside)
        if one.opcode.endswith("-start"):
            return [HloStart(one.name, collective)]
        return [HloStart(one.channel, collective), HloDone(one.channel)]

    def _instruction(self, one: Instruction, inside: Computation, work: _Work) -> None:
        """Adds the FLOPs of an instruction, and what a known kernel reads again."""
        flops, dtype = flops_of(one, inside)
        if one.opcode == "custom-call" and one.operands:
            operands = [inside.instructions[name].shapes[0] for name in one.operands]
            if known := self.kernels(one.op_name, operands, one.shapes):
                flops, dtype = known.flops, known.dtype
                work.bytes += known.extra_bytes
                work.l2_bytes += known.l2_bytes
                work.attention = work.attention or known.attention
        if flops:
            work.flops[dtype] += flops

    def _fusion_bytes(self, fusion: Instruction, inside: Computation) -> float:
        """HBM traffic of a fusion.

        An array that it only slices counts as the slices, one updated in place as the update.
        """
        called = self.module.computations[fusion.called("calls") or ""]
        total = 0.0
        for i, name in enumerate(fusion.operands):
            shapes = inside.instructions[name].shapes if name in inside.instructions else ()
            if i in called.parameters and any(shape.in_hbm for shape in shapes):
                total += _read_bytes(called.parameters[i], called, _hbm(shapes), self.module)
        roots = [called.root]
        if called.root.opcode == "tuple":
            roots = [called.instructions[name] for name in called.root.operands]
        written = [_written_bytes(root, called) for root in roots]
        # The results of fusion-start are its operands, its results and a context.
        if fusion.opcode == "fusion" and len(written) == len(fusion.shapes):
            return total + sum(
                n for n, shape in zip(written, fusion.shapes, strict=True) if shape.in_hbm
            )
        return total + sum(written)


def _called(call: Instruction, inside: Computation) -> str:
    """The computation of a call.

    The start of a custom call on a SparseCore of TPU only loads the program, which names it; the
    update that follows passes the operands.
    """
    if call.opcode == "custom-call-update":
        return inside.instructions[call.operands[0]].called_list("called_computations")[0]
    return call.called("to_apply") or call.called("calls") or ""


def _started(one: Instruction, steps: list[HloStep]) -> list[HloStep]:
    """The steps of a called computation; an asynchronous one ends at the call's own end."""
    if one.opcode == "call":
        return steps
    steps = [step for step in steps if not isinstance(step, HloDone)]
    return [HloStart(one.name, s.collective) if isinstance(s, HloStart) else s for s in steps]


def _kind(one: Instruction) -> str | None:
    name = one.opcode.removesuffix("-start")
    return name if name in COLLECTIVES else None


def _hbm(shapes: Sequence[HloShape]) -> float:
    return sum((shape.bytes for shape in shapes if shape.in_hbm), 0.0)


def _operand_bytes(one: Instruction, inside: Computation) -> list[float]:
    return [inside.instructions[o].bytes for o in one.operands if o in inside.instructions]


def _bytes(one: Instruction, inside: Computation) -> float:
    """HBM read and written by a single instruction outside a fusion."""
    operands = [inside.instructions[o] for o in one.operands if o in inside.instructions]
    if one.opcode in ("dynamic-slice", "gather", "slice"):
        return 2 * _hbm(one.shapes) + sum(_hbm(o.shapes) for o in operands[1:])
    if one.opcode in ("dynamic-update-slice", "scatter"):
        return 2 * sum((_hbm(o.shapes) for o in operands[1:]), 0.0)
    if one.target == "AllocateBuffer":
        return 0.0
    return _hbm(_results(one)) + sum(_hbm(o.shapes) for o in operands)


def _results(one: Instruction) -> Sequence[HloShape]:
    """The results that an instruction writes."""
    if one.opcode == "copy-start":  # the others are its source and a context
        return one.shapes[:1]
    if one.target.startswith("__cublas") and one.shapes[-1].dtype == "s8":
        return one.shapes[:-1]  # the last is scratch memory
    return one.shapes


def _host_bytes(one: Instruction, inside: Computation) -> float:
    """Bytes that a copy moves from or to host memory, or a slice of an array there."""
    kind = one.opcode.removesuffix("-start")
    if kind not in ("copy", "dynamic-slice", "dynamic-update-slice"):
        return 0.0
    operands = [inside.instructions[name].shapes[0] for name in one.operands[:2]]
    if kind == "dynamic-update-slice":
        whole, moved = operands
        return moved.bytes if whole.on_host != moved.on_host else 0.0
    # An asynchronous slice has its operands before its result.
    moved = one.shapes[len(one.operands) if one.opcode == "dynamic-slice-start" else 0]
    return moved.bytes if operands[0].on_host != moved.on_host else 0.0


def _read_bytes(parameter: Instruction, called: Computation, whole: float, module: Module) -> float:
    """Bytes that a fusion reads of an operand: only the slices, if it is used in no other way.

    Follows nested fusions.
    """
    total = 0.0
    for user in called.users[parameter.name]:
        if user.opcode == "bitcast" or _is_layout_copy(user, module):
            total += _read_bytes(user, called, whole, module)
        elif user.opcode == "fusion":
            inner = module.computations[user.called("calls") or ""]
            indices = [i for i, name in enumerate(user.operands) if name == parameter.name]
            total += sum(_read_bytes(inner.parameters[i], inner, whole, module) for i in indices)
        elif user.opcode in ("dynamic-slice", "gather", "slice") and (
            user.operands[0] == parameter.name
        ):
            total += user.bytes
        elif user.opcode in ("dynamic-update-slice", "scatter") and (
            user.operands[0] == parameter.name
        ):
            continue
        else:
            return whole
    return min(total, whole)


def _is_layout_copy(one: Instruction, module: Module) -> bool:
    """Whether it is a fusion with just a layout copy, done only for the elements that are read."""
    if one.opcode != "fusion":
        return False
    inner = module.computations[one.called("calls") or ""]
    return inner.root.opcode == "copy" and len(inner.instructions) == 2


def _written_bytes(root: Instruction, called: Computation) -> float:
    """Bytes that a fusion writes for one of its results: the update if it is in place."""
    while root.opcode == "bitcast":
        root = called.instructions[root.operands[0]]
    if root.opcode in ("dynamic-update-slice", "scatter"):
        return sum(_operand_bytes(root, called)[1:], 0.0)
    return sum((shape.bytes for shape in _results(root)), 0.0)


def replica_group(attributes: str) -> list[int]:
    """The devices of a collective's first replica group."""
    if match := re.search(r"replica_groups=\{\{([\d,]+)\}", attributes):
        return [int(n) for n in match[1].split(",")]
    if match := re.search(
        r"replica_groups=\[(\d+),(\d+)\]<=\[([\d,]+)\](?:T\(([\d,]+)\))?", attributes
    ):
        dims = [int(n) for n in match[3].split(",")]
        order = np.arange(math.prod(dims)).reshape(dims)
        if match[4]:
            order = order.transpose([int(n) for n in match[4].split(",")])
        return order.reshape(int(match[1]), int(match[2]))[0].tolist()
    if match := re.search(r"replica_groups=mesh\[([^\]]*)\][^{]*\{([^}]*)\}", attributes):
        sizes = {name: int(n) for name, n in re.findall(r"'([^']+)'=(\d+)", match[1])}
        named = re.findall(r"'([^']+)'", match[2])
        order = np.arange(math.prod(sizes.values())).reshape(list(sizes.values()))
        index = tuple(slice(None) if name in named else 0 for name in sizes)
        return order[index].reshape(-1).tolist()
    if match := re.search(r"source_target_pairs=\{((?:\{\d+,\d+\},?)+)\}", attributes):
        for source, target in re.findall(r"\{(\d+),(\d+)\}", match[1]):
            if source != target:
                return [int(source), int(target)]
    return []
