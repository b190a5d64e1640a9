"""Imports the files that register the CUDA kernels, one file a kernel family."""

from gnnc.runtime.cuda import gemm, message, rowmap, spmm

KERNEL_FILES = (gemm, spmm, message, rowmap)
