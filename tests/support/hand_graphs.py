"""Small programs over the primitives, built by hand: tests of printing and reports start here."""

import operator
import re
from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch._dynamo.source import ConstantSource
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.fx import Graph, GraphModule, Node
from torch.fx.experimental.symbolic_shapes import DimDynamic, ShapeEnv

from gnnc.ir.graph import qtype_rule, set_qtype
from gnnc.ir.qtype import QType
from gnnc.ir.source import Source

gnnc = torch.ops.gnnc
aten = torch.ops.aten


class Builder:
    """Adds nodes to a graph and gives each the ``val`` and ``layer`` that a captured one has."""

    device = "cpu"
    """Device of the values of a program; the machine that builds it need not have it."""

    def __init__(self, parent: "Builder | None" = None) -> None:
        self.graph = Graph()
        self.mode = parent.mode if parent else FakeTensorMode(shape_env=ShapeEnv())
        self.layer = parent.layer if parent else ""
        self._modules = torch.nn.Module()

    def size(self, name: str, hint: int) -> torch.SymInt:
        """Return a new size symbol."""
        env, source = self.mode.shape_env, ConstantSource(name)
        symbol = env.create_symbol(hint, source, dynamic_dim=DimDynamic.DYNAMIC)
        return env.create_symintnode(symbol, hint=hint, source=source)

    def input(
        self,
        name: str,
        shape: Sequence[Any],
        *,
        dtype: torch.dtype = torch.float32,
        kind: str = "input",
        qtype: str | None = None,
    ) -> Node:
        """Add a placeholder; of quantized values where it has a ``qtype``, which is its dtype too."""
        dtype = dtype if qtype is None else QType.parse(qtype).dtype
        node = self.graph.placeholder(re.sub(r"\W", "_", f"in_{name}"))
        with self.mode:
            node.meta["val"] = torch.empty(tuple(shape), dtype=dtype, device=self.device)
        node.meta |= {"source": Source(kind, name), "layer": ""}
        if kind == "constant":
            node.meta["value"] = torch.full(tuple(shape), 0.05, dtype=dtype)
        set_qtype(node, None if qtype is None else QType.parse(qtype))
        return node

    def parameter(self, name: str, *shape: int) -> Node:
        """Add a parameter."""
        return self.input(name, shape, kind="parameter")

    def like(self, node: Node) -> Node:
        """Add a placeholder of a fused submodule that stands for ``node``."""
        copied = self.graph.placeholder(node.name)
        copied.meta["val"] = node.meta["val"]
        set_qtype(copied, node.meta.get("qtype"))
        return copied

    def call(self, target: Callable[..., Any], *args: Any, **kwargs: Any) -> Node:
        """Add a call."""
        if isinstance(target, torch._ops.OpOverloadPacket):
            target = target.default
        node = self.graph.call_function(target, args, kwargs)
        with self.mode:
            node.meta["val"] = target(*torch.fx.node.map_arg(args, lambda n: n.meta["val"]), **kwargs)
        node.meta["layer"] = self.layer
        set_qtype(node, qtype_rule(self._modules, node))
        return node

    def parts(self, node: Node) -> list[Node]:
        """Take a tuple apart."""
        return [self.call(operator.getitem, node, i) for i in range(len(node.meta["val"]))]

    def fused(self, name: str, kind: str, inner: GraphModule, *args: Node) -> Node:
        """Add a call of a fused submodule."""
        self._modules.add_module(name, inner)
        self.graph._owning_module = self._modules
        node = self.graph.call_module(name, args)
        output = next(iter(reversed(inner.graph.nodes))).args[0]
        node.meta["val"] = torch.fx.node.map_arg(output, lambda n: n.meta["val"])
        node.meta |= {"layer": self.layer, "fused": True, "kind": kind}
        set_qtype(node, qtype_rule(self._modules, node))
        return node

    def finish(self, *outputs: Node) -> GraphModule:
        """Close the graph: a tuple of outputs."""
        self.graph.output(tuple(outputs))
        return GraphModule(self._modules, self.graph)

    def finish_single(self, output: Node) -> GraphModule:
        """Close the graph of a submodule with one result."""
        self.graph.output(output)
        return GraphModule(self._modules, self.graph)


