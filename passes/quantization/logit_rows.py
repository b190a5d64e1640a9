"""Rows that give the logits of attention are read in the precision of the rows that it sums.

Logits are computed in FP32. Where a kernel of attention gathers the rows of the sources for both, the rows
for the logits are rounded as those of the sum are: the same rows are then gathered once (GATv2), others in
fewer bytes.
"""

from collections.abc import Callable
from dataclasses import dataclass

from torch.fx import Node

from gnnc.ir.attention import match_attention
from gnnc.ir.nodes import argument, set_argument
from gnnc.target import Target


@dataclass(frozen=True, slots=True)
class LogitRows:
    """Rows of the sources that give logits.

    Attributes:
        reader: the op of the edges that reads them.
        rows: the rows, FP32.
    """

    reader: Node
    rows: Node


def logit_rows(aggregate: Node, target: Target, *, trains: bool) -> LogitRows | None:
    """Return the rows that give the logits of the attention that ends in ``aggregate``, or None.

    Args:
        aggregate: the weighted sum.
        target: the backend.
        trains: whether the graph has gradients, too: those that read the weights of edges are of FP32 rows.
    """
    if not target.attention_bodies or not target.widens_operands:
        return None
    found = match_attention(aggregate, bodies=True)
    if found is None or found.kind not in ("dot", "body") or found.a_src is None:
        return None
    if trains and len(found.softmax.users) > 1:
        return None
    return LogitRows(found.covers[0], found.a_src)


def read_rounded(logits: LogitRows, rounded: Callable[[Node], Node]) -> None:
    """Let the op that computes logits read rows as ``rounded`` returns them, in FP32 again."""
    rows = rounded(logits.rows)
    name = "b" if str(logits.reader.target) == "gnnc.sddmm.default" else "src"
    value = argument(logits.reader, name)
    set_argument(logits.reader, name, [rows] if isinstance(value, list | tuple) else rows)
