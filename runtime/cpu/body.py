"""Bodies on blocks of edges: a value has the same bits whatever block it is in, and wherever.

The gradient of a maximum compares values that are computed again, in other blocks and for the edges in
another order. ATen computes the remainder of a vector by other code, whose ``silu`` differs in the last bit,
and MKL a row of a small product by code that depends on its place and on the number of rows. So blocks are
padded, and products with a weight run in ``gnnc_cpu.gemm``.
"""

from collections.abc import Callable, Iterable, Sequence
from functools import lru_cache
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor
from torch.fx import Graph, GraphModule, Node, map_arg

from gnnc.ir.body import body_inputs, parse_body, product_of
from gnnc.runtime.row_program.opcodes import Op
from gnnc.torch_private import LazyGraphModule

STORE = (int(Op.STORE_F32), 0, 0, 0)
"""Row program that stores a row as it is."""

_EDGE_MULTIPLE = 768
"""Padding of a block: a multiple of this many edges splits among 24 threads in whole vectors."""
_PLAIN = torch.float32

Tensors = list[Tensor]


def evaluate(
    text: str, shared: frozenset[int], col: Tensor, rows: Callable[[], Tensor], groups: Sequence[Tensors]
) -> list[Tensor]:
    """Return the values of a body on a block: of each edge and of the edges that pad it, or of all edges.

    Args:
        text: the body.
        shared: positions of the nodes of its graph with a value that edges share, such as a sum.
        col: source of every edge of the block.
        rows: returns the destination of every edge.
        groups: the operands: ``dst``, ``src``, ``edge`` of the block alone, and ``const``.
    """
    operands, count = _operands(text, col, rows, groups), col.shape[0]
    sizes = (count, count + -count % _EDGE_MULTIPLE) if shared else ()
    return _block_body(text, shared)(*sizes, *operands)


def _operands(text: str, col: Tensor, rows: Callable[[], Tensor], groups: Sequence[Tensors]) -> Tensors:
    """Return the rows of the operands in the order of ``body_inputs``."""
    dst, src, edge, const = groups
    sources = _padded(col)
    destinations = _padded(rows()) if dst else sources
    given = {
        "i": [t.index_select(0, destinations) for t in dst],
        "j": [t.index_select(0, sources) for t in src],
        "e": [_padded(t) for t in edge],
        "c": const,
    }
    return [given[name[0]][int(name[1:])] for name in body_inputs(text)]


def _padded(values: Tensor) -> Tensor:
    return F.pad(values, (0, 0) * (values.dim() - 1) + (0, -values.shape[0] % _EDGE_MULTIPLE))


@lru_cache(maxsize=1024)
def _block_body(text: str, shared: frozenset[int]) -> GraphModule:
    """Return a function of a body's operands, which returns a list.

    Its products with a weight are those of ``row_product``. Where edges share values, the number of edges,
    without padding and with it, comes first, and what is shared is computed without the padding.
    """
    graph = Graph()
    copies: dict[Node, Node] = {}
    body = parse_body(text).graph
    found = graph.graph_copy(body, copies)
    graph.output(list(found) if isinstance(found, list | tuple) else [found])
    of_edges = _use_row_products(graph)
    mixing = [copies[node] for number, node in enumerate(body.nodes) if number in shared]
    if mixing:
        _cut_operands(graph, mixing, of_edges - set(mixing))
    return LazyGraphModule({}, graph, "BlockBody")


def _cut_operands(graph: Graph, mixing: list[Node], padded: set[Node]) -> None:
    """Let the nodes that edges share read their operands without the padding."""
    with graph.inserting_before(next(iter(graph.nodes))):
        sizes = graph.placeholder("count"), graph.placeholder("padded")
    cuts: dict[Node, Node] = {}
    for node in mixing:
        for operand in node.all_input_nodes:
            if operand in padded and operand not in cuts:
                with graph.inserting_before(node):
                    cuts[operand] = graph.call_function(_cut, (operand, *sizes))
        node.args, node.kwargs = map_arg((node.args, node.kwargs), lambda arg: cuts.get(arg, arg))


def _cut(values: Tensor, count: int, padded: int) -> Tensor:
    """Return the first ``count`` of ``padded`` edges, each of one row or of several side by side."""
    return values[: values.shape[0] // padded * count]


def _use_row_products(graph: Graph) -> set[Node]:
    """Compute products of edge values with a weight by ``row_product``; return the nodes with edge values."""
    of_edges: set[Node] = set()
    for node in list(graph.nodes):
        is_edge_input = node.op == "placeholder" and str(node.target)[0] != "c"
        if is_edge_input or (node.op == "call_function" and of_edges & set(node.all_input_nodes)):
            product = product_of(node)
            if product is not None and product[0] in of_edges and not of_edges & _nodes(product[1:]):
                node.target, node.args, node.kwargs = row_product, product, {}
            of_edges.add(node)
    return of_edges


def _nodes(values: Iterable[Any]) -> set[Node]:
    return {value for value in values if isinstance(value, Node)}


def row_product(x: Tensor, weight: Tensor, bias: Tensor | None, is_kn: bool) -> Tensor:
    """Return ``x @ weight + bias``, a row of which depends on that row of x alone.

    Args:
        x: ``[..., K]``.
        weight: ``[K, N]`` if ``is_kn``, else ``[N, K]``.
        bias: ``[N]``, added to every row, or None.
        is_kn: see ``weight``.
    """
    if weight.dim() != 2 or x.numel() == 0 or {x.dtype, weight.dtype} != {_PLAIN}:
        product = x @ (weight if is_kn else weight.t())
        return product if bias is None else product + bias
    if weight.stride(1) != 1:
        weight, is_kn = (weight.t(), not is_kn) if weight.stride(0) == 1 else (weight.contiguous(), is_kn)
    rows = x.reshape(-1, x.shape[-1]).contiguous()
    out = x.new_empty(rows.shape[0], weight.shape[1 if is_kn else 0])
    torch.ops.gnnc_cpu.gemm(rows, None, [weight], [int(is_kn)], 0, STORE, (), (), (out,))
    out = out.view(*x.shape[:-1], out.shape[1])
    return out if bias is None else out.add_(bias)
