"""Row-wise ops, gathers and scatters: the ops that read, compute and write edge values.

A row of a tensor is its slice along dimension 0. An op is *row-wise* in an argument if row r of
the result depends on row r of that argument and on no other row of it. Dropout is not row-wise: the
random numbers of a row depend on the caller's order, and no kernel draws any.
"""

import math
import operator
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
from torch.fx import Node

from gnnc.ir.nodes import (
    argument,
    aten_name,
    first_operand,
    holds_tensor,
    is_pointwise,
    same_shape,
    same_size,
    shape_of,
    unpack,
    value_of,
)

NARROW = 16
"""Edge values of at most this many columns are worth storing for every edge."""

_RESHAPES = (
    "view.default",
    "reshape.default",
    "_unsafe_view.default",
    "expand.default",
    "flatten.using_ints",
)
_REDUCTIONS = {
    "sum.dim_IntList": 1,
    "mean.dim": 1,
    "amax.default": 1,
    "amin.default": 1,
    "prod.dim_int": 1,
    "any.dim": 1,
    "all.dim": 1,
    "norm.ScalarOpt_dim": 2,
    "linalg_vector_norm.default": 2,
    "logsumexp.default": 1,
    "softmax.int": 1,
    "_softmax.default": 1,
    "log_softmax.int": 1,
    "_log_softmax.default": 1,
    "cumsum.default": 1,
    "argmax.default": 1,
    "var.correction": 1,
}
_DIM_OPS = {
    "unsqueeze.default": 1,
    "squeeze.dim": 1,
    "squeeze.dims": 1,
    "select.int": 1,
    "slice.Tensor": 1,
    "index_select.default": 1,
    "split.Tensor": 2,
    "split_with_sizes.default": 2,
    "chunk.default": 2,
    "unbind.int": 1,
}
_CASTS = ("_to_copy.default", "to.dtype", "clone.default", "detach.default", "alias.default")
_PRODUCTS = ("linear.default", "mm.default", "matmul.default")


def row_inputs(node: Node) -> tuple[Node, ...] | None:
    """Return the arguments that ``node`` is row-wise in, each with a row for every row of the result.

    None where the op is not known to be row-wise. Every row of the result may read the other arguments
    whole: a weight, a scalar, a broadcast constant.
    """
    if node.op != "call_function":
        return None
    if node.target is operator.getitem:
        source = first_operand(node)
        return (source,) if row_inputs(source) is not None else None
    name = aten_name(node)
    if not name:
        return None
    if name in _RESHAPES:
        return _reshaped(node)
    for table, rule in _RULES:
        if name in table:
            return rule(node, name)
    return _pointwise(node) if is_pointwise(node) else None


def is_narrow(node: Node) -> bool:
    """Return whether a value is small enough to be stored for every edge: ``[E]``, ``[E, H]``."""
    if not holds_tensor(node):
        return False
    sizes = shape_of(node)[1:]
    if not all(isinstance(size, int) for size in sizes):
        return False
    return math.prod(sizes) <= NARROW and (len(sizes) < 2 or sizes[-1] == 1)


def rows_of(node: Node) -> Any:
    """Return the number of rows of a tensor node, or of the first tensor of a tuple; None for a scalar."""
    value: Any = node.meta.get("val")
    if isinstance(value, list | tuple):
        value = value[0] if value else None
    if not isinstance(value, torch.Tensor) or value.dim() == 0:
        return None
    return value.shape[0]


def _has_rows_of(arg: Any, node: Node) -> bool:
    """Return whether ``arg`` has a row for each row of ``node``, and is not broadcast over them."""
    return holds_tensor(arg) and rows_of(arg) is not None and same_size(rows_of(arg), rows_of(node))


def _pointwise(node: Node) -> tuple[Node, ...] | None:
    if not holds_tensor(node) or rows_of(node) is None:
        return None
    rank = len(shape_of(node))
    tensors = [arg for arg in node.all_input_nodes if holds_tensor(arg)]
    return tuple(arg for arg in tensors if len(shape_of(arg)) == rank and _has_rows_of(arg, node))


def _reshaped(node: Node) -> tuple[Node, ...] | None:
    """Return the input of a reshape that keeps dimension 0 and has fixed sizes behind it."""
    source = first_operand(node)
    if not _has_rows_of(source, node) or len(shape_of(node)) == 0:
        return None
    return (source,) if all(isinstance(size, int) for size in shape_of(node)[1:]) else None


def _along_dims(table: dict[str, int]) -> Callable[[Node, str], tuple[Node, ...] | None]:
    def rule(node: Node, name: str) -> tuple[Node, ...] | None:
        dims = argument(node, "dim")
        dims = dims if isinstance(dims, list | tuple) else [dims]
        touches_rows = not dims or any(dim is None or dim == 0 for dim in dims)
        return None if touches_rows else (first_operand(node),)

    return rule


