"""The chosen precisions as plain data."""

from typing import Any

from gnnc.ir.op import op_of
from gnnc.program import Program


def plan_of(program: Program) -> dict[str, Any]:
    """Return ``{"ops": [...]}``: op, layer and precision of every primitive that was assigned one."""
    graph = next((gm for name, gm in program.stages if name == "assign"), program.graph_module).graph
    ops = []
    for node in graph.nodes:
        op, precision = op_of(node), node.meta.get("precision")
        if op is not None and precision is not None:
            ops.append({"op": op.name, "layer": node.meta.get("layer", ""), "precision": str(precision)})
    return {"version": 1, "ops": ops}
