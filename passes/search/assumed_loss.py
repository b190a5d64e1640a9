"""Gradients of outputs under an assumed loss: ``auto`` measures a training step, and is told no loss."""

import torch
from torch import Tensor


def loss_gradient(output: Tensor, number: int) -> Tensor:
    """Return the gradient of the mean cross-entropy of an output, of which columns are logits of classes.

    The classes of rows are random, the same each time, and equally frequent: what rows have in common then
    mostly cancels in the gradients of weights, as it does in training, while its rounding errors do not.

    Args:
        output: floating ``[N, ...]``; one column is the logit of one of two classes.
        number: its place among the outputs, which decides the draw.
    """
    rows = len(output) if output.dim() else 1
    if not output.numel():
        return torch.zeros_like(output)
    logits = output.float().reshape(rows, -1)
    columns = logits.shape[1]
    order = torch.randperm(rows, generator=torch.Generator().manual_seed(number))
    classes = (order % max(columns, 2)).to(output.device)
    if columns == 1:
        gradient = logits.sigmoid() - classes[:, None]
    else:
        gradient = logits.softmax(1)
        gradient[torch.arange(rows, device=output.device), classes] -= 1
    return (gradient / rows).reshape(output.shape).to(output.dtype)
