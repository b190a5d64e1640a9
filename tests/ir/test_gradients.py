"""Gradient rules of edge ops against autograd through their references, in float64, on many graphs."""

from collections.abc import Callable
from typing import Any

import pytest
import torch
from edge_matrices import edge_matrices
from slow import slow_but
from torch import Tensor
from torch.fx.experimental.proxy_tensor import make_fx
from torch.utils._pytree import tree_flatten, tree_unflatten

from gnnc.ir import REGISTRY
from gnnc.ir.structure import csr_reference
from gnnc.runtime.plans import gemm
from gnnc.runtime.registry import Decline

GNNC = torch.ops.gnnc
WIDTHS = (1, 7, 47)


def graph(kind: str) -> tuple[Tensor, Tensor, int, int]:
    """Return rowptr, col, the number of sources and that of destinations of a graph."""
    generator = torch.Generator().manual_seed(1)
    sources, destinations = (11, 6) if kind == "bipartite" else (9, 9)
    edges = {"no_edges": 0, "hub": 200}.get(kind, 40)
    src = torch.randint(sources, (edges,), generator=generator)
    dst = torch.randint(destinations, (edges,), generator=generator)
    if kind == "hub":
        dst[20:] = 3
    if kind == "isolated":
        src, dst = src % 4, dst % 3 + 2
    if kind == "self_loops":
        src[::2] = dst[::2]
    if kind == "duplicates":
        src, dst = src.div(3, rounding_mode="floor"), dst.div(4, rounding_mode="floor")
    return *csr_reference(src, dst, sources, destinations)[:2], sources, destinations


KINDS = slow_but(
    ("no_edges", "duplicates", "hub", "bipartite"),
    ("no_edges", "isolated", "self_loops", "duplicates", "hub", "directed", "bipartite"),
)


def rand(*sizes: int) -> Tensor:
    return torch.randn(sizes, generator=torch.Generator().manual_seed(sum(sizes)), dtype=torch.float64)


def coarse(*sizes: int) -> Tensor:
    """Return few different values, so that extrema tie."""
    return (rand(*sizes) * 2).round()


def gradients(call: Callable[..., Tensor], args: tuple[Any, ...]) -> list[Tensor]:
    """Return the result, and the gradient of a random function of it for every float operand."""
    flat, spec = tree_flatten(list(args))
    floats = [isinstance(value, Tensor) and value.is_floating_point() for value in flat]
    leaves = [v.clone().requires_grad_() if wants else v for v, wants in zip(flat, floats, strict=True)]
    wanted = [leaf for leaf, wants in zip(leaves, floats, strict=True) if wants]
    with torch.enable_grad():
        out = call(*tree_unflatten(leaves, spec))
    grads = torch.autograd.grad(out, wanted, rand(*out.shape), allow_unused=True)
    filled = [torch.zeros_like(w) if g is None else g for w, g in zip(wanted, grads, strict=True)]
    return [out, *filled]


def second_gradients(call: Callable[..., Tensor], args: tuple[Any, ...]) -> list[Tensor]:
    """Return the gradients of ``gradients`` of a call, for its float operands and for that of the result."""
    flat, spec = tree_flatten(list(args))
    places = [k for k, value in enumerate(flat) if isinstance(value, Tensor) and value.is_floating_point()]
    with torch.no_grad():
        grad = rand(*call(*args).shape)

    def of_operands(*values: Tensor) -> Tensor:
        *leaves, weights = values
        given = list(flat)
        for place, leaf in zip(places, leaves, strict=True):
            given[place] = leaf
        out = call(*tree_unflatten(given, spec))
        found = torch.autograd.grad(out, leaves, weights, create_graph=True, allow_unused=True)
        return torch.stack([slope.sin().sum() for slope in found if slope is not None])

    return gradients(of_operands, (*(flat[place] for place in places), grad))


