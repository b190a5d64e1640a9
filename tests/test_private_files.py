"""Rates and kernels in the cache folder: taken only where nobody else can have written them."""

import os
import warnings
from collections.abc import Callable
from pathlib import Path

import pytest

from gnnc import environment, private_files
from gnnc.calibrate import json_cache
from gnnc.private_files import UntrustedError, read_private, write_private


@pytest.fixture
def file(tmp_path: Path) -> Path:
    path = tmp_path / "gnnc" / "rates.json"
    write_private(path, b"[1]")
    return path


def test_what_is_written_is_read_and_nobody_else_can_write_it(file: Path) -> None:
    old = os.umask(0)
    try:
        write_private(file.parent / "deep" / "other.json", b"[2]")
    finally:
        os.umask(old)
    assert read_private(file) == b"[1]" and read_private(file.parent / "deep" / "other.json") == b"[2]"
    assert all(not path.stat().st_mode & 0o022 for path in file.parent.rglob("*"))
    assert {path.name for path in file.parent.rglob("*")} == {"rates.json", "deep", "other.json"}


def link_file(file: Path) -> None:
    other = file.parent / "other"
    file.rename(other)
    file.symlink_to(other)


def link_folder(file: Path) -> None:
    other = file.parent.with_name("elsewhere")
    file.parent.rename(other)
    file.parent.symlink_to(other, target_is_directory=True)


CHANGES: list[tuple[Callable[[Path], None], str]] = [
    (link_file, "is a link"),
    (link_folder, "is a link"),
    (lambda file: file.chmod(0o666), "can be written by other users"),
    (lambda file: file.chmod(0o620), "can be written by other users"),
    (lambda file: file.parent.chmod(0o777), "can be written by other users"),
    (lambda file: file.parent.chmod(0o1777), "can be written by other users"),
]


@pytest.mark.parametrize(("change", "reason"), CHANGES)
def test_files_that_others_may_have_written_are_not_read(
    file: Path, change: Callable[[Path], None], reason: str
) -> None:
    change(file)
    with pytest.raises(UntrustedError, match=f"{reason}.*GNNC_CACHE"):
        read_private(file)
    with pytest.warns(UserWarning, match=f"{reason}.*measured again"):
        assert json_cache.load(file, list, "the machine is measured") is None


@pytest.mark.parametrize("owner", ["file", "folder"])
def test_files_of_another_user_are_not_read(file: Path, owner: str, monkeypatch: pytest.MonkeyPatch) -> None:
    if os.getuid() == 0:
        os.chown(file if owner == "file" else file.parent, 12345, -1)
    else:
        monkeypatch.setattr(private_files.os, "getuid", lambda: os.geteuid() + 1)
    with pytest.raises(UntrustedError, match="belongs to another user"):
        read_private(file)


def test_nothing_is_written_through_a_link_or_into_a_folder_of_others(file: Path, tmp_path: Path) -> None:
    victim = tmp_path / "victim"
    victim.write_text("mine")
    file.unlink()
    file.symlink_to(victim)
    write_private(file, b"[2]")
    assert victim.read_text() == "mine" and read_private(file) == b"[2]"
    link_folder(file)
    with pytest.warns(UserWarning, match=r"rates cannot be kept.*is a link"):
        json_cache.store(file, [3], "rates")
    file.parent.unlink()
    file.parent.mkdir()
    file.parent.chmod(0o777)
    with pytest.warns(UserWarning, match=r"rates cannot be kept.*other users"):
        json_cache.store(file, [3], "rates")
    assert not list(file.parent.iterdir())


def test_without_a_home_folder_nothing_is_stored(monkeypatch: pytest.MonkeyPatch) -> None:
    def unknown() -> Path:
        raise RuntimeError("Could not determine home directory.")

    monkeypatch.delenv("GNNC_CACHE", raising=False)
    monkeypatch.delenv("XDG_CACHE_HOME", raising=False)
    monkeypatch.setattr(environment.Path, "home", unknown)
    with pytest.warns(UserWarning, match="no home folder is known.*GNNC_CACHE"):
        assert environment.cache_folder() is None
    monkeypatch.setenv("GNNC_CACHE", "off")
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        assert environment.cache_folder() is None
