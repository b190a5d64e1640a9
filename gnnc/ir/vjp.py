"""Vector-Jacobian products of bodies: the gradient of a body with respect to an operand is a body again.

``body_gradients`` traces the products once for each body and shapes of its operands. The gradient of an
``i``, ``j`` or ``e`` operand is a value for every edge; that of a ``c`` operand is summed over the edges
that the body sees, so that the gradients of blocks of edges add up.
"""

import copy
import operator
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from functools import lru_cache
from typing import Any

import torch
from torch import Tensor
from torch.fx import Graph, GraphModule, Node

from gnnc.errors import UnsupportedError
from gnnc.ir.body import body_inputs, body_text, parse_body, tensors_of
from gnnc.ir.functional_op import returning
from gnnc.ir.nodes import aten_name, first_operand, op_name, outputs_of, unpack
from gnnc.ir.simpler_body import FORWARD, simpler
from gnnc.ir.spelled_out import SPELLED_OUT
from gnnc.torch_private import OpOverload, proxy_graph, schema, trace_sizes

_VIEWS = ("view.default", "_unsafe_view.default")
_RESHAPES = ("view.default", "_unsafe_view.default", "reshape.default", "expand.default")
_FACTORIES = ("full", "zeros", "ones", "scalar_tensor", "empty", "new_full", "new_zeros", "new_ones")
_EDGE_COUNTS = (7919, 6271, 5381, 4273)
"""Primes of which one stands for the number of edges while a gradient is traced."""

Cotangents = Callable[[Sequence[Tensor], Mapping[str, Tensor]], Sequence[Tensor]]


@dataclass(frozen=True, slots=True)
class Operand:
    """Name, sizes and dtype of an operand of a body.

    Attributes:
        name: ``i0``, ``j0``, ``e0`` or ``c0``.
        sizes: sizes of one edge's value; of a ``c`` operand all sizes.
        dtype: its dtype.
    """

    name: str
    sizes: tuple[int, ...]
    dtype: torch.dtype

    def stand_in(self, edges: int) -> Tensor:
        """Return a tensor without memory, of the operand's rows at ``edges`` edges."""
        sizes = self.sizes if self.name[0] == "c" else (edges, *self.sizes)
        return torch.empty(sizes, dtype=self.dtype, device="meta")


@lru_cache(maxsize=1024)
def body_gradients(
    body: str,
    cotangents: Cotangents,
    operands: tuple[Operand, ...],
    wanted: tuple[str, ...],
    *,
    create_graph: bool = False,
) -> dict[str, str]:
    """Return the body of the gradient of every operand in ``wanted`` that the body's values depend on.

    Args:
        body: the body.
        cotangents: function of the body's values and of all operands by name, which returns the gradient of
            each value, of one row for each edge where a value of one row is that of every edge; as part of
            the key of the cache it must be one object for equal functions.
        operands: the body's operands, and those that ``cotangents`` reads.
        wanted: names of operands.
        create_graph: whether the gradient is to have a gradient itself: some ops, such as ``silu``, have
            another form of it for that.

    Raises:
        UnsupportedError: the gradient is no body; the message names the op.
    """
    # A thread of its own has no modes of tracers that the caller may be in.
    with ThreadPoolExecutor(1) as pool:
        return pool.submit(_traced, body, cotangents, operands, wanted, create_graph).result()


def _traced(
    body: str,
    cotangents: Cotangents,
    operands: tuple[Operand, ...],
    wanted: tuple[str, ...],
    create_graph: bool,
) -> dict[str, str]:
    edges = _edge_count(operands)

    def gradients(*tensors: Tensor) -> list[Tensor | None]:
        given = dict(zip([operand.name for operand in operands], tensors, strict=True))
        with torch.enable_grad():
            leaves = {name: given[name].detach().requires_grad_() for name in wanted}
            found = _differentiable(body)(*[leaves.get(name, given[name]) for name in body_inputs(body)])
        values = list(found) if isinstance(found, list | tuple) else [found]
        _mark_forward()
        pairs = zip(values, cotangents([value.detach() for value in values], given), strict=True)
        roots = [
            (_repeated(value, grad), grad.to(value.dtype)) for value, grad in pairs if value.requires_grad
        ]
        if not roots:
            return [None] * len(wanted)
        results, grads = zip(*roots, strict=True)
        inputs = list(leaves.values())
        return list(torch.autograd.grad(results, inputs, grads, create_graph=create_graph, allow_unused=True))

    graph = _trace(gradients, [operand.stand_in(edges) for operand in operands])
    for node, operand in zip(graph.find_nodes(op="placeholder"), operands, strict=True):
        node.target = operand.name
    _Cleaner(graph, edges).run()
    found = dict(zip(wanted, outputs_of(graph), strict=True))
    return {name: _single(graph, value) for name, value in found.items() if value is not None}


