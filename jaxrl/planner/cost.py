"""What one call of a compiled program does on a device: operations, memory traffic, collectives.

XLA's own cost analysis counts the body of a loop once; here it counts as often as it runs.
"""

import collections
import dataclasses
import math
import re
from collections.abc import Callable

import numpy as np

from jaxrl.planner.hlo import Computation, Instruction, Module, Shape, parse
from jaxrl.planner.kernels import Kernels

Trips = Callable[[str], float | None]  # op_name of a loop whose bound is data -> how often it runs
KINDS = (
    "all-gather",
    "all-reduce",
    "reduce-scatter",
    "all-to-all",
    "ragged-all-to-all",
    "collective-permute",
    "collective-broadcast",
)
FREE = {
    "parameter", "constant", "tuple", "get-tuple-element", "bitcast", "after-all", "partition-id",
    "replica-id", "opt-barrier", "domain", "copy-done", "iota",
}  # fmt: skip
CALLS = ("call", "async-start")


@dataclasses.dataclass(frozen=True)
class Collective:
    """One collective of the program."""

    kind: str
    bytes: float  # per device: what an all-gather brings together, else what a device puts in
    n_devices: int  # that take part together
    spread: int  # distance between the first and the last of them, in devices
    times: float  # executions in one call of the program
    loops: tuple[str, ...]  # op_name of every loop around it
    shapes: tuple[Shape, ...]  # of its result
    op_name: str

    @property
    def in_loop(self) -> bool:
        return bool(self.loops)


@dataclasses.dataclass
class Cost:
    """Per device and call. `flops` are those of matrix products and convolutions, in kernels too, by operand
    dtype."""

    flops: dict[str, float] = dataclasses.field(
        default_factory=lambda: collections.defaultdict(float)
    )
    bytes_accessed: float = 0.0  # of HBM
    host_bytes: float = 0.0  # copied from or to the host's memory
    collectives: list[Collective] = dataclasses.field(default_factory=list)
    unknown_loops: list[str] = dataclasses.field(default_factory=list)  # counted once

    @property
    def total_flops(self) -> float:
        return float(sum(self.flops.values()))

    def by_kind(self) -> dict[str, dict[str, int]]:
        """{kind: {"count", "bytes"}} over all executions of one call."""
        found: dict[str, dict[str, float]] = {}
        for one in self.collectives:
            entry = found.setdefault(one.kind, {"count": 0, "bytes": 0})
            entry["count"] += one.times
            entry["bytes"] += one.times * one.bytes
        return {kind: {n: round(v) for n, v in found[kind].items()} for kind in sorted(found)}


def program_cost(
    text: str,
    trips: Trips = lambda op_name: None,
    kernels: Kernels = lambda op_name, operands, results: None,
) -> Cost:
    """The cost of `compiled.as_text()`. `trips` knows the loops whose bounds are data; what it does
    not know counts once. `kernels` knows custom calls; others read their operands and write their results. Of a
    conditional the cheapest branch counts, but every collective."""
    walk = _Walk(parse(text), trips, kernels)
    walk.computation(walk.module.entry, 1.0, ())
    return walk.cost


