"""Imports the files that register the CUDA kernels, one file a kernel family."""

from gnnc.runtime.cuda.kernels import attention, gemm, message, rowmap, sddmm, spmm

KERNEL_FILES = (gemm, spmm, attention, sddmm, message, rowmap)
