"""Imports the files that register the CUDA kernels, one file a kernel family."""

from gnnc.runtime.cuda import gemm, rowmap

KERNEL_FILES = (gemm, rowmap)