def structure() -> GraphModule:
    """CSR and normalization of a graph, as hoist leaves them."""
    b = Builder()
    n, e = b.size("n", 5), b.size("e", 12)
    edge_index = b.input("edge_index", (2, e), dtype=torch.int64)
    nodes = b.input("x.shape[0]", (), kind="size")
    nodes.meta["val"] = n
    src = b.call(aten.select.int, edge_index, 0, 0)
    dst = b.call(aten.select.int, edge_index, 0, 1)
    rowptr, col, _ = b.parts(b.call(gnnc.csr, src, dst, nodes, nodes))
    degree = b.call(gnnc.degree, rowptr)
    norm = b.call(aten.pow.Tensor_Scalar, degree, -0.5)
    return b.finish(rowptr, col, norm)


def _operands(b: Builder) -> tuple[Node, ...]:
    n, e = b.size("n", 5), b.size("e", 12)
    x = b.input("x", (n, 16))
    rowptr = b.input("getitem", (n + 1,), dtype=torch.int64, kind="structure")
    col = b.input("getitem_1", (e,), dtype=torch.int32, kind="structure")
    norm = b.input("pow_tensor_scalar", (n,), kind="structure")
    return (
        x,
        rowptr,
        col,
        norm,
        b.parameter("conv1.lin.weight", 8, 16),
        b.parameter("conv1.bias", 8),
    )


def float_layer() -> GraphModule:
    """Return one GCN layer in FP32, separable weights folded out of the SpMM."""
    b = Builder()
    x, rowptr, col, norm, weight, bias = _operands(b)
    nodes = b.call(aten.sym_size.int, x, 0)
    b.layer = "conv1.lin"
    h = b.call(gnnc.gemm, x, weight, None, False)
    b.layer = "conv1"
    scaled = b.call(aten.mul.Tensor, h, b.call(aten.unsqueeze.default, norm, 1))
    y = b.call(gnnc.spmm, rowptr, col, None, scaled, "sum", nodes)
    y = b.call(aten.add.Tensor, y, bias)
    return b.finish(b.call(aten.relu.default, y))


def quantized_layer() -> GraphModule:
    """The same layer in int8, static power-of-two row scales in the SpMM."""
    b = Builder()
    x, rowptr, col, _, weight, bias = _operands(b)
    base = b.input("h_base", (), kind="constant")
    nodes = b.call(aten.sym_size.int, x, 0)
    b.layer = "conv1.lin"
    h = _int8_gemm(b, x, weight)
    b.layer = "conv1"
    shift = b.call(gnnc.row_shift, h, base, "int8/row_pow2")
    quantized = b.call(gnnc.quantize, h, base, "int8/row_pow2", shift)
    acc = b.call(gnnc.qspmm, rowptr, col, None, quantized, None, shift, "sum", nodes)
    y = b.call(gnnc.dequantize, acc, base, "tensor", -7)
    return b.finish(b.call(aten.relu.default, b.call(aten.add.Tensor, y, bias)))


def _int8_gemm(b: Builder, x: Node, weight: Node) -> Node:
    x_scale, w_scale = b.call(gnnc.scale, x, "int8/row"), b.call(gnnc.scale, weight, "int8/row")
    x_quantized = b.call(gnnc.quantize, x, x_scale, "int8/row")
    w_quantized = b.call(gnnc.quantize, weight, w_scale, "int8/row")
    acc = b.call(gnnc.qgemm, x_quantized, w_quantized)
    return b.call(gnnc.dequantize, b.call(gnnc.dequantize, acc, x_scale, "row"), w_scale, "column")


