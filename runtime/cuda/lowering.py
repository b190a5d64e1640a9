"""Imports the files that register the CUDA kernels, one file a kernel family."""

from gnnc.runtime.cuda.kernels import (
    attention,
    attention_backward,
    column_sum,
    edge_softmax,
    edge_softmax_backward,
    edge_sum,
    fp16_scale,
    gather_rows,
    gemm,
    gemm_tn,
    message,
    row_body,
    row_scale,
    rowmap,
    sddmm,
    spmm,
)

KERNEL_FILES = (
    gemm,
    gemm_tn,
    spmm,
    attention,
    attention_backward,
    sddmm,
    message,
    rowmap,
    row_body,
    row_scale,
    column_sum,
    fp16_scale,
    gather_rows,
    edge_sum,
    edge_softmax,
    edge_softmax_backward,
)
