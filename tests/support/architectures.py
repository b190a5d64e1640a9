"""The architectures that tests compile CUDA kernels for; all but sm_90 are slow."""

from slow import slow_but

ARCHITECTURES = slow_but(["sm_90"], ["sm_80", "sm_90", "sm_100"])
"""Parameters of a test: `make test` compiles for sm_90, `make test-all` for each."""
