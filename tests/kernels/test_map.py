"""map: what it loads, and every type in and out."""

import pytest
import torch
from kernel_graphs import threads
from row_programs import (
    ROWS,
    WIDTHS,
    Program,
    bits,
    map_rows,
    padded,
    quantized,
    random_int8,
    row_scale,
    store,
    strided,
)

from gnnc.runtime.row_program.opcodes import Op


@pytest.mark.parametrize("rows", ROWS)
@pytest.mark.parametrize("width", WIDTHS)
def test_every_shape_and_type(rows: int, width: int) -> None:
    x, q, scale = torch.randn(rows, width), random_int8(rows, width), torch.rand(rows)
    for source, x_scale, want in (
        (x, None, x),
        (strided(x), None, x),
        (x.bfloat16(), None, x.bfloat16().float()),
        (strided(x.bfloat16()), None, x.bfloat16().float()),
        (q, None, q.float()),
        (q, scale, q.float() * scale[:, None]),
        (q, torch.tensor([0.3]), q.float() * torch.tensor([0.3])),
    ):
        for out in (torch.empty(rows, width), strided(torch.zeros(rows, width))):
            map_rows(source, x_scale, store(out))
            assert torch.equal(out, want)


def test_wide_rows() -> None:
    x, out = torch.randn(5, 5000), torch.empty(5, 5000)
    map_rows(x, None, store(out))
    assert torch.equal(out, x)


def test_same_bits_at_any_thread_count() -> None:
    x = torch.randn(50_000, 47)
    results = []
    for threads_given in (1, 2, 4):
        with threads(threads_given):
            program, q, scale = Program(), padded(50_000, 47), torch.empty(50_000)
            amax, columns, count = torch.zeros(1), torch.zeros(47), torch.zeros(1, dtype=torch.int64)
            program.add(Op.AMAX, program.out(amax)).add(Op.AMAX, program.out(columns))
            program.add(Op.QUANT_ROW, program.out(q), program.out(scale))
            fixed = program.out(padded(50_000, 47))
            program.add(Op.QUANT_STATIC, fixed, program.operand(torch.tensor([0.01])), program.out(count))
            map_rows(x, None, program)
            results.append(bits(*program.outs))
    assert results[0] == results[1] == results[2]
    assert amax.item() == x.abs().max()
    assert torch.equal(columns, x.abs().amax(0))
    assert torch.equal(scale, row_scale(x)) and torch.equal(q, quantized(x, scale[:, None]))


@pytest.mark.parametrize(
    ("x", "scale", "message"),
    [
        (torch.ones(3, 4), torch.ones(3), "belongs to an int8 x"),
        (torch.ones(3, 4, dtype=torch.int8), torch.ones(2), "one element, or one a row"),
        (torch.ones(3, 4, dtype=torch.float16), None, "not Half"),
        (torch.ones(3), None, "2 dimensions"),
    ],
)
def test_bad_arguments(x: torch.Tensor, scale: torch.Tensor | None, message: str) -> None:
    with pytest.raises(RuntimeError, match=message):
        map_rows(x, scale, store(torch.empty(3, 4)))