def _joined(node: Node, name: str) -> tuple[Node, ...] | None:
    parts = argument(node, "tensors")
    return tuple(parts) if argument(node, "dim") != 0 else None


def _permuted(node: Node, name: str) -> tuple[Node, ...] | None:
    if name == "transpose.int":
        fixed = 0 not in unpack(node, "dim0", "dim1")
    else:
        fixed = argument(node, "dims")[0] == 0
    return (first_operand(node),) if fixed else None


_FACTORS = {
    "linear.default": ("input", "weight"),
    "mm.default": ("self", "mat2"),
    "matmul.default": ("self", "other"),
}


def _product(node: Node, name: str) -> tuple[Node, ...] | None:
    x, weight = unpack(node, *_FACTORS[name])
    if len(shape_of(weight)) == 2:
        return (x,) if len(shape_of(x)) >= 2 else None
    batched = len(shape_of(x)) == len(shape_of(weight)) and len(shape_of(x)) >= 3
    return tuple(arg for arg in (x, weight) if _has_rows_of(arg, node)) if batched else None


def _affine_product(node: Node, name: str) -> tuple[Node, ...] | None:
    bias, x = unpack(node, "self", "mat1")
    return (x,) if len(shape_of(bias)) == 1 else None


def _batched(node: Node, name: str) -> tuple[Node, ...]:
    return unpack(node, "self", "mat2")


def _repeated(node: Node, name: str) -> tuple[Node, ...] | None:
    source, repeats = unpack(node, "self", "repeats")
    keeps_rows = len(repeats) == len(shape_of(source)) and repeats[0] == 1
    return (source,) if keeps_rows else None


def _layer_norm(node: Node, name: str) -> tuple[Node, ...] | None:
    x, normalized = unpack(node, "input", "normalized_shape")
    return (x,) if len(normalized) < len(shape_of(x)) else None


def _first(node: Node, name: str) -> tuple[Node, ...]:
    return (first_operand(node),)


_RULES: tuple[tuple[Any, Callable[[Node, str], tuple[Node, ...] | None]], ...] = (
    (_CASTS, _first),
    (_REDUCTIONS, _along_dims(_REDUCTIONS)),
    (_DIM_OPS, _along_dims(_DIM_OPS)),
    (("cat.default", "stack.default"), _joined),
    (("permute.default", "transpose.int"), _permuted),
    (("repeat.default",), _repeated),
    (_PRODUCTS, _product),
    (("addmm.default",), _affine_product),
    (("bmm.default",), _batched),
    (("layer_norm.default", "native_layer_norm.default"), _layer_norm),
    (("_prelu_kernel.default", "prelu.default", "log_sigmoid.default"), _first),
)


@dataclass(frozen=True)
class Gather:
    """Gather ``table[index]``: rows of a table ``[T, ...]`` read by an index ``[E]``."""

    table: Node
    index: Node


def as_gather(node: Node) -> Gather | None:
    """Read ``node`` as a gather of rows of a floating-point table, or None."""
    name = aten_name(node)
    if name not in _GATHERS or not holds_tensor(node):
        return None
    gather = _GATHERS[name](node)
    if gather is None or not holds_tensor(gather.table) or not holds_tensor(gather.index):
        return None
    if _is_permutation(gather.index):
        return None
    index = value_of(gather.index)
    is_vector = index.dim() == 1 and index.dtype in (torch.int64, torch.int32)
    return gather if is_vector and value_of(gather.table).is_floating_point() else None


def _is_permutation(index: Node) -> bool:
    """Return whether ``index`` is the permutation of a CSR or its inverse, which ``raise`` inserts."""
    if index.target is operator.getitem:
        return str(first_operand(index).target) == "gnnc.csr.default"
    return aten_name(index) == "argsort.default" and _is_permutation(first_operand(index))


def _index_select(node: Node) -> Gather | None:
    table, dim, index = unpack(node, "self", "dim", "index")
    return Gather(table, index) if dim == 0 else None


def _index(node: Node) -> Gather | None:
    table, indices = unpack(node, "self", "indices")
    used = [index for index in indices if index is not None]
    return Gather(table, used[0]) if len(used) == 1 and indices[0] is not None else None


def _embedding(node: Node) -> Gather | None:
    """Read an embedding as a gather, unless its gradient is none of a gather's.

    ``normalize`` clears the options where there is no gradient.
    """
    weight, indices, padding, by_frequency = unpack(
        node, "weight", "indices", "padding_idx", "scale_grad_by_freq"
    )
    return Gather(weight, indices) if padding == -1 and not by_frequency else None


def _gather(node: Node) -> Gather | None:
    table, dim, expanded = unpack(node, "self", "dim", "index")
    index = index_vector(expanded, dim)
    if dim != 0 or index is None or shape_of(node)[1:] != shape_of(table)[1:]:
        return None
    return Gather(table, index)


_GATHERS: dict[str, Callable[[Node], Gather | None]] = {
    "index_select.default": _index_select,
    "index.Tensor": _index,
    "embedding.default": _embedding,
    "gather.default": _gather,
}


