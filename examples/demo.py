"""Train a GCN and a GAT on Cora in plain PyG, compile each to int8, and compare.

Run it by ``make demo``. It uses the CPU only and the copy of Cora that comes with the tests.
"""

import sys
import warnings
from collections.abc import Callable
from pathlib import Path

import torch
from tabulate import tabulate
from torch import Tensor, nn
from tqdm import tqdm

import gnnc

sys.path.insert(0, str(Path(__file__).resolve().parent.parent / "tests" / "support"))

import graphs
import measure
import models

EPOCHS = 100


def trained(name: str, data: dict[str, Tensor | int]) -> nn.Module:
    """Return the model ``name`` trained on ``data``, with a progress bar."""
    torch.manual_seed(0)
    x, classes = data["x"], data["num_classes"]
    assert isinstance(x, Tensor) and isinstance(classes, int)
    model = models.MODELS[name](x.shape[1], classes)
    keys = ("x", "edge_index", "y", "train_mask", "val_mask")
    tensors = [value for key in keys if isinstance(value := data[key], Tensor)]
    with tqdm(total=EPOCHS, desc=f"training {name.upper()} in PyG", unit="epoch") as bar:
        models.train(model, *tensors, epochs=EPOCHS, progress=lambda epoch: bar.update())
    return model


def measured(
    name: str, contender: str, model: nn.Module, data: dict[str, Tensor], eager_ms: float | None
) -> list[str]:
    """Return one line of the table."""
    x, edge_index = data["x"], data["edge_index"]
    score = models.accuracy(model, x, edge_index, data["y"], data["test_mask"])
    with torch.no_grad():
        call: Callable[[Tensor], Tensor] = lambda fresh: model(fresh, edge_index)  # noqa: E731
        timing = measure.median_ms_in_turns({contender: call}, x, repeats=30, warmup=5)
        ms = timing[contender]["median"]
        if isinstance(model, gnnc.CompiledModel):
            model.clear_cache()  # its buffers and its copy of the graph count
        peak = measure.peak_rss_mb(lambda: call(x))
    speedup = "1.0x" if eager_ms is None else f"{eager_ms / ms:.1f}x"
    return [name.upper(), contender, f"{score:.1f}%", f"{ms:.2f}", f"{peak:.1f}", speedup]


def main() -> None:
    warnings.filterwarnings("ignore", category=UserWarning, module="torch")
    data = graphs.load("cora")
    lines = []
    for name in ("gcn", "gat"):
        model = trained(name, data)
        fast = gnnc.compile(model, precision="int8")
        eager = measured(name, "PyG eager, fp32", model, data, None)
        lines.append(eager)
        compiled = torch.compile(model)
        lines.append(measured(name, "torch.compile, fp32", compiled, data, float(eager[3])))
        lines.append(measured(name, "gnnc, int8", fast, data, float(eager[3])))
        if name == "gcn":
            print("\nThe GCN as gnnc runs it:\n")
            print(fast)
            print()
    headers = ["model", "run by", "test accuracy", "ms a call", "peak MB a call", "speed-up"]
    print()
    print(tabulate(lines, headers, tablefmt="github", disable_numparse=True))
    print("\nfast.explain() says what was and was not quantized, and why.")


if __name__ == "__main__":
    main()
