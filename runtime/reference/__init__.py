"""The reference backend: every node by its own definition in plain PyTorch. It declines nothing."""

from typing import Any

import torch
from torch.fx import Node

from gnnc.runtime.emitter import Emitter, may_alias
from gnnc.runtime.registry import kernel

_SCALE = "gnnc.scale.default"


@kernel("*", backend="reference", name="reference", priority=-100)
class Reference:
    """Calls the node's target: an ATen op, a primitive's reference, or a fused submodule's graph."""

    @staticmethod
    def plan(node: Node) -> None:
        """Take any node."""

    @staticmethod
    def emit(plan: None, node: Node, emitter: Emitter) -> None:
        """Write ``v = target(arguments)``."""
        arguments = [emitter.argument(arg) for arg in node.args]
        arguments += [f"{name}={emitter.argument(arg)}" for name, arg in node.kwargs.items()]
        name = emitter.fresh("v")
        emitter.line(f"{name} = {emitter.bind(_callable(node, emitter), 'op')}({', '.join(arguments)})")
        held = emitter.hold(node.all_input_nodes) if may_alias(node) else ()
        emitter.define(node, name, holds=held)
        for index, user in enumerate(emitter.outputs(node)):
            if user is not None and user is not node:
                emitter.define(user, f"{name}[{index}]", holds=held)
        if str(node.target) == _SCALE:
            emitter.check_scale(node, name)


def _callable(node: Node, emitter: Emitter) -> Any:
    if node.op == "call_module":
        return emitter.graph_module.get_submodule(str(node.target))
    assert callable(node.target)
    return node.target if not isinstance(node.target, str) else getattr(torch.Tensor, node.target)