def _trace(function: Callable[..., Any], tensors: Sequence[Tensor]) -> Graph:
    """Return the graph of a function, in which no op writes to an operand and equal steps are one."""
    graph = trace_sizes(function, tensors)
    _make_functional(graph)
    return simpler(graph)


def _make_functional(graph: Graph) -> None:
    """Replace ops that write to an operand, as a maximum's gradient has, by those that do not.

    Raises:
        UnsupportedError: such an op has no functional form.
    """
    for node in graph.nodes:
        if not isinstance(node.target, OpOverload) or not schema(node.target).is_mutable:
            continue
        op = returning(node.target)
        if op is None:
            raise UnsupportedError(f"the gradient of a body calls {node.target}, which writes to its operand")
        written = node.args[0]
        node.target = op
        written.replace_all_uses_with(node, delete_user_cb=lambda user, node=node: node < user)


def _mark_forward() -> None:
    """Mark the values that the trace has computed so far."""
    graph = proxy_graph()
    assert graph is not None
    for node in graph.nodes:
        node.meta[FORWARD] = True


def _differentiable(body: str) -> GraphModule:
    """Return a body whose ops have gradients of one result each: kernels of bodies compute those."""
    parsed = copy.deepcopy(parse_body(body))
    for target, (function, names) in SPELLED_OUT.items():
        for node in parsed.graph.find_nodes(op="call_function", target=target):
            node.target, node.args, node.kwargs = function, unpack(node, *names), {}
    parsed.recompile()
    return parsed


@lru_cache(maxsize=1024)
def spell_out(body: str, operands: tuple[Operand, ...]) -> str:
    """Return a body whose ops are written as its gradients write them, step by step.

    A gradient that compares values of the body with an extremum then finds the same bits, whatever runs it.

    Args:
        body: the body.
        operands: the body's operands.
    """
    if not any(node.target in SPELLED_OUT for node in parse_body(body).graph.nodes):
        return body
    edges, given = _edge_count(operands), {operand.name: operand for operand in operands}
    found = tensors_of(parse_body(body), [given[name].stand_in(edges) for name in body_inputs(body)])
    graph, copies = Graph(), dict[Node, Node]()
    for node in parse_body(body).graph.nodes:
        if node.target not in SPELLED_OUT:
            copies[node] = graph.node_copy(node, copies.__getitem__)
            continue
        function, names = SPELLED_OUT[node.target]
        values = unpack(node, *names)
        tensors = [value for value in values if isinstance(value, Node)]

        def steps(*given: Tensor, function: Any = function, values: Any = values) -> Tensor:
            rest = iter(given)
            result = function(*[next(rest) if isinstance(value, Node) else value for value in values])
            _mark_forward()
            return result

        traced = _trace(steps, [found[tensor] for tensor in tensors])
        _Cleaner(traced, edges).run()
        inner = dict(zip(traced.find_nodes(op="placeholder"), map(copies.__getitem__, tensors), strict=True))
        copies[node] = graph.graph_copy(traced, inner)  # type: ignore[assignment]
    return body_text(graph)


def _edge_count(operands: tuple[Operand, ...]) -> int:
    sizes = [size for operand in operands for size in operand.sizes]
    return next(count for count in _EDGE_COUNTS if all(size == 0 or size % count for size in sizes))


def _repeated(value: Tensor, grad: Tensor) -> Tensor:
    """Return a value in the shape of its gradient: one row is repeated where it is that of every edge."""
    return value if value.shape == grad.shape else value.expand(grad.shape)


def _single(graph: Graph, value: Node) -> str:
    """Return the text of the body that computes ``value``, one of the nodes of ``graph``."""
    copies: dict[Node, Node] = {}
    single = Graph()
    single.graph_copy(graph, copies)
    single.output(copies[value])
    single.eliminate_dead_code()
    return body_text(single)


