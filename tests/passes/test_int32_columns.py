"""Orders of segment reductions that become int32 in the structure graph."""

from collections.abc import Callable

import pytest
import torch
from torch import Tensor, nn
from torch.fx import GraphModule, Node

import gnnc
from gnnc.ir.graph import placeholders
from gnnc.ir.parts import Parts
from gnnc.ir.source import source_of
from gnnc.passes import Context, run_pass
from gnnc.passes.int32_columns import Int32Columns
from gnnc.report.printing import format_graph
from gnnc.target import Target

ATEN, GNNC = torch.ops.aten, torch.ops.gnnc


class Sums(nn.Module):
    """Sums of features of edges, whose order is the permutation of the CSR."""

    def __init__(self) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.eye(4) * 0.5, requires_grad=False)

    def forward(self, x: Tensor, edge_index: Tensor, edge_attr: Tensor) -> Tensor:
        features = (edge_attr @ self.weight).relu()
        return x.new_zeros(x.shape[0], edge_attr.shape[1]).index_add(0, edge_index[1], features)


def arguments() -> tuple[Tensor, Tensor, Tensor]:
    generator = torch.Generator().manual_seed(0)
    edge_index = torch.randint(9, (2, 30), generator=generator)
    return torch.randn(9, 4, generator=generator), edge_index, torch.randn(30, 4, generator=generator)


def stage(model: nn.Module, backend: str = "reference", name: str = "reorder") -> Parts:
    compiled = gnnc.compile(model.eval(), precision="fp32", backend=backend)
    compiled(*arguments())
    return dict(compiled._captured().snapshots)[name]


def order_of(compute: GraphModule) -> Node:
    (reduction,) = compute.graph.find_nodes(op="call_function", target=GNNC.segment_reduce.default)
    return reduction.args[1]


def run(parts: Parts, values: dict[str, Tensor]) -> Tensor:
    """Return the result of the forward graph on the results of the structure graph."""
    structure, compute = parts.structure, parts.forward
    assert structure is not None
    taken = [values.get(node.name, 9) for node in placeholders(structure)]
    names = [node.name for node in structure.graph.output_node().args[0]]
    known = values | dict(zip(names, structure(*taken), strict=True))
    return compute(*[known[source_of(node).name] for node in placeholders(compute)])[0]


def narrowed(parts: Parts, **options: bool) -> Parts:
    return run_pass(Int32Columns(), parts, Context(target=Target(**options)))


def test_an_order_that_only_sums_read_is_converted_in_the_structure_graph() -> None:
    before = stage(Sums())
    after = narrowed(before, int32_columns=True)
    assert order_of(before.forward).meta["val"].dtype == torch.int64
    assert order_of(after.forward).meta["val"].dtype == torch.int32
    values = dict(zip(("x", "edge_index", "edge_attr", "weight"), (*arguments(), torch.eye(4)), strict=True))
    assert torch.equal(run(after, values), run(before, values))


def test_examples_become_int32_with_the_placeholder() -> None:
    before = stage(Sums())
    examples = tuple(torch.arange(3) for _ in placeholders(before.forward))
    context = Context(target=Target(int32_columns=True), examples=examples)
    after = run_pass(Int32Columns(), before, context).forward
    dtypes = {node: value.dtype for node, value in zip(placeholders(after), context.examples, strict=True)}
    assert dtypes.pop(order_of(after)) == torch.int32 and set(dtypes.values()) == {torch.int64}


def return_the_order(compute: GraphModule) -> None:
    output = compute.graph.output_node()
    output.args = ((*output.args[0], order_of(compute)),)


def gather_by_the_order(compute: GraphModule) -> None:
    (reduction,) = compute.graph.find_nodes(op="call_function", target=GNNC.segment_reduce.default)
    with compute.graph.inserting_before(reduction):
        gathered = compute.graph.call_function(
            ATEN.index_select.default, (reduction.args[2], 0, order_of(compute))
        )
    reduction.update_arg(2, gathered)


REFUSED: dict[str, Callable[[GraphModule], None]] = {
    "the order is a result": return_the_order,
    "the order is also an index": gather_by_the_order,
}


@pytest.mark.parametrize("reader", REFUSED)
def test_an_order_with_other_readers_stays(reader: str) -> None:
    before = stage(Sums())
    REFUSED[reader](before.forward)
    before.forward.recompile()
    after = narrowed(before, int32_columns=True)
    assert order_of(after.forward).meta["val"].dtype == torch.int64
    assert after.structure is not None and before.structure is not None
    assert format_graph(after.structure) == format_graph(before.structure)


def test_a_backend_that_reads_int64_keeps_it() -> None:
    before = stage(Sums())
    after = narrowed(before, int32_columns=False)
    assert order_of(after.forward).meta["val"].dtype == torch.int64
    assert after is before, "nothing is copied"


def test_a_cpu_program_converts_once_a_graph() -> None:
    compiled = gnnc.compile(Sums().eval(), precision="fp32", backend="cpu")
    x, edge_index, edge_attr = arguments()
    got = compiled(x, edge_index, edge_attr)
    torch.testing.assert_close(got, Sums()(x, edge_index, edge_attr))
    structure, _, compute = str(compiled).partition("# runs at every call")
    assert "torch.int32" in structure and "torch.int32" not in compute
