"""Passes over the graph, one a file; the folders hold the parts that passes are made of."""

if not __name__.startswith("gnnc."):
    raise ImportError("import gnnc.passes: passes alone is a folder of gnnc, not a package")

from gnnc.passes.base import Context, Note, Pass, Property, run_pass, run_passes
from gnnc.passes.pipeline import PIPELINE

__all__ = [
    "PIPELINE",
    "Context",
    "Note",
    "Pass",
    "Property",
    "run_pass",
    "run_passes",
]
