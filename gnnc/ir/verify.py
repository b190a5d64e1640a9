"""Invariants that hold after every pass; a broken one is a bug of the pass just run.

A message says what is wrong, where (stage, node, layer) and what the pass has to do. Graphs are checked
as a whole, then node by node; fused submodules likewise, from inside. ``gnnc.ir.rules`` checks the
arguments of gnnc ops.
"""

import operator
from typing import Any, get_args

import torch
from torch import fx

from gnnc.errors import VerifyError
from gnnc.ir.graph import qtype_rule
from gnnc.ir.nodes import aten_name, is_view, outputs_of, qtype_of
from gnnc.ir.op import NAMESPACE, op_of
from gnnc.ir.qtype import QType
from gnnc.ir.rules import problem_of_arguments
from gnnc.ir.source import Kind, source_of
from gnnc.torch_private import OpOverload, schema

_MODULES = ("_operator", "math", "torch")


def verify(gm: fx.GraphModule, stage: str) -> None:
    """Check ``gm`` after the pass ``stage``.

    Raises:
        VerifyError: names the stage, the node, the invariant that is broken, and what to do.
    """
    problem = _problem_of_graph(gm)
    if problem is not None:
        raise VerifyError(f"after {stage!r}: the graph {problem}")
    for node in gm.graph.nodes:
        problem = _problem(gm, node)
        if problem is not None:
            where = node.meta.get("layer") or "the model's root"
            raise VerifyError(f"after {stage!r}: node {node.name} (in {where}) {problem}")


def _problem_of_graph(gm: fx.GraphModule) -> str | None:
    problem = _problem_of_order(gm)
    if problem is not None:
        return problem
    outputs = gm.graph.find_nodes(op="output")
    if len(outputs) != 1 or outputs[0] is not next(iter(reversed(gm.graph.nodes))):
        return f"has {len(outputs)} outputs, or nodes behind one; end it with one `graph.output(...)`"
    if not isinstance(outputs_of(gm.graph), tuple | list):
        return "returns one value; programs return a tuple: `graph.output((value,))`"
    return None


def _problem_of_order(gm: fx.GraphModule) -> str | None:
    try:
        gm.graph.lint()
    except RuntimeError as error:
        problem = str(error).splitlines()[0]  # the rest is the graph
        return f"is not well formed: {problem}; insert a node before its users, and erase none that has some"
    return None


def _problem(gm: fx.GraphModule, node: fx.Node) -> str | None:
    if node.op == "output":
        return None
    if "val" not in node.meta:
        return "has no meta['val']; insert it with a NodeBuilder, or let `infer_meta` fill it in"
    if node.op == "placeholder":
        return _problem_of_placeholder(node)
    if node.op == "call_module":
        return _problem_of_fused(gm, node)
    if node.op != "call_function":
        return f"is a {node.op}; programs hold calls of ops and graphs only: make it a placeholder or a call"
    return _problem_of_call(node) or _problem_of_qtype(gm, node)


def _problem_of_placeholder(node: fx.Node) -> str | None:
    source, value = source_of(node), node.meta["val"]
    if source is None:
        return "is a placeholder without a source; set meta['source'] to where its value comes from"
    if source.kind not in get_args(Kind):
        return f"has a source of the unknown kind {source.kind!r}; use one of {', '.join(get_args(Kind))}"
    if source.kind == "constant" and "value" not in node.meta:
        return "is a constant without a value; set meta['value']"
    if source.kind == "size" and isinstance(value, torch.Tensor):
        return "is a size, but holds a tensor; give it the kind input, or an integer"
    if source.kind in ("parameter", "buffer") and not isinstance(value, torch.Tensor):
        return f"is a {source.kind}, but holds {value!r}, not a tensor; only tensors are read from the model"
    return None


