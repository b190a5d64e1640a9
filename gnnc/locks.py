"""Locks in forked children: a lock that another thread of the parent held is free in the child.

The thread that held a lock while another thread forked does not exist in the child, where nobody would
release the lock.
"""

import os
import weakref
from collections.abc import Callable
from typing import Any

_makers: weakref.WeakKeyDictionary[Any, dict[str, Callable[[], Any]]] = weakref.WeakKeyDictionary()


def renew_at_fork(owner: Any, name: str, make: Callable[[], Any]) -> None:
    """Set ``owner.name`` to ``make()`` in every forked child.

    Args:
        owner: the object or module that holds the lock, which is read as an attribute at each use.
        name: name of the attribute.
        make: returns a new lock, such as ``threading.RLock``.
    """
    _makers.setdefault(owner, {})[name] = make


def _renew() -> None:
    for owner, makers in list(_makers.items()):
        for name, make in makers.items():
            setattr(owner, name, make())


os.register_at_fork(after_in_child=_renew)
