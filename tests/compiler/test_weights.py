"""Weights are read from the live model at each call, however they were changed."""

import copy
from types import SimpleNamespace

import pytest
import torch
from slow import slow_after
from torch_geometric.nn import GCNConv
from torch_geometric.nn.models import GCN

import gnnc
from gnnc.compiler.call_function import elsewhere

WIDTH, CLASSES, NUM_NODES = 16, 4, 25


def given() -> tuple[torch.Tensor, torch.Tensor]:
    generator = torch.Generator().manual_seed(0)
    return (
        torch.randn(NUM_NODES, WIDTH, generator=generator),
        torch.randint(NUM_NODES, (2, 90), generator=generator),
    )


def new_model(seed: int = 0) -> GCN:
    torch.manual_seed(seed)
    return GCN(WIDTH, 32, 2, CLASSES, norm="batch_norm").eval()


@pytest.fixture(scope="module", params=["reference", "cpu"])
def pair(request):
    """A compiled model that was called, so that a stale copy of its weights would show."""
    model = new_model()
    compiled = gnnc.compile(model, "int8", backend=request.param)
    with torch.no_grad():
        compiled(*given())
    return model, compiled


@torch.no_grad()
def assert_follows(model, compiled):
    expected, actual = model(*given()), compiled(*given())
    assert (actual - expected).norm() <= 0.05 * expected.norm()


@torch.no_grad()
def give_gradients(model):
    for parameter in model.parameters():
        parameter.grad = torch.randn_like(parameter)


OPTIMIZERS = {
    "plain SGD": lambda p: torch.optim.SGD(p, lr=0.3, foreach=False),
    "foreach SGD": lambda p: torch.optim.SGD(p, lr=0.3, foreach=True),
    "fused SGD": lambda p: torch.optim.SGD(p, lr=0.3, fused=True),
    "plain Adam": lambda p: torch.optim.Adam(p, lr=0.3, foreach=False),
    "foreach Adam": lambda p: torch.optim.Adam(p, lr=0.3, foreach=True),
    "fused Adam": lambda p: torch.optim.Adam(p, lr=0.3, fused=True),
}


@pytest.mark.first(1)
@pytest.mark.parametrize("name", OPTIMIZERS)
def test_optimizer_steps_are_seen(pair, name):
    model, compiled = pair
    optimizer = OPTIMIZERS[name](compiled.parameters())
    give_gradients(model)
    with torch.no_grad():
        before = compiled(*given())
    optimizer.step()
    assert_follows(model, compiled)
    with torch.no_grad():
        assert not torch.allclose(compiled(*given()), before)


@pytest.mark.first(1)
@pytest.mark.parametrize("name", OPTIMIZERS)
@pytest.mark.parametrize("given_as", slow_after(1, [lambda weight: weight, torch.Tensor.detach]))
def test_optimizer_steps_on_an_argument_are_seen(name, given_as):
    torch.manual_seed(0)
    model = GCN(WIDTH, 32, 2, CLASSES).eval()
    compiled, weight = gnnc.compile(model, "fp32"), torch.nn.Parameter(torch.rand(90) + 0.5)
    optimizer = OPTIMIZERS[name]([weight])
    for _ in range(3):
        with torch.no_grad():
            expected = model(*given(), weight)
            torch.testing.assert_close(compiled(*given(), given_as(weight)), expected, rtol=1e-4, atol=1e-5)
        weight.grad = -torch.rand_like(weight)
        optimizer.step()


def multiply_data(model):
    for parameter in model.parameters():
        parameter.data.mul_(-0.5)


def replace_data(model):
    for parameter in model.parameters():
        parameter.data = torch.randn_like(parameter)


def replace_data_strided(model):
    for parameter in model.parameters():
        if parameter.dim() == 2:
            parameter.data = torch.randn(parameter.shape[::-1]).t()


def copy_in_place(model):
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.copy_(torch.randn_like(parameter))


def replace_parameter(model):
    lin = model.convs[0].lin
    lin.weight = torch.nn.Parameter(torch.randn_like(lin.weight))


def change_statistics(model):
    norm = model.norms[0].module
    norm.running_mean.normal_()
    norm.running_var = torch.rand_like(norm.running_var) + 0.5


@pytest.mark.first(2)
@pytest.mark.parametrize(
    "change",
    [
        multiply_data,
        replace_data,
        replace_data_strided,
        copy_in_place,
        replace_parameter,
        change_statistics,
    ],
)
def test_changes_of_weights_are_seen(pair, change):
    model, compiled = pair
    with torch.no_grad():
        before = compiled(*given())
    change(model)
    assert_follows(model, compiled)
    with torch.no_grad():
        assert not torch.allclose(compiled(*given()), before)


@pytest.mark.parametrize("assign", [False, True])
@pytest.mark.parametrize("through", ["model", "compiled"])
def test_loaded_state_is_seen(pair, assign, through):
    model, compiled = pair
    target = model if through == "model" else compiled
    other = new_model(seed=17)
    target.load_state_dict(copy.deepcopy(other.state_dict()), assign=assign)
    assert_follows(other, compiled)


