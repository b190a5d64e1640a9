"""Side effects of a forward: compiled calls do not repeat them, so each is refused or reported.

A trace runs forward once, on stand-ins. Changes that the run leaves in the model or in an argument are
undone; only in-place writes into registered buffers are part of the program.
"""

import contextlib
import copy
import inspect
import itertools
import re
from collections import OrderedDict
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sequence
from typing import Any

import torch
from torch import Tensor, nn

from gnnc.capture.arguments import signature_of
from gnnc.capture.hooks import global_hooks, hook_tables, name_of
from gnnc.capture.model_snapshot import NO_CONSTANTS
from gnnc.capture.private_copy import is_plain
from gnnc.capture.pyg_data import Container, to_dicts
from gnnc.capture.trace_lock import TRACES
from gnnc.errors import CaptureError
from gnnc.torch_private import FakeTensor, forward_pre_hooks, pytree

_FAKE_CACHE = re.compile(r"^_\w+_memo(_vc|_epoch)?$")
"""Pattern of the attributes in which a fake tensor keeps the sizes of its selections."""
_LIBRARIES = ("torch.", "torch_geometric.")
_CONTAINERS = (dict, OrderedDict, list)
_PLAIN = (bool, int, float, str, Container)
_RESULTS = (Tensor, int, float, str, type(None), torch.SymInt, torch.SymFloat, torch.SymBool)


# What a trace leaves behind


@contextlib.contextmanager
def undone(model: nn.Module, arguments: Iterable[Any], without: Collection[nn.Module] = ()) -> Iterator[None]:
    """Restore, on exit, all that a trace sets: attributes of modules and arguments, lists and dicts.

    Other threads may read the modules meanwhile, so no attribute is removed and set again. The modules
    ``without`` stay as they are set.
    """
    kept: dict[int, tuple[Any, Any]] = {}
    hooks = [hook for _, table in _hook_tables(model) for hook in table.values()]
    hooks += [hook for _, _, hook in global_hooks()]
    held = [vars(module).items() for module in model.modules()]
    values = {f"{number}.{name}": value for number, table in enumerate(held) for name, value in table}
    objects = [value for _, value in _plain_objects(_entries(values))]
    reached = itertools.chain.from_iterable(map(_in_reach, hooks))
    for owner in (*model.modules(), *objects, *arguments, *reached):
        if not any(owner is module for module in without):
            _keep(owner if type(owner) in _CONTAINERS else getattr(owner, "__dict__", None), kept)
    try:
        yield
    finally:
        for container, before in kept.values():
            _restore(container, before)


def _in_reach(hook: Callable[..., Any]) -> Iterator[Any]:
    """Return the objects in which a hook may store tensors: its own, and containers that its code names."""
    yield from (hook, getattr(hook, "__self__", None))
    if inspect.isroutine(hook) and not inspect.isbuiltin(hook):
        names = inspect.getclosurevars(hook)
        variables = (*names.nonlocals.values(), *names.globals.values())
        yield from (value for value in variables if type(value) in _CONTAINERS)


def _keep(container: Any, kept: dict[int, tuple[Any, Any]]) -> None:
    if type(container) not in _CONTAINERS or id(container) in kept:
        return
    kept[id(container)] = container, copy.copy(container)
    for value in container.values() if isinstance(container, dict) else container:
        _keep(value, kept)


def _restore(container: Any, before: Any) -> None:
    if isinstance(container, list):
        container[:] = before
        return
    if list(container) == list(before):
        container.update(before)
        return
    for key in container.keys() - before.keys():
        del container[key]
    for key, value in before.items():  # in the old order, too
        container.pop(key, None)
        container[key] = value


# What compiled calls would not do


