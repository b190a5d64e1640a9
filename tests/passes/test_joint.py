"""Joint and partition: gradients are appended, then cut off; without a wanted gradient nothing happens."""

from collections.abc import Callable

import pytest
import torch
from torch import Tensor, nn
from torch_geometric import nn as pyg

import gnnc
from gnnc.errors import UnsupportedError
from gnnc.ir.graph import placeholders
from gnnc.ir.nodes import outputs_of
from gnnc.ir.parts import GRADIENTS, RESULTS, SAVED, Parts
from gnnc.ir.source import source_of
from gnnc.passes.partition import SIDE
from gnnc.report.printing import format_program

WIDTH, CLASSES, NODES = 6, 3, 12


def _mlp() -> nn.Module:
    return nn.Sequential(nn.Linear(WIDTH, 8), nn.BatchNorm1d(8), nn.ReLU(), nn.Linear(8, CLASSES))


MODELS = {
    "gcn": lambda: pyg.GCNConv(WIDTH, CLASSES),
    "sage": lambda: pyg.SAGEConv(WIDTH, CLASSES),
    "gat": lambda: pyg.GATConv(WIDTH, CLASSES, heads=2, concat=False),
    "gin": lambda: pyg.GINConv(_mlp(), train_eps=True),
    "pna": lambda: pyg.PNAConv(WIDTH, CLASSES, ["mean", "max", "std"], ["identity"], torch.tensor([1, 4, 7])),
}


def graph() -> tuple[Tensor, Tensor]:
    """Return x and directed edges with repetitions; the last node has none."""
    generator = torch.Generator().manual_seed(0)
    edge_index = torch.randint(NODES - 1, (2, 30), generator=generator).repeat(1, 2)
    return torch.randn(NODES, WIDTH, generator=generator), edge_index


def trained(model: nn.Module) -> gnnc.CompiledModel:
    """Return a model that is compiled by a call which wants gradients."""
    compiled = gnnc.compile(model.train(), "fp32")
    compiled(*graph())
    return compiled


@pytest.fixture(scope="module", params=MODELS)
def parts(request: pytest.FixtureRequest) -> dict[str, Parts]:
    torch.manual_seed(0)
    return dict(trained(MODELS[request.param]())._dispatch.last.snapshots)


@pytest.fixture(scope="module")
def stages(parts: dict[str, Parts]) -> dict[str, torch.fx.GraphModule]:
    return {name: stage.forward for name, stage in parts.items()}


def test_golden(parts: dict[str, Parts], golden: Callable[..., None]) -> None:
    golden(format_program(parts["reorder"]), "before")
    golden(format_program(parts["joint"]), "after")


def test_each_parameter_has_a_gradient_behind_the_outputs(stages: dict[str, torch.fx.GraphModule]) -> None:
    before, joint = stages["reorder"], stages["joint"]
    parameters = [node for node in placeholders(before) if source_of(node).kind == "parameter"]  # pyright: ignore
    assert len(joint.meta[GRADIENTS]) == len(parameters) > 0
    assert len(outputs_of(joint.graph)) == len(outputs_of(before.graph)) + len(parameters)
    tangents = [node for node in placeholders(joint) if source_of(node).kind == "tangent"]  # pyright: ignore
    assert [node.meta["val"].shape for node in tangents] == [outputs_of(before.graph)[0].meta["val"].shape]
    for gradient, parameter in zip(outputs_of(joint.graph)[-len(parameters) :], parameters, strict=True):
        assert gradient.meta["val"].shape == parameter.meta["val"].shape


def test_nodes_of_the_gradient_have_the_layer_of_what_they_differentiate(
    stages: dict[str, torch.fx.GraphModule],
) -> None:
    added = len(stages["joint"].graph.nodes) - len(stages["reorder"].graph.nodes)
    layers = [str(node.meta.get("layer")) for node in stages["joint"].graph.nodes]
    assert sum(layer.endswith("(backward)") for layer in layers) > added / 2


