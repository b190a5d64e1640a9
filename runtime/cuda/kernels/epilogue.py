"""CUDA C++ text of row programs: a struct whose call operator a kernel runs on every finished row.

``csrc/cuda/common/row_steps.cuh`` has the steps. Strides, constants and shapes are part of the text, so that
the compiler sees them as constants; pointers are arguments.
"""

from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

import torch
from torch.fx import Node

from gnnc.runtime.cuda.emitter import BLOCK, CudaEmitter, blocks, pointer
from gnnc.runtime.cuda.kernels.fp16_scale import begin_fp16_scale
from gnnc.runtime.cuda.kernels.row_scale import begin_scale
from gnnc.runtime.program.launches import Expr, Operand
from gnnc.runtime.row_program.build import RowProgram, argument_of
from gnnc.runtime.row_program.opcodes import Op

TYPES = {
    torch.float32: "float",
    torch.float16: "__half",
    torch.bfloat16: "__nv_bfloat16",
    torch.int8: "int8_t",
    torch.uint8: "uint8_t",
    torch.float8_e4m3fn: "gnnc::E4m3",
    torch.float8_e5m2: "gnnc::E5m2",
    torch.bool: "bool",
}
_BINARY = {"MUL": "Multiply", "ADD": "Add", "DIV": "Divide", "RSUB": "SubtractFrom"}
_CONST_STEPS = (Op.LEAKY_RELU, Op.ELU, Op.CLAMP_MIN, Op.CLAMP_MAX, Op.L2_NORMALIZE)


@dataclass(slots=True)
class Struct:
    """A C++ struct under construction.

    Attributes:
        fields: declarations of the members.
        values: the members' values, in the order of the members.
        body: statements of its call operator.
        tile: C++ name of the present row.
        width: columns of the present row.
    """

    width: int
    fields: list[str] = field(default_factory=list)
    values: list[Operand] = field(default_factory=list)
    body: list[str] = field(default_factory=list)
    tile: str = "t"

    def member(self, declaration: str, *values: Operand) -> None:
        """Add a member."""
        self.fields.append(declaration)
        self.values += values

    def step(self, call: str, *arguments: str) -> None:
        """Add a call of a step on the present row."""
        self.body.append(f"{call}({', '.join((self.tile, *arguments))});")

    @property
    def text(self) -> str:
        """C++ text of the members and the call operator."""
        lines = [f"  {text};" for text in self.fields] or ["  int64_t nothing;"]
        lines += ["  template <class Tile>", "  __device__ void operator()(Tile& t, int64_t row) const {"]
        lines += [f"    {text}" for text in self.body]
        return "\n".join([*lines, "  }", ""])


