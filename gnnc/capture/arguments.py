"""The arguments of a call, flattened the same way at capture and at every later call.

``f(x, edge_index)``, ``f(x, edge_index=edge_index)`` and ``f(x, edge_index, None)`` flatten alike:
the signature's defaults are filled in, then every tuple, list and dict is flattened. A sparse tensor
becomes its component tensors, and quantized rows become their values and scales. An int that can be a size
becomes an empty tensor with so many rows: whether it is a number or a symbol in a graph is up to the capture,
as for every other size. Every other leaf is a constant of the capture.
"""

import inspect
from collections.abc import Callable, Hashable, Mapping, Sequence
from dataclasses import dataclass
from functools import lru_cache
from typing import Any

import torch

from gnnc.capture.edge_index import plain
from gnnc.capture.object_graph import ObjectGraph, can_change
from gnnc.capture.pyg_data import from_dicts, to_dicts
from gnnc.capture.read_fields import Reads, only_read
from gnnc.capture.sparse_components import components, is_sparse
from gnnc.capture.sparse_state import held_matrices, sparse_holdings
from gnnc.errors import InputError
from gnnc.quantized_tensor import PARTS, QuantizedTensor
from gnnc.torch_private import pytree

Signature = inspect.Signature
_MOST = 2**40
"""Ints beyond are constants: no tensor has so many rows."""
_POSITIONAL = (inspect.Parameter.POSITIONAL_ONLY, inspect.Parameter.POSITIONAL_OR_KEYWORD)


@dataclass(frozen=True)
class Leaf:
    """Leaf of the arguments: a dense, sparse or quantized tensor, an int that can be a size, or a constant.

    Attributes:
        name: path of the leaf as a reader writes it: ``x``, ``data[0]``, ``x_dict['paper']``.
        kind: ``tensor``, ``sparse``, ``quantized``, ``int`` or ``constant``.
        value: the constant; the layout of a sparse tensor; None for a tensor and an int.
        parts: names of the tensors that a sparse or quantized tensor is made of, in their order.
    """

    name: str
    kind: str
    value: Any = None
    parts: tuple[str, ...] = ()

    @property
    def tensor_names(self) -> tuple[str, ...]:
        """Return the names of the flat tensors of this leaf: none, one, or one for each part."""
        if self.kind == "constant":
            return ()
        if self.kind in ("tensor", "int"):
            return (self.name,)
        return tuple(f"{self.name}.{part}" for part in self.parts)

    @property
    def key(self) -> Hashable:
        """Return a key, equal for leaves that a program cannot tell apart; 1, 1.0 and True differ."""
        return self.name, self.kind, _typed(self.value), self.parts


@dataclass(frozen=True)
class Call:
    """The arguments of one call, flattened.

    Attributes:
        tensors: every tensor, in the order of the captured graph's inputs.
        leaves: the description of each leaf of ``spec``, then of each sparse matrix that the model holds.
        spec: rebuilds ``{argument name: value}`` from the leaves.
    """

    tensors: tuple[torch.Tensor, ...]
    leaves: tuple[Leaf, ...]
    spec: pytree.TreeSpec

    @property
    def names(self) -> tuple[str, ...]:
        """Return the name of every flat tensor."""
        return tuple(name for leaf in self.leaves for name in leaf.tensor_names)

    @property
    def ints(self) -> frozenset[str]:
        """Return the names of the ints."""
        return frozenset(leaf.name for leaf in self.leaves if leaf.kind == "int")

    @property
    def device(self) -> torch.device | None:
        """Return the device of the first tensor that is no int; None where there is none."""
        named = zip(self.names, self.tensors, strict=True)
        return next((tensor.device for name, tensor in named if name not in self.ints), None)

    @property
    def key(self) -> tuple[pytree.TreeSpec, tuple[Hashable, ...]]:
        """Return a key that is equal for calls with the same structure, constants and types of constants."""
        return self.spec, tuple(leaf.key for leaf in self.leaves)


def flatten_call(
    model: torch.nn.Module, args: Sequence[Any], kwargs: Mapping[str, Any], reads: Reads | None = None
) -> Call:
    """Flatten the arguments of ``model(*args, **kwargs)``; InputError where they do not bind.

    ``reads`` says which fields of PyG graph objects count; None: all.
    """
    signature = signature_of(model)
    try:
        bound = signature.bind(*args, **kwargs)
    except TypeError as error:
        message = (
            f"[{type(model).__name__}] {error}: the model is called as {type(model).__name__}{signature}"
        )
        raise InputError(message) from None
    bound.apply_defaults()
    arguments = to_dicts(dict(bound.arguments))
    if reads is not None:
        arguments = only_read(arguments, reads)
    paths, spec = pytree.tree_flatten_with_path(arguments)
    tensors: list[torch.Tensor] = []
    leaves = []
    for path, value in paths:
        leaf, parts = _leaf(_path_text(path), value)
        leaves.append(leaf)
        tensors.extend(parts)
    for name, matrix in held_matrices(sparse_holdings(model)):
        leaf, parts = _leaf(name, matrix)
        leaves.append(leaf)
        tensors.extend(parts)
    return Call(tuple(tensors), tuple(leaves), spec)


def signature_of(model: torch.nn.Module) -> Signature:
    """Return the signature of the model's forward, read anew: forward can be replaced at any time."""
    return inspect.signature(model.forward)


