"""Small tools on torch.fx graphs that every stage shares."""

from typing import Any

import torch
from torch import fx

from gnnc.torch_private import FakeTensor, FakeTensorMode, enable_python_dispatcher


def clone(gm: fx.GraphModule) -> fx.GraphModule:
    """Return a copy of ``gm`` with nodes of its own; tensors and submodules are shared."""
    graph = fx.Graph()
    graph.output(graph.graph_copy(gm.graph, mapping := {}))
    for old, new in mapping.items():
        new.meta = dict(old.meta)
    copied = fx.GraphModule(gm, graph, type(gm).__name__)
    copied.meta = dict(gm.meta)
    return copied


def placeholders(gm: fx.GraphModule) -> list[fx.Node]:
    """Return the inputs of ``gm`` in call order."""
    return [node for node in gm.graph.nodes if node.op == "placeholder"]


def output_node(gm: fx.GraphModule) -> fx.Node:
    """Return the output node."""
    return next(node for node in reversed(gm.graph.nodes) if node.op == "output")


def fake_mode_of(gm: fx.GraphModule) -> FakeTensorMode | None:
    """Return the fake mode of the graph's meta values, or None where it has none."""
    for node in gm.graph.nodes:
        value = node.meta.get("val")
        if isinstance(value, FakeTensor):
            return value.fake_mode
    return None


def infer_meta(gm: fx.GraphModule) -> None:
    """Give ``meta["val"]`` to every node that lacks it, and ``meta["layer"]`` from its inputs."""
    mode = fake_mode_of(gm) or FakeTensorMode(allow_non_fake_inputs=True)
    for node in gm.graph.nodes:
        if node.op in ("placeholder", "output"):
            continue
        if "layer" not in node.meta:
            node.meta["layer"] = _layer_of_inputs(node)
        if "val" not in node.meta:
            # Without the dispatcher, a decomposition in C++ would fix symbolic sizes to their examples.
            with mode, enable_python_dispatcher():
                node.meta["val"] = _infer(gm, node)


def _layer_of_inputs(node: fx.Node) -> str:
    layers = [n.meta["layer"] for n in node.all_input_nodes if n.meta.get("layer")]
    return layers[0] if layers else ""


def _infer(gm: fx.GraphModule, node: fx.Node) -> Any:
    args, kwargs = fx.map_arg((node.args, node.kwargs), lambda n: n.meta["val"])
    if node.op == "call_module":
        return gm.get_submodule(str(node.target))(*args, **kwargs)
    assert callable(node.target), node.format_node()
    return node.target(*args, **kwargs)


def symbolic_shape(node: fx.Node) -> tuple[Any, ...]:
    """Return the sizes of a tensor node (ints or SymInts), or () for anything else."""
    value = node.meta.get("val")
    return tuple(value.shape) if isinstance(value, torch.Tensor) else ()


def node_arg(node: fx.Node, position: int = 0) -> fx.Node:
    """Return an argument that must be a node."""
    found = node.args[position]
    assert isinstance(found, fx.Node), f"argument {position} of {node.format_node()} is not a node"
    return found
