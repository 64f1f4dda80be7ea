"""Parser for the text of compiled XLA modules: computations, instructions, shapes, loops."""

import dataclasses
import functools
import math
import re

import numpy as np

ITEM_BYTES = {
    "pred": 1, "s4": 0.5, "u4": 0.5, "s8": 1, "u8": 1, "s16": 2, "u16": 2, "s32": 4, "u32": 4,
    "s64": 8, "u64": 8, "f8e4m3fn": 1, "f8e5m2": 1, "bf16": 2, "f16": 2, "f32": 4, "f64": 8,
    "c64": 8, "c128": 16, "token": 0,
}  # fmt: skip
HEADER = re.compile(r"(ENTRY )?%?([\w.\-]+) \(.*\{\s*$")
NAME = re.compile(r"\s+(ROOT )?%?([\w.\-]+) = ")
ARRAY = re.compile(r"\b([a-z]\w*)\[([\d,<= ]*)\](?:\{([^}]*)\})?")
FAST_MEMORY = re.compile(r"S\((?!0\))\d+\)")  # on-chip memory, not HBM
HOST_MEMORY = "S(5)"
NO_ESTIMATE = 2**63 - 1  # that the TPU compiler writes for kernels that it cannot estimate
# A kernel's metadata span several lines.
CONTINUED = re.compile(r'\n(?="|}[^\n])')


@dataclasses.dataclass(frozen=True)
class HloShape:
    """One array of an instruction's result."""

    dtype: str
    dims: tuple[int, ...]
    in_hbm: bool = True
    on_host: bool = False

    @property
    def bytes(self) -> float:
        return float(math.prod(self.dims) * ITEM_BYTES.get(self.dtype, 4))


@dataclasses.dataclass(frozen=True)
class Instruction:
    """`name = shapes opcode(operands), attributes`."""

    name: str
    shapes: tuple[HloShape, ...]
    opcode: str
    operands: tuple[str, ...]
    literal: str  # text in the parentheses: a constant's value, a parameter's number
    attributes: str
    root: bool

    @functools.cached_property
    def op_name(self) -> str:
        """The JAX operations that it was compiled from, outermost first."""
        match = re.search(r'op_name="([^"]*)"', self.attributes)
        return match[1] if match else ""

    def called(self, attribute: str) -> str | None:
        """The computation named by an attribute such as `body` or `calls`."""
        match = re.search(rf"\b{attribute}=%?([\w.\-]+)", self.attributes)
        return match[1] if match else None

    def called_list(self, attribute: str) -> list[str]:
        """The computations named by an attribute such as `branch_computations`."""
        match = re.search(rf"\b{attribute}=\{{([^}}]*)\}}", self.attributes)
        return re.findall(r"[\w.\-]+", match[1]) if match else []

    def numbers(self, attribute: str) -> tuple[int, ...]:
        """The value of an attribute such as `lhs_contracting_dims={1,2}`."""
        match = re.search(rf'\b{attribute}"?[=:]?[\[{{]([\d,"\s]*)[\]}}]', self.attributes)
        return tuple(int(n) for n in re.findall(r"\d+", match[1])) if match else ()

    @property
    def bytes(self) -> float:
        return sum((shape.bytes for shape in self.shapes), 0.0)

    @property
    def channel(self) -> str:
        """The identity of a collective in all fusions that a TPU's compiler splits it over."""
        match = re.search(r"channel_id=(\d+)", self.attributes)
        return f"channel {match[1]}" if match else self.name

    @property
    def estimated_cycles(self) -> float:
        """Clock cycles of a TPU core by the compiler's own estimate; 0 if it has none."""
        match = re.search(r'"estimated_cycles":"(\d+)"', self.attributes)
        return float(match[1]) if match and int(match[1]) < NO_ESTIMATE else 0.0

    @property
    def target(self) -> str:
        """The target of a custom call, else ""."""
        match = re.search(r'custom_call_target="([^"]*)"', self.attributes)
        return match[1] if match else ""


@dataclasses.dataclass
class Computation:
    name: str
    instructions: dict[str, Instruction]

    @functools.cached_property
    def root(self) -> Instruction:
        return next(i for i in self.instructions.values() if i.root)

    @functools.cached_property
    def parameters(self) -> dict[int, Instruction]:
        found = [i for i in self.instructions.values() if i.opcode == "parameter"]
        return {int(i.literal): i for i in found}

    @functools.cached_property
    def users(self) -> dict[str, list[Instruction]]:
        """The instructions that read each instruction's result."""
        found: dict[str, list[Instruction]] = {name: [] for name in self.instructions}
        for instruction in self.instructions.values():
            for operand in instruction.operands:
                if operand in found:
                    found[operand].append(instruction)
        return found