def index_vector(expanded: Any, dim: int) -> Node | None:
    """Return the ``[E]`` index that ``expanded`` repeats along every dimension but ``dim``, or None."""
    node = expanded
    while isinstance(node, Node) and len(shape_of(node)) > 1:
        if aten_name(node) in ("expand.default", "repeat.default"):
            if len(shape_of(first_operand(node))) < len(shape_of(node)):
                return None  # a new dimension comes first: the index varies along another one
            node = first_operand(node)
            continue
        if aten_name(node) not in ("view.default", "reshape.default", "unsqueeze.default"):
            return None
        others = [size for i, size in enumerate(shape_of(node)) if i != dim]
        if not all(same_size(size, 1) for size in others):
            return None
        node = first_operand(node)
    same_length = isinstance(node, Node) and same_size(rows_of(node), shape_of(expanded)[dim])
    return node if same_length else None


@dataclass(frozen=True)
class Scatter:
    """Scatter of rows ``source [E, ...]``, reduced into ``base`` by ``index [E]``.

    Attributes:
        node: the scatter.
        base: the tensor written into, ``[num_dst, ...]``.
        index: destination of every row.
        source: the rows.
        reduce: ``sum``, ``mean``, ``max`` or ``min``.
        include_base: whether the base's rows take part in the reduction.
    """

    node: Node
    base: Node
    index: Node
    source: Node
    reduce: str
    include_base: bool


def as_scatter(node: Node) -> Scatter | str | None:
    """Read ``node`` as a scatter of rows; return a reason for another scatter, None for another op."""
    name = aten_name(node)
    if name not in _SCATTERS:
        return None
    scatter = _SCATTERS[name](node)
    if isinstance(scatter, str):
        return scatter
    if not value_of(scatter.source).is_floating_point():
        return "integers are not summed by a kernel"
    rows = same_size(rows_of(scatter.source), rows_of(scatter.index))
    trailing = same_shape(shape_of(scatter.source)[1:], shape_of(scatter.base)[1:])
    return scatter if rows and trailing else "source, index and base do not agree in shape"


_REDUCE_NAMES = {
    "sum": "sum",
    "add": "sum",
    "mean": "mean",
    "amax": "max",
    "amin": "min",
}


def _expanded_scatter(node: Node, reduce: str, include_base: bool) -> Scatter | str:
    base, dim, expanded, source = unpack(node, "self", "dim", "index", "src")
    if reduce not in _REDUCE_NAMES:
        return f"reduction {reduce!r} has no primitive"
    if not holds_tensor(source):
        return "scatters a number"
    index = index_vector(expanded, dim)
    if dim != 0 or index is None:
        return f"scatters along dimension {dim} by an index that varies along others"
    if not same_shape(shape_of(expanded), shape_of(source)):
        return "reads only part of its source"
    return Scatter(node, base, index, source, _REDUCE_NAMES[reduce], include_base)


def _scatter_add(node: Node) -> Scatter | str:
    return _expanded_scatter(node, "sum", True)


def _scatter_named(node: Node) -> Scatter | str:
    return _expanded_scatter(node, argument(node, "reduce"), True)


def _scatter_reduce(node: Node) -> Scatter | str:
    include = argument(node, "include_self")
    return _expanded_scatter(node, argument(node, "reduce"), include)


def _index_add(node: Node) -> Scatter | str:
    base, dim, index, source = unpack(node, "self", "dim", "index", "source")
    if dim != 0 or argument(node, "alpha") != 1 or len(shape_of(index)) != 1:
        return "adds along another dimension than 0, or with a factor"
    return Scatter(node, base, index, source, "sum", True)


def _index_reduce(node: Node) -> Scatter | str:
    base, dim, index, source, reduce = unpack(node, "self", "dim", "index", "source", "reduce")
    if dim != 0 or reduce not in _REDUCE_NAMES:
        return f"reduces ({reduce}) along dimension {dim}"
    include = argument(node, "include_self")
    return Scatter(node, base, index, source, _REDUCE_NAMES[reduce], include)


def _index_put(node: Node) -> Scatter | str:
    base, indices, source = unpack(node, "self", "indices", "values")
    if argument(node, "accumulate") is not True:
        return "overwrites rows: which write wins is not defined"
    if len(indices) != 1 or len(shape_of(indices[0])) != 1:
        return "is indexed along several dimensions"
    if value_of(indices[0]).dtype == torch.bool:
        return "is indexed by a mask"
    return Scatter(node, base, indices[0], source, "sum", True)


_SCATTERS: dict[str, Callable[[Node], Scatter | str]] = {
    "scatter_add.default": _scatter_add,
    "scatter.reduce": _scatter_named,
    "scatter_reduce.two": _scatter_reduce,
    "index_add.default": _index_add,
    "index_reduce.default": _index_reduce,
    "index_put.default": _index_put,
}
