"""CUDA C++ of a body that gives logits of attention: a sum over the columns of each head.

The terms of the sum are elementwise in the rows at both ends of an edge, so that a thread computes those of
the columns that it gathers (``csrc/cuda/sparse/body_attention.cuh``). The values of rows are arguments; those
of constants are loaded once for each column.
"""

from dataclasses import dataclass

import torch
from torch.fx import Node

from gnnc.ir.body import body_values
from gnnc.ir.nodes import argument, first_operand
from gnnc.runtime.cuda.kernels.body_places import Place, flat
from gnnc.runtime.cuda.kernels.edge_body import BodyWriter, Scope
from gnnc.runtime.cuda.kernels.epilogue import TYPES, literal
from gnnc.runtime.row_program.build import Refusal

_ROWS = {"i0": "own", "j0": "key"}
"""Names of the rows at both ends, in a body and in its terms."""
_EDGE = "edge_term"


@dataclass(frozen=True, slots=True)
class Logit:
    """C++ struct of a logit.

    Attributes:
        text: members and functions.
        constants: names of the operands that the members point to, in order.
    """

    text: str
    constants: tuple[str, ...]


def write_logit(body: str, operands: dict[str, torch.Tensor], scale: float) -> Logit:
    """Return the logit that a body computes, times a scale.

    Args:
        body: text of the body.
        operands: fake tensors of the operands: ``i0`` and ``j0``, ``e0`` with a value a head, constants.
        scale: factor of the result.

    Raises:
        Refusal: the body is no sum over the columns of heads of elementwise terms.
    """
    return _LogitWriter(body, operands, {name: 1 for name in operands}).logit(scale)


class _LogitWriter(BodyWriter):
    """Writer of the terms of the sum, and of what follows it."""

    def __init__(self, text: str, operands: dict[str, torch.Tensor], strides: dict[str, int]) -> None:
        super().__init__(text, operands, strides)
        self.long, self.rows = frozenset(), {}  # a thread computes its columns by itself

    def logit(self, scale: float) -> Logit:
        """Return the struct."""
        (result,) = body_values(self.module.graph)
        total = self._sum_behind(result)
        terms = first_operand(total)
        shape = self._edge_shape(terms)
        dims = [dim % (len(shape) + 1) for dim in argument(total, "dim")]
        if len(shape) not in (1, 2) or dims != [len(shape)] or argument(total, "keepdim"):
            raise Refusal("the body sums over other dimensions than the columns of heads")
        self.place: Place = ("head", "column")[-len(shape) :]
        self.row_index = flat(self.place, shape)
        self.loads: dict[str, int] = {}
        inner = Scope()
        term = self.value(terms, ("edge", *self.place), inner)
        outer = Scope(known={(total, ("edge", *self.place[:-1])): "total"})
        self.place = self.place[:-1]
        value = self.value(result, ("edge", *self.place), outer)
        if scale != 1.0:
            value = f"{value} * {literal(scale)}"
        if self.stages:
            raise Refusal("the body has more than one sum, or a product with a weight")
        names = tuple(name for name in self.names if name[0] == "c")
        lines = [
            f"static constexpr int kConstants = {len(self.loads)};",
            *(f"const {TYPES[self.operands[name].dtype]}* {name};" for name in names),
            *([] if names else ["int64_t nothing;"]),
            "__device__ void constants(int head, int column, float* c) const {",
            *(f"  c[{index}] = {load};" for load, index in self.loads.items()),
            "}",
            "__device__ float term(float own, float key, const float* c) const {",
            *(f"  {line}" for line in [*inner.lines, f"return {term};"]),
            "}",
            f"__device__ float finish(float total, float {_EDGE}) const {{",
            *(f"  {line}" for line in [*outer.lines, f"return {value};"]),
            "}",
        ]
        return Logit("".join(f"  {line}\n" for line in lines), names)

    def _sum_behind(self, result: Node) -> Node:
        sums = [node for node in self.module.graph.nodes if str(node.target) == "aten.sum.dim_IntList"]
        if len(sums) != 1 or not isinstance(result, Node):
            raise Refusal("the body is not one sum")
        return sums[0]

    def _load(self, name: str, place: Place) -> str:
        """Return a value that a thread has: of its column of both rows, of the edge, or of a constant."""
        is_term = len(self.place) > 0 and self.place[-1] == "column"
        if name[0] == "c":
            if not is_term:
                raise Refusal("a constant is behind the sum of the body")
            load = super()._load(name, place)
            return f"c[{self.loads.setdefault(load, len(self.loads))}]"
        index = flat(place[1:], tuple(int(size) for size in self.operands[name].shape[1:]))
        if name in _ROWS and is_term and index == self.row_index:
            return _ROWS[name]
        if name == "e0" and not is_term and index in ("0", "head"):
            return _EDGE
        raise Refusal(f"the body reads {name} elsewhere than in the column of a term")