def check(op: str, *args: Any, order: Callable[..., list[Tensor]] = gradients) -> None:
    """Compare an op's rule with autograd through its reference."""
    found, expected = order(REGISTRY[op].target, args), order(REGISTRY[op].reference, args)
    for got, want in zip(found, expected, strict=True):
        torch.testing.assert_close(got, want, rtol=1e-10, atol=1e-10)


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("reduce", ["sum", "mean", "max", "min"])
def test_spmm(kind: str, reduce: str) -> None:
    rowptr, col, sources, rows = graph(kind)
    edges = col.numel()
    for width in WIDTHS:
        check("spmm", rowptr, col, None, coarse(sources, width), reduce, rows)
        check("spmm", rowptr, col, coarse(edges), coarse(sources, width), reduce, rows)
        check("spmm", rowptr, col, coarse(edges, 2), coarse(sources, 2, width), reduce, rows)
    check("spmm", rowptr, col, coarse(edges), coarse(sources, 2, 3), reduce, rows)
    check("spmm", rowptr, col, coarse(edges, 3), coarse(sources, 3), reduce, rows)
    check("spmm", rowptr, col, coarse(edges), coarse(sources), reduce, rows)


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("op", ["dot", "add", "sub", "mul"])
def test_sddmm(kind: str, op: str) -> None:
    rowptr, col, sources, rows = graph(kind)
    for width in WIDTHS:
        check("sddmm", rowptr, col, rand(rows, width), rand(sources, width), op)
        check("sddmm", rowptr, col, rand(rows, 2, width), rand(sources, 2, width), op)
        check("sddmm", rowptr, col, rand(rows, 1, width), rand(sources, 2, width), op)
    if op != "dot":
        check("sddmm", rowptr, col, rand(rows), rand(sources), op)


@pytest.mark.parametrize("kind", KINDS)
def test_copies_of_rows(kind: str) -> None:
    rowptr, col, sources, rows = graph(kind)
    for width in WIDTHS:
        check("sddmm", rowptr, col, None, rand(sources, width), "copy_src")
        check("sddmm", rowptr, col, rand(rows, width), None, "copy_dst")


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("reduce", ["sum", "mean", "max", "min"])
def test_segment_reduce(kind: str, reduce: str) -> None:
    rowptr, col, _, rows = graph(kind)
    edges = col.numel()
    perm = torch.randperm(edges, generator=torch.Generator().manual_seed(0))
    for width in WIDTHS:
        check("segment_reduce", rowptr, None, coarse(edges, width), reduce, rows)
        check("segment_reduce", rowptr, perm, coarse(edges, width), reduce, rows)
        check("segment_reduce", rowptr, perm.int(), coarse(edges + 5, width), reduce, rows)
    check("segment_reduce", rowptr, perm, coarse(edges, 2, 3), reduce, rows)


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("heads", [(), (1,), (7,)])
def test_edge_softmax(kind: str, heads: tuple[int, ...]) -> None:
    rowptr, col, _, _ = graph(kind)
    check("edge_softmax", rowptr, rand(col.numel(), *heads) * 30)
    check("edge_softmax_backward", rowptr, rand(col.numel(), *heads), rand(col.numel(), *heads) + 1)


SUM_OF_ENDS = "t0 = aten.add.Tensor(i0, j0); t1 = aten.add.Tensor(t0, e0); "
BODIES = {
    "relu": SUM_OF_ENDS + "t2 = aten.relu.default(t1); t3 = aten.mul.Tensor(t2, c0); return t3",
    "products": (
        "t0 = aten.mul.Tensor(i0, j0); t1 = aten.mul.Tensor(t0, e0); t2 = aten.mul.Tensor(t1, j0); "
        "t3 = aten.add.Tensor(t2, c0); return t3"
    ),
    "gated": SUM_OF_ENDS + "t2 = aten.sigmoid.default(t1); t3 = aten.mul.Tensor(t2, j0); return t3",
    "leaky": SUM_OF_ENDS + "t2 = aten.leaky_relu.default(t1, 0.2); t3 = aten.mul.Tensor(t2, c0); return t3",
    "sliced": (
        "t0 = aten.cat.default([i0, j0, e0], -1); t1 = aten.slice.Tensor(t0, -1, 0, 5); "
        "t2 = aten.select.int(t1, -1, 1); t3 = aten.unsqueeze.default(t2, -1); t4 = aten.mul.Tensor(t3, c0); "
        "return t4"
    ),
    "divided": (
        "t0 = aten.pow.Tensor_Scalar(e0, 2); t1 = aten.add.Tensor(t0, 1); t2 = aten.div.Tensor(j0, t1); "
        "t3 = aten.tanh.default(i0); t4 = aten.gt.Scalar(t2, 0.1); "
        "t5 = aten.where.self(t4, t2, t3); return t5"
    ),
}  # fmt: skip
LINEAR = "t0 = aten.sub.Tensor(j0, i0); t1 = aten.mm.default(t0, c0); t2 = aten.relu.default(t1); return t2"
HEADS = (
    "t0 = aten.view.default(j0, [-1, 2, 3]); t1 = aten.view.default(c0, [1, 2, 3]); "
    "t2 = aten.mul.Tensor(t0, t1); t3 = aten.sum.dim_IntList(t2, [-1]); return t3"
)
TRANSPOSED_HEADS = (  # products of heads, as attention over a few rows of each node makes them
    "t0 = aten.reshape.default(i0, [-1, 2, 2, 3]); t1 = aten.transpose.int(t0, 2, 1); "
    "t2 = aten.reshape.default(t1, [-1, 2, 3]); t3 = aten.reshape.default(j0, [-1, 2, 2, 3]); "
    "t4 = aten.transpose.int(t3, 2, 1); t5 = aten.reshape.default(t4, [-1, 2, 3]); "
    "t6 = aten.transpose.int(t5, 1, 2); t7 = aten.bmm.default(t2, t6); "
    "t8 = aten.reshape.default(t7, [-1, 8]); return t8"
)
SEVERAL = SUM_OF_ENDS + "t2 = aten.mul.Tensor(t1, t1); t3 = aten.mul.Tensor(t2, c0); return [t1, t2, t1, t3]"


