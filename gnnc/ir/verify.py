"""Invariants that hold after every pass; a broken one is a bug of the pass just run."""

import operator
from typing import Any

import torch
from torch import fx

from gnnc.errors import VerifyError
from gnnc.ir.op import op_of
from gnnc.ir.source import source_of

_INTEGER_OPERANDS = {"qgemm": (0, 1), "qspmm": (3,), "qsddmm": (2, 3)}


def verify(gm: fx.GraphModule, stage: str) -> None:
    """Check ``gm`` after the pass ``stage``.

    Raises:
        VerifyError: names the stage, the node and the invariant that is broken.
    """
    try:
        gm.graph.lint()
    except RuntimeError as error:
        raise VerifyError(f"after {stage!r}: {error}") from error
    for node in gm.graph.nodes:
        problem = _problem(gm, node)
        if problem is not None:
            where = node.meta.get("layer") or "the model's root"
            raise VerifyError(f"after {stage!r}: node {node.name} (in {where}) {problem}")


def _problem(gm: fx.GraphModule, node: fx.Node) -> str | None:
    if node.op == "output":
        return None
    if "val" not in node.meta:
        return "has no meta['val']"
    if node.op == "placeholder":
        return None if source_of(node) is not None else "is a placeholder without a source"
    if node.op == "call_module":
        inner = gm.get_submodule(str(node.target))
        return None if isinstance(inner, fx.GraphModule) else f"calls {node.target}, not a graph"
    if node.op != "call_function":
        return f"is a {node.op}; programs hold calls of ops and graphs only"
    return _problem_of_call(node)


def _problem_of_call(node: fx.Node) -> str | None:
    if not isinstance(node.target, torch._ops.OpOverload):
        module = getattr(node.target, "__module__", None)
        allowed = node.target is operator.getitem or module in ("_operator", "math", "torch")
        return None if allowed else f"calls {node.target!r}, which is not an op"
    if node.target._schema.is_mutable:
        return f"mutates its arguments ({node.target}); programs are functional"
    op = op_of(node)
    if op is None:
        return None
    for position in _INTEGER_OPERANDS.get(op.name, ()):
        value = _value(node.args[position])
        if isinstance(value, torch.Tensor) and value.dtype != torch.int8:
            return f"takes {value.dtype} where {op.name} needs int8 (argument {position})"
    return None


def _value(arg: Any) -> Any:
    return arg.meta.get("val") if isinstance(arg, fx.Node) else arg
