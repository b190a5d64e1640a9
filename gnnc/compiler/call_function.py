"""The function that gathers the values of one call and hands them to the executable, written as Python."""

from collections.abc import Callable, Sequence
from functools import partial
from typing import Any

import torch
from torch import Tensor
from torch.fx import Node

from gnnc.capture.export import Captured
from gnnc.capture.sparse_results import holds_matrices, put_together
from gnnc.capture.value_guards import test_of
from gnnc.compiler.index_checks import Bounds
from gnnc.errors import CaptureError, InputError, UnsupportedError
from gnnc.ir.graph import placeholders
from gnnc.ir.nodes import outputs_of
from gnnc.ir.parts import RESULTS, Parts
from gnnc.ir.source import Source, source_of
from gnnc.runtime.program.checks import storage_check
from gnnc.runtime.program.launches import expr, variable
from gnnc.runtime.program.seed import draw_seed
from gnnc.runtime.program.sizes import Sizes
from gnnc.tensor_state import storage_fault
from gnnc.torch_private import pytree


def owner_of(model: torch.nn.Module, source: Source) -> tuple[torch.nn.Module, str]:
    """Return the module that holds a parameter or buffer, and its name there."""
    path, _, name = source.name.rpartition(".")
    return model.get_submodule(path), name


class CallWriter:
    """Writer of the function that gathers a program's values and hands them to the executable."""

    def __init__(
        self,
        model: torch.nn.Module,
        captured: Captured,
        parts: Parts,
        bounds: Bounds,
        features: Callable[..., Any] | None = None,
    ) -> None:
        self._model = model
        self._bounds = bounds
        self._captured = captured
        self._compute = parts.forward
        self._structure = parts.structure
        self._features = parts.features
        self._run_features = features
        self._sizes = Sizes(inline=True)
        self._scope: dict[str, Any] = {}
        self._weights: list[tuple[str, str, str]] = []
        self._inputs = {name: f"x{i}" for i, name in enumerate(captured.call.names)}
        self._learn_inputs()

    def compile(
        self, execute: Callable[..., Any], runner: Callable[..., Any] | None, *, finish: bool = True
    ) -> Callable[[Sequence[Tensor]], Any]:
        """Return ``run(tensors)``."""
        self._weights = []
        unpack = [f"{', '.join(self._inputs.values())}, = tensors"] if self._inputs else []
        lines: list[str] = []
        if self._bounds:
            lines.append("check_bounds(tensors)")
        if self._structure is not None and runner is not None:
            values = [self._value(node) for node in placeholders(self._structure)]
            lines.append(f"s = structure({', '.join(values)})")
            self._learn_structure()
        if self._features is not None:
            values = [self._value(node) for node in placeholders(self._features)]
            lines.append(f"f = features({', '.join(values)})")
        arguments = [self._value(node) for node in placeholders(self._compute)]
        lines = self._fetch_weights() + unpack + self._check_storage() + lines
        outputs = f"execute({', '.join(arguments)})"
        finisher = self._finisher() if finish else None
        if finisher is not None:
            outputs = f"finish({outputs})"
        elif finish:
            outputs += "[0]"
        lines.append(f"return {outputs}")
        source = "def run(tensors):\n" + "".join(f"    {line}\n" for line in lines)
        scope = {
            **self._scope,
            "execute": execute,
            "structure": runner,
            "features": self._run_features,
            "finish": finisher,
            "check_bounds": self._bounds.check,
            "weight_error": weight_error,
            "first_unstored": storage_check(),
            "storage_error": storage_error,
        }
        exec(compile(source, "<gnnc call>", "exec"), scope)
        return scope["run"]

    def _learn_inputs(self) -> None:
        for node in placeholders(self._captured.graph_module):
            source = source_of(node)
            if source is not None and source.kind == "input" and source.name in self._inputs:
                self._sizes.learn(variable(self._inputs[source.name]), node.meta["val"])

    def _structure_results(self) -> list[Node]:
        assert self._structure is not None
        return list(outputs_of(self._structure.graph))

    def _learn_structure(self) -> None:
        by_name = {n.name: i for i, n in enumerate(self._structure_results())}
        for node in placeholders(self._compute):
            source = source_of(node)
            if source is not None and source.kind == "structure":
                self._sizes.learn(expr("s[{}]", by_name[source.name]), node.meta["val"])

    def _value(self, node: Node) -> str:
        source = source_of(node)
        assert source is not None
        if source.kind == "input":
            return self._inputs[source.name]
        if source.kind == "constant":
            return self._bind(f"c{len(self._scope)}", node.meta["value"])
        if source.kind == "size":
            return self._size(node, source)
        if source.kind == "seed":
            return f"{self._bind('draw_seed', partial(draw_seed, node.meta['val'].device))}()"
        if source.kind == "structure":
            names = [n.name for n in self._structure_results()]
            return f"s[{names.index(source.name)}]"
        if source.kind == "features":
            return f"f[{source.name}]"
        return self._weight(source, node)

    def _size(self, node: Node, source: Source) -> str:
        found = self._sizes.find(node.meta["val"])
        if found is None:
            raise CaptureError(f"size {source.name} cannot be read off the arguments of a call")
        return found.text

    def _bind(self, name: str, value: Any) -> str:
        self._scope[name] = value
        return name

    def _weight(self, source: Source, node: Node) -> str:
        owner, name = owner_of(self._model, source)
        table = owner._parameters if source.kind == "parameter" else owner._buffers
        variable = f"w{len(self._weights)}"
        dictionary = self._bind(f"d{variable}", table)
        shape = self._bind(f"shape_{variable}", torch.Size(node.meta["val"].shape))
        device = node.meta["val"].device
        differs = f"{variable}.shape != {shape} or {elsewhere(variable, device)}"
        self._weights.append((variable, f"{dictionary}.get({name!r})", differs))
        self._scope[f"dtype_{variable}"] = node.meta["val"].dtype
        self._scope[f"device_{variable}"] = device
        self._scope[f"name_{variable}"] = f"{source.kind} {source.name!r}"
        return variable

    def _fetch_weights(self) -> list[str]:
        """Read the weights, and check that they are of the dtype, shape and device that was compiled."""
        lines = [f"{variable} = {text}" for variable, text, _ in self._weights]
        lines += [
            f"if {variable} is None or {variable}.dtype is not dtype_{variable} or {differs}:"
            f" weight_error(name_{variable}, {variable}, shape_{variable}, dtype_{variable},"
            f" device_{variable})"
            for variable, _, differs in self._weights
        ]
        return lines

    def _check_storage(self) -> list[str]:
        """Refuse tensors whose memory was freed or shortened, before anything reads them."""
        names = {self._inputs[name]: name for name in self._read_inputs()}
        names |= {variable: self._scope[f"name_{variable}"] for variable, _, _ in self._weights}
        if not names:
            return []
        self._scope["tensor_names"] = (type(self._model).__name__, *names.values())
        return [
            f"stored = ({', '.join(names)},)",
            "if (unstored := first_unstored(stored)) >= 0: storage_error(tensor_names, stored, unstored)",
        ]

    def _read_inputs(self) -> list[str]:
        """Return the names of the inputs whose elements are read; others are asked for their sizes alone."""
        parts = self._structure, self._features, self._compute
        graphs = [graph for graph in parts if graph is not None]
        sources = [source_of(node) for graph in graphs for node in placeholders(graph) if node.users]
        read = {source.name for source in sources if source is not None and source.kind == "input"}
        return [name for name in self._inputs if self._bounds or name in read]

    def _finisher(self) -> Callable[[tuple[Any, ...]], Any] | None:
        """Return the function that makes the model's result of the outputs; None if it is the one output."""
        spec, names = self._captured.out_spec, self._captured.mutations
        values = len(self._captured.values)
        results = self._compute.meta.get(RESULTS, len(outputs_of(self._compute.graph)))
        count = results - len(names) - values
        if not names and not values and count == 1 and spec.is_leaf():
            return None
        is_sparse = holds_matrices(spec)
        check = test_of(self._captured.value_guards, self._captured.values)
        buffers = [owner_of(self._model, Source("buffer", name)) for name in names]

        def finish(outputs: tuple[Any, ...]) -> Any:
            if values:
                check(outputs[-values:])
            for (owner, name), value in zip(buffers, outputs[count : count + len(buffers)], strict=True):
                owner._buffers[name].copy_(value)
            result = pytree.tree_unflatten(list(outputs[:count]), spec)
            return put_together(result) if is_sparse else result

        return finish