def call_alone(
    model: nn.Module,
    args: Sequence[Any],
    kwargs: Mapping[str, Any],
    unwritten: set[str],
    record: contextlib.AbstractContextManager[None],
) -> Any:
    """Return ``model(*args, **kwargs)``; refuse attributes that it sets, and results that hide tensors.

    Args:
        model: the model.
        args: positional arguments of its forward.
        kwargs: keyword arguments.
        unwritten: receives the paths that forward sets in graphs, dicts and lists among its arguments. The
            trace has copies of these: the caller's stay as they are, and no result depends on them.

        record: entered while the model runs.

    Raises:
        CaptureError: names the attribute, the argument, the hook or the result.
    """
    arguments = signature_of(model).bind(*args, **kwargs).arguments
    held, objects, given = _attributes(model), _objects(arguments), _entries(arguments)
    with _hooks_checked(model), record:
        result = model(*args, **kwargs)
    for path in _differing(held, _attributes(model)):
        raise CaptureError(
            f"[{type(model).__name__}] forward sets {path}, which compiled calls would not do: return the "
            "value, or copy it into a registered buffer (buffer.copy_(value))"
        )
    for path in _differing(objects, _objects(arguments)):
        name = path.partition(".")[0]
        raise CaptureError(
            f"[{type(model).__name__}] forward sets {path}, which compiled calls would not do to the "
            f"caller's {name}: let forward work on a copy ({name} = copy.copy({name}))"
        )
    unwritten.update(_differing(given, _entries(arguments)))
    _check_result(model, result)
    return result


def run_alone(entry: nn.Module, tensors: Sequence[Tensor]) -> None:
    """Run ``entry``, which uses ``call_alone``, for its refusals, which Dynamo would skip.

    Weights are copies, since a run writes into buffers.
    """
    weights = itertools.chain(entry.named_parameters(), entry.named_buffers())
    copies = {name: weight.detach().clone() for name, weight in weights}
    try:
        torch.func.functional_call(entry, copies, tuple(tensors))
    except CaptureError:
        raise
    except Exception:  # any other error is of these values: the trace that follows says what it fails for
        return


def _attributes(model: nn.Module) -> dict[str, Any]:
    """Return the contents of buffers and attributes of modules, by path.

    Other attributes of torch's and PyG's layers are caches and switches, which forward may set.
    """
    found = {}
    for path, module in model.named_modules(prefix="self"):
        held = dict(module._buffers)
        if not type(module).__module__.startswith(_LIBRARIES):
            others = NO_CONSTANTS | _made_by_hooks(module)
            held |= {name: value for name, value in vars(module).items() if name not in others}
        found |= {f"{path}.{entry}": value for entry, value in _entries(held).items()}
    for path, value in _plain_objects(found):
        found |= _entries({f"{path}.{name}": held for name, held in vars(value).items()})
    return found


def _plain_objects(held: Mapping[str, Any]) -> list[tuple[str, Any]]:
    """Return the objects of the user's classes among named values, at any depth, with their paths."""
    objects: dict[int, tuple[str, Any]] = {}
    todo = dict(held)
    while todo:
        path, value = todo.popitem()
        if id(value) not in objects and is_plain(value):
            objects[id(value)] = path, value
            todo |= _entries({f"{path}.{name}": inner for name, inner in vars(value).items()})
    return list(objects.values())


def _made_by_hooks(module: nn.Module) -> set[str]:
    """Return the weights that hooks (pruning, weight norm) compute from parameters before each call."""
    hooks = filter(_is_of_torch, forward_pre_hooks(module))
    return {getattr(hook, "_tensor_name", None) or getattr(hook, "name", "") for hook in hooks}


def _is_of_torch(hook: Callable[..., Any]) -> bool:
    return str(getattr(hook, "__module__", None)).startswith(_LIBRARIES)


def _objects(arguments: Mapping[str, Any]) -> dict[str, Any]:
    """Return the contents of the attributes of arguments, by path."""
    return _entries(
        {
            f"{name}.{key}": value
            for name, argument in arguments.items()
            for key, value in getattr(argument, "__dict__", {}).items()
            if not (isinstance(argument, FakeTensor) and _FAKE_CACHE.search(key))
        }
    )


def _entries(held: Mapping[str, Any]) -> dict[str, Any]:
    """Return the contents of named values, by path; containers and PyG's graphs are opened."""
    found = {}
    for name, value in held.items():
        for path, leaf in pytree.tree_flatten_with_path(to_dicts(value))[0]:
            place = f"{name}{pytree.keystr(path)}"
            if isinstance(leaf, dict | list):  # of a class that extends them
                items = dict.items(leaf) if isinstance(leaf, dict) else enumerate(list.__iter__(leaf))
                found |= _entries({f"{place}[{key!r}]": item for key, item in items})
            elif isinstance(leaf, set):
                found[place] = repr(sorted(map(id, leaf)))
            else:
                found[place] = leaf
    return found


