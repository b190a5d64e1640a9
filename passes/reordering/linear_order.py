"""Order of linear layers and aggregations: ``(AX)W = A(XW)``, whichever is cheaper.

The sparse kernel gathers rows of the input's width, or of the output's. A linear layer also moves
through the row scales, sums and repeated aggregations in between; its bias stays outside.
"""

from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import fx
from torch.fx import Node

from gnnc.ir.graph import fake_mode_of
from gnnc.ir.nodes import argument, holds_tensor, operand, same_shape, shape_of, unpack, with_arguments
from gnnc.ir.op import op_of, size_expr
from gnnc.passes.base import Context
from gnnc.passes.reordering.row_scale import row_scale
from gnnc.passes.rewrite.assumed_sizes import AssumedSizes
from gnnc.passes.rewrite.node_builder import NodeBuilder

_aten = torch.ops.aten
_ops = torch.ops.gnnc
_SUMS = (_aten.add.Tensor, _aten.sub.Tensor)
_SCALINGS = (_aten.mul.Tensor, _aten.div.Tensor)


class LinearOrder:
    """Rewriter that moves every linear layer of a graph to its cheapest place.

    Args:
        gm: the graph, changed in place.
        assumed_sizes: evaluates costs.
        min_gain: a layer moves where the cost falls at least by this share.
        ctx: takes the notes.
    """

    def __init__(
        self, gm: fx.GraphModule, assumed_sizes: AssumedSizes, min_gain: float, ctx: Context
    ) -> None:
        self.gm, self.assumed_sizes, self.min_gain, self.ctx = gm, assumed_sizes, min_gain, ctx
        self.builder = NodeBuilder(gm)
        self.mode = fake_mode_of(gm)
        self._moved: set[Node] = set()

    def run(self) -> None:
        """Rewrite until no move lowers the cost; each move does, so this terminates."""
        pending = self._gemms()
        while pending:
            gemm = pending.pop(0)
            if gemm.users and (self._forward(gemm) or self._backward(gemm)):
                pending = [node for node in self._gemms() if node.users]

    def _gemms(self) -> list[Node]:
        return [node for node in self.gm.graph.nodes if _is(node, "gemm")]

    def _backward(self, gemm: Node) -> bool:
        """Replace aggregate-then-transform by transform-then-aggregate; return whether it did."""
        tree = _Tree(gemm)
        if not any(_is(node, "spmm") for node in tree.inner):
            self._note_obstacle(gemm)
            return False
        before = [*self._aggregations(tree.inner), self._gemm_time(gemm, operand(gemm, "x"))]
        after = [self._aggregation_time(n, _width_out(gemm)) for n in tree.inner if _is(n, "spmm")]
        after += [self._gemm_time(gemm, leaf) for leaf in tree.leaves]
        if not self._is_worth(gemm, "before", sum(before), sum(after)):
            return False
        moved = tree.rebuilt(self.builder, lambda leaf: self._gemm(gemm, leaf))
        self._finish(gemm, gemm, moved)
        return True

    def _forward(self, gemm: Node) -> bool:
        """Replace transform-then-aggregate by aggregate-then-transform; return whether it did."""
        chain = _chain_after(gemm)
        if not chain:
            return False
        x = operand(gemm, "x")
        width = _width(x)
        before = [*self._aggregations(chain), self._gemm_time(gemm, x)]
        after = [self._aggregation_time(n, width) for n in chain if _is(n, "spmm")]
        after.append(self._gemm_time(gemm, chain[-1]))
        bias = argument(gemm, "bias")
        if bias is not None and sum(after) < sum(before):
            self.ctx.note(gemm, "linear layer stays before the aggregation: its bias is aggregated too")
            return False
        if not self._is_worth(gemm, "after", sum(before), sum(after)):
            return False
        result: Node = x
        for node in chain:
            result = _with_operand(self.builder, node, result)
        self._finish(gemm, chain[-1], self._gemm(gemm, result))
        return True

    def _is_worth(self, gemm: Node, where: str, before: float, after: float) -> bool:
        widths = f"{_width(operand(gemm, 'x'))} to {_width_out(gemm)} columns"
        other = "after" if where == "before" else "before"
        if after > before * (1 - self.min_gain):
            if gemm not in self._moved:
                self.ctx.note(gemm, f"linear layer ({widths}) stays {other} the aggregation: cheaper so")
            return False
        gain = f"{before / after:.2g}x cheaper"
        self.ctx.note(gemm, f"linear layer ({widths}) moved {where} the aggregation: {gain}")
        return True

    def _note_obstacle(self, gemm: Node) -> None:
        obstacle = _obstacle(operand(gemm, "x"))
        if obstacle is not None:
            self.ctx.note(gemm, f"linear layer stays after the aggregation: {obstacle}")

    def _gemm(self, like: Node, x: Node) -> Node:
        weight, transposed = unpack(like, "w", "w_is_kn")
        layer = like.meta.get("layer", "")
        moved = self.builder.call(_ops.gemm.default, x, weight, None, transposed, layer=layer)
        self._moved.add(moved)
        return moved

    def _finish(self, gemm: Node, old: Node, new: Node) -> None:
        bias = argument(gemm, "bias")
        if bias is not None:
            new = self.builder.call(_aten.add.Tensor, new, bias, layer=gemm.meta.get("layer", ""))
        old.replace_all_uses_with(new)
        self.gm.graph.eliminate_dead_code(is_impure_node=lambda n: n.op in ("placeholder", "output"))

    def _aggregations(self, nodes: Sequence[Node]) -> list[float]:
        return [self._aggregation_time(n, _width(n)) for n in nodes if _is(n, "spmm")]

    def _aggregation_time(self, spmm: Node, width: int) -> float:
        rowptr, col, value, x, reduce, num_dst = _values(
            unpack(spmm, "rowptr", "col", "value", "x", "reduce", "num_dst")
        )
        return self._time(spmm, rowptr, col, value, self._tensor(x.shape[0], width), reduce, num_dst)

    def _gemm_time(self, gemm: Node, x: Any) -> float:
        weight, transposed = _values(unpack(gemm, "w", "w_is_kn"))
        rows = self._tensor(shape_of(x)[0], _width(operand(gemm, "x")))
        return self._time(gemm, rows, weight, None, transposed)

    def _time(self, node: Node, *args: Any) -> float:
        op = op_of(node)
        assert op is not None
        return self.assumed_sizes.time(op.cost(*args))

    def _tensor(self, rows: Any, width: int) -> torch.Tensor:
        if self.mode is None:
            return torch.empty((rows, width), dtype=torch.float32, device="meta")
        with self.mode:
            return torch.empty((rows, width), dtype=torch.float32)


