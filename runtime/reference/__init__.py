"""Kernels of the reference backend: each node by its definition in plain PyTorch; no node is declined."""

from functools import partial
from typing import Any

from torch.fx import GraphModule, Interpreter, Node

from gnnc.ir.nodes import holds_tensor, is_random
from gnnc.ir.quantized import STATIC_RANGE
from gnnc.runtime.program.checks import check_finite, check_values_in_range
from gnnc.runtime.program.emitter import Emitter, may_alias
from gnnc.runtime.program.launches import Expr, expr, variable
from gnnc.runtime.registry import STRUCTURE, kernel
from gnnc.runtime.structure.kernels import PartEmitter

_SCALE = "gnnc.scale.default"
_QUANTIZE = "gnnc.quantize.default"


@kernel("*", backend="reference", name="reference", priority=-100, elements=None)
class Reference:
    """Calls the node's target: an ATen op, a primitive's reference, or a fused submodule's graph."""

    @staticmethod
    def plan(node: Node) -> None:
        """Take any node."""

    @staticmethod
    def emit(plan: None, node: Node, emitter: Emitter) -> None:
        """Write ``v = target(arguments)``."""
        # By position: the target is called as the graph calls it, whatever it is.
        read = _dense if is_random(node) else Emitter.argument
        arguments = [read(emitter, arg) for arg in node.args]
        keywords = {name: emitter.argument(arg) for name, arg in node.kwargs.items()}
        name = emitter.fresh("v")
        emitter.call(emitter.bind(_callable(node, emitter), "op"), arguments, keywords, result=name)
        result = variable(name)
        held = emitter.hold(node.all_input_nodes) if may_alias(node) else ()
        emitter.define(node, result, holds=held)
        for index, user in enumerate(emitter.outputs(node)):
            if user is not None and user is not node:
                emitter.define(user, expr("{}[{}]", result, index), holds=held)
        if emitter.check_finite and str(node.target) in (_SCALE, _QUANTIZE):
            scaled = result if str(node.target) == _SCALE else arguments[0]
            emitter.check_values(node, scaled)
            if STATIC_RANGE in node.meta:
                emitter.check_values_in_range(node, arguments[0])


@kernel(f"{STRUCTURE}*", backend="reference", name="structure_reference", priority=-100)
class StructureReference:
    """Calls the node's target, as ``Reference`` does, in a structure graph."""

    @staticmethod
    def plan(node: Node) -> None:
        """Take any node."""

    @staticmethod
    def emit(plan: None, node: Node, emitter: PartEmitter) -> None:
        """Add the call as it is."""
        emitter.copy(node)


def _dense(emitter: Emitter, value: Any) -> Expr:
    """Return an argument without padding between its rows: the numbers that ops draw depend on the layout."""
    given = emitter.argument(value)
    return emitter.let("m", expr("{}.contiguous()", given)) if holds_tensor(value) else given


def _callable(node: Node, emitter: Emitter) -> Any:
    if node.op == "call_module":
        module = emitter.graph_module.get_submodule(str(node.target))
        assert isinstance(module, GraphModule)
        return partial(_run_checked, module) if emitter.check_finite else module
    assert callable(node.target)
    return node.target


class _Checked(Interpreter):
    """Interpreter of a fused submodule that checks every scale and quantized operand for NaN and Inf."""

    def run_node(self, n: Node) -> Any:
        result = super().run_node(n)
        if str(n.target) == _SCALE:
            check_finite(n.meta.get("layer", ""), result)
        elif str(n.target) == _QUANTIZE:
            quantized = self.fetch_args_kwargs_from_env(n)[0][0]
            check_finite(n.meta.get("layer", ""), quantized)
            if STATIC_RANGE in n.meta:
                check_values_in_range(n.meta.get("layer", ""), n.meta[STATIC_RANGE], quantized)
        return result


def _run_checked(module: GraphModule, *args: Any) -> Any:
    return _Checked(module).run(*args)
