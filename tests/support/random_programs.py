"""Random programs over the primitives, and the check that every pass keeps what they compute."""

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
from gnn_graphs import Layers, arguments, relative_error, run_all
from hypothesis import strategies as st
from torch.fx import GraphModule, Node

from gnnc.passes.assign import Assign
from gnnc.passes.base import Context
from gnnc.passes.cache import Cache
from gnnc.passes.fuse import Fuse
from gnnc.passes.lower import Lower
from gnnc.passes.quantize import Quantize
from gnnc.precision import Precision
from gnnc.runtime.backend import get_backend
from gnnc.runtime.program.executable import Executable
from gnnc.target import Target

gnnc = torch.ops.gnnc


aten = torch.ops.aten


BACKEND = "cpu"


WIDTHS = (1, 3, 7, 16, 47)


SIZES = ((1, 0), (7, 0), (1, 3), (5, 12), (23, 90))


TOLERANCE = {"fp32": 1e-4, "bf16": 1e-2, "int8": 2e-2}


UNARY = (
    (aten.relu.default, ()), (aten.sigmoid.default, ()), (aten.tanh.default, ()),
    (aten.elu.default, (0.7,)), (aten.leaky_relu.default, (0.2,)), (aten.gelu.default, ()),
    (aten.silu.default, ()), (aten.neg.default, ()), (aten.abs.default, ()),
    (aten.clamp.default, (-0.5, 0.5)), (aten.add.Tensor, (0.5,)), (aten.mul.Tensor, (0.5,)),
    (aten.rsub.Scalar, (1.0,)), (aten.div.Tensor, (4.0,)), (aten.softplus.default, ()),
)  # fmt: skip


@dataclass(frozen=True, slots=True)
class Recipe:
    """Numbers that a program is built from; the builder reads them in turn."""

    width: int
    symbolic: bool
    steps: tuple[tuple[int, int, int, int], ...]
    outputs: int


recipes = st.builds(
    Recipe,
    width=st.sampled_from(WIDTHS),
    symbolic=st.sampled_from((False, False, True)),
    steps=st.lists(st.tuples(*[st.integers(0, 999)] * 4), min_size=1, max_size=7).map(tuple),
    outputs=st.integers(1, 7),
)


class Program:
    """Builds a graph from a recipe; ``values`` are the node tensors made so far."""

    def __init__(self, recipe: Recipe, sizes: tuple[int, int], device: str = "cpu") -> None:
        self.b = Layers(recipe.width, None if recipe.symbolic else sizes, device)
        self.values: list[Node] = [self.b.x]
        self.extra: list[Node] = []
        for number, (kind, which, option, other) in enumerate(recipe.steps):
            self.b.layer = f"layer{number}"
            step = STEPS[kind % len(STEPS)]
            step(self, self.values[-1 - which % min(len(self.values), 3)], option, other)
        self.graph = self.b.finish(*(self.values[-recipe.outputs :] + self.extra[-1:]))

    def add(self, node: Node) -> None:
        """Add a node tensor."""
        self.values.append(node)

    def operand(self, like: Node, option: int) -> Node:
        """A tensor that broadcasts against ``like``."""
        b, width = self.b, _width(like)
        same = [v for v in self.values if _width(v) == width and v is not like]
        match option % 5:
            case 0:
                return b.norm
            case 1:
                return b.weight(f"vector{option}", width)
            case 2:
                return b.weight(f"number{option}", 1)
            case 3 if same:
                return same[option % len(same)]
            case _:
                return b.input(f"{b.layer}.full{option}", (b.n, width))


def _width(node: Node) -> int:
    return int(node.meta["val"].shape[1])


def _linear(p: Program, x: Node, option: int, other: int) -> None:
    p.add(p.b.linear(x, WIDTHS[option % len(WIDTHS)], bias=bool(other % 2)))


def _unary(p: Program, x: Node, option: int, other: int) -> None:
    target, args = UNARY[option % len(UNARY)]
    p.add(p.b.call(target, x, *args))


def _binary(p: Program, x: Node, option: int, other: int) -> None:
    target = (aten.add, aten.mul, aten.sub)[option % 3].Tensor
    pair = (x, p.operand(x, other))
    p.add(p.b.call(target, *(pair if option % 2 else pair[::-1])))


def _spmm(p: Program, x: Node, option: int, other: int) -> None:
    reduce = ("sum", "sum", "mean", "max", "min")[option % 5]
    value = p.b.edge_input(f"{p.b.layer}.value") if other % 3 == 0 and reduce == "sum" else None
    p.add(p.b.spmm(x, value, reduce))


