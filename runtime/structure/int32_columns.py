"""Source ids that kernels read as int32, converted once for each graph."""

import torch
from torch import Tensor
from torch.fx import GraphModule, Node

from gnnc.ir.graph import clone
from gnnc.runtime.plans import spmm
from gnnc.runtime.registry import Choice


def narrow_columns(compute: GraphModule, structure: GraphModule) -> GraphModule:
    """Return a structure graph that gives int32 where the compute graph only takes source ids.

    A segment reduction goes by the permutation of a CSR, which is int64 for indexing; kernels read it
    as int32, and it is converted here once a graph instead of at each call.
    """
    narrow = {
        node.meta["source"].name
        for node in compute.graph.find_nodes(op="placeholder")
        if node.meta["source"].kind == "structure" and _only_columns(node)
    }
    if not narrow:
        return structure
    result = clone(structure)
    output = result.graph.output_node()
    with result.graph.inserting_before(output):
        values = [
            result.graph.call_function(torch.ops.aten._to_copy.default, (v,), {"dtype": torch.int32})
            if v.name in narrow
            else v
            for v in output.args[0]  # type: ignore[union-attr]
        ]
    output.args = (tuple(values),)
    result.recompile()
    for node in compute.graph.find_nodes(op="placeholder"):
        if node.meta["source"].kind == "structure" and node.meta["source"].name in narrow:
            node.meta["val"] = node.meta["val"].to(torch.int32)
    return result


def _only_columns(node: Node) -> bool:
    value = node.meta["val"]
    if not isinstance(value, Tensor) or value.dtype != torch.int64 or not node.users:
        return False
    return all(_is_column(node, user) for user in node.users)


def _is_column(node: Node, user: Node) -> bool:
    choice = user.meta.get("choice")
    plan = choice.plan if isinstance(choice, Choice) else None
    if not isinstance(plan, spmm.Plan) or plan.col is None:
        return False
    operands = user.args if user.op == "call_module" else user.all_input_nodes
    return [i for i, arg in enumerate(operands) if arg is node] == [plan.col]
