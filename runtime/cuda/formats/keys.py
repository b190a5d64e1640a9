"""Keys of the values that are cached on the tensors of a graph: see ``tensor_cache``."""

from typing import NamedTuple

from torch import Tensor
from torch.utils.weak import WeakIdRef

from gnnc.ir.format import EDGE_LIST, RUN_TABLE, WINDOW_TABLE

_IDENTITY = "gnnc_identity"
"""Name under which row offsets store their own weak reference."""


class FormatKey(NamedTuple):
    """Key of one value among those that are cached on a tensor.

    Attributes:
        format: name of the format in ``gnnc.ir.format`` that the value is, or the name of the value.
        rows: the row offsets of the CSR, by identity and without a strong reference; None if the tensor
            that owns the value is the row offsets, or if the value does not depend on them.
        width: bytes of a row of x, or rows of a window; None if the value is the same for all.
        sources: rows of x; None if the value is the same for all.
    """

    format: str
    rows: WeakIdRef | None = None
    width: int | None = None
    sources: int | None = None


RUNS = FormatKey(RUN_TABLE.name)
"""Key of the tensors of a run table, on ``rowptr``."""
PENDING_RUNS = FormatKey("pending runs")
"""Key of a run table whose sizes alone are known, on ``rowptr``."""
EDGE_ORDER = FormatKey("edge order")
"""Key of the numbers of all edges in order, on ``rowptr``."""
DESTINATIONS = FormatKey(EDGE_LIST.name)
"""Key of the destination of every edge, on ``rowptr``."""
PADDED_COLUMNS = FormatKey("padded columns")
"""Key of a copy of the columns with memory up to a multiple of four, on ``col``."""


def run_table_key(row_bytes: int) -> FormatKey:
    """Return the key of the ``RunTable`` for rows of x of so many bytes, on ``rowptr``."""
    return FormatKey(RUN_TABLE.name, width=row_bytes)


def sum_table_key(rowptr: Tensor, sources: int, row_bytes: int) -> FormatKey:
    """Return the key of the ``SumTable`` for ``sources`` rows of x of so many bytes, on ``col``."""
    return FormatKey("sums", _identity(rowptr), row_bytes, sources)


def window_table_key(rowptr: Tensor, window: int) -> FormatKey:
    """Return the key of the tensors of a window table with so many rows of x in a window, on ``col``."""
    return FormatKey(WINDOW_TABLE.name, _identity(rowptr), window)


def window_sizes_key(rowptr: Tensor) -> FormatKey:
    """Return the key of the sizes of a window table, on ``col``."""
    return FormatKey("window sizes", _identity(rowptr))


def _identity(rowptr: Tensor) -> WeakIdRef:
    """Return the weak reference of row offsets: the same object each time, which look-ups compare fast."""
    reference = vars(rowptr).get(_IDENTITY)
    return vars(rowptr).setdefault(_IDENTITY, WeakIdRef(rowptr)) if reference is None else reference
