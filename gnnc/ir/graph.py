"""Functions on torch.fx graphs that every stage shares."""

from typing import Any

from torch import fx

from gnnc.ir.nodes import arguments, first_operand, is_result, is_view, outputs_of, result_index
from gnnc.ir.op import op_of
from gnnc.torch_private import FakeTensor, FakeTensorMode, LazyGraphModule, enable_python_dispatcher


def clone(gm: fx.GraphModule) -> fx.GraphModule:
    """Return a copy of ``gm`` with nodes of its own; tensors and submodules are shared."""
    graph = fx.Graph()
    graph.output(graph.graph_copy(gm.graph, mapping := {}))
    for old, new in mapping.items():
        new.meta = dict(old.meta)
    copied = LazyGraphModule(gm, graph, type(gm).__name__)
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
    """Fill in ``meta["val"]`` and ``meta["layer"]`` where a node lacks them, and every ``meta["qtype"]``."""
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
    infer_qtypes(gm)


def infer_qtypes(gm: fx.GraphModule) -> None:
    """Set ``meta["qtype"]`` of every node whose tensor holds quantized values, also in submodules.

    The value is a ``QType``; for a node with several results a tuple of ``QType`` or None. Placeholders
    of ``gm`` keep theirs.
    """
    for node in gm.graph.nodes:
        if node.op == "call_module":
            _infer_qtypes_inside(gm.get_submodule(str(node.target)), node)
        if node.op in ("call_function", "call_module"):
            set_qtype(node, qtype_rule(gm, node))


def _infer_qtypes_inside(inner: Any, call: fx.Node) -> None:
    if not isinstance(inner, fx.GraphModule):
        return
    for parameter, argument in zip(placeholders(inner), call.args, strict=False):
        set_qtype(parameter, argument.meta.get("qtype") if isinstance(argument, fx.Node) else None)
    infer_qtypes(inner)


def set_qtype(node: fx.Node, qtype: Any) -> None:
    """Set or delete ``meta["qtype"]``."""
    if qtype is None:
        node.meta.pop("qtype", None)
    else:
        node.meta["qtype"] = qtype


def qtype_rule(gm: fx.GraphModule, node: fx.Node) -> Any:
    """Return the type that ``meta["qtype"]`` of a call must hold, by its op and its operands' meta."""
    if node.op == "call_module":
        return _qtype_of_results(gm.get_submodule(str(node.target)))
    if is_result(node):
        qtypes, index = first_operand(node).meta.get("qtype"), result_index(node)
        return qtypes[index] if isinstance(qtypes, tuple) and isinstance(index, int) else None
    if is_view(node):
        return first_operand(node).meta.get("qtype")
    op = op_of(node)
    return None if op is None or op.qtype is None else op.qtype(arguments(node))


def _qtype_of_results(inner: Any) -> Any:
    if not isinstance(inner, fx.GraphModule):
        return None
    results = outputs_of(inner.graph)
    if isinstance(results, fx.Node):
        return results.meta.get("qtype")
    found = tuple(result.meta.get("qtype") for result in results)
    return found if any(found) else None


def _layer_of_inputs(node: fx.Node) -> str:
    layers = [n.meta["layer"] for n in node.all_input_nodes if n.meta.get("layer")]
    return layers[0] if layers else ""


def _infer(gm: fx.GraphModule, node: fx.Node) -> Any:
    args, kwargs = fx.map_arg((node.args, node.kwargs), lambda n: n.meta["val"])
    if node.op == "call_module":
        return gm.get_submodule(str(node.target))(*args, **kwargs)
    assert callable(node.target), node.format_node()
    return node.target(*args, **kwargs)
