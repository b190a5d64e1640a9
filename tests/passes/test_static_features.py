"""Feature matrices that stay are quantized once, and no answer is stale when they are written or replaced."""

import copy
import gc
import weakref
from collections.abc import Callable
from dataclasses import replace
from unittest import mock

import pytest
import torch
from slow import slow_but
from torch import Tensor, nn
from torch_geometric import nn as pyg

import gnnc
from gnnc.ir.parts import FEATURES
from gnnc.passes.pipeline import PIPELINE
from gnnc.runtime.program.features import FeaturesProgram

WITH_INFERENCE = [replace(p, inference=True) if p.name == "static_features" else p for p in PIPELINE]


class Net(nn.Module):
    """Two layers with a ReLU between, and perhaps dropout of the features."""

    def __init__(self, layer: Callable[[int, int], nn.Module] = pyg.GCNConv, dropout: float = 0.0) -> None:
        super().__init__()
        self.first, self.second, self.dropout = layer(24, 16), layer(16, 5), dropout

    def forward(self, x: Tensor, edge_index: Tensor) -> Tensor:
        x = nn.functional.dropout(x, self.dropout, self.training)
        return self.second(self.first(x, edge_index).relu(), edge_index)


def graph() -> tuple[Tensor, Tensor]:
    torch.manual_seed(0)
    return torch.randn(40, 24), torch.randint(40, (2, 160))


@pytest.fixture(scope="module")
def trained() -> tuple[gnnc.CompiledModel, nn.Module]:
    """A compiled model whose training program is captured, and the model."""
    torch.manual_seed(1)
    model = Net().train()
    compiled = gnnc.compile(model, "int8")
    compiled(*graph())
    return compiled, model


def program_of(compiled: gnnc.CompiledModel) -> FeaturesProgram:
    features = compiled._captured().features
    assert features is not None
    return features


def check(compiled: gnnc.CompiledModel, model: nn.Module, x: Tensor, edge_index: Tensor) -> None:
    """Fail unless a call has the result of eager on the features as they are now."""
    found, right = compiled(x, edge_index), model(x, edge_index)
    assert (found - right).norm() < 0.03 * right.norm()


def test_features_are_quantized_once_in_100_steps() -> None:
    torch.manual_seed(0)
    x, edge_index = graph()
    model = Net().train()
    compiled = gnnc.compile(model, "int8")
    compiled(x, edge_index)
    program = program_of(compiled)
    program.clear()
    optimizer = torch.optim.Adam(model.parameters(), fused=True)
    with mock.patch.object(program, "_execute", wraps=program._execute) as execute:
        for _ in range(100):
            optimizer.zero_grad()
            compiled(x, edge_index).square().mean().backward()
            optimizer.step()
    assert execute.call_count == 1
    assert "x is quantized once" in compiled.explain()
    assert "# runs once per distinct feature matrix" in str(compiled)


@pytest.mark.parametrize("layer", slow_but((pyg.SAGEConv,), [pyg.SAGEConv, pyg.GCNConv, pyg.GATConv]))
def test_gradients_are_those_of_eager(layer: Callable[[int, int], nn.Module]) -> None:
    torch.manual_seed(2)
    model, args = Net(layer).train(), graph()
    twin = copy.deepcopy(model)
    compiled = gnnc.compile(model, "int8")
    for _ in range(2):
        model.zero_grad()
        twin.zero_grad()
        compiled(*args).square().sum().backward()
        twin(*args).square().sum().backward()
        grads = [[p.grad.flatten() for p in m.parameters() if p.grad is not None] for m in (model, twin)]
        assert torch.cosine_similarity(*map(torch.cat, grads), dim=0) > 0.995
    assert program_of(compiled).cache.nbytes > 0


def test_the_gradient_of_the_first_weight_reads_the_same_values(trained: tuple) -> None:
    parts = trained[0]._captured().parts
    assert [name for name, _ in parts] == ["structure", FEATURES, "forward", "backward"]
    assert parts.backward is not None
    names = {node.meta["source"].kind for node in parts.backward.graph.find_nodes(op="placeholder")}
    assert "features" in names and "input" not in names