class _Tree:
    """Tree of linear ops between a GEMM and the tensors that it could be applied to instead.

    Attributes:
        inner: nodes that the GEMM can move through, in no particular order.
        leaves: the tensors that it would be applied to.
    """

    def __init__(self, gemm: Node) -> None:
        self.inner: list[Node] = []
        self.leaves: list[Node] = []
        self._root = operand(gemm, "x")
        self._allowed = {gemm}
        pending = [self._root]
        while pending:
            node = pending.pop()
            if node in self.inner or node in self.leaves:
                continue
            operands = linear_operands(node) if set(node.users) <= self._allowed else ()
            (self.inner if operands else self.leaves).append(node)
            if operands:
                self._allowed.add(node)
                pending += operands
        self._drop_branches_without_aggregation()

    def _drop_branches_without_aggregation(self) -> None:
        """Turn branches that hold no aggregation into leaves: moving into them gains nothing."""
        aggregating = [node for node in self.inner if self._aggregates(node)]
        if len(aggregating) == len(self.inner):
            return
        self.inner = aggregating
        reached = [
            node for inner in aggregating for node in linear_operands(inner) if node not in aggregating
        ]
        self.leaves = list(dict.fromkeys(self._shared(node) for node in reached))

    def _aggregates(self, node: Node) -> bool:
        if _is(node, "spmm"):
            return True
        return node in self.inner and any(self._aggregates(arg) for arg in linear_operands(node))

    def _shared(self, node: Node) -> Node:
        """Return the operand of a scaling if it is a leaf anyway, as in GIN's ``(1 + eps) x``."""
        if node.target in _SCALINGS and set(node.users) <= self._allowed:
            (operand, *rest) = linear_operands(node) or (node,)
            if (
                not rest
                and operand is not node
                and any(operand in linear_operands(inner) for inner in self.inner)
            ):
                self.inner.append(node)
                return operand
        return node

    def rebuilt(self, builder: NodeBuilder, transform: Callable[[Node], Node]) -> Node:
        """Return a copy of the root with ``transform`` applied to each leaf."""
        copies: dict[Node, Node] = {leaf: transform(leaf) for leaf in self.leaves}

        def build(node: Node) -> Node:
            if node not in copies:
                copies[node] = _with_operands(builder, node, build)
            return copies[node]

        return build(self._root)


