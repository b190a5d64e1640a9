"""Private names of torch stand in one module, and the installed torch has each of them."""

import ast
import importlib
import re
from functools import reduce
from pathlib import Path

import pytest
import torch
from python_files import SOURCES

from gnnc.torch_private import KNOWN_TO_WORK

MODULE = "gnnc/torch_private.py"
# Public in effect: all code that wraps a module or asks for a tensor's version uses these.
ALLOWED = {"_apply", "_base", "_buffers", "_check", "_modules", "_parameters", "_version"}
# Ops of aten may begin with an underscore, and are no API of Python.
OPS = re.compile(r"(torch\.ops|_?aten)\.")


def private_names(path: Path) -> list[str]:
    """Return the private names of torch that a file imports or reads as attributes, with their lines."""
    members = {name.rpartition(".")[2] for name in KNOWN_TO_WORK} - ALLOWED
    found = []
    for node in ast.walk(ast.parse(path.read_text())):
        names: list[str] = []
        if isinstance(node, ast.Import):
            names = [alias.name for alias in node.names]
        elif isinstance(node, ast.ImportFrom):
            names = [f"{node.module}.{alias.name}" for alias in node.names]
        elif isinstance(node, ast.Attribute):
            text = ast.unparse(node)
            names = [text] if node.attr.startswith("_") and not text.startswith("self.") else []
        found += [
            f"{path.name}:{node.lineno}: {name}"
            for name in names
            if _is_private_of_torch(name, members) and name.rpartition(".")[2] not in ALLOWED
        ]
    return found


def _is_private_of_torch(name: str, members: set[str]) -> bool:
    if OPS.match(name):
        return False
    parts = name.split(".")
    if parts[0] == "torch":
        return "experimental" in parts or any(re.match("_[^_]", part) for part in parts)
    return parts[0] != "gnnc" and parts[-1].startswith("_") and parts[-1] in members


@pytest.mark.parametrize(
    ("line", "private"),
    [
        ("from torch._ops import OpOverload", True),
        ("from torch.fx.experimental import symbolic_shapes", True),
        ("from torch.utils import _pytree as pytree", True),
        ("torch._C._cuda_setDevice(0)", True),
        ("node._rename('x')", True),
        ("from torch.fx import Node", False),
        ("torch.ops.aten._to_copy.default(x)", False),
        ("x._version + len(model._buffers)", False),
        ("self._schema", False),
    ],
)
def test_private_names_are_told_from_others(line: str, private: bool, tmp_path: Path) -> None:
    path = tmp_path / "module.py"
    path.write_text(line)
    assert bool(private_names(path)) == private


@pytest.mark.first(1)
@pytest.mark.parametrize("folder", SOURCES)
def test_private_names_stand_in_one_module(folder: str) -> None:
    found = [
        name for path in SOURCES[folder] if not str(path).endswith(MODULE) for name in private_names(path)
    ]
    assert not found, "\n".join(["gnnc/torch_private.py holds private names of torch, not", *found])


def test_the_table_names_all_that_the_module_uses() -> None:
    (path,) = (path for path in SOURCES["gnnc"] if str(path).endswith(MODULE))
    used = {name.rpartition(" ")[2] for name in private_names(path)}
    last = {name.rpartition(".")[2] for name in KNOWN_TO_WORK}
    assert {name.rpartition(".")[2] for name in used} - {"_C", "_dynamo", "_ops", "guards"} <= last


@pytest.mark.parametrize("name", KNOWN_TO_WORK)
def test_the_installed_torch_has(name: str) -> None:
    if "._cuda_" in name and torch.version.cuda is None:
        pytest.skip("this torch is built without CUDA")
    if "()" in name:
        owner, _, attribute = name.partition("().")
        assert hasattr(_resolve(owner)(), attribute)
    else:
        owner, _, attribute = name.rpartition(".")
        assert hasattr(_resolve(owner), attribute)  # of a value that may be None


def _resolve(name: str) -> object:
    parts = name.split(".")
    for end in range(len(parts), 0, -1):
        try:
            module = importlib.import_module(".".join(parts[:end]))
        except ImportError:
            continue
        return reduce(getattr, parts[end:], module)
    raise AssertionError(name)


def test_versions_are_two_numbers() -> None:
    assert all(re.fullmatch(r"\d+\.\d+", version) for found in KNOWN_TO_WORK.values() for version in found)
