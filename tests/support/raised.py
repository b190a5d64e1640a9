"""Models as ``raise`` leaves them, written by hand over the primitives, and graphs to run them on."""

from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor
from torch.fx import GraphModule
from torch.fx.experimental.proxy_tensor import make_fx

import gnnc.ir  # noqa: F401  (registers torch.ops.gnnc)
from gnnc.ir.graph import infer_meta
from gnnc.ir.parts import Parts
from gnnc.ir.source import Source
from gnnc.torch_private import rename

ops = torch.ops.gnnc
NODES, EDGES, WIDTH_IN, WIDTH_OUT = 13, 41, 6, 5


def trace(
    function: Callable[..., Any], weights: Sequence[str], inputs: Sequence[str], *values: Any
) -> GraphModule:
    """Trace ``function(*weights, *inputs)`` with symbolic sizes; name the placeholders' sources."""
    with torch.no_grad():
        gm = make_fx(function, tracing_mode="symbolic")(*values)
    names = [*[Source("parameter", w) for w in weights], *[Source("input", i) for i in inputs]]
    for node, source in zip(gm.graph.find_nodes(op="placeholder"), names, strict=True):
        node.meta["source"], node.meta["layer"] = source, ""
        rename(node, source.name.replace(".", "_"))
        node.meta["val"] = _concrete(node.meta["val"], keep=_free_dimension(source, node))
    output = gm.graph.output_node()
    if not isinstance(output.args[0], list | tuple):
        output.args = ((output.args[0],),)
    output.args = (tuple(output.args[0]),)
    for node in gm.graph.nodes:
        if node.op == "call_function":
            node.meta = {"layer": "conv"}
    gm.graph.eliminate_dead_code()
    infer_meta(gm)
    gm.recompile()
    return gm


def _free_dimension(source: Source, node: Any) -> int:
    """The dimension that keeps its symbol: nodes of x, edges of edge_index; none of a weight."""
    if source.kind != "input":
        return -1
    return 0 if node.meta["val"].is_floating_point() else node.meta["val"].dim() - 1


def _concrete(value: Any, keep: int) -> Any:
    """Widths are fixed; tracing made symbols of them."""
    with value.fake_mode:
        hints = [s.node.hint if isinstance(s, torch.SymInt) else s for s in value.shape]
        sizes = [s if dim == keep else hints[dim] for dim, s in enumerate(value.shape)]
        return torch.empty(sizes, dtype=value.dtype)


def rand(*shape: int, seed: int = 0) -> Tensor:
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed + sum(shape)))


def edge_list(nodes: int = NODES, edges: int = EDGES, seed: int = 0) -> Tensor:
    generator = torch.Generator().manual_seed(seed)
    return torch.randint(max(nodes, 1), (2, edges), generator=generator)


def nasty_graphs() -> dict[str, tuple[int, Tensor]]:
    """Return the number of nodes and the edges of graphs that break careless code."""
    empty = torch.empty(2, 0, dtype=torch.int64)
    loops = torch.arange(6).repeat(2, 1)
    return {
        "random": (17, edge_list(17, 50, seed=1)),
        "no edges": (7, empty),
        "one node": (1, empty),
        "one loop": (1, torch.zeros(2, 1, dtype=torch.int64)),
        "self loops and duplicates": (6, torch.cat([loops, loops, edge_list(6, 9)], 1)),
        "isolated nodes": (30, edge_list(8, 20)),
        "hub": (40, torch.stack([torch.arange(40), torch.zeros(40, dtype=torch.int64)])),
    }