def linear_operands(node: Node) -> tuple[Node, ...]:
    """Return the operands ``[N, F]`` that ``node`` is linear in and treats column by column alike."""
    if not holds_tensor(node) or len(shape_of(node)) != 2:
        return ()
    if _is(node, "spmm"):
        return _aggregated(node)
    if node.target in _SCALINGS:
        left, right = unpack(node, "self", "other")
        if holds_tensor(left) and same_shape(shape_of(left), shape_of(node)) and row_scale(right):
            return (left,)  # type: ignore[return-value]
        swapped = node.target is _aten.mul.Tensor and holds_tensor(right) and row_scale(left)
        return (right,) if swapped and same_shape(shape_of(right), shape_of(node)) else ()  # type: ignore[return-value, arg-type]
    if node.target in _SUMS and argument(node, "alpha") == 1:
        terms = unpack(node, "self", "other")
        whole = all(holds_tensor(arg) and same_shape(shape_of(arg), shape_of(node)) for arg in terms)
        return terms if whole else ()
    return ()


def _aggregated(spmm: Node) -> tuple[Node, ...]:
    value, x, reduce = unpack(spmm, "value", "x", "reduce")
    per_edge = value is None or len(shape_of(value)) == 1
    return (x,) if reduce in ("sum", "mean") and per_edge else ()


def _with_operand(builder: NodeBuilder, node: Node, operand: Node) -> Node:
    return _with_operands(builder, node, lambda _: operand)


def _with_operands(builder: NodeBuilder, node: Node, build: Callable[[Node], Node]) -> Node:
    """Return a copy of a linear ``node`` with other operands, perhaps of another width."""
    operands = linear_operands(node)
    if _is(node, "spmm"):
        args, _ = with_arguments(node, x=build(operands[0]))
    elif node.target in _SUMS:
        args = tuple(build(operand) for operand in operands)
    else:
        args = tuple(_scale_or(arg, operands[0], build) for arg in unpack(node, "self", "other"))
    return builder.call(node.target, *args, layer=node.meta.get("layer", ""))


def _scale_or(arg: Any, operand: Node, build: Callable[[Node], Node]) -> Any:
    if arg is operand:
        return build(operand)
    scale = row_scale(arg)
    assert scale is not None
    return scale.value


def _chain_after(gemm: Node) -> list[Node]:
    """Return the chain of aggregations and row scales that follow a GEMM; empty without an aggregation."""
    chain: list[Node] = []
    node = gemm
    while len(node.users) == 1:
        (user,) = node.users
        if linear_operands(user) != (node,):
            break
        chain.append(user)
        node = user
    return chain if any(_is(step, "spmm") for step in chain) else []


def _obstacle(node: Any) -> str | None:
    """Return why a GEMM cannot move through the aggregation that feeds it, or None."""
    while isinstance(node, Node) and node.target in _SCALINGS and linear_operands(node):
        node = linear_operands(node)[0]
    if not isinstance(node, Node) or not _is(node, "spmm"):
        return None
    reduce = argument(node, "reduce")
    if reduce in ("max", "min"):
        return f"{reduce} does not commute with it"
    return "others read the aggregated rows too" if len(node.users) > 1 else None


def _is(node: Node, name: str) -> bool:
    op = op_of(node)
    return op is not None and op.name == name


def _values(args: Sequence[Any]) -> list[Any]:
    return [arg.meta["val"] if isinstance(arg, Node) else arg for arg in args]


def _width(node: Any) -> int:
    return int(size_expr(shape_of(node)[-1]))


def _width_out(gemm: Node) -> int:
    return _width(gemm)
