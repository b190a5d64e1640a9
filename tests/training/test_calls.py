"""Ways in which users train: each is compared with eager PyTorch, call by call."""

import copy
from collections.abc import Callable
from threading import Thread
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint
from torch_geometric.data import Data
from torch_geometric.nn import GATConv, GCNConv
from training_steps import EDGES, WIDTH, Net, Step, X, assert_alike, compare, directed_graph

import gnnc


@pytest.fixture(scope="module")
def trained() -> tuple[nn.Module, gnnc.CompiledModel]:
    torch.manual_seed(0)
    model = Net().train()
    return model, gnnc.compile(model, "fp32")


def accumulated(call: Any, owner: nn.Module) -> Any:
    for seed in (1, 2):
        call(*directed_graph(seed=seed)).square().mean().backward()


def several_losses(call: Any, owner: nn.Module) -> Any:
    out = call(X, EDGES)
    out[:, 0].sum().backward(retain_graph=True)
    out[:, 1:].square().sum().backward()
    return out.detach()


def two_forwards_first(call: Any, owner: nn.Module) -> Any:
    first, second = call(*directed_graph(seed=3)), call(*directed_graph(nodes=9, edges=30, seed=4))
    second.square().sum().backward()
    first.square().sum().backward()
    return first.detach(), second.detach()


def one_backward_over_two(call: Any, owner: nn.Module) -> Any:
    (call(X, EDGES).square().sum() + call(X * 2, EDGES).mean()).backward()


def input_gradient(call: Any, owner: nn.Module) -> Any:
    x, weight = X.clone().requires_grad_(True), torch.rand(EDGES.shape[1]).requires_grad_(True)
    torch.manual_seed(0)
    call(x, EDGES, weight.detach()).square().sum().backward()
    return x.grad


def weight_gradient(call: Any, owner: nn.Module) -> Any:
    weight = torch.linspace(0.1, 1, EDGES.shape[1]).requires_grad_(True)
    call(X, EDGES, weight).square().sum().backward()
    return weight.grad


def frozen(call: Any, owner: nn.Module) -> Any:
    owner.conv.requires_grad_(False)
    call(X, EDGES).square().sum().backward()
    owner.conv.requires_grad_(True)


def evaluated(call: Any, owner: nn.Module) -> Any:
    owner.eval()
    x = X.clone().requires_grad_(True)
    call(x, EDGES).square().sum().backward()
    owner.train()
    return x.grad


def without_grad(call: Any, owner: nn.Module) -> Any:
    with torch.no_grad():
        out = call(X, EDGES)
    assert not out.requires_grad
    return out


def non_finite(call: Any, owner: nn.Module) -> Any:
    (call(X, EDGES).square().mean() * float("inf")).backward()
    grads = [p.grad for p in owner.parameters()]
    assert not all(bool(grad.isfinite().all()) for grad in grads)
    owner.zero_grad()


def scaled(call: Any, owner: nn.Module) -> Any:
    scaler = torch.amp.GradScaler("cpu", init_scale=2.0**16)
    optimizer = torch.optim.SGD(owner.parameters(), lr=0.0)
    scaler.scale(call(X, EDGES).square().mean()).backward()
    scaler.step(optimizer)
    scaler.update()
    return scaler.get_scale()


def five_backwards(call: Any, owner: nn.Module) -> Any:
    z = call(X, EDGES)
    for i in range(5):
        (z[:, i % 4].sum() * (i + 1)).backward(retain_graph=True)


def hook_on_the_output(call: Any, owner: nn.Module) -> Any:
    out = call(X, EDGES)
    out.register_hook(lambda grad: grad * 2)
    out.square().sum().backward()


def submodule_in_eval(call: Any, owner: nn.Module) -> Any:
    owner.norm.eval()
    call(X, EDGES).square().sum().backward()
    owner.norm.train()


def toggled(call: Any, owner: nn.Module) -> Any:
    for wanted in (True, False, True):
        owner.conv.lin.weight.requires_grad_(wanted)
        call(X, EDGES).square().sum().backward()


def backwards_in_threads(call: Any, owner: nn.Module) -> Any:
    graphs = [directed_graph(seed=i) for i in range(3)]
    threads = [Thread(target=call(*graph).square().mean().backward) for graph in graphs]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()


def with_anomaly_detection(call: Any, owner: nn.Module) -> Any:
    with torch.autograd.detect_anomaly(check_nan=False):
        call(X, EDGES).square().sum().backward()


