"""Small graph networks, written as primitives, in which calibration times the kernels."""

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor
from torch.fx import Graph, GraphModule, Node
from torch.fx.node import map_arg

from gnnc.ir.source import Source
from gnnc.torch_private import ConstantSource, DimDynamic, FakeTensorMode, ShapeEnv

_ops = torch.ops.gnnc
_aten = torch.ops.aten

CPU = torch.device("cpu")

EXAMPLE = (64, 512)
"""Nodes and edges of the graph that static scales of a probe come from."""


@dataclass(frozen=True, slots=True)
class Probe:
    """Graph network for calibration.

    Attributes:
        name: name in messages.
        width: columns of x.
        weights: shapes of its parameters, by name.
        body: writes the network and returns its results.
        every_option: whether it runs in every granularity, or else once in each precision.
    """

    name: str
    width: int
    weights: dict[str, tuple[int, ...]]
    body: Callable[["Writer"], list[Node]]
    every_option: bool = False

    @property
    def names(self) -> tuple[str, ...]:
        """Return the names of its arguments, in order."""
        return ("x", "rowptr", "col", "norm", *self.weights)

    def build(self, device: torch.device = CPU) -> tuple[GraphModule, tuple[Any, ...]]:
        """Return its graph and example values of the arguments, on a device."""
        writer = Writer(self, device)
        return writer.finish(self.body(writer)), values_of(self, *EXAMPLE, device)


class Writer:
    """Writer of primitives into a graph with symbolic numbers of nodes and edges, on a device."""

    def __init__(self, probe: Probe, device: torch.device) -> None:
        self.graph = Graph()
        self._device = device
        self.mode = FakeTensorMode(shape_env=ShapeEnv())
        n, e = self._size("n", EXAMPLE[0]), self._size("e", EXAMPLE[1])
        self.x = self._input("x", "input", (n, probe.width))
        self.rowptr = self._input("rowptr", "structure", (n + 1,), torch.int64)
        self.col = self._input("col", "structure", (e,), torch.int32)
        norm = self._input("norm", "structure", (n,))
        self.weights = {name: self._input(name, "parameter", shape) for name, shape in probe.weights.items()}
        self.nodes = self.call(_aten.sym_size.int, self.x, 0)
        self.norm = self.call(_aten.unsqueeze.default, norm, 1)

    def _size(self, name: str, hint: int) -> torch.SymInt:
        env, source = self.mode.shape_env, ConstantSource(name)
        assert env is not None
        symbol = env.create_symbol(hint, source, dynamic_dim=DimDynamic.DYNAMIC)
        size = env.create_symintnode(symbol, hint=hint, source=source)
        assert isinstance(size, torch.SymInt)
        return size

    def _input(self, name: str, kind: Any, shape: Any, dtype: torch.dtype = torch.float32) -> Node:
        node = self.graph.placeholder(name)
        with self.mode:
            node.meta["val"] = torch.empty(shape, dtype=dtype, device=self._device)
        node.meta |= {"source": Source(kind, name), "layer": ""}
        return node

    def call(self, target: Any, *args: Any) -> Node:
        """Add a call of an op."""
        node = self.graph.call_function(target, args)
        with self.mode:
            node.meta["val"] = target(*map_arg(args, lambda n: n.meta["val"]))
        node.meta["layer"] = ""
        return node

    def linear(self, x: Node, name: str) -> Node:
        """Add a linear layer without bias, ``x @ w.T``."""
        return self.call(_ops.gemm.default, x, self.weights[name], None, False)

    def spmm(self, x: Node, value: Node | None = None) -> Node:
        """Add a sum over incoming edges."""
        return self.call(_ops.spmm.default, self.rowptr, self.col, value, x, "sum", self.nodes)

    def scaled(self, x: Node) -> Node:
        """Add a multiplication by one factor per row."""
        return self.call(_aten.mul.Tensor, x, self.norm)

    def add(self, x: Node, y: Node) -> Node:
        """Add a sum of two tensors."""
        return self.call(_aten.add.Tensor, x, y)

    def relu(self, x: Node) -> Node:
        """Write max(x, 0)."""
        return self.call(_aten.relu.default, x)

    def finish(self, results: list[Node]) -> GraphModule:
        """Add the output and return the graph."""
        self.graph.output(tuple(results))
        return GraphModule(torch.nn.Module(), self.graph)


