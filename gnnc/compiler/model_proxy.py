"""A module that is another module to its users: parameters, state dict, mode, attributes, copies."""

import inspect
from typing import Any, Self

import torch

from gnnc.torch_private import non_persistent_buffers


class ModelProxy(torch.nn.Module):
    """Module whose parameters, buffers, submodules, mode and attributes *are* those of another module.

    Training the module, loading a state dict into it, or moving it is seen through the proxy, and
    ``state_dict()`` has the module's own keys.

    Attributes:
        model: the other module.
    """

    def __init__(self, model: torch.nn.Module) -> None:
        object.__setattr__(self, "model", model)
        super().__init__()
        vars(self).update(
            _parameters=model._parameters,
            _buffers=model._buffers,
            _modules=model._modules,
            _non_persistent_buffers_set=non_persistent_buffers(model),
        )

    @property
    def training(self) -> bool:
        """The model's own flag."""
        return self.model.training

    @training.setter
    def training(self, mode: bool) -> None:  # pyright: ignore[reportIncompatibleVariableOverride]
        if "options" in vars(self):
            self.model.training = mode

    def train(self, mode: bool = True) -> Self:
        """Set the model's mode; returns self."""
        self.model.train(mode)
        return self

    def _apply(self, fn: Any, recurse: bool = True) -> Self:
        self.model._apply(fn, recurse)
        return self

    def state_dict(self, *args: Any, **kwargs: Any) -> Any:
        """Return the model's own state dict."""
        return self.model.state_dict(*args, **kwargs)

    def load_state_dict(self, *args: Any, **kwargs: Any) -> Any:
        """Load into the model; takes what the model's method takes."""
        return self.model.load_state_dict(*args, **kwargs)

    def __getattr__(self, name: str) -> Any:
        try:
            return super().__getattr__(name)
        except AttributeError:
            if name == "model":
                raise
            return getattr(self.model, name)

    @property
    def __signature__(self) -> inspect.Signature:
        return inspect.signature(self.model.forward)
