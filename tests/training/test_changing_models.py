"""Models that a user changes between the steps of a training, or trains in parts."""

import copy
from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.nn.utils import parametrizations
from torch.optim.swa_utils import AveragedModel
from torch_geometric.nn import GATConv, GCNConv
from training_steps import EDGES, WIDTH, Step, X, assert_alike, compare

import gnnc

CLASSES = 3
Y = torch.arange(len(X)) % CLASSES


class Model(nn.Module):
    """Two layers whose flags the user sets: whether edges are dropped, what is returned, how much noise."""

    def __init__(self) -> None:
        super().__init__()
        self.conv1, self.conv2 = GCNConv(WIDTH, 8), GATConv(8, CLASSES)
        self.logits, self.scale, self.mode = True, 1.0, "sum"

    def forward(self, x: Tensor, edge_index: Tensor) -> Tensor:
        x = self.conv1(x, edge_index)
        x = (x.relu() if self.mode == "sum" else x.tanh()) * self.scale
        x = self.conv2(x, edge_index)
        return x if self.logits else x.softmax(1)

    def loss(self, x: Tensor, edge_index: Tensor, y: Tensor) -> Tensor:
        return F.cross_entropy(self(x, edge_index), y)


@pytest.fixture(scope="module")
def trained() -> tuple[nn.Module, gnnc.CompiledModel]:
    torch.manual_seed(0)
    model = Model().train()
    return model, gnnc.compile(model, "fp32")


def backward(call: Any, owner: Any) -> Tensor:
    loss = F.cross_entropy(call(X, EDGES), Y)
    loss.backward()
    return loss.detach()


def attributes_flipped(call: Any, owner: Any) -> Any:
    """Set attributes for evaluation, and set them back for the next step."""
    found = [backward(call, owner)]
    for _ in range(2):
        call.eval()
        owner.logits, owner.mode = False, "mean"
        with torch.no_grad():
            found.append(call(X, EDGES))
        call.train()
        owner.logits, owner.mode = True, "sum"
        found.append(backward(call, owner))
    return found


def number_changed(call: Any, owner: Any) -> Any:
    found = []
    for owner.scale in (1.0, 0.5, 1.0):
        found.append(backward(call, owner))
    return found


def optimizer_of_parts(call: Any, owner: Any) -> Any:
    """Train a layer by its own parameters, and the rest at another rate."""
    weights = copy.deepcopy(owner.state_dict())
    groups = [{"params": call.conv1.parameters(), "lr": 0.1}, {"params": call.conv2.parameters()}]
    optimizer = torch.optim.Adam(groups, lr=0.01)
    found = []
    for _ in range(3):
        optimizer.zero_grad()
        found.append(backward(call, owner))
        optimizer.step()
    found.append({name: value.clone() for name, value in call.state_dict().items()})
    owner.load_state_dict(weights)
    return found


def one_layer_alone(call: Any, owner: Any) -> Any:
    return torch.autograd.grad(F.cross_entropy(call(X, EDGES), Y), list(call.conv1.parameters()))


def loss_method(call: Any, owner: Any) -> Any:
    loss = call.loss(X, EDGES, Y)
    loss.backward()
    return loss.detach()


def accumulated_in_place(call: Any, owner: Any) -> Any:
    call.zero_grad(set_to_none=False)
    for share in (0.25, 0.75):
        (share * F.cross_entropy(call(X, EDGES), Y)).backward()
    return torch.nn.utils.clip_grad_norm_(call.parameters(), 0.1)


def evaluated_between(call: Any, owner: Any) -> Any:
    """Evaluate between a forward pass and its backward pass."""
    loss = F.cross_entropy(call(X, EDGES), Y)
    with torch.inference_mode():
        found = call(X * 2, EDGES).clone()
    loss.backward()
    return found.clone()


def states_both_ways(call: Any, owner: Any) -> Any:
    """Load the state of an eager model into the compiled one, and back into an eager one."""
    torch.manual_seed(5)
    other = Model()
    call.load_state_dict(other.state_dict())
    loss = backward(call, owner)
    again = Model()
    again.load_state_dict(call.state_dict())
    return loss, again(X, EDGES).detach()


def weight_replaced(call: Any, owner: Any) -> Any:
    owner.conv2.bias = nn.Parameter(torch.full((CLASSES,), 0.5))
    backward(call, owner)
    return owner.conv2.bias.grad


def weights_reset(call: Any, owner: Any) -> Any:
    torch.manual_seed(3)
    call.conv1.reset_parameters()
    return backward(call, owner)


@pytest.mark.first(3)
@pytest.mark.parametrize(
    "step",
    [
        attributes_flipped,
        optimizer_of_parts,
        loss_method,
        states_both_ways,
        number_changed,
        one_layer_alone,
        accumulated_in_place,
        evaluated_between,
        weight_replaced,
        weights_reset,
    ],
)
def test_a_step_is_that_of_eager(trained: Any, step: Step) -> None:
    compare(*trained, step)


@pytest.mark.slow
def test_a_layer_that_was_replaced_trains() -> None:
    model = Model().train()
    compiled = gnnc.compile(model, "fp32")
    compare(model, compiled, backward)
    model.conv2 = GATConv(8, CLASSES, heads=2, concat=False)
    compare(model, compiled, backward)


def test_an_optimizer_from_before_the_compilation_trains() -> None:
    torch.manual_seed(0)
    model = Model().train()
    eager = copy.deepcopy(model)
    optimizers = [torch.optim.SGD(each.parameters(), lr=0.1, momentum=0.9) for each in (model, eager)]
    losses = []
    for call, optimizer in zip((gnnc.compile(model, "fp32"), eager), optimizers, strict=True):
        losses.append([])
        for _ in range(4):
            optimizer.zero_grad()
            losses[-1].append(backward(call, model))
            optimizer.step()
    assert_alike(*losses)
    assert losses[0][-1] < losses[0][0]


@pytest.mark.slow
def test_an_average_of_weights_trains_on() -> None:
    """AveragedModel copies the compiled model."""
    torch.manual_seed(0)
    model = Model().train()
    compiled = gnnc.compile(model, "fp32")
    average = AveragedModel(compiled)
    backward(compiled, model)
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.sub_(parameter.grad)  # pyright: ignore[reportArgumentType]
    average.update_parameters(compiled)
    assert_alike(average(X, EDGES), model(X, EDGES))
    average.module.requires_grad_(True)
    F.cross_entropy(average(X, EDGES), Y).backward()
    assert all(parameter.grad is not None for parameter in average.module.parameters())


WRAPPED: dict[str, Callable[[nn.Linear], nn.Module]] = {
    "weight norm": parametrizations.weight_norm,
    "orthogonal": parametrizations.orthogonal,
}


@pytest.mark.first(1)
@pytest.mark.parametrize("name", WRAPPED)
def test_parametrized_weights_train(name: str) -> None:
    class Parametrized(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.lin, self.conv = WRAPPED[name](nn.Linear(WIDTH, WIDTH)), GCNConv(WIDTH, CLASSES)

        def forward(self, x: Tensor, edge_index: Tensor) -> Tensor:
            return self.conv(self.lin(x).relu(), edge_index)

    torch.manual_seed(0)
    model = Parametrized().train()
    compare(model, gnnc.compile(model, "fp32"), backward)
