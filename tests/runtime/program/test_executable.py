"""Executables: the generated program, its memory plan, and what it never does to a caller's tensors."""

import gc
import threading
from dataclasses import replace

import pytest
import torch
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.fx import Graph, GraphModule, Node
from torch.fx.experimental.symbolic_shapes import DimDynamic, ShapeEnv, StatelessSymbolicContext

import gnnc
from gnnc.ir.graph import infer_meta
from gnnc.ir.source import Source
from gnnc.passes.base import Context, run_pass
from gnnc.passes.lower import Lower
from gnnc.runtime.backend import get_backend
from gnnc.runtime.program.device import Device
from gnnc.runtime.program.executable import Executable

aten, ops = torch.ops.aten, torch.ops.gnnc
WIDTH = 20


class Builder:
    """Builds a small graph with a symbolic number of rows."""

    def __init__(self) -> None:
        self.graph = Graph()
        self.mode = FakeTensorMode(shape_env=ShapeEnv(), allow_non_fake_inputs=True)
        self.values: list[torch.Tensor] = []

    def input(self, value: torch.Tensor, name: str, kind: str = "input", rows: bool = True) -> Node:
        dims = [DimDynamic.STATIC] * value.dim()
        if rows:
            dims[0] = DimDynamic.DYNAMIC
        context = StatelessSymbolicContext(dynamic_sizes=dims)
        node = self.graph.placeholder(name)
        node.meta = {
            "val": self.mode.from_tensor(value, symbolic_context=context),
            "source": Source(kind, name),  # type: ignore[arg-type]
            "layer": "",
        }
        self.values.append(value)
        return node

    def call(self, target, *args, **kwargs) -> Node:
        return self.graph.call_function(target, args, kwargs)

    def build(self, *outputs: Node, backend: str = "reference") -> GraphModule:
        self.graph.output(outputs)
        chosen = get_backend(backend)
        context = Context(target=replace(chosen.target, lowering=chosen))
        gm = GraphModule(torch.nn.Module(), self.graph)
        infer_meta(gm)
        return run_pass(Lower(), gm, context)


def two_layers(backend: str = "reference") -> tuple[GraphModule, list[torch.Tensor]]:
    """relu(x w0) w1: one temporary, one output."""
    b = Builder()
    x = b.input(torch.randn(9, WIDTH), "x")
    w0 = b.input(torch.randn(33, WIDTH), "w0", "parameter", rows=False)
    w1 = b.input(torch.randn(7, 33), "w1", "parameter", rows=False)
    hidden = b.call(aten.relu.default, b.call(ops.gemm.default, x, w0))
    return b.build(b.call(ops.gemm.default, hidden, w1), backend=backend), b.values


def expected_of(values: list[torch.Tensor]) -> torch.Tensor:
    x, w0, w1 = values
    return (x @ w0.t()).relu() @ w1.t()


BACKENDS = pytest.mark.parametrize("backend", ["reference", "cpu"])


@BACKENDS
@pytest.mark.parametrize("rows", [9, 2, 1, 0, 1000])
def test_runs_at_any_number_of_rows(backend, rows):
    gm, values = two_layers(backend)
    values[0] = torch.randn(rows, WIDTH)
    (actual,) = Executable(gm)(*values)
    torch.testing.assert_close(actual, expected_of(values), rtol=1e-4, atol=1e-4)


@BACKENDS
def test_strided_and_transposed_operands(backend):
    gm, values = two_layers(backend)
    run = Executable(gm)
    values[0] = torch.randn(WIDTH, 50).t()
    torch.testing.assert_close(run(*values)[0], expected_of(values), rtol=1e-4, atol=1e-4)
    values[0] = torch.randn(50, 3 * WIDTH)[::2, WIDTH : 2 * WIDTH]
    torch.testing.assert_close(run(*values)[0], expected_of(values), rtol=1e-4, atol=1e-4)
    values[1] = torch.randn(WIDTH, 33).t()
    torch.testing.assert_close(run(*values)[0], expected_of(values), rtol=1e-4, atol=1e-4)


@pytest.mark.first(1)
@BACKENDS
def test_outputs_survive_later_calls(backend):
    gm, values = two_layers(backend)
    run = Executable(gm)
    values[0] = torch.randn(20000, WIDTH)
    kept = run(*values)[0]
    copy = kept.clone()
    for _ in range(3):
        gc.collect()
        run(torch.randn(20000, WIDTH), *values[1:])
    assert torch.equal(kept, copy)


def test_temporaries_are_kept_and_flat_over_sizes():
    gm, values = two_layers("cpu")
    run = Executable(gm)
    run(torch.randn(5000, WIDTH), *values[1:])
    full = run.arena_bytes
    assert full > 0
    for rows in (1, 10, 4999, 0, 5000):
        run(torch.randn(rows, WIDTH), *values[1:])
        assert run.arena_bytes == full
    run.clear()
    assert run.arena_bytes == 0


