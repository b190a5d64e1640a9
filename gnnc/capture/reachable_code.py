"""Questions about Python code: whose it is, and which names it reads."""

import dis
import sys
import sysconfig
from collections.abc import Iterator
from functools import cache
from types import CodeType, FunctionType, ModuleType

_OPENED = {"argparse", "collections", "types"}
"""Modules of the standard library whose objects hold what users put into them."""
_LIBRARIES = (
    sys.stdlib_module_names.union(
        ("torch", "torch_geometric", "torch_sparse", "torch_scatter", "pyg_lib", "numpy", "scipy", "pandas"),
        ("gnnc", "lightning", "pytorch_lightning", "lightning_fabric", "sympy", "networkx", "_pytest"),
    )
    - _OPENED
)
_INSTALLED = ("site-packages", "dist-packages", sysconfig.get_path("stdlib"))
ANY_NAME = frozenset(
    ("attrgetter", "eval", "exec", "getattr", "globals", "locals", "methodcaller", "vars", "__dict__")
)
"""Names of code that may read attributes of any name."""


def is_library(module: str | None) -> bool:
    """Return whether a module, by its name, is a library whose objects hold nothing of the user's."""
    return module is not None and module.partition(".")[0] in _LIBRARIES


def is_user_function(function: FunctionType) -> bool:
    """Return whether a function is part of the user's own code."""
    name = function.__code__.co_filename
    return not is_library(function.__module__) and not any(part in name for part in _INSTALLED)


def is_user_module(module: ModuleType) -> bool:
    """Return whether a module is part of the user's own code."""
    name = getattr(module, "__file__", None) or ""
    return not is_library(module.__name__) and not any(part in name for part in _INSTALLED)


_BY_NAME = frozenset(dis.opmap[name] for name in ("LOAD_NAME", "LOAD_CLASSDEREF") if name in dis.opmap)
_LOAD_GLOBAL, _EXTENDED = dis.opmap["LOAD_GLOBAL"], dis.opmap["EXTENDED_ARG"]


@cache
def globals_of(code: CodeType) -> frozenset[str]:
    """Return the names of globals that code reads, functions within it included."""
    return frozenset(_globals(code))


def _globals(code: CodeType) -> Iterator[str]:
    text, extended = code.co_code, 0
    for op, arg in zip(text[::2], text[1::2], strict=True):
        arg, extended = arg | extended, (arg | extended) << 8 if op == _EXTENDED else 0
        if op == _LOAD_GLOBAL:
            yield code.co_names[arg >> 1]  # the lowest bit says that it is called
        elif op in _BY_NAME:  # in the body of a class
            yield from code.co_names
    for constant in code.co_consts:
        if isinstance(constant, CodeType):
            yield from _globals(constant)


@cache
def names_of(code: CodeType) -> frozenset[str]:
    """Return the names of globals and attributes that code reads, functions within it included."""
    return frozenset(_names(code))


def _names(code: CodeType) -> Iterator[str]:
    yield from code.co_names
    for constant in code.co_consts:
        if isinstance(constant, CodeType):
            yield from _names(constant)
