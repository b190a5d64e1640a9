"""Text of tensors and sizes within forward: it may be printed; numbers made of it are refused."""

import hashlib
import io
import logging
import pprint
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import gnnc
from gnnc.errors import CaptureError


class Scaled(nn.Module):
    def __init__(self, number: Callable[[Tensor], Any]) -> None:
        super().__init__()
        self.number = number

    def forward(self, x: Tensor) -> Tensor:
        return x * self.number(x)


class OfWeight(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.lin = nn.Linear(3, 3)

    def forward(self, x: Tensor) -> Tensor:
        return self.lin(x) * len(str(self.lin.weight))


class Labeled(nn.Module):
    def forward(self, x: Tensor) -> tuple[Tensor, str]:
        return x * 2, f"{x.mean()}"


def written(x: Tensor) -> int:
    file = io.StringIO()
    print(x, file=file)
    return len(file.getvalue())


READ = {
    "repr": lambda x: len(repr(x)),
    "str": lambda x: len(str(x)),
    "format string": lambda x: len(f"a {x} b"),
    "format of a scalar": lambda x: len(f"{x[0, 0]:.3f}"),
    "percent": lambda x: len("%s" % x),  # noqa: UP031
    "within a list": lambda x: len(repr([x])),
    "hash": lambda x: hash(str(x)) % 97,
    "digest": lambda x: int(hashlib.md5(str(x).encode()).hexdigest()[:2], 16),
    "words": lambda x: len(repr(x).split()),
    "a word": lambda x: 2.0 if "nan" in str(x) else 3.0,
    "a letter": lambda x: 2.0 if "#" in str(x) else 3.0,
    "pprint": lambda x: len(pprint.pformat(x)),
    "file": written,
    "number of a tensor": lambda x: len(str(x[0, 0].item())),
    "format of a number": lambda x: len(f"{x[0, 0].item():.3f}"),
    "list of numbers": lambda x: len(repr(x.tolist())),
    "shape": lambda x: len(str(x.shape)),
    "size": lambda x: len(str(x.size(0))),
    "number of a size": lambda x: float(f"{x.shape[0]:d}"),
    "number of a scalar": lambda x: float(f"{x[0, 0]:.3f}"),
    "int of a size": lambda x: int(repr(x.shape[0])),
}


@pytest.mark.first(6)
@pytest.mark.parametrize(
    "model", [*map(Scaled, READ.values()), OfWeight(), Labeled()], ids=[*READ, "weight", "result"]
)
def test_numbers_of_text_are_refused(model: nn.Module) -> None:
    with pytest.raises(
        CaptureError, match=r"what a tensor or a size prints as.*Way out: compute it with torch"
    ):
        gnnc.compile(model.eval(), "fp32")(torch.randn(5, 3))


class Logging(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.lin = nn.Linear(3, 3)

    def forward(self, x: Tensor) -> Tensor:
        assert x.dim() == 2, f"{x}"
        print(f"{x.shape[0]:d} {x.mean().item():.3f} {x.mean():.2f} {x} {x.shape}", self.lin.weight)
        logging.getLogger("forward").warning("%s %s", x.shape, self.lin.bias)
        h = self.lin(x)
        if len(f"{x.dtype}") > 3:  # text without a traced value
            h = h + len(str(x.device))
        return h


@torch.no_grad()
def test_text_that_is_only_printed_does_no_harm(capsys: pytest.CaptureFixture[str]) -> None:
    model = Logging().eval()
    compiled = gnnc.compile(model, "fp32")
    for rows in (5, 7, 2):
        x = torch.randn(rows, 3)
        torch.testing.assert_close(compiled(x), model(x))
    assert "torch.Size" in capsys.readouterr().out
    assert repr(torch.ones(2)) == "tensor([1., 1.])"