def operands(kind: str, width: int, make: Callable[..., Tensor] = rand) -> tuple[Any, ...]:
    rowptr, col, sources, rows = graph(kind)
    edge = make(col.numel(), width)
    return rowptr, col, [make(rows, width)], [make(sources, width)], [edge], [make(1, width)], rows


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("body", BODIES.values(), ids=list(BODIES))
def test_edge_map_and_message(kind: str, body: str) -> None:
    for width in WIDTHS[1:] if "slice" in body else WIDTHS:
        rowptr, col, *groups, rows = operands(kind, width)
        check("edge_map", rowptr, col, body, *groups)
        check("message", rowptr, col, body, "sum", *groups, rows)


@pytest.mark.parametrize("kind", KINDS)
def test_heads_in_another_layout(kind: str) -> None:
    rowptr, col, *groups, rows = operands(kind, 12)
    check("edge_map", rowptr, col, TRANSPOSED_HEADS, *groups)
    check("message", rowptr, col, TRANSPOSED_HEADS, "sum", *groups, rows)


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("reduce", ["mean", "max", "min", "mean,max", "max,sum,min"])
def test_message_reductions(kind: str, reduce: str) -> None:
    many = reduce.count(",") + 1
    body = SUM_OF_ENDS + f"t2 = aten.mul.Tensor(t1, c0); return [{', '.join(['t2', 't1', 't2'][:many])}]"
    for width in WIDTHS:
        rowptr, col, *groups, rows = operands(kind, width, coarse)
        check("message", rowptr, col, body, reduce, *groups, rows)


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("reduce", ["softmax,sum,max", "sum,softmax,mean", "max,min,softmax"])
def test_message_softmax(kind: str, reduce: str) -> None:
    for width in WIDTHS:
        rowptr, col, *groups, rows = operands(kind, width)
        check("message", rowptr, col, SEVERAL, reduce, *groups, rows)


@pytest.mark.parametrize("kind", KINDS)
def test_weights_in_bodies(kind: str) -> None:
    rowptr, col, sources, rows = graph(kind)
    for reduce in ("sum", "max"):
        check(
            "message",
            rowptr,
            col,
            LINEAR,
            reduce,
            [rand(rows, 5)],
            [rand(sources, 5)],
            [],
            [rand(5, 7)],
            rows,
        )
        check("message", rowptr, col, HEADS, reduce, [], [rand(sources, 6)], [], [rand(6)], rows)
    total = "t0 = aten.mul.Tensor(i0, j0); t1 = aten.sum.dim_IntList(t0, [0]); return t1"
    check("edge_sum", rowptr, col, total, [rand(rows, 5)], [rand(sources, 5)], [], [])


CALLS: dict[str, Callable[..., Tensor]] = {
    "spmm": lambda r, c, i, j, e, k, n: GNNC.spmm(r, c, e[:, 0], j, "mean", n),
    "max": lambda r, c, i, j, e, k, n: GNNC.spmm(r, c, e[:, 0], j, "max", n),
    "dot": lambda r, c, i, j, e, k, n: GNNC.sddmm(r, c, i, j, "dot"),
    "message": lambda r, c, i, j, e, k, n: GNNC.message(
        r, c, SEVERAL.replace("e0", "c0"), "softmax,max,mean", [i], [j], [], [k], n
    ),
    "weight": lambda r, c, i, j, e, k, n: GNNC.message(
        r, c, LINEAR, "max", [i], [j], [], [k.t() * k.mean()], n
    ),
}


@pytest.mark.parametrize("name", CALLS)
def test_no_rule_makes_features_for_every_edge(name: str) -> None:
    rowptr, col, sources, rows = graph("hub")
    leaves = [rand(rows, 5), rand(sources, 5), rand(col.numel(), 1), rand(1, 5)]
    leaves = [leaf.requires_grad_() for leaf in leaves]

    def step() -> None:
        CALLS[name](rowptr, col, *leaves, rows).square().sum().backward()

    assert edge_matrices(step, col.numel()) == []
    assert any(leaf.grad is not None and bool(leaf.grad.any()) for leaf in leaves)


