"""A capture in one thread leaves the model, and what other threads do with it, as they are."""

import copy
import functools
import io
import multiprocessing
import os
import pickle
import random
import signal
import sys
import threading
import time
import traceback
import warnings
from collections.abc import Callable, Iterator
from contextlib import contextmanager

import pytest
import torch
from torch import Tensor, nn
from torch.fx._symbolic_trace import is_fx_tracing
from torch_geometric.nn import GATConv, GCNConv, SAGEConv

import gnnc
from gnnc.capture.trace_lock import TRACES
from gnnc.torch_private import TRACE_STATE

WIDTH, CLASSES = 8, 4


class Net(nn.Module):
    """Model with several layers, a buffer, and a hook of PyG, which a layer skips where it is traced."""

    def __init__(self) -> None:
        super().__init__()
        self.gcn = GCNConv(WIDTH, 16)
        self.sage = SAGEConv(16, 8)
        self.norm = nn.BatchNorm1d(8)
        self.gat = GATConv(8, CLASSES)
        self.sage.register_propagate_forward_hook(lambda layer, inputs, out: out * 2)

    def forward(self, x: Tensor, edge_index: Tensor) -> Tensor:
        hidden = self.gcn(x, edge_index).relu()
        return self.gat(self.norm(self.sage(hidden, edge_index)), edge_index)


def graph(nodes: int = 20) -> tuple[Tensor, Tensor]:
    generator = torch.Generator().manual_seed(nodes)
    x = torch.randn(nodes, WIDTH, generator=generator)
    return x, torch.randint(nodes, (2, 5 * nodes), generator=generator)


@pytest.fixture(autouse=True)
def one_thread_an_op() -> Iterator[None]:
    """OpenMP's threads of a parent do not exist in a forked child."""
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(threads)


@pytest.fixture
def model() -> Net:
    torch.manual_seed(0)
    return Net().eval()


