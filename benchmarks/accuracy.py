"""Measures the accuracy of compiled models on real graphs: trained by PyG in FP32, then compiled.

    python benchmarks/accuracy.py --out benchmarks/results/accuracy.json

For each data set, model and seed: test accuracy in FP32 (PyG), int8 and bf16 (gnnc), and the share
of nodes whose predicted class is the same; also by quartile of degree, and with 1% isolated nodes
added to the graph.
"""

import argparse
import json
import sys
from pathlib import Path
from typing import Any

import torch
from tabulate import tabulate
from torch import Tensor, nn
from torch_geometric.utils import degree

import gnnc

sys.path.insert(0, str(Path(__file__).resolve().parents[1] / "tests" / "support"))

import graphs
import measure
import models

DATASETS = ("cora", "pubmed", "amazon_computers", "coauthor_cs")
EPOCHS = 100
PRECISIONS = ("int8", "bf16")


def dataset(name: str) -> dict[str, Any]:
    """Return a graph; the features of Amazon Computers are standardized."""
    return graphs.load(name, standardize=name == "amazon_computers")


def trained(
    name: str, model_name: str, data: dict[str, Any], seed: int, folder: Path | None, device: str
) -> nn.Module:
    """Return a trained model on the CPU, loaded from ``folder`` if it is there."""
    torch.manual_seed(seed)
    model = models.MODELS[model_name](data["x"].shape[1], data["num_classes"])
    path = folder / f"{name}-{model_name}-{seed}.pt" if folder else None
    if path is not None and path.exists():
        model.load_state_dict(torch.load(path))
        return model.eval()
    keys = ("x", "edge_index", "y", "train_mask", "val_mask")
    models.train(model.to(device), *(data[key].to(device) for key in keys), epochs=EPOCHS)
    model.cpu()
    if path is not None:
        path.parent.mkdir(parents=True, exist_ok=True)
        torch.save(model.state_dict(), path)
    return model


def with_isolated(x: Tensor, share: float = 0.01) -> Tensor:
    """Append nodes without edges, with features of random other nodes."""
    count = int(x.shape[0] * share)
    picked = torch.randint(x.shape[0], (count,), generator=torch.Generator().manual_seed(0))
    return torch.cat([x, x[picked]])


@torch.no_grad()
def compare(model: nn.Module, data: dict[str, Any], precision: str) -> dict[str, Any]:
    """Return accuracies in percent, and agreements as shares of nodes."""
    x, edge_index, mask = data["x"], data["edge_index"], data["test_mask"]
    fast = gnnc.compile(model, precision=precision)
    expected, got = model(x, edge_index), fast(x, edge_index)
    agree = expected.argmax(-1) == got.argmax(-1)
    hits = (got.argmax(-1) == data["y"])[mask], (expected.argmax(-1) == data["y"])[mask]
    order = degree(edge_index[1], x.shape[0]).argsort(stable=True)
    more = with_isolated(x)
    isolated = model(more, edge_index).argmax(-1) == fast(more, edge_index).argmax(-1)
    return {
        "accuracy": 100 * hits[0].float().mean().item(),
        "accuracy_fp32": 100 * hits[1].float().mean().item(),
        "agreement": agree.float().mean().item(),
        "agreement_by_degree_quartile": [q.float().mean().item() for q in agree[order].chunk(4)],
        "agreement_with_isolated": isolated.float().mean().item(),
        "relative_error": ((got - expected).norm() / expected.norm()).item(),
    }


def summarize(runs: list[dict[str, Any]]) -> list[list[str]]:
    """Return one line for each data set, model and precision."""
    lines = []
    for key in dict.fromkeys((r["dataset"], r["model"], r["precision"]) for r in runs):
        group = [r for r in runs if (r["dataset"], r["model"], r["precision"]) == key]
        deltas = [r["accuracy"] - r["accuracy_fp32"] for r in group]
        fp32 = sum(r["accuracy_fp32"] for r in group) / len(group)
        quartiles = [min(r["agreement_by_degree_quartile"][q] for r in group) for q in range(4)]
        lines.append(
            [*key, f"{fp32:.2f}", f"{sum(deltas) / len(deltas):+.2f}", f"{min(deltas):+.2f}"]
            + [f"{100 * min(r[k] for r in group):.2f}" for k in ("agreement", "agreement_with_isolated")]
            + ["/".join(f"{100 * q:.1f}" for q in quartiles)]
        )
    return lines


def main() -> None:
    """Run the benchmark of the command line."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--datasets", nargs="*", default=DATASETS)
    parser.add_argument("--models", nargs="*", default=tuple(models.MODELS))
    parser.add_argument("--seeds", type=int, default=5)
    parser.add_argument("--checkpoints", type=Path, help="folder to keep trained models in")
    default = "cuda" if torch.cuda.is_available() else "cpu"
    parser.add_argument("--device", default=default, help="where models are trained; they run on the CPU")
    parser.add_argument("--out", type=Path)
    args = parser.parse_args()
    runs = []
    for name in args.datasets:
        data = dataset(name)
        for model_name in args.models:
            for seed in range(args.seeds):
                model = trained(name, model_name, data, seed, args.checkpoints, args.device)
                for precision in PRECISIONS:
                    labels = {"dataset": name, "model": model_name, "seed": seed}
                    run = labels | {"precision": precision} | compare(model, data, precision)
                    runs.append(run)
            print(name, model_name, "done", file=sys.stderr, flush=True)
    headers = ["data", "model", "precision", "fp32 %", "mean change", "worst change"]
    headers += ["least agreement %", "with isolated", "by degree quartile"]
    print(tabulate(summarize(runs), headers, tablefmt="github", disable_numparse=True))
    if args.out:
        args.out.parent.mkdir(parents=True, exist_ok=True)
        args.out.write_text(json.dumps({"machine": measure.machine(), "runs": runs}, indent=1) + "\n")


if __name__ == "__main__":
    main()