@pytest.mark.parametrize("rows", [(9,), (2, 3), (0,), ()])
@pytest.mark.parametrize("is_kn", [False, True])
def test_gemm(rows: tuple[int, ...], is_kn: bool) -> None:
    for inner, outer in ((1, 1), (7, 47), (47, 3)):
        w = rand(inner, outer) if is_kn else rand(outer, inner)
        check("gemm", rand(*rows, inner), w, rand(outer), is_kn)
        check("gemm_tn", rand(*rows, inner), rand(*rows, outer))


def test_the_gradient_of_a_product_makes_no_views_of_matrices() -> None:
    def gradients_of(x: Tensor, w: Tensor) -> tuple[Tensor, ...]:
        return torch.autograd.grad(GNNC.gemm(x, w).square().sum(), (x, w))

    graph = make_fx(gradients_of)(rand(9, 7).requires_grad_(), rand(3, 7).requires_grad_()).graph
    names = [str(node.target) for node in graph.nodes if node.op == "call_function"]
    assert "gnnc.gemm_tn.default" in names
    assert not any("view" in name or "reshape" in name or "aten.t." in name for name in names)


def test_the_gradient_of_relu_reads_one_bit_a_value() -> None:
    x = torch.cat([rand(9, 47), torch.tensor([[0.0, -0.0, float("nan"), -1, 1] * 9 + [2.0, -3.0]])])
    grad = rand(10, 47)
    mask = GNNC.relu_mask(x.relu())
    assert mask.shape == (10, 6)
    expected = torch.ops.aten.threshold_backward(grad, x.relu(), 0)
    assert torch.equal(GNNC.relu_backward(grad, mask), expected)


def test_no_kernel_takes_a_product_over_a_symbolic_width() -> None:
    def product(x: Tensor, grad: Tensor) -> Tensor:
        return GNNC.gemm(x.t(), grad, None, True)

    args = torch.randn(9, 7), torch.randn(9, 3)
    (node,) = make_fx(product, tracing_mode="symbolic")(*args).graph.find_nodes(
        op="call_function", target=GNNC.gemm.default
    )
    decline = gemm.plan(node)
    assert isinstance(decline, Decline)
    assert "is not fixed" in decline.reason


SECOND = (
    "gemm-0 gemm-3 gemm_tn-0 gemm_tn-1 relu_backward-0 "
    "spmm-5 spmm-6 sddmm-0 sddmm-3 sddmm-4 edge_softmax-1 edge_softmax_backward-1 segment_reduce-0 "
    "edge_map-0 message-0 message-2 message-5 message-7 edge_sum-1"
).split()


@pytest.mark.first(4)
@pytest.mark.parametrize("case", SECOND)
def test_second_gradients(case: str) -> None:
    name, number = case.split("-")
    op = REGISTRY[name]
    flat, spec = tree_flatten(list(op.samples()[int(number)]))
    leaves = [
        v.double().requires_grad_() if isinstance(v, Tensor) and v.is_floating_point() else v for v in flat
    ]
    assert torch.autograd.gradgradcheck(
        lambda *args: op.target(*tree_unflatten(list(args), spec)), leaves, fast_mode=True
    )


BIASED = {
    "bias": "t0 = aten.add.Tensor(j0, c0); return t0",
    "bias of a linear layer": "t0 = aten.linear.default(j0, c1, c2); return t0",
    "network": (
        "t0 = aten.sub.Tensor(j0, i0); t1 = aten.cat.default([t0, e0], 1); "
        "t2 = aten.linear.default(t1, c3, c2); t3 = aten.silu.default(t2); "
        "t4 = aten.linear.default(t3, c1, c2); return t4"
    ),
    "network, bias aside": (
        "t0 = aten.mm.default(j0, c1); t1 = aten.tanh.default(t0); t2 = aten.mm.default(t1, c1); "
        "t3 = aten.add.Tensor(t2, c2); return t3"
    ),
    "softmax": "t0 = aten.add.Tensor(j0, c0); t1 = aten.softmax.int(t0, 1); return t1",
    "layer norm": "t0 = aten.layer_norm.default(j0, [5], c2, c2); return t0",
    "scalar": "t0 = aten.mul.Tensor(j0, c4); t1 = aten.add.Tensor(t0, c4); return t1",
    "heads": (
        "t0 = aten.reshape.default(c0, [1, 5, 1]); t1 = aten.unsqueeze.default(j0, -1); "
        "t2 = aten.add.Tensor(t0, t1); t3 = aten.squeeze.dim(t2, -1); return t3"
    ),
}  # fmt: skip


