"""Select format: choose the structure format that the kernel of each sparse op reads."""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import ClassVar

from torch.fx import Node

from gnnc.ir.format import Format
from gnnc.ir.parts import Parts
from gnnc.passes.base import Context
from gnnc.target import Lowering


@dataclass(frozen=True, slots=True)
class SelectFormat:
    """Note the formats that may serve each lowered sparse op in ``node.meta["format"]``, with the reason.

    The kernel says which formats it reads. Where there are several, the cheapest for a graph depends on sizes
    that only a call knows: all are noted, and the runtime builds the one that costs least for that graph.
    A backend of one format leaves nothing to choose, and has no reasons.
    """

    name: ClassVar[str] = "select_format"

    def run_parts(self, parts: Parts, ctx: Context) -> Parts:
        """Return the program with formats noted."""
        lowering = ctx.target.lowering
        if lowering is not None:
            for _, gm in parts.per_call():
                for node in gm.graph.nodes:
                    _note_formats(node, lowering, ctx)
        return parts


def _note_formats(node: Node, lowering: Lowering, ctx: Context) -> None:
    formats = tuple(lowering.formats(node))
    if formats:
        node.meta["format"] = formats
        if len(ctx.target.formats) > 1:
            reason = _reason(formats, ctx.target.formats)
            ctx.note(node, f"kernel {node.meta['kernel']} reads {reason}", "format")


def _reason(formats: Sequence[Format], of_target: Sequence[Format]) -> str:
    first, *others = formats
    if others:
        rules = "; ".join(f"{found} where {found.rule}" for found in others)
        return f"{first} or {', '.join(map(str, others))}, whichever costs less for a graph: {rules}"
    unread = [str(found) for found in of_target if found not in formats]
    return f"{first}: it has no form for {' or '.join(unread)}"