@BACKENDS
def test_threads_do_not_share_temporaries(backend):
    gm, values = two_layers(backend)
    run = Executable(gm)
    inputs = [torch.randn(200 + i, WIDTH) for i in range(4)]
    expected = [run(x, *values[1:])[0] for x in inputs]
    wrong = []

    def work(i: int) -> None:
        for _ in range(30):
            if not torch.equal(run(inputs[i], *values[1:])[0], expected[i]):
                wrong.append(i)

    threads = [threading.Thread(target=work, args=(i,)) for i in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert not wrong


def test_the_program_is_straight_line_python():
    gm, _ = two_layers("cpu")
    source = Executable(gm).source
    assert source.startswith("def run(") and "for " not in source and "while " not in source
    assert source.count("gemm_") >= 2


def chain(length: int) -> tuple[GraphModule, list[torch.Tensor]]:
    b = Builder()
    value = b.input(torch.randn(9, WIDTH), "x")
    for i in range(length):
        weight = b.input(torch.randn(WIDTH, WIDTH) / 4, f"w{i}", "parameter", rows=False)
        value = b.call(ops.gemm.default, value, weight)
    # Placeholders come first in a graph.
    first = next(iter(b.graph.nodes))
    for node in [n for n in b.graph.nodes if n.op == "placeholder"][1:]:
        first.append(node)
        first = node
    return b.build(value, backend="cpu"), b.values


def test_temporaries_that_do_not_meet_share_memory():
    gm, values = chain(8)
    run = Executable(gm)
    values[0] = torch.randn(4096, WIDTH)
    run(*values)
    one = 4096 * WIDTH * 4
    assert run.arena_bytes < 2.5 * one


@BACKENDS
def test_a_result_that_is_a_view_of_a_temporary_is_the_callers(backend):
    b = Builder()
    x = b.input(torch.randn(9, WIDTH), "x")
    w = b.input(torch.randn(6, WIDTH), "w", "parameter", rows=False)
    product = b.call(ops.gemm.default, x, w)
    rows = b.call(aten.sym_size.int, x, 0)
    heads = b.call(aten.view.default, product, [rows, 2, 3])
    run = Executable(b.build(heads, backend=backend))
    values = [torch.randn(30000, WIDTH), b.values[1]]
    (kept,) = run(*values)
    copy = kept.clone()
    for _ in range(3):
        run(torch.randn(30000, WIDTH), b.values[1])
    assert kept.shape == (30000, 2, 3) and torch.equal(kept, copy)


@BACKENDS
def test_the_bits_of_a_temporary_are_the_callers(backend):
    b = Builder()
    x = b.input(torch.randn(9, WIDTH), "x")
    w = b.input(torch.randn(6, WIDTH), "w", "parameter", rows=False)
    bits = b.call(aten.view.dtype, b.call(ops.gemm.default, x, w), torch.int32)
    run = Executable(b.build(bits, backend=backend))
    values = [torch.randn(30000, WIDTH), b.values[1]]
    (kept,) = run(*values)
    copy = kept.clone()
    product = values[0] @ values[1].t()
    torch.testing.assert_close(copy.view(torch.float32), product, rtol=1e-4, atol=1e-4)
    for _ in range(3):
        run(torch.randn(30000, WIDTH), b.values[1])
    assert torch.equal(kept, copy)


@BACKENDS
def test_results_may_be_inputs_constants_and_repeated(backend):
    b = Builder()
    x = b.input(torch.randn(9, WIDTH), "x")
    doubled = b.call(aten.mul.Tensor, x, 2.0)
    gm = b.build(doubled, x, doubled, backend=backend)
    first, same, again = Executable(gm)(*b.values)
    assert same is b.values[0] and torch.equal(first, again)


def test_a_scale_that_is_not_finite_names_its_layer():
    b = Builder()
    x = b.input(torch.randn(9, WIDTH), "x")
    scale = b.call(ops.scale.default, x, "int8/row")
    scale.meta["layer"] = "convs.1"
    gm = b.build(b.call(ops.quantize.default, x, scale, "int8/row"))
    bad = b.values[0].clone()
    bad[3, 3] = float("nan")
    with pytest.raises(gnnc.PrecisionError, match=r"not finite in layer 'convs\.1'"):
        Executable(gm)(bad)
    Executable(gm, check_finite=False)(bad)


@BACKENDS
def test_profile_names_every_launch(backend):
    gm, values = two_layers(backend)
    run = Executable(gm)
    outputs, timings = run.profile(*values)
    assert torch.equal(outputs[0], run(*values)[0])
    launched = {name for name, _ in run.kernels}
    assert launched <= {timing.node for timing in timings}
    assert all(timing.seconds >= 0 for timing in timings)


def test_profile_says_which_layer_it_comes_to(monkeypatch) -> None:
    said: list[str] = []
    monkeypatch.setattr(Device, "enter_range", staticmethod(said.append))
    monkeypatch.setattr(Device, "leave_range", staticmethod(lambda: said.append("")))
    gm, values = two_layers()
    for number, node in enumerate(gm.graph.nodes):
        node.meta["layer"] = f"convs.{number}"
    Executable(gm).profile(*values)
    entered = [name for name in said if name]
    assert said[1::2] == [""] * len(entered)
    assert all(name.startswith("convs.") for name in entered)
