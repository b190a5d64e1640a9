"""Translation of the row-local ops behind an anchor into the row program of its kernel.

A plan refers to values by number (the operand of the fused submodule, the result of it), never by
node: it stays valid for every copy of the graph.
"""

from collections.abc import Collection, Iterable, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

import torch
from torch import Tensor
from torch.fx import GraphModule, Node

from gnnc.ir.nodes import aten_name, first_operand, op_name, outputs_of, unpack
from gnnc.ir.qtype import BYTE_DTYPES
from gnnc.ir.row_local import RowOp, Step, linearize
from gnnc.runtime.program.sizes import expression
from gnnc.runtime.registry import Decline
from gnnc.runtime.row_program.opcodes import Op

WINDOW_ALIGNMENT = 16
"""Results that one kernel makes side by side start at columns that are multiples of this."""

ROW_DTYPES = (torch.float32, torch.bfloat16, torch.float16, *BYTE_DTYPES)
"""Dtypes of rows that edges gather."""

_MATRICES = ("full", "bits", "backward")
"""Last words of the kinds of steps that read an operand with a row for each row of the result."""


class Refusal(Exception):
    """The reason why a ``plan`` function takes no kernel; ``planned`` turns it into a Decline."""


@dataclass(frozen=True, slots=True)
class Operand:
    """A tensor that the program reads: operand ``index`` of the submodule, or none.

    Attributes:
        index: position among the call's arguments; None: absent.
        form: ``matrix``, ``vector`` or ``seed`` (of random bits).
        is_quantized: whether it holds quantized rows, whose scales are the next operand.
    """

    index: int | None
    form: str
    is_quantized: bool = False


@dataclass(frozen=True, slots=True)
class Out:
    """A tensor that the program writes.

    Attributes:
        result: number of the submodule's result; None: only the kernel needs the tensor.
        form: ``matrix``, ``dense`` (no padding), ``vector`` (one element a row), ``scalar`` (one of all
            rows), ``power`` (the power of two of all), ``sum`` (one for each column) or ``flag`` (one float
            that only the kernel needs).
        dtype: element type.
    """

    result: int | None
    form: str
    dtype: torch.dtype


@dataclass(slots=True)
class RowProgram:
    """A row program, and the operands, constants and outputs that its numbers refer to.

    Attributes:
        code, operands, consts, outs: as in the kernels' last four arguments.
        scales: outs that are row scales, to be checked for NaN and infinity.
        is_checked: whether such a check covers the present accumulator.
    """

    code: list[int] = field(default_factory=list)
    operands: list[Operand] = field(default_factory=list)
    consts: list[float] = field(default_factory=list)
    outs: list[Out] = field(default_factory=list)
    scales: list[int] = field(default_factory=list)
    is_checked: bool = False

    @property
    def steps(self) -> list[tuple[Op, int, int, int]]:
        """The instructions, each as (opcode, a, b, c)."""
        code = self.code
        return [(Op(code[i]), code[i + 1], code[i + 2], code[i + 3]) for i in range(0, len(code), 4)]

    @property
    def windows(self) -> list["RowProgram"]:
        """The row programs of results that lie side by side, each with the operands and outs of all."""
        starts = [i for i, step in enumerate(self.steps) if step[0] == Op.WINDOW]
        if not starts:
            return [self]
        ends = [*starts[1:], len(self.steps)]
        parts = [self.code[4 * (start + 1) : 4 * end] for start, end in zip(starts, ends, strict=True)]
        return [replace(self, code=code) for code in parts]

    @property
    def ops(self) -> set[Op]:
        """The set of opcodes."""
        return {step[0] for step in self.steps}

    @property
    def quantizes(self) -> bool:
        """Return whether the program stores rows of quantized values."""
        return not self.ops.isdisjoint({Op.QUANT_ROW, Op.QUANT_STATIC, Op.QUANT_POW2})

    def add(self, name: str, a: int = -1, b: int = -1, c: int = -1) -> None:
        """Append an instruction."""
        self.code += [int(Op[name]), a, b, c]

    def const(self, value: float) -> int:
        """Add a constant and return its number."""
        self.consts.append(float(value))
        return len(self.consts) - 1

    def operand(self, index: int | None, form: str) -> int:
        """Add an operand and return its number."""
        self.operands.append(Operand(index, form))
        return len(self.operands) - 1

    def quantized_operand(self, values: int, scale: int) -> int:
        """Add quantized rows and their scales; return the number of the rows."""
        self.operands += [Operand(values, "matrix", is_quantized=True), Operand(scale, "vector")]
        return len(self.operands) - 2

    def out(self, result: int | None, form: str, dtype: torch.dtype) -> int:
        """Add an output and return its number."""
        self.outs.append(Out(result, form, dtype))
        return len(self.outs) - 1


