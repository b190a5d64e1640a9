"""Joint: append the computation of the gradients to the forward graph.

The forward graph is differentiated as it stands, by torch's autograd on its own fake tensors: symbols, layers
and sources stay, and the gradient of a primitive is what its rule says. What the gradients need of the graph
alone, such as the transpose of a CSR, moves to the structure graph.
"""

from collections.abc import Iterator, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, replace
from typing import Any, ClassVar, NoReturn

import sympy
import torch
from torch import Tensor, fx
from torch.fx import Node

from gnnc.capture.functionalize import without_writes
from gnnc.errors import UnsupportedError
from gnnc.ir.body import name_operands
from gnnc.ir.edge_gradients import EXTREMA
from gnnc.ir.graph import fake_mode_of, infer_meta, placeholders
from gnnc.ir.nodes import is_result, outputs_of
from gnnc.ir.parts import BACKWARD_LAYER, DIFFERENTIABLE, GRADIENTS, Parts
from gnnc.ir.source import Source, source_of, wants_gradient
from gnnc.ir.vjp import operand_of, spell_out
from gnnc.passes.base import Context
from gnnc.passes.normalize import simplify
from gnnc.passes.rewrite.attention_gradients import join_attention_gradients
from gnnc.passes.rewrite.body_attention_gradients import join_body_attention_gradients
from gnnc.passes.rewrite.gradient_nodes import simplify_gradients
from gnnc.passes.rewrite.joint_examples import joint_examples
from gnnc.passes.rewrite.joint_structure import move_to_structure
from gnnc.passes.rewrite.recurrent_cells import WITHOUT_WRITES
from gnnc.passes.rewrite.slice_gradients import join_slice_gradients
from gnnc.torch_private import (
    FakeTensorMode,
    LazyGraphModule,
    OpOverload,
    enable_python_dispatcher,
    proxy_graph,
    rename,
    schema,
    trace_symbolic,
)

_NO_FORMULA = "WarnNotImplemented"
"""Name of torch's node for an op without an autograd formula, which warns and passes no gradient on."""


@dataclass(frozen=True, slots=True)
class Joint:
    """Append the gradients of the placeholders that want one, and of their outputs the tangents as inputs.

    ``meta["gradients"]`` of the joint graph lists the placeholders that have a gradient: its last outputs.
    """

    name: ClassVar[str] = "joint"

    def applies(self, parts: Parts, ctx: Context) -> bool:
        """Return whether a gradient is wanted."""
        return any(map(wants_gradient, placeholders(parts.forward)))

    def run_parts(self, parts: Parts, ctx: Context) -> Parts:
        """Return the program with the joint graph as its forward graph."""
        joint = _differentiated(parts.forward)
        if not without_writes(joint.graph):
            _refuse_writes(joint.graph)
        simplify(joint)
        simplify_gradients(joint, parts.structure)
        join_slice_gradients(joint)
        join_attention_gradients(joint, ctx.target.attention_backward)
        join_body_attention_gradients(joint, ctx.target.body_attention_backward, ctx)
        _fill_empty_results(joint)
        if parts.structure is not None:
            move_to_structure(joint, parts.structure)
        if ctx.examples is not None:
            joint_examples(parts.forward, joint, parts.structure, ctx)
        return replace(parts, forward=joint)


def _refuse_writes(graph: fx.Graph) -> NoReturn:
    write = next(node for node in graph.nodes if _is_write(node))
    raise UnsupportedError(
        f"[{_layer_of(write)}] its gradient writes into a tensor in place ({write.target}), and the write "
        "has no other form: train it in eager PyTorch, or write the gradient without writes"
    )


def _is_write(node: Node) -> bool:
    return isinstance(node.target, OpOverload) and schema(node.target).is_mutable


def _layer_of(node: Node) -> str:
    return str(node.meta.get("layer", "")).removesuffix(BACKWARD_LAYER).rstrip() or "the model"


