"""Calls of ``int``, ``float`` and ``len`` that keep their result symbolic while a model is traced.

Python's ``int`` must return a number, which a trace does not know: ``int(batch.max()) + 1`` would fail, and
``len(x)`` would fix the size of ``x``. While a model is traced, the functions that it reaches run with code
in which these calls go to the functions of this module. The values of other threads are plain tensors and
numbers, for which both give the same.
"""

import builtins
import contextlib
import dis
import functools
import re
import sys
from collections.abc import Callable, Iterable, Iterator
from types import CodeType, FunctionType, MethodType, ModuleType
from typing import Any
from weakref import WeakKeyDictionary

import torch
from torch import Tensor, nn

from gnnc.capture.hooks import global_hooks, hook_tables
from gnnc.capture.thread_patches import replaced

_INSTALLED = re.compile(r"[\\/](site|dist)-packages[\\/]")
_PYG = ("torch_geometric.nn", "torch_geometric.utils")
_PYG_DATA = "torch_geometric.data"
_LARGEST_ARGUMENT = 255
"""Largest argument of an instruction that fits its byte."""
_LOAD_GLOBAL, _EXTENDED = dis.opmap["LOAD_GLOBAL"], dis.opmap["EXTENDED_ARG"]
_ANALYSES: "WeakKeyDictionary[FunctionType, _Analysis]" = WeakKeyDictionary()


@contextlib.contextmanager
def symbolic_calls(model: nn.Module, classes: Iterable[type] = ()) -> Iterator[None]:
    """Give every function that the model reaches the code with symbolic calls; restore it on exit.

    Args:
        model: the model, whose methods, hooks and function attributes are followed.
        classes: classes of arguments, whose methods forward may call.
    """
    with contextlib.ExitStack() as stack:
        for function in _reachable(model, classes):
            code = _analyzed(function).symbolic
            if code is not None:
                stack.enter_context(replaced(function, "__code__", code))
        yield


def symbolic_int(*args: Any, **kwargs: Any) -> Any:
    """Return ``int(...)``; the integer of a traced tensor or size is a SymInt."""
    value = _number(args[0]) if len(args) == 1 and not kwargs else None
    if isinstance(value, torch.SymInt):
        return value
    return torch.sym_int(value) if isinstance(value, torch.SymFloat) else int(*args, **kwargs)


def symbolic_float(*args: Any) -> Any:
    """Return ``float(...)``; the number of a traced tensor or size is a SymFloat."""
    value = _number(args[0]) if len(args) == 1 else None
    symbolic = isinstance(value, torch.SymInt | torch.SymFloat)
    return torch.sym_float(value) if symbolic else float(*args)


def symbolic_len(value: Any) -> Any:
    """Return ``len(value)``; the length of a traced tensor is a SymInt."""
    return value.shape[0] if isinstance(value, Tensor) and value.dim() > 0 else len(value)


def _number(value: Any) -> Any:
    return value.item() if isinstance(value, Tensor) and value.numel() == 1 else value


_SYMBOLIC: dict[str, Callable[..., Any]] = {
    "int": symbolic_int,
    "float": symbolic_float,
    "len": symbolic_len,
}
_GLOBALS = {name: f"__gnnc_{name}__" for name in _SYMBOLIC}
"""Names under which any module finds the functions, beside the builtins."""
for _name, _function in _SYMBOLIC.items():
    setattr(builtins, _GLOBALS[_name], _function)


def _analyzed(function: FunctionType) -> "_Analysis":
    found = _ANALYSES.get(function)
    if found is None or found.code is not function.__code__:
        found = _ANALYSES[function] = _Analysis(function.__code__)
    return found


class _Analysis:
    """The code of a function, its code with symbolic calls (None: it has none), and its names."""

    __slots__ = ("code", "names", "symbolic")

    def __init__(self, code: CodeType) -> None:
        self.code = code
        self.names = {*code.co_names}
        inner = {at: _Analysis(c) for at, c in enumerate(code.co_consts) if isinstance(c, CodeType)}
        self.names.update(*(analysis.names for analysis in inner.values()))
        self.symbolic = None
        constants = list(code.co_consts)
        for at, analysis in inner.items():
            constants[at] = analysis.symbolic or constants[at]
        names, text = _renamed_calls(code)
        if text is not None or any(analysis.symbolic for analysis in inner.values()):
            self.symbolic = code.replace(
                co_code=text or code.co_code, co_names=tuple(names), co_consts=tuple(constants)
            )


