if not __name__.startswith("gnnc."): raise ImportError("import gnnc.passes, not passes")  # fmt: skip  # noqa: E501, E701
"""Transformations of the graph, one pass a file."""

from gnnc.passes.base import BackendInfo, Context, Note, Pass, run_pass, run_passes

__all__ = ["BackendInfo", "Context", "Note", "Pass", "run_pass", "run_passes"]
