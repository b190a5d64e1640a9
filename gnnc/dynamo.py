"""``torch.compile(model, backend="gnnc")``: the same compiler behind TorchDynamo.

Dynamo hands over a graph whose weights are inputs and whose symbolic sizes are inputs too. Here the
weights become parameters and buffers again, under their own names, and the sizes are read off the
tensors that have them; from there on ``gnnc.compile`` does what it always does.

Self loops drop edges by a mask, pooling may read a size from a tensor, and a batch norm's momentum is a
number. For one program instead of several pieces with eager code between them, set
``capture_dynamic_output_shape_ops``, ``capture_scalar_outputs`` and ``specialize_float`` of
``torch._dynamo.config`` to True; with ``dynamic=True`` one program serves graphs of every size.
"""

import copy
import inspect
import re
from collections.abc import Callable, Mapping, Sequence
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn
from torch.fx import GraphModule, Node

from gnnc.api import CompiledModel, compile
from gnnc.errors import GnncError

_OWNED = re.compile(r"(?:\.|\.__dict__\[')_(parameters|buffers)(?:'\])?\['(\w+)'\]$")
_MODULE = re.compile(r"\._modules\['(\w+)'\]")


def backend(
    graph_module: GraphModule, example_inputs: Sequence[Any], *, options: Mapping[str, Any] | None = None
) -> Callable[..., Any]:
    """Compile a graph that Dynamo captured.

    Args:
        graph_module: Dynamo's graph.
        example_inputs: one for each of its placeholders; not read.
        options: arguments of ``gnnc.compile``: ``options={"precision": "fp32"}``.

    Raises:
        GnncError: an option is none of ``gnnc.compile``, or its value means nothing.
    """
    given = dict(options or {})
    try:
        compiled = compile(FromDynamo(graph_module), **given)
    except TypeError as error:
        raise GnncError(
            f'torch.compile(backend="gnnc"): {error}; options are those of gnnc.compile'
        ) from None
    return Runner(compiled)


class FromDynamo(nn.Module):
    """Dynamo's graph as a module: weights are its own, sizes are read off tensors.

    Attributes:
        graph: Dynamo's graph, without inputs for sizes.
        weights: (position among Dynamo's inputs, module that holds it, in which table, its name there).
            Not the table itself: an export that fails leaves another in its place.
        arguments: positions of the other inputs, those that ``forward`` takes.
        same_sizes: pairs of (position, dimension) whose sizes are one symbol of Dynamo's.
        fixed_sizes: (argument, dimension) pairs whose size Dynamo wrote into the graph as a number.
    """

    def __init__(self, graph_module: GraphModule) -> None:
        super().__init__()
        paths = [_source_of(node) for node in graph_module.graph.find_nodes(op="placeholder")]
        # Dynamo reads its own graph again afterwards.
        graph_module = GraphModule(graph_module, copy.deepcopy(graph_module.graph))
        inputs = graph_module.graph.find_nodes(op="placeholder")
        sizes = {node for node in inputs if _read_off(node, inputs)}
        self.weights: list[tuple[int, nn.Module, str, str]] = []
        self.arguments: list[int] = []
        for position, node in enumerate(inputs):
            if node not in sizes and not self._own(position, paths[position]):
                self.arguments.append(position)
        self.order = [position for position, node in enumerate(inputs) if node not in sizes]
        for node in sizes:
            graph_module.graph.erase_node(node)
        graph_module.recompile()
        self.graph = graph_module
        self.same_sizes = _same_sizes({position: inputs[position] for position in self.arguments})
        # What messages call the arguments, and what tells edges from nodes.
        names = _names([paths[position] for position in self.arguments])
        vars(self)["forward"] = _named(self._run, names)
        self.fixed_sizes = {
            (name, dim)
            for name, position in zip(names, self.arguments, strict=True)
            for dim in _fixed(inputs[position])
        }
        self.eval()

    def _run(self, *arguments: Any) -> Any:
        """Run the graph on the inputs that are neither weights nor sizes."""
        values = dict(zip(self.arguments, arguments, strict=True))
        for (one, dim), (other, other_dim) in self.same_sizes:
            torch._check(values[one].size(dim) == values[other].size(other_dim))
        values.update({position: vars(owner)[kind][name] for position, owner, kind, name in self.weights})
        return self.graph(*(values[position] for position in self.order))

    def _own(self, position: int, path: str) -> bool:
        """Register an empty parameter or buffer for an input that is a weight; return False for others."""
        owned = _OWNED.search(path)
        if owned is None:
            return False
        kind, name = owned.groups()
        owner: nn.Module = self
        for part in _MODULE.findall(path):
            if part not in owner._modules:
                owner.add_module(part, nn.Module())
            owner = owner.get_submodule(part)
        register = owner.register_parameter if kind == "parameters" else owner.register_buffer
        register(name, None)
        self.weights.append((position, owner, f"_{kind}", name))
        return True