class Inner:
    """The graph of a fused submodule, or a single node as one, with its operands and results by number."""

    def __init__(self, node: Node) -> None:
        self.nodes: list[Node] = [node]
        operands: list[Node] = node.all_input_nodes
        results: Any = node
        if node.op == "call_module":
            owner = node.graph.owning_module
            assert owner is not None
            module = owner.get_submodule(str(node.target))
            assert isinstance(module, GraphModule)
            self.nodes = [n for n in module.graph.nodes if n.op not in ("placeholder", "output")]
            operands = list(module.graph.find_nodes(op="placeholder"))
            results = outputs_of(module.graph)
        self.operands: dict[Node, int] = {n: i for i, n in enumerate(operands)}
        listed = [results] if isinstance(results, Node) else results
        self.results: dict[Node, int] = {n: i for i, n in enumerate(listed)}

    def operand(self, node: Any, what: str) -> int:
        """Return the number of the operand ``node``; raise Refusal where it is none."""
        if node not in self.operands:
            raise Refusal(f"{what} is computed inside the fused graph, not given to it")
        return self.operands[node]

    def optional(self, node: Any, what: str) -> int | None:
        """Return the number of the operand ``node``, or None where it is absent."""
        return None if node is None else self.operand(node, what)

    def some(self, *targets: str) -> list[Node]:
        """Return the nodes with one of these targets; raise Refusal where there is none."""
        found = [node for node in self.nodes if str(node.target) in targets]
        if not found:
            raise Refusal(f"holds no {' or '.join(targets)}")
        return found

    def only(self, *targets: str) -> Node:
        """Return the only node with one of these targets; raise Refusal for another number."""
        found = self.some(*targets)
        if len(found) != 1:
            raise Refusal(f"holds {len(found)} of {', '.join(targets)}, not one")
        return found[0]


def read_chain(inner: Inner, start: Node) -> list[RowOp]:
    """Return the row-local ops behind ``start``, in the order a kernel runs them."""
    inside = set(inner.nodes)
    return linearize(start, lambda op: set(op.covers) <= inside, inner.results.keys())


def read_division(inner: Inner, start: Node) -> tuple[Node, int | None]:
    """Return the quotient of a small result that a scalar tensor may divide, and the number of the divisor.

    Raises:
        Refusal: another op reads the result.
    """
    divisions = [op for op in read_chain(inner, start) if op.kind != "store_f32"]
    divisors = [operand for op in divisions for operand in op.operands]
    if len(divisors) > 1 or any(op.kind != "div_tensor" for op in divisions):
        raise Refusal("a result is more than divided")
    if not divisors:
        return start, None
    if start in inner.results:
        raise Refusal("a result is read before it is divided, too")
    return divisions[-1].root, inner.operand(divisors[0], "the divisor")


def build(inner: Inner, chain: Iterable[RowOp], covered: Collection[Node]) -> RowProgram:
    """Translate a chain; refuse unless it accounts for every node and every result.

    Args:
        inner: the fused graph.
        chain: the row-local ops that are left after the kernel's own part.
        covered: the nodes of the kernel's own part.
    """
    return build_windows(inner, [0], [chain], covered)


