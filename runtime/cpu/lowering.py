"""Imports the files that register the CPU kernels, one file a kernel family."""

from gnnc.runtime.cpu import (
    attention,
    attention_backward,
    batch_norm,
    edge_body,
    gemm,
    gemm_tn,
    joint_bodies,
    message,
    relu,
    row_body,
    row_scale,
    rowmap,
    sddmm,
    spmm,
    structure,
)

KERNEL_FILES = (
    gemm,
    gemm_tn,
    relu,
    row_body,
    row_scale,
    spmm,
    attention,
    attention_backward,
    batch_norm,
    sddmm,
    edge_body,
    joint_bodies,
    message,
    rowmap,
    structure,
)
