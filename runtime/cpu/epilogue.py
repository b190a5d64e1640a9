"""Arguments of a CPU kernel that pass its row program: code, operands, constants and outputs."""

from collections.abc import Iterator
from typing import Any

import torch
from torch.fx import Node

from gnnc.ir.qtype import QType
from gnnc.ir.quantized import STATIC_RANGE
from gnnc.runtime.program.emitter import Emitter
from gnnc.runtime.program.launches import Expr, tuple_of
from gnnc.runtime.row_program.build import Operand, Out, RowProgram, argument_of
from gnnc.runtime.row_program.opcodes import Op

_ABSENT = torch.empty(0)
_QMAX = QType().qmax


def emit_program(program: RowProgram, node: Node, emitter: Emitter, rows: Any, width: int) -> list[Expr]:
    """Allocate the outputs of a row program; return its four arguments: code, operands, constants, outputs.

    Args:
        program: the program.
        node: the node of the outer graph that the kernel runs for.
        emitter: the program under construction.
        rows: number of rows of the result.
        width: columns of the accumulator, the width of results that no other kernel reads.
    """
    operands = [_operand(item, node, emitter) for item in program.operands]
    results = emitter.outputs(node)
    outs = [_output(out, results, emitter, rows, width) for out in program.outs]
    for number in program.scales:
        emitter.scales.append((node, outs[number]))
    if emitter.check_finite:
        for number, factor, base in _ranges(program):
            suited = argument_of(node, base).meta.get(STATIC_RANGE)
            if suited is not None:
                emitter.check_range(node, suited, outs[number], factor)
    code = emitter.bind(_code(program, emitter.check_finite), "code")
    consts = emitter.bind(tuple(program.consts), "consts")
    return [code, tuple_of(operands), consts, tuple_of(out.written for out in outs)]


def _ranges(program: RowProgram) -> Iterator[tuple[int, float, int]]:
    """Yield for each scale that is given: the output with the largest value, its factor, and the argument."""
    largest, factor = -1, 1.0
    for op, a, b, c in program.steps:
        match op:
            case Op.AMAX:
                largest, factor = a, 1.0
            case Op.QUANT_ROW:
                largest, factor = b, float(_QMAX)
            case Op.QUANT_STATIC | Op.QUANT_POW2:
                base = program.operands[b if op == Op.QUANT_STATIC else c].index
                assert base is not None and largest >= 0, "saturation hides values that nothing checks"
                yield largest, factor, base


def _operand(operand: Operand, node: Node, emitter: Emitter) -> Expr:
    if operand.index is None:
        return emitter.bind(_ABSENT, "absent")
    source = argument_of(node, operand.index)
    return emitter.matrix(source) if operand.form == "matrix" else emitter.vector(source)


def _output(out: Out, results: list[Node | None], emitter: Emitter, rows: Any, width: int) -> Expr:
    result = None if out.result is None else results[out.result]
    if out.form == "flag":
        return emitter.flag() if emitter.check_finite else emitter.bind(_ABSENT, "absent")
    if result is None:
        return emitter.scratch(
            rows, 1 if out.form == "vector" else width, out.dtype, flat=out.form == "vector"
        )
    if out.form == "vector":
        return emitter.allocate_vector(result)
    if out.form in ("sum", "scalar"):
        return emitter.allocate_vector(result)
    return emitter.allocate(result, dense=out.form == "dense")


def _code(program: RowProgram, check_finite: bool) -> tuple[int, ...]:
    """Return the instructions, without checks for NaN and infinity unless ``check_finite``."""
    steps = (step for step in program.steps if check_finite or step[0] != Op.AMAX)
    return tuple(int(number) for step in steps for number in step)


def check_scales(emitter: Emitter) -> None:
    """Emit the check of the row scales that the last launch wrote."""
    for node, name in emitter.scales:
        emitter.check_scale(node, name)
    emitter.scales.clear()
