"""torch.sparse adjacencies inside a captured model.

``torch.export`` cannot trace a sparse tensor. The flat inputs of the graph are therefore the
dense component tensors of the adjacency, and during tracing a ``SparseOperand`` stands in its
place, a strided tensor without data that says it is sparse and turns every product with a dense
matrix into gather, multiply and scatter. Raising then sees the same edges as it sees in a
hand-written model. An adjacency that the model builds itself (``torch.sparse_csr_tensor(...)``)
becomes such an operand through ``SparseMode``, which intercepts the constructors.

Emitting ``gnnc.spmm`` over the caller's ``crow_indices`` would save a sort but let unchecked
indices reach the kernels; as edges they pass through ``gnnc.csr``, which validates and copies.
"""

from collections.abc import Callable, Mapping, Sequence
from functools import partial
from inspect import signature
from typing import Any

import torch

from gnnc.capture.function_mode import Function, FunctionMode
from gnnc.capture.sparse_components import SPARSE_LAYOUTS
from gnnc.torch_private import (
    coo_to_csr,
    entry_count,
    make_wrapper_subclass,
    raw_indices,
    raw_values,
    set_coalesced,
    sparse_sum,
    statically_known_true,
)

_TRANSPOSED_FORM = {
    torch.sparse_csr: torch.sparse_csc,
    torch.sparse_csc: torch.sparse_csr,
    torch.sparse_coo: torch.sparse_coo,
}


def operand(
    layout: torch.layout, parts: Mapping[str, torch.Tensor] | Sequence[torch.Tensor]
) -> "SparseOperand":
    """Build the stand-in for a matrix of ``layout`` from its ``components``, in their order."""
    tensors = tuple(parts.values()) if isinstance(parts, Mapping) else tuple(parts)
    if layout == torch.sparse_coo:
        indices, values, shape = tensors
        return _coo(indices, values, (shape.shape[0], shape.shape[1], *values.shape[1:]), is_coalesced=True)
    pointer, plain, values, other = tensors
    compressed, other_size = pointer.shape[0] - 1, other.shape[0]
    if layout == torch.sparse_csr:
        return _csr(pointer, plain, values, (compressed, other_size, *values.shape[1:]))
    return _csc(pointer, plain, values, (other_size, compressed, *values.shape[1:]))


class SparseOperand(torch.Tensor):
    """Sparse [rows, columns] matrix during tracing: edge e adds ``value[e]`` at (dst, src).

    ``dst`` and ``src`` are traced [E] tensors, and ``value`` is [E], or [E, ...] in a matrix of edge features
    (dense dimensions behind rows and columns). Every use that is not a product with a
    dense matrix, a transpose, a conversion or a question about the matrix raises
    ``NotImplementedError``.

    Attributes:
        dst: row of each edge.
        src: column of each edge.
        value: value of each edge.
        sizes: rows, columns, and dense dimensions if any.
        form: the layout that the model sees.
        ordered: whether the edges lie in the order of ``form`` (COO: by rows), each place once. Products
            need no order, so the edges are sorted only where the model reads them: ``entries``.
        raw: whether the model sees a COO matrix that is not coalesced.
    """

    dst: torch.Tensor
    src: torch.Tensor
    value: torch.Tensor
    sizes: tuple[Any, ...]
    form: torch.layout
    ordered: bool
    raw: bool

    @staticmethod
    def __new__(  # noqa: D102
        cls,
        dst: torch.Tensor,
        src: torch.Tensor,
        value: torch.Tensor,
        sizes: tuple[Any, ...],
        form: torch.layout,
        ordered: bool = True,
        raw: bool = False,
    ) -> "SparseOperand":
        self = make_wrapper_subclass(cls, sizes, dtype=value.dtype, device=value.device, requires_grad=False)
        self.dst, self.src, self.value, self.sizes = dst, src, value, sizes
        self.form, self.ordered, self.raw = form, ordered, raw
        return self

    def entries(self) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
        """Return rows, columns and values [E] in the order of ``form``, each place once."""
        if not self.ordered:
            self.dst, self.src, self.value = _merged(self)
            self.ordered = True
        return self.dst, self.src, self.value

    @classmethod
    def __torch_function__(
        cls,
        func: Callable[..., Any],
        types: Sequence[type],
        args: Sequence[Any] = (),
        kwargs: Mapping[str, Any] | None = None,
    ) -> Any:
        handler = _HANDLERS.get(func)
        if handler is not None:
            return _handled(handler, func, args, kwargs or {})
        if func in _PLAIN:
            return super().__torch_function__(func, types, args, kwargs or {})
        raise NotImplementedError(_refusal(func))

    @classmethod
    def __torch_dispatch__(
        cls,
        func: Callable[..., Any],
        types: Sequence[type],
        args: Sequence[Any] = (),
        kwargs: Mapping[str, Any] | None = None,
    ) -> Any:
        raise NotImplementedError(_refusal(func))


