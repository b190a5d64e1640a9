"""Batch norms in train mode: their statistics are results of the program, and no writes into buffers.

``run_decompositions`` would do the same by tracing the whole program twice more.
"""

import operator
from collections import Counter
from collections.abc import Mapping, Set

import torch
from torch import fx
from torch.export import ExportedProgram
from torch.export.graph_signature import OutputKind, OutputSpec, TensorArgument
from torch.fx import Graph, Node

from gnnc.ir.graph import placeholders
from gnnc.ir.nodes import argument, outputs_of, unpack
from gnnc.torch_private import enable_python_dispatcher, storage_id

aten = torch.ops.aten

_STATISTICS = ("running_mean", "running_var")
_OPERANDS = ("input", "weight", "bias", *_STATISTICS)


def buffers_of(program: ExportedProgram) -> frozenset[Node]:
    """Return the placeholders of buffers that need no gradient, and whose memory no other placeholder has."""
    names = program.graph_signature.inputs_to_buffers
    found = placeholders(program.graph_module)
    values = [node.meta["val"] for node in found]
    uses = Counter(storage_id(value) for value in values if isinstance(value, torch.Tensor))
    return frozenset(
        node
        for node, value in zip(found, values, strict=True)
        if node.name in names and not value.requires_grad and uses[storage_id(value)] == 1
    )


def normalizes(node: Node, buffers: Set[Node]) -> bool:
    """Return whether a call is a batch norm in train mode whose statistics are two of the ``buffers``."""
    if node.target is not aten.batch_norm.default or argument(node, "training") is not True:
        return False
    means, variances = unpack(node, *_STATISTICS)
    return means in buffers and variances in buffers and isinstance(argument(node, "momentum"), float)


def statistics_of(norm: Node) -> set[Node]:
    """Return the buffers of the statistics of a batch norm."""
    return set(unpack(norm, *_STATISTICS))


def expand_batch_norms(graph: Graph, buffers: Set[Node]) -> dict[Node, Node]:
    """Replace batch norms in train mode by the op that returns the new statistics, too.

    Returns:
        The last value of each buffer that has another one.
    """
    written: dict[Node, Node] = {}
    norms = [node for node in graph.nodes if normalizes(node, buffers)]
    statistics = {norm: unpack(norm, *_STATISTICS) for norm in norms}
    for norm in norms:
        result, *values = _expanded(norm)
        norm.replace_all_uses_with(result)
        for buffer, value in zip(statistics[norm], values, strict=True):
            latest = written.get(buffer, buffer)
            latest.replace_all_uses_with(value, delete_user_cb=lambda user, norm=norm: norm < user)
            written[buffer] = value
        graph.erase_node(norm)
    return written


def _expanded(norm: Node) -> list[Node]:
    """Return the result of a batch norm and its new statistics, as nodes before it."""
    args = (*unpack(norm, *_OPERANDS), True, *unpack(norm, "momentum", "eps"))
    values = fx.map_arg(args, lambda operand: operand.meta["val"])
    op = aten._native_batch_norm_legit_functional.default
    with norm.meta["val"].fake_mode, enable_python_dispatcher():
        results = op(*values)
    with norm.graph.inserting_before(norm):
        call = norm.graph.call_function(op, args)
        call.meta = norm.meta | {"val": results}
        nodes = [norm.graph.call_function(operator.getitem, (call, place)) for place in (0, 3, 4)]
    for node in nodes:
        node.meta = norm.meta | {"val": results[node.args[1]]}
    return nodes


def return_buffers(program: ExportedProgram, written: Mapping[Node, Node]) -> None:
    """Make the last values of buffers the first results of a program, in the order of the buffers."""
    signature = program.graph_signature
    order = [node for node in placeholders(program.graph_module) if node in written]
    specs = [
        OutputSpec(
            OutputKind.BUFFER_MUTATION,
            TensorArgument(name=written[buffer].name),
            signature.inputs_to_buffers[buffer.name],
        )
        for buffer in order
    ]
    signature.output_specs[:0] = specs
    values = [written[buffer] for buffer in order]
    program.graph.output_node().args = ((*values, *outputs_of(program.graph)),)