def test_state_dicts_load_both_ways(pair):
    model, compiled = pair
    plain = new_model(seed=5)
    plain.load_state_dict(compiled.state_dict())
    assert_follows(plain, compiled)
    compiled.load_state_dict(plain.state_dict())
    assert list(compiled.state_dict()) == list(plain.state_dict())


def test_moving_there_and_back_is_seen(pair):
    model, compiled = pair
    compiled.to(torch.float64).to(torch.float32)
    assert_follows(model, compiled)


def test_weights_of_another_dtype_are_refused(pair):
    model, compiled = pair
    compiled.to(torch.bfloat16)
    with torch.no_grad(), pytest.raises(gnnc.UnsupportedError, match=r"bfloat16 now.*\.float\(\)"):
        compiled(*given())
    compiled.float()
    assert_follows(model, compiled)


def test_weights_of_another_shape_are_refused(pair):
    model, compiled = pair
    kept = model.convs[1].bias.data
    model.convs[1].bias.data = torch.zeros(CLASSES + 1)
    with torch.no_grad(), pytest.raises(gnnc.InputError, match="compile the model again"):
        compiled(*given())
    model.convs[1].bias.data = kept
    assert_follows(model, compiled)


class Twins(torch.nn.Module):
    """Two layers of one shape, so that weights of one fit the other."""

    def __init__(self):
        super().__init__()
        self.a, self.b = GCNConv(WIDTH, WIDTH), GCNConv(WIDTH, WIDTH)
        self.a_norm, self.b_norm = torch.nn.BatchNorm1d(WIDTH), torch.nn.BatchNorm1d(WIDTH)

    def forward(self, x, edge_index):
        x = self.a_norm(self.a(x, edge_index)).relu()
        return self.b_norm(self.b(x, edge_index))


def tie_weights(model):
    model.b.lin.weight = model.a.lin.weight


def untie_weights(model):
    model.b.lin.weight = torch.nn.Parameter(torch.randn(WIDTH, WIDTH))


def tie_statistics(model):
    model.b_norm.running_mean = model.a_norm.running_mean


def untie_statistics(model):
    model.b_norm.running_mean = torch.randn(WIDTH)


@pytest.mark.first(1)
@pytest.mark.parametrize("train", slow_after(1, [False, True]))
@pytest.mark.parametrize(("tie", "untie"), [(tie_weights, untie_weights), (tie_statistics, untie_statistics)])
@torch.no_grad()
def test_weights_that_become_one_tensor_or_two_are_seen(tie, untie, train):
    torch.manual_seed(0)
    model = Twins().train(train)
    compiled = gnnc.compile(model, "fp32")
    for change in (lambda _: None, tie, untie, tie):
        change(model)
        eager = copy.deepcopy(model)
        torch.testing.assert_close(compiled(*given()), eager(*given()), rtol=1e-4, atol=1e-4)
        torch.testing.assert_close(model.state_dict(), eager.state_dict(), rtol=1e-4, atol=1e-4)


@torch.no_grad()
def test_a_parameter_in_the_place_of_another_needs_no_capture():
    model = new_model()
    compiled = gnnc.compile(model, "fp32", example_inputs=given())
    replace_parameter(model)
    assert_follows(model, compiled)
    assert "  2. " not in compiled.explain().rpartition("Captures")[2]


@torch.no_grad()
def test_a_bias_that_is_taken_away_is_seen():
    model = new_model()
    compiled = gnnc.compile(model, "fp32", example_inputs=given())
    model.convs[1].bias = None
    assert_follows(model, compiled)


def test_double_weights_cannot_be_compiled():
    model = new_model().double()
    compiled = gnnc.compile(model, "int8", backend="reference")
    with torch.no_grad(), pytest.raises(gnnc.GnncError, match="float"):
        compiled(*given())


@pytest.mark.first(1)
@torch.no_grad()
@pytest.mark.parametrize("calls", [1, 4])
def test_a_model_that_moves_away_from_its_inputs_is_refused(calls: int) -> None:
    model = new_model()
    compiled = gnnc.compile(model, "int8", backend="cpu")
    for _ in range(calls):
        compiled(*given())
    arguments = given()
    expected = compiled(*arguments)
    weights = model.state_dict()
    model.to("meta")
    for _ in range(2):
        with pytest.raises(gnnc.InputError, match="is on meta"):
            compiled(*arguments)
    model.load_state_dict(weights, assign=True)
    assert torch.equal(compiled(*arguments), expected)


@pytest.mark.parametrize("there", ["cpu", "meta", "cuda:0", "cuda:1"])
@pytest.mark.parametrize("here", ["cpu", "cuda:0", "cuda"])
def test_the_text_of_a_call_tells_devices_apart(here, there):
    device, other = torch.device(here), torch.device(there)
    number = -1 if other.index is None else other.index
    tensor = SimpleNamespace(device=other, get_device=lambda: number)  # the machine need not have the device
    names = {"w": tensor, "device_w": device}
    assert eval(elsewhere("w", device), names) == (other != device)