class _Walk:
    """From the entry down, multiplying by trip counts."""

    def __init__(self, module: Module, trips: Trips, kernels: Kernels):
        self.module, self.trips, self.kernels, self.cost = module, trips, kernels, Cost()

    def computation(self, name: str, times: float, loops: tuple[str, ...]) -> None:
        inside = self.module.computations[name]
        for one in inside.instructions.values():
            if one.opcode == "while":
                self._loop(one, inside, times, loops)
            elif one.opcode == "conditional":
                self._conditional(one, times, loops)
            elif one.opcode in CALLS:
                name = one.called("to_apply") or one.called("calls") or ""
                self.computation(name, times, loops)
            elif one.opcode == "fusion":
                self._fused(one.called("calls") or "", times, loops)
                self.cost.bytes_accessed += times * self._fusion_bytes(one, inside)
            elif kind := _kind(one):
                self._collective(kind, one, inside, times, loops)
            elif one.opcode not in FREE and not one.opcode.endswith(("-done", "-update")):
                self._flops(one, inside, times)
                self.cost.bytes_accessed += times * _bytes(one, inside)
                self.cost.host_bytes += times * _host_bytes(one, inside)

    def _loop(self, loop: Instruction, inside: Computation, times: float, loops) -> None:
        trips = self.module.trip_count(loop, inside)
        if trips is None:
            trips = self.trips(loop.op_name)
        if trips is None:
            self.cost.unknown_loops.append(loop.op_name)
            trips = 1
        body = loop.called("body") or ""
        self.computation(body, times * trips, (*loops, loop.op_name))

    def _conditional(self, one: Instruction, times: float, loops) -> None:
        names = one.called_list("branch_computations")
        names = names or [one.called(f"{side}_computation") or "" for side in ("true", "false")]
        branches = []
        for name in names:
            walk = _Walk(self.module, self.trips, self.kernels)
            walk.computation(name, times, loops)
            branches.append(walk.cost)
        cheapest = min(branches, key=lambda cost: (cost.total_flops, cost.bytes_accessed))
        for dtype, flops in cheapest.flops.items():
            self.cost.flops[dtype] += flops
        self.cost.bytes_accessed += cheapest.bytes_accessed
        for branch in branches:
            self.cost.collectives += branch.collectives
            self.cost.unknown_loops += branch.unknown_loops

    def _fused(self, name: str, times: float, loops) -> None:
        """Operations inside a fusion; its memory traffic is that of the fusion as a whole.

        On TPU a collective that runs beside other work appears once in every fusion that it passes
        through; it counts where it starts. A reduce-scatter is an all-reduce with its slices there.
        """
        inside = self.module.computations[name]
        targets = {one.target for one in inside.instructions.values()}
        passing = name.startswith("async_collective") or "AsyncCollectiveDone" in targets
        scatters = "all-reduce-scatter" in name
        for one in inside.instructions.values():
            if one.opcode == "fusion":
                self._fused(one.called("calls") or "", times, loops)
            elif kind := _kind(one):
                if not passing or "AsyncCollectiveStart" in targets:
                    kind = "reduce-scatter" if scatters else kind
                    self._collective(kind, one, inside, times, loops)
            else:
                self._flops(one, inside, times)

    def _collective(self, kind: str, one: Instruction, inside: Computation, times, loops) -> None:
        members = group(one.attributes)
        n = len(members)
        if n < 2:
            return
        size = sum(_operand_bytes(one, inside))
        self.cost.collectives.append(
            Collective(
                kind=kind,
                bytes=size * n if kind == "all-gather" else size,
                n_devices=n,
                spread=max(members) - min(members),
                times=times,
                loops=loops,
                shapes=one.shapes,
                op_name=one.op_name,
            )
        )
        self.cost.bytes_accessed += times * _bytes(one, inside)

    def _flops(self, one: Instruction, inside: Computation, times: float) -> None:
        flops, dtype = _flops_of(one, inside)
        if one.opcode == "custom-call" and one.operands:
            operands = [inside.instructions[name].shapes[0] for name in one.operands]
            if work := self.kernels(one.op_name, operands, one.shapes):
                flops, dtype = work.flops, work.dtype
                self.cost.bytes_accessed += times * work.more_bytes
        if flops:
            self.cost.flops[dtype] += times * flops

    def _fusion_bytes(self, fusion: Instruction, inside: Computation) -> float:
        """What a fusion reads and writes: of an array that it only slices the slices, of one that it
        updates in place the update."""
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
        if len(written) == len(fusion.shapes):
            return total + sum(
                n for n, shape in zip(written, fusion.shapes, strict=True) if shape.in_hbm
            )
        return total + sum(written)


def _kind(one: Instruction) -> str | None:
    name = one.opcode.removesuffix("-start")
    return name if name in KINDS else None


def _hbm(shapes: tuple[Shape, ...]) -> float:
    return sum((shape.bytes for shape in shapes if shape.in_hbm), 0.0)


def _operand_bytes(one: Instruction, inside: Computation) -> list[float]:
    return [inside.instructions[o].bytes for o in one.operands if o in inside.instructions]


def _bytes(one: Instruction, inside: Computation) -> float:
    """HBM read and written by an instruction on its own."""
    operands = [inside.instructions[o] for o in one.operands if o in inside.instructions]
    if one.opcode in ("dynamic-slice", "gather", "slice"):
        return 2 * _hbm(one.shapes) + sum(_hbm(o.shapes) for o in operands[1:])
    if one.opcode in ("dynamic-update-slice", "scatter"):
        return 2 * sum((_hbm(o.shapes) for o in operands[1:]), 0.0)
    if one.target == "AllocateBuffer":
        return 0.0
    made = one.shapes[:1] if one.opcode == "copy-start" else one.shapes  # its source again behind
    return _hbm(made) + sum(_hbm(o.shapes) for o in operands)


