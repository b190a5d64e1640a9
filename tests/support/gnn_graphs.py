"""GNN layers as primitive graphs, as `reorder` leaves them: passes from `assign` on start here."""

from collections.abc import Sequence
from typing import Any

import torch
from hand_graphs import Builder
from torch.fx import GraphModule, Node

from gnnc.passes.base import Context, Pass, run_pass
from gnnc.precision import INT8, Precision
from gnnc.report.printing import format_graph

gnnc = torch.ops.gnnc
aten = torch.ops.aten


class Layers(Builder):
    """A builder with a graph, node features, and the usual layers.

    Attributes:
        x: the node features ``[n, width]``.
        rowptr, col, perm: the CSR, as the structure graph gives it.
        norm: a factor for each node, ``[n, 1]``.
        nodes: the number of nodes.
    """

    def __init__(self, width: int, sizes: tuple[int, int] | None = None, device: str = "cpu") -> None:
        """Start a graph of ``sizes`` nodes and edges, symbolic where they are not given."""
        super().__init__()
        self.device = device
        self.n, self.e = sizes or (self.size("n", 5), self.size("e", 12))
        self.x = self.input("x", (self.n, width))
        self.rowptr = self.input("rowptr", (self.n + 1,), dtype=torch.int64, kind="structure")
        self.col = self.input("col", (self.e,), dtype=torch.int32, kind="structure")
        self.perm = self.input("perm", (self.e,), dtype=torch.int64, kind="structure")
        factor = self.input("norm", (self.n,), kind="structure")
        self.nodes = sizes[0] if sizes else self.call(aten.sym_size.int, self.x, 0)
        self.norm = self.call(aten.unsqueeze, factor, 1)

    def input(self, name: str, *args: Any, **kwargs: Any) -> Node:
        """Add a placeholder; all of them come first."""
        calls = [node for node in self.graph.nodes if node.op != "placeholder"]
        with self.graph.inserting_before(calls[0] if calls else None):
            return super().input(name, *args, **kwargs)

    def edge_input(self, name: str, *tail: int) -> Node:
        """Add a value for every edge, in CSR order."""
        return self.input(name, (self.e, *tail))

    def weight(self, name: str, *shape: int) -> Node:
        """Add a parameter of the current layer."""
        return self.parameter(f"{self.layer}.{name}" if self.layer else name, *shape)

    def linear(self, x: Node, width: int, *, bias: bool = False, name: str = "lin") -> Node:
        """Add x @ W.T (+ b)."""
        inner = int(x.meta["val"].shape[-1])
        b = self.weight(f"{name}.bias", width) if bias else None
        return self.call(gnnc.gemm, x, self.weight(f"{name}.weight", width, inner), b, False)

    def spmm(self, x: Node, value: Node | None = None, reduce: str = "sum") -> Node:
        """Aggregate over incoming edges."""
        return self.call(gnnc.spmm, self.rowptr, self.col, value, x, reduce, self.nodes)

    def relu(self, x: Node) -> Node:
        """Add max(x, 0)."""
        return self.call(aten.relu, x)

    def add(self, x: Node, y: Any) -> Node:
        """Add x + y."""
        return self.call(aten.add.Tensor, x, y)

    def mul(self, x: Node, y: Any) -> Node:
        """Add x * y."""
        return self.call(aten.mul.Tensor, x, y)

    def gcn(self, x: Node, width: int) -> Node:
        """Add D A D x W + b, both D outside the sparse kernel."""
        h = self.spmm(self.mul(self.linear(x, width), self.norm))
        return self.add(self.mul(h, self.norm), self.weight("bias", width))

    def sage(self, x: Node, width: int, reduce: str = "sum") -> Node:
        """Add a mean (a sum and a factor a row) or an extremum of the neighbors to the node itself."""
        if reduce == "sum":
            h = self.mul(self.spmm(self.linear(x, width, name="lin_l")), self.norm)
            h = self.add(h, self.weight("lin_l.bias", width))
        else:
            h = self.linear(self.spmm(x, reduce=reduce), width, bias=True, name="lin_l")
        return self.add(h, self.linear(x, width, name="lin_r"))

    def gin(self, x: Node, width: int) -> Node:
        """Add (A + 1 + eps) x W1, and a second linear."""
        h = self.linear(x, width, name="nn.0")
        self_term = self.mul(h, self.weight("eps", 1))
        h = self.relu(self.add(self.add(self.spmm(h), self_term), self.weight("nn.0.bias", width)))
        return self.linear(h, width, bias=True, name="nn.2")

    def gat(self, x: Node, heads: int, width: int, *, concat: bool = True) -> Node:
        """Add additive attention; heads side by side or averaged."""
        h = self.call(aten.view, self.linear(x, heads * width), [-1, heads, width])
        columns = [
            self.call(aten.sum.dim_IntList, self.mul(h, self.weight(name, 1, heads, width)), [-1])
            for name in ("att_src", "att_dst")
        ]
        logits = self.call(gnnc.sddmm, self.rowptr, self.col, columns[1], columns[0], "add")
        alpha = self.call(gnnc.edge_softmax, self.rowptr, self.call(aten.leaky_relu, logits, 0.2))
        h = self.spmm(h, alpha)
        if concat:
            h = self.call(aten.view, h, [-1, heads * width])
        else:
            h = self.call(aten.mean.dim, h, [1])
        return self.add(h, self.weight("bias", heads * width if concat else width))

    def batch_norm(self, x: Node) -> Node:
        """Add a batch norm in eval mode."""
        width = int(x.meta["val"].shape[1])
        names = ("weight", "bias", "running_mean", "running_var")
        norm = self.call(
            aten._native_batch_norm_legit_no_training,
            x, *(self.weight(f"bn.{name}", width) for name in names), 0.1, 1e-5,
        )  # fmt: skip
        return self.parts(norm)[0]