def _norm(p: Program, x: Node, option: int, other: int) -> None:
    b, width = p.b, _width(x)
    match option % 4:
        case 0:
            p.add(b.batch_norm(x))
        case 1:
            p.add(b.call(aten.layer_norm, x, [width], b.weight("w", width), b.weight("c", width)))
        case 2:
            norm = b.call(aten.linalg_vector_norm, x, 2.0, [-1], True)
            size = b.call(aten.expand, b.call(aten.clamp_min, norm, 1e-6), [b.nodes, width])
            p.add(b.call(aten.div.Tensor, x, size))
        case _:
            target = (aten.softmax.int, aten.log_softmax.int)[other % 2]
            p.add(b.call(target, x, -1))


def _attention(p: Program, x: Node, option: int, other: int) -> None:
    heads, width = 1 + option % 3, (1, 4, 7)[other % 3]
    p.add(p.b.gat(x, heads, width, concat=bool(option % 2)))


def _dot_attention(p: Program, x: Node, option: int, other: int) -> None:
    b, heads = p.b, 2
    q, k, v = (b.call(aten.view, b.linear(x, heads * 3, name=name), [-1, heads, 3]) for name in "qkv")
    logits = b.call(aten.div.Tensor, b.call(gnnc.sddmm, b.rowptr, b.col, q, k, "dot"), 3**0.5)
    alpha = b.call(gnnc.edge_softmax, b.rowptr, logits)
    p.extra.append(alpha)
    p.add(b.call(aten.view, b.spmm(v, alpha), [-1, heads * 3]))


def _edges(p: Program, x: Node, option: int, other: int) -> None:
    b = p.b
    op = ("dot", "add", "copy_src", "mul")[option % 4]
    edge = b.call(gnnc.sddmm, b.rowptr, b.col, None if op == "copy_src" else x, x, op)
    p.extra.append(edge)
    if op != "dot":
        perm = b.perm if other % 2 else None
        p.add(b.call(gnnc.segment_reduce, b.rowptr, perm, edge, ("sum", "max")[other % 2], b.nodes))


def _join(p: Program, x: Node, option: int, other: int) -> None:
    p.add(p.b.call(aten.cat, [x, p.values[option % len(p.values)]], 1))


def _layer(p: Program, x: Node, option: int, other: int) -> None:
    width = WIDTHS[other % len(WIDTHS)]
    layer = (p.b.gcn, p.b.sage, p.b.gin)[option % 3]
    p.add(layer(x, width))


def check(recipe: Recipe, sizes: tuple[int, int], precision: Precision, static: bool) -> None:
    graph = Program(recipe, sizes).graph
    values = arguments(graph, *sizes)
    backend = get_backend(BACKEND)
    target = Target(backend.name, backend.target.precisions, lowering=backend)
    options = {"precision": precision, "examples": values if static else None, "target": target}
    quantized, _ = run_all(graph, (Assign(min_row_bytes=0), Quantize()), **options)
    values = (*values, *scales(quantized))
    want = quantized(*values)
    fused, _ = run_all(quantized, (Cache(), Fuse()), **options)
    assert_equal_bits(fused(*values), want)
    lowered, ctx = run_all(fused, (Lower(),), **options)
    assert_taken_whole(fused, ctx)
    got = Executable(lowered)(*values)
    assert [t.shape for t in got] == [t.shape for t in want]
    assert relative_error(got, want) < TOLERANCE[precision.name]


def scales(gm: GraphModule) -> list[Any]:
    """Static scales, which ``quantize`` appends to the arguments."""
    nodes = gm.graph.find_nodes(op="placeholder")
    return [n.meta["value"] for n in nodes if n.meta["source"].kind == "constant"]


def assert_taken_whole(fused: GraphModule, ctx: Context) -> None:
    """Assert that a kernel runs each group of ``fuse`` as one."""
    apart = {note.node for note in ctx.notes if "taken apart" in note.text}
    kinds = {node.meta["kind"] for node in fused.graph.nodes if node.name in apart}
    assert kinds <= {"sddmm"}


def assert_equal_bits(got: tuple[torch.Tensor, ...], want: tuple[torch.Tensor, ...]) -> None:
    for a, b in zip(got, want, strict=True):
        assert torch.equal(a, b)


STEPS: tuple[Callable[[Program, Node, int, int], None], ...] = (
    _linear, _unary, _unary, _binary, _binary, _spmm, _spmm, _norm, _attention, _dot_attention,
    _edges, _join, _layer,
)  # fmt: skip