class Writer:
    """Writer of one row program as a struct."""

    def __init__(
        self,
        program: RowProgram,
        node: Node,
        emitter: CudaEmitter,
        rows: Any,
        width: int,
        begins_scales: bool = True,
    ) -> None:
        self.program, self.node, self.emitter, self.rows = program, node, emitter, rows
        self._begins_scales = begins_scales
        self._rounding: tuple[str, ...] = ()
        self.struct = Struct(width)
        self.results = emitter.outputs(node)
        self._operands: set[int] = set()
        self._strides: dict[int, int] = {}

    def write(self) -> tuple[str, list[Operand]]:
        """Return the struct's name and its members' values."""
        for step in self.program.steps:
            self._instruction(*step)
        values = self.struct.values or [0]
        return self.emitter.kernel_set.struct("Epilogue", self.struct.text), values

    def _instruction(self, op: Op, a: int, b: int, c: int) -> None:
        special = _SPECIAL.get(op)
        if special is not None:
            special(self, a, b, c)
            return
        verb, _, form = op.name.partition("_")
        if verb in _BINARY and form in _FORMS:
            _FORMS[form](self, f"step::{_BINARY[verb]}{{}}", a, b)
        elif op in _CONST_STEPS:
            self.struct.step(f"step::{op.name.lower()}", self._const(b))
        else:
            self.struct.step(f"step::{op.name.lower()}")

    # Members

    def _const(self, index: int) -> str:
        return literal(self.program.consts[index])

    def operand(self, number: int) -> str:
        """Return the C++ name of an operand, a null pointer where it is absent."""
        operand = self.program.operands[number]
        if operand.index is None:
            return "static_cast<const float*>(nullptr)"
        if number not in self._operands:
            self._operands.add(number)
            source = argument_of(self.node, operand.index)
            kind = TYPES[source.meta["val"].dtype]
            if operand.form == "matrix":
                address = pointer(self.emitter.matrix(source))
                self._strides[number] = self.emitter.row_stride(source)
            else:
                address = self._vector(number)
            self.struct.member(f"const {kind}* a{number}", address)
        return f"a{number}"

    def row_of(self, number: int) -> tuple[str, int]:
        """Return the address of a row of a matrix operand, and the elements from one row to the next."""
        name = self.operand(number)
        stride = self._strides[number]
        return f"{name} + row * {stride}", stride

    def out(self, number: int) -> str:
        """Return the C++ name of an output with one element a row."""
        self._declare(number)
        return f"o{number}"

    def out_row(self, number: int) -> tuple[str, int]:
        """Return the address of a row of an output, and the elements from one row to the next."""
        self._declare(number)
        return f"o{number} + row * {self._strides[~number]}", self._strides[~number]

    def _result(self, number: int) -> Node | None:
        """Return the node whose value is an output, or None where no other kernel reads it."""
        index = self.program.outs[number].result
        return None if index is None else self.results[index]

    def _declare(self, number: int) -> None:
        if ~number in self._strides:
            return
        out = self.program.outs[number]
        result = self._result(number)
        width = 1 if out.form == "vector" else self.struct.width
        if result is None:
            tensor = self.emitter.scratch(self.rows, width, out.dtype, flat=out.form == "vector")
            self._strides[~number] = 1 if out.form == "vector" else self.emitter.padded(width, out.dtype)
        elif out.form == "vector":
            tensor, self._strides[~number] = self.emitter.allocate_vector(result), 1
        else:
            tensor = self.emitter.allocate(result, dense=out.form == "dense")
            self._strides[~number] = self.emitter.row_stride(result)
        self.struct.member(f"{TYPES[out.dtype]}* o{number}", pointer(tensor.written))

    # Steps

    def _tensor(self, function: str, a: int, b: int) -> None:
        self.struct.step("step::with_scalar", f"__ldg({self.operand(a)})", function)

    def _number(self, function: str, a: int, b: int) -> None:
        self.struct.step("step::with_scalar", self._const(b), function)

    def _row(self, function: str, a: int, b: int) -> None:
        self.struct.step("step::with_scalar", f"__ldg({self.operand(a)} + row)", function)

    def _column(self, function: str, a: int, b: int) -> None:
        self.struct.step("step::with_columns", self.operand(a), function)

    def _full(self, function: str, a: int, b: int) -> None:
        """Combine the row with that of a matrix, whose quantized values are multiplied by their scale."""
        row, stride = self.row_of(a)
        if self.program.operands[a].is_quantized:
            self.struct.member(f"const float* s{a}", self._vector(a + 1))
            function = f"step::scaled({function}, __ldg(s{a} + row))"
        self.struct.step(f"step::with_full<{stride}>", row, function)

    def _mul_shifted(self, a: int, b: int, c: int) -> None:
        self.struct.step("step::with_scalar", self._shifted(a, b), "step::Multiply{}")

    def _add_scaled(self, a: int, b: int, c: int) -> None:
        self._full(f"step::AddScaled{{{self._shifted(c, b)}}}", a, b)

    def _shifted(self, operand: int, const: int) -> str:
        """Return the sum of a scalar operand, if there is one, and a constant."""
        constant = self._const(const)
        return constant if operand < 0 else f"__fadd_rn(__ldg({self.operand(operand)}), {constant})"

    def _batch_norm(self, a: int, b: int, c: int) -> None:
        """Multiply and add by a factor and a summand for every column, which an earlier launch computes."""
        emitter, width = self.emitter, self.struct.width
        config = emitter.kernel_set.struct("Norm", f"  static constexpr float kEps = {self._const(b)};\n")
        columns = [emitter.scratch(1, width, torch.float32, flat=True) for _ in range(2)]
        written = [pointer(column.written) for column in columns]
        values = [*(self._vector(a + i) for i in range(4)), *written, width]
        emitter.launch(f"gnnc::norm_columns<{config}>", blocks(width, BLOCK), values)
        for column, function in zip(columns, ("Multiply", "Add"), strict=True):
            name = f"n{len(self.struct.fields)}"
            self.struct.member(f"const float* {name}", pointer(column))
            self.struct.step("step::with_columns", name, f"step::{function}{{}}")

    def _vector(self, number: int) -> Expr:
        """Return a vector's address, 0 where there is none."""
        index = self.program.operands[number].index
        return pointer(None) if index is None else pointer(self.emitter.vector(argument_of(self.node, index)))

    def _layer_norm(self, a: int, b: int, c: int) -> None:
        self.struct.step("step::layer_norm", self.operand(a), self.operand(a + 1), self._const(b))

    def _head_mean(self, a: int, b: int, c: int) -> None:
        tile = f"t{len(self.struct.body)}"
        self.struct.body.append(f"auto {tile} = step::head_mean<{b}>({self.struct.tile});")
        self.struct.tile = tile
        self.struct.width //= b

    def _store(self, a: int, b: int, c: int) -> None:
        row, stride = self.out_row(a)
        kind = TYPES[self.program.outs[a].dtype]
        result = self._result(a)
        streams = kind == "float" and result is not None and self.emitter.is_read_in_order(result)
        self.struct.step(f"step::store<{stride}, {truth(streams)}, {kind}>", row)

    def _quant_row(self, a: int, b: int, c: int) -> None:
        row, stride = self.out_row(a)
        scale = self.out(b)
        arguments = ", ".join((self.struct.tile, row, f"{scale} + row", *self._take_rounding()))
        call = f"step::quant_row<{stride}>({arguments})"
        if self.emitter.check_finite:
            self.struct.body.append(f"step::watch_scale({self.struct.tile}, {call}, {self._watch()});")
        else:
            self.struct.body.append(f"{call};")

    def _quant_static(self, a: int, b: int, c: int) -> None:
        row, stride = self.out_row(a)
        columns, base = self._base(b)
        self.struct.step(f"step::quant_static<{stride}, {columns}>", row, base, *self._take_rounding())

    def _quant_pow2(self, a: int, b: int, c: int) -> None:
        row, stride = self.out_row(a)
        shift = self.out(b)
        result = self._result(a)
        if result is not None:
            self.emitter.weighted.add(result)
        columns, base = self._base(c)
        call = f"step::quant_pow2<{stride}, {columns}>"
        self.struct.step(call, row, f"{shift} + row", base, *self._take_rounding())

    def _stochastic(self, a: int, b: int, c: int) -> None:
        """Round stochastically in the next step that quantizes."""
        index = self.program.operands[a].index
        assert index is not None
        seed = argument_of(self.node, index)
        self.struct.member(f"const int64_t* a{a}", pointer(self.emitter.vector(seed)))
        self._rounding = (f"step::Stochastic{{static_cast<uint64_t>(*a{a}), {b}u, row}}",)

    def _take_rounding(self) -> tuple[str, ...]:
        """Return the last argument of a step that quantizes, if it does not round to nearest."""
        rounding, self._rounding = self._rounding, ()
        return rounding

    def _base(self, number: int) -> tuple[str, str]:
        operand = self.program.operands[number]
        assert operand.index is not None
        value = argument_of(self.node, operand.index).meta["val"]
        return truth(value.dim() > 0 and width_of_value(value) > 1), self.operand(number)

    def _amax(self, a: int, b: int, c: int) -> None:
        if self.emitter.check_finite:
            self.struct.step("step::watch", self._watch())

    def _watch(self) -> str:
        name = f"w{len(self.struct.fields)}"
        self.struct.member(f"step::NanFlag {name}", *self.emitter.nan_flag_arguments(self.node))
        return name

    def _scale_tensor(self, a: int, b: int, c: int) -> None:
        """Raise the scale, which a launch before sets to zero (that of the weight, see ``scales_of``)."""
        scale, result = self.out(a), self._result(a)
        assert result is not None
        if self._begins_scales:
            begin_scale(self.emitter, self.emitter.vector(result))
        self.struct.step("step::scale_tensor", scale)

    def _fp16_scale(self, a: int, b: int, c: int) -> None:
        """Lower the power of two to that of the row; a launch before sets it to the largest."""
        power, result = self.out(a), self._result(a)
        assert result is not None
        begin_fp16_scale(self.emitter, self.emitter.vector(result))
        self.struct.step("step::fp16_scale", power)

    def _col_sum(self, a: int, b: int, c: int) -> None:
        """Add to the sums that the kernel stores at its end."""
        self.struct.step("step::col_sum")

    def _mask_bits(self, a: int, b: int, c: int) -> None:
        row, _ = self.row_of(a)
        self.struct.step("step::mask_bits", row)

    def _store_bits(self, a: int, b: int, c: int) -> None:
        row, _ = self.out_row(a)
        self.struct.step("step::store_bits", row)

    def _elu_backward(self, a: int, b: int, c: int) -> None:
        self._full(f"step::EluBackward<{truth(bool(c))}>{{{self._const(b)}}}", a, b)

    def _leaky_relu_backward(self, a: int, b: int, c: int) -> None:
        self._full(f"step::LeakyReluBackward{{{self._const(b)}}}", a, b)

    def _threshold_backward(self, a: int, b: int, c: int) -> None:
        self._full("step::ThresholdBackward{}", a, b)

    def _row_dot(self, a: int, b: int, c: int) -> None:
        columns = self.operand(a)
        row, _ = self.out_row(b)
        self.struct.step(f"step::row_dot<{c}>", columns, row)


