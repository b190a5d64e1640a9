"""A precision that no kernel computes yet: int4 on the reference backend, registered by its name alone."""

from dataclasses import replace

import pytest
import torch
from gnn_graphs import MODELS, arguments, relative_error, run_all
from torch.fx import GraphModule, Interpreter, Node

import gnnc
from gnnc.cost.quantization_error import quantization_errors
from gnnc.errors import UnsupportedError
from gnnc.ir.nodes import qtype_of
from gnnc.ir.qtype import QType
from gnnc.passes.assign import Assign
from gnnc.passes.cache import Cache
from gnnc.passes.fuse import Fuse
from gnnc.passes.lower import Lower
from gnnc.passes.quantize import Quantize
from gnnc.precision import Precision
from gnnc.report.printing import format_graph
from gnnc.runtime.backend import get_backend
from gnnc.target import Target

PASSES = (Assign(), Quantize(), Cache(), Fuse(), Lower())
INT4 = Precision.parse("int4")


def target_with(name: str, precision: Precision) -> Target:
    backend = get_backend(name)
    target = backend.target
    return replace(target, precisions=target.precisions | {precision.name}, lowering=backend)


def lowered(backend: str, precision: Precision = INT4, *, static: bool = False) -> tuple[GraphModule, list]:
    gm = MODELS["gcn"]()
    examples = arguments(gm) if static else None
    gm, ctx = run_all(
        gm, PASSES, precision=precision, examples=examples, target=target_with(backend, precision)
    )
    return gm, ctx.notes


def values_of(gm: GraphModule) -> tuple:
    constants = [n.meta["value"] for n in gm.graph.find_nodes(op="placeholder") if "value" in n.meta]
    given = arguments(MODELS["gcn"]())
    return (*given, *constants)


class Largest(Interpreter):
    """Runs a graph, fused graphs included, and notes the largest magnitude of its quantized values."""

    found: dict[QType, int]

    def run_node(self, n: Node) -> object:
        result = super().run_node(n)
        qtype = qtype_of(n)
        if qtype is not None and isinstance(result, torch.Tensor):
            self.found[qtype] = max(self.found.get(qtype, 0), int(result.int().abs().max()))
        return result

    def call_module(self, target, args, kwargs) -> object:
        inner = type(self)(self.fetch_attr(target))
        inner.found = self.found
        return inner.run(*args)


@pytest.mark.parametrize("static", [False, True], ids=["dynamic", "static"])
def test_int4_runs_on_the_reference_backend(static: bool) -> None:
    gm, _ = lowered("reference", static=static)
    values = values_of(gm)
    interpreter = Largest(gm)
    interpreter.found = {}
    (got,) = interpreter.run(*values)
    assert {qtype.element for qtype in interpreter.found} == {"int4"}
    assert set(interpreter.found.values()) == {7}
    exact = MODELS["gcn"]()
    (want,) = exact(*arguments(exact))
    assert 0.01 < relative_error((got,), (want,)) < 0.5
    assert all(error.relative > 0 for error in quantization_errors(gm, values).values())


def test_the_text_of_a_program_says_int4() -> None:
    gm, _ = lowered("reference")
    text = format_graph(gm)
    assert '"int4/row"' in text and "# i4[N, 24]" in text and "fp32→int4" in text and "int4→fp32" in text
    assert "int8" not in text and "i8[" not in text


def test_a_backend_without_kernels_for_it_says_so_and_runs_the_reference() -> None:
    gm, notes = lowered("cpu")
    assert any("no cpu kernel for int4/row" in note.text for note in notes)
    assert {n.meta["kernel"] for n in gm.graph.nodes if "qgemm" in str(n.target)} == {"reference"}
    values = arguments(gm)
    reference, _ = lowered("reference")
    assert torch.equal(gm(*values)[0], reference(*values)[0])


def test_weights_and_activations_of_different_bits() -> None:
    gm, _ = lowered("reference", Precision.parse("w4a8"))
    found = {qtype_of(n) for g in (gm, *gm.children()) for n in g.graph.nodes} - {None}
    assert {qtype.element for qtype in found} == {"int4", "int8"}


def test_compile_refuses_a_precision_that_is_not_built() -> None:
    with pytest.raises(UnsupportedError, match="int4"):
        gnnc.compile(torch.nn.Linear(2, 2), precision="int4")
