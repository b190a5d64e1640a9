"""Refusal of weights that a model has not registered: a trace takes them for constants."""

import itertools
from collections.abc import Iterator, Mapping
from operator import attrgetter
from typing import Any

import torch
from torch import nn

from gnnc.capture.model_snapshot import NO_CONSTANTS
from gnnc.errors import CaptureError
from gnnc.torch_private import FakeTensor, pytree


def refuse_unregistered(model: nn.Module, constants: Mapping[str, Any], prefix: str) -> None:
    """Refuse weights among a trace's constants: gradients, ``.data =`` and ``.to()`` would be lost on them.

    Args:
        model: the model that was traced.
        constants: the constants of the trace, by path behind ``prefix`` or by a name of the tracer's.
        prefix: path of the model in the module that was traced.

    Raises:
        CaptureError: names the weight; or a constant is a stand-in, whose value nobody knows.
    """
    tensors = [
        (name, value)
        for name, value in constants.items()
        if isinstance(value, torch.Tensor) and value.layout is torch.strided
    ]
    if any(isinstance(value, FakeTensor) for _, value in tensors):
        raise CaptureError(
            f"[{type(model).__name__}] torch.export takes a tensor that is made within torch.vmap or another "
            "function of torch.func for a constant: make it before, or write the step without torch.vmap"
        )
    held = dict(_held_apart(model)) if tensors else {}
    for name, value in tensors:
        path = name.removeprefix(prefix) if value.requires_grad else held.get(_address(value))
        if path is not None:
            raise CaptureError(
                f"[{type(model).__name__}] {path!r} is a weight that parameters() does not list, so no "
                "optimizer, state_dict() or .to() reaches it: keep modules in an nn.ModuleList or "
                "nn.ModuleDict, and tensors that need gradients as nn.Parameter or in an nn.ParameterList"
            )


def registered_weights(model: nn.Module, constants: Mapping[str, Any], prefix: str) -> dict[str, str]:
    """Return the constants of a trace that are parameters or buffers of the model, with their paths.

    Forward reaches them around the tree that was traced, through a global or an attribute of a class.

    Args:
        model: the model, of which a copy was traced.
        constants: the constants of the trace, by path behind ``prefix`` or by a name of the tracer's.
        prefix: path of the copy in the module that was traced.
    """
    others = {
        name: _layout(value)
        for name, value in constants.items()
        if isinstance(value, torch.Tensor)
        and value.layout is torch.strided
        and not isinstance(value, FakeTensor)
        and not _is_attribute(model, name.removeprefix(prefix))
    }
    if not others:
        return {}
    weights = itertools.chain(model.named_parameters(), model.named_buffers())
    paths = {_layout(weight): path for path, weight in weights if weight.layout is torch.strided}
    return {name: paths[layout] for name, layout in others.items() if layout in paths}


def _is_attribute(model: nn.Module, path: str) -> bool:
    try:
        attrgetter(path)(model)
    except AttributeError:
        return False
    return True


def _layout(tensor: torch.Tensor) -> tuple[Any, ...]:
    return tensor.data_ptr(), tensor.shape, tensor.stride(), tensor.dtype


def _held_apart(model: nn.Module) -> Iterator[tuple[int, str]]:
    """Return the weights in attributes, lists, tuples and dicts of modules, with their paths."""
    for path, module in model.named_modules():
        for name, value in vars(module).items():
            if name in NO_CONSTANTS:
                continue
            for keys, leaf in pytree.tree_flatten_with_path(value)[0]:
                where = f"{path}.{name}{pytree.keystr(keys)}".removeprefix(".")
                if isinstance(leaf, nn.Parameter):
                    yield _address(leaf), where
                elif isinstance(leaf, nn.Module):
                    yield from ((_address(weight), f"{where}.{of}") for of, weight in leaf.named_parameters())


def _address(tensor: torch.Tensor) -> int:
    return tensor.untyped_storage().data_ptr()