def with_deterministic_algorithms(call: Any, owner: nn.Module) -> Any:
    torch.use_deterministic_algorithms(True)
    try:
        call(X, EDGES).square().sum().backward()
    finally:
        torch.use_deterministic_algorithms(False)


def functional(call: Any, owner: nn.Module) -> Any:
    weights = {name: p.detach().clone().requires_grad_() for name, p in owner.named_parameters()}
    out = torch.func.functional_call(call, weights, (X, EDGES))
    return torch.autograd.grad(out.square().sum(), list(weights.values()))


@pytest.mark.filterwarnings("ignore:Anomaly Detection")
@pytest.mark.first(2)
@pytest.mark.parametrize(
    "step",
    [
        five_backwards,
        hook_on_the_output,
        submodule_in_eval,
        toggled,
        backwards_in_threads,
        with_anomaly_detection,
        with_deterministic_algorithms,
        functional,
        accumulated,
        several_losses,
        two_forwards_first,
        one_backward_over_two,
        input_gradient,
        weight_gradient,
        frozen,
        evaluated,
        without_grad,
        non_finite,
        scaled,
    ],
)
def test_a_way_to_train_is_that_of_eager(trained, step: Step) -> None:
    compare(*trained, step)


def test_batches_of_other_sizes_are_one_program(trained) -> None:
    _, compiled = trained
    compiled(X, EDGES)
    before = len(compiled._dispatch.captures)
    for seed in range(5):
        compare(
            *trained, lambda call, _, s=seed: call(*directed_graph(6 + s, 20 + 3 * s, s)).sum().backward()
        )
    assert len(compiled._dispatch.captures) == before


def test_a_second_backward_is_the_error_of_torch(trained) -> None:
    loss = trained[1](X, EDGES).sum()
    loss.backward(retain_graph=True)
    loss.backward()
    with pytest.raises(RuntimeError, match="backward through the graph a second time"):
        loss.backward()


def test_weights_written_before_backward_are_the_error_of_torch(trained) -> None:
    model, compiled = trained
    loss = compiled(X, EDGES).square().sum()
    with torch.no_grad():
        model.out.lin_l.weight.add_(0.0)
    with pytest.raises(RuntimeError, match="modified by an inplace operation"):
        loss.backward()