def unique_keys(keys: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """Return the distinct values of ``keys`` [E], ascending, and the index of each key among them [E]."""
    distinct, place = torch.unique(keys, return_inverse=True)
    if statically_known_true(keys.shape[0] >= 1):
        torch._check(distinct.shape[0] >= 1)  # for layers that ask whether there are edges
    return distinct, place


class SparseMode(FunctionMode):
    """Mode in which the constructors of torch.sparse return a ``SparseOperand``, and their helpers trace."""

    def _call(self, func: Function, args: Sequence[Any], kwargs: Mapping[str, Any]) -> Any:
        constructor = _CONSTRUCTORS.get(func)
        if constructor is not None:
            meaningful = {name: value for name, value in kwargs.items() if name not in _NO_VALUE}
            return _handled(constructor, func, args, meaningful)
        return func(*args, **kwargs)


def _expanded(pointer: torch.Tensor, plain: torch.Tensor) -> torch.Tensor:
    """Convert row offsets [rows + 1] to the row of every edge [E]."""
    counts = pointer[1:] - pointer[:-1]
    return torch.repeat_interleave(counts, output_size=plain.shape[0])


def _handled(
    handler: Callable[..., Any], func: Callable[..., Any], args: Sequence[Any], kwargs: Mapping[str, Any]
) -> Any:
    """Call the ``handler`` of ``func``; NotImplementedError for arguments that the handler does not take."""
    taken = signature(handler)
    try:
        taken.bind(*args, **kwargs)
    except TypeError:
        unknown = [name for name in kwargs if name not in taken.parameters]
        raise NotImplementedError(_refusal(func, unknown)) from None
    return handler(*args, **kwargs)


def _refusal(func: Callable[..., Any], keywords: Sequence[str] = ()) -> str:
    name = getattr(func, "__name__", str(func))
    if keywords:
        name += f"({', '.join(f'{keyword}=' for keyword in keywords)})"
    return (
        f"{name} of a torch.sparse tensor cannot be captured; pass edge_index (and edge weights) "
        "instead of the sparse adjacency, or do this step before the model"
    )


def _product(matrix: Any, dense: Any, reduce: str = "sum") -> torch.Tensor:
    """Return ``matrix @ dense``, [rows, F] or [rows], computed by gather, multiply and scatter."""
    if not isinstance(matrix, SparseOperand):
        return _product(_transposed(dense), matrix.mT, reduce).mT
    if isinstance(dense, SparseOperand):
        return _sparse_product(matrix, dense)
    if matrix.value.dim() > 1:
        raise NotImplementedError(_refusal(torch.sparse.mm))
    torch._check(matrix.sizes[1] == dense.shape[0])
    gathered = dense.index_select(0, matrix.src)
    weight = matrix.value if dense.dim() == 1 else matrix.value.view(-1, 1)
    message = gathered * weight
    out = message.new_zeros((matrix.sizes[0], *message.shape[1:]))
    if reduce in ("sum", "add"):
        return out.index_add(0, matrix.dst, message)
    name = {"mean": "mean", "max": "amax", "amax": "amax", "min": "amin", "amin": "amin"}[reduce]
    return out.index_reduce(0, matrix.dst, message, name, include_self=False)


def _sparse_product(left: SparseOperand, right: SparseOperand) -> SparseOperand:
    """Return the product of two sparse matrices: one entry for each path of two edges, not merged yet."""
    if left.value.dim() > 1 or right.value.dim() > 1:
        raise NotImplementedError(_refusal(torch.sparse.mm))
    torch._check(left.sizes[1] == right.sizes[0])
    middle, src, value = _converted(torch.sparse_csr, right).entries()
    offsets = _compressed_indices(middle, right.sizes[0])
    counts = (offsets[1:] - offsets[:-1]).index_select(0, left.src)
    first = torch.repeat_interleave(counts)
    before = (counts.cumsum(0) - counts).index_select(0, first)
    begin = offsets.index_select(0, left.src).index_select(0, first)
    second = torch.arange(first.shape[0], device=first.device) - before + begin
    return SparseOperand(  # pyright: ignore[reportCallIssue]  a tensor's __init__ takes what its __new__ does
        left.dst.index_select(0, first),
        src.index_select(0, second),
        left.value.index_select(0, first) * value.index_select(0, second),
        (left.sizes[0], right.sizes[1]),
        left.form,
        ordered=False,
    )


def _selected(matrix: SparseOperand, dim: int, index: torch.Tensor) -> SparseOperand:
    """Return the rows (dim 0) or columns (dim 1) that ``index`` lists, by a product with a matrix of ones."""
    if dim % 2 == 1:
        return _transposed(_selected(_transposed(matrix), 0, index))
    size = index.shape[0], matrix.sizes[0]
    ones = torch.ones(index.shape[0], dtype=matrix.value.dtype, device=index.device)
    places = torch.arange(index.shape[0], device=index.device)
    chosen = SparseOperand(places, index, ones, size, torch.sparse_csr)
    product = _sparse_product(chosen, matrix)
    parts = product.dst, product.src, product.value, product.sizes, matrix.form
    return SparseOperand(*parts, ordered=False)  # pyright: ignore[reportCallIssue]  as above


def _sum_product(matrix: Any, dense: Any) -> torch.Tensor:
    return _product(matrix, dense)


def _reversed_product(dense: Any, matrix: Any) -> torch.Tensor:
    return _product(matrix, dense)


def _add_product(bias: Any, matrix: Any, dense: Any, *, beta: Any = 1, alpha: Any = 1) -> Any:
    return beta * bias + alpha * _product(matrix, dense)


def _linear(x: SparseOperand, weight: torch.Tensor, bias: torch.Tensor | None = None) -> torch.Tensor:
    out = _product(x, weight.t())
    return out if bias is None else out + bias


def _dense(matrix: SparseOperand, dtype: torch.dtype | None = None) -> torch.Tensor:
    value = _as_dtype(matrix.value, dtype)
    rows, columns, *rest = matrix.sizes
    flat = value.new_zeros((rows * columns, *rest)).index_add(0, matrix.dst * columns + matrix.src, value)
    return flat.view(rows, columns, *rest)


def _merged(matrix: SparseOperand) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """Return the edges in the order of the form, with the values of equal places added."""
    by_column = matrix.form == torch.sparse_csc
    first, second = (matrix.src, matrix.dst) if by_column else (matrix.dst, matrix.src)
    width = matrix.sizes[0] if by_column else matrix.sizes[1]
    keys, place = unique_keys(first * width + second)
    value = matrix.value.new_zeros((keys.shape[0], *matrix.value.shape[1:])).index_add(0, place, matrix.value)
    first, second = keys // width, keys % width
    return (second, first, value) if by_column else (first, second, value)


def _transposed(matrix: SparseOperand) -> SparseOperand:
    form = _TRANSPOSED_FORM[matrix.form]
    coo = form == torch.sparse_coo
    return SparseOperand(
        matrix.src,
        matrix.dst,
        matrix.value,
        (matrix.sizes[1], matrix.sizes[0], *matrix.sizes[2:]),
        form,
        matrix.ordered and not coo,
        coo,
    )


def _swapped(matrix: SparseOperand, dim0: int, dim1: int) -> SparseOperand:
    rank = len(matrix.sizes)
    dims = {dim0 % rank, dim1 % rank}
    if dims == {0, 1}:
        return _transposed(matrix)
    if len(dims) > 1:
        raise NotImplementedError(_refusal(torch.transpose))
    return matrix


def _same(matrix: SparseOperand) -> SparseOperand:
    return matrix


def _converted(form: torch.layout, matrix: SparseOperand) -> SparseOperand:
    """Return the matrix in another layout, or a COO matrix coalesced; its entries are then sorted."""
    ordered = matrix.ordered and (form == torch.sparse_csc) == (matrix.form == torch.sparse_csc)
    return SparseOperand(matrix.dst, matrix.src, matrix.value, matrix.sizes, form, ordered)


def _marked_coalesced(matrix: SparseOperand, coalesced: bool) -> SparseOperand:
    if not coalesced:
        raise NotImplementedError(_refusal(set_coalesced))
    return _converted(torch.sparse_coo, matrix)


def _to_sparse(matrix: SparseOperand, *, layout: Any = None) -> SparseOperand:
    layout = torch.sparse_coo if layout is None else layout
    if layout not in SPARSE_LAYOUTS:
        raise NotImplementedError(_refusal(torch.Tensor.to_sparse))
    return _converted(layout, matrix)


def _indices(matrix: SparseOperand) -> torch.Tensor:
    _require_form(torch.sparse_coo, matrix)
    return torch.stack(list((matrix.dst, matrix.src) if matrix.raw else matrix.entries()[:2]))


def _values(matrix: SparseOperand) -> torch.Tensor:
    return matrix.value if matrix.raw else matrix.entries()[2]


def _coalesced_only(read: Callable[[SparseOperand], torch.Tensor]) -> Callable[[SparseOperand], torch.Tensor]:
    def checked(matrix: SparseOperand) -> torch.Tensor:
        if matrix.raw:
            raise NotImplementedError("the matrix is not coalesced: call coalesce() on it first")
        return read(matrix)

    return checked


def _pointer(form: torch.layout, matrix: SparseOperand) -> torch.Tensor:
    _require_form(form, matrix)
    dst, src, _ = matrix.entries()
    csr = form == torch.sparse_csr
    return _compressed_indices(*((dst, matrix.sizes[0]) if csr else (src, matrix.sizes[1])))


def _plain(form: torch.layout, matrix: SparseOperand) -> torch.Tensor:
    _require_form(form, matrix)
    dst, src, _ = matrix.entries()
    return src if form == torch.sparse_csr else dst


def _require_form(form: torch.layout, matrix: SparseOperand) -> None:
    if matrix.form != form:
        raise NotImplementedError(_refusal(torch.Tensor.to_sparse))


def _with_value(matrix: SparseOperand, value: torch.Tensor) -> SparseOperand:
    return SparseOperand(
        matrix.dst,
        matrix.src,
        value,
        matrix.sizes,
        matrix.form,
        matrix.ordered,
        matrix.raw,
    )


def _to(matrix: SparseOperand, *args: Any, **kwargs: Any) -> SparseOperand:
    return _with_value(matrix, matrix.value.to(*args, **kwargs))


def _cast(dtype: torch.dtype) -> Callable[[SparseOperand], SparseOperand]:
    return lambda matrix: _to(matrix, dtype)


def _scale(matrix: Any, factor: Any) -> SparseOperand:
    if not isinstance(matrix, SparseOperand):
        matrix, factor = factor, matrix
    if isinstance(factor, torch.Tensor) and factor.dim() > 0:
        raise NotImplementedError(_refusal(torch.mul))
    return _with_value(matrix, matrix.value * factor)


def _sum(matrix: SparseOperand, dim: Any = None, keepdim: bool = False, *, dtype: Any = None) -> torch.Tensor:
    if dtype is None and not matrix.value.is_floating_point():
        dtype = torch.int64
    summed = _sparse_sum(matrix, dim, dtype=dtype)
    return summed.unsqueeze(_only(dim)) if keepdim else summed


def _sparse_sum(matrix: SparseOperand, dim: Any = None, *, dtype: Any = None) -> torch.Tensor:
    if matrix.value.dim() > 1:
        raise NotImplementedError(_refusal(torch.sum))
    over_columns = _only(dim) == 1
    index, size = (matrix.dst, matrix.sizes[0]) if over_columns else (matrix.src, matrix.sizes[1])
    value = _as_dtype(matrix.value, dtype)
    return value.new_zeros(size).index_add(0, index, value)


def _only(dim: Any) -> int:
    """Return the one dimension, 0 or 1, that a sum is over."""
    dims = (dim,) if isinstance(dim, int) else tuple(dim or ())
    if len(dims) != 1 or dims[0] not in (-2, -1, 0, 1):
        raise NotImplementedError(_refusal(torch.sum))
    return dims[0] % 2


def _as_dtype(value: torch.Tensor, dtype: torch.dtype | None) -> torch.Tensor:
    return value if dtype in (None, value.dtype) else value.to(dtype)


def _getter(prop: Any) -> Any:
    return prop.__get__


T = torch.Tensor
_HANDLERS: dict[Any, Callable[..., Any]] = {
    **dict.fromkeys((torch.mm, T.mm, torch.sparse.mm, torch.matmul, T.matmul), _product),
    **dict.fromkeys((torch.mv, T.mv, T.__matmul__, torch.smm, T.smm), _sum_product),
    T.__rmatmul__: _reversed_product,
    **dict.fromkeys((torch.addmm, torch.sparse.addmm, torch.addmv), _add_product),
    **dict.fromkeys((torch.t, T.t, _getter(T.T), _getter(T.mT)), _transposed),
    **dict.fromkeys((torch.transpose, T.transpose), _swapped),
    **dict.fromkeys((T.coalesce, T.to_sparse_coo), partial(_converted, torch.sparse_coo)),
    torch.nn.functional.linear: _linear,
    T.to_dense: _dense,
    **dict.fromkeys((torch.index_select, T.index_select), _selected),
    set_coalesced: _marked_coalesced,
    T.to_sparse_csr: partial(_converted, torch.sparse_csr),
    T.to_sparse_csc: partial(_converted, torch.sparse_csc),
    T.to_sparse: _to_sparse,
    **dict.fromkeys((T.contiguous, T.detach), _same),
    **dict.fromkeys((torch.clone, T.clone), lambda matrix: _with_value(matrix, matrix.value.clone())),
    T.values: _coalesced_only(_values),
    raw_values: _values,
    T.indices: _coalesced_only(_indices),
    raw_indices: _indices,
    T.crow_indices: partial(_pointer, torch.sparse_csr),
    T.col_indices: partial(_plain, torch.sparse_csr),
    T.ccol_indices: partial(_pointer, torch.sparse_csc),
    T.row_indices: partial(_plain, torch.sparse_csc),
    entry_count: lambda matrix: _values(matrix).shape[0],
    T.is_coalesced: lambda matrix: not matrix.raw,
    **dict.fromkeys((T.to, T.type), _to),
    T.float: _cast(torch.float32),
    T.double: _cast(torch.float64),
    **dict.fromkeys((torch.mul, T.mul, T.__mul__, T.__rmul__), _scale),
    **dict.fromkeys((torch.sum, T.sum), _sum),
    sparse_sum: _sparse_sum,
    _getter(T.layout): lambda matrix: matrix.form,
    _getter(T.is_sparse): lambda matrix: matrix.form == torch.sparse_coo,
    _getter(T.is_sparse_csr): lambda matrix: matrix.form == torch.sparse_csr,
}
_PLAIN = {
    T.size,
    T.dim,
    T.is_floating_point,
    T.element_size,
    *(_getter(prop) for prop in (T.shape, T.dtype, T.device, T.ndim, T.requires_grad, T.is_cuda, T.grad_fn)),
}


_NO_VALUE = {"check_invariants", "pin_memory", "requires_grad"}
"""Keywords of constructors that change no value: inference needs no gradients, and indices are checked."""


def _csr(
    crow_indices: Any,
    col_indices: Any,
    values: Any,
    size: Any = None,
    *,
    dtype: Any = None,
    device: Any = None,
) -> SparseOperand:
    values = _placed(values, size, dtype, device)
    dst = _expanded(crow_indices, col_indices)
    return SparseOperand(dst, col_indices, values, tuple(size), torch.sparse_csr)


def _csc(
    ccol_indices: Any,
    row_indices: Any,
    values: Any,
    size: Any = None,
    *,
    dtype: Any = None,
    device: Any = None,
) -> SparseOperand:
    values = _placed(values, size, dtype, device)
    src = _expanded(ccol_indices, row_indices)
    return SparseOperand(row_indices, src, values, tuple(size), torch.sparse_csc)


def _coo(
    indices: Any,
    values: Any,
    size: Any = None,
    *,
    dtype: Any = None,
    device: Any = None,
    is_coalesced: bool | None = None,
) -> SparseOperand:
    values = _placed(values, size, dtype, device)
    ordered = bool(is_coalesced)
    return SparseOperand(indices[0], indices[1], values, tuple(size), torch.sparse_coo, ordered, not ordered)


def _compressed(
    compressed_indices: Any,
    plain_indices: Any,
    values: Any,
    size: Any = None,
    *,
    layout: Any = None,
    dtype: Any = None,
    device: Any = None,
) -> SparseOperand:
    make = {torch.sparse_csr: _csr, torch.sparse_csc: _csc}.get(layout)
    if make is None:
        raise NotImplementedError(_refusal(torch.sparse_compressed_tensor, ["layout"]))
    return make(compressed_indices, plain_indices, values, size, dtype=dtype, device=device)


def _compressed_indices(index: torch.Tensor, size: Any, *, out_int32: bool = False) -> torch.Tensor:
    """Convert ascending row ids [E] to offsets [size + 1]; torch's own function takes no symbolic size."""
    counts = index.new_zeros(size).index_add(0, index, torch.ones_like(index))
    offsets = torch.cat([counts.new_zeros(1), counts.cumsum(0)])
    return offsets.to(torch.int32) if out_int32 else offsets


def _placed(values: torch.Tensor, size: Any, dtype: Any, device: Any) -> torch.Tensor:
    """Return the values that a constructor keeps; NotImplementedError if it has no size or moves them."""
    if size is None:
        raise NotImplementedError(
            "a torch.sparse constructor without size= cannot be captured: its size would be read "
            "from the values; pass size=(num_nodes, num_nodes)"
        )
    wanted = values.device if device is None else torch.device(device)
    if wanted.type != values.device.type or wanted.index not in (None, values.device.index):
        raise NotImplementedError(_refusal(torch.sparse_coo_tensor, ["device"]))
    return _as_dtype(values, dtype)


_CONSTRUCTORS: dict[Any, Callable[..., Any]] = {
    coo_to_csr: _compressed_indices,
    torch.sparse_csr_tensor: _csr,
    torch.sparse_csc_tensor: _csc,
    torch.sparse_coo_tensor: _coo,
    torch.sparse_compressed_tensor: _compressed,
}