@dataclasses.dataclass
class Module:
    entry: str
    computations: dict[str, Computation]

    def trip_count(self, loop: Instruction, inside: Computation) -> int | None:
        """Trip count of a while loop; None if it depends on data.

        Known if the compiler noted it, or if the loop compares a counter with a constant.
        """
        if match := re.search(r'known_trip_count"?:\{"?n"?:"?(\d+)', loop.attributes):
            return int(match[1])
        condition = self.computations[loop.called("condition") or ""]
        comparison = self._loop_condition(condition)
        if comparison is None:
            return None
        counter, bound, inclusive = comparison
        start = 0
        init = inside.instructions.get(loop.operands[0])
        if init is not None and init.opcode == "tuple" and counter < len(init.operands):
            first = _constant(inside, init.operands[counter])
            start = 0 if first is None else first
        return max(bound - start + inclusive, 0)

    def _loop_condition(self, condition: Computation) -> tuple[int, int, int] | None:
        """(index of the counter in the loop state, constant bound, 1 if the bound is inclusive)."""
        root = condition.root
        if root.opcode == "fusion":  # the comparison only, with its operands in order
            inner = self.computations[root.called("calls") or ""].root
            sides = [self._fusion_operand(root, o) for o in inner.operands]
        else:
            inner, sides = root, list(root.operands)
        direction = re.search(r"direction=(\w+)", inner.attributes)
        if inner.opcode != "compare" or direction is None or direction[1] not in ("LT", "LE"):
            return None
        counter = condition.instructions.get(sides[0] or "")
        bound = _constant(condition, sides[1] or "")
        if counter is None or bound is None or counter.opcode != "get-tuple-element":
            return None
        return _index(counter), bound, int(direction[1] == "LE")

    def _fusion_operand(self, fusion: Instruction, name: str) -> str | None:
        """The operand of a fusion that a parameter inside it stands for."""
        inside = self.computations[fusion.called("calls") or ""].instructions[name]
        if inside.opcode != "parameter":
            return None
        return fusion.operands[int(inside.literal)]


def parse(text: str) -> Module:
    """Parses `compiled.as_text()`. Raises ValueError if it has no entry computation."""
    computations: dict[str, Computation] = {}
    entry, current = "", None
    for line in CONTINUED.sub("", text).splitlines():
        if not line:
            continue
        if line[0] not in " }":
            if match := HEADER.match(line):
                current = computations[match[2]] = Computation(match[2], {})
                entry = match[2] if match[1] else entry
        elif current is not None and (instruction := _instruction(line)):
            current.instructions[instruction.name] = instruction
    if not entry:
        raise ValueError("not the text of a compiled module: it has no ENTRY computation")
    return Module(entry, computations)


def flops_of(one: Instruction, inside: Computation) -> tuple[float, str]:
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


def _window(one: Instruction, image: HloShape, kernel: HloShape) -> float:
    """Multiply-adds per output of a convolution: input features times valid window positions.

    On TPU the batch of a matrix product is a window with one valid position.
    """
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


def _instruction(line: str) -> Instruction | None:
    match = NAME.match(line)
    if match is None:
        return None
    end = _type_end(line, match.end())
    call = re.compile(r"\s*([\w\-]+)\(").match(line, end)
    if call is None:
        return None
    close = _closing(line, call.end() - 1)
    inside = line[call.end() : close]
    return Instruction(
        name=match[2],
        shapes=_shapes(line[match.end() : end]),
        opcode=call[1],
        operands=tuple(re.findall(r"%([\w.\-]+)", inside)),
        literal=inside,
        attributes=line[close + 1 :],
        root=match[1] is not None,
    )


def _type_end(line: str, start: int) -> int:
    """End of the type that starts at `start`."""
    if line[start] == "(":
        return _closing(line, start) + 1
    depth = 0
    for at in range(start, len(line)):
        depth += (line[at] in "{[(") - (line[at] in ")]}")
        if line[at] == " " and depth == 0:
            return at
    return len(line)


def _closing(line: str, start: int) -> int:
    """Index of the parenthesis that closes the one at `start`."""
    depth = 0
    for match in re.compile(r"[()]").finditer(line, start):
        depth += 1 if match[0] == "(" else -1
        if depth == 0:
            return match.start()
    return len(line)


def _shapes(text: str) -> tuple[HloShape, ...]:
    return tuple(
        HloShape(
            dtype,
            tuple(int(n) for n in re.findall(r"\d+", dims)),
            not FAST_MEMORY.search(layout or ""),
            HOST_MEMORY in (layout or ""),
        )
        for dtype, dims, layout in ARRAY.findall(text)
    )


def _constant(computation: Computation, name: str) -> int | None:
    """The value of an integer constant, through copies and bitcasts; else None."""
    instruction = computation.instructions.get(name)
    while instruction is not None and instruction.opcode in ("copy", "bitcast"):
        instruction = computation.instructions.get(instruction.operands[0])
    if instruction is None or instruction.opcode != "constant":
        return None
    return int(instruction.literal) if re.fullmatch(r"-?\d+", instruction.literal) else None


def _index(instruction: Instruction) -> int:
    match = re.search(r"index=(\d+)", instruction.attributes)
    return int(match[1]) if match else 0
