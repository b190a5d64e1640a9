"""Elementwise ops on rows that branch and join again, mask, or lie side by side: each is one kernel."""

from collections.abc import Callable

import torch
from torch import Tensor

Body = Callable[[Tensor, Tensor, Tensor], Tensor]


def deviation(x: Tensor, y: Tensor, count: Tensor) -> Tensor:
    """Mean and deviation of sums x and sums of squares y, as PNA has them."""
    mean, squares = x / count, y / count
    deviation = (squares - mean * mean).clamp(min=1e-5).sqrt()
    return torch.cat([mean, deviation.masked_fill(deviation <= 1e-5**0.5, 0.0)], -1)


def norm(x: Tensor, y: Tensor, count: Tensor) -> Tensor:
    inverse = (count - 1).pow(-0.5)
    return inverse.masked_fill(inverse == float("inf"), 0.0) * x


def chosen(x: Tensor, y: Tensor, count: Tensor) -> Tensor:
    return torch.where(x > y, x.sigmoid() * count, y.exp() - x)


def towers(x: Tensor, y: Tensor, count: Tensor) -> Tensor:
    stacked = torch.cat([x[:, None], y[:, None] * count[:, None]], 1)
    return torch.cat([stacked[:, 1], stacked[:, 0].tanh(), x[:, 1:], count], -1)


def biased(x: Tensor, y: Tensor, count: Tensor) -> Tensor:
    return (torch.cat([x, y], 1) + torch.arange(2 * x.shape[1], dtype=torch.float32, device=x.device)).relu()


def nested(x: Tensor, y: Tensor, count: Tensor) -> Tensor:
    first = torch.cat([torch.cat([x, y], 1).relu(), x * y], 1)
    return torch.cat([first[:, x.shape[1] :] + 1, y / count], 1)


BODIES: dict[str, Body] = {
    "deviation": deviation,
    "norm": norm,
    "chosen": chosen,
    "towers": towers,
    "biased": biased,
    "nested": nested,
}


class Rows(torch.nn.Module):
    """A model that is one such body."""

    def __init__(self, name: str) -> None:
        super().__init__()
        self.body = BODIES[name]

    def forward(self, x: Tensor, y: Tensor, count: Tensor) -> Tensor:
        return self.body(x, y, count)


def values(rows: int, width: int) -> tuple[Tensor, Tensor, Tensor]:
    """Return operands: counts are 1, where some bodies divide by 0, or more."""
    torch.manual_seed(rows + width)
    x = torch.randn(rows, width)
    return x, x * x + torch.rand(rows, width) * 0.1, torch.randint(1, 5, (rows, 1)).float()
