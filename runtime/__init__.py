"""Runs a lowered graph: executable, structure cache, kernels by backend."""

if not __name__.startswith("gnnc."):
    raise ImportError("import gnnc.runtime: runtime alone is a folder of gnnc, not a package")