def gcn_layer() -> GraphModule:
    """Return one GCN layer, short enough to print."""
    b = _stack(32)
    return b.finish(b.relu(b.gcn(b.x, 24)))


def gat_layer() -> GraphModule:
    """Return one GAT layer, short enough to print."""
    b = _stack(32)
    return b.finish(b.call(aten.elu, b.gat(b.x, 4, 8)))


def _stack(width: int) -> Layers:
    b = Layers(width)
    b.layer = "conv1"
    return b


def gcn() -> GraphModule:
    """Return two GCN layers, 32 -> 24 -> 20."""
    b = _stack(32)
    h = b.relu(b.gcn(b.x, 24))
    b.layer = "conv2"
    return b.finish(b.gcn(h, 20))


def sage(reduce: str = "sum") -> GraphModule:
    """Return two SAGE layers and the log of the softmax, 32 -> 24 -> 20."""
    b = _stack(32)
    h = b.relu(b.sage(b.x, 24, reduce))
    b.layer = "conv2"
    h = b.sage(h, 20, reduce)
    b.layer = ""
    return b.finish(b.call(aten.log_softmax.int, h, -1))


def gin() -> GraphModule:
    """Return two GIN layers with batch norm between, 32 -> 24 -> 20."""
    b = _stack(32)
    h = b.relu(b.batch_norm(b.gin(b.x, 24)))
    b.layer = "conv2"
    return b.finish(b.gin(h, 20))


def gat() -> GraphModule:
    """Return two GAT layers, 32 -> 4x8 -> mean of 2x20."""
    b = _stack(32)
    h = b.call(aten.elu, b.gat(b.x, 4, 8))
    b.layer = "conv2"
    return b.finish(b.gat(h, 2, 20, concat=False))


MODELS = {"gcn": gcn, "sage": sage, "gin": gin, "gat": gat}


def arguments(gm: GraphModule, nodes: int = 30, edges: int = 150, seed: int = 0) -> tuple[Any, ...]:
    """Real values for a graph of ``Layers``; the last node has no edge."""
    generator = torch.Generator().manual_seed(seed)
    src, dst = (torch.randint(0, max(nodes - one, 1), (edges,), generator=generator) for one in (0, 1))
    rowptr, col, perm = gnnc.csr(src, dst, nodes, nodes)
    known = {"rowptr": rowptr, "col": col, "perm": perm}
    return tuple(
        _value(node, known, (nodes, edges), generator) for node in gm.graph.find_nodes(op="placeholder")
    )


def _value(node: Node, known: dict[str, Any], sizes: tuple[int, int], generator: torch.Generator) -> Any:
    source = node.meta["source"]
    if source.kind == "constant":
        return node.meta["value"]
    if source.name in known:
        return known[source.name]
    hints = {5: sizes[0], 12: sizes[1]}
    shape = [s if isinstance(s, int) else hints[s.node.hint] for s in node.meta["val"].shape]
    value = torch.randn(shape, generator=generator)
    if source.kind == "parameter":
        value /= max(shape[-1], 1) ** 0.5
    return value.abs() + 0.1 if source.name in ("norm",) or "var" in source.name else value


def run_all(
    gm: GraphModule,
    passes: Sequence[Pass],
    *,
    precision: Precision = INT8,
    examples: tuple[Any, ...] | None = None,
    **context: Any,
) -> tuple[GraphModule, Context]:
    """Run passes in order; return the last graph and what they noted."""
    ctx = Context(precision=precision, examples=examples, **context)
    for step in passes:
        gm = run_pass(step, gm, ctx)
    return gm, ctx


def before_and_after(gm: GraphModule, before: Sequence[Pass], step: Pass, **options: Any) -> str:
    """Return the graph before and after ``step`` and the notes of the pass, as goldens show them."""
    first, _ = run_all(gm, before, **options)
    second, ctx = run_all(first, [step], **options)
    notes = "".join(f"# {note.layer or 'root'}: {note.text}\n" for note in ctx.notes)
    return f"{format_graph(first, name='before')}\n\n{format_graph(second, name='after')}\n{notes}"


def targets(gm: GraphModule) -> list[str]:
    """Return the names of the calls of a graph, in order."""
    calls = [node for node in gm.graph.nodes if node.op in ("call_function", "call_module")]
    return [getattr(node.target, "__name__", str(node.target)) for node in calls]


def relative_error(got: Sequence[torch.Tensor], want: Sequence[torch.Tensor]) -> float:
    """Return the largest L2 error of an output, relative to its norm."""
    errors = [
        float((a.float() - b.float()).norm() / b.float().norm().clamp(min=1e-12))
        for a, b in zip(got, want, strict=True)
    ]
    return max(errors)