def fused_layer() -> GraphModule:
    """The same layer in int8, as fuse leaves it: two kernels."""
    b = Builder()
    x, rowptr, col, _, weight, bias = _operands(b)
    base = b.input("h_base", (), kind="constant")
    nodes = b.call(aten.sym_size.int, x, 0)
    b.layer = "conv1.lin"
    first = b.fused("fused_0", "gemm", _fused_gemm(b, x, weight, base), x, weight, base)
    quantized, shift = b.parts(first)
    b.layer = "conv1"
    inner = _fused_spmm(b, rowptr, col, quantized, shift, nodes, base, bias)
    y = b.fused("fused_1", "spmm", inner, rowptr, col, quantized, shift, nodes, base, bias)
    return b.finish(y)


def _fused_gemm(outer: Builder, *args: Node) -> GraphModule:
    b = Builder(outer)
    x, weight, base = (b.like(node) for node in args)
    h = _int8_gemm(b, x, weight)
    shift = b.call(gnnc.row_shift, h, base, "int8/row_pow2")
    return b.finish(b.call(gnnc.quantize, h, base, "int8/row_pow2", shift), shift)


def _fused_spmm(outer: Builder, *args: Node) -> GraphModule:
    b = Builder(outer)
    rowptr, col, quantized, shift, nodes, base, bias = (b.like(node) for node in args)
    acc = b.call(gnnc.qspmm, rowptr, col, None, quantized, None, shift, "sum", nodes)
    y = b.call(gnnc.dequantize, acc, base, "tensor", -7)
    return b.finish_single(b.call(aten.relu.default, b.call(aten.add.Tensor, y, bias)))


def attention_layer() -> GraphModule:
    """Return GAT's logits, softmax and aggregation: ops that always stay FP32."""
    b = Builder()
    x, rowptr, col, _, weight, _ = _operands(b)
    nodes = b.call(aten.sym_size.int, x, 0)
    b.layer = "conv1"
    h = b.call(gnnc.gemm, x, weight, None, False)
    heads = b.call(aten.view.default, h, [-1, 2, 4])
    att = b.parameter("conv1.att_src", 1, 2, 4)
    a = b.call(aten.sum.dim_IntList, b.call(aten.mul.Tensor, heads, att), [-1])
    logits = b.call(gnnc.sddmm, rowptr, col, a, a, "add")
    alpha = b.call(gnnc.edge_softmax, rowptr, b.call(aten.leaky_relu.default, logits, 0.2))
    return b.finish(b.call(gnnc.spmm, rowptr, col, alpha, heads, "sum", nodes))


def values(gm: GraphModule, seed: int = 0) -> list[Any]:
    """Return real arguments for a hand-built layer: 5 nodes, 12 edges, one node without edges."""
    generator = torch.Generator().manual_seed(seed)
    src = torch.randint(0, 5, (12,), generator=generator)
    dst = torch.randint(0, 4, (12,), generator=generator)
    rowptr, col, _ = gnnc.csr(src, dst, 5, 5)
    known = {
        "edge_index": torch.stack([src, dst]),
        "x.shape[0]": 5,
        "getitem": rowptr,
        "getitem_1": col,
        "pow_tensor_scalar": torch.rand(5, generator=generator) + 0.5,
        "h_base": torch.tensor(0.05),
    }
    result: list[Any] = []
    for node in gm.graph.find_nodes(op="placeholder"):
        shape = [int(s) if isinstance(s, int) else 5 for s in getattr(node.meta["val"], "shape", ())]
        name = node.meta["source"].name
        result.append(known.get(name, torch.randn(shape, generator=generator)))
    return result


def message_layer() -> GraphModule:
    """Return an edge-wise gate, ``relu(x_i + x_j) * x_j``, summed: a body of no known form."""
    b = Builder()
    x, rowptr, col, *_ = _operands(b)
    nodes = b.call(aten.sym_size.int, x, 0)
    body = "t0 = aten.add.Tensor(i0, j0); t1 = aten.relu.default(t0); t2 = aten.mul.Tensor(t1, j0); return t2"
    b.layer = "gate"
    return b.finish(b.call(gnnc.message, rowptr, col, body, "sum", [x], [x], [], [], nodes))


LAYERS = (float_layer, quantized_layer, fused_layer, attention_layer, message_layer)