def call_forms(model: torch.nn.Module) -> list[tuple[str, str]]:
    """Return the way in which each argument is passed: (name, ``one`` | ``many`` | ``key`` | ``keys``).

    A class with a ``__call__`` of its own (PyG's aggregations) takes fewer arguments by position than its
    forward; the others are passed by key.
    """
    forms = []
    for place, (name, parameter) in enumerate(signature_of(model).parameters.items()):
        if parameter.kind is inspect.Parameter.POSITIONAL_OR_KEYWORD and place >= _most_by_position(model):
            forms.append((name, "key"))
        elif parameter.kind in _POSITIONAL:
            forms.append((name, "one"))
        elif parameter.kind is inspect.Parameter.VAR_POSITIONAL:
            forms.append((name, "many"))
        elif parameter.kind is inspect.Parameter.KEYWORD_ONLY:
            forms.append((name, "key"))
        else:
            forms.append((name, "keys"))
    return forms


def _most_by_position(model: torch.nn.Module) -> float:
    """Return how many arguments the model's ``__call__`` takes by position."""
    parameters = list(inspect.signature(type(model).__call__).parameters.values())
    if any(parameter.kind is inspect.Parameter.VAR_POSITIONAL for parameter in parameters):
        return float("inf")
    return sum(parameter.kind in _POSITIONAL for parameter in parameters) - 1


def rebuild(
    leaves: Sequence[Leaf],
    spec: pytree.TreeSpec,
    forms: Sequence[tuple[str, str]],
    tensors: Sequence[torch.Tensor],
    make_sparse: Callable[[Leaf, Sequence[torch.Tensor]], Any],
    watch: Callable[[Any], None] | None = None,
) -> tuple[list[Any], dict[str, Any], list[Any]]:
    """Return the (args, kwargs) that ``flatten_call`` flattened, and the matrices that the model holds.

    ``watch`` is called with each PyG graph object among the arguments.
    """
    values, position = [], 0
    for leaf in leaves:
        count = len(leaf.tensor_names)
        parts = tensors[position : position + count]
        position += count
        if leaf.kind == "constant":
            values.append(leaf.value)
        elif leaf.kind == "tensor":
            values.append(parts[0])
        elif leaf.kind == "int":
            values.append(parts[0].shape[0])
        else:
            values.append(make_sparse(leaf, parts))
    held = values[spec.num_leaves :]
    values = values[: spec.num_leaves]
    arguments = from_dicts(pytree.tree_unflatten(values, spec), watch)
    args: list[Any] = []
    kwargs: dict[str, Any] = {}
    for name, form in forms:
        if form == "one":
            args.append(arguments[name])
        elif form == "many":
            args.extend(arguments[name])
        elif form == "key":
            kwargs[name] = arguments[name]
        else:
            kwargs.update(arguments[name])
    return args, kwargs, held


def can_be_size(value: Any) -> bool:
    """Return whether a value is a plain int from 0 to the greatest size; a bool is none."""
    return type(value) is int and 0 <= value < _MOST


@lru_cache(maxsize=4096)
def carrier(value: int) -> torch.Tensor:
    """Return the empty tensor [value, 0] that stands for an int among the inputs of a graph."""
    with torch.inference_mode(False):
        return torch.empty((value, 0), dtype=torch.float32, device="cpu")


def _leaf(name: str, value: Any) -> tuple[Leaf, tuple[torch.Tensor, ...]]:
    if can_be_size(value):
        return Leaf(name, "int"), (carrier(value),)
    if isinstance(value, QuantizedTensor):
        return Leaf(name, "quantized", None, PARTS), (value.values, value.scale)
    if not isinstance(value, torch.Tensor):
        _check_constant(name, value)
        return Leaf(name, "constant", value), ()
    if value.layout is torch.strided:
        return Leaf(name, "tensor"), (plain(value),)
    _check_sparse(name, value)
    parts = components(value)
    return Leaf(name, "sparse", value.layout, tuple(parts)), tuple(parts.values())


def _typed(value: Any) -> Hashable:
    """Return ``value`` wrapped so that equality needs the same type and contents, also inside containers."""
    if isinstance(value, tuple):
        return type(value), tuple(map(_typed, value))
    if isinstance(value, frozenset):
        return type(value), frozenset(map(_typed, value))
    return type(value), ObjectGraph.of(value) if can_change(value) else value


def _check_sparse(name: str, value: torch.Tensor) -> None:
    """Refuse sparse tensors that are no matrices [rows, columns] of single entries."""
    layout = str(value.layout).removeprefix("torch.")
    if not is_sparse(value):
        raise InputError(
            f"argument {name} has layout {layout}: pass a CSR, CSC or COO matrix ({name}.to_sparse_csr()), "
            f"or {name}.to_dense()"
        )
    coo = value.layout is torch.sparse_coo
    sparse_dims = value.sparse_dim() if coo else 2 + _batch_dims(value)
    if sparse_dims != 2:
        raise InputError(
            f"argument {name} is a {layout} tensor of shape {tuple(value.shape)} with {sparse_dims} sparse "
            f"dimensions: pass a matrix [rows, columns] for each graph, or {name}.to_dense()"
        )


def _batch_dims(matrix: torch.Tensor) -> int:
    csr = matrix.layout is torch.sparse_csr
    return (matrix.crow_indices() if csr else matrix.ccol_indices()).dim() - 1


def _check_constant(name: str, value: Any) -> None:
    try:
        hash(value)
    except TypeError:
        raise InputError(
            f"argument {name} is a {type(value).__name__}, which gnnc cannot look into: pass its tensors, "
            "alone or in tuples, lists and dicts"
        ) from None


def _path_text(path: Sequence[Any]) -> str:
    """Return the text of a path, such as ``data[0]``: the argument's name, then the index keys."""
    head, *rest = path
    return str(head.key) + "".join(str(key) for key in rest)