def _fill_empty_results(gm: fx.GraphModule) -> None:
    """Replace results without elements, as a batch norm in eval() has, by constants, so that it may fuse."""
    for node in list(gm.graph.nodes):
        value = node.meta.get("val")
        if (
            not is_result(node)
            or not isinstance(value, Tensor)
            or not any(size == 0 for size in _fixed(value))
        ):
            continue
        options = {"dtype": value.dtype, "device": value.device}
        with gm.graph.inserting_before(node):
            empty = gm.graph.call_function(torch.ops.aten.full.default, (list(value.shape), 0), options)
        empty.meta = dict(node.meta)
        node.replace_all_uses_with(empty)


def _fixed(value: Tensor) -> list[int]:
    return [size for size in value.shape if isinstance(size, int)]


def _differentiated(gm: fx.GraphModule) -> fx.GraphModule:
    inputs = placeholders(gm)
    mode = fake_mode_of(gm)
    assert mode is not None, "a graph whose gradients are wanted holds tensors"
    _forget_pending_symbols(mode)
    given = [node for node in inputs if not isinstance(node.meta["val"], int)]
    trace = _Trace(gm, given)
    with _traceable(gm), mode, enable_python_dispatcher():
        outputs, _ = trace.forward([node.meta["val"] for node in given])
        differentiable = [i for i, value in enumerate(outputs) if _has_gradient(value)]
        tangents = [torch.empty_like(outputs[i]).detach() for i in differentiable]
        values = [node.meta["val"] for node in given]
    if not differentiable:
        return gm
    _forget_pending_symbols(mode)
    known = _size_guards(mode)
    with _traceable(gm):
        joint = trace_symbolic(lambda *args: trace.joint(args, differentiable), (*values, *tangents))
    if asked := _size_guards(mode)[len(known) :]:
        raise UnsupportedError(
            "[gnnc.joint] the gradient of this model is another one for other sizes of its arguments (it "
            f"asks whether {asked[0].expr}), and a compiled program serves all sizes: train it in eager "
            "PyTorch, or compile the submodules around the step, which may be a cumprod or a prod"
        )
    return _annotated(joint, gm, trace, differentiable)


def _size_guards(mode: FakeTensorMode) -> list[Any]:
    """Return the questions about sizes that traces in a mode have asked, but whether a size is 2 or more.

    That is assumed of the sizes of arguments, and may be of their differences, as ``x[n:]`` has rows.
    """
    env: Any = mode.shape_env
    return [] if env is None else [guard for guard in env.guards if not _is_lower_bound(guard.expr)]


def _is_lower_bound(condition: Any) -> bool:
    return isinstance(condition, sympy.Ge | sympy.Gt) and condition.rhs in (0, 1, 2)


