"""Programs of one call, for the tests of a kernel as programs launch it."""

from collections.abc import Callable
from dataclasses import replace
from typing import Any

import torch
from torch import Tensor
from torch.fx import GraphModule
from torch.fx.experimental.proxy_tensor import make_fx

import gnnc.ir  # noqa: F401  (registers torch.ops.gnnc)
from gnnc.ir.graph import infer_qtypes
from gnnc.ir.parts import Parts
from gnnc.ir.qtype import FP8_DTYPES
from gnnc.ir.source import Source
from gnnc.passes.base import Context
from gnnc.passes.fuse import Fuse
from gnnc.passes.join_sums import JoinSums
from gnnc.passes.lower import Lower
from gnnc.precision import FP32
from gnnc.runtime.backend import get_backend
from gnnc.runtime.program.executable import Executable


def program_of(function: Callable[..., Any], *values: Tensor, backend: str) -> Executable:
    """Return the program of a function, for tensors of these sizes."""
    graph_module = make_fx(function, tracing_mode="fake")(*values)
    output = graph_module.graph.output_node()
    output.args = (tuple(output.args) if not isinstance(output.args[0], list | tuple) else output.args[0],)
    return get_backend(backend).executable(_lowered(graph_module, backend))


def _lowered(graph_module: GraphModule, backend: str) -> GraphModule:
    lowering = get_backend(backend)
    for node in graph_module.graph.nodes:
        node.meta["layer"] = ""
        if node.op == "placeholder":
            node.meta["source"] = Source("input", node.name)
        elif node.op == "call_function" and lowering.needs_launch(node):
            node.meta["choice"] = lowering.choose(node)
    return graph_module


def run_on_cuda(function: Callable[..., Any], kernel: str, *values: Tensor) -> Tensor:
    """Return what a program on the CUDA device computes, after checking that one kernel of this name did."""
    given = [value.cuda() for value in values]
    program = program_of(function, *given, backend="cuda")
    assert [name for _, name in program.kernels if name != "reference"] == [kernel]
    first, again = (program(*given)[0] for _ in range(2))
    assert torch.allclose(first, again, rtol=0, atol=0, equal_nan=True), "the bits of two calls differ"
    return first.cpu()


def fused_program_of(function: Callable[..., Any], *values: Tensor, backend: str) -> Executable:
    """Return the program of a function of several results, whose ops are grouped as in a model."""
    graph_module = make_fx(function, tracing_mode="fake")(*values)
    output = graph_module.graph.output_node()
    output.args = (tuple(output.args[0]) if isinstance(output.args[0], list | tuple) else tuple(output.args),)
    for node in graph_module.graph.nodes:
        node.meta["layer"] = ""
        if node.op == "placeholder":
            node.meta["source"] = Source("input", node.name)
    lowering = get_backend(backend)
    context = Context(FP32, target=replace(lowering.target, lowering=lowering))
    parts = Parts(forward=graph_module)
    if JoinSums().applies(parts, context):
        parts = JoinSums().run_parts(parts, context)
    fused = Fuse().run(parts.forward, context)
    infer_qtypes(fused)
    parts = Parts(forward=fused)
    return lowering.executable(Lower().run_parts(parts, context).forward)


def run_fused_on_cuda(
    function: Callable[..., Any], kernels: list[str], *values: Tensor
) -> tuple[Tensor, ...]:
    """Return what a program of fused groups computes on the CUDA device, after checking its kernels."""
    given = [value.cuda() for value in values]
    program = fused_program_of(function, *given, backend="cuda")
    assert [name for _, name in program.kernels] == kernels
    first, again = (program(*given) for _ in range(2))
    assert all(torch.equal(_numbers(a), _numbers(b)) for a, b in zip(first, again, strict=True))
    return tuple(value.cpu() for value in first)


def _numbers(value: Tensor) -> Tensor:
    """Return a tensor without NaN, of a type that can be compared."""
    return (value.float() if value.dtype in FP8_DTYPES else value).nan_to_num()
