"""Draw accuracy against time of a GCN and a GAT on Cora: one precision for all beside ``auto``.

    python examples/pareto.py docs/pareto.svg

It trains both in plain PyG and measures them on the CPU, on the copy of Cora that comes with the tests.
"""

import sys
import warnings
from pathlib import Path

import torch
from torch import Tensor

import gnnc
from gnnc import plotting

sys.path.insert(0, str(Path(__file__).resolve().parent.parent / "tests" / "support"))

import graphs
import models

EPOCHS = 100


def measured(name: str, data: dict[str, Tensor | int]) -> gnnc.Pareto:
    """Return the points of one model, with accuracy on the test nodes."""
    torch.manual_seed(0)
    x, edge_index, y, classes = data["x"], data["edge_index"], data["y"], data["num_classes"]
    assert isinstance(x, Tensor) and isinstance(edge_index, Tensor) and isinstance(y, Tensor)
    model = models.MODELS[name](x.shape[1], classes)
    models.train(model, x, edge_index, y, data["train_mask"], data["val_mask"], epochs=EPOCHS)
    labels = torch.where(torch.as_tensor(data["test_mask"]), y, -1)
    found = gnnc.pareto(model.requires_grad_(False), x, edge_index, labels=labels)
    return gnnc.Pareto(f"{name.upper()} on Cora", found.points)


def main() -> None:
    """Measure both and draw them side by side."""
    warnings.filterwarnings("ignore", category=UserWarning, module="torch")
    path = sys.argv[1] if len(sys.argv) > 1 else "pareto.svg"
    results = [measured(name, graphs.load("cora")) for name in ("gcn", "gat")]
    for result in results:
        for point in result.points:
            print(
                f"{result.model}, {point.name}: {point.seconds * 1e3:.2f} ms, {point.accuracy:.1f}%, "
                f"error {point.error:.4f}"
            )
    plotting.draw(results, path)


if __name__ == "__main__":
    main()