def _problem_of_fused(gm: fx.GraphModule, node: fx.Node) -> str | None:
    inner = gm.get_submodule(str(node.target))
    if not isinstance(inner, fx.GraphModule):
        return f"calls {node.target}, which is not a graph but a {type(inner).__name__}; inline its ops"
    if "kind" not in node.meta:
        return "is fused without meta['kind']; say which kernel it is for, such as 'gemm'"
    inputs = inner.graph.find_nodes(op="placeholder")
    if len(inputs) != len(node.args):
        return (
            f"gives {len(node.args)} arguments to a fused graph with {len(inputs)} inputs; give each its own"
        )
    for argument, parameter in zip(node.args, inputs, strict=True):
        passed, expected = _dtype(argument), _dtype(parameter)
        if passed is not None and expected is not None and passed != expected:
            return (
                f"gives {passed} to input {parameter.name} of its graph, which takes {expected}; "
                "fuse it again"
            )
        passed, expected = _qtype(argument), _qtype(parameter)
        if passed != expected:
            return (
                f"gives {passed} to input {parameter.name} of its graph, which takes {expected}; "
                "infer its meta"
            )
    return _problem_inside(inner, node) or _problem_of_qtype(gm, node)


def _problem_inside(inner: fx.GraphModule, node: fx.Node) -> str | None:
    problem = _problem_of_order(inner)
    if problem is not None:
        return f"is fused, and its graph {problem}"
    for part in inner.graph.nodes:
        if part.op in ("placeholder", "output"):
            continue
        problem = _problem(inner, part)
        if problem is not None:
            return f"is fused, and its inner node {part.name} {problem}"
    results = outputs_of(inner.graph)
    computed = [_dtype(r) for r in results] if isinstance(results, tuple | list) else _dtype(results)
    value = node.meta["val"]
    declared = [_dtype(v) for v in value] if isinstance(value, tuple | list) else _dtype(value)
    if computed == declared:
        return None
    return f"says that it makes {declared}, but its graph makes {computed}; infer it again"


def _problem_of_call(node: fx.Node) -> str | None:
    if node.target is operator.getitem:
        return _problem_of_getitem(node)
    if not isinstance(node.target, OpOverload):
        if getattr(node.target, "__module__", None) in _MODULES:
            return None
        return f"calls {node.target!r}, which is not an op; define it in gnnc.ir, or write it in ATen ops"
    if schema(node.target).is_mutable:
        return (
            f"mutates its arguments ({node.target}); programs are functional: use the op that returns a copy"
        )
    if op_of(node) is not None:
        return problem_of_arguments(node)
    if node.target.namespace == NAMESPACE:
        return f"calls {node.target}, which no file of gnnc.ir defines; define it there"
    return _problem_of_operands(node)


def _problem_of_getitem(node: fx.Node) -> str | None:
    whole, index = node.args
    value = whole.meta.get("val") if isinstance(whole, fx.Node) else whole
    if not isinstance(value, tuple | list) or not isinstance(index, int):
        return None
    if -len(value) <= index < len(value):
        return None
    return f"takes result {index} of {whole}, which has {len(value)}; take one of 0..{len(value) - 1}"


def _problem_of_operands(node: fx.Node) -> str | None:
    """Refuse ATen ops that compute with quantized values: they know no scale. Views and sizes are allowed."""
    if is_view(node) or node.target is torch.ops.aten.sym_size.int:
        return None
    for argument in node.all_input_nodes:
        if (qtype := qtype_of(argument)) is not None and not _is_conversion_of_input(node, argument, qtype):
            return f"computes with {qtype} of {argument.name}, whose scale it does not know; dequantize first"
    return None


def _is_conversion_of_input(node: fx.Node, argument: fx.Node, qtype: QType) -> bool:
    """Return whether a node converts an argument of the model in floats of 8 bits, which have no scale."""
    return qtype.is_float and argument.op == "placeholder" and aten_name(node) == "_to_copy.default"


def _problem_of_qtype(gm: fx.GraphModule, node: fx.Node) -> str | None:
    declared, computed = node.meta.get("qtype"), qtype_rule(gm, node)
    if declared == computed:
        return None
    return (
        f"says that it holds {_qtype_text(declared)}, but makes {_qtype_text(computed)}; infer its meta again"
    )


def _qtype(value: Any) -> Any:
    return qtype_of(value) if isinstance(value, fx.Node) else None


def _qtype_text(qtype: Any) -> str:
    if isinstance(qtype, tuple):
        return ", ".join(map(_qtype_text, qtype))
    return "no quantized values" if qtype is None else str(qtype)


def _dtype(value: Any) -> Any:
    """Return the dtype of a tensor or of a node's tensor, None for anything else."""
    value = value.meta.get("val") if isinstance(value, fx.Node) else value
    return value.dtype if isinstance(value, torch.Tensor) else None
