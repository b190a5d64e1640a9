"""Writes into rows and slices of a tensor, as in ``out[t] = h``, become scatters that return all of it."""

from collections.abc import Container, Sequence

import torch
from torch.fx import Node, map_arg

from gnnc.ir.nodes import first_operand
from gnnc.torch_private import enable_python_dispatcher

aten = torch.ops.aten

_SCATTERS = {
    aten.select.int: aten.select_scatter.default,
    aten.slice.Tensor: aten.slice_scatter.default,
}
"""For each view the op that returns its operand with other values in the place of the view."""


def views_below(node: Node, whole: Container[Node]) -> list[Node]:
    """Return the rows and slices, innermost first, by which a node is a part of a tensor in ``whole``."""
    found = []
    while node not in whole and node.target in _SCATTERS:
        found.append(node)
        node = first_operand(node)
    return found


def scattered(written: Node, views: Sequence[Node]) -> Node:
    """Return the whole tensor with new values in a view of it, as nodes before the next of the graph.

    Args:
        written: the new values of the first view.
        views: the views, as ``views_below`` returns them.
    """
    for view in views:
        op = _SCATTERS[view.target]
        args = (first_operand(view), written, *view.args[1:])
        values = map_arg((args, view.kwargs), lambda argument: argument.meta["val"])
        with written.meta["val"].fake_mode, enable_python_dispatcher():
            value = op(*values[0], **values[1])
        meta = written.meta | {"val": value}
        written = written.graph.call_function(op, args, view.kwargs)
        written.meta = meta
    return written
