"""Lowerings of ops to CUDA kernels, one file a kernel family."""