def elsewhere(variable: str, device: torch.device) -> str:
    """Return an expression that is true if a tensor is on another device than ``device_<variable>``.

    The number of a GPU compares in a third of the time; tensors on the CPU have none of their own.
    """
    if device.type == "cuda" and device.index is not None:
        return f"{variable}.get_device() != {device.index}"
    return f"{variable}.device != device_{variable}"


def storage_error(names: Sequence[str], tensors: Sequence[Tensor], number: int) -> None:
    """Refuse a tensor whose storage does not hold its elements.

    Args:
        names: the model's class, then the name of each tensor.
        tensors: the arguments, parameters and buffers of a call.
        number: position of the tensor that is refused.

    Raises:
        InputError: always.
    """
    fault = storage_fault(tensors[number]) or "its memory was freed during the call"
    raise InputError(
        f"[{names[0]}] {names[number + 1]}: {fault}; call the model while the tensor has its memory "
        "(FSDP and off-loading free it between uses), or pass a tensor of its own"
    )


def weight_error(
    name: str, value: Tensor | None, shape: torch.Size, dtype: torch.dtype, device: torch.device
) -> None:
    """Refuse a parameter or buffer that is no longer what was compiled.

    Args:
        name: kind and path of the parameter or buffer.
        value: the tensor of this call, or None.
        shape: its shape when the model was compiled.
        dtype: its dtype when the model was compiled.
        device: its device when the model was compiled, where the inputs are too.

    Raises:
        UnsupportedError: its dtype is not the compiled one.
        InputError: it is missing, has another shape or is elsewhere.
    """
    if value is not None and value.dtype != dtype:
        raise UnsupportedError(
            f"{name} is {value.dtype} now, it was {dtype} when compiled: a compiled model keeps "
            "float32 weights and lowers the precision itself; move it back with .float()"
        )
    if value is not None and value.shape == shape and value.device != device:
        raise InputError(
            f"the inputs are on {device}, but {name} is on {value.device}: pass x.to({str(value.device)!r}) "
            f"and so on, or move the model back with .to({str(device)!r})"
        )
    now = "missing" if value is None else f"of shape {tuple(value.shape)}"
    raise InputError(f"{name} is {now}, it had shape {tuple(shape)} when compiled: compile the model again")
