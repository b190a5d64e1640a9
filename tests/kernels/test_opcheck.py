"""The C++ ops write what their schemas say that they write, and nothing else.

They fill tensors that they are given, stand in no graph and have no gradient: of `opcheck`'s tests, only that
of the schema has a meaning for them.
"""

from typing import Any

import pytest
import torch
from kernel_graphs import STORE_F32, codes, ops, random_graph
from torch.library import opcheck

ROWS, WIDTH, EDGES = 8, 7, 20


def _samples() -> dict[str, list[tuple[Any, ...]]]:
    g = random_graph(ROWS, ROWS, EDGES)
    x, q, scale = torch.randn(ROWS, WIDTH), codes(ROWS, WIDTH), torch.rand(ROWS)
    ends = (torch.randn(ROWS, 1), torch.randn(ROWS, 1))

    def program(rows: int = ROWS, width: int = WIDTH) -> tuple[Any, ...]:
        return STORE_F32, [], [], [torch.zeros(rows, width)]

    edges = (torch.arange(EDGES) % ROWS, torch.arange(EDGES) % 3, ROWS, ROWS)
    sorted_edges = (
        torch.zeros(ROWS + 1).long(),
        torch.zeros(EDGES, dtype=torch.int32),
        torch.zeros(EDGES).long(),
    )
    numbers, per_edge = (1.0, 0.2, 1e-16, 1), torch.zeros(EDGES, 1)
    factors = torch.zeros(ROWS, 4)
    return {
        "isa": [()],
        "csr": [(*edges, *sorted_edges)],
        "csr_ordered": [(*edges, torch.tensor([0, *[3] * 7, EDGES]), None, *sorted_edges[1:])],
        "degree": [(g.rowptr, torch.zeros(ROWS))],
        "first_not_finite": [([scale, torch.zeros(0)],)],
        "gemm": [
            (x, None, [torch.randn(4, WIDTH)], [0], 0, *program(width=4)),
            (q, scale, [torch.randn(4, WIDTH)], [0], 1, *program(width=4)),
        ],
        "map": [(x, None, *program()), (q, scale, *program())],
        "spmm": [
            (g.rowptr, g.col, torch.randn(EDGES), x, None, None, 0, 1, *program()),
            (g.rowptr, g.col, None, q, scale, None, 2, 1, *program()),
        ],
        "sddmm": [(g.rowptr, g.col, x, x.clone(), None, None, 0, 1, per_edge)],
        "edge_softmax": [(g.rowptr, torch.randn(EDGES, 1), 1e-16, per_edge)],
        "softmax_sum": [
            (g.rowptr, torch.randn(EDGES, 3), torch.randn(EDGES, 3), None, torch.zeros(ROWS, 3)),
            (torch.tensor([0, 2]), *torch.randn(2, 2, 3), torch.zeros(3, 3), torch.zeros(1, 3)),
        ],
        "attention": [
            (g.rowptr, g.col, x, None, 0, *ends, None, *numbers, per_edge, None, *program()),
            (g.rowptr, g.col, q, scale, 0, *ends, None, *numbers, None, factors, *program()),
        ],
    }


def _registered() -> set[str]:
    ops()
    schemas = (schema.name for schema in torch._C._jit_get_all_schemas())
    return {name.partition("::")[2] for name in schemas if name.startswith("gnnc_cpu::")}


def test_every_registered_op_has_a_case() -> None:
    assert _registered() == set(_samples())


@pytest.mark.parametrize("name", _samples())
def test_schema(name: str) -> None:
    for sample in _samples()[name]:
        op = getattr(ops(), name).default
        assert opcheck(op, sample, test_utils="test_schema") == {"test_schema": "SUCCESS"}
