"""Joint and partition: gradients are appended, then cut off; without a wanted gradient nothing happens."""

import pytest
import torch
from torch import Tensor, nn
from torch_geometric import nn as pyg

import gnnc
from gnnc.ir.graph import placeholders
from gnnc.ir.nodes import outputs_of
from gnnc.ir.parts import GRADIENTS, RESULTS, SAVED
from gnnc.ir.source import source_of
from gnnc.passes.partition import SIDE

WIDTH, CLASSES, NODES = 6, 3, 12
MODELS = {
    "gcn": lambda: pyg.GCNConv(WIDTH, CLASSES),
    "sage": lambda: pyg.SAGEConv(WIDTH, CLASSES),
    "gat": lambda: pyg.GATConv(WIDTH, CLASSES, heads=2, concat=False),
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
def stages(request: pytest.FixtureRequest) -> dict[str, torch.fx.GraphModule]:
    torch.manual_seed(0)
    return dict(trained(MODELS[request.param]()).stages)


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