@dataclass(slots=True)
class _Trace:
    """Function of a graph's inputs and tangents to its outputs and gradients, to be traced.

    Attributes:
        gm: the graph.
        given: its placeholders that are arguments of the function; the others are numbers.
        layer: the layer of the nodes that are being traced.
        gradients: the placeholders that have a gradient.
    """

    gm: fx.GraphModule
    given: Sequence[Node]
    layer: str = ""
    gradients: tuple[Node, ...] = ()

    def enter(self, layer: str) -> None:
        """Let the nodes that are traced from now on be of a layer."""
        graph = proxy_graph()
        for node in reversed(graph.nodes) if graph is not None else ():
            if "layer" in node.meta or node.op == "placeholder":
                break
            node.meta["layer"] = self.layer
        self.layer = layer

    def forward(self, values: Sequence[Any]) -> tuple[list[Any], dict[Node, Tensor]]:
        """Run the graph; return its outputs, and the leaf of each placeholder that wants a gradient."""
        with torch.enable_grad():
            leaves = {
                node: value.detach().requires_grad_()
                for node, value in zip(self.given, values, strict=True)
                if wants_gradient(node)
            }
            taken = iter([leaves.get(node, value) for node, value in zip(self.given, values, strict=True)])
            known = set(self.given)
            args = [next(taken) if node in known else node.meta["val"] for node in placeholders(self.gm)]
            return list(_Layered(self.gm, self).run(*args)), leaves

    def joint(self, args: Sequence[Any], differentiable: Sequence[int]) -> list[Any]:
        """Return the outputs of the graph and the gradients of ``gradients``."""
        values, tangents = args[: len(self.given)], args[len(self.given) :]
        outputs, leaves = self.forward(values)
        with torch.enable_grad(), self._named_errors():
            found = torch.autograd.grad(
                [outputs[i] for i in differentiable], list(leaves.values()), list(tangents), allow_unused=True
            )
        gradients = {node: grad for node, grad in zip(leaves, found, strict=True) if grad is not None}
        self.gradients = tuple(gradients)
        self.enter("")
        return [*(_detached(value) for value in outputs), *gradients.values()]

    @contextmanager
    def _named_errors(self) -> Iterator[None]:
        """Name the layer whose gradient cannot be traced."""
        try:
            yield
        except RuntimeError as error:
            reason = (str(error).strip().splitlines() or [type(error).__name__])[0]
            layer = self.layer.removesuffix(BACKWARD_LAYER).rstrip() or "the model"
            raise UnsupportedError(
                f"[{layer}] has an op without a gradient that can be compiled ({reason}): detach its "
                "operands, freeze the parameters before it, or train it in eager PyTorch if it trains there"
            ) from error


