"""Values of a body that are computed from a product in the registers of the threads that multiplied it.

A kernel that reduces them by row need not store the product in shared memory where all edges of a tile
belong to one row (``gnnc::FragmentColumns``).
"""

from collections.abc import Callable, Container, Mapping
from math import prod

from torch.fx import Node

from gnnc.ir.nodes import reached
from gnnc.runtime.cuda.kernels.body_places import Place, places
from gnnc.runtime.cuda.kernels.body_scope import Scope
from gnnc.runtime.cuda.kernels.body_stages import Fragment, ProductStage, Stage, place_of
from gnnc.runtime.cuda.kernels.body_values import Shapes, edge_shape

_WIDTHS = (32, 64)
"""Columns of a product whose fragments a warp holds, and reduces by halves."""
_LEAST_INPUTS = 32
"""Columns of the operand, at least: with fewer, a kernel without states in registers runs three blocks."""
_MOST_HELD = 5
"""Pairs of fragments of a weight that find registers where the value reads one vector at most."""


def fragment_of(
    value: Node,
    shapes: Shapes,
    stages: Mapping[Node, Stage],
    copied: Container[str],
    write: Callable[[Node, Place, Scope], str],
) -> Fragment | None:
    """Return the C++ of a value whose columns follow from one of the last product, constants and copied rows.

    Args:
        value: the value.
        shapes: shapes of the body's nodes.
        stages: the stages of the body, in order.
        copied: names of the operands whose rows lie in shared memory.
        write: writes an element of a node into a scope, and returns its name.

    Returns:
        The C++; None where the value reads something else.
    """
    product, stage = list(stages.items())[-1]
    shape, own = edge_shape(value, shapes), edge_shape(product, shapes)
    width = prod(shape)
    is_long = isinstance(stage, ProductStage) and stage.type is not None and stage.inputs >= _LEAST_INPUTS
    if not is_long or stage.outputs != width or width not in _WIDTHS:
        return None
    read = reached([value], lambda node: () if node is product else node.all_input_nodes)
    operands = [node for node in value.graph.find_nodes(op="placeholder") if node in read]
    if product not in read or not all(_is_near(str(node.target), copied) for node in operands):
        return None
    if any(node in stages for node in read if node is not product):
        return None
    vectors = [node for node in operands if shapes[node] == (width,)]
    scope = Scope()
    scope.known[(product, ("edge", *places("column", own)))] = "product"
    scope.known |= {(node, ("column",)): f"vectors[{number}]" for number, node in enumerate(vectors)}
    name = write(value, ("edge", *places("column", shape)), scope)
    if any(f"results[{place_of(len(stages) - 1)} " in line for line in (*scope.lines, name)):
        return None  # other columns of the product
    elements = tuple(f"step::as_float({node.target}[column])" for node in vectors)
    is_short = len(stages) == 1 and all(node in vectors for node in operands) and len(vectors) <= 1
    return Fragment(width, _MOST_HELD if is_short else 0, (*scope.lines, f"values[0] = {name};"), elements)


def _is_near(operand: str, copied: Container[str]) -> bool:
    """Return whether an operand is a constant, or has its rows in shared memory."""
    return operand[0] == "c" or operand in copied
