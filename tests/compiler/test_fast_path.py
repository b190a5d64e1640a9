"""Calls that are known from the one before: what they must see all the same."""

import copy
import threading
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch_geometric import EdgeIndex
from torch_geometric.nn import GCNConv, SAGEConv

import gnnc
from gnnc.capture.model_snapshot import ModelSnapshot

NODES, WIDTH = 30, 8


def graph(nodes: int = NODES, edges: int = 100, seed: int = 0) -> tuple[Tensor, Tensor]:
    generator = torch.Generator().manual_seed(seed)
    return torch.randn(nodes, WIDTH, generator=generator), torch.randint(
        nodes, (2, edges), generator=generator
    )


class Net(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.conv, self.norm, self.factor = SAGEConv(WIDTH, WIDTH), nn.BatchNorm1d(WIDTH), 2

    def forward(self, x, edge_index, shift=None):
        x = self.norm(self.conv(x, edge_index)) * self.factor
        return x if shift is None else x + shift


class Settled:
    """A model and its compiled form, of which calls are known from the one before."""

    def __init__(self) -> None:
        torch.manual_seed(0)
        self.model = Net().eval()
        self.compiled = gnnc.compile(self.model, "fp32", backend="reference")
        self.settle()

    def settle(self) -> None:
        for seed in range(3):
            self.check(*graph(seed=seed))
        assert self.compiled._dispatch.fast_path is not None

    @torch.no_grad()
    def check(self, *arguments: Any, **keywords: Any) -> None:
        """Compare with the model itself."""
        twin = copy.deepcopy(self.model)  # batch norm in train mode writes its statistics
        expected = twin(*arguments, **keywords)
        torch.testing.assert_close(self.compiled(*arguments, **keywords), expected, rtol=1e-4, atol=1e-5)

    def steady(self) -> bool:
        """Whether a call is known from the one before."""
        known = self.compiled._dispatch.fast_path
        return known is not None and known.serves(graph(), self.compiled._dispatch.snapshot.modes, None)


@pytest.fixture(scope="module")
def shared() -> Settled:
    return Settled()


@pytest.fixture
def settled(shared: Settled) -> Settled:
    """The same one for all tests: they leave a model that runs."""
    shared.settle()
    shared.compiled._dispatch.captures.clear()
    assert shared.steady()
    return shared


def test_only_dense_tensors_by_position_are_known_from_the_call_before(settled: Settled) -> None:
    x, edge_index = graph()
    modes = settled.compiled._dispatch.snapshot.modes
    serves = settled.compiled._dispatch.fast_path.serves
    assert serves((x, edge_index), modes, None) and serves((x[:9], edge_index[:, :0]), modes, None)
    others = [
        (x,),
        (x, edge_index, x),
        (x, edge_index, None),
        (x, (edge_index,)),
        (nn.Parameter(x), edge_index),
        (x.to_sparse(), edge_index),
        (x.to_sparse_csr(), edge_index),
        (x, EdgeIndex(edge_index, sparse_size=(NODES, NODES))),
        (x.to("meta"), edge_index),
        (x.double(), edge_index),
        (x[0], edge_index),
        (x[:, 1:], edge_index),
        (x, edge_index.int()),
    ]
    assert not any(serves(arguments, modes, None) for arguments in others)
    with torch.autocast("cpu", torch.bfloat16):
        assert not serves((x, edge_index), modes, None)
    assert not serves((x, edge_index), tuple([*modes]), None)


def test_arguments_in_other_forms_run_as_they_did(settled: Settled) -> None:
    x, edge_index = graph()
    for arguments, keywords in (
        ((x, edge_index, None), {}),
        ((x,), {"edge_index": edge_index}),
        ((x, edge_index, torch.ones(WIDTH)), {}),
        ((nn.Parameter(x), edge_index), {}),
        ((x, EdgeIndex(edge_index, sparse_size=(NODES, NODES))), {}),
        ((x, edge_index.int()), {}),
        ((x.t().contiguous().t(), edge_index), {}),
        (graph(7, 0), {}),
    ):
        for _ in range(2):
            settled.check(x, edge_index)
            settled.check(*arguments, **keywords)


def test_a_tuple_of_one_tensor_is_not_that_tensor() -> None:
    class First(nn.Module):
        def forward(self, pair):
            return pair[0] * 2

    compiled = gnnc.compile(First(), "fp32", backend="reference")
    x = torch.randn(4, 3)
    with torch.no_grad():
        for _ in range(3):
            assert torch.equal(compiled((x,)), x * 2)
        assert torch.equal(compiled(x), x[0] * 2)


def test_bad_arguments_are_refused_as_ever(settled: Settled) -> None:
    x, edge_index = graph()
    with torch.no_grad():
        for error, arguments in (
            (gnnc.InputError, (x.double(), edge_index)),
            (gnnc.InputError, (x[:, 1:], edge_index)),
            (gnnc.GraphError, (x, edge_index.float())),
            (gnnc.GraphError, (x, edge_index + NODES)),
            (gnnc.InputError, (x,)),
        ):
            with pytest.raises(error):
                settled.compiled(*arguments)
    assert settled.steady() and settled.compiled._dispatch.captures == []


def test_calls_that_want_gradients_go_another_way(settled: Settled) -> None:
    x, edge_index = graph()
    assert settled.compiled(x, edge_index).requires_grad
    settled.check(x, edge_index)
    assert settled.steady() and len(settled.compiled._dispatch.captures) <= 1


def add_hook(model: Net) -> None:
    model.conv.register_forward_hook(lambda module, arguments, result: result * 2)


def drop_hooks(model: Net) -> None:
    model.conv._forward_hooks.clear()


def replace_layer(model: Net) -> None:
    model.conv = GCNConv(WIDTH, WIDTH).eval()


def change_type_of_constant(model: Net) -> None:
    model.factor = float(model.factor)


def replace_weight(model: Net) -> None:
    model.norm.weight = nn.Parameter(model.norm.weight.data * 3)


def replace_data(model: Net) -> None:
    model.norm.bias.data = torch.randn(WIDTH)


def write_data(model: Net) -> None:
    model.norm.bias.data.mul_(-2)


def write_buffer(model: Net) -> None:
    model.norm.running_mean = torch.randn(WIDTH)


CHANGES: dict[Callable[[Net], None], int] = {
    add_hook: 1,
    drop_hooks: 1,
    replace_layer: 1,
    change_type_of_constant: 1,
    replace_weight: 0,
    replace_data: 0,
    write_data: 0,
    write_buffer: 0,
}


def test_changes_of_the_model_are_seen(settled: Settled) -> None:
    x, edge_index = graph()
    for change, captures in CHANGES.items():
        settled.compiled._dispatch.captures.clear()
        change(settled.model)
        settled.check(x, edge_index)
        settled.check(x, edge_index)
        assert len(settled.compiled._dispatch.captures) == captures, change
        assert settled.steady()


def test_another_mode_and_autocast_have_programs_of_their_own(settled: Settled) -> None:
    x, edge_index = graph()
    for _ in range(2):
        settled.model.train()
        settled.check(x, edge_index)
        settled.model.norm.eval()
        settled.check(x, edge_index)
        settled.model.eval()
        settled.check(x, edge_index)
    assert len(settled.compiled._dispatch.captures) == 2
    with torch.autocast("cpu", torch.bfloat16), torch.no_grad():
        assert settled.compiled(x, edge_index).dtype == settled.model(x, edge_index).dtype
    settled.check(x, edge_index)


def test_edits_of_the_graph_are_seen(settled: Settled) -> None:
    x, edge_index = graph()
    settled.check(x, edge_index)
    edge_index[0, :50] = 3
    settled.check(x, edge_index)
    edge_index[1].zero_()
    settled.check(x, edge_index)
    edge_index.data = graph(seed=5)[1]
    settled.check(x, edge_index)
    edge_index.t_()
    edge_index.t_()
    edge_index.numpy()[0, :] = 1
    settled.compiled.clear_cache()
    settled.check(x, edge_index)
    with torch.inference_mode():
        inside = edge_index + 0
        settled.check(x, inside)
        inside[0, 3] = 9
        settled.check(x, inside)


def test_the_program_does_not_depend_on_earlier_calls() -> None:
    """Two programs fit a call: the one of the examples, and one for sizes that the model told apart."""

    class Asks(Net):
        def forward(self, x, edge_index):
            return super().forward(x, edge_index) if x.shape[0] < 50 else super().forward(x * 2, edge_index)

    torch.manual_seed(0)
    compiled = gnnc.compile(Asks().eval(), "fp32", backend="reference")
    small, large = graph(), graph(70, 200)
    with torch.no_grad():
        expected = [compiled(*small), compiled(*large)]
        for _ in range(3):
            assert torch.equal(compiled(*small), expected[0]) and torch.equal(compiled(*large), expected[1])


def test_a_change_while_other_threads_call_is_never_lost() -> None:
    settled, x, edge_index = Settled(), *graph()
    done, failures = threading.Event(), []

    @torch.no_grad()
    def work() -> None:
        while not done.is_set():
            try:
                settled.compiled(x, edge_index)
            except Exception as error:
                failures.append(error)
                return

    threads = [threading.Thread(target=work) for _ in range(2)]
    with torch.no_grad():
        of_two = settled.model(x, edge_index)  # while no thread traces
        for thread in threads:
            thread.start()
        try:
            for factor in (3, 4, 5):
                settled.model.factor = factor
                got = settled.compiled(x, edge_index)
                torch.testing.assert_close(got, of_two * factor / 2, rtol=1e-4, atol=1e-5)
        finally:
            done.set()
            for thread in threads:
                thread.join()
    assert not failures


# the watch


def test_an_equal_constant_that_is_another_object_is_none() -> None:
    model = Net()
    model.name = "layers of a net"
    snapshot = ModelSnapshot(model)
    model.name = " ".join(["layers", "of", "a", "net"])
    assert not snapshot.has_changed() and not snapshot.has_changed()


def test_what_moves_from_one_table_to_the_next_is_a_change() -> None:
    first, second = nn.Sequential(nn.ReLU()), nn.Sequential()
    snapshot = ModelSnapshot(nn.ModuleList([first, second]))
    second.append(first.pop(0))
    assert snapshot.has_changed()
    a, b = nn.ReLU(), nn.ReLU()
    handle = a.register_forward_hook(hook := lambda *_: None)
    snapshot = ModelSnapshot(nn.ModuleList([a, b]))
    handle.remove()
    assert snapshot.has_changed()
    b.register_forward_hook(hook)
    assert snapshot.has_changed()


def test_modes_are_a_new_object_when_one_has_changed() -> None:
    model = Net()
    snapshot = ModelSnapshot(model)
    modes = snapshot.modes
    assert not snapshot.has_changed() and snapshot.modes is modes
    model.norm.eval()
    assert not snapshot.has_changed() and snapshot.modes is not modes
    assert snapshot.modes == tuple(module.training for module in model.modules())


def test_tensors_are_known_by_identity() -> None:
    model = Net()
    model.table = torch.ones(3)
    snapshot = ModelSnapshot(model)
    model.table.zero_()
    assert not snapshot.has_changed()
    model.table = torch.zeros(3)
    assert snapshot.has_changed()


def test_training_calls_are_known_by_what_wants_gradients() -> None:
    torch.manual_seed(0)
    model = SAGEConv(WIDTH, WIDTH)
    compiled = gnnc.compile(model, "fp32", backend="reference")
    x, edge_index = graph()

    def known(x: Tensor) -> bool:
        dispatch = compiled._dispatch
        path, weights = dispatch.fast_path, tuple(weight.requires_grad for weight in model.parameters())
        return path is not None and path.serves((x, edge_index), dispatch.snapshot.modes, weights)

    def gradients(call: Callable[..., Tensor], x: Tensor) -> list[Tensor | None]:
        model.zero_grad()
        call(x, edge_index).square().sum().backward()
        return [x.grad, *(weight.grad for weight in model.parameters())]

    def check(given: Tensor) -> None:
        twin = given.detach().clone().requires_grad_(given.requires_grad)
        found, expected = gradients(compiled, given), gradients(model, twin)
        torch.testing.assert_close(found, expected, rtol=1e-4, atol=1e-5)

    for _ in range(2):
        check(x)
    wants = x.clone().requires_grad_()
    assert known(x) and not known(wants)
    check(wants)
    check(x)
    model.lin_l.weight.requires_grad_(False)
    assert not known(x)
    check(x)
    with torch.no_grad():
        torch.testing.assert_close(compiled(x, edge_index), model(x, edge_index), rtol=1e-4, atol=1e-5)
