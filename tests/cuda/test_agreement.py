"""Whole models in 8 bits: CUDA kernels store the quantized values of the reference and the CPU kernels.

A line behind each node of quantized values, added to the program under test, copies them. The program's
kernels, memory and order of launches stay what they are. Backends differ in which narrow rows they leave
FP32: here all do what CUDA does, so that they store the same tensors.
"""

from collections.abc import Callable, Iterator
from dataclasses import replace
from itertools import groupby
from typing import Any

import pytest
import torch
from backend_models import MODELS, WIDTH, given
from cuda_cases import on_device
from torch import Tensor
from torch.fx import GraphModule, Node
from torch_geometric.nn.models import GCN, GraphSAGE

import gnnc
from gnnc.ir.qtype import BYTE_DTYPES
from gnnc.passes.quantize import Quantize
from gnnc.runtime import backend
from gnnc.runtime.program import executable
from gnnc.runtime.program.emitter import Emitter
from gnnc.runtime.program.launches import Expr
from gnnc.target import CUDA_NARROW_ROWS

pytestmark = pytest.mark.cuda
EQUAL = 0.999
"""The part of a model's quantized values that is equal, by definition; the others are off by one."""
Keep = Callable[[str, Tensor], None]
WIDE = {
    "GCN": lambda: GCN(WIDTH, 64, 2, 47),
    "GraphSAGE": lambda: GraphSAGE(WIDTH, 64, 2, 47),
}
"""Models with rows that CUDA gathers in int8 without examples."""


def holds_quantized(node: Node) -> bool:
    """Whether a node holds quantized values, or their shifts."""
    value = node.meta.get("val")
    return isinstance(value, Tensor) and value.dtype in (*BYTE_DTYPES, torch.uint8)


def stored_by(node: Node) -> Iterator[Node]:
    """The node itself, or the nodes that pick its results, where they hold quantized values."""
    picked = node.users if isinstance(node.meta.get("val"), tuple | list) else ()
    yield from (each for each in (node, *picked) if holds_quantized(each))


def looking(keep: Keep) -> Callable[[GraphModule, Emitter], list[Expr]]:
    """Return a writer of programs that hand all quantized values to ``keep``, by the name of their node."""
    write_statements = executable.write_statements

    def write(graph_module: GraphModule, emitter: Emitter) -> list[Expr]:
        results = write_statements(graph_module, emitter)
        steps = {node: step for step, node in enumerate(graph_module.graph.nodes)}
        written, emitter.body = emitter.body, []
        for node, statements in groupby(written, key=lambda pair: pair[1]):
            assert node is not None
            emitter.body += statements
            for value in stored_by(node):
                emitter.enter(steps[node], node)
                emitter.call(emitter.bind(keep, "keep"), [Expr(repr(value.name)), emitter.matrix(value)])
        return results

    return write


@pytest.fixture
def kept() -> dict[str, Tensor]:
    """The quantized values of the last call, as rows, by the name of their node."""
    return {}


@pytest.fixture
def looked_at(kept: dict[str, Tensor], monkeypatch: pytest.MonkeyPatch) -> None:
    """All backends quantize the same rows, and what they store is kept."""

    def keep(name: str, rows: Tensor) -> None:
        kept[name] = rows.clone().cpu()

    for name in ("cpu", "cuda", "reference"):
        entry = backend._REGISTRY[name]

        def changed(device: Any, entry: backend.Registration = entry) -> backend.Backend:
            given = entry.create(device, "")
            alike = {
                "narrow_rows": CUDA_NARROW_ROWS,
                "least_quantized_columns": 0,
                "tensor_scales": given.name != "cpu",
            }
            return replace(given, target=replace(given.target, **alike))

        monkeypatch.setitem(backend._REGISTRY, name, backend.Registration(changed))
    monkeypatch.setattr(executable, "write_statements", looking(keep))


def run(
    name: str, backend: str, *, static: bool = False, of_tensors: bool = False, precision: str = "int8"
) -> None:
    """Call a model that is compiled for a backend."""
    passes = gnnc.passes.PIPELINE
    if of_tensors:
        passes = tuple(replace(p, dynamic="tensor") if isinstance(p, Quantize) else p for p in passes)
    torch.manual_seed(0)
    model, arguments = (WIDE if of_tensors else MODELS)[name]().eval(), given()
    if backend == "cuda":
        model, arguments = model.cuda(), on_device(arguments)
    examples = arguments if static else None
    options: dict[str, Any] = {"example_inputs": examples, "pipeline": passes, "cuda_graph": False}
    gnnc.compile(model, precision, backend=backend, **options)(*arguments)


def assert_agree(got: dict[str, Tensor], want: dict[str, Tensor]) -> None:
    """All but one code in a thousand are equal, and those are off by one."""
    assert list(got) == list(want)
    off = torch.cat([(got[name].int() - want[name].int()).abs().flatten() for name in got])
    assert off.max() <= 1 and (off == 0).float().mean() >= EQUAL, {
        name: int((got[name] != want[name]).sum()) for name in got
    }


@torch.no_grad()
@pytest.mark.parametrize("static", [False, True], ids=["dynamic", "static"])
@pytest.mark.parametrize("name", ["GCN", "GraphSAGE", "GIN", "GAT"])
def test_quantized_values_of_whole_models(
    name: str, static: bool, looked_at: None, kept: dict[str, Tensor]
) -> None:
    run(name, "cuda", static=static)
    got = dict(kept)
    assert len(got) >= 2 and all(
        len(values.unique()) > 64 for values in got.values() if values.dtype == torch.int8
    )
    for other in ("reference", "cpu"):
        kept.clear()
        run(name, other, static=static)
        assert_agree(got, kept)


@torch.no_grad()
@pytest.mark.parametrize("name", ["GCN", "GraphSAGE", "GIN", "GAT"])
def test_floats_of_whole_models(name: str, looked_at: None, kept: dict[str, Tensor]) -> None:
    """FP32 sums are added in another order, so that a value between two is rounded to the other."""
    run(name, "cuda", precision="fp8")
    got = dict(kept)
    assert len(got) >= 2 and {values.dtype for values in got.values()} == {torch.float8_e4m3fn}
    kept.clear()
    run(name, "reference", precision="fp8")
    assert list(got) == list(kept)
    for stored, want in zip(got.values(), kept.values(), strict=True):
        assert (stored.float() == want.float()).float().mean() >= EQUAL
        assert (stored.float() - want.float()).abs().max() <= 32  # one step of the largest values


@torch.no_grad()
@pytest.mark.parametrize("name", WIDE)
def test_quantized_values_by_scales_of_whole_tensors(
    name: str, looked_at: None, kept: dict[str, Tensor]
) -> None:
    run(name, "cuda", of_tensors=True)
    got = dict(kept)
    assert any(values.dtype == torch.uint8 for values in got.values())
    kept.clear()
    run(name, "reference", of_tensors=True)
    assert_agree(got, kept)
