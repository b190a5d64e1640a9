"""Remembers what was computed from a graph, for as long as that graph is alive and unchanged.

A call of a compiled model needs values that depend on the graph alone: its CSR, degrees, edge
weights in CSR order. ``StructureCache`` finds them again by the *identity* of the tensors they came
from. A tensor is the same as before when it is the same object (or a view of the same base) at the
same address, with the same shape, strides and dtype, and no in-place operation has touched it
since (``Tensor._version``).

Inference tensors carry no version. For them the entry keeps a copy of the content, and each lookup
compares the whole of it (``torch.equal``). A checksum would have to read as many bytes and could
collide; comparing is exact and, measured on 4.7 million int64, faster (4 ms against 7 ms).

A fused optimizer step leaves versions as they are; so floating tensors count as other ones after any
step of any optimizer.

What cannot be seen: writes that go around PyTorch, through numpy, DLPack or ``.data``, into a tensor
that is not an inference tensor. After such a write the caller must ``clear()``.
"""

import threading
import weakref
from collections import deque
from collections.abc import Callable, Hashable, Iterable, Sequence
from dataclasses import dataclass
from functools import partial
from itertools import count
from typing import Any

import torch
from torch import Tensor

from gnnc.tensor_state import state
from gnnc.torch_private import storage_id

DEFAULT_BYTE_BUDGET = 4 << 30
"""Bytes that cached structures of living graphs may hold before the oldest are dropped."""

Key = tuple[Hashable, ...]


class _Anchor(weakref.ref):  # type: ignore[type-arg]
    """A weak reference that knows which entry dies with its tensor."""

    __slots__ = ("key",)

    key: Key


@dataclass(slots=True, weakref_slot=True, eq=False)
class Entry:
    """Results that were computed from some tensors.

    Attributes:
        anchors: those tensors, or the bases that they are views of.
        copies: position and content of those that carry no version.
        outputs: what was computed.
        nbytes: bytes that it held when they were last counted.
        used: when it was last looked up.
    """

    anchors: tuple[_Anchor, ...]
    copies: tuple[tuple[int, Tensor], ...]
    outputs: Any
    nbytes: int
    used: int = 0

    def is_of(self, anchors: list[Tensor]) -> bool:
        """Return whether the entry was made from these very tensors, not from freed ones at their address."""
        # Equal keys have equally many anchors; `strict` would cost a tenth of a look-up.
        for ref, tensor in zip(self.anchors, anchors):  # noqa: B905
            if ref() is not tensor:
                return False
        return True

    def has_content_of(self, inputs: Sequence[Any]) -> bool:
        """Return whether the inputs without a version still hold what they held."""
        return all(torch.equal(copy, inputs[position]) for position, copy in self.copies)


def _identify(inputs: Sequence[Any]) -> tuple[Key, list[Tensor]]:
    """Return the hashable part of the key and the objects whose lives it depends on."""
    parts: list[Hashable] = []
    anchors: list[Tensor] = []
    for value in inputs:
        if type(value) is int or not isinstance(value, Tensor):
            parts.append(value)
            continue
        anchor = value._base
        if anchor is None:
            anchor = value
        parts.append((id(anchor), *state(value)))
        anchors.append(anchor)
    return tuple(parts), anchors