def test_no_transpose_is_sorted_at_every_call(stages: dict[str, torch.fx.GraphModule]) -> None:
    assert "csr_transpose" not in str(stages["joint"].graph)


def test_without_a_wanted_gradient_both_leave_the_graph_alone() -> None:
    compiled = gnnc.compile(MODELS["gcn"]().train(), "fp32")
    with torch.no_grad():
        compiled(*graph())
    stages = dict(compiled.stages)
    assert str(stages["joint"].graph) == str(stages["reorder"].graph)
    assert str(stages["partition"].graph) == str(stages["cache"].graph)
    assert compiled.backward_graph_module is None


def test_frozen_parameters_are_not_differentiated() -> None:
    model = pyg.GCNConv(WIDTH, CLASSES)
    model.bias.requires_grad_(False)
    assert len(dict(trained(model).stages)["joint"].meta[GRADIENTS]) == 1


def test_the_cut_hands_over_what_is_saved(stages: dict[str, torch.fx.GraphModule]) -> None:
    forward = stages["partition"]
    saved = forward.meta[SAVED]
    assert len(outputs_of(forward.graph)) == forward.meta[RESULTS] + len(saved)
    sides = {node.meta.get(SIDE) for node in forward.graph.nodes if node.op == "call_function"}
    assert sides <= {"forward", None}


class Formula(nn.Module):
    """A linear layer, then a function of its result and the edges."""

    def __init__(self, function: Callable[[Tensor, Tensor], Tensor]) -> None:
        super().__init__()
        self.lin, self.function = nn.Linear(WIDTH, WIDTH), function

    def forward(self, x: Tensor, edge_index: Tensor) -> Tensor:
        return self.function(self.lin(x), edge_index)


def joint_of(function: Callable[[Tensor, Tensor], Tensor]) -> str:
    """Return the joint graph of a formula, whose gradients are checked to be those of eager PyTorch."""
    torch.manual_seed(0)
    model = Formula(function).train()
    compiled = gnnc.compile(model, "fp32")
    gradients = []
    for call in (compiled, model):
        model.zero_grad()
        torch.manual_seed(1)
        out = call(*graph())
        (out * torch.linspace(-1, 1, out.numel()).view_as(out)).sum().backward()
        gradients.append([parameter.grad for parameter in model.parameters()])
    torch.testing.assert_close(gradients[0], gradients[1])
    return str(dict(compiled.stages)["joint"].graph)


@pytest.mark.parametrize(
    "function", [lambda h, _: h.relu(), lambda h, _: h.view(-1, 2, 3).relu(), lambda h, _: nn.ReLU()(h).exp()]
)
def test_a_relu_keeps_bits(function: Callable[[Tensor, Tensor], Tensor]) -> None:
    text = joint_of(function)
    assert "gnnc.relu_backward" in text and "threshold_backward" not in text


def test_dropout_behind_a_relu_needs_no_mask_of_its_own() -> None:
    text = joint_of(lambda h, _: nn.functional.dropout(h.relu(), 0.5))
    assert "gnnc.relu_backward" in text and "native_dropout_backward" not in text


def test_a_mask_of_dropout_stays_where_the_relu_has_another_reader() -> None:
    text = joint_of(lambda h, _: nn.functional.dropout(h.relu(), 0.5) + h.relu())
    assert "gnnc.relu_backward" in text and "native_dropout_backward" in text


@pytest.mark.parametrize(
    "function", [lambda h, _: h.sum(1).relu(), lambda h, _: nn.functional.threshold(h, 0.5, 0.0)]
)
def test_vectors_and_other_thresholds_keep_no_bits(function: Callable[[Tensor, Tensor], Tensor]) -> None:
    assert "threshold_backward" in joint_of(function)


def test_an_elu_is_differentiated_from_its_result() -> None:
    text = joint_of(lambda h, _: nn.functional.elu(h))
    line = next(line for line in text.splitlines() if "aten.elu_backward" in line)
    assert ", True, %elu)" in line


