"""A new op needs a record, a pass that makes it and a kernel a backend: no table of the compiler names it.

The file runs itself in another process, so that the op stays out of the registry that other tests walk.
"""

import re
import subprocess
import sys
from dataclasses import dataclass
from typing import ClassVar

import pytest
import torch
from torch import fx
from torch.fx import Node
from torch_geometric.nn import GraphConv

import gnnc
from gnnc.cost.model import family_of, flops, launches, work
from gnnc.ir import describe
from gnnc.ir.nodes import operand, unpack
from gnnc.ir.op import Cost, ErrorInput, Op, check, define, nbytes, numel
from gnnc.passes import PIPELINE, Context
from gnnc.runtime.program.emitter import Emitter
from gnnc.runtime.registry import kernel

NAME = "square_sum"


@pytest.mark.slow
def test_an_op_needs_no_table():
    run = subprocess.run([sys.executable, __file__], capture_output=True, text=True, check=False)
    assert run.returncode == 0, run.stderr
    assert run.stdout.split() == ["reference", "cpu"]


def square_sum(rowptr, col, x, num_dst):
    """Return the sums of squared rows along edges: ``[num_src, F]`` to ``[num_dst, F]``."""
    check(x.dim() == 2, NAME, lambda: f"x must be [num_src, F], got {tuple(x.shape)}")
    rows = torch.repeat_interleave(rowptr.diff(), output_size=col.shape[0])
    return x.new_zeros(num_dst, x.shape[1]).index_add(0, rows, x.index_select(0, col).square())


def define_op() -> Op:
    rowptr, col = torch.tensor([0, 2, 3]), torch.tensor([0, 1, 1])
    return define(
        Op(
            name=NAME,
            schema="(Tensor rowptr, Tensor col, Tensor x, SymInt num_dst) -> Tensor",
            kind="aggregate",
            features=("x",),
            gathered=("x",),
            counted_as="segment",
            label="h{n}",
            result_dtype=torch.float32,
            reference=square_sum,
            fake=lambda rowptr, col, x, num_dst: x.new_empty(num_dst, x.shape[1]),
            cost=lambda rowptr, col, x, num_dst: Cost(
                bytes=nbytes(rowptr, col) + col.shape[0] * x.shape[1] * 4, flops=2 * numel(x)
            ),
            no_gradient="the test compiles for inference",
            samples=lambda: [(rowptr, col, torch.randn(2, 4), 2)],
            error_inputs=lambda: [ErrorInput((rowptr, col, torch.ones(2), 2), r"\[num_src, F\]")],
        )
    )


@dataclass(frozen=True)
class MakeSquareSum:
    """Pass that puts the op in place of an aggregation of squares."""

    op: Op
    name: ClassVar[str] = "make_square_sum"

    def run(self, gm: fx.GraphModule, ctx: Context) -> fx.GraphModule:
        for node in gm.graph.find_nodes(op="call_function", target=torch.ops.gnnc.spmm.default):
            square = operand(node, "x")
            if square.target is not torch.ops.aten.square.default:
                continue
            rowptr, col, num_dst = unpack(node, "rowptr", "col", "num_dst")
            with gm.graph.inserting_before(node):
                call = gm.graph.call_function(self.op.target, (rowptr, col, operand(square, "self"), num_dst))
            call.meta = dict(node.meta)
            node.replace_all_uses_with(call)
            gm.graph.erase_node(node)
        gm.graph.eliminate_dead_code()
        return gm


def register_kernel() -> None:
    @kernel(f"gnnc.{NAME}", backend="cpu", name="squares")
    class Squares:
        @staticmethod
        def plan(node: Node) -> None:
            """Take any node."""

        @staticmethod
        def emit(plan: None, node: Node, emitter: Emitter) -> None:
            out = emitter.allocate(node, dense=True)
            edges = [emitter.vector(operand(node, name)) for name in ("rowptr", "col")]
            emitter.call(emitter.bind(launch, NAME), [*edges, emitter.dense(operand(node, "x")), out.written])

    def launch(rowptr, col, x, out):
        out.copy_(square_sum(rowptr, col, x, out.shape[0]))


class SquareConv(GraphConv):
    def message(self, x_j, edge_weight):
        return x_j.square()


class Model(torch.nn.Module):
    def __init__(self):
        super().__init__()
        self.conv1, self.conv2 = GraphConv(24, 32), SquareConv(32, 16)

    def forward(self, x, edge_index):
        return self.conv2(self.conv1(x, edge_index).relu(), edge_index)


def check_backend(backend: str, op: Op) -> None:
    torch.manual_seed(0)
    model, x, edge_index = Model().eval(), torch.randn(60, 24), torch.randint(0, 60, (2, 400))
    place = [step.name for step in PIPELINE].index("raise") + 1
    pipeline = (*PIPELINE[:place], MakeSquareSum(op), *PIPELINE[place:])
    compiled = gnnc.compile(model, "int8", example_inputs=(x, edge_index), backend=backend, pipeline=pipeline)
    with torch.no_grad():
        expected, result = model(x, edge_index), compiled(x, edge_index)
    assert (result - expected).norm() < 0.05 * expected.norm()
    kernel_name = "squares" if backend == "cpu" else "reference"
    text = str(compiled)
    assert "segment 0/1" in text
    assert re.search(rf"h\d+ = gnnc.{NAME}\(rowptr, col, h\d+, N\) .* {kernel_name}; csr", text)
    assert f"{NAME} has no low-precision form" in compiled.explain()
    assert re.search(rf"^{NAME} +conv2 +32 +fp32 ", compiled.summary(), re.MULTILINE)
    check_cost(describe.inline(compiled.graph_module))


def check_cost(graph: fx.Graph) -> None:
    """Check that the cost model times the op by its traits: edges, rows and what it gathers."""
    (launch,) = [found for found in launches(graph) if family_of(found.nodes[0]) == NAME]
    terms = dict.fromkeys(term.name for term in work(launch))
    assert list(terms) == ["launch", "edge.fp32", "row", "gather.fp32", "read", "write"], terms
    assert flops(launch).as_coeff_Mul()[0] == 2 * 32, flops(launch)


if __name__ == "__main__":
    OP = define_op()
    register_kernel()
    for backend in ("reference", "cpu"):
        check_backend(backend, OP)
        print(backend)