class StructureCache:
    """A least-recently-used cache of values computed from tensors, safe to share among threads.

    Entries go when a tensor they were computed from is freed, when the byte budget is exceeded
    (oldest first; the newest ``min_entries`` always stay, so that a graph larger than the budget
    does not rebuild at every call), and at ``clear()``. User tensors are never kept alive: an
    output that shares memory with an input is copied.

    What a backend makes of outputs while it uses them counts too. That comes after an entry is
    made, so the newest entries are counted again whenever another one joins them.

    Args:
        byte_budget: bytes of outputs (and content copies) to keep.
        min_entries: newest entries that the budget never drops.
        made_of: returns the tensors that live with an output, made of it later; None: there are none.
    """

    def __init__(
        self,
        byte_budget: int = DEFAULT_BYTE_BUDGET,
        min_entries: int = 1,
        made_of: Callable[[Tensor], Iterable[Tensor]] | None = None,
    ) -> None:
        self.byte_budget = byte_budget
        self.min_entries = min_entries
        self.made_of = made_of
        self._entries: dict[Key, Entry] = {}
        self._newest: deque[Key] = deque(maxlen=2 * min_entries)
        self._nbytes = 0
        self._clock = count()
        self._lock = threading.Lock()
        # Keys of freed tensors. A finalizer may run inside any statement of this class, on the
        # thread that already holds the lock; so it only appends, which is atomic.
        self._freed: deque[Key] = deque()

    def __reduce__(self) -> tuple[Any, ...]:
        # Copies and pickles of a compiled model start empty: entries are valid here and now only.
        return type(self), (self.byte_budget, self.min_entries, self.made_of)

    def __len__(self) -> int:
        self._drop_freed()
        return len(self._entries)

    @property
    def nbytes(self) -> int:
        """Bytes held by the cached values."""
        with self._lock:
            self._drop_freed_locked()
            for entry in self._entries.values():
                self._count(entry)
            return self._nbytes

    def get(self, key_inputs: Sequence[Tensor | int | str], build: Callable[[], Any]) -> Any:
        """Return ``build()``, or what it returned when the inputs were last seen unchanged.

        Args:
            key_inputs: everything that the result depends on: tensors by identity and content
                version, plain values by equality.
            build: computes the outputs (a tensor, or a tuple of tensors and plain values). Runs
                without gradient tracking, outside inference mode and outside the lock; two
                threads that miss at once both build, and one result is kept.

        Returns:
            The cached object itself on every hit; treat its tensors as read-only.
        """
        return self.entry(key_inputs, build).outputs

    def entry(self, key_inputs: Sequence[Tensor | int | str], build: Callable[[], Any]) -> Entry:
        """As ``get``, with what the cache keeps around the outputs: it is alive while it is in the cache."""
        key, anchors = _identify(key_inputs)
        # No lock: an entry never changes once it is in the table, and one dict access is atomic.
        entry = self._entries.get(key)
        if entry is not None and entry.is_of(anchors):
            if not entry.copies or entry.has_content_of(key_inputs):
                self.touch(entry)
                return entry
        entry = self._make_entry(key, anchors, key_inputs, build)
        self._insert(key, entry)
        return entry

    def rebuild(
        self, key_inputs: Sequence[Tensor | int | str], build: Callable[[], Any]
    ) -> tuple[Entry, Callable[[], None]]:
        """Drop what is cached of some inputs, and build it anew, for the caller alone at first.

        Args:
            key_inputs: as of ``get``.
            build: likewise.

        Returns:
            What was built, and what puts it into the cache, in the place of what others built meanwhile.
        """
        key, anchors = _identify(key_inputs)
        with self._lock:
            self._remove(key)
        entry = self._make_entry(key, anchors, key_inputs, build)
        return entry, partial(self._insert, key, entry)

    def touch(self, entry: Entry) -> None:
        """Note that an entry is used now."""
        entry.used = next(self._clock)

    def clear(self) -> None:
        """Forget every entry."""
        with self._lock:
            self._entries.clear()
            self._newest.clear()
            self._nbytes = 0

    def _make_entry(
        self, key: Key, anchors: list[Tensor], inputs: Sequence[Any], build: Callable[[], Any]
    ) -> Entry:
        if torch.is_inference_mode_enabled() or torch.is_grad_enabled():
            with torch.inference_mode(False), torch.no_grad():
                return self._make_entry(key, anchors, inputs, build)
        # Copied before building: an edit that races with the build must not look unchanged later.
        copies = tuple(
            [
                (position, value.clone())
                for position, value in enumerate(inputs)
                if isinstance(value, Tensor) and value.is_inference()
            ]
        )
        outputs = _detach_from(inputs, build())
        refs = tuple([self._watch(anchor, key) for anchor in anchors])
        return Entry(refs, copies, outputs, 0)

    def _watch(self, anchor: Tensor, key: Key) -> _Anchor:
        owner = weakref.WeakMethod(self._on_freed)  # a cache that is dropped waits for no collector

        def on_freed(ref: Any) -> None:
            if (call := owner()) is not None:
                call(ref)

        ref = _Anchor(anchor, on_freed)
        ref.key = key
        return ref

    def _on_freed(self, ref: Any) -> None:
        self._freed.append(ref.key)
        if self._lock.acquire(blocking=False):
            try:
                self._drop_freed_locked()
            finally:
                self._lock.release()

    def _insert(self, key: Key, entry: Entry) -> None:
        with self._lock:
            self._drop_freed_locked()
            self._remove(key)
            entry.used = next(self._clock)
            self._entries[key] = entry
            for newest in filter(None, map(self._entries.get, {key, *self._newest})):
                self._count(newest)
            self._newest.append(key)
            while self._nbytes > self.byte_budget and len(self._entries) > self.min_entries:
                self._remove(min(self._entries, key=lambda known: self._entries[known].used))

    def _count(self, entry: Entry) -> None:
        outputs = (entry.outputs,) if isinstance(entry.outputs, Tensor) else entry.outputs
        tensors = [each for each in outputs if isinstance(each, Tensor)]
        if self.made_of is not None:
            tensors += [each for tensor in tensors for each in self.made_of(tensor)]
        nbytes = _storage_bytes([*tensors, *[copy for _, copy in entry.copies]])
        self._nbytes += nbytes - entry.nbytes
        entry.nbytes = nbytes

    def _remove(self, key: Key) -> None:
        entry = self._entries.pop(key, None)
        if entry is not None:
            self._nbytes -= entry.nbytes

    def _drop_freed(self) -> None:
        with self._lock:
            self._drop_freed_locked()

    def _drop_freed_locked(self) -> None:
        while self._freed:
            key = self._freed.popleft()
            entry = self._entries.get(key)
            # The key may belong to a new tensor at the freed one's address by now.
            if entry is not None and any(ref() is None for ref in entry.anchors):
                self._remove(key)


def _detach_from(inputs: Sequence[Any], outputs: Any) -> Any:
    """Return ``outputs`` with every tensor that shares memory with an input copied."""
    taken = {storage_id(t) for t in inputs if isinstance(t, Tensor)}

    def own(value: Any) -> Any:
        shares = isinstance(value, Tensor) and storage_id(value) in taken
        return value.clone() if shares else value

    return own(outputs) if isinstance(outputs, Tensor) else tuple([own(value) for value in outputs])


def _storage_bytes(tensors: Sequence[Tensor]) -> int:
    return sum({storage_id(tensor): tensor.untyped_storage().nbytes() for tensor in tensors}.values())