class Runner:
    """Callable that Dynamo calls with all inputs of its graph.

    Attributes:
        compiled: the compiled model, to look inside.
    """

    def __init__(self, compiled: CompiledModel) -> None:
        self.compiled = compiled
        model = compiled.model
        assert isinstance(model, FromDynamo)
        self._weights, self._arguments = model.weights, model.arguments

    def __call__(self, *inputs: Any) -> Any:
        """Run the compiled model on Dynamo's inputs."""
        for position, owner, kind, name in self._weights:
            vars(owner)[kind][name] = inputs[position]
        return self.compiled(*(inputs[position] for position in self._arguments))


def _names(paths: Sequence[str]) -> list[str]:
    """Parameter names: ``edge_index`` for ``L['edge_index']``."""
    names: list[str] = []
    for number, path in enumerate(paths):
        name = re.sub(r"\W+", "_", path.removeprefix("L")).strip("_")
        names.append(name if name.isidentifier() and name not in names else f"argument_{number}")
    return names


def _named(function: Callable[..., Any], names: Sequence[str]) -> Callable[..., Any]:
    """``function`` of positional arguments with these parameter names."""
    kind = inspect.Parameter.POSITIONAL_OR_KEYWORD
    forward = partial(function)
    parameters = [inspect.Parameter(name, kind) for name in names]
    vars(forward)["__signature__"] = inspect.Signature(parameters)
    return forward


def _fixed(node: Node) -> list[int]:
    shape = node.meta["example_value"].shape if _is_tensor(node) else ()
    return [dim for dim, size in enumerate(shape) if isinstance(size, int)]


def _same_sizes(inputs: Mapping[int, Node]) -> list[tuple[tuple[int, int], tuple[int, int]]]:
    """Return the pairs of dimensions, each (input, dimension), that have one size.

    Dynamo's graph shows equal sizes in the example shapes alone: a comparison of sizes leaves no node in it.
    """
    first: dict[Any, tuple[int, int]] = {}
    pairs = []
    for position, node in inputs.items():
        shape = node.meta["example_value"].shape if _is_tensor(node) else ()
        for dim, size in enumerate(shape):
            if isinstance(size, torch.SymInt):
                known = first.setdefault(size.node.expr, (position, dim))
                pairs += [(known, (position, dim))] if known != (position, dim) else []
    return pairs


def _source_of(node: Node) -> str:
    source = getattr(node, "_dynamo_source", None)
    if source is None:
        return ""
    name = source.name
    return name() if callable(name) else name


def _read_off(size: Node, inputs: Sequence[Node]) -> bool:
    """Replace an input that is a size by that size of a tensor input; False where none has it."""
    value = size.meta.get("example_value")
    if not isinstance(value, torch.SymInt):
        return False
    found = _owner(value, inputs)
    if found is None:
        return False
    tensor, dim = found
    graph = size.graph
    with graph.inserting_after(inputs[-1]):
        read = graph.call_method("size", (tensor, dim))
    read.meta = dict(size.meta)
    size.replace_all_uses_with(read)
    return True


def _owner(value: torch.SymInt, inputs: Sequence[Node]) -> tuple[Node, int] | None:
    for node in inputs:
        shape = node.meta["example_value"].shape if _is_tensor(node) else ()
        for dim, size in enumerate(shape):
            if isinstance(size, torch.SymInt) and size.node.expr == value.node.expr:
                return node, dim
    return None


def _is_tensor(node: Node) -> bool:
    return isinstance(node.meta.get("example_value"), Tensor)
