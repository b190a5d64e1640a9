"""Row programs: the epilogue that every CPU kernel runs on its rows while they are in L1.

`csrc/include/gnnc/row_program.h` has the other half; a test compares the two.
"""

from dataclasses import dataclass, field
from enum import IntEnum

from torch import Tensor


class RowOp(IntEnum):
    """Opcodes; a, b and c of each are in `csrc/cpu/launch.cpp`."""

    MUL_ROW = 1
    ADD_ROW = 2
    MUL_COL = 3
    ADD_COL = 4
    MUL_FULL = 5
    ADD_FULL = 6
    ADD_QROW = 7
    MUL_CONST = 8
    ADD_CONST = 9
    MUL_TENSOR = 10
    ADD_TENSOR = 11
    RSUB_FULL = 12
    DIV_ROW = 13
    DIV_FULL = 14
    DIV_COL = 15
    RELU = 20
    LEAKY_RELU = 21
    ELU = 22
    SIGMOID = 23
    TANH = 24
    GELU = 25
    GELU_TANH = 26
    SILU = 27
    EXP = 28
    NEG = 29
    ABS = 30
    SQUARE = 31
    SQRT = 32
    RECIP = 33
    CLAMP_MIN = 34
    CLAMP_MAX = 35
    LOG = 36
    SOFTPLUS = 37
    RSQRT = 38
    BATCH_NORM = 40
    LAYER_NORM = 41
    L2_NORMALIZE = 42
    SOFTMAX = 43
    LOG_SOFTMAX = 44
    HEAD_MEAN = 45
    STORE_F32 = 60
    STORE_BF16 = 61
    QUANT_ROW = 62
    QUANT_STATIC = 63
    QUANT_POW2 = 64
    AMAX = 65
    ROW_DOT = 66


@dataclass(slots=True)
class RowProgram:
    """Collects instructions and what they name; `arguments` are the last four of every kernel.

    Example:
        program = RowProgram()
        program.append(RowOp.ADD_COL, program.operand(bias))
        program.append(RowOp.STORE_F32, program.out(y))
        torch.ops.gnnc_cpu.map(x, None, *program.arguments)
    """

    code: list[int] = field(default_factory=list)
    operands: list[Tensor] = field(default_factory=list)
    consts: list[float] = field(default_factory=list)
    outs: list[Tensor] = field(default_factory=list)

    def append(self, op: RowOp, a: int = 0, b: int = 0, c: int = 0) -> None:
        """Add one instruction."""
        self.code += (int(op), a, b, c)

    def operand(self, *tensors: Tensor) -> int:
        """Add operands that follow each other, and return the index of the first."""
        self.operands += tensors
        return len(self.operands) - len(tensors)

    def const(self, value: float) -> int:
        """Add a constant and return its index."""
        self.consts.append(float(value))
        return len(self.consts) - 1

    def out(self, tensor: Tensor) -> int:
        """Add an output, which the kernel writes, and return its index."""
        self.outs.append(tensor)
        return len(self.outs) - 1

    @property
    def arguments(self) -> tuple[list[int], list[Tensor], list[float], list[Tensor]]:
        """The last four arguments of a kernel."""
        return self.code, self.operands, self.consts, self.outs