_SPECIAL: dict[Op, Callable[[Writer, int, int, int], None]] = {
    Op.BATCH_NORM: Writer._batch_norm,
    Op.LAYER_NORM: Writer._layer_norm,
    Op.HEAD_MEAN: Writer._head_mean,
    Op.STORE_F32: Writer._store,
    Op.STORE_BF16: Writer._store,
    Op.STORE_FP16: Writer._store,
    Op.QUANT_ROW: Writer._quant_row,
    Op.QUANT_STATIC: Writer._quant_static,
    Op.QUANT_POW2: Writer._quant_pow2,
    Op.STOCHASTIC: Writer._stochastic,
    Op.AMAX: Writer._amax,
    Op.SCALE_TENSOR: Writer._scale_tensor,
    Op.ROW_DOT: Writer._row_dot,
    Op.MUL_SHIFTED: Writer._mul_shifted,
    Op.ADD_SCALED: Writer._add_scaled,
    Op.FP16_SCALE: Writer._fp16_scale,
    Op.COL_SUM: Writer._col_sum,
    Op.MASK_BITS: Writer._mask_bits,
    Op.STORE_BITS: Writer._store_bits,
    Op.ELU_BACKWARD: Writer._elu_backward,
    Op.LEAKY_RELU_BACKWARD: Writer._leaky_relu_backward,
    Op.THRESHOLD_BACKWARD: Writer._threshold_backward,
}
_FORMS: dict[str, Callable[[Writer, str, int, int], None]] = {
    "ROW": Writer._row,
    "COL": Writer._column,
    "FULL": Writer._full,
    "CONST": Writer._number,
    "TENSOR": Writer._tensor,
}


