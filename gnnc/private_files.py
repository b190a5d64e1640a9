"""Files of the cache folder, read and written only where nobody but the user (or root) can have written them.

Rates decide which precision ``auto`` takes and compiled kernels run on the device, so neither is taken from a
folder or a file of others, nor through a link that may lead to one.
"""

import os
import stat
import tempfile
from pathlib import Path

_BY_OTHERS = stat.S_IWGRP | stat.S_IWOTH
_NO_LINK = getattr(os, "O_NOFOLLOW", 0)


class UntrustedError(OSError):
    """A file or a folder of the cache that others may have written; the message says why."""


def read_private(path: Path) -> bytes:
    """Return the content of a file.

    Raises:
        UntrustedError: the file or its folder is a link, belongs to another user, or others can write it.
        OSError: the file is missing or cannot be read.
    """
    _check(path.parent, os.lstat(path.parent))
    _check(path, os.lstat(path))
    with open(os.open(path, os.O_RDONLY | _NO_LINK), "rb") as file:
        _check(path, os.fstat(file.fileno()))
        return file.read()


def write_private(path: Path, content: bytes) -> None:
    """Write a file that only the user can write; whoever reads meanwhile sees the old file or the new one.

    Raises:
        UntrustedError: the folder is a link, belongs to another user, or can be written by others.
        OSError: the file cannot be written.
    """
    path.parent.mkdir(mode=0o700, parents=True, exist_ok=True)
    _check(path.parent, os.lstat(path.parent))
    descriptor, name = tempfile.mkstemp(dir=path.parent, suffix=".part")
    with os.fdopen(descriptor, "wb") as part:
        part.write(content)
    os.replace(name, path)


def _check(path: Path, status: os.stat_result) -> None:
    reason = _reason(status)
    if reason is not None:
        raise UntrustedError(
            f"{path} {reason}: make it your own (chown, chmod go-w), or set GNNC_CACHE to a folder of yours "
            "or to off"
        )


def _reason(status: os.stat_result) -> str | None:
    """Return why a file or folder is not trusted; None where it is."""
    if stat.S_ISLNK(status.st_mode):
        return "is a link, which is not followed"
    if hasattr(os, "getuid") and status.st_uid not in (0, os.getuid()):
        return "belongs to another user"
    return "can be written by other users" if status.st_mode & _BY_OTHERS and os.name == "posix" else None