def _renamed_calls(code: CodeType) -> tuple[list[str], bytes | None]:
    """Return the names of a code object, and its instructions with symbolic calls; None: it has no such call.

    Only globals that are called are renamed: the lowest bit of the argument of LOAD_GLOBAL is 1 for these,
    and 0 where the global is read otherwise, as in ``isinstance(x, int)``.
    """
    names, text, found = list(code.co_names), None, False
    for name in _SYMBOLIC.keys() & code.co_names:
        before = code.co_names.index(name) << 1 | 1
        after = len(names) << 1 | 1
        if max(before, after) > _LARGEST_ARGUMENT:
            continue
        text = bytearray(code.co_code) if text is None else text
        for at in range(0, len(text), 2):
            if text[at] == _LOAD_GLOBAL and text[at + 1] == before and (at == 0 or text[at - 2] != _EXTENDED):
                text[at + 1], found = after, True
        names.append(_GLOBALS[name])
    return names, bytes(text) if text is not None and found else None


def _reachable(model: nn.Module, classes: Iterable[type]) -> list[FunctionType]:
    """Return the Python functions that a call of the model may run, without those of torch and others."""
    classes = list(classes)
    packages = {_package(type(module).__module__) for module in model.modules()}
    search = _Search(packages, (*_PYG, _PYG_DATA) if classes else _PYG)
    for module in model.modules():
        search.add(type(module))
        for value in vars(module).values():
            search.add(value)
        for table in hook_tables(vars(module)):
            for hook in table.values():
                search.add(hook)
    for _, _, hook in global_hooks():
        search.add(hook)
    for kind in classes:
        search.add(kind)
    return search.run()


class _Search:
    """Search through the names that functions use.

    Args:
        packages: installed packages whose functions are followed; code that is not installed always is.
        modules: prefixes of the names of modules whose functions are followed.
    """

    def __init__(self, packages: set[str], modules: tuple[str, ...]) -> None:
        self.packages = packages - {"torch", "torch_geometric", "builtins"}
        self.modules = modules
        self.found: dict[int, FunctionType] = {}
        self.waiting: list[FunctionType] = []
        self.seen: set[int] = set()
        self.followed: dict[str, bool] = {}

    def run(self) -> list[FunctionType]:
        while self.waiting:
            function = self.waiting.pop()
            names = _analyzed(function).names
            for cell in function.__closure__ or ():
                with contextlib.suppress(ValueError):  # an empty cell
                    self.add(cell.cell_contents)
            for name in names:
                value = function.__globals__.get(name)
                if value is None:
                    value = sys.modules.get(name)
                if isinstance(value, ModuleType):
                    self._open(value, names)
                else:
                    self.add(value)
        return list(self.found.values())

    def add(self, value: Any) -> None:
        """Add a function, the methods of a class, or what a wrapper calls."""
        if isinstance(value, staticmethod | classmethod | MethodType):
            value = value.__func__
        elif isinstance(value, functools.partial):
            value = value.func
        elif isinstance(value, property | functools.cached_property):
            value = value.fget if isinstance(value, property) else value.func
        if isinstance(value, FunctionType):
            if id(value) not in self.found and self._follows(value.__module__):
                self.found[id(value)] = value
                self.waiting.append(value)
                self.add(getattr(value, "__wrapped__", None))
        elif isinstance(value, type) and id(value) not in self.seen:
            self.seen.add(id(value))
            for base in value.__mro__:
                if self._follows(base.__module__):
                    for member in vars(base).values():
                        self.add(member)

    def _open(self, module: ModuleType, names: Iterable[str]) -> None:
        """Add what ``names`` are in a module, and in the modules that they are in it."""
        modules = [module]
        for each in modules:
            if self._follows(each.__name__):
                for name in names:
                    value = vars(each).get(name)
                    if not isinstance(value, ModuleType):
                        self.add(value)
                    elif value not in modules:
                        modules.append(value)

    def _follows(self, module: str | None) -> bool:
        if module is None:
            return False
        known = self.followed.get(module)
        if known is None:
            known = self.followed[module] = self._is_of_model(module)
        return known

    def _is_of_model(self, module: str) -> bool:
        package = _package(module)
        if package in self.packages or module.startswith(self.modules):
            return True
        if package in ("torch", "torch_geometric", "gnnc", *sys.stdlib_module_names):
            return False
        return _INSTALLED.search(getattr(sys.modules.get(module), "__file__", None) or "") is None


def _package(module: str) -> str:
    return module.partition(".")[0]
