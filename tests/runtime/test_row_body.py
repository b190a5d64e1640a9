"""Groups of elementwise ops that no row program has run in one kernel, and mean the same."""

import pytest
import torch
from row_bodies import BODIES, Rows, values
from torch import Tensor, nn

import gnnc


def kernels_of(compiled: gnnc.CompiledModel) -> list[str]:
    """Return the kernels of a program's launches."""
    nodes = compiled.stages[-1][1].graph.nodes
    return [node.meta["kernel"] for node in nodes if "kernel" in node.meta]


@pytest.mark.parametrize("rows", [1, 3, 200])
@pytest.mark.parametrize("width", [2, 17, 64])
@pytest.mark.parametrize("name", BODIES)
def test_a_body_is_one_kernel_with_the_values_of_eager(name: str, rows: int, width: int) -> None:
    given = values(rows, width)
    compiled = gnnc.compile(Rows(name).eval(), "fp32", example_inputs=given)
    with torch.no_grad():
        got, want = compiled(*given), Rows(name)(*given)
    torch.testing.assert_close(got, want, rtol=1e-6, atol=1e-6)
    assert [kernel for kernel in kernels_of(compiled) if kernel != "reference"] == ["row_body"]


@pytest.mark.parametrize("name", BODIES)
def test_no_rows(name: str) -> None:
    given = values(0, 4)
    compiled = gnnc.compile(Rows(name).eval(), "fp32")
    assert compiled(*given).shape == Rows(name)(*given).shape


def test_what_others_read_is_computed_once() -> None:
    class Twice(nn.Module):
        def forward(self, x: Tensor, y: Tensor) -> tuple[Tensor, Tensor]:
            mean = x / y.sum()
            return torch.cat([mean, mean.masked_fill(mean < 0, 0.5)], 1), mean

    given = values(9, 4)[:2]
    compiled = gnnc.compile(Twice().eval(), "fp32", example_inputs=given)
    for got, want in zip(compiled(*given), Twice()(*given), strict=True):
        torch.testing.assert_close(got, want)
    assert "row_body" in kernels_of(compiled)


@pytest.mark.parametrize(
    "model",
    [
        pytest.param(lambda x, y: torch.cat([x, y], 0) * 2, id="rows one after the other"),
        pytest.param(
            lambda x, y: x.masked_fill(torch.ones_like(x, dtype=torch.bool).tril(), 0), id="a mask by place"
        ),
        pytest.param(lambda x, y: torch.cat([x, y.cumsum(0)], 1), id="one op"),
    ],
)
def test_others_are_left_alone(model) -> None:
    class Model(nn.Module):
        def forward(self, x: Tensor, y: Tensor) -> Tensor:
            return model(x, y)

    given = values(9, 4)[:2]
    compiled = gnnc.compile(Model().eval(), "fp32", example_inputs=given)
    torch.testing.assert_close(compiled(*given), model(*given))
    assert "row_body" not in kernels_of(compiled)
