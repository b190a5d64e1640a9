"""Replays of the CPU's launches: the same bits as launch by launch, in every call, and when they end."""

import copy
import threading
from collections.abc import Iterable
from typing import Any

import pytest
import torch
from slow import slow_if
from torch.utils._python_dispatch import TorchDispatchMode
from zoo import ZOO, prepared, random_graph
from zoo_gradients import gradients
from zoo_layers import LAYERS

import gnnc
from gnnc.runtime.cpu.replay import Replays
from gnnc.runtime.program.executable import Executable
from gnnc.torch_private import pytree

ALL = ZOO | LAYERS
MAIN = ("gcn", "sage-mean", "gin", "gat")
UNTRACED = ("super-gat", "super-gat-sd")
"""Layers that draw negative edges in train(), which no trace does."""
WITHOUT_WEIGHTS = ("appnp", "wl-continuous")


class Watched(TorchDispatchMode):
    """Lets ops through, and counts the launches of the CPU's kernels."""

    def __init__(self) -> None:
        super().__init__()
        self.launches: list[str] = []

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if func.namespace.startswith("gnnc_cpu"):
            self.launches.append(func.__name__)
        return func(*args, **(kwargs or {}))


def tensors(result: Any) -> list[torch.Tensor]:
    return [leaf for leaf in pytree.tree_leaves(result) if isinstance(leaf, torch.Tensor)]


def assert_same_bits(found: Any, expected: Any) -> None:
    pairs = list(zip(tensors(found), tensors(expected), strict=True))
    assert pairs and all(torch.equal(a.nan_to_num(), b.nan_to_num()) for a, b in pairs)


def cases(names: Iterable[str]) -> list[Any]:
    """Return layers and precisions; int8 programs have the launches of fp32, and launches of their own."""
    main = [(name, precision) for name in MAIN for precision in ("fp32", "int8")]
    rest = [(name, "int8") for name in names if name not in MAIN]
    return [*main, *(pytest.param(*case, marks=slow_if(True)) for case in rest)]


@pytest.mark.parametrize(("name", "precision"), cases(ALL))
def test_a_replay_computes_the_bits_of_launches_one_by_one(name: str, precision: str) -> None:
    model = prepared(ALL[name])
    compiled = gnnc.compile(model, precision=precision)
    for seed, (nodes, edges) in enumerate([(30, 120), (9, 20)]):
        args, kwargs = ALL[name].arguments(nodes, edges, seed)
        with torch.no_grad():
            found = compiled(*args, **kwargs)
            executable = compiled._dispatch.last.executable
            with Watched() as watched:
                compiled(*args, **kwargs)
            assert executable.replays is None or len(watched.launches) >= executable.replays.launches
            replayed, executable._run = executable._run, executable._run_watched
            expected = compiled(*args, **kwargs)  # torch's own attention has other bits within a mode
            executable._run = replayed
        assert_same_bits(found, expected)


@pytest.mark.parametrize(
    ("name", "precision"), cases(name for name in ALL if name not in UNTRACED + WITHOUT_WEIGHTS)
)
def test_a_replay_computes_the_gradients_of_launches_one_by_one(name: str, precision: str) -> None:
    model = prepared(ALL[name]).requires_grad_(True).train()
    compiled = gnnc.compile(model, precision=precision)
    given, state = ALL[name].arguments(30, 120, 0), copy.deepcopy(model.state_dict())

    def step() -> dict[str, Any]:
        model.zero_grad()
        model.load_state_dict(state)
        torch.manual_seed(3)
        return gradients(compiled, model, given, torch.float32)

    step()
    found = step()
    executable = compiled._dispatch.last.executable
    parts = executable.forward, executable.backward
    assert any(part.replays is not None for part in parts)
    for part in parts:  # torch's own dropout draws other numbers within a dispatch mode
        part._run = part._run_watched
    assert_same_bits(found, step())


@pytest.fixture
def compiled() -> Any:
    torch.manual_seed(0)
    return gnnc.compile(prepared(ALL["gin"]), precision="fp32")