class _Cleaner:
    """Rewriter of a traced gradient into calls that a body may hold."""

    def __init__(self, graph: Graph, edges: int) -> None:
        self.graph, self.edges = graph, edges
        placeholders = graph.find_nodes(op="placeholder")
        self.first = next((p for p in placeholders if p.target[0] != "c"), None)
        self.last_placeholder = placeholders[-1]
        self.count: Node | None = None

    def run(self) -> None:
        """Rewrite every node; drop unused ones."""
        self.graph.eliminate_dead_code()
        for node in list(self.graph.nodes):
            if node.op == "get_attr":
                raise UnsupportedError("[gnnc.vjp] the gradient of a body holds a constant tensor")
            if node.op != "call_function":
                continue
            if op_name(node) in _FACTORIES:
                self._make_new_full(node)
            else:
                self._clean(node)
        self.graph.eliminate_dead_code()

    def _clean(self, node: Node) -> None:
        if not isinstance(node.target, OpOverload):
            if node.target is not operator.getitem:
                raise UnsupportedError(f"[gnnc.vjp] the gradient of a body calls {node.target}")
            return
        kept = ("device", "layout", "pin_memory", "memory_format")
        node.kwargs = {k: v for k, v in node.kwargs.items() if k not in kept and v is not None}
        if aten_name(node) in _VIEWS:  # of a copy whose memory format is dropped here
            node.target = torch.ops.aten.reshape.default
        is_reshape = aten_name(node) in _RESHAPES and not _repeats_a_row(node)
        node.args = tuple(self._sizes(arg, is_reshape) for arg in node.args)

    def _sizes(self, arg: Any, is_reshape: bool) -> Any:
        """Replace the number of edges in an argument: by -1 in a shape, else by the size of an operand."""
        if isinstance(arg, list | tuple):
            return [self._sizes(item, is_reshape) for item in arg]
        if not isinstance(arg, int) or isinstance(arg, bool) or arg <= 0 or arg % self.edges:
            return arg
        if is_reshape:
            return -1
        if arg != self.edges:
            raise UnsupportedError("[gnnc.vjp] the gradient of a body reads a multiple of the edge count")
        return self._edge_count()

    def _edge_count(self) -> Node:
        if self.count is None:
            assert self.first is not None
            with self.graph.inserting_after(self.last_placeholder):
                size = torch.ops.aten.sym_size.int
                self.count = self.graph.call_function(size, (self.first, 0))
        return self.count

    def _make_new_full(self, node: Node) -> None:
        """Create the tensor on the device of an operand."""
        value = node.meta["val"]
        parameters = [a.name for a in schema(node.target).arguments]  # type: ignore[arg-type]
        given = dict(zip(parameters, node.args, strict=False)) | node.kwargs
        fill = {"ones": 1, "new_ones": 1, "scalar_tensor": given.get("s")}.get(op_name(node), 0)
        fill = given.get("fill_value", fill)
        sizes = [self._sizes(size, False) for size in value.shape]
        with self.graph.inserting_before(node):
            like = self.first or self.last_placeholder
            full = self.graph.call_function(
                torch.ops.aten.new_full.default, (like, sizes, fill), {"dtype": value.dtype}
            )
        full.meta = dict(node.meta)
        node.replace_all_uses_with(full)
        self.graph.erase_node(node)


def _repeats_a_row(node: Node) -> bool:
    """Return whether an ``expand`` makes edges of one row: the -1 of its sizes would be that one row."""
    if aten_name(node) != "expand.default":
        return False
    return first_operand(node).meta["val"].shape[:1] != node.meta["val"].shape[:1]


def derived_body(body: str, result: Callable[[Graph, list[Node]], Node]) -> str:
    """Return the body of a value that is computed from the values of ``body``.

    Args:
        body: the body.
        result: adds nodes to the graph, given the body's values, and returns the last.
    """
    graph = Graph()
    found = graph.graph_copy(parse_body(body).graph, {})
    values = list(found) if isinstance(found, list | tuple) else [found]
    graph.output(result(graph, values))
    graph.eliminate_dead_code()
    return body_text(graph)


def rename_operands(body: str, names: Mapping[str, str]) -> str:
    """Return the body, its operands renamed."""
    graph = Graph()
    graph.output(graph.graph_copy(parse_body(body).graph, {}))
    for node in graph.find_nodes(op="placeholder"):
        node.target = names.get(node.target, node.target)
    return body_text(graph)


def exchange_ends(body: str) -> str:
    """Return the body with rows of destinations and of sources exchanged, for the transpose of its CSR."""
    ends = {"i": "j", "j": "i"}
    return rename_operands(
        body, {name: ends[name[0]] + name[1:] for name in body_inputs(body) if name[0] in ends}
    )


def operand_of(name: str, tensor: Tensor) -> Operand:
    """Return the record of the operand ``name``; its inner sizes are concrete."""
    sizes = tensor.shape if name[0] == "c" else tensor.shape[1:]
    return Operand(name, tuple(int(size) for size in sizes), tensor.dtype)