def written(x: Tensor) -> Tensor:
    x.mul_(-3).add_(1)
    return x


def given_other_memory(x: Tensor) -> Tensor:
    x.data = torch.randn_like(x)
    return x


def written_through_a_view(x: Tensor) -> Tensor:
    x[3:9].fill_(5.0)
    return x


def resized(x: Tensor) -> Tensor:
    x.untyped_storage().resize_(0)
    x.untyped_storage().resize_(x.numel() * 4)
    return x.copy_(torch.randn(x.shape))


def written_without_a_gradient_mode(x: Tensor) -> Tensor:
    with torch.no_grad():
        torch.neg(x, out=x)
    return x


def in_other_rows(x: Tensor) -> Tensor:
    return x.flip(0)


CHANGES = [
    written, given_other_memory, written_through_a_view, resized, written_without_a_gradient_mode,
    in_other_rows,
]  # fmt: skip


@pytest.mark.parametrize("change", CHANGES)
def test_changed_features_are_quantized_again(change: Callable[[Tensor], Tensor], trained: tuple) -> None:
    compiled, model = trained
    x, edge_index = graph()
    check(compiled, model, x, edge_index)
    check(compiled, model, change(x), edge_index)


def test_new_features_at_a_recycled_address(trained: tuple) -> None:
    compiled, model = trained
    _, edge_index = graph()
    for number in range(20):
        check(compiled, model, torch.full((40, 24), float(number + 1)), edge_index)
    gc.collect()
    assert len(program_of(compiled).cache) <= 1


@pytest.mark.parametrize("fused", [False, True])
def test_features_that_an_optimizer_writes(fused: bool, trained: tuple) -> None:
    compiled, model = trained
    _, edge_index = graph()
    weight = nn.Parameter(torch.randn(40, 24))
    optimizer = torch.optim.Adam([weight], lr=0.5, fused=fused)
    for features in (weight.detach, lambda: weight.data):
        for _ in range(2):
            check(compiled, model, features(), edge_index)
            weight.grad = torch.randn_like(weight)
            optimizer.step()
        check(compiled, model, features(), edge_index)


def test_inference_tensors_are_compared(trained: tuple) -> None:
    compiled, model = trained
    with torch.inference_mode():
        x = torch.randn(40, 24)
    _, edge_index = graph()
    check(compiled, model, x.clone(), edge_index)
    found = compiled(x, edge_index).detach()
    with torch.inference_mode():
        x.neg_()
    assert (compiled(x, edge_index) - found).norm() > 0.1 * found.norm()


def test_the_values_are_freed_with_the_features(trained: tuple) -> None:
    compiled, _ = trained
    x, edge_index = graph()
    cache = program_of(compiled).cache
    compiled.clear_cache()
    compiled(x, edge_index)
    assert cache.nbytes >= x.numel() + 4 * len(x)
    (entry,) = cache._entries.values()
    kept = weakref.ref(entry)
    del entry, x
    gc.collect()
    assert len(cache) == 0 and cache.nbytes == 0 and kept() is None


def test_features_whose_gradient_is_wanted_are_quantized_in_each_step() -> None:
    x, edge_index = graph()
    compiled = gnnc.compile(Net().train(), "int8")
    compiled(x.requires_grad_(True), edge_index).sum().backward()
    assert x.grad is not None and compiled._captured().parts.features is None


def test_dropout_of_the_features_leaves_nothing_to_keep() -> None:
    compiled = gnnc.compile(Net(dropout=0.5).train(), "int8")
    compiled(*graph())
    assert compiled._captured().parts.features is None


def test_features_that_are_not_finite_are_refused(trained: tuple) -> None:
    compiled, _ = trained
    x, edge_index = graph()
    x[3, 4] = float("nan")
    for _ in range(2):
        with pytest.raises(gnnc.PrecisionError, match="finite"):
            compiled(x, edge_index)


