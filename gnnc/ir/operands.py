"""Checks of the tensors that a call brings to an op, before the op's reference reads them.

Anyone may call ``torch.ops.gnnc``. A reference uses ids as addresses of ATen calls and trusts the offsets of
rows, and ATen reads past the end of a storage that was freed or shortened.
"""

from collections.abc import Callable, Mapping
from functools import wraps
from typing import Any

import torch
from torch import Tensor

from gnnc.errors import GraphError, InputError
from gnnc.tensor_state import storage_fault

_SOURCES = ("x", "b", "src")
"""Names of the operands whose rows ``col`` names."""
_PER_EDGE = ("col", "perm", "logits", "x")
"""Names of operands with one element or row for each edge; the first that an op has counts the edges."""
_COUNTS = ("num_src", "num_dst", "num_nodes")
_LARGEST = 2**31 - 1
_INTEGERS = (torch.int32, torch.int64)
_DISPATCH = "__torch_dispatch__"


def validated(op: str, parameters: tuple[str, ...], reference: Callable[..., Any]) -> Callable[..., Any]:
    """Return the reference of an op behind the checks of its operands.

    Args:
        op: name of the op, for messages.
        parameters: names of the op's parameters, in order.
        reference: the function that takes them.
    """

    @wraps(reference)
    def run(*args: Any, **kwargs: Any) -> Any:
        check_operands(op, dict(zip(parameters, args, strict=False)) | kwargs)
        try:
            return reference(*args, **kwargs)
        except (ArithmeticError, LookupError, TypeError, ValueError) as error:
            reason = str(error).splitlines()[0]
            raise InputError(f"[gnnc.{op}] the arguments do not go together: {reason}") from error

    return run


def check_operands(op: str, operands: Mapping[str, Any]) -> None:
    """Refuse operands whose memory is gone, and offsets and ids that are no CSR.

    Args:
        op: name of the op.
        operands: its arguments by name. The values of ids are checked on the CPU alone: other devices check
            what they index with, and a look at the values would wait for them.

    Raises:
        InputError: a storage was freed or shortened, or an operand has the wrong dtype or shape.
        GraphError: ``rowptr`` falls or does not end with the number of edges, or ``col`` names no row.
    """
    for name, value in operands.items():
        for tensor in value if isinstance(value, list | tuple) else (value,):
            if isinstance(tensor, Tensor) and (fault := _storage_fault(tensor)) is not None:
                raise InputError(f"[gnnc.{op}] {name}: {fault}")
    for name in _COUNTS:
        count = operands.get(name)
        if isinstance(count, int) and not 0 <= count <= _LARGEST:
            raise InputError(f"[gnnc.{op}] {name} = {count}: a number of nodes is in 0..{_LARGEST}")
    rowptr = operands.get("rowptr")
    if isinstance(rowptr, Tensor):
        _check_structure(op, rowptr, operands)


def _storage_fault(tensor: Tensor) -> str | None:
    """Return what is wrong with the storage; tensors with a dispatch of their own have none to look at."""
    own = getattr(type(tensor), _DISPATCH) is not getattr(Tensor, _DISPATCH)
    return None if own or tensor.layout is not torch.strided else storage_fault(tensor)


def _check_structure(op: str, rowptr: Tensor, operands: Mapping[str, Any]) -> None:
    if rowptr.dim() != 1 or rowptr.numel() == 0 or rowptr.dtype not in _INTEGERS:
        raise InputError(
            f"[gnnc.{op}] rowptr must be 1-D integers [num_dst + 1], got {rowptr.dtype} {tuple(rowptr.shape)}"
        )
    rows = operands.get("num_dst")
    if isinstance(rows, int) and rows != rowptr.numel() - 1:
        raise InputError(f"[gnnc.{op}] num_dst is {rows}, but rowptr has {rowptr.numel() - 1} rows")
    if rowptr.device.type != "cpu":
        return
    edges = next((operands[name] for name in _PER_EDGE if isinstance(operands.get(name), Tensor)), None)
    _check_offsets(op, rowptr, None if edges is None or edges.dim() == 0 else edges.shape[0])
    ids = "col" if "col" in operands else "perm"
    if isinstance(operands.get(ids), Tensor) and operands[ids].device.type == "cpu":
        _check_ids(op, ids, operands[ids], _source_rows(operands))


def _check_offsets(op: str, rowptr: Tensor, edges: int | None) -> None:
    steps = rowptr.diff()
    if int(rowptr[0]) != 0 or (steps.numel() and int(steps.min()) < 0):
        place = 0 if int(rowptr[0]) != 0 else int((steps < 0).nonzero()[0]) + 1
        raise GraphError(
            f"[gnnc.{op}] rowptr[{place}] = {int(rowptr[place])}: offsets begin with 0 and never fall"
        )
    if edges is not None and int(rowptr[-1]) != edges:
        raise GraphError(f"[gnnc.{op}] rowptr ends with {int(rowptr[-1])}, but there are {edges} edges")


def _source_rows(operands: Mapping[str, Any]) -> int | None:
    """Return the number of rows that ids may name, or None where no operand has these rows."""
    if operands.get("op") == "copy_dst":
        return None
    found = next((operands[name] for name in _SOURCES if operands.get(name) is not None), None)
    tables = found if isinstance(found, list | tuple) else [] if found is None else [found]
    return min((len(table) for table in tables if table.dim()), default=None)


def _check_ids(op: str, name: str, ids: Tensor, rows: int | None) -> None:
    if ids.dim() != 1 or ids.dtype not in _INTEGERS:
        raise InputError(f"[gnnc.{op}] {name} must be 1-D integers [E], got {ids.dtype} {tuple(ids.shape)}")
    if ids.numel() == 0:
        return
    low, high = map(int, ids.aminmax())
    if low < 0 or (rows is not None and high >= rows):
        bad = int(((ids < 0) | (ids >= (high + 1 if rows is None else rows))).nonzero()[0])
        limit = "not be negative" if rows is None else f"be in 0..{rows - 1}"
        raise GraphError(f"[gnnc.{op}] {name}[{bad}] = {int(ids[bad])}: ids must {limit}")
