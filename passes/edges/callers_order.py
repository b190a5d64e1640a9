"""Values of edges that are computed in the order of the caller, whatever regions do.

A region computes its values in the order of a CSR. A value that is read outside of regions, too, would be
computed twice: by a body in FP32 and by a product in low precision, so that ``x - mean`` of one node would
not be 0. Regions read such a value instead, through the permutation of the edges.
"""

from collections.abc import Callable, Collection

from torch import fx
from torch.fx import Node

from gnnc.passes.edges.rowwise import as_scatter, row_inputs


def values_in_callers_order(
    gm: fx.GraphModule, indices: Callable[[Node], Collection[Node]], softmaxes: Collection[Node]
) -> set[Node]:
    """Return the nodes that are read by something else than regions, before anything is raised.

    Args:
        gm: the normalized graph.
        indices: returns the indices of the gathers that a node depends on, row by row.
        softmaxes: the nodes that end edge softmaxes.
    """
    found: set[Node] = set()
    for node in reversed(gm.graph.nodes):
        if any(_is_read_outside(node, user, found, indices, softmaxes) for user in node.users):
            found.add(node)
    return found


def _is_read_outside(
    node: Node,
    user: Node,
    found: set[Node],
    indices: Callable[[Node], Collection[Node]],
    softmaxes: Collection[Node],
) -> bool:
    scatter = as_scatter(user)
    if scatter is not None and not isinstance(scatter, str) and scatter.source is node:
        return not indices(node)  # rows that come from no gather are reduced where they lie
    if node not in (row_inputs(user) or ()):
        return True
    is_raised = user in softmaxes or len(indices(user)) > 1
    return user in found and not is_raised