def test_in_inference_on_request() -> None:
    x, edge_index = graph()
    model = Net().eval()
    compiled = gnnc.compile(model, "int8", pipeline=WITH_INFERENCE)
    with torch.no_grad():
        check(compiled, model, x, edge_index)
        program = program_of(compiled)
        with mock.patch.object(program, "_execute", wraps=program._execute) as execute:
            for _ in range(5):
                check(compiled, model, x, edge_index)
            assert execute.call_count == 0
            check(compiled, model, written(x), edge_index)
            assert execute.call_count == 1
    assert "x is quantized once" in compiled.explain()
    default = gnnc.compile(model, "int8")
    with torch.no_grad():
        torch.testing.assert_close(default(x, edge_index), compiled(x, edge_index), rtol=0, atol=0)
    assert default._captured().parts.features is None


def test_a_cuda_graph_of_the_caller_computes_the_values_in_each_replay() -> None:
    """The caller writes into the features between replays, which no cache would see."""
    execute, hooks, check = (mock.Mock(return_value=(torch.ones(3),)) for _ in range(3))
    program = FeaturesProgram(execute, hooks, check)
    x = torch.ones(3)
    with mock.patch("gnnc.runtime.program.features._is_capturing", return_value=True):
        for _ in range(2):
            program(x)
    assert execute.call_count == 2 and len(program.cache) == 0 and not hooks.after_build.called
    for _ in range(2):
        program(x)
    assert execute.call_count == 3 and len(program.cache) == 1
    assert hooks.after_build.call_count == 1 and hooks.after_call.call_count == check.call_count == 2


class LateFlag:
    """A device that runs behind Python: a NaN raises in the next check, once, as ``NanFlag`` does."""

    def __init__(self) -> None:
        self.is_raised, self.calls = False, 0

    def execute(self, x: Tensor) -> tuple[Tensor]:
        self.calls += 1
        self.is_raised |= not bool(x.isfinite().all())
        return (x * 2,)

    def check(self) -> None:
        if self.is_raised:
            self.is_raised = False
            raise gnnc.PrecisionError("a scale is not finite")


def test_features_that_a_device_refuses_late_are_refused_again() -> None:
    device = LateFlag()
    program = FeaturesProgram(device.execute, check=device.check)
    bad = torch.full((3,), float("nan"))
    program(bad)
    for calls in (1, 2, 3):
        assert device.calls == calls
        with pytest.raises(gnnc.PrecisionError, match="not finite"):
            program(bad)
        assert len(program.cache) == 0
        program(bad)


def test_features_are_computed_again_after_the_run_of_others_was_refused() -> None:
    """The flag may also rise between the check before a call and the one in the program itself."""
    device = LateFlag()

    def execute(x: Tensor) -> tuple[Tensor]:
        device.check()
        return device.execute(x)

    program = FeaturesProgram(execute)
    bad, good = torch.full((3,), float("nan")), torch.ones(3)
    program(bad)
    with pytest.raises(gnnc.PrecisionError, match="not finite"):
        program(good)
    assert len(program.cache) == 0
    torch.testing.assert_close(program(good)[0], good * 2)


def test_scales_of_examples_stay_in_the_program() -> None:
    torch.manual_seed(3)
    model, args = Net(pyg.SAGEConv).eval(), graph()
    compiled = gnnc.compile(model, "int8", example_inputs=args, pipeline=WITH_INFERENCE)
    with torch.no_grad():
        for x in (args[0], 20 * args[0]):
            check(compiled, model, x, args[1])
    assert compiled._captured().features is None


@pytest.mark.usefixtures("compiler")
def test_programs_of_a_gpu_keep_them_too() -> None:
    compiled = gnnc.compile(Net().train(), "int8", backend="cuda-offline:sm_90")
    with pytest.raises(gnnc.BackendError, match="not here"):
        compiled(*graph())
    features = compiled._captured().parts.features
    assert features is not None and "fused.map()" in str(compiled).partition("def features")[2]
    assert "x is quantized once" in compiled.explain()
