"""Fields of PyG graph objects that a forward reads: the others are neither inputs nor guards of its program.

Batches hold fields that no layer reads, such as names or targets, and may differ in them from call to call.
"""

import copy
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

from gnnc.capture.pyg_data import MARK, NUM_GRAPHS, Container

_UNREAD = "a field that forward does not read"


@dataclass(frozen=True)
class Reads:
    """Record of the fields that a forward reads.

    Attributes:
        names: names of the fields that it reads, or asks for.
        lists_fields: whether it lists the fields, so that their names and order count.
    """

    names: frozenset[str]
    lists_fields: bool


class FieldRecord:
    """Recorder of the fields that a trace reads.

    Attributes:
        is_active: whether reads count now: those of forward do, those of its checks do not.
    """

    def __init__(self) -> None:
        self.is_active = False
        self._names: set[str] = set()
        self._lists_fields = False
        self._watches = False

    def watch(self, graph: Any) -> None:
        """Record what is read of a PyG graph object from now on."""
        self._watches = True
        for store in graph.stores:
            store._mapping = _Fields(store._mapping, self)

    def read(self, name: Any) -> None:
        """Note that a field is read, or asked for."""
        if self.is_active:
            self._names.add(name)

    def list_fields(self) -> None:
        """Note that the names of all fields are read."""
        self._lists_fields |= self.is_active

    def __enter__(self) -> None:
        self.is_active = True

    def __exit__(self, *_: Any) -> None:
        self.is_active = False

    def reads(self) -> Reads | None:
        """Return the fields that were read; None where there is no graph object."""
        return Reads(frozenset(self._names), self._lists_fields) if self._watches else None


def only_read(value: Any, reads: Reads) -> Any:
    """Return arguments, see ``to_dicts``, without the fields that are not read.

    Where forward lists the fields, one that is not read keeps its name and loses its value.
    """
    if isinstance(value, dict):
        mark = value.get(MARK)
        if not isinstance(mark, Container):
            return {key: only_read(item, reads) for key, item in value.items()}
        inner = {key: item for key, item in value.items() if key not in (MARK, NUM_GRAPHS)}
        if mark.is_hetero:
            inner = {store: _fields(fields, reads) for store, fields in inner.items()}
        else:
            inner = _fields(inner, reads)
        return {key: value[key] for key in (MARK, NUM_GRAPHS) if key in value} | inner
    if type(value) in (list, tuple):
        return type(value)(only_read(item, reads) for item in value)
    return value


def _fields(fields: dict[Any, Any], reads: Reads) -> dict[Any, Any]:
    read = {name for name in fields if name in reads.names or str(name).startswith("_")}
    if reads.lists_fields:
        return {name: value if name in read else _UNREAD for name, value in fields.items()}
    return {name: value for name, value in fields.items() if name in read}


class _Fields(dict[Any, Any]):
    """Fields of a graph object that note which of them are read."""

    def __init__(self, fields: dict[Any, Any], record: FieldRecord) -> None:
        super().__init__(fields)
        self._record = record

    def __getitem__(self, name: Any) -> Any:
        self._record.read(name)
        return super().__getitem__(name)

    def get(self, name: Any, default: Any = None) -> Any:
        self._record.read(name)
        return super().get(name, default)

    def __contains__(self, name: Any) -> bool:
        self._record.read(name)
        return super().__contains__(name)

    def __setitem__(self, name: Any, value: Any) -> None:
        self._record.read(name)
        super().__setitem__(name, value)

    def __delitem__(self, name: Any) -> None:
        self._record.read(name)
        super().__delitem__(name)

    def pop(self, name: Any, *default: Any) -> Any:
        self._record.read(name)
        return super().pop(name, *default)

    def setdefault(self, name: Any, default: Any = None) -> Any:
        self._record.read(name)
        return super().setdefault(name, default)

    def __iter__(self) -> Iterator[Any]:
        self._record.list_fields()
        return super().__iter__()

    def __len__(self) -> int:
        self._record.list_fields()
        return super().__len__()

    def keys(self) -> Any:
        self._record.list_fields()
        return super().keys()

    def values(self) -> Any:
        self._read_all()
        return super().values()

    def items(self) -> Any:
        self._read_all()
        return super().items()

    def copy(self) -> dict[Any, Any]:
        self._read_all()
        return dict(super().items())

    __copy__ = copy

    def __deepcopy__(self, memo: dict[int, Any]) -> dict[Any, Any]:
        return copy.deepcopy(self.copy(), memo)

    def __eq__(self, other: object) -> bool:
        self._read_all()
        return super().__eq__(other)

    __hash__ = None  # type: ignore[assignment]

    def _read_all(self) -> None:
        self._record.list_fields()
        for name in super().keys():
            self._record.read(name)