def _convolutions(w: Writer) -> list[Node]:
    """Write two graph convolutions, a residual sum and a third, narrow convolution."""
    h = w.relu(w.add(w.scaled(w.spmm(w.scaled(w.linear(w.x, "first")))), w.weights["bias"]))
    g = w.relu(w.scaled(w.spmm(w.scaled(w.linear(h, "second")))))
    g = w.add(g, h)
    return [w.scaled(w.spmm(w.scaled(w.linear(g, "third"))))]


def _two_readers(w: Writer) -> list[Node]:
    """Write two linear layers of one input, as in GraphSAGE, twice."""
    own, near = w.linear(w.x, "own"), w.scaled(w.spmm(w.linear(w.x, "near")))
    h = w.relu(w.add(near, own))
    last = w.add(w.scaled(w.spmm(w.linear(h, "near2"))), w.linear(h, "own2"))
    return [w.call(_aten.log_softmax.int, last, -1)]


def _attention(w: Writer) -> list[Node]:
    """Write attention with four heads as one op, and attention with one head op by op."""
    h = w.call(_aten.view.default, w.linear(w.x, "first"), [-1, 4, 16])
    h = w.spmm(h, _weights(w, h, "att_src", "att_dst"))
    h = w.call(_aten.elu.default, w.call(_aten.view.default, h, [-1, 64]))
    g = w.call(_aten.view.default, w.linear(h, "second"), [-1, 1, 10])
    ends = [
        w.call(_aten.sum.dim_IntList, w.call(_aten.mul.Tensor, g, w.weights[a]), [-1]) for a in ("a", "b")
    ]
    logits = w.call(_ops.sddmm.default, w.rowptr, w.col, ends[0], ends[1], "add")
    alpha = w.call(_ops.edge_softmax.default, w.rowptr, w.call(_aten.leaky_relu.default, logits, 0.2))
    # A factor on the weights, as dropout leaves it, keeps the ops apart.
    return [w.spmm(g, w.call(_aten.mul.Tensor, alpha, 0.5))]


def _weights(w: Writer, h: Node, *names: str) -> Node:
    src, dst = (
        w.call(_aten.sum.dim_IntList, w.call(_aten.mul.Tensor, h, w.weights[name]), [-1]) for name in names
    )
    logits = w.call(_ops.sddmm.default, w.rowptr, w.col, dst, src, "add")
    return w.call(_ops.edge_softmax.default, w.rowptr, w.call(_aten.leaky_relu.default, logits, 0.2))


PROBES = (
    Probe(
        "convolutions", 128, {"first": (64, 128), "bias": (64,), "second": (64, 64), "third": (8, 64)},
        _convolutions, every_option=True,
    ),
    Probe(
        "wide input", 768, {"own": (64, 768), "near": (64, 768), "near2": (40, 64), "own2": (40, 64)},
        _two_readers,
    ),
    Probe(
        "attention", 64,
        {"first": (64, 64), "att_src": (1, 4, 16), "att_dst": (1, 4, 16), "second": (10, 64),
         "a": (1, 1, 10), "b": (1, 1, 10)},
        _attention,
    ),
)  # fmt: skip
"""Together they hold every kernel family, wide and narrow rows, and what fuses around them."""


def values_of(probe: Probe, nodes: int, edges: int, device: torch.device = CPU) -> tuple[Tensor, ...]:
    """Return arguments for a graph of some size; the same each time on one kind of device."""
    generator = torch.Generator(device).manual_seed(0)

    def normal(*shape: int) -> Tensor:
        return torch.randn(shape, generator=generator, device=device)

    x = normal(nodes, probe.width)
    weights = [normal(*shape) / shape[-1] ** 0.5 for shape in probe.weights.values()]
    return (x, *_graph(nodes, edges, device), *weights)


def _graph(nodes: int, edges: int, device: torch.device) -> tuple[Tensor, Tensor, Tensor]:
    """Return a graph with skewed degrees; four of five edges stay within blocks of 2048 ids."""
    generator = torch.Generator(device).manual_seed(0)
    place, near, far, local = torch.rand(4, edges, generator=generator, device=device)
    order = torch.randperm(nodes, generator=generator, device=device)
    dst = order[(place**1.7 * nodes).long().clamp(max=nodes - 1)]
    block = dst // 2048 * 2048
    close = block + (near * (nodes - block).clamp(max=2048)).long()
    src = torch.where(local < 0.8, close, (far * nodes).long().clamp(max=nodes - 1))
    rowptr, col, _ = _ops.csr(src, dst, nodes, nodes)
    return rowptr, col, (rowptr.diff() + 1).float().rsqrt()
