"""Normalize: what goes, what merges, what stays, and that the meaning is left alone."""

import operator

import pytest
import torch
from torch import Tensor, nn
from torch.utils import _pytree as pytree
from torch_geometric.nn import GATConv, GCNConv
from traced import eager, relative_error, run, targets

import gnnc
from gnnc.capture.export import capture
from gnnc.passes.base import run_pass
from gnnc.passes.normalize import Normalize
from gnnc.report.printing import format_graph


def normalized(model: nn.Module, *args: Tensor):
    return run_pass(Normalize(), capture(model, args).graph_module)


def formula(function):
    """A module whose forward is ``function``."""

    class Formula(nn.Module):
        def forward(self, x: Tensor) -> Tensor:
            return function(x)

    return Formula().eval()


class Layers(nn.Module):
    def __init__(self, conv: type[nn.Module]) -> None:
        super().__init__()
        self.conv1, self.conv2 = conv(6, 8), conv(8, 3)

    def forward(self, x: Tensor, edge_index: Tensor) -> Tensor:
        x = nn.functional.dropout(self.conv1(x, edge_index).relu(), training=self.training)
        return self.conv2(x, edge_index)


GRAPH = torch.randn(9, 6), torch.randint(9, (2, 30))


@pytest.fixture(scope="module")
def gcn():
    return normalized(Layers(GCNConv).eval(), *GRAPH)


def test_gcn_golden(gcn, golden):
    golden(format_graph(gcn))


def test_asserts_and_copies_go(gcn):
    gone = ("_assert_scalar", "clone", "detach", "new_zeros", "ones", "dropout")
    assert not set(gone) & set(targets(gcn))


def test_the_second_layer_reuses_the_structure_of_the_first(gcn):
    found = targets(gcn)
    assert found.count("ne") == found.count("cat") == found.count("pow") == 1
    assert found.count("scatter_add") == 3  # the degree, and one a layer


def test_each_size_has_one_node(gcn):
    sizes = [n.meta["val"].node.expr for n in gcn.graph.nodes if isinstance(n.meta.get("val"), torch.SymInt)]
    assert len(sizes) == len(set(sizes))


def test_merged_masks_have_one_unbacked_size(gcn):
    shapes = [tuple(n.meta["val"].shape) for n in gcn.graph.nodes if isinstance(n.meta.get("val"), Tensor)]
    sizes = [size.node.expr for shape in shapes for size in shape if isinstance(size, torch.SymInt)]
    symbols = {symbol.name for size in sizes for symbol in size.free_symbols}
    assert sum(name.startswith("u") for name in symbols) == 1


@pytest.mark.parametrize(
    "function, left",
    [
        (lambda x: x.view(-1, 6).clone().detach().to(torch.float32).contiguous() + 1, ["add"]),
        (lambda x: nn.functional.dropout(x, 0.5, False).relu(), ["relu"]),
        (lambda x: torch.native_dropout(x, 0.0, True)[0].relu(), ["relu"]),
        (lambda x: x.to(torch.float32).relu(), ["relu"]),
        (lambda x: x.to(torch.float64).relu(), ["_to_copy", "relu"]),
        (lambda x: x[:, 0:6].expand(-1, 6).neg(), ["neg"]),
        (lambda x: x * torch.ones_like(x) * x.new_ones(x.shape) * 2, ["mul"]),
        (lambda x: x.exp() * x.exp(), ["exp", "mul"]),
        (lambda x: x.softmax(-1) + x.sum(-2), ["softmax", "sum", "add"]),
        (lambda x: x / x.sum(1, keepdim=True).expand_as(x), ["sum", "div"]),
        (lambda x: x[:, :1].expand_as(x) * x[:1].expand_as(x), ["slice", "slice", "mul"]),
        (lambda x: x[:, :1].expand_as(x).exp(), ["slice", "expand", "exp"]),
        (lambda x: torch.ops.aten.copy(x, x.exp()).neg(), ["exp", "neg"]),
        (
            lambda x: torch.ops.aten.copy(x, x[0].double()).neg(),
            ["select", "_to_copy", "_to_copy", "expand", "neg"],
        ),
        (lambda x: x.view(-1, 1, 6)[:, 0].neg() + x.unsqueeze(0)[-1].exp(), ["neg", "exp", "add"]),
        (lambda x: x.view(-1, 3, 2)[:, 0].neg(), ["reshape", "select", "neg"]),
        (lambda x: x.permute(0, -1) + x.transpose(1, -1).neg(), ["neg", "add"]),
    ],
)
def test_what_is_left(function, left):
    x = torch.randn(5, 6)
    gm = normalized(formula(function), x)
    assert [name for name in targets(gm) if name not in ("sym_size", "full")] == left
    assert relative_error(run(gm, formula(function), (x,), {})[0], function(x)) < 1e-6


def test_dims_count_from_the_front():
    gm = normalized(formula(lambda x: x.softmax(-1).sum(-2).unsqueeze(-1)), torch.randn(5, 6))
    dims = {str(n.target): n.args[1] for n in gm.graph.nodes if n.op == "call_function"}
    assert dims == {"aten.softmax.int": 1, "aten.sum.dim_IntList": [0], "aten.unsqueeze.default": 1}


