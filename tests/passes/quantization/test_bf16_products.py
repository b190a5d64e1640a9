"""Products of inputs take bf16 where quantization reads them twice, or they are narrow; no others do."""

from dataclasses import replace

import pytest
import torch
from torch import Tensor, nn
from torch_geometric.nn import GATConv

import gnnc
from gnnc.passes.assign import Assign
from gnnc.passes.base import Context, run_pass
from gnnc.passes.quantize import Quantize
from gnnc.precision import INT8
from gnnc.runtime.cuda.backend import TARGET
from gnnc.runtime.cuda.kernels.gemm import Shape, tile_of

MOST = 40
ON_CUDA = replace(TARGET, quantized_columns=MOST)


class Wide(nn.Module):
    """Two products, the first of the input."""

    def __init__(self, width: int) -> None:
        super().__init__()
        self.first, self.second = nn.Linear(width, 50), nn.Linear(50, 3)

    def forward(self, x: Tensor) -> Tensor:
        return self.second(self.first(x).relu())


def multiplied(model: nn.Module, *args: Tensor, target=ON_CUDA, **options) -> tuple[list[str], list[str]]:
    """Return the types of the matrices that a model multiplies, and the notes."""
    stages = gnnc.compile(model, "fp32", example_inputs=args).stages
    raised = dict(stages)["exact_values"]
    ctx = Context(precision=INT8, target=target, **options)
    for step in (Assign(), Quantize()):
        raised = run_pass(step, raised, ctx)
    products = [n for n in raised.graph.nodes if str(n.target) in ("gnnc.gemm.default", "gnnc.qgemm.default")]
    types = [str(n.args[0].meta["val"].dtype).removeprefix("torch.") for n in products]
    return types, [note.text for note in ctx.notes]


@pytest.fixture
def model() -> nn.Module:
    torch.manual_seed(0)
    return Wide(MOST + 1).eval()


def test_a_wide_input_takes_bf16(model: nn.Module) -> None:
    types, notes = multiplied(model, torch.randn(9, MOST + 1))
    assert types == ["bfloat16", "int8"]
    assert "bf16, not int8: rows of 41 columns are read twice where they are quantized" in notes


def test_rows_that_are_read_once_stay_int8() -> None:
    types, notes = multiplied(Wide(MOST).eval(), torch.randn(9, MOST))
    assert types == ["int8", "int8"] and not any("read twice" in note for note in notes)


def test_a_narrow_input_takes_bf16() -> None:
    least = ON_CUDA.least_quantized_columns
    types, notes = multiplied(Wide(least - 1).eval(), torch.randn(9, least - 1))
    assert types == ["bfloat16", "int8"]
    assert f"bf16, not int8: rows of {least - 1} columns take longer to quantize than to multiply" in notes
    types, _ = multiplied(Wide(least).eval(), torch.randn(9, least))
    assert types == ["int8", "int8"]


def test_narrow_edge_features_take_bf16() -> None:
    model = GATConv(40, 40, edge_dim=16, add_self_loops=False).eval()
    types, notes = multiplied(model, torch.randn(9, 40), torch.randint(9, (2, 50)), torch.randn(50, 16))
    assert sorted(types) == ["bfloat16", "int8"]
    assert "bf16, not int8: rows of 16 columns take longer to quantize than to multiply" in notes


def test_narrow_rows_that_a_kernel_makes_stay_int8() -> None:
    model = nn.Sequential(nn.Linear(MOST, 8), nn.ReLU(), nn.Linear(8, 3)).eval()
    types, _ = multiplied(model, torch.randn(9, MOST))
    assert types == ["int8", "int8"]


def test_a_backend_without_a_limit_stays_int8(model: nn.Module) -> None:
    types, _ = multiplied(model, torch.randn(9, MOST + 1), target=replace(ON_CUDA, quantized_columns=None))
    assert types == ["int8", "int8"]


def test_what_was_asked_for_the_layer_is_kept(model: nn.Module) -> None:
    named = {"first": INT8}
    types, _ = multiplied(model, torch.randn(9, MOST + 1), overrides=named)
    assert types == ["int8", "int8"]


def test_the_limit_is_that_of_the_kernel() -> None:
    most = TARGET.quantized_columns
    assert most is not None
    for out in (7, 64, 256):
        below, above = (Shape("i8", 1, width, out, False) for width in (most, most + 1))
        tiles = tile_of(below), tile_of(above)
        assert all(tiles)
        assert not tiles[0].is_chunked(below) and tiles[1].is_chunked(above)