class _Layered(fx.Interpreter):
    """Interpreter that tells the trace the layer of each node, also when autograd comes back to it."""

    def __init__(self, gm: fx.GraphModule, trace: _Trace) -> None:
        super().__init__(gm)
        self._trace = trace

    def call_function(self, target: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        if target is torch.ops.gnnc.message.default:
            args = _spelled_out(args)
        return super().call_function(WITHOUT_WRITES.get(target, target), args, kwargs)

    def run_node(self, n: Node) -> Any:
        layer = str(n.meta.get("layer", ""))
        if n.op == "call_function":
            self._trace.enter(layer)
        result = super().run_node(n)
        for value in result if isinstance(result, tuple | list) else [result]:
            if n.op == "call_function" and _has_gradient(value) and value.grad_fn is not None:
                value.grad_fn.register_prehook(
                    lambda _: self._trace.enter(f"{layer} {BACKWARD_LAYER}".strip())
                )
                if value.grad_fn.name().endswith(_NO_FORMULA):
                    value.grad_fn.register_prehook(lambda _: _refuse_dropped(n.target, layer))
        return result


def _refuse_dropped(target: Any, layer: str) -> NoReturn:
    raise UnsupportedError(
        f"[{layer or 'the model'}] has an op without a gradient ({target}: it has no autograd formula), "
        "which would drop the gradients of all before it: give it one with "
        "torch.library.register_autograd, or detach its operands"
    )


def _spelled_out(args: tuple[Any, ...]) -> tuple[Any, ...]:
    """Return the arguments of a ``message``, whose body computes an extremum as its gradient does again."""
    rowptr, col, body, reduce, *groups, num_dst = args
    if not EXTREMA & set(reduce.split(",")):
        return args
    operands = name_operands(groups)
    body = spell_out(body, tuple(operand_of(name, tensor) for name, tensor in operands.items()))
    return rowptr, col, body, reduce, *groups, num_dst


def _has_gradient(value: Any) -> bool:
    return isinstance(value, Tensor) and value.requires_grad


def _detached(value: Any) -> Any:
    return value.detach() if isinstance(value, Tensor) else value


@contextmanager
def _traceable(gm: fx.GraphModule) -> Iterator[None]:
    """Run backward passes in this thread, whose modes trace them; on a GPU they have threads of their own.

    LSTMs are split into their steps. Torch would trace one whose input needs no gradient as a call of oneDNN
    that keeps nothing for its backward pass, which then reads beyond its memory.
    """
    has_lstm = any(node.target is torch.ops.aten.lstm.input for node in gm.graph.nodes)
    with ExitStack() as stack:
        stack.enter_context(torch.autograd.set_multithreading_enabled(False))
        stack.enter_context(torch.autograd.set_detect_anomaly(False))  # values of a trace are never computed
        if has_lstm:
            stack.enter_context(_without_onednn())
        yield


@contextmanager
def _without_onednn() -> Iterator[None]:
    """Turn oneDNN off in all threads; ``torch.backends.mkldnn.flags`` would warn of TF32."""
    enabled, torch.backends.mkldnn.enabled = torch.backends.mkldnn.enabled, False
    try:
        yield
    finally:
        torch.backends.mkldnn.enabled = enabled


def _forget_pending_symbols(mode: FakeTensorMode) -> None:
    """Forget the sizes that the structure graph made: a trace of the rest would look for their origin."""
    env: Any = mode.shape_env
    if env is not None:
        env.pending_fresh_unbacked_symbols.clear()


def _annotated(
    traced: fx.GraphModule, gm: fx.GraphModule, trace: _Trace, differentiable: Sequence[int]
) -> fx.GraphModule:
    """Return the traced graph with the sources, layers and names of the graph that it came from."""
    graph = traced.graph
    nodes = list(graph.find_nodes(op="placeholder"))
    for node, original in zip(nodes, trace.given, strict=False):
        node.meta = {**original.meta, "val": node.meta["val"]}
        rename(node, original.name)
        node.target = node.name
    for node, number in zip(nodes[len(trace.given) :], differentiable, strict=True):
        node.meta.update(source=Source("tangent", str(number)), layer="")
        rename(node, f"tangent_{number}")
        node.target = node.name
    _add_numbers(graph, gm, trace)
    _lift_constants(traced)
    graph.output_node().args = (tuple(outputs_of(graph)),)
    joint = LazyGraphModule(gm, graph, type(gm).__name__)
    joint.meta = dict(gm.meta)
    joint.meta[DIFFERENTIABLE] = tuple(differentiable)
    joint.meta[GRADIENTS] = tuple(_source(node) for node in trace.gradients)
    infer_meta(joint)
    return joint


def _source(node: Node) -> Source:
    source = source_of(node)
    assert source is not None
    return source


def _add_numbers(graph: fx.Graph, gm: fx.GraphModule, trace: _Trace) -> None:
    """Add the placeholders that are numbers, which the trace has as such, so that arguments stay in order."""
    known = set(trace.given)
    missing = [node for node in placeholders(gm) if node not in known]
    if not missing:
        return
    first = next(iter(graph.nodes))
    for original in missing:
        with graph.inserting_before(first):
            node = graph.placeholder(original.name)
        node.meta = dict(original.meta)


def _lift_constants(traced: fx.GraphModule) -> None:
    """Make tensors that a gradient rule creates from numbers inputs of the kind ``constant``."""
    graph = traced.graph
    last = list(graph.find_nodes(op="placeholder"))[-1]
    for node in list(graph.nodes):
        if node.op != "get_attr":
            continue
        value = getattr(traced, str(node.target))
        if not isinstance(value, Tensor):
            raise UnsupportedError(
                f"[{node.meta.get('layer') or 'the model'}] the gradient holds {node.target}, which is no "
                "tensor: train this model in eager PyTorch"
            )
        with graph.inserting_after(last):
            last = graph.placeholder(f"constant_{node.name}")
        last.meta = {
            "val": node.meta["val"],
            "layer": node.meta.get("layer", ""),
            "source": Source("constant", str(node.target)),
            "value": value,
        }
        node.replace_all_uses_with(last)
        graph.erase_node(node)
