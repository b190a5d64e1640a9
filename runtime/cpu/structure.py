"""The C++ kernel for sorting edges, swapped into structure programs."""

import torch
from torch import Tensor
from torch.fx import GraphModule, Node

from gnnc.errors import GraphError
from gnnc.ir.graph import clone
from gnnc.runtime.plans import spmm
from gnnc.runtime.registry import Choice
from gnnc.runtime.structure_runner import StructureRunner


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


def use_kernels(runner: StructureRunner) -> None:
    """Let every part of a structure program sort with ``gnnc_cpu.csr``."""
    for group in runner.groups:
        for node in group.module.graph.nodes:
            if node.target is torch.ops.gnnc.csr.default:
                node.target = csr
        group.module.recompile()


def csr(src: Tensor, dst: Tensor, num_src: int, num_dst: int) -> tuple[Tensor, Tensor, Tensor]:
    """Sort edges by destination; see ``gnnc.csr``.

    Raises:
        GraphError: an id is out of range.
    """
    rowptr = torch.empty(num_dst + 1, dtype=torch.int64)
    col = torch.empty(src.shape[0], dtype=torch.int32)
    perm = torch.empty(src.shape[0], dtype=torch.int64)
    try:
        torch.ops.gnnc_cpu.csr(src, dst, num_src, num_dst, rowptr, col, perm)
    except RuntimeError as error:
        raise GraphError(
            f"[gnnc.csr] {_first_line(error)}: node ids must be in 0..{num_src - 1} (sources) and "
            f"0..{num_dst - 1} (destinations); check edge_index against the number of rows of x"
        ) from None
    return rowptr, col, perm


def _first_line(error: Exception) -> str:
    return str(error).strip().splitlines()[0]