def write_epilogue(
    program: RowProgram,
    node: Node,
    emitter: CudaEmitter,
    rows: Any,
    width: int,
    *,
    begins_scales: bool = True,
) -> tuple[str, list[Operand]]:
    """Write a row program as a struct, and allocate its outputs.

    Args:
        program: the program.
        node: the node of the outer graph that the kernel runs for.
        emitter: the program under construction.
        rows: number of rows of the result.
        width: columns of the result.
        begins_scales: whether scales of all rows are to be set to zero by launches of their own.

    Returns:
        The struct's name, and its members' values: the kernel's last arguments.
    """
    return Writer(program, node, emitter, rows, width, begins_scales).write()


def scales_of(program: RowProgram, node: Node, emitter: CudaEmitter) -> list[Expr]:
    """Return the tensor-wide scales that a row program raises; call it after ``write_epilogue``."""
    results = [program.outs[a].result for op, a, *_ in program.steps if op == Op.SCALE_TENSOR]
    nodes = [emitter.outputs(node)[index] for index in results if index is not None]
    return [emitter.vector(scale) for scale in nodes if scale is not None]


def literal(value: float) -> str:
    """Return the exact C++ text of a float constant."""
    single = float(torch.tensor(value, dtype=torch.float32))
    if single != single or abs(single) == float("inf"):
        sign = "-" if single < 0 else ""
        return f"{sign}__int_as_float({'0x7fc00000' if single != single else '0x7f800000'})"
    return f"{single.hex()}f"


def truth(value: bool) -> str:
    """Return a bool as C++ text."""
    return "true" if value else "false"


def width_of_value(value: torch.Tensor) -> int:
    """Return the elements of the last dimension."""
    return int(value.shape[-1])


__all__ = ["TYPES", "literal", "scales_of", "truth", "write_epilogue"]