def self_loops(edge_index: Tensor, weight: Tensor | None, x: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    """Source, destination and weight of all edges, loops replaced by one loop a node."""
    keep = edge_index[0] != edge_index[1]
    loop = torch.arange(x.shape[0])
    both = torch.cat([edge_index[:, keep], torch.stack([loop, loop])], 1)
    if weight is None:
        return both[0], both[1], torch.ones(both.shape[1])
    loops = torch.ones(x.shape[0])
    return both[0], both[1], torch.cat([weight[keep], loops])


def gcn_norm(x: Tensor, edge_index: Tensor, weight: Tensor | None = None) -> tuple[Tensor, ...]:
    src, dst, w = self_loops(edge_index, weight, x)
    n = x.shape[0]
    rowptr, col, perm = ops.csr(src, dst, n, n)
    deg = ops.segment_reduce(rowptr, perm, w, "sum", n)
    inv = deg.pow(-0.5)
    inv = inv.masked_fill(inv == float("inf"), 0.0)
    value = (inv[src] * w) * inv[dst]
    return rowptr, col, value.index_select(0, perm)


def gcn(width_in: int = WIDTH_IN, width_out: int = WIDTH_OUT, *, weighted: bool = False) -> GraphModule:
    def forward(weight: Tensor, bias: Tensor, x: Tensor, edge_index: Tensor, *rest: Tensor) -> Tensor:
        rowptr, col, value = gcn_norm(x, edge_index, *rest)
        h = ops.gemm(x, weight)
        return torch.relu(ops.spmm(rowptr, col, value, h, "sum", x.shape[0]) + bias)

    extra = [torch.rand(EDGES)] if weighted else []
    names = ["x", "edge_index", *(["edge_weight"] if weighted else [])]
    values = (rand(width_out, width_in), rand(width_out), rand(NODES, width_in), edge_list(), *extra)
    return trace(forward, ["lin.weight", "bias"], names, *values)


def plain_csr(x: Tensor, edge_index: Tensor) -> tuple[Tensor, Tensor]:
    rowptr, col, _ = ops.csr(edge_index[0], edge_index[1], x.shape[0], x.shape[0])
    return rowptr, col


def sage(width_in: int = WIDTH_IN, width_out: int = WIDTH_OUT, reduce: str = "mean") -> GraphModule:
    def forward(w_l: Tensor, b_l: Tensor, w_r: Tensor, x: Tensor, edge_index: Tensor) -> Tensor:
        rowptr, col = plain_csr(x, edge_index)
        mean = ops.spmm(rowptr, col, None, x, reduce, x.shape[0])
        return ops.gemm(mean, w_l, b_l) + ops.gemm(x, w_r)

    values = (rand(width_out, width_in), rand(width_out), rand(width_out, width_in, seed=9))
    names = ["lin_l.weight", "lin_l.bias", "lin_r.weight"]
    return trace(forward, names, ["x", "edge_index"], *values, rand(NODES, width_in), edge_list())


def gin(width_in: int = WIDTH_IN, width_out: int = WIDTH_OUT) -> GraphModule:
    def forward(weight: Tensor, bias: Tensor, eps: Tensor, x: Tensor, edge_index: Tensor) -> Tensor:
        rowptr, col = plain_csr(x, edge_index)
        total = ops.spmm(rowptr, col, None, x, "sum", x.shape[0]) + (eps + 1) * x
        return torch.relu(ops.gemm(total, weight, bias))

    values = (rand(width_out, width_in), rand(width_out), torch.tensor([0.3]))
    names = ["nn.weight", "nn.bias", "eps"]
    return trace(forward, names, ["x", "edge_index"], *values, rand(NODES, width_in), edge_list())


def gat(width_in: int = WIDTH_IN, heads: int = 2, depth: int = 3) -> GraphModule:
    def forward(
        weight: Tensor, att_src: Tensor, att_dst: Tensor, bias: Tensor, x: Tensor, edge_index: Tensor
    ) -> Tensor:
        n = x.shape[0]
        src, dst, _ = self_loops(edge_index, None, x)
        rowptr, col, _ = ops.csr(src, dst, n, n)
        h = ops.gemm(x, weight).view(-1, heads, depth)
        logits = ops.sddmm(rowptr, col, (h * att_dst).sum(-1), (h * att_src).sum(-1), "add")
        alpha = ops.edge_softmax(rowptr, torch.nn.functional.leaky_relu(logits, 0.2))
        out = ops.spmm(rowptr, col, alpha, h, "sum", n)
        return out.view(-1, heads * depth) + bias

    width = heads * depth
    attention = rand(1, heads, depth), rand(1, heads, depth, seed=5)
    values = (rand(width, width_in), *attention, rand(width))
    names = ["lin.weight", "att_src", "att_dst", "bias"]
    return trace(forward, names, ["x", "edge_index"], *values, rand(NODES, width_in), edge_list())


def sgc(width_in: int = WIDTH_IN, width_out: int = WIDTH_OUT, hops: int = 2) -> GraphModule:
    def forward(weight: Tensor, bias: Tensor, x: Tensor, edge_index: Tensor) -> Tensor:
        rowptr, col, value = gcn_norm(x, edge_index)
        for _ in range(hops):
            x = ops.spmm(rowptr, col, value, x, "sum", x.shape[0])
        return ops.gemm(x, weight, bias)

    values = (rand(width_out, width_in), rand(width_out), rand(NODES, width_in), edge_list())
    return trace(forward, ["lin.weight", "lin.bias"], ["x", "edge_index"], *values)


def arguments(gm: GraphModule, nodes: int, edge_index: Tensor, seed: int = 0) -> tuple[Any, ...]:
    """Return random values for every placeholder of a model, for a given graph."""
    values: list[Any] = []
    for position, node in enumerate(gm.graph.find_nodes(op="placeholder")):
        source, fake = node.meta["source"], node.meta["val"]
        if source.kind != "input":
            values.append(rand(*fake.shape, seed=position))
        elif source.name == "edge_index":
            values.append(edge_index)
        elif source.name == "edge_weight":
            values.append(rand(edge_index.shape[1], seed=seed).abs())
        else:
            values.append(rand(nodes, *fake.shape[1:], seed=seed))
    return tuple(values)


def run_split(parts: Parts, whole: GraphModule, values: Sequence[Any]) -> tuple[Any, ...]:
    """Run a program's structure and forward graph on the values of the whole graph's placeholders."""
    named = {
        node.meta["source"]: value
        for node, value in zip(whole.graph.find_nodes(op="placeholder"), values, strict=True)
    }
    structure, compute = parts.structure, parts.forward
    assert structure is not None
    outputs = structure(*(_value(node, named) for node in structure.graph.find_nodes(op="placeholder")))
    results = structure.graph.output_node().args[0]
    named |= {Source("structure", n.name): v for n, v in zip(results, outputs, strict=True)}
    return compute(*(_value(node, named) for node in compute.graph.find_nodes(op="placeholder")))


def _value(node: Any, named: dict[Source, Any]) -> Any:
    source = node.meta["source"]
    if source.kind == "constant":
        return node.meta["value"]
    if source.kind != "size":
        return named[source]
    name, dim = source.name[:-1].rsplit(".shape[", 1)
    return named[Source("input", name)].shape[int(dim)]