def _host_bytes(one: Instruction, inside: Computation) -> float:
    """What a copy moves from the host's memory or to it."""
    if one.opcode not in ("copy", "copy-start"):
        return 0.0
    source = inside.instructions[one.operands[0]].shapes[0]
    target = one.shapes[0]
    return target.bytes if source.on_host != target.on_host else 0.0


def _read_bytes(parameter: Instruction, called: Computation, whole: float, module: Module) -> float:
    """Of a fusion's operand: no more than the slices, if nothing else is made of it, here or in a fusion
    within the fusion."""
    total = 0.0
    for user in called.users[parameter.name]:
        if user.opcode == "bitcast" or _only_lays_out(user, module):
            total += _read_bytes(user, called, whole, module)
        elif user.opcode == "fusion":
            inner = module.computations[user.called("calls") or ""]
            places = [i for i, name in enumerate(user.operands) if name == parameter.name]
            total += sum(_read_bytes(inner.parameters[i], inner, whole, module) for i in places)
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


def _only_lays_out(one: Instruction, module: Module) -> bool:
    """A copy within a fusion, as a fusion of its own: it is done for what is read of it."""
    if one.opcode != "fusion":
        return False
    inner = module.computations[one.called("calls") or ""]
    return inner.root.opcode == "copy" and len(inner.instructions) == 2


def _written_bytes(root: Instruction, called: Computation) -> float:
    while root.opcode == "bitcast":
        root = called.instructions[root.operands[0]]
    if root.opcode in ("dynamic-update-slice", "scatter"):
        return sum(_operand_bytes(root, called)[1:], 0.0)
    return root.bytes


def _flops_of(one: Instruction, inside: Computation) -> tuple[float, str]:
    """(2 x multiply-adds, operand dtype) of a matrix product or convolution, else (0, "")."""
    gemm = one.opcode == "custom-call" and ("gemm" in one.target or "matmul" in one.target)
    if one.opcode not in ("dot", "convolution") and not gemm:
        return 0.0, ""
    operands = [inside.instructions[o] for o in one.operands[:2] if o in inside.instructions]
    if len(operands) < 2:
        return 0.0, ""
    left, right = operands[0].shapes[0], operands[1].shapes[0]
    out = math.prod(one.shapes[0].dims)
    if one.opcode == "convolution":
        return 2.0 * out * _window(one, left, right), left.dtype
    dims = one.numbers(
        "lhs_contracting_dims" if one.opcode == "dot" else "lhs_contracting_dimensions"
    )
    return 2.0 * out * math.prod(left.dims[d] for d in dims), left.dtype


def _window(one: Instruction, image: Shape, kernel: Shape) -> float:
    """Multiply-adds per output of a convolution: input features times the places of its window that
    meet an input. On TPU the batch of a matrix product is a window that meets one."""
    labels = re.search(r"dim_labels=(\w+)_(\w+)->(\w+)", one.attributes)
    if labels is None:
        return 0.0
    sizes = dict(zip(labels[2], kernel.dims, strict=True))
    inputs = dict(zip(labels[1], image.dims, strict=True))
    outputs = dict(zip(labels[3], one.shapes[0].dims, strict=True))
    match = re.search(r"\bwindow=\{([^}]*)\}", one.attributes)
    fields = dict(re.findall(r"(\w+)=([\w\-]+)", match[1])) if match else {}
    total = float(sizes["i"])
    for d in sorted(label for label in sizes if label.isdigit()):
        n = int(d)
        stride, pad, lhs, rhs = (
            fields[name].split("x")[n] if name in fields else default
            for name, default in (
                ("stride", "1"),
                ("pad", "0_0"),
                ("lhs_dilate", "1"),
                ("rhs_dilate", "1"),
            )
        )
        at = (
            np.arange(outputs[d])[:, None] * int(stride)
            + np.arange(sizes[d])[None] * int(rhs)
            - int(pad.split("_")[0])
        )
        valid = (at >= 0) & (at < (inputs[d] - 1) * int(lhs) + 1) & (at % int(lhs) == 0)
        total *= valid.sum() / outputs[d]
    groups = re.search(r"batch_group_count=(\d+)", one.attributes)
    return total / (int(groups[1]) if groups else 1)


def group(attributes: str) -> list[int]:
    """The devices of a collective's first group."""
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
        cut = tuple(slice(None) if name in named else 0 for name in sizes)
        return order[cut].reshape(-1).tolist()
    if match := re.search(r"source_target_pairs=\{((?:\{\d+,\d+\},?)+)\}", attributes):
        for source, target in re.findall(r"\{(\d+),(\d+)\}", match[1]):
            if source != target:
                return [int(source), int(target)]
    return []
