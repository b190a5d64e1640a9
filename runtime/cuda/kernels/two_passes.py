"""Launches of gradients of attention: a pass over the edges by rows, one by columns, by groups of heads."""

import math
from abc import ABC, abstractmethod
from collections.abc import Iterable
from dataclasses import dataclass
from typing import Generic, TypeVar

import torch
from torch.fx import Node

from gnnc.ir.nodes import shape_of
from gnnc.runtime.cuda.driver.kernel_set import AS_COMPILED
from gnnc.runtime.cuda.emitter import CudaEmitter, length, pointer
from gnnc.runtime.cuda.formats.tables import runs_arguments, write_columns, write_runs
from gnnc.runtime.cuda.kernels.epilogue import write_epilogue
from gnnc.runtime.cuda.kernels.rowmap import launch_rowmap
from gnnc.runtime.cuda.kernels.spmm import Rows
from gnnc.runtime.plans import attention_backward, body_attention_backward
from gnnc.runtime.program.launches import Argument, Expr, Operand, count_of, expr
from gnnc.runtime.row_program.build import argument_of

MOST_BYTES = 512
"""Bytes of the heads of a launch, at most: what a warp gathers at once."""
_PIECE = 16

P = TypeVar("P", attention_backward.Plan, body_attention_backward.Plan)


@dataclass(frozen=True, slots=True)
class Edges:
    """The edges of a pass, as launches take them: the arguments of a ``gnnc::Runs``, and the run table."""

    arguments: list[Argument]
    runs: Expr


class TwoPasses(ABC, Generic[P]):
    """Writer of the launches of a gradient of attention; subclasses write both passes of a group of heads."""

    def __init__(self, plan: P, node: Node, emitter: CudaEmitter) -> None:
        self.plan, self.node, self.emitter = plan, node, emitter
        self.num_dst, self.num_src = (
            shape_of(argument_of(node, plan.edges[index]))[0] - 1 for index in (0, 2)
        )
        self.head_width = plan.width // plan.heads

    @abstractmethod
    def launch(self, head: int, group: int, epilogue: str, values: list[Operand]) -> None:
        """Write both passes over the edges, for the ``group`` heads from ``head`` on."""

    def write_passes(self, dtypes: Iterable[torch.dtype]) -> None:
        """Write both passes for all heads at once, or for each where rows of these dtypes need it."""
        plan = self.plan
        if plan.heads > 1 and not all(map(self._fits, dtypes)):
            self._write_by_heads()
            return
        epilogue, values = write_epilogue(plan.program, self.node, self.emitter, self.num_src, plan.width)
        self.launch(0, plan.heads, epilogue, values)

    def of_head(self, memory: Expr | None, head: int) -> Expr:
        """Return the address of a head in the first of dense rows of floats, or null."""
        return pointer(None) if memory is None else past(pointer(memory), 4 * head * self.head_width)

    def edges_of(self, rowptr: int, col: int, rows: Rows) -> Edges:
        """Return the edges of a pass that gathers rows, given the numbers of its rowptr and col."""
        starts = self.emitter.vector(argument_of(self.node, rowptr))
        columns = write_columns(self.emitter, self.emitter.vector(argument_of(self.node, col)))
        runs = write_runs(self.emitter, starts, length(columns), rows.nbytes)
        return Edges(runs_arguments(starts, columns, runs), runs)

    def emit(
        self,
        kernel: str,
        struct: str,
        body: str,
        words: int,
        arguments: list[Argument],
        values: list[Operand],
        edges: Edges,
    ) -> None:
        """Write the launch of a pass, whose body keeps ``words`` words of a part of a split row."""
        kernel_set = self.emitter.kernel_set
        kernel_set.expect(kernel, struct, count_of(arguments))
        kernel_set.require(kernel, f"{body}::kStaged == {words}", "parts of rows have room")
        grid = expr("{}.blocks", edges.runs)
        self.emitter.launch(kernel, grid, [*arguments, *values], block=AS_COMPILED)

    def _fits(self, dtype: torch.dtype) -> bool:
        """Return whether a warp gathers rows at once, of whose pieces each head has a power of two."""
        pieces, rest = divmod(self.head_width * dtype.itemsize, _PIECE)
        is_power = not rest and pieces & (pieces - 1) == 0
        return is_power and self.plan.width * dtype.itemsize <= MOST_BYTES

    def _write_by_heads(self) -> None:
        """Write a launch for each head, to memory of its own, and the row program of whole rows."""
        emitter, width = self.emitter, self.plan.width
        dx = emitter.scratch(self.num_src, width, torch.float32)
        stride = emitter.padded(width, torch.float32)
        aligned = math.gcd(stride, self.head_width)
        text = "  float* out;\n  template <class Tile>\n"
        text += "  __device__ void operator()(Tile& t, int64_t row) const {\n"
        text += f"    step::store<{aligned}>(t, out + row * {stride});\n  }}\n"
        epilogue = emitter.kernel_set.struct("Epilogue", text)
        for head in range(self.plan.heads):
            self.launch(head, 1, epilogue, [self.of_head(dx.written, head)])
        launch_rowmap(emitter, self.node, dx, "float", stride, self.num_src, width, self.plan.program)


def past(address: Expr, nbytes: int) -> Expr:
    """Return an address further on."""
    return expr("{} + {}", address, nbytes) if nbytes else address
