"""Sparse formats on CUDA: CSR, run tables and window tables, and the caches that hold them."""
