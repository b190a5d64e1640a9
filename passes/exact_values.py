"""Exact values: what comparisons, selections and functions of absolute size read is not rounded.

Low precision rounds the operands of single ops. A value that two ops read may then have two roundings, which
a comparison of both shows, as in ``m == max[dst]``; and an error of half a percent of 60000 is many turns of
a cosine. The pass marks every value that such an op depends on; ``assign``, ``auto`` and ``quantize`` then
keep the ops that compute it in FP32.
"""

from dataclasses import dataclass
from typing import ClassVar

from torch import fx

from gnnc.ir.exact_reads import EXACT, exact_values
from gnnc.passes.base import Context


@dataclass(frozen=True, slots=True)
class ExactValues:
    """Set ``node.meta["exact"]`` on every node that an op of ``aten.EXACT_READS`` depends on."""

    name: ClassVar[str] = "exact_values"

    def run(self, gm: fx.GraphModule, ctx: Context) -> fx.GraphModule:
        """Annotate the graph; nothing else changes."""
        for node, reader in exact_values(gm.graph).items():
            if node.op == "call_function":
                node.meta[EXACT] = f"its result feeds {reader}, which reads no rounded values"
        return gm
