"""Opcodes of row programs: the epilogue that every CPU kernel runs on its rows while they are in L1.

`csrc/include/gnnc/row_program.h` has the same numbers; a test compares the two.
"""

from enum import IntEnum


class Op(IntEnum):
    """Opcodes; the table of `csrc/cpu/launch.cpp` gives the meaning of a, b and c of each."""

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
    MASK_BITS = 16
    ELU_BACKWARD = 17
    LEAKY_RELU_BACKWARD = 18
    THRESHOLD_BACKWARD = 19
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
    WINDOW = 46
    MUL_SHIFTED = 47
    ADD_SCALED = 48
    STORE_F32 = 60
    STORE_BF16 = 61
    STORE_FP16 = 67
    QUANT_ROW = 62
    QUANT_STATIC = 63
    QUANT_POW2 = 64
    AMAX = 65
    ROW_DOT = 66
    SCALE_TENSOR = 68
    STORE_BITS = 69
    COL_SUM = 70
    DIV_TENSOR = 71
    FP16_SCALE = 72
    STOCHASTIC = 73
