"""Lazy layers (``GCNConv(-1, 16)``, ``nn.LazyLinear``): the first call shapes them, as in eager."""

import contextlib
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn.parameter import is_lazy

from gnnc.capture.diagnose import diagnosis
from gnnc.capture.pyg_data import from_dicts, to_dicts
from gnnc.capture.side_effects import undone
from gnnc.errors import CaptureError
from gnnc.torch_private import pytree


def has_lazy_layers(model: nn.Module) -> bool:
    """Return whether a parameter or buffer of the model has no shape yet."""
    return any(map(is_lazy, (*model.parameters(), *model.buffers())))


def materialize(model: nn.Module, args: Sequence[Any], kwargs: Mapping[str, Any]) -> None:
    """Run the model once in eval mode on copies of its arguments, so that lazy layers get their parameters.

    Random numbers are drawn as eager does. All else that the call sets is undone.

    Raises:
        CaptureError: the call fails, or does not reach a lazy layer.
    """
    if not has_lazy_layers(model):
        return
    lazy = [module for module in model.modules() if any(map(is_lazy, _tensors(module)))]
    inputs = from_dicts(pytree.tree_map(_copied, to_dicts((tuple(args), dict(kwargs)))))
    with torch.inference_mode(False), torch.no_grad(), _eval_mode(model), undone(model, (), without=lazy):
        try:
            model(*inputs[0], **inputs[1])
        except Exception as error:  # a model may raise any error
            raise CaptureError(diagnosis(model, error)) from error
    for name, tensor in (*model.named_parameters(), *model.named_buffers()):
        if is_lazy(tensor):
            raise CaptureError(
                f"[{type(model).__name__}] {name!r} has no shape yet (lazy initialization), and this call "
                "does not reach it: call the model on arguments that do, or give the layer its in_channels"
            )


def _tensors(module: nn.Module) -> list[Tensor]:
    return [t for t in (*module._parameters.values(), *module._buffers.values()) if t is not None]


def _copied(value: Any) -> Any:
    return value.clone() if isinstance(value, Tensor) else value


@contextlib.contextmanager
def _eval_mode(model: nn.Module) -> Iterator[None]:
    """Switch train mode off, so that statistics are not updated twice; restore each module's mode."""
    modes = {module: module.training for module in model.modules()}
    try:
        for module in modes:
            module.training = False
        yield
    finally:
        for module, mode in modes.items():
            module.training = mode