def biased(kind: str) -> tuple[Any, ...]:
    """Return the operands of the bodies in ``BIASED``."""
    rowptr, col, sources, rows = graph(kind)
    const = [rand(1, 5), rand(5, 5), rand(5), rand(5, 10), rand(1).squeeze(0)]
    return rowptr, col, [rand(rows, 5)], [rand(sources, 5)], [rand(col.numel(), 5)], const, rows


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("body", BIASED.values(), ids=list(BIASED))
def test_second_gradients_of_what_all_edges_share(body: str, kind: str) -> None:
    rowptr, col, *groups, rows = biased(kind)
    check("edge_map", rowptr, col, body, *groups, order=second_gradients)
    for reduce in ("sum", "mean"):
        check("message", rowptr, col, body, reduce, *groups, rows, order=second_gradients)


NEVER_TWICE_ALIKE = {
    "softplus": "t0 = aten.mul.Tensor(i0, j0); t1 = aten.softplus.default(t0); return t1",
    "silu": "t0 = aten.silu.default(j0); t1 = aten.mul.Tensor(t0, c0); return t1",
    "layer norm": "t0 = aten.sub.Tensor(j0, i0); t1 = aten.layer_norm.default(t0, [5], c2, c2); return t1",
    "log sigmoid": "t0 = aten.sub.Tensor(j0, i0); t1 = aten.log_sigmoid.default(t0); return t1",
}
"""Bodies whose last bits depend on the place of an edge, or on how ATen writes an op with its gradient."""


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("body", NEVER_TWICE_ALIKE.values(), ids=list(NEVER_TWICE_ALIKE))
@pytest.mark.parametrize("order", [gradients, second_gradients])
def test_extrema_of_values_that_are_computed_again(
    order: Callable[..., list[Tensor]], body: str, kind: str
) -> None:
    rowptr, col, *groups, rows = biased(kind)
    for reduce in ("max", "min"):
        check("message", rowptr, col, body, reduce, *groups, rows, order=order)
    several = body.replace("return t1", "return [t1, t1, t0, t1]")
    check("message", rowptr, col, several, "mean,max,softmax", *groups, rows, order=order)


SUMS_OF_EDGES = {
    "columns": SUM_OF_ENDS + "t2 = aten.mul.Tensor(t1, c0); t3 = aten.sum.dim_IntList(t2, [0]); return t3",
    "columns, a row": SUM_OF_ENDS + "t2 = aten.sum.dim_IntList(t1, [0], True); return t2",
    "of what is no sum of ends": (
        "t0 = aten.mul.Tensor(i0, j0); t1 = aten.mul.Tensor(t0, e0); t2 = aten.sigmoid.default(t1); "
        "t3 = aten.sum.dim_IntList(t2, [0], True); return t3"
    ),
    "all": "t0 = aten.mul.Tensor(j0, c0); t1 = aten.sum.default(t0); return t1",
    "outer": "t0 = aten.tanh.default(i0); t1 = aten.t.default(t0); t2 = aten.mm.default(t1, j0); return t2",
}  # fmt: skip


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("body", SUMS_OF_EDGES.values(), ids=list(SUMS_OF_EDGES))
@pytest.mark.parametrize("order", [gradients, second_gradients])
def test_sums_over_edges(order: Callable[..., list[Tensor]], body: str, kind: str) -> None:
    rowptr, col, *groups, _ = operands(kind, 7)
    check("edge_sum", rowptr, col, body, *groups, order=order)


def test_gradients_keep_the_dtype_of_operands() -> None:
    rowptr, col, sources, rows = graph("directed")
    x = rand(sources, 7).bfloat16().requires_grad_()
    value = rand(col.numel()).bfloat16().requires_grad_()
    for reduce in ("sum", "mean", "max"):
        dvalue, dx = torch.autograd.grad(GNNC.spmm(rowptr, col, value, x, reduce, rows).sum(), (value, x))
        assert dvalue.dtype == dx.dtype == torch.bfloat16
        wide = [t.detach().float().requires_grad_() for t in (value, x)]
        expected = torch.autograd.grad(GNNC.spmm(rowptr, col, *wide, reduce, rows).sum(), wide)
        torch.testing.assert_close(dx.float(), expected[1], rtol=1e-2, atol=1e-2)
        torch.testing.assert_close(dvalue.float(), expected[0], rtol=1e-2, atol=1e-2)