@contextmanager
def during_a_trace(model: nn.Module, *args: Tensor) -> Iterator[None]:
    """Stop a capture in another thread within forward, for as long as the block takes."""
    inside, go_on = threading.Event(), threading.Event()

    class Stops(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.model = model

        def forward(self, *args: Tensor) -> Tensor:
            result = self.model(*args)
            inside.set()
            assert go_on.wait(60)
            return result

    errors: list[BaseException] = []

    def compiled() -> None:
        try:
            with torch.no_grad():
                gnnc.compile(Stops().eval(), "fp32", backend="reference")(*args)
        except BaseException as error:
            errors.append(error)

    thread = threading.Thread(target=compiled)
    thread.start()
    try:
        assert inside.wait(60), errors
        assert TRACES.tracer == thread.ident
        yield
    finally:
        go_on.set()
        thread.join()
    assert not errors


@torch.no_grad()
def eager(model: nn.Module) -> None:
    args = graph(11)
    result = model(*args)
    assert type(result) is Tensor
    assert torch.equal(result, model(*args))


def state(model: nn.Module) -> None:
    assert {type(value) for value in model.state_dict().values()} == {Tensor}
    assert {type(value) for value in model.parameters()} == {nn.Parameter}


def copied(model: nn.Module) -> None:
    eager(copy.deepcopy(model))
    model.load_state_dict(pickle.loads(pickle.dumps(model.state_dict())))


def trained(model: nn.Module) -> None:
    twin = copy.deepcopy(model)
    for each in (model, twin):
        each.train()
        optimizer = torch.optim.Adam(each.parameters(), lr=1e-3)
        for _ in range(2):
            optimizer.zero_grad()
            each(*graph(13)).square().mean().backward()
            optimizer.step()
        each.eval()
    assert all(
        torch.equal(one, other) for one, other in zip(model.parameters(), twin.parameters(), strict=True)
    )


def asks_whether_it_is_traced(model: nn.Module) -> None:
    assert not torch.compiler.is_compiling()
    assert not torch.compiler.is_exporting()
    assert not is_fx_tracing()


def uses_builtins(model: nn.Module) -> None:
    assert max((), default=3) == 3
    assert min([2.0, 1.0]) == 1.0
    largest = max(torch.tensor([1.0]), torch.tensor([2.0]), key=float)
    assert largest.item() == 2.0
    with pytest.raises(RuntimeError, match="ambiguous"):
        max(torch.tensor([1.0, 5.0]), torch.tensor([2.0, 3.0]))


def computes_with_sizes(model: nn.Module) -> None:
    from torch.fx.experimental.symbolic_shapes import ShapeEnv

    size = ShapeEnv().create_unbacked_symint()
    assert str((size + 1) * 2 >= size) == "2*u0 + 2 >= u0"


def makes_modules(model: nn.Module) -> None:
    eager(Net().eval())


def traced_by_fx(model: nn.Module) -> None:
    assert len(torch.fx.symbolic_trace(nn.Sequential(nn.Linear(3, 2), nn.ReLU())).graph.nodes) == 4


def warned(model: nn.Module) -> None:
    with warnings.catch_warnings(record=True) as found:
        warnings.simplefilter("always")
        warnings.warn("heard", stacklevel=1)
    assert [str(each.message) for each in found] == ["heard"]
    assert not isinstance(sys.stderr.write(""), str)


BESIDE: list[Callable[[nn.Module], None]] = [
    eager,
    state,
    copied,
    trained,
    asks_whether_it_is_traced,
    uses_builtins,
    computes_with_sizes,
    makes_modules,
    traced_by_fx,
    warned,
]


@pytest.mark.first(1)
@pytest.mark.parametrize("beside", BESIDE)
def test_beside_a_trace_nothing_is_otherwise(model: Net, beside: Callable[[nn.Module], None]) -> None:
    beside(model)
    with during_a_trace(model, *graph()):
        beside(model)
    beside(model)


@torch.no_grad()
def test_eager_results_are_the_same_bits_beside_a_trace(model: Net) -> None:
    args = graph(17)
    expected = model(*args)
    with during_a_trace(model, *graph()):
        assert torch.equal(model(*args), expected)


@torch.no_grad()
def test_calls_of_compiled_models_do_not_wait_for_a_trace(model: Net) -> None:
    compiled = gnnc.compile(model, "fp32", backend="reference")
    expected = compiled(*graph())
    with during_a_trace(model, *graph()):
        assert torch.equal(compiled(*graph()), expected)
        assert "gnnc" in str(compiled) and compiled.explain() and compiled.summary()
        compiled.clear_cache()


def test_a_capture_draws_no_random_numbers(model: Net) -> None:
    """The generator is that of all threads: putting its state back would repeat what another has drawn."""
    with during_a_trace(nn.Sequential(nn.Linear(WIDTH, 8), nn.Dropout(0.5)).train(), graph()[0]):
        first = torch.rand(4)
    assert not torch.equal(torch.rand(4), first)


@torch.no_grad()
def test_a_seed_that_forward_sets_is_undone() -> None:
    class Seeds(nn.Module):
        def forward(self, x: Tensor) -> Tensor:
            torch.manual_seed(3)
            return x + 1

    torch.manual_seed(5)
    expected = torch.rand(4)
    torch.manual_seed(5)
    gnnc.compile(Seeds(), "fp32", backend="reference")(graph()[0])
    assert torch.equal(torch.rand(4), expected)


def test_output_of_other_threads_passes_during_a_trace(
    model: Net, capsys: pytest.CaptureFixture[str], caplog: pytest.LogCaptureFixture
) -> None:
    import logging

    with during_a_trace(model, *graph()):
        print("heard", file=sys.stderr)
        logging.getLogger("torch._dynamo").critical("logged")
    assert "heard" in capsys.readouterr().err
    assert "logged" in caplog.text


def patched_names() -> list[object]:
    owners = [(nn.Module, "__call__"), (nn.Module, "__getattr__"), (torch.SymInt, "__eq__"), *TRACE_STATE]
    return [max, torch.compiler.is_compiling(), *(getattr(*name) for name in owners)]


def in_a_child(work: Callable[[], None], seconds: float = 60) -> None:
    """Run ``work`` in a forked child; fail where it fails or hangs."""
    child = os.fork()
    if child == 0:
        code = 1
        try:
            work()
            code = 0
        except BaseException:
            traceback.print_exc()
        finally:
            sys.stderr.flush()
            os._exit(code)
    end = time.monotonic() + seconds
    while time.monotonic() < end:
        done, status = os.waitpid(child, os.WNOHANG)
        if done:
            assert os.waitstatus_to_exitcode(status) == 0
            return
        time.sleep(0.01)
    os.kill(child, signal.SIGKILL)
    os.waitpid(child, 0)
    pytest.fail("the child hangs")


@torch.no_grad()
@pytest.mark.filterwarnings("ignore:.*fork.*:DeprecationWarning")
def test_a_child_forked_during_a_trace_compiles_and_calls(model: Net) -> None:
    compiled = gnnc.compile(model, "fp32", backend="reference")
    expected = compiled(*graph())
    originals = patched_names()

    def work() -> None:
        assert patched_names() == originals
        assert TRACES.tracer is None
        assert torch.equal(compiled(*graph()), expected)
        again = gnnc.compile(model, "fp32", backend="reference")
        assert torch.equal(again(*graph()), expected)
        eager(model)

    with during_a_trace(model, *graph()):
        in_a_child(work)


@pytest.mark.slow
@torch.no_grad()
@pytest.mark.filterwarnings("ignore:.*fork.*:DeprecationWarning")
def test_a_child_may_be_forked_at_any_moment_of_a_build(model: Net) -> None:
    compiled = gnnc.compile(model, "fp32")
    expected = compiled(*graph())
    stop = threading.Event()

    def build() -> None:
        with torch.no_grad():
            while not stop.is_set():
                gnnc.compile(model, "fp32")(*graph())

    def work() -> None:
        assert torch.allclose(compiled(*graph()), expected)
        assert torch.allclose(gnnc.compile(model, "fp32")(*graph()), expected)

    thread = threading.Thread(target=build)
    thread.start()
    try:
        for wait in (0.05, 0.3, 0.5):
            time.sleep(wait)
            in_a_child(work)
    finally:
        stop.set()
        thread.join()


@pytest.mark.slow
@torch.no_grad()
def test_a_compiled_model_is_pickled_and_spawned_during_a_trace() -> None:
    torch.manual_seed(0)
    compiled = gnnc.compile(nn.Sequential(nn.Linear(WIDTH, 4), nn.ReLU()).eval(), "fp32")
    x = graph()[0]
    expected = compiled(x)
    with during_a_trace(compiled.model, x):
        again = pickle.loads(pickle.dumps(compiled))
        context = multiprocessing.get_context("spawn")
        child = context.Process(target=_calls_sequential, args=(again, x, expected))
        child.start()
        child.join(240)
    assert child.exitcode == 0


def _calls_sequential(compiled: gnnc.CompiledModel, x: Tensor, expected: Tensor) -> None:
    torch.set_num_threads(1)
    with torch.no_grad():
        assert torch.allclose(compiled(x), expected, atol=1e-5)


@pytest.mark.parametrize("seconds", [3, pytest.param(15, marks=pytest.mark.slow)])
def test_eight_threads_compile_call_train_print_and_copy(seconds: float) -> None:
    torch.manual_seed(0)
    work = [graph(nodes) for nodes in (10, 17, 24, 31)]
    model = Net().eval()
    with torch.no_grad():
        expected = [model(*args) for args in work]
        compiled = gnnc.compile(model, "fp32")
        compiled(*work[0])
    weights = model.state_dict()
    failures: list[str] = []
    end = time.monotonic() + seconds

    def result(task: str, mine: Net, number: int) -> Tensor | None:
        if task == "compile":
            return gnnc.compile(mine, "fp32")(*work[number])
        if task == "compile the same":
            return gnnc.compile(model, "fp32")(*work[number])
        if task == "call":
            return compiled(*work[number])
        if task == "copy":
            return copy.deepcopy(compiled)(*work[number])
        if task == "eager":
            return model(*work[number])
        if task == "print":
            print(compiled, compiled.explain(), compiled.summary(), file=io.StringIO())
        elif task == "clear":
            compiled.clear_cache()
            time.sleep(0.01)
        else:
            with torch.enable_grad():
                trained(copy.deepcopy(mine))
        return None

    def run(task: str) -> None:
        torch.set_grad_enabled(False)
        random_numbers = random.Random(task)
        mine = Net().eval()
        mine.load_state_dict(weights)
        while time.monotonic() < end and not failures:
            number = random_numbers.randrange(len(work))
            try:
                found = result(task, mine, number)
            except BaseException as error:
                failures.append(f"{task}: {type(error).__name__}: {error}")
                return
            if found is not None and not torch.allclose(found, expected[number], atol=1e-4):
                failures.append(f"{task}: a wrong result")

    tasks = ("compile", "compile the same", "call", "copy", "eager", "print", "clear", "train")
    threads = [threading.Thread(target=functools.partial(run, task)) for task in tasks]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert not failures