def columns_of(widths: Sequence[int]) -> int:
    """Return the columns of results side by side, each starting at a multiple of ``WINDOW_ALIGNMENT``."""
    starts = [-(-width // WINDOW_ALIGNMENT) * WINDOW_ALIGNMENT for width in widths[:-1]]
    return sum(starts) + widths[-1]


def build_windows(
    inner: Inner, widths: Sequence[int], chains: Sequence[Iterable[RowOp]], covered: Collection[Node]
) -> RowProgram:
    """Translate the chains of several results that lie side by side; see ``build`` for a single one."""
    program = RowProgram()
    seen = set(covered)
    for i, chain in enumerate(chains):
        if len(chains) > 1:
            first = columns_of([*widths[:i], 0])
            program.add("WINDOW", first, widths[i])
            program.is_checked = False
        for op in chain:
            seen.update((*op.covers, *op.operands))
            _translate(inner, op, program)
    if len(chains) > 1 and any(out.result is None and out.form == "matrix" for out in program.outs):
        raise Refusal("one of several results is stored but not read")
    missing: list[Node] = [node for node in inner.nodes if node not in seen]
    if missing:
        raise Refusal(f"{missing[0].name} ({missing[0].target}) has no place in a row program")
    written = {out.result for out in program.outs}
    for node, index in inner.results.items():
        if index not in written:
            raise Refusal(f"result {node} is nothing that a row program stores")
    return program


def _translate(inner: Inner, op: RowOp, program: RowProgram) -> None:
    for step in op.steps:
        if op.role == "store":
            _store(inner, op, step, program)
        else:
            _chain_step(inner, step, program)


def _chain_step(inner: Inner, step: Step, program: RowProgram) -> None:
    name = step.kind.upper()
    program.is_checked = False
    if name not in Op.__members__:
        raise Refusal(f"the row program has no {step.kind}")
    if name == "HEAD_MEAN":
        program.add(name, b=int(step.consts[0]))
        return
    if step.kind == "add_scaled":
        _add_scaled(inner, step, program)
        return
    if not step.operands:
        program.add(name, b=program.const(step.consts[0]) if step.consts else -1)
        return
    form = "matrix" if step.kind.rpartition("_")[2] in _MATRICES else "vector"
    numbers = [_operand(inner, node, form, program, step.kind) for node in step.operands]
    flag = int(step.consts[1]) if len(step.consts) > 1 else -1
    program.add(name, numbers[0], program.const(step.consts[0]) if step.consts else -1, flag)


def _add_scaled(inner: Inner, step: Step, program: RowProgram) -> None:
    matrix, factor = step.operands
    number = _operand(inner, matrix, "matrix", program) if matrix is not None else -1
    scalar = -1 if factor is None else _operand(inner, factor, "vector", program)
    program.add("ADD_SCALED", number, program.const(step.consts[0]), scalar)


def _operand(inner: Inner, node: Node | None, form: str, program: RowProgram, kind: str = "") -> int:
    if node is None:
        return program.operand(None, form)
    # Kernels widen what they load.
    if node not in inner.operands and aten_name(node) == "_to_copy.default":
        node = first_operand(node)
    if form == "matrix" and node not in inner.operands and op_name(node) == "dequantize":
        values, scale = unpack(node, "q", "scale")
        numbers = [inner.operand(value, f"operand {value.name}") for value in (values, scale)]
        return program.quantized_operand(*numbers)
    dtype = node.meta["val"].dtype
    allowed = (torch.float32, torch.bfloat16, torch.float16) if form == "matrix" else (torch.float32,)
    allowed = (torch.uint8,) if kind == "mask_bits" else allowed
    if dtype not in allowed:
        raise Refusal(f"operand {node.name} is {dtype}")
    return program.operand(inner.operand(node, f"operand {node.name}"), form)


def _store(inner: Inner, op: RowOp, step: Step, program: RowProgram) -> None:
    result = inner.results.get(op.root)
    if step.kind in ("quant_row", "quant_static", "quant_pow2"):
        _quantize(inner, op, step, program)
        return
    match step.kind:
        case "store_f32":
            program.add("STORE_F32", program.out(result, "matrix", torch.float32))
        case "store_bf16":
            program.add("STORE_BF16", program.out(result, "matrix", torch.bfloat16))
        case "store_fp16":
            program.add("STORE_FP16", program.out(result, "matrix", torch.float16))
        case "scale_tensor":
            if result is None:
                raise Refusal("a scale of all rows is read before every row has raised it")
            program.add("SCALE_TENSOR", program.out(result, "scalar", torch.float32))
        case "fp16_scale":
            if result is None:
                raise Refusal("a power of two of all rows is read before every row has lowered it")
            program.add("FP16_SCALE", program.out(result, "power", torch.float32))
        case "store_bits":
            program.add("STORE_BITS", program.out(result, "dense", torch.uint8))
        case "col_sum":
            program.add("COL_SUM", program.out(result, "sum", torch.float32))
        case "row_dot":
            attention = _operand(inner, step.operands[0], "vector", program)
            dots = program.out(result, "dense", torch.float32)
            program.add("ROW_DOT", attention, dots, int(step.consts[0]))
        case _:
            raise Refusal(f"the row program has no store {step.kind}")


def _quantize(inner: Inner, op: RowOp, step: Step, program: RowProgram) -> None:
    """Add the store of quantized rows; a seed is the last operand of its step."""
    *bases, seed = step.operands if step.consts else (*step.operands, None)
    if not step.kind == "quant_row":
        _check_accumulator(program)
    quantized = program.out(inner.results.get(op.root), "matrix", op.root.meta["val"].dtype)
    covered = inner.results.get(op.covers[0])
    if seed is not None:
        program.add(
            "STOCHASTIC", program.operand(inner.operand(seed, "the seed"), "seed"), int(step.consts[0])
        )
    match step.kind:
        case "quant_row":
            scale = program.out(covered, "vector", torch.float32)
            program.scales.append(scale)
            program.is_checked = True
            program.add("QUANT_ROW", quantized, scale)
        case "quant_static":
            program.add("QUANT_STATIC", quantized, _operand(inner, bases[0], "vector", program))
        case _:
            shift = program.out(covered, "vector", torch.uint8)
            program.add("QUANT_POW2", quantized, shift, _operand(inner, bases[0], "vector", program))


def _check_accumulator(program: RowProgram) -> None:
    """Store the largest magnitude, unless it is stored: saturation hides NaN and infinity."""
    if not program.is_checked:
        program.add("AMAX", program.out(None, "flag", torch.float32))
        program.is_checked = True


def argument_of(node: Node, index: int) -> Node:
    """Return operand ``index`` of a fused call, or of a single node."""
    # The parameters of a submodule are its placeholders, in order: they have no names in a schema.
    value = node.args[index] if node.op == "call_module" else node.all_input_nodes[index]
    assert isinstance(value, Node)
    return value


def optional_argument(node: Node, index: int | None) -> Node | None:
    """Return operand ``index`` of a fused call, or of a single node; None where it is absent."""
    return None if index is None else argument_of(node, index)


def fixed_width(value: Any) -> int:
    """Return the width of a tensor's rows; raise Refusal where it is symbolic."""
    tensor = value.meta["val"] if isinstance(value, Node) else value
    assert isinstance(tensor, Tensor)
    width = 1
    for size in tensor.shape[1:]:
        if not expression(size).is_number:
            raise Refusal(f"the width {size} is not fixed")
        width *= int(expression(size))
    return width


def planned(function: Any) -> Any:
    """Turn a function that raises Refusal into one that returns Decline."""

    def plan(node: Node) -> Any:
        try:
            return function(node)
        except Refusal as refusal:
            return Decline(str(refusal))

    return plan
