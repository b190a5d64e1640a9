"""Recurrent layers over sequences whose length is symbolic: one call of torch's kernel.

Torch takes ``nn.LSTM``, ``nn.GRU`` and ``nn.RNN`` apart into their steps while it traces, which needs their
number. Aggregations over the padded sequence of a node's neighbors (LSTM, GRU) have as many steps as the
largest node has neighbors. ``RecurrentMode`` puts an op of a library of our own in the place of such a layer;
it runs in FP32, as an ATen op does. Its gradient is an op, too, which runs the layer again.
"""

from collections.abc import Callable, Mapping, Sequence
from typing import Any

import torch
from torch import SymInt, Tensor

from gnnc.capture.function_mode import Function, FunctionMode

_LIBRARY = torch.library.Library("gnnc_recurrent", "DEF")
_OPERANDS = (
    "Tensor x, Tensor[] states, Tensor[] weights, "
    "bool biases, int layers, bool bidirectional, bool batch_first"
)


class RecurrentMode(FunctionMode):
    """Mode in which recurrent layers over sequences of symbolic length are one op."""

    def _call(self, func: Function, args: Sequence[Any], kwargs: Mapping[str, Any]) -> Any:
        name = _NAMES.get(func)
        if name is not None and not kwargs and len(args) == 9 and _is_symbolic(*args):
            x, states, weights, biases, layers, _, _, bidirectional, batch_first = args
            states = [states] if isinstance(states, Tensor) else list(states)
            op = getattr(torch.ops.gnnc_recurrent, name)
            return tuple(op(x, states, weights, biases, layers, bidirectional, batch_first))
        return func(*args, **kwargs)


def _is_symbolic(x: Any, _states: Any, weights: Any, *options: Any) -> bool:
    """Return whether these are arguments of a padded sequence of symbolic length, without active dropout."""
    _, _, dropout, train, _, batch_first = options
    padded = isinstance(x, Tensor) and x.dim() == 3 and isinstance(weights, list)
    return padded and isinstance(x.shape[1 if batch_first else 0], SymInt) and not (train and dropout > 0)


def _layer(
    function: Function,
    train: bool,
    x: Tensor,
    states: list[Tensor],
    weights: list[Tensor],
    biases: bool,
    layers: int,
    bidirectional: bool,
    batch_first: bool,
) -> list[Tensor]:
    """Return the results of a layer of torch; a layer that is not an LSTM takes its one state as it is."""
    state = states if function is torch.lstm else states[0]
    return list(function(x, state, weights, biases, layers, 0.0, train, bidirectional, batch_first))


def _reference(function: Function) -> Callable[..., list[Tensor]]:
    """Return the function of a layer's results."""

    def run(*operands: Any) -> list[Tensor]:
        return [result.contiguous() for result in _layer(function, False, *operands)]

    return run


def _fake(
    x: Tensor,
    states: list[Tensor],
    weights: list[Tensor],
    biases: bool,
    layers: int,
    bidirectional: bool,
    batch_first: bool,
) -> list[Tensor]:
    width = states[0].shape[-1] * (2 if bidirectional else 1)
    return [x.new_empty((*x.shape[:2], width)), *(x.new_empty(state.shape) for state in states)]


def _gradient(function: Function) -> Callable[..., list[Tensor]]:
    """Return the function of a layer's gradients of its results to those of its input, states and weights."""

    def run(
        gradients: list[Tensor], x: Tensor, states: list[Tensor], weights: list[Tensor], *options: Any
    ) -> list[Tensor]:
        with torch.enable_grad():
            leaves = [tensor.detach().requires_grad_() for tensor in (x, *states, *weights)]
            own_states, own_weights = leaves[1 : 1 + len(states)], leaves[1 + len(states) :]
            # in train mode: cuDNN keeps what its backward pass reads in that mode alone
            results = _layer(function, True, leaves[0], own_states, own_weights, *options)
            found = torch.autograd.grad(results, leaves, gradients)
        return [gradient.contiguous() for gradient in found]

    return run


def _fake_gradient(
    gradients: list[Tensor], x: Tensor, states: list[Tensor], weights: list[Tensor], *options: Any
) -> list[Tensor]:
    return [tensor.new_empty(tensor.shape) for tensor in (x, *states, *weights)]


def _save(ctx: Any, inputs: tuple[Any, ...], output: Any) -> None:
    x, states, weights, *ctx.options = inputs
    ctx.num_states = len(states)
    ctx.save_for_backward(x, *states, *weights)


def _backward(name: str) -> Callable[..., Any]:
    def backward(ctx: Any, gradients: list[Tensor]) -> tuple[Any, ...]:
        x, *others = ctx.saved_tensors
        states, weights = others[: ctx.num_states], others[ctx.num_states :]
        op = getattr(torch.ops.gnnc_recurrent, f"{name}_gradient")
        of_x, *found = op(gradients, x, states, weights, *ctx.options)
        return of_x, found[: ctx.num_states], found[ctx.num_states :], None, None, None, None

    return backward


_NAMES: dict[Any, str] = {
    torch.lstm: "lstm",
    torch.gru: "gru",
    torch.rnn_tanh: "tanh",
    torch.rnn_relu: "relu",
}
for _function, _name in _NAMES.items():
    for _op, _operands, _run, _fake_run in (
        (_name, _OPERANDS, _reference(_function), _fake),
        (f"{_name}_gradient", f"Tensor[] gradients, {_OPERANDS}", _gradient(_function), _fake_gradient),
    ):
        _LIBRARY.define(f"{_op}({_operands}) -> Tensor[]", tags=(torch.Tag.pt2_compliant_tag,))
        _LIBRARY.impl(_op, _run, "CompositeExplicitAutograd")
        torch.library.register_fake(f"gnnc_recurrent::{_op}", _fake_run, lib=_LIBRARY)
    torch.library.register_autograd(
        f"gnnc_recurrent::{_name}", _backward(_name), setup_context=_save, lib=_LIBRARY
    )