def test_rows_in_the_order_of_a_csr_go_back_without_a_matrix_of_zeros() -> None:
    def attributes(h: Tensor, edge_index: Tensor) -> Tensor:
        src, dst = edge_index
        per_edge = h.repeat(5, 1)  # a row for each of the 60 edges
        return torch.zeros_like(h).index_add(0, dst, torch.relu(h[src] + per_edge))

    assert "index_add" not in joint_of(attributes)


def test_a_gru_is_differentiated() -> None:
    torch.manual_seed(0)
    cell = nn.GRUCell(WIDTH, WIDTH)
    assert "tanh_backward" in joint_of(lambda h, _: cell(h, h))


@torch.library.custom_op("gnnc_tests::without_gradient", mutates_args=())
def without_gradient(x: Tensor) -> Tensor:
    """Return twice ``x``; there is no gradient."""
    return x * 2


@torch.library.custom_op("gnnc_tests::writing_gradient", mutates_args=())
def writing_gradient(x: Tensor) -> Tensor:
    """Return twice ``x``; the gradient is written into a strided view."""
    return x * 2


without_gradient.register_fake(torch.empty_like)
writing_gradient.register_fake(torch.empty_like)


def _written(ctx: object, grad: Tensor) -> Tensor:
    out = grad * 2
    out.as_strided((3,), (2,)).fill_(1.0)
    return out


writing_gradient.register_autograd(_written)


@pytest.mark.parametrize(
    ("function", "reason"),
    [
        (lambda h: without_gradient(h), r"\[conv\] has an op without a gradient .*without_gradient"),
        (lambda h: torch.igamma(h.abs(), h.abs() + 1), r"\[conv\] .*igamma"),
        (lambda h: writing_gradient(h), r"\[.*\] its gradient writes into a tensor in place"),
        (lambda h: h.cumprod(0), "another one for other sizes of its arguments"),
    ],
)
def test_gradients_that_have_no_graph_are_refused(function: Callable[[Tensor], Tensor], reason: str) -> None:
    class Outer(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.conv = Formula(lambda h, _: function(h))

        def forward(self, x: Tensor, edge_index: Tensor) -> Tensor:
            return self.conv(x, edge_index)

    with pytest.raises(UnsupportedError, match=reason):
        trained(Outer())


def test_a_model_whose_outputs_have_no_gradient_is_left_alone() -> None:
    stages = dict(trained(Formula(lambda h, _: h.argmax(1))).stages)
    assert str(stages["joint"].graph) == str(stages["reorder"].graph)


_WITHOUT_FORMULA = torch.library.Library("gnnc_test_joint", "DEF")
_WITHOUT_FORMULA.define("double(Tensor x) -> Tensor", tags=(torch.Tag.pt2_compliant_tag,))
_WITHOUT_FORMULA.impl("double", lambda x: 2 * x, "CompositeExplicitAutograd")
torch.library.register_fake("gnnc_test_joint::double", torch.empty_like, lib=_WITHOUT_FORMULA)


class Doubled(nn.Module):
    """Linear layer whose result, or its detached result, goes through an op without an autograd formula."""

    def __init__(self, detached: bool) -> None:
        super().__init__()
        self.linear, self.detached = nn.Linear(6, 4), detached

    def forward(self, x: Tensor) -> Tensor:
        h = self.linear(x)
        return torch.ops.gnnc_test_joint.double(h.detach() if self.detached else h) + h


def test_an_op_without_a_formula_drops_no_gradient_in_silence() -> None:
    x = torch.randn(7, 6)
    with pytest.raises(UnsupportedError, match="gnnc_test_joint.double.*no autograd formula"):
        gnnc.compile(Doubled(detached=False), "fp32")(x)
    with torch.no_grad():
        gnnc.compile(Doubled(detached=False), "fp32")(x)
    model = Doubled(detached=True)
    gnnc.compile(model, "fp32")(x).sum().backward()
    assert model.linear.bias.grad is not None
