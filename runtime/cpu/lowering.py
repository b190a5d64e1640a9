"""Imports the files that register the CPU kernels, one file a kernel family."""

from gnnc.runtime.cpu import attention, edge_sum, gemm, message, rowmap, sddmm, spmm, structure

KERNEL_FILES = (gemm, spmm, attention, sddmm, message, edge_sum, rowmap, structure)