def _differing(before: Mapping[str, Any], after: Mapping[str, Any]) -> Iterator[str]:
    """Return the paths whose value was changed, added or removed."""
    for path in {**before, **after}:
        if path not in before or path not in after or not _is_same(before[path], after[path]):
            yield path


def _is_same(one: Any, other: Any) -> bool:
    return one is other or (type(one) is type(other) and isinstance(one, _PLAIN) and one == other)


def _check_result(model: nn.Module, result: Any) -> None:
    for path, leaf in pytree.tree_flatten_with_path(result)[0]:
        if not isinstance(leaf, _RESULTS):
            place = f" in result{pytree.keystr(path)}" if path else ""
            raise CaptureError(
                f"[{type(model).__name__}] forward returns a {type(leaf).__name__}{place}, which gnnc cannot "
                "look into: return its tensors, alone or in tuples, lists and dicts"
            )


@contextlib.contextmanager
def _hooks_checked(model: nn.Module) -> Iterator[None]:
    """Refuse hooks that neither return nor write a tensor: their effect is not part of the result."""
    with contextlib.ExitStack() as stack:
        for path, table in _hook_tables(model):
            stack.callback(_restore, table, copy.copy(table))
            own = {key: hook for key, hook in table.items() if not _is_of_torch(hook)}
            table.update({key: _checked(hook, path, model) for key, hook in own.items()})
        yield


@contextlib.contextmanager
def global_hooks_checked(model: nn.Module) -> Iterator[None]:
    """Run hooks on all modules for the modules of a model alone; refuse those that change no result.

    The tables are those of all threads: hooks run elsewhere as they are.
    """
    modules = {id(module) for module in model.modules()}
    hooks = [(*place, _TracedGlobalHook(place[-1], modules)) for place in global_hooks()]
    for table, key, _, traced in hooks:
        table[key] = traced
    try:
        yield
    finally:
        for table, key, hook, traced in hooks:
            if table.get(key) is traced:
                table[key] = hook
    for _, _, hook, traced in hooks:
        if traced.has_run and not traced.has_effect:
            raise CaptureError(
                f"[{type(model).__name__}] the hook {name_of(hook)} on all modules returns nothing, so that "
                "compiled calls would not run it: remove it (handle.remove()), or let forward return what it "
                "looks at"
            )


class _TracedGlobalHook:
    """A hook on all modules that a trace runs for the modules of its model, and notes its effect."""

    def __init__(self, hook: Callable[..., Any], modules: set[int]) -> None:
        self.hook, self.modules = hook, modules
        self.has_run = self.has_effect = False

    def __call__(self, module: nn.Module, *args: Any, **kwargs: Any) -> Any:
        if not TRACES.traces_here():
            return self.hook(module, *args, **kwargs)
        if id(module) not in self.modules:  # a module of the trace itself
            return None
        before = _versions(args)
        result = self.hook(module, *args, **kwargs)
        self.has_run = True
        self.has_effect |= result is not None or _versions(args) != before
        return result


def _hook_tables(model: nn.Module) -> list[tuple[str, dict[int, Callable[..., Any]]]]:
    """Return the tables of hooks, and the paths of their modules."""
    modules = list(model.named_modules(prefix="self"))
    tables = [(path, table) for path, module in modules for table in hook_tables(vars(module))]
    return [(path, table) for path, table in tables if table]


def _checked(hook: Callable[..., Any], path: str, model: nn.Module) -> Callable[..., Any]:
    def run(*args: Any, **kwargs: Any) -> Any:
        before = _versions(args)
        result = hook(*args, **kwargs)
        if result is None and _versions(args) == before:
            raise CaptureError(
                f"[{type(model).__name__}] the hook {name_of(hook)} of {path} returns nothing, so that "
                "compiled calls would not run it: remove it (handle.remove()), or let forward return what it "
                "looks at"
            )
        return result

    return run


def _versions(arguments: Any) -> list[int]:
    """Return the version counters of the dense tensors among the arguments of a hook."""
    tensors = [leaf for leaf in pytree.tree_leaves(arguments) if isinstance(leaf, Tensor)]
    dense = [tensor for tensor in tensors if tensor.layout is torch.strided]
    return [tensor._version for tensor in dense if not tensor.is_inference()]