@pytest.mark.first(1)
@pytest.mark.parametrize(
    "function",
    [
        lambda x: nn.functional.cosine_similarity(x[0], x, dim=-1),
        lambda x: torch.diag_embed(x, 0, -3, -2),
        lambda x: torch.cat([x.new_zeros(0), x, x], -1),
    ],
    ids=["broadcast operands", "more dimensions in the result", "no dimensions in the first operand"],
)
def test_dims_that_do_not_count_the_first_operands_dimensions(function):
    x = torch.randn(6, 6)
    gm = normalized(formula(function), x)
    assert relative_error(run(gm, formula(function), (x,), {})[0], function(x)) < 1e-6


def test_fills_become_full():
    gm = normalized(
        formula(lambda x: torch.zeros_like(x) + x.new_full((x.shape[0], 1), 3.0)), torch.randn(5, 6)
    )
    assert targets(gm).count("full") == 2
    assert not any("like" in name or name.startswith("new_") for name in targets(gm))


def test_random_numbers_are_not_merged():
    gm = normalized(formula(lambda x: torch.rand_like(x) - torch.rand_like(x)), torch.randn(5, 6))
    assert targets(gm).count("rand_like") == 2


def test_dropout_in_train_mode_stays():
    model = nn.Sequential(nn.Linear(6, 6), nn.Dropout(0.5)).train()
    assert "native_dropout" in targets(normalized(model, torch.randn(5, 6))) or "dropout" in targets(
        normalized(model, torch.randn(5, 6))
    )


def test_no_getitem_of_dropout_that_is_off():
    gm = normalized(nn.Sequential(nn.Linear(6, 6), nn.Dropout(0.5)).eval(), torch.randn(5, 6))
    assert not [node for node in gm.graph.nodes if node.target is operator.getitem]


@pytest.mark.first(1)
@pytest.mark.parametrize("conv", [GCNConv, GATConv])
def test_leaves_the_meaning_alone(conv):
    model = Layers(conv).eval()
    gm = normalized(model, *GRAPH)
    for nodes, edges in [(9, 30), (14, 50), (1, 0), (7, 0), (1, 1)]:
        args = torch.randn(nodes, 6), torch.randint(nodes, (2, edges))
        assert relative_error(run(gm, model, args, {})[0], eager(model, *args)[0]) < 1e-6


def test_is_idempotent(gcn):
    again = run_pass(Normalize(), gcn)
    assert format_graph(again) == format_graph(gcn)


@pytest.mark.first(1)
@pytest.mark.parametrize(
    "after_copy",
    [
        lambda copy: copy.view(-1, 2).relu(),
        lambda copy: (copy * 2).view(-1, 2),
        lambda copy: copy[0].view(-1, 4),
        lambda copy: copy.transpose(1, 2).relu().transpose(1, 2).view(3, -1),
    ],
    ids=["at once", "after pointwise", "of a part", "transposed again"],
)
def test_a_view_needs_no_copy(after_copy):
    model = formula(lambda x: after_copy(x.view(-1, 3, 2).transpose(0, 1).contiguous()))
    x = torch.randn(4, 6)
    gm = normalized(model, x)
    assert "clone" not in targets(gm) and "view" not in targets(gm)
    assert relative_error(run(gm, model, (x,), {})[0], model(x)) == 0


def test_an_expanded_index_does_not_read_its_size_off_the_messages():
    model = formula(lambda x: x.new_zeros(4, 3).scatter_add_(0, x[:, :1].long().expand_as(x + 1), x + 1))
    gm = normalized(model, GRAPH[0][:, :3].abs().clamp(max=3))
    (messages,) = (node for node in gm.graph.nodes if str(node.target) == "aten.add.Tensor")
    assert [str(user.target) for user in messages.users] == ["aten.scatter_add.default"]


def test_parts_of_a_split_are_slices_of_their_widths():
    class Parts(nn.Module):
        def forward(self, x: Tensor) -> tuple[Tensor, ...]:
            first, middle, last = x.split([1, 3, 4], dim=1)
            return first * 2, middle * 3, last * 4

    graph = normalized(Parts(), torch.randn(5, 8)).graph
    slices = [node.args[1:4] for node in graph.nodes if node.target is torch.ops.aten.slice.Tensor]
    assert sorted(slices) == [(1, 0, 1), (1, 1, 4), (1, 4, 8)]


def test_rows_of_a_weight_stay_a_split():
    """Parts along the rows are no columns of edges."""

    class Rows(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.weight = nn.Parameter(torch.randn(4, 3))

        def forward(self, x: Tensor) -> Tensor:
            first, last = self.weight.split([1, 3], dim=0)
            return x * first + last.sum()

    graph = normalized(Rows(), torch.randn(5, 3)).graph
    assert any("split" in str(node.target) for node in graph.nodes)


@pytest.mark.parametrize(
    "function",
    [
        lambda x: x.t().contiguous(),
        lambda x: x.t().contiguous().relu(),
        lambda x: x.t().clone(memory_format=torch.contiguous_format).view(2, -1),
        lambda x: (x.t(), x.t().contiguous()),
        lambda x: x.t(),
        lambda x: x.contiguous(),
    ],
)
def test_outputs_are_contiguous_where_those_of_eager_are(function) -> None:
    model, x = formula(function), torch.randn(4, 6)
    found, expected = gnnc.compile(model, "fp32")(x), model(x)
    for ours, theirs in zip(pytree.tree_leaves(found), pytree.tree_leaves(expected), strict=True):
        assert torch.equal(ours, theirs)
        assert ours.is_contiguous() == theirs.is_contiguous()


def test_a_copy_of_contiguous_rows_goes_before_an_output() -> None:
    assert targets(normalized(formula(lambda x: (x + 1).clone()), torch.randn(4, 6))) == ["add"]
