r"""Measures what rounding gradients to int8 costs: errors of the sums over the transposed graph and of dW.

    python benchmarks/gradient_errors.py --out benchmarks/results/cpu-gradient-errors.json

The gradients are those of the hidden layer of a two-layer GCN at initialization, 64 columns, of cross-entropy
over all nodes: on Amazon Computers, and on a graph of ogbn-arxiv's shape, once with classes that neighbors
mostly share and features around the center of each class, once with random labels and features. Each error is
that of a matrix relative to FP32's (L2), in percent, of all rows or of the 20 rows with most edges; of
stochastic rounding also the error of the mean of all draws.
"""

import argparse
import json
import sys
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
import torch.nn.functional as F
from tabulate import tabulate
from torch import Tensor

sys.path.insert(0, str(Path(__file__).resolve().parents[1] / "tests" / "support"))

import graphs
from one_op import fused_program_of

GNNC = torch.ops.gnnc
HIDDEN, HUBS, BLOCK = 64, 20, 2048
Quantizer = Callable[[int, int], Tensor]
"""Function from a seed (below 0: to nearest) and a stream to the quantized values of a matrix, as FP32."""


@dataclass(frozen=True)
class Gradients:
    """Gradients of a GCN's hidden layer.

    Attributes:
        matrix: the graph with self loops, transposed, sparse CSR.
        x: features of the nodes.
        norm: scale of each node, of the symmetric normalization.
        sent: the gradient that edges of the transposed graph gather.
        hubs: the rows of the sum with most edges.
    """

    matrix: Tensor
    x: Tensor
    norm: Tensor
    sent: Tensor
    hubs: Tensor


def gradients(edge_index: Tensor, x: Tensor, y: Tensor) -> Gradients:
    """Return the gradients of a GCN at initialization."""
    torch.manual_seed(0)
    nodes = x.shape[0]
    edge_index = torch.cat(
        [edge_index[:, edge_index[0] != edge_index[1]], torch.arange(nodes).repeat(2, 1)], 1
    )
    norm = torch.bincount(edge_index[1], minlength=nodes).pow(-0.5)[:, None]
    forward, backward = (
        torch.sparse_coo_tensor(ends, torch.ones(ends.shape[1]), (nodes, nodes)).coalesce().to_sparse_csr()
        for ends in (edge_index.flip(0), edge_index)
    )
    classes = int(y.max()) + 1
    first, second = (
        torch.nn.init.xavier_uniform_(torch.empty(*sizes))
        for sizes in ((x.shape[1], HIDDEN), (HIDDEN, classes))
    )
    hidden = norm * (forward @ (norm * (x @ first)))
    logits = (norm * (forward @ (norm * (hidden.relu() @ second)))).requires_grad_(True)
    F.cross_entropy(logits, y).backward()
    received = norm * (backward @ (norm * logits.grad)) @ second.t() * (hidden > 0)
    degrees = torch.diff(backward.crow_indices())
    return Gradients(backward, x, norm, norm * received, degrees.topk(HUBS).indices)


def quantizer(x: Tensor, granularity: str, *, stochastic: bool) -> Quantizer:
    """Return the quantizer of a matrix, which runs the kernels of the CPU backend."""
    qtype = f"int8/{granularity}"

    def quantize(x: Tensor, seed: Tensor) -> tuple[Tensor, ...]:
        rows = x * 1.0
        scale = GNNC.scale(rows, qtype)
        rounding = (seed, 1) if stochastic else ()
        if granularity != "row_pow2":
            return GNNC.quantize(rows, scale, qtype, None, *rounding), scale
        shift = GNNC.row_shift(rows, scale, qtype)
        return GNNC.quantize(rows, scale, qtype, shift, *rounding), GNNC.row_scale(scale, shift), rows

    program = fused_program_of(quantize, x, torch.tensor(0), backend="cpu")

    def run(seed: int, stream: int) -> Tensor:
        values, scale = program(x, torch.tensor(seed * 2 + stream))[:2]
        return values.float() * (scale if scale.dim() == 0 else scale[:, None])

    return run


def error(found: Tensor, right: Tensor) -> float:
    """Return the error of a matrix relative to the right one."""
    return float((found - right).norm() / right.norm())


def measure(g: Gradients, granularity: str, draws: int) -> dict[str, float]:
    """Return the errors under one rule; ``draws`` of 0: rounded to nearest."""
    total = g.matrix @ g.sent
    passed = g.norm * total
    weight = g.x.t() @ passed
    sent, given = (quantizer(rows, granularity, stochastic=draws > 0) for rows in (g.sent, passed))
    right = {"sum": total, "hubs": total[g.hubs], "dW": weight}
    single = dict.fromkeys(right, 0.0)
    means = {name: torch.zeros_like(value) for name, value in right.items()}
    count = max(draws, 1)
    for draw in range(count):
        found = g.matrix @ sent(draw, 0)
        values = {"sum": found, "hubs": found[g.hubs], "dW": g.x.t() @ given(draw, 1)}
        for name, value in values.items():
            single[name] += error(value, right[name]) / count
            means[name] += value / count
    errors = {name: 100 * value for name, value in single.items()}
    if draws > 0:
        errors |= {f"mean {name}": 100 * error(means[name], right[name]) for name in right}
    return errors


def cases(names: list[str]) -> dict[str, Gradients]:
    """Return the gradients of each graph."""
    found = {}
    if "computers" in names:
        data: dict[str, Any] = graphs.load("amazon_computers")
        found["Computers"] = gradients(data["edge_index"].long(), data["x"].float(), data["y"].long())
    shape, generator = graphs.SHAPES["arxiv"], torch.Generator().manual_seed(0)
    nodes = shape.nodes
    noise = torch.randn(nodes, shape.features, generator=generator)
    if "arxiv" in names:  # most edges join nodes of one block of ids
        labels = torch.arange(nodes) // BLOCK % shape.classes
        centers = torch.randn(shape.classes, shape.features, generator=generator)
        found["arxiv shape"] = gradients(graphs.generate("arxiv").long(), noise + centers[labels], labels)
    if "random" in names:
        labels = torch.randint(shape.classes, (nodes,), generator=generator)
        found["arxiv shape, random labels"] = gradients(graphs.generate("arxiv").long(), noise, labels)
    return found


def main() -> None:
    """Measure, print a table, and write it as JSON."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--graphs", nargs="+", default=["computers", "arxiv", "random"])
    parser.add_argument("--draws", type=int, default=64)
    parser.add_argument("--out", type=Path)
    options = parser.parse_args()
    rows = []
    for name, case in cases(options.graphs).items():
        for granularity in ("row_pow2", "row", "tensor"):
            for draws in (0, options.draws):
                rounding = "stochastic" if draws else "nearest"
                errors = measure(case, granularity, draws)
                rows.append({"graph": name, "scales": granularity, "rounding": rounding, **errors})
                print(rows[-1], file=sys.stderr, flush=True)
    print(tabulate(rows, headers="keys", tablefmt="github", floatfmt=".3g"))
    if options.out is not None:
        options.out.write_text(json.dumps({"draws": options.draws, "percent": rows}, indent=1) + "\n")


if __name__ == "__main__":
    main()
