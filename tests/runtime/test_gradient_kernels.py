"""Programs call the CPU kernels of gradients, and give what the graph gives."""

import pytest
import torch
from gnn_graphs import Layers, arguments, relative_error, run_all
from one_op import fused_program_of, program_of
from torch import Tensor

from gnnc.passes.lower import Lower
from gnnc.runtime.backend import get_backend
from gnnc.runtime.program.emitter import Emitter
from gnnc.runtime.program.executable import Executable
from gnnc.target import Target

GNNC = torch.ops.gnnc
WEIGHT_GRADIENT = (
    "t0 = aten.mul.Tensor(j0, e0); t1 = aten.t.default(t0); t2 = aten.mm.default(t1, i0); return t2"
)


def test_programs_call_the_kernels() -> None:
    b = Layers(7)
    alpha, grad = b.edge_input("alpha", 1), b.edge_input("grad", 1)
    other = b.input("other", (b.n, 47))
    mask = b.call(GNNC.relu_mask, b.x)
    masked = b.call(GNNC.relu_backward, b.x, mask)
    results = [
        b.call(GNNC.gemm_tn, masked, other),
        b.call(GNNC.edge_softmax_backward, b.rowptr, alpha, grad),
        b.call(GNNC.edge_sum, b.rowptr, b.col, WEIGHT_GRADIENT, [b.x], [other], [alpha], []),
        masked,
    ]
    gm = b.finish(*results)
    backend = get_backend("cpu")
    target = Target("cpu", backend.target.precisions, lowering=backend)
    lowered, _ = run_all(gm, [Lower()], target=target)
    kernels = {str(n.target): n.meta["choice"].kernel.name for n in lowered.graph.nodes if "choice" in n.meta}
    assert set(kernels.values()) == {
        "relu_mask",
        "relu_backward",
        "gemm_tn",
        "edge_softmax_backward",
        "edge_body",
    }
    for edges in (150, 0):
        values = arguments(gm, edges=edges)
        assert relative_error(Executable(lowered)(*values), gm(*values)) < 1e-6


@pytest.mark.parametrize("edges", [150, 0])
def test_a_transpose_at_each_call_is_that_of_the_op(edges: int) -> None:
    rows, col = torch.randint(30, (edges,)).sort()[0], torch.randint(40, (edges,), dtype=torch.int32)
    rowptr = torch.searchsorted(rows, torch.arange(31))

    def transpose(rowptr: Tensor, col: Tensor) -> tuple[Tensor, ...]:
        return GNNC.csr_transpose(rowptr, col, 40)

    program = program_of(transpose, rowptr, col, backend="cpu")
    assert [name for _, name in program.kernels] == ["csr_transpose_at_each_call"]
    got, want = program(rowptr, col), transpose(rowptr, col)
    assert len(got) == len(want) == 3
    assert all(map(torch.equal, got, want))


def test_int8_rows_are_dequantized_by_one_kernel() -> None:
    q, scale = torch.randint(-127, 128, (50, 47), dtype=torch.int8), torch.rand(50)
    other = torch.randn(50, 47)

    def alone(q: Tensor, scale: Tensor) -> Tensor:
        return GNNC.dequantize(q, scale, "row")

    def chain(q: Tensor, scale: Tensor, other: Tensor) -> tuple[Tensor, Tensor]:
        product = GNNC.dequantize(q, scale, "row") * other
        return product, product.sum(0)

    program = program_of(alone, q, scale, backend="cpu")
    assert [name for _, name in program.kernels] == ["map"]
    assert torch.equal(program(q, scale)[0], alone(q, scale))
    program = fused_program_of(chain, q, scale, other, backend="cpu")
    assert [name for _, name in program.kernels] == ["map"]
    product, total = program(q, scale, other)
    assert torch.equal(product, chain(q, scale, other)[0])
    torch.testing.assert_close(total, chain(q, scale, other)[1])


@pytest.mark.parametrize(
    ("width", "dtype", "stride"),
    [
        (40, torch.float32, 48),
        (20, torch.float32, 24),
        (4, torch.float32, 4),
        (40, torch.bfloat16, 48),
        (60, torch.bfloat16, 64),
        (20, torch.int8, 64),
    ],
)
def test_rows_that_edges_gather_start_on_a_line_or_half_of_one(
    width: int, dtype: torch.dtype, stride: int
) -> None:
    b = Layers(8)
    gathered = b.linear(b.x, width, name="first")
    in_order = b.linear(b.x, width, name="second")
    gm = b.finish(b.spmm(gathered), b.call(GNNC.gemm_tn, in_order, b.x))
    backend = get_backend("cpu")
    target = Target("cpu", backend.target.precisions, lowering=backend)
    lowered, _ = run_all(gm, [Lower()], target=target)
    first, second = (node for node in lowered.graph.nodes if node.target == GNNC.gemm.default)
    emitter = Emitter(lowered)
    for node in (first, second):
        node.meta["val"] = node.meta["val"].to(dtype)
    assert emitter.stride_for(first, width) == stride
    assert emitter.stride_for(second, width) == emitter.padded(width, dtype)