def test_an_output_that_is_not_differentiable_requires_no_gradient() -> None:
    class Pair(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.conv = GCNConv(WIDTH, 3)

        def forward(self, x: Tensor, edge_index: Tensor) -> Any:
            h = self.conv(x, edge_index)
            return {"h": h, "again": h, "class": h.argmax(1), "x": x, "fixed": (x * 2), "part": h[:, :2]}

    model = Pair().train()
    compiled, outs = gnnc.compile(model, "fp32"), []
    for call in (model, compiled):
        model.zero_grad()
        out = call(X, EDGES)
        (out["h"].sum() + out["again"].square().sum() + out["part"].prod()).backward()
        outs.append((out, [parameter.grad.clone() for parameter in model.parameters()]))
    assert_alike(outs[1], outs[0])
    for name, value in outs[0][0].items():
        assert outs[1][0][name].requires_grad == value.requires_grad, name


DROPOUTS: dict[str, Callable[[], nn.Module]] = {
    "features": lambda: Net(0.3),
    "attention": lambda: GATConv(WIDTH, 4, heads=2, dropout=0.4),
}


@pytest.mark.parametrize("name", DROPOUTS)
def test_dropout_has_the_masks_of_eager(name: str) -> None:
    model = DROPOUTS[name]().train()

    def step(call: Any, _: nn.Module) -> Any:
        torch.manual_seed(7)
        out = call(X, EDGES)
        out.square().sum().backward()
        return out.detach(), torch.rand(3)

    compare(model, gnnc.compile(model, "fp32"), step)


def test_tied_weights_get_the_gradients_of_both_uses() -> None:
    class Tied(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.first, self.second = nn.Linear(WIDTH, WIDTH), nn.Linear(WIDTH, WIDTH)
            self.second.weight = self.first.weight
            self.conv = GCNConv(WIDTH, 3)

        def forward(self, x: Tensor, edge_index: Tensor) -> Tensor:
            return self.conv(self.second(self.first(x).relu()), edge_index)

    model = Tied().train()
    compare(model, gnnc.compile(model, "fp32"), lambda call, _: call(X, EDGES).square().sum().backward())


def test_a_detached_value_passes_no_gradient() -> None:
    class Detached(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.a, self.b = nn.Linear(WIDTH, 5), nn.Linear(WIDTH, 5)

        def forward(self, x: Tensor, edge_index: Tensor) -> Tensor:
            src, dst = edge_index
            message = self.a(x).detach()[src] * self.b(x)[dst] + self.b(x)[src].detach()
            top = torch.zeros(len(x), 5).scatter_reduce(
                0, dst[:, None].expand_as(message), message.detach(), "amax"
            )
            return torch.zeros(len(x), 5).index_add(0, dst, (message - top[dst]).tanh())

    model = Detached().train()
    compare(model, gnnc.compile(model, "fp32"), lambda call, _: call(X, EDGES).square().sum().backward())


def test_a_block_without_gradients_passes_none() -> None:
    class Blocked(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.conv, self.head, self.gate = GCNConv(WIDTH, 3), GCNConv(WIDTH, 3), nn.Linear(3, 3)
            self.scale = nn.Parameter(torch.ones(1))

        def forward(self, x: Tensor, edge_index: Tensor) -> Tensor:
            with torch.no_grad():
                target = self.conv(x, edge_index)
                weight = target.square().mean(1, keepdim=True)
                with torch.enable_grad():
                    weight = weight * self.scale
            return self.head(x, edge_index) * weight - self.gate(target)

    model = Blocked().train()
    compare(model, gnnc.compile(model, "fp32"), lambda call, _: call(X, EDGES).square().sum().backward())


def test_forward_of_data_objects_trains() -> None:
    class OfData(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.conv = GCNConv(WIDTH, 3)

        def forward(self, data: Data) -> Tensor:
            return F.log_softmax(self.conv(data.x, data.edge_index), 1)

    model = OfData().train()
    data = Data(x=X, edge_index=EDGES)
    compare(model, gnnc.compile(model, "fp32"), lambda call, _: call(data)[:, 0].sum().backward())


def test_a_closure_of_lbfgs_trains() -> None:
    torch.manual_seed(0)
    model = GCNConv(WIDTH, 3).train()

    def step(call: Any, owner: nn.Module) -> Any:
        optimizer = torch.optim.LBFGS(owner.parameters(), lr=0.1, max_iter=4)

        def closure() -> Tensor:
            optimizer.zero_grad()
            loss = call(X, EDGES).square().mean()
            loss.backward()
            return loss

        return [optimizer.step(closure).item() for _ in range(2)]

    compare(model, gnnc.compile(model, "fp32"), step)


class Scaled(nn.Module):
    """Layer without arguments, whose features and factor are buffers."""

    def __init__(self) -> None:
        super().__init__()
        self.conv = GCNConv(WIDTH, 3)
        self.register_buffer("x", X.clone())
        self.register_buffer("edges", EDGES)
        self.register_buffer("factor", torch.ones(3))

    def forward(self) -> Tensor:
        return self.conv(self.x, self.edges) * self.factor


def test_buffers_get_gradients_in_a_call_without_arguments() -> None:
    model = Scaled().train()
    compiled = gnnc.compile(model, "fp32")

    def step(call: Any, owner: nn.Module) -> Any:
        wanted = [buffer for buffer in owner.buffers() if buffer.requires_grad]
        return torch.autograd.grad(call().square().sum(), [owner.conv.bias, *wanted])

    for buffer in (model.factor, model.x):
        compare(model, compiled, step)
        buffer.requires_grad_(True)
    compare(model, compiled, step)


def test_a_buffer_that_forward_writes_has_no_gradient() -> None:
    class Decaying(Scaled):
        def forward(self) -> Tensor:
            with torch.no_grad():
                self.factor.mul_(0.5)
            return super().forward()

    model = Decaying().train()
    model.factor.requires_grad_(True)
    with pytest.raises(gnnc.UnsupportedError, match="factor, which forward writes"):
        gnnc.compile(model, "fp32")()


def test_an_lstm_whose_input_needs_no_gradient_trains() -> None:
    class Recurrent(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.lstm, self.conv = nn.LSTM(WIDTH, WIDTH), GCNConv(WIDTH, 3)

        def forward(self, x: Tensor, edge_index: Tensor) -> Tensor:
            out, state = self.lstm(x[None])
            out, _ = self.lstm(out, state)
            return self.conv(out[0], edge_index)

    model = Recurrent().train()
    compare(model, gnnc.compile(model, "fp32"), lambda call, _: call(X, EDGES).square().sum().backward())


def test_a_call_within_a_checkpoint_trains() -> None:
    model = GCNConv(WIDTH, 3).train()

    def step(call: Any, owner: nn.Module) -> Any:
        x = X.clone().requires_grad_()
        checkpoint(call, x, EDGES, use_reentrant=False).square().sum().backward()
        return x.grad

    compare(model, gnnc.compile(model, "fp32"), step)


def test_state_dicts_and_copies_train_on(trained) -> None:
    model, compiled = trained
    compiled(X, EDGES)
    twin = copy.deepcopy(compiled)
    twin(X, EDGES).sum().backward()
    assert all(parameter.grad is not None for parameter in twin.model.parameters())
    assert all(a is not b for a, b in zip(twin.parameters(), model.parameters(), strict=True))
    compiled.load_state_dict(Net().state_dict())
    compare(*trained, lambda call, _: call(X, EDGES).square().sum().backward())


# refusals


class Reversal(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor) -> Tensor:
        return x.clone()

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> Tensor:
        return -grad


class Odd(nn.Module):
    """Layer whose gradient is not that of its forward."""

    def __init__(self, kind: str) -> None:
        super().__init__()
        self.conv, self.kind = GCNConv(WIDTH, 3), kind

    def forward(self, x: Tensor, edge_index: Tensor) -> Tensor:
        h = self.conv(x, edge_index)
        if self.kind == "function":
            return Reversal.apply(h)
        if h.requires_grad:
            h.register_hook(lambda grad: grad * 2)
        return h


@pytest.mark.first(1)
@pytest.mark.parametrize(
    ("kind", "message"),
    [
        ("function", "autograd function Reversal"),
        ("hook", "register_hook"),
    ],
)
def test_own_gradients_inside_of_forward_are_refused(kind: str, message: str) -> None:
    compiled = gnnc.compile(Odd(kind).train(), "fp32")
    with pytest.raises((gnnc.UnsupportedError, gnnc.CaptureError), match=message):
        compiled(X, EDGES)
    with torch.no_grad():
        assert compiled(X, EDGES).shape == (len(X), 3)


@pytest.mark.first(1)
@pytest.mark.parametrize("hook", ["register_full_backward_hook", "register_full_backward_pre_hook"])
def test_backward_hooks_on_modules_are_refused(hook: str) -> None:
    model = Net().train()
    compiled = gnnc.compile(model, "fp32")
    handle = getattr(model.conv, hook)(lambda *_: None)
    with pytest.raises(gnnc.UnsupportedError, match=r"GCNConv has a backward hook.*remove"):
        compiled(X, EDGES)
    handle.remove()
    compiled(X, EDGES).sum().backward()


def test_hooks_on_parameters_run() -> None:
    model = GCNConv(WIDTH, 3).train()
    compiled, seen = gnnc.compile(model, "fp32"), []
    model.bias.register_hook(seen.append)
    compiled(X, EDGES).sum().backward()
    assert_alike(seen, [torch.full((3,), float(len(X)))])


def test_a_first_step_within_anomaly_detection_trains() -> None:
    model = GCNConv(WIDTH, 3).train()
    with torch.autograd.set_detect_anomaly(True):
        compare(model, gnnc.compile(model, "fp32"), lambda call, _: call(X, EDGES).square().sum().backward())
    assert not torch.is_anomaly_enabled()


@pytest.mark.filterwarnings("ignore:The .grad attribute of a Tensor that is not a leaf")
@pytest.mark.parametrize("leaf", [True, False])
def test_a_first_call_may_have_plain_tensors_for_weights(leaf: bool) -> None:
    torch.manual_seed(0)
    model = Net().train()
    compiled, eager = gnnc.compile(model, "fp32"), copy.deepcopy(model)

    def step(call: Any, owner: nn.Module) -> Any:
        parameters = dict(owner.named_parameters())
        weights = {
            name: p.detach().clone().requires_grad_() if leaf else p * 0.9 for name, p in parameters.items()
        }
        out = torch.func.functional_call(call, weights, (X, EDGES))
        wanted = weights if leaf else parameters
        return torch.autograd.grad(out.square().sum(), list(wanted.values()))

    assert_alike(step(compiled, model), step(eager, eager))
