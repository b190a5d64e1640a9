"""Draw accuracy against time of a GCN and a GAT on Cora: one precision for all beside ``auto``.

    python examples/pareto.py docs/pareto.svg

It trains both in plain PyG and measures them on the CPU, on the copy of Cora that comes with the tests.
"""

import sys
import warnings
from collections.abc import Callable

import cora
import torch
from torch_geometric.data import Data

import gnnc
from gnnc.pareto import draw


def measured(name: str, make: Callable[[], torch.nn.Module], data: Data) -> gnnc.Pareto:
    """Return the points of one model, with its accuracy on the test nodes."""
    torch.manual_seed(0)
    model = cora.train(make(), data, name).requires_grad_(False)
    labels = torch.where(data.test_mask, data.y, -1)
    found = gnnc.pareto(model, data.x, data.edge_index, labels=labels)
    return gnnc.Pareto(f"{name} on Cora", found.points)


def main() -> None:
    """Measure both and draw them side by side."""
    warnings.filterwarnings("ignore", category=UserWarning, module="torch")
    path = sys.argv[1] if len(sys.argv) > 1 else "pareto.svg"
    data = cora.load()
    results = [measured("GCN", cora.gcn, data), measured("GAT", cora.gat, data)]
    for result in results:
        for point in result.points:
            print(
                f"{result.model}, {point.name}: {point.seconds * 1e3:.2f} ms, {point.accuracy:.1f}%, "
                f"error {point.error:.4f}"
            )
    draw(results, path)


if __name__ == "__main__":
    main()
