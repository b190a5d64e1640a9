"""Stochastic rounding in CPU kernels: the bits of the reference, at any number of threads, without bias."""

from collections.abc import Iterator

import pytest
import torch
from one_op import fused_program_of
from rounding_cases import FORMS, SEEDS, WIDTHS, rows_of
from torch import Tensor

from gnnc.errors import PrecisionError
from gnnc.ir.philox import philox

GNNC = torch.ops.gnnc


@pytest.fixture(params=[1, 3])
def threads(request: pytest.FixtureRequest) -> Iterator[int]:
    before = torch.get_num_threads()
    torch.set_num_threads(request.param)
    yield request.param
    torch.set_num_threads(before)


def test_words_are_those_of_the_published_generator() -> None:
    zero = torch.zeros(1, dtype=torch.int64)
    ones = zero + 0xFFFFFFFF
    found = [
        [int(word) for word in philox((counter,) * 4, torch.tensor(seed))]
        for counter, seed in ((zero, 0), (ones, -1))
    ]
    assert found == [
        [0x6627E8D5, 0xE169C58D, 0xBC57AC4C, 0x9B00DBD8],
        [0x408F276D, 0x41C83B0E, 0xA20BC7C6, 0x6D5451FD],
    ]


@pytest.mark.usefixtures("threads")
@pytest.mark.parametrize("form", FORMS)
def test_bits_are_those_of_the_reference(form: str) -> None:
    for width in WIDTHS:
        for rows, seed in zip((0, 1, 37, 300), SEEDS, strict=True):
            values = rows_of(rows, width), torch.rand(rows, 1) + 0.5, torch.tensor(seed)
            program = fused_program_of(FORMS[form], *values, backend="cpu")
            assert width == 1 or "reference" not in dict(program.kernels).values()
            got, want = program(*values), FORMS[form](*values)
            assert all(torch.equal(a, b) for a, b in zip(got, want, strict=True)), (width, rows, seed)


@pytest.mark.parametrize("bad", [float("nan"), float("inf")])
@pytest.mark.parametrize("form", FORMS)
def test_rows_that_are_not_finite_are_an_error(form: str, bad: float) -> None:
    x = rows_of(9, 20)
    x[4, 7] = bad
    values = x, torch.ones(9, 1), torch.tensor(5)
    program = fused_program_of(FORMS[form], *values, backend="cpu")
    with pytest.raises(PrecisionError, match="not finite"):
        program(*values)


@pytest.mark.parametrize("form", FORMS)
def test_the_mean_of_many_draws_is_the_value(form: str) -> None:
    x, one = rows_of(40, 33), torch.ones(40, 1)

    def values_of(seed: int) -> Tensor:
        quantized, scale, *others = FORMS[form](x, one, torch.tensor(seed))
        if form == "row_pow2":
            return GNNC.dequantize(quantized, others[1], "row")
        return GNNC.dequantize(quantized, scale, form)

    draws = [values_of(seed) for seed in range(64)]
    error = torch.stack([(draw - x).norm() for draw in draws]).mean()
    assert (torch.stack(draws).mean(0) - x).norm() < error / 6
    assert torch.equal(draws[0] == 0, (draws[0] == 0) | (x == 0)), "a zero stays a zero"


def test_streams_and_seeds_have_bits_of_their_own() -> None:
    x = torch.full((50, 64), 0.5)
    one = torch.tensor(1.0)

    def draw(seed: int, stream: int) -> Tensor:
        return GNNC.quantize(x, one, "int8/tensor", None, torch.tensor(seed), stream).float()

    bits = torch.stack([draw(seed, stream).flatten() for seed in (0, 1, 2**32) for stream in (0, 1, 2)])
    assert (bits.mean(1) - 0.5).abs().max() < 0.04
    correlations = torch.corrcoef(bits) - torch.eye(len(bits))
    assert correlations.abs().max() < 0.08
    assert torch.equal(draw(3, 1), draw(3, 1))