def test_a_result_is_never_written_again(compiled: Any) -> None:
    x, edge_index = random_graph(30, 120)
    with torch.no_grad():
        first = compiled(x, edge_index)
        kept = first.clone()
        others = [compiled(torch.randn_like(x), edge_index) for _ in range(3)]
        assert torch.equal(first, kept)
        assert len({result.data_ptr() for result in (first, *others)}) == 4
        assert torch.equal(compiled(x, edge_index), kept)


def test_other_graphs_weights_and_tensors_that_share_memory(compiled: Any) -> None:
    graphs = [random_graph(30, 120), random_graph(8, 30, 1), random_graph(50, 10, 2)]
    with torch.no_grad():
        for _ in range(2):
            for x, edge_index in graphs:
                both = torch.cat([x, x])  # rows of a larger tensor, and a matrix with gaps
                for given in (x, both[: len(x)], both.t().clone().t()[: len(x)]):
                    torch.testing.assert_close(
                        compiled(given, edge_index), compiled.model(given, edge_index), rtol=1e-4, atol=1e-5
                    )
            for weight in compiled.parameters():
                weight.mul_(0.5)


def test_threads_that_call_at_the_same_time(compiled: Any) -> None:
    x, edge_index = random_graph(30, 120)
    inputs = [x * k for k in range(1, 5)]
    with torch.no_grad():
        expected = [compiled(given, edge_index) for given in inputs]
    wrong: list[int] = []

    def run(number: int) -> None:
        with torch.no_grad():
            for _ in range(30):
                if not torch.equal(compiled(inputs[number], edge_index), expected[number]):
                    wrong.append(number)

    threads = [threading.Thread(target=run, args=(number,)) for number in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert wrong == []


def test_an_error_of_a_launch_is_raised_and_the_next_call_runs(compiled: Any) -> None:
    x, edge_index = random_graph(30, 120)
    with torch.no_grad():
        expected = compiled(x, edge_index)
        executable: Executable = compiled._dispatch.last.executable
        values: list[Any] = []
        run, executable._run = executable._run, lambda *given: values.extend(given)
        with pytest.raises(TypeError):
            compiled(x, edge_index)
        executable._run = run
        place = next(i for i, v in enumerate(values) if v is x)
        narrow = [*values[:place], x[:, :5].contiguous(), *values[place + 1 :]]
        with pytest.raises(RuntimeError, match="spmm"):
            executable(*narrow)
        assert torch.equal(compiled(x, edge_index), expected)


def replays_of(model: torch.nn.Module, *args: torch.Tensor) -> Replays:
    compiled = gnnc.compile(model.eval(), precision="fp32")
    with torch.no_grad():
        compiled(*args)
    found = compiled._dispatch.last.executable.replays
    assert found is not None
    return found


class Between(torch.nn.Module):
    """Two linear layers, and a step of PyTorch between them, or beside them on the input."""

    def __init__(self, is_between: bool) -> None:
        super().__init__()
        self.first, self.second = torch.nn.Linear(12, 16), torch.nn.Linear(16, 16)
        self.is_between = is_between

    def forward(self, x: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        h = self.first(x)
        other = torch.cumsum(h if self.is_between else x, 0)
        return self.second(other if self.is_between else h), other


@pytest.mark.parametrize(("is_between", "count"), [(True, 2), (False, 1)])
def test_a_step_of_pytorch_ends_a_replay_whose_results_it_reads(is_between: bool, count: int) -> None:
    found = replays_of(Between(is_between), torch.randn(6, 12))
    assert (found.launches, found.count, found.single) == (2, count, [])


def test_explain_says_how_calls_launch(compiled: Any) -> None:
    with torch.no_grad():
        compiled(*random_graph(30, 120))
    replays = compiled._dispatch.last.executable.replays
    assert f"{replays.launches} kernels, launched by {replays.count} C++ call" in compiled.explain()


def test_launches_are_told_in_the_singular_and_in_the_plural() -> None:
    assert str(Replays(launches=1, count=1)) == "1 kernel, launched by 1 C++ call"
    assert str(Replays(launches=8, count=2)) == "8 kernels, launched by 2 C++ calls"
